"""Where a point of a cloud looks, and where it looks when the cloud is transformed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from escnn.group import GroupElement
from escnn.gspaces import GSpace
from escnn.nn import GeometricTensor
from torch import Tensor

from escnn_attention.equivariance.inspection import evaluating
from escnn_attention.plotting._arguments import check_element, check_index, check_some
from escnn_attention.plotting._cloud_drawing import CloudStyle, Row, draw_clouds
from escnn_attention.plotting._cloud_weights import (
    LayerPoses,
    attention_of_point,
    calls_of_layers,
    find_point_layers,
    most_concentrated,
    transformed_cloud,
)
from escnn_attention.plotting._names import name_element
from escnn_attention.plotting._sheet import figure_class

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plot_cloud_attention"]

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

    The weights are exact for all layers, encodings, neighbourhoods and backends: what comes out of a head is linear in
    the values, and they are its derivative. Of :class:`PointAttentiveConv` they are :math:`\alpha`, without the kernel.

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
        ImportError: matplotlib is missing.
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
    chosen = find_point_layers(model, layers)
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
            cloud = transformed_cloud(x, element)
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
