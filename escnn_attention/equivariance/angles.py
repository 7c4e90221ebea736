r"""Equivariance against the angle, finer than the group.

A network is exact for the elements of its group that map the grid onto itself, and for no other angles: there are no
poses between the elements, and a grid is not the plane. This module measures the error at other angles.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from escnn.nn import EquivariantModule, FieldType, GeometricTensor
from scipy import ndimage
from torch import Tensor

from escnn_attention._checks import check_int
from escnn_attention.equivariance.inspection import evaluating, find_layer, gspace_of, watch
from escnn_attention.groups.fibers import Fibers, fibers, is_pointwise

DISC = 0.8  # of half the grid: every rotation keeps this disc on the grid, with some margin

_IMAGES = 4


@dataclass(frozen=True)
class EquivarianceErrors:
    """Relative errors against the angle by which the input is rotated.

    Attributes:
        angles: ``(A,)`` degrees, ascending.
        errors: by the name of each model, ``(A,)``.
        interpolation: ``(A,)``; the error of an image that is rotated and rotated back by interpolation, and goes
            through no model.
        rotations: by the name of each model, the angles of the rotations in its group, in degrees; none where it has no
            group.

    Example:
        >>> from escnn_attention import LiftingSelfAttention
        >>> from escnn_attention.equivariance import equivariance_errors
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> image, hidden = nn.FieldType(g, [g.trivial_repr]), nn.FieldType(g, [g.regular_repr])
        >>> layer = LiftingSelfAttention(image, hidden, kernel_size=3)
        >>> found = equivariance_errors({"lifting": layer}, angles=[0, 30, 90], size=9)
        >>> found.angles.tolist(), [error < 1e-5 for error in found.errors["lifting"].tolist()]
        ([0.0, 30.0, 90.0], [True, False, True])
    """

    angles: npt.NDArray[np.float64]
    errors: dict[str, npt.NDArray[np.float64]]
    interpolation: npt.NDArray[np.float64]
    rotations: dict[str, tuple[float, ...]]


def equivariance_errors(
    models: torch.nn.Module | Mapping[str, torch.nn.Module],
    images: Tensor | None = None,
    *,
    angles: Sequence[float] | npt.NDArray[np.floating] | None = None,
    layer: str | None = None,
    size: int = 28,
    disc: float = DISC,
    background: float = 0.0,
    seed: int = 0,
) -> EquivarianceErrors:
    r"""Measure how much the invariant part of the output of models changes when their input is rotated by any angle.

    For an image x rotated by θ, :math:`R_\theta x`, and the invariant part F of the output of a model,

    .. math:: e(\theta) = \frac{\| R_\theta^{-1} F(R_\theta x) - F(x) \|}{\| F(x) \|}

    averaged over the images. The invariant part is

    - the logits, if the output is ``(B, K)``: nothing is rotated back;
    - the maximum over the poses of each regular (or quotient) field, the values of scalar fields, and the norms of
      all other fields, if the output is a GeometricTensor on a grid: maps, which are rotated back by interpolation and
      compared on a disc that every rotation keeps on the grid;
    - all channels as scalar fields, if the output is a plain tensor ``(B, C, S, S)``.

    This quantity is defined for every angle and every model, with or without a group. A rotation in the group permutes
    poses and leaves F unchanged; for other angles poses have no counterpart to compare with, but F should not change.
    (:func:`equivariance_report` compares the poses themselves, at the elements of the group.)

    The default images are sums of waves of at least a third of the image's width in a soft disc: functions of the
    plane, which are evaluated at rotated positions. Only maps that are rotated back are interpolated then.

    Args:
        models: by name, or one model, which goes by the name of its class; called in evaluation mode, which is undone
            afterwards.
        images: ``(B, C, S, S)``, scalar fields, which are rotated by cubic interpolation.
        angles: degrees; by default every fifth, and the rotations in the groups of the models.
        layer: the module whose output is measured, by its name in every model; by default the model itself.
        size: the side of the default images in positions.
        disc: the radius of the disc, in units of half the side of the grid.
        background: the value around ``images``.
        seed: of the default images.

    Returns:
        the errors.

    Raises:
        TypeError: a model is not a module, ``images`` not a tensor, or ``size`` not an integer.
        ValueError: no models, no angles, images that are not square, a model whose input are not scalar fields over
            the plane or which does not have ``layer``, or an output that is none of the above.

    Example:
        >>> from escnn_attention.equivariance.angles import equivariance_errors
        >>> from escnn_attention.models import HybridNet
        >>> from escnn import gspaces
        >>> g = gspaces.rot2dOnR2(4)
        >>> network = HybridNet(g, 1, 10, widths=(4, 4), convolutions=(1, 0), attention=(0, 1))
        >>> errors = equivariance_errors({"C4": network}, angles=[0, 45, 90], size=12)
        >>> [error < 1e-5 for error in errors.errors["C4"]], errors.rotations["C4"]
        ([True, False, True], (0.0, 90.0, 180.0, 270.0))
    """
    models = named_models(models)
    if not 0 < disc <= 1:
        raise ValueError(f"disc: got {disc}, needed a radius in (0, 1]")
    rotations = {name: rotations_of(model) for name, model in models.items()}
    if angles is None:
        # Rounded, so that angles that agree are one.
        every = {round(a, 6) for a in (*range(0, 361, 5), *(r for model in rotations.values() for r in model))}
        chosen = np.array(sorted(every), dtype=np.float64)
    else:
        chosen = np.sort(check_angles(angles))
    if images is None:
        channels = _channels(models)
        rotated = [smooth_images(size, a, number=_IMAGES, channels=channels, seed=seed) for a in (0.0, *chosen)]
    else:
        exact = _check_images(images).detach().cpu().double()
        rotated = [exact, *(rotate_images(exact, a, background=background) for a in chosen)]
    upright = rotated.pop(0)

    outputs = {name: _Outputs(name, model, layer) for name, model in models.items()}
    references = {name: output(upright) for name, output in outputs.items()}
    return EquivarianceErrors(
        angles=chosen,
        errors={
            name: np.array(
                [_error(output(image), references[name], a, disc) for image, a in zip(rotated, chosen, strict=True)]
            )
            for name, output in outputs.items()
        },
        interpolation=np.array([_error(rotate_images(upright, a), upright, a, disc) for a in chosen]),
        rotations=rotations,
    )


def rotations_of(model: torch.nn.Module) -> tuple[float, ...]:
    """The angles of the rotations in the group of a model over the plane, in degrees from 0 to 360, ascending.

    Empty where no module of the model has a gspace over the plane with a finite group.

    Example:
        >>> from escnn import gspaces, nn
        >>> g = gspaces.flipRot2dOnR2(3)
        >>> rotations_of(nn.ReLU(nn.FieldType(g, [g.regular_repr])))
        (0.0, 120.0, 240.0)
    """
    gspace = gspace_of(model)
    if gspace is None or gspace.dimensionality != 2 or gspace.fibergroup.continuous:
        return ()
    return tuple(sorted({round(degrees, 6) % 360 for degrees in rotation_angles(fibers(gspace)).values()}))


def rotation_angles(table: Fibers) -> dict[int, float]:
    """The angles of the rotations of a group over the plane by their indices in it, in degrees from -180 to 180.

    Reflections are left out.
    """
    return {
        i: math.degrees(math.atan2(matrix[1, 0], matrix[0, 0]))
        for i, matrix in enumerate(table.action)
        if np.linalg.det(matrix) > 0
    }


class _Outputs:
    """The invariant part of the output of a model, or of one of its layers, as a function of images."""

    def __init__(self, name: str, model: torch.nn.Module, layer: str | None):
        self.name, self.model = name, model
        self.layer = model if layer is None else find_layer(model, layer)
        in_type = getattr(model, "in_type", None)
        if isinstance(in_type, FieldType):
            if in_type.gspace.dimensionality != 2 or not all(r.is_trivial() for r in in_type.representations):
                raise ValueError(f"models: {name!r} takes {in_type}, needed scalar fields over the plane")
        elif isinstance(model, EquivariantModule):
            raise ValueError(f"models: {name!r}, a {type(model).__name__}, has no in_type")
        self.in_type = in_type if isinstance(in_type, FieldType) else None
        tensor = next(iter((*model.parameters(), *model.buffers())), torch.zeros(()))
        self.device = tensor.device
        self.dtype = tensor.dtype if tensor.is_floating_point() else torch.get_default_dtype()

    def __call__(self, images: Tensor) -> Tensor:
        """The invariant part, ``(B, K)`` or ``(B, K, S, S)`` in float64."""
        x = images.to(self.device, self.dtype)
        if self.in_type is not None and self.in_type.size != x.shape[1]:
            raise ValueError(
                f"images: got {x.shape[1]} channels, and {self.name!r} takes {self.in_type.size}; all models are shown "
                "the same images"
            )
        given = GeometricTensor(x, self.in_type) if isinstance(self.model, EquivariantModule) else x
        with evaluating(self.model):
            caught = watch(lambda: self.model(given), {"layer": self.layer})
        if "layer" not in caught:
            raise ValueError(f"layer: {self.name!r} does not call it")
        return self._invariants(caught["layer"])

    def _invariants(self, output: object) -> Tensor:
        if isinstance(output, GeometricTensor):
            parts = output.tensor.split([r.size for r in output.type.representations], dim=1)
            values = torch.cat(
                [
                    part.amax(dim=1, keepdim=True) if is_pointwise(r) else part.norm(dim=1, keepdim=True)
                    for part, r in zip(parts, output.type.representations, strict=True)
                ],
                dim=1,
            )
        elif isinstance(output, Tensor):
            values = output
        else:
            raise ValueError(f"models: {self.name!r} gives {type(output).__name__}, needed a tensor")
        if values.ndim == 4 and values.shape[2:] == (1, 1):
            values = values[..., 0, 0]
        if values.ndim not in (2, 4) or (values.ndim == 4 and values.shape[2] != values.shape[3]):
            raise ValueError(
                f"models: {self.name!r} gives shape {tuple(values.shape)}, needed logits (B, K) or maps (B, K, S, S)"
            )
        return values.detach().cpu().double()


def _error(values: Tensor, reference: Tensor, degrees: float, disc: float) -> float:
    """The mean over images of the relative change of ``values``, which are rotated by ``degrees``."""
    return relative_change(rotate_images(values, -degrees) if values.ndim == 4 else values, reference, disc)


def relative_change(values: Tensor, reference: Tensor, disc: float = DISC) -> float:
    """The mean over images of the relative change, of ``(B, K)`` or, within the disc, of maps ``(B, C, S, S)``."""
    difference = values - reference
    if values.ndim == 4:
        x, y = grid_coordinates(values.shape[-1])
        inside = torch.from_numpy(np.hypot(x, y) <= disc)
        difference, reference = difference[..., inside], reference[..., inside]
    size = reference.flatten(1).norm(dim=1)
    return float((difference.flatten(1).norm(dim=1) / torch.where(size > 0, size, 1.0)).mean())


def _channels(models: Mapping[str, torch.nn.Module]) -> int:
    """The channels of the default images: those of the first model with an ``in_type``."""
    types = (getattr(model, "in_type", None) for model in models.values())
    return next((t.size for t in types if isinstance(t, FieldType)), 1)


def named_models(models: object) -> dict[str, torch.nn.Module]:
    """Models by name; a single one goes by the name of its class.

    Raises:
        TypeError: neither a module nor a mapping to modules.
        ValueError: there are none.
    """
    if isinstance(models, torch.nn.ModuleDict):
        models = dict(models.items())  # which is no model: it cannot be called
    if isinstance(models, torch.nn.Module):
        return {type(models).__name__: models}
    if not isinstance(models, Mapping):
        raise TypeError(
            f"models: got {type(models).__name__}, needed a torch.nn.Module or a mapping from names to modules"
        )
    if not models:
        raise ValueError("models: got none, needed at least one, by name")
    for name, model in models.items():
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"models: got {type(model).__name__} for {name!r}, needed a torch.nn.Module")
    return dict(models)


def check_angles(angles: Sequence[float] | npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    """``angles``, ``(A,)``, if they are finite and at least one."""
    chosen = np.asarray(angles, dtype=np.float64).reshape(-1)
    if not len(chosen) or not np.isfinite(chosen).all():
        raise ValueError(f"angles: got {angles!r}, needed at least one finite number of degrees")
    return chosen


def _check_images(images: object) -> Tensor:
    if not isinstance(images, Tensor):
        raise TypeError(f"images: got {type(images).__name__}, needed a torch.Tensor (B, C, S, S)")
    if images.ndim != 4 or images.shape[-1] != images.shape[-2] or not len(images):
        raise ValueError(f"images: got shape {tuple(images.shape)}, needed square images (B, C, S, S)")
    return images


_WAVES = 8
_PERIODS = 3.0  # of the fastest wave, across the image


def smooth_images(size: int, degrees: float = 0.0, *, number: int = 1, channels: int = 1, seed: int = 0) -> Tensor:
    """Smooth images as functions of the plane, seen on a grid after a rotation: no interpolation, whatever the angle.

    Sums of waves with at most three periods across the image, within a disc at whose edge they fade out.

    Args:
        size: the side of the grid.
        degrees: the angle, counter-clockwise about the centre.
        number: of images.
        channels: of each image.
        seed: what the waves are drawn with.

    Returns:
        ``(number, channels, size, size)`` in float64, of unit variance about the centre.

    Raises:
        TypeError: a size, number or channels that is not an integer.
        ValueError: one below 1.

    Example:
        >>> upright, rotated = smooth_images(9), smooth_images(9, 90)
        >>> torch.allclose(upright.rot90(1, (-2, -1)), rotated)
        True
    """
    for name, value in (("size", size), ("number", number), ("channels", channels)):
        check_int(name, value)
    random = np.random.default_rng(seed)
    shape = (number, channels, _WAVES)
    # Waves are uniform in the disc of those with at most so many periods; phases are in radians.
    periods = _PERIODS * np.sqrt(random.uniform(size=shape))
    direction, phase = random.uniform(0, 2 * math.pi, (2, *shape))
    strength = random.normal(size=shape) * math.sqrt(2 / _WAVES)
    x, y = grid_coordinates(size)
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    x, y = c * x + s * y, c * y - s * x  # what is seen here was there before the rotation
    along = np.einsum("ncw,ij->ncwij", np.cos(direction), x) + np.einsum("ncw,ij->ncwij", np.sin(direction), y)
    waves = np.cos(math.pi * periods[..., None, None] * along + phase[..., None, None])
    fade = np.clip((0.95 - np.hypot(x, y)) / 0.4, 0, 1)
    return torch.from_numpy((strength[..., None, None] * waves).sum(axis=2) * np.sin(math.pi / 2 * fade) ** 2)


def rotate_images(images: Tensor, degrees: float, *, background: float = 0.0) -> Tensor:
    """Square images rotated about their centres, counter-clockwise.

    Rotations by multiples of 90° move pixels and change no value; what is left, at most 45°, is cubic interpolation.

    Args:
        images: ``(..., S, S)``.
        degrees: the angle.
        background: the value around an image.

    Returns:
        of the same shape, precision and device.

    Example:
        >>> rotate_images(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), 90)
        tensor([[2., 4.],
                [1., 3.]])
    """
    if images.ndim < 2 or images.shape[-1] != images.shape[-2]:
        raise ValueError(f"images: got shape {tuple(images.shape)}, needed square images (..., S, S)")
    quarters = round(degrees / 90)
    rotated = images.rot90(quarters % 4, (-2, -1))
    rest = degrees - 90 * quarters
    if abs(rest) < 1e-9 or not images.numel():
        return rotated
    exact = rotated.detach().cpu().double().numpy()
    found = ndimage.rotate(exact, rest, (-2, -1), reshape=False, mode="grid-constant", cval=background)
    return torch.from_numpy(found).to(images.device, images.dtype)


def grid_coordinates(size: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Coordinates x and y, ``(size, size)`` each, in units of half the side of the grid, y upwards.

    Example:
        >>> x, y = grid_coordinates(2)
        >>> x.tolist(), y.tolist()
        ([[-0.5, 0.5], [-0.5, 0.5]], [[0.5, 0.5], [-0.5, -0.5]])
    """
    axis = (np.arange(size) - (size - 1) / 2) / (size / 2)
    x, y = np.meshgrid(axis, -axis)
    return x, y
