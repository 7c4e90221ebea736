"""The attention of a point of a cloud to the others, as numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from escnn.group import GroupElement
from escnn.nn import GeometricTensor
from torch import Tensor

from escnn_attention.equivariance.inspection import find_layer
from escnn_attention.groups.fibers import fibers
from escnn_attention.groups.samples import Samples
from escnn_attention.nn import PointAttentiveConv, PointSelfAttention
from escnn_attention.plotting._arguments import check_element, check_index

_LISTED = 12  # names in an error message

PointLayer: TypeAlias = PointSelfAttention | PointAttentiveConv


def find_point_layers(model: object, layers: Any) -> dict[str, PointLayer]:
    """Chosen attention between points, all by default, by its names in the model; that of the model itself is empty.

    Raises:
        TypeError: ``model`` is not a module, or a layer neither a module nor a name.
        ValueError: there is no such layer in ``model``, or none at all.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: got {type(model).__name__}, needed a torch.nn.Module")
    there = {n: m for n, m in model.named_modules() if isinstance(m, (PointSelfAttention, PointAttentiveConv))}
    if not there:
        raise ValueError(
            f"model: the {type(model).__name__} has no attention between points (PointSelfAttention or "
            "PointAttentiveConv); other layers are not drawn"
        )
    if layers is None:
        return there
    several = [layers] if isinstance(layers, (str, torch.nn.Module)) else layers
    if not isinstance(several, Iterable):
        raise TypeError(f"layers: got {layers!r}, needed a module, its name, or a sequence of these")
    chosen: dict[str, PointLayer] = {}
    for layer in several:
        inside = set(find_layer(model, layer).modules())
        found = {name: module for name, module in there.items() if module in inside}
        if not found:
            got = repr(layer) if isinstance(layer, str) else f"a {type(layer).__name__}"
            listed = ", ".join(map(repr, list(there)[:_LISTED])) + (", …" if len(there) > _LISTED else "")
            raise ValueError(f"layers: got {got}, needed attention between points: {listed}")
        chosen.update(found)
    if not chosen:
        raise ValueError("layers: got none, needed at least one")
    return chosen


class LayerPoses:
    """The poses of a layer, and where group elements take them.

    Args:
        layer: the layer.

    Attributes:
        elements: all elements of a finite group; of a continuous one as many as the layer has samples.
        action: ``(poses, d, d)``; the matrix of each pose.
    """

    def __init__(self, layer: PointLayer):
        self._gspace = layer.space
        self._group = layer.space.fibergroup
        inverse = layer.plain.inverse_action
        table = fibers(self._gspace, Samples(len(inverse)) if self._group.continuous else None)
        self.elements = table.elements
        self.action = table.action
        if self._group.continuous:  # Samples of another kind are known by their matrices only.
            self.action = inverse.double().cpu().numpy().swapaxes(1, 2)
        self._near = 4 * torch.finfo(inverse.dtype).eps

    def index(self, pose: object) -> int:
        """The index of a pose that is given as an index or an element."""
        if not isinstance(pose, GroupElement):
            return check_index("poses", pose, len(self.action))
        pose = check_element("poses", pose, self._group)
        if not self._group.continuous:
            return self.elements.index(pose)
        found = self._at(self._gspace.basespace_action(pose))
        if found < 0:
            raise ValueError(f"poses: {pose} is none of the {len(self.action)} samples of the layer")
        return found

    def moved(self, element: GroupElement, pose: int) -> int:
        """The index of the pose gh, or -1 if no sample is there."""
        if not self._group.continuous:
            return self.elements.index(element @ self.elements[pose])
        return self._at(self._gspace.basespace_action(element) @ self.action[pose])

    def _at(self, matrix: npt.NDArray[np.float64]) -> int:
        """The index of the sample with a matrix, or -1."""
        distances = np.abs(self.action - matrix).max(axis=(1, 2))
        return int(distances.argmin()) if distances.min() < self._near else -1


def transformed_cloud(x: GeometricTensor, element: GroupElement) -> GeometricTensor:
    """``x.transform(element)`` in any precision: escnn goes through NumPy."""
    precise = x.tensor.detach() if x.tensor.dtype == torch.float64 else x.tensor.detach().float()
    fields = GeometricTensor(precise, x.type, x.coords.detach().double()).transform_fibers(element)
    matrix = torch.as_tensor(x.type.gspace.basespace_action(element), dtype=torch.float64, device=x.coords.device)
    return GeometricTensor(fields.tensor.to(x.tensor), x.type, (x.coords.detach().double() @ matrix.T).to(x.coords))


def calls_of_layers(
    model: torch.nn.Module, x: GeometricTensor, edge_index: Tensor | None, layers: dict[str, PointLayer]
) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """The arguments with which the model calls its layers, for the first time.

    Raises:
        ValueError: it does not call one, or calls one with other points.
    """
    caught: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def entering(name: str) -> Callable[..., None]:
        def hook(module: torch.nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            caught.setdefault(name, (tuple(map(_copy, arguments)), {key: _copy(v) for key, v in named.items()}))

        return hook

    handles = [layer.register_forward_pre_hook(entering(name), with_kwargs=True) for name, layer in layers.items()]
    try:
        model(x) if edge_index is None else model(x, edge_index=edge_index)
    finally:
        for handle in handles:
            handle.remove()
    for name in layers:
        if name not in caught:
            raise ValueError(f"layers: the {type(model).__name__} does not call {name!r}")
        arrived = next((value for value in caught[name][0] if isinstance(value, GeometricTensor)), x)
        if len(arrived.tensor) != len(x.tensor):
            raise ValueError(
                f"layers: {name!r} is called with {len(arrived.tensor)} points, needed the {len(x.tensor)} of x"
            )
    return caught


def _copy(value: object) -> object:
    """A copy of fields, which a later module may change in place."""
    if isinstance(value, GeometricTensor):
        return GeometricTensor(value.tensor.detach().clone(), value.type, value.coords)
    return value


@torch.enable_grad()
def attention_of_point(
    layer: PointLayer, call: tuple[tuple[Any, ...], dict[str, Any]], point: int, poses: Sequence[int]
) -> npt.NDArray[np.float64]:
    """The attention of a point to all points, in some of the output poses.

    The output of the heads is linear in the values, and what a value is multiplied by is its weight.

    Args:
        layer: the layer.
        call: the arguments with which it is called.
        point: the number of the query.
        poses: the indices of its poses.

    Returns:
        ``(poses, heads, N)``.
    """
    v, y = _values_and_outputs(layer, call)
    found = []
    for pose in poses:
        read = y[:, 0, point, pose, 0].sum()
        slope = None
        if read.requires_grad:  # which it does not where nobody sees anybody
            (slope,) = torch.autograd.grad(read, v, retain_graph=True, allow_unused=True)
        # A head reads its own values only, and the first channel the first.
        found.append((torch.zeros_like(v) if slope is None else slope)[:, 0, :, :, 0].sum(-1))
    total = v.shape[3] * layer.plain.query_weight if layer.plain.query == "all" else 1.0
    return (torch.stack(found).detach().double() / total).cpu().numpy()


def _values_and_outputs(layer: PointLayer, call: tuple[tuple[Any, ...], dict[str, Any]]) -> tuple[Tensor, Tensor]:
    """Values that are zero, and what the heads of a layer make of them.

    The kernel of an attentive convolution, which acts on values, is left out.

    Returns:
        ``(heads, 1, N, P, C)`` and ``(heads, 1, N, |H|, C)``.
    """
    plain, heads = layer.plain, layer.num_heads
    values: list[Tensor] = []
    outputs: list[Tensor] = []

    def project(module: torch.nn.Module, arguments: tuple[Any, ...], fields: Tensor) -> Tensor:
        parts = list(fields.detach().unflatten(0, (-1, heads)).unbind(0))
        place = plain.needs.fields.index("values")
        values.append(torch.zeros_like(parts[place]).requires_grad_())
        parts[place] = values[0]
        return torch.stack(parts).flatten(0, 1)

    def keep(module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        outputs.append(arguments[0])

    handles = [plain.project_in.register_forward_hook(project), plain.project_out.register_forward_pre_hook(keep)]
    kernel, plain.values = plain.values, None
    try:
        layer(*call[0], **call[1])
    finally:
        plain.values = kernel
        for handle in handles:
            handle.remove()
    (v,), (y,) = values, outputs
    return v, y


def most_concentrated(weights: npt.NDArray[np.float64]) -> int:
    """The head of ``(heads, N)`` with the least entropy."""
    share = np.abs(weights) / np.maximum(np.abs(weights).sum(-1, keepdims=True), 1e-300)
    return int((-(share * np.log(np.maximum(share, 1e-12))).sum(-1)).argmin())
