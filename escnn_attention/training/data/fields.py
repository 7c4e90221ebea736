"""Fields on grids: pairs of input and target, from files or generated, and the elements that keep the grid."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from escnn_attention.training.data.base import (
    PARTS,
    Batches,
    DataInParts,
    GeneratedData,
    InMemory,
    RandomChange,
    Source,
    integers,
    one_of,
    random_choices,
)
from escnn_attention.training.data.files import npz_file
from escnn_attention.training.errors import UserError

Turns = Literal["none", "rotations", "all"]
"""Elements that map the grid onto itself: the identity, the rotations, or rotations and mirrors."""

Array = npt.NDArray[np.float64]
Pair = tuple[Tensor, Tensor]


def grid_elements(dim: int, turns: Turns) -> list[npt.NDArray[np.int64]]:
    """The matrices of the rotations, or of all isometries, that map the axes of a grid onto each other.

    >>> [len(grid_elements(dim, turns)) for dim in (2, 3) for turns in ("none", "rotations", "all")]
    [1, 4, 8, 1, 24, 48]
    """
    if turns == "none":
        return [np.eye(dim, dtype=np.int64)]
    orders, signs = itertools.permutations(range(dim)), itertools.product((1, -1), repeat=dim)
    found = [np.diag(each)[:, list(order)] for order, each in itertools.product(orders, signs)]
    return [matrix for matrix in found if turns == "all" or round(np.linalg.det(matrix)) == 1]


def turned(fields: Tensor, matrix: npt.NDArray[np.int64], kinds: Mapping[str, int]) -> Tensor:
    r"""Fields on a grid in another orientation, :math:`(g f)(x) = \rho(g) f(g^{-1} x)`, without interpolation.

    The first coordinate grows along the last axis of the grid, the others decrease along the axes before it.

    Args:
        fields: ``(B, C, *space)``.
        matrix: one of :func:`grid_elements`.
        kinds: the numbers of fields, ``"scalar"`` or ``"vector"``, in the order of their channels, or of each of
            several frames.

    Example:
        >>> import torch
        >>> from escnn_attention.training.data.fields import grid_elements, turned
        >>> quarter = grid_elements(2, "rotations")[3]
        >>> quarter.tolist(), turned(torch.tensor([[[[1.0, 0.0], [0.0, 0.0]]]]), quarter, {"scalar": 1}).tolist()
        ([[0, -1], [1, 0]], [[[[0.0, 0.0], [1.0, 0.0]]]])
    """
    dim = fields.dim() - 2
    axes, flips = [0, 1], []
    for axis in range(dim):
        row = dim - 1 - axis
        column = int(np.abs(matrix[row]).argmax())
        axes.append(2 + dim - 1 - column)
        if matrix[row, column] * (1 if row == 0 else -1) * (1 if column == 0 else -1) < 0:
            flips.append(2 + axis)
    moved = fields.permute(axes).flip(flips)
    rotation, parts, start = torch.as_tensor(matrix).to(moved), [], 0
    while start < moved.shape[1]:
        for kind, count in kinds.items():
            width = count * (dim if kind == "vector" else 1)
            part = moved[:, start : start + width]
            if kind == "vector":
                part = torch.einsum("ij,bcj...->bci...", rotation, part.unflatten(1, (count, dim))).flatten(1, 2)
            parts.append(part)
            start += width
    return torch.cat(parts, dim=1)


class _Windows:
    """Of trajectories ``(N, T, C, *space)``, so many frames in a row, and the one ``step`` frames behind them.

    ``channels`` are those of each kind of field: the fields of one kind of all frames come before those of the next.
    """

    def __init__(self, trajectories: Tensor, frames: int, step: int, channels: Sequence[int]):
        self.trajectories, self.frames, self.step, self.channels = trajectories, frames, step, list(channels)
        self.each = trajectories.shape[1] - frames - step + 1

    def __len__(self) -> int:
        return len(self.trajectories) * self.each

    def take(self, indices: Sequence[int]) -> Pair:
        chosen = torch.as_tensor(indices)
        which, first = chosen // self.each, chosen % self.each
        inputs = self.trajectories[which[:, None], first[:, None] + torch.arange(self.frames)]
        inputs = torch.cat([of_kind.flatten(1, 2) for of_kind in inputs.split(self.channels, dim=2)], dim=1)
        return inputs, self.trajectories[which, first + self.frames - 1 + self.step]


class GridFields(DataInParts):
    """Pairs of fields on a grid in three parts: inputs ``(B, C, *space)`` and targets ``(B, C', *space)``, float32.

    Args:
        turn_train: turn each training pair, in each epoch by another element that maps its grid onto itself: one of
            the ``"rotations"``, of ``"all"``, mirrors included, or ``"none"``. Vectors turn with the grid.
        **options: of :class:`~escnn_attention.training.data.base.DataInParts`, such as ``batch_size``.

    Attributes:
        inputs, targets: the numbers of ``"scalar"`` and ``"vector"`` fields of the inputs and of the targets, in the
            order of their channels.

    Example:
        >>> from escnn_attention.training import PoissonOnTorus
        >>> data = PoissonOnTorus(num_train=8, batch_size=4, turn_train="all")  # a GridFields
        >>> data.setup("fit")
        >>> [tuple(fields.shape) for fields in next(iter(data.train_dataloader()))]
        [(4, 1, 32, 32), (4, 2, 32, 32)]
    """

    things = "fields"
    inputs: Mapping[str, int]
    targets: Mapping[str, int]

    def __init__(self, *, batch_size: int = 16, turn_train: Turns = "none", **options: Any) -> None:
        super().__init__(batch_size=batch_size, **options)
        one_of(get_args(Turns), turn_train=turn_train)
        self.turn_train: Turns = turn_train

    def _batches(self, part: str) -> Batches:
        source = self._sources[part]
        if part != "train" or self.turn_train == "none":
            return Batches(source)
        space = source.take([0])[0].shape[2:]
        sides = np.array(space[::-1])  # in the order of the coordinates
        elements = [g for g in grid_elements(len(space), self.turn_train) if (abs(g) @ sides == sides).all()]
        turn = functools.partial(_turn, elements, (self.inputs, self.targets))
        numbers = functools.partial(random_choices, len(elements), self._count("train"))
        return Batches(source, RandomChange(turn, numbers, self.seed))


def _turn(
    elements: Sequence[npt.NDArray[np.int64]], kinds: Sequence[Mapping[str, int]], pair: Pair, chosen: Tensor
) -> list[Tensor]:
    """A pair of fields, each of the batch turned by the element that is chosen for it."""
    results = [torch.empty_like(values) for values in pair]
    for number in chosen.unique().tolist():
        for values, result, fields in zip(pair, results, kinds, strict=True):
            result[chosen == number] = turned(values[chosen == number], elements[number], fields)
    return results


class FieldData(GridFields):
    """Fields of an ``.npz`` file: pairs, or trajectories.

    The file has ``inputs`` ``(N, C, *space)`` and ``targets`` ``(N, C', *space)``, or ``trajectories``
    ``(N, T, C, *space)``, in the plane or in space, floating-point numbers. Every window of ``frames`` frames of a
    trajectory is an input, and the target is the frame ``step`` frames after the last of them. All windows of a
    trajectory are in one part. In the channels of an input come first the fields of one kind, frame after frame, then
    those of the other: from ``{"scalar": 1, "vector": 1}`` in two frames to ``in_type={"scalar": 2, "vector": 2}``.

    Args:
        path: the file.
        inputs: the numbers of fields in the channels of the inputs, or of a frame, such as
            ``{"scalar": 1, "vector": 1}``. A vector has as many channels as the grid has axes: the first is its
            component along the last axis of the grid, the others are those against the direction of the axes before.
        targets: likewise of the targets; None for trajectories, whose frames are both.
        frames, step: see above.
        num_train, num_valid, num_test: pairs or trajectories of each part; None trains with all that the others leave.
        **options: of :class:`GridFields`, such as ``batch_size`` and ``turn_train``.

    Raises:
        UserError: an argument of another kind; in ``setup``: a file that cannot be read or holds anything else.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> import numpy as np
        >>> from escnn_attention.training import FieldData
        >>> path = Path(tempfile.mkdtemp(), "flow.npz")
        >>> np.savez(path, trajectories=np.zeros((10, 6, 2, 8, 8)))
        >>> data = FieldData(path, {"vector": 1}, frames=2, step=3, num_valid=1, num_test=1, batch_size=4)
        >>> data.setup("fit")
        >>> [tuple(fields.shape) for fields in next(iter(data.train_dataloader()))], len(data.source("train"))
        ([(4, 4, 8, 8), (4, 2, 8, 8)], 16)
    """

    def __init__(
        self,
        path: str | Path,
        inputs: Mapping[str, int],
        targets: Mapping[str, int] | None = None,
        frames: int = 1,
        step: int = 1,
        num_train: int | None = None,
        num_valid: int = 1,
        num_test: int = 1,
        **options: Any,
    ) -> None:
        super().__init__(limits=None, **options)
        self.path = Path(path)
        integers(1, frames=frames, step=step, num_valid=num_valid, num_test=num_test)
        integers(1, **({} if num_train is None else {"num_train": num_train}))
        kinds, self.has_pairs = _kinds("inputs", inputs), targets is not None
        self.inputs = {kind: frames * count for kind, count in kinds.items()}
        self.targets = kinds if targets is None else _kinds("targets", targets)
        self.frames, self.step = frames, step
        self.numbers = (num_test, num_valid, num_train)
        if self.has_pairs and (frames, step) != (1, 1):
            raise UserError(f"frames, step: got {frames} and {step} with targets, needed 1 and 1: pairs have no frames")

    def _load(self, parts: Mapping[str, int | None]) -> Mapping[str, Source]:
        names = ("inputs", "targets") if self.has_pairs else ("trajectories",)
        with npz_file(self.path, "Give `path`, that of an .npz file of arrays") as file:
            if missing := [name for name in names if name not in file]:
                pairs = "" if self.has_pairs else ", or `targets`, the fields of those of pairs"
                raise UserError(f"{self.path}: there is no array {missing[0]!r}, needed {' and '.join(names)}{pairs}")
            arrays = [self._checked(name, file[name]) for name in names]
        if len({(len(array), array.shape[2:]) for array in arrays}) > 1:
            shapes = " and ".join(str(tuple(array.shape)) for array in arrays)
            raise UserError(f"{self.path}: inputs and targets must be as many, on one grid, found {shapes}")
        rows = self._rows(len(arrays[0]))
        if self.has_pairs:
            return {part: InMemory(arrays[0][rows[part]], arrays[1][rows[part]]) for part in parts}
        channels = _channels(self.targets, arrays[0].dim() - 3)
        return {part: _Windows(arrays[0][rows[part]], self.frames, self.step, channels) for part in parts}

    def _checked(self, name: str, array: npt.NDArray[Any]) -> Tensor:
        kinds = self.inputs if name == "inputs" else self.targets
        before, shape = (2, "(N, T, C, *space)") if name == "trajectories" else (1, "(N, C, *space)")
        dim = array.ndim - before - 1
        where, found = f"{self.path}: {name}", f"{array.dtype} {array.shape}"
        if dim not in (2, 3) or array.dtype.kind != "f" or 0 in array.shape:
            raise UserError(f"{where} must be floating-point numbers {shape} on a grid of 2 or 3 axes, found {found}")
        channels = sum(_channels(kinds, dim))
        if array.shape[before] != channels:
            raise UserError(f"{where} have {array.shape[before]} channels, needed {channels} for {dict(kinds)}")
        if before == 2 and array.shape[1] < self.frames + self.step:
            given, found = f"{self.frames} and {self.step}", f"trajectories of {array.shape[1]} frames"
            raise UserError(f"frames, step: got {given}, but {self.path} has {found}")
        with np.errstate(over="ignore"):
            values = array.astype(np.float32)
        if not np.isfinite(values).all():
            raise UserError(f"{where} must be finite numbers in single precision")
        return torch.from_numpy(values)

    def _rows(self, count: int) -> dict[str, Tensor]:
        """The pairs or trajectories of each part, those of the training last, so that more of them change no other."""
        test, valid, train = self.numbers
        left, needed = count - test - valid, test + valid + (train or 1)
        if count < needed:
            found = f"{count} {'pairs' if self.has_pairs else 'trajectories'}"
            raise UserError(f"num_train, num_valid, num_test: needed {needed} together, but {self.path} has {found}")
        order = torch.from_numpy(np.random.default_rng(0).permutation(count))
        sizes = [test, valid, train or left]
        return dict(zip(("test", "valid", "train"), order[: sum(sizes)].split(sizes), strict=True))


_CHARGES, _WIDTH = 6, 0.3


class PoissonOnTorus(GeneratedData, GridFields):
    r"""The electric field of charges on a torus, from their density: generated in a moment, without files.

    .. math:: E = -\nabla \varphi, \qquad -\Delta \varphi = \varrho - \bar\varrho, \qquad
        \varrho(x) = \sum_i q_i\, e^{-|x - x_i|^2 / 2 w^2}

    with six charges :math:`q_i = \pm 1` of the width w = 0.3 at random places of a torus of sides 2π, solved by fast
    Fourier transforms. The field depends on the charges everywhere. Both are in units of their standard deviation.

    Args:
        size: the positions along every axis.
        dimensions: 2 or 3.
        num_train, num_valid, num_test: the pairs of each part.
        **options: of :class:`GridFields`, such as ``batch_size`` and ``turn_train``; the pairs depend on ``seed``.

    Example:
        >>> from escnn_attention.training import PoissonOnTorus
        >>> data = PoissonOnTorus(size=16, dimensions=3, num_train=4, batch_size=2)
        >>> data.setup("fit")
        >>> [tuple(fields.shape) for fields in next(iter(data.train_dataloader()))]
        [(2, 1, 16, 16, 16), (2, 3, 16, 16, 16)]
    """

    def __init__(
        self,
        size: int = 32,
        dimensions: int = 2,
        num_train: int = 500,
        num_valid: int = 100,
        num_test: int = 200,
        **options: Any,
    ) -> None:
        super().__init__(num_train, num_valid, num_test, **options)
        integers(4, size=size)
        one_of((2, 3), dimensions=dimensions)
        self.inputs, self.targets = {"scalar": 1}, {"vector": 1}
        self.size, self.dim = size, dimensions

    def _make(self, part: str) -> InMemory:
        generator = np.random.default_rng((self.seed, PARTS.index(part)))
        places = generator.uniform(0, 2 * np.pi, (self.sizes[part], _CHARGES, self.dim))
        charges = generator.choice([-1.0, 1.0], size=places.shape[:2])
        waves = _waves(self.size, self.dim)
        squares = (waves**2).sum(0)
        smooth = np.exp(-squares * _WIDTH**2 / 2) * (squares > 0)
        # The variances of density and field, but for one factor: a charge is anywhere.
        power = np.array([(smooth**2).sum(), (smooth**2 / squares.clip(min=1)).sum() / self.dim]) * _CHARGES
        density = torch.empty(len(places), 1, *self.dim * [self.size])
        field = torch.empty(len(places), self.dim, *self.dim * [self.size])
        for i, (at, q) in enumerate(zip(places, charges, strict=True)):
            modes = smooth * np.tensordot(q, np.exp(-1j * np.tensordot(at, waves, 1)), 1) * self.size**self.dim
            density[i, 0] = torch.from_numpy(_real(modes) / np.sqrt(power[0]))
            field[i] = torch.from_numpy(electric_field(_real(modes)) / np.sqrt(power[1]))
        return InMemory(density, field)


def electric_field(density: Array) -> Array:
    """E ``(d, *space)`` of a density ``(*space)`` on a torus of sides 2π, whose mean is left out."""
    waves = _waves(density.shape[0], density.ndim)
    squares = (waves**2).sum(0)
    modes = np.fft.fftn(density) * (squares > 0) / squares.clip(min=1)
    return np.stack([_real(-1j * wave * modes) for wave in waves])


def _real(modes: npt.NDArray[np.complex128]) -> Array:
    return np.fft.ifftn(modes).real


def _waves(size: int, dim: int) -> Array:
    """The wave vectors ``(dim, *space)``: the first coordinate along the last axis, the others against the axes before.

    Those that a grid of even size cannot tell from their opposite are left out.
    """
    along = np.fft.fftfreq(size, 1 / size)
    inside = np.abs(along) < size / 2
    grids = np.meshgrid(*dim * [along * inside], indexing="ij")
    whole = np.all(np.meshgrid(*dim * [inside], indexing="ij"), axis=0)
    return np.stack([grids[dim - 1 - j] * (1 if j == 0 else -1) * whole for j in range(dim)])


def _channels(kinds: Mapping[str, int], dim: int) -> list[int]:
    return [count * (dim if kind == "vector" else 1) for kind, count in kinds.items()]


def _kinds(name: str, given: Mapping[str, int]) -> dict[str, int]:
    if not isinstance(given, Mapping) or not given or not given.keys() <= {"scalar", "vector"}:
        raise UserError(f'{name}: got {given!r}, needed numbers of "scalar", of "vector" or of both')
    integers(1, **{f"{name}[{kind!r}]": count for kind, count in given.items()})
    return dict(given)
