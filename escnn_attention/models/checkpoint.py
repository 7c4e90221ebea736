"""Tensors of a published checkpoint, by name, layers that load them, and gspaces by the matrices in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from escnn import gspaces
from escnn.group import o3_group
from escnn.gspaces import GSpace
from torch import Tensor

from escnn_attention.groups.fibers import fibers
from escnn_attention.groups.spaces import tetraOnR3
from escnn_attention.plain.projections import HeadModule

_FOLDER = "weight/"
"""The prefix of the names in files that hold other arrays, too."""

_WRAPPERS = ("module.", "backbone.")
"""The prefixes that wrappers add to all names, from the outside in."""


class Checkpoint:
    """Tensors by name, which remembers the ones that were used."""

    def __init__(self, tensors: Mapping[str, Any]):
        if not isinstance(tensors, Mapping):
            raise TypeError(f"tensors: got {type(tensors).__name__}, needed a dictionary of tensors by name")
        # Without empty tensors, such as those of a head without outputs.
        given = {str(name): t for name, t in tensors.items() if not isinstance(t, Tensor) or t.numel()}
        self.prefix = _FOLDER if any(name.startswith(_FOLDER) for name in given) else ""
        given = {name: value for name, value in given.items() if name.startswith(self.prefix)}
        for wrapper in _WRAPPERS:
            if given and all(name.startswith(f"{self.prefix}{wrapper}") for name in given):
                self.prefix += wrapper
        self.tensors = {name.removeprefix(self.prefix): _as_tensor(name, value) for name, value in given.items()}
        self.used: set[str] = set()

    def any(self, start: str) -> bool:
        """Whether a name begins like this."""
        return any(name.startswith(start) for name in self.tensors)

    def start_of(self, end: str, what: str) -> str:
        """What stands in front of ``end`` in the name that ends with it; ``what`` that tensor is, for an error."""
        for name in self.tensors:
            if name.endswith(end):
                return name.removesuffix(end)
        raise self.missing(end, f", needed {what}")

    def count(self, start: str) -> int:
        """The number of n = 0, 1, ... such that a name begins with ``start``, n and a dot; at least one."""
        n = 1
        while self.any(f"{start}{n}."):
            n += 1
        return n

    def shape(self, name: str, *dimensions: int) -> tuple[int, ...]:
        """The shape of a tensor that has so many dimensions."""
        if name not in self.tensors:
            raise self.missing(name)
        shape = tuple(self.tensors[name].shape)
        if len(shape) not in dimensions:
            raise ValueError(
                f"{self.prefix}{name}: got a tensor of shape {shape}, needed {' or '.join(map(str, dimensions))} "
                "dimensions"
            )
        return shape

    def common(self, names: Iterable[str], axis: int) -> int:
        """The most common size of these tensors along an axis: a tensor that differs is then reported."""
        names = list(names)
        shapes = [tuple(self.tensors[name].shape) for name in names if name in self.tensors]
        sizes = Counter(shape[axis] for shape in shapes if len(shape) >= 3)
        if not sizes:
            raise self.missing(names[0])
        return sizes.most_common(1)[0][0]

    def take(self, name: str, *shape: int) -> Tensor:
        """A tensor of this shape, in the default precision."""
        if name not in self.tensors:
            raise self.missing(name, f", needed a tensor of shape {shape}")
        tensor = self.tensors[name]
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{self.prefix}{name}: got a tensor of shape {tuple(tensor.shape)}, needed {shape}")
        if not tensor.isfinite().all():
            raise ValueError(f"{self.prefix}{name}: got numbers that are not finite")
        self.used.add(name)
        return tensor.to(torch.get_default_dtype())

    def missing(self, name: str, needed: str = "") -> ValueError:
        """The error for a missing tensor."""
        others = ", ".join([*list(self.tensors)[:3], "…"]) if self.tensors else "none"
        return ValueError(f"{self.prefix}{name}: missing{needed}; got {len(self.tensors)} tensors: {others}")

    def check_used(self) -> None:
        """Check that every tensor was used."""
        left = sorted(set(self.tensors) - self.used)
        if left:
            raise ValueError(
                f"{self.prefix}{left[0]}: not a tensor of this network"
                + (f", nor are {len(left) - 1} others: {', '.join(left[1:4])}" if left[1:] else "")
            )


def _as_tensor(name: str, value: Any) -> Tensor:
    """A torch tensor or a numpy array as a tensor on the CPU, of the same type if PyTorch has it."""
    if isinstance(value, (np.ndarray, np.generic)):
        if value.dtype.kind not in "fiub":
            raise TypeError(f"{name}: got an array of {value.dtype}, needed real numbers")
        # Arrays may have any byte order and strides, and precisions that PyTorch lacks.
        value = torch.from_numpy(np.array(value, dtype=np.float64 if value.dtype.kind == "f" else np.int64))
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: got {type(value).__name__}, needed a torch tensor or a numpy array")
    if value.is_complex() or value.is_meta or value.layout != torch.strided:
        kind = "without values" if value.is_meta else f"of {value.dtype} in the layout {value.layout}"
        raise TypeError(f"{name}: got a tensor {kind}, needed a dense one of real numbers")
    if not value.numel():
        raise ValueError(f"{name}: got an empty tensor of shape {tuple(value.shape)}")
    return value.detach().cpu()


def take_matrix(checkpoint: Checkpoint, name: str, *shape: int) -> Tensor:
    """A matrix, which may be published as the kernel of a convolution of size 1, with further axes of length 1."""
    dimensions = checkpoint.tensors[name].dim() if name in checkpoint.tensors else len(shape)
    return checkpoint.take(name, *shape, *[1] * (dimensions - len(shape))).reshape(shape)


def take_linear(checkpoint: Checkpoint, name: str, outs: int, ins: int) -> tuple[Tensor, Tensor]:
    """The weight ``(outs, ins)`` and the bias ``(outs,)`` of a linear map."""
    return take_matrix(checkpoint, f"{name}.weight", outs, ins), checkpoint.take(f"{name}.bias", outs)


def at_pose(weight: Tensor, pose: int, order: int) -> Tensor:
    """A map of fields as a map of poses, ``(outs, ins * order)``, that reads or writes one relative pose only."""
    spread = weight.new_zeros(*weight.shape, order)
    spread[..., pose] = weight
    return spread.flatten(-2)


def load_linear(checkpoint: Checkpoint, name: str, own: Any) -> None:
    """Give a linear map the weight and the bias that a published one of the same sizes has."""
    weight, bias = take_linear(checkpoint, name, *own.weight.shape)
    load_values(own.weight, weight)
    load_values(own.bias, bias)


def load_parameters(checkpoint: Checkpoint, name: str, module: torch.nn.Module) -> None:
    """Give a module its parameters, which have the same names and shapes in the published one."""
    for kind, own in module.named_parameters():
        load_values(own, checkpoint.take(f"{name}.{kind}", *own.shape))


def children_of(module: Any) -> list[Any]:
    """The modules of a sequence or a list, in order."""
    return list(module.children())


def load_heads(module: HeadModule, made: Mapping[str, tuple[Tensor, Tensor | None]]) -> None:
    """Give a module of M heads of C channels its queries, values and keys.

    ``made`` has for each of ``"queries"``, ``"values"`` and ``"keys"`` the weight ``(M, C, in)``, its last axis as that
    of the projection's weight, and the bias ``(M, C)``. A bias of keys without an effect is left out.
    """
    projection = module.project_in
    weights, biases = [], []
    for name in module.needs.fields:
        weight, bias = made[name]
        weights.append(weight.flatten(0, 1))
        if bias is not None:
            used = module.needs.key_bias if name == "keys" else bias.shape[1]
            biases.append(bias[:, :used].flatten())
    projection.weight.copy_(torch.cat(weights))
    if projection.bias is not None:
        projection.bias.copy_(torch.cat(biases))


def load_values(parameter: Tensor | None, values: Tensor | None) -> None:
    """Give a parameter its values, of the same shape."""
    assert parameter is not None
    assert values is not None
    assert parameter.shape == values.shape
    parameter.copy_(values)


def find_gspace(matrices: np.ndarray, tolerance: float) -> tuple[GSpace, np.ndarray] | None:
    """The gspace of escnn whose elements act by these matrices, if there is one, and the matrix of each element."""
    order, dim = matrices.shape[:2]
    for make in _candidates(order, dim):
        group = fibers(gspace := make())
        if (group.order, group.dimension) != (order, dim):
            continue
        distances = np.abs(group.action[:, None] - matrices[None]).max((2, 3))
        if (distances.min(1) < tolerance).all():
            return gspace, distances.argmin(1)
    return None


def _candidates(order: int, dim: int) -> Iterator[Callable[[], GSpace]]:
    """Gspaces that may have so many elements."""
    if order == 1:
        yield gspaces.trivialOnR2 if dim == 2 else gspaces.trivialOnR3
    elif dim == 2:
        yield lambda: gspaces.rot2dOnR2(order)
        if order == 2:
            yield from (lambda: gspaces.flip2dOnR2(axis=0.0), lambda: gspaces.flip2dOnR2(axis=np.pi / 2))
        elif order % 2 == 0:
            half = order // 2
            yield from (lambda: gspaces.flipRot2dOnR2(half), lambda: gspaces.flipRot2dOnR2(half, axis=0.0))
    elif dim == 3:
        yield lambda: gspaces.rot2dOnR3(order)
        if order == 2:
            yield from (lambda: gspaces.mirOnR3(axis=0.0), lambda: gspaces.mirOnR3(axis=np.pi / 2), gspaces.invOnR3)
        if order == 12:
            yield tetraOnR3
        if order == 24:
            yield gspaces.octaOnR3
        if order == 60:
            yield from (gspaces.icoOnR3, _other_icosahedron)


def _other_icosahedron() -> GSpace:
    """The icosahedron turned by a quarter about the last axis: the other one with its twofold axes along all three."""
    quarter = np.array([0.0, 0.0, np.sqrt(0.5), np.sqrt(0.5)])
    return gspaces.GSpace3D((False, "ico", o3_group(4).element((0, quarter), "Q")), maximum_frequency=4)
