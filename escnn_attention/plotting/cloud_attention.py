"""Attention between the points of a cloud, under transformations of the cloud."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from escnn.group import GroupElement
from escnn.gspaces import GSpace
from escnn.nn import GeometricTensor
from torch import Tensor

from escnn_attention.equivariance.inspection import evaluating, find_layers, watch
from escnn_attention.groups.fibers import fibers
from escnn_attention.groups.samples import Samples
from escnn_attention.nn.point_attention import PointAttentiveConv, PointSelfAttention
from escnn_attention.plotting._cloud_drawing import CloudStyle, Row, draw_clouds
from escnn_attention.plotting._drawing import figure_class
from escnn_attention.plotting._elements import check_element, check_index, check_some, name_element, transformed

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_COLUMNS = 4  # elements, by default


def plot_cloud_attention(
    x: GeometricTensor,
    model: torch.nn.Module,
    layers: str | torch.nn.Module | Sequence[str | torch.nn.Module] | None = None,
    *,
    point: int,
    poses: Sequence[int | GroupElement] = (0,),
    head: int | None = None,
    elements: Sequence[GroupElement] | None = None,
    edge_index: Tensor | None = None,
    style: CloudStyle | None = None,
    title: str = "Where a point looks, and how that follows the cloud",
) -> Figure:
    r"""The attention of a point to the others of a cloud, layer by layer, in the cloud transformed by group elements.

    A row is a layer and a pose h of the query, a column the cloud transformed by an element g. The query is transformed
    as a whole, from (x, h) to (gx, gh): the ring is the point, the black lines from it are the axes of its pose, the
    first the longest. Colours are its attention to every point, summed over the poses of the keys,

    .. math:: a(j) = \sum_{\hat h} \mathrm{softmax}_{(j, \hat h)}\big( s_h(i, h; j, \hat h) \big),

    with ``query="all"`` the mean over the poses of the query of what the output pose h adds up. It goes with the
    cloud: a(j) is one and the same number in all columns. Below each panel stands by how much that fails: the
    largest difference from the first column, a rounding error where the model is equivariant. Of a continuous group
    only elements that take the pose of the query to a sample can be shown, and the model is exact for those that
    permute all samples.

    Of :class:`PointAttentiveConv` the weights are :math:`\alpha`, without the kernel.

    Args:
        x: one cloud, a GeometricTensor with ``coords`` in the plane or in space.
        model: a :class:`PointSelfAttention` or :class:`PointAttentiveConv`, or any module in which some stand, such as
            a :class:`~escnn_attention.models.PointTransformer`. It is called with ``x`` in evaluation mode, and what
            arrives at a layer is what its attention is worked out for.
        layers: which layers: one or several, each by its name in the model, itself, or a block that contains it; by
            default all.
        point: the number of the query.
        poses: the poses of the query, as indices or elements, each a row for every layer.
        head: the head to show; by default, for each row, the one whose attention is most concentrated.
        elements: the elements that transform the cloud; by default the first one and some others, spread over the
            group.
        edge_index: ``(2, E)``, edges that the model is called with.
        style: labels, bonds and the direction from which clouds in space are seen.
        title: above the figure.

    Returns:
        The figure. Each panel shows the cloud about its mean, in one scale. Blue is attention that is negative, as with
        ``normalization="count"``.

    Raises:
        TypeError: ``model`` is not a module, ``x`` no GeometricTensor, or another argument is of another type.
        ValueError: ``x`` is no cloud over the gspace of the layers, there is no such layer, point, pose, head or
            element, labels are not one a point, the model does not call a layer, or calls it with other points.

    Example:
        >>> import torch
        >>> from escnn_attention.models import PointTransformer
        >>> from escnn_attention.plotting import plot_cloud_attention
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> network = PointTransformer(g, in_type=1, out_type=1, fields=4, num_blocks=2, num_heads=2)
        >>> cloud = nn.GeometricTensor(torch.ones(7, 1), network.in_type, torch.randn(7, 2))
        >>> figure = plot_cloud_attention(cloud, network, point=3)
        >>> len(figure.axes)  # two layers, the cloud and three rotated ones
        8
    """
    figure_class()
    needed = "attention between points (PointSelfAttention or PointAttentiveConv)"
    kinds = (PointSelfAttention, PointAttentiveConv)
    chosen: dict[str, PointLayer] = find_layers(model, layers, lambda module: isinstance(module, kinds), needed)
    gspace = next(iter(chosen.values())).space
    point = check_index("point", point, len(_check_cloud(x, gspace).coords))
    for layer in chosen.values():
        if layer.space != gspace:
            raise ValueError(f"layers: got some over {gspace.name} and some over {layer.space.name}, needed one gspace")
        if head is not None:
            head = check_index("head", head, layer.num_heads)
    style = CloudStyle() if style is None else style
    style.check(len(x.coords))
    tables = {name: LayerPoses(layer) for name, layer in chosen.items()}
    given = check_some("poses", poses)
    queried = {name: [table.index(pose) for pose in given] for name, table in tables.items()}
    columns = _columns(elements, [(tables[name], pose) for name in tables for pose in queried[name]])

    clouds, found = [], []
    with evaluating(model):
        for element in columns:
            cloud = transformed(x, element)
            clouds.append(cloud.coords.detach().double().cpu().numpy())
            calls = calls_of_layers(model, cloud, edge_index, chosen)
            moved = {name: [tables[name].moved(element, pose) for pose in queried[name]] for name in chosen}
            found.append({n: attention_of_point(layer, calls[n], point, moved[n]) for n, layer in chosen.items()})

    rows = []
    for name, layer in chosen.items():
        table = tables[name]
        for k, pose in enumerate(queried[name]):
            weights = np.stack([one[name][k] for one in found])  # columns, heads, N
            most = most_concentrated(weights[0]) if head is None else head
            lines = [name.removesuffix(".attention")] if name else []  # the end that all layers have
            lines += [f"head {most}"] if layer.num_heads > 1 else []
            lines += [f"pose {name_element(table.action[pose])}"] if len(given) > 1 else []
            lines.append(f"up to {np.abs(weights[0, most]).max():.2g}")
            frames = table.action[[table.moved(element, pose) for element in columns]]
            rows.append(Row("\n".join(lines), weights[:, most], frames, len(table.action) > 1))
    headings = [
        "as it is" if np.allclose(matrix, np.eye(len(matrix))) else name_element(matrix)
        for matrix in (gspace.basespace_action(element) for element in columns)
    ]
    return draw_clouds(clouds, rows, headings, point, style, title)


def _check_cloud(x: object, gspace: GSpace) -> GeometricTensor:
    """``x``, if it is a cloud of points in two or three dimensions over ``gspace``."""
    if not isinstance(x, GeometricTensor):
        raise TypeError(f"x: got {type(x).__name__}, needed a GeometricTensor with coords")
    if x.coords is None:
        raise ValueError(f"x: got features on a grid, of shape {tuple(x.tensor.shape)}, needed points with coords")
    if x.type.gspace != gspace:
        raise ValueError(f"x: its gspace is {x.type.gspace.name}, that of the layers {gspace.name}")
    if gspace.dimensionality not in (2, 3):
        raise ValueError(f"x: got points in {gspace.dimensionality} dimensions, needed 2 or 3 to draw")
    return x


def _columns(elements: Any, queries: Sequence[tuple[LayerPoses, int]]) -> list[GroupElement]:
    """The elements that transform the cloud, of those that take the poses of all queries to poses."""
    group = queries[0][0].elements[0].group

    def kept(element: GroupElement) -> bool:
        return all(poses.moved(element, pose) >= 0 for poses, pose in queries)

    if elements is None:
        others = [g for g in queries[0][0].elements if g != group.identity and kept(g)]
        candidates = [group.identity, *others]
        return [candidates[i] for i in sorted({k * len(candidates) // _COLUMNS for k in range(_COLUMNS)})]
    found = [check_element("elements", element, group) for element in check_some("elements", elements)]
    for element in found:
        if not kept(element):
            raise ValueError(f"elements: {element} takes the pose of the query to none of the samples of the layers")
    return found


PointLayer: TypeAlias = PointSelfAttention | PointAttentiveConv


class LayerPoses:
    """The poses of a layer, their matrices ``action`` ``(poses, d, d)``, and where group elements take them.

    ``elements`` are those of a finite group; of a continuous one as many as the layer has samples.
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


def calls_of_layers(
    model: torch.nn.Module, x: GeometricTensor, edge_index: Tensor | None, layers: dict[str, PointLayer]
) -> dict[str, Any]:
    """The arguments with which the model calls its layers, for the first time.

    Raises:
        ValueError: it does not call one, or calls one with other points.
    """
    edges = {} if edge_index is None else {"edge_index": edge_index}
    caught = watch(lambda: model(x, **edges), layers, inputs="all")
    for name in layers:
        if name not in caught:
            raise ValueError(f"layers: the {type(model).__name__} does not call {name!r}")
        arrived = next((value for value in caught[name][0] if isinstance(value, GeometricTensor)), x)
        if len(arrived.tensor) != len(x.tensor):
            raise ValueError(
                f"layers: {name!r} is called with {len(arrived.tensor)} points, needed the {len(x.tensor)} of x"
            )
    return caught


@torch.no_grad()
def attention_of_point(
    layer: PointLayer, call: tuple[tuple[Any, ...], dict[str, Any]], point: int, poses: Sequence[int]
) -> npt.NDArray[np.float64]:
    """The attention ``(poses, heads, N)`` of a point to all, in some poses, for the arguments ``call`` of the layer."""
    given = inspect.signature(layer.forward).bind(*call[0], **call[1]).arguments
    if given.pop("mask", None) is not None:
        raise ValueError("layers: got a layer that is called with a mask, needed a cloud whose points are all there")
    maps = layer.attention_maps(positions=[point], poses=poses, **given)
    return maps[0, :, :, 0].double().sum(3).mean(2).transpose(0, 1).cpu().numpy()


def most_concentrated(weights: npt.NDArray[np.float64]) -> int:
    """The head of ``(heads, N)`` with the least entropy."""
    share = np.abs(weights) / np.maximum(np.abs(weights).sum(-1, keepdims=True), 1e-300)
    return int((-(share * np.log(np.maximum(share, 1e-12))).sum(-1)).argmin())
