"""Where a point of a cloud looks, and where it looks when the cloud is turned."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from escnn.group import GroupElement
from escnn.gspaces import GSpace
from escnn.nn import GeometricTensor
from torch import Tensor

from escnn_attention.equivariance.inspection import evaluating, find_layer
from escnn_attention.groups.fibers import fibers
from escnn_attention.groups.samples import Samples
from escnn_attention.nn import PointAttentiveConv, PointSelfAttention
from escnn_attention.plotting._drawing import GREY, SMALL_PRINT, Sheet, check_index, figure_class, name_element

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plot_cloud_attention"]

_COLUMNS = 4  # turns, by default
_POSITIVE, _NEGATIVE = np.array([0.835, 0.369, 0.0]), np.array([0.0, 0.447, 0.698])
_BOND = "#9A9A9A"
_FRAME = (0.3, 0.2, 0.12)  # the lengths of the axes of a pose, in inches
_LISTED = 12  # names in an error message

_Layer = PointSelfAttention | PointAttentiveConv


@dataclass(frozen=True)
class _Row:
    """One pose of the query in one layer.

    Attributes:
        name: of the layer, the head and the pose.
        weights: ``(columns, N)``; the attention of the query to the points in each turned cloud.
        frames: ``(columns, d, d)``; the poses of the query there, as matrices.
        poses: whether the layer has more than one.
    """

    name: str
    weights: npt.NDArray[np.float64]
    frames: npt.NDArray[np.float64]
    poses: bool


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
    labels: Sequence[str] | None = None,
    bonds: Sequence[tuple[int, int]] | None = None,
    view: tuple[float, float] = (35.0, -60.0),
    title: str = "Where a point looks, and how that turns with the cloud",
) -> Figure:
    r"""The attention of a point to the others of a cloud, layer by layer, in the cloud turned by group elements.

    A row is a layer and a pose h of the query, a column the cloud turned by an element g. The query is turned as a
    whole, from (x, h) to (gx, gh): the ring is the point, the black lines from it are the axes of its pose, the first
    the longest. Colours are its attention to every point, summed over the poses of the keys,

    .. math:: a(j) = \sum_{\hat h} \mathrm{softmax}_{(j, \hat h)}\big( s_h(i, h; j, \hat h) \big),

    with ``query="all"`` the mean over the poses of the query of what the output pose h adds up. It turns with the
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
        elements: the elements that turn the cloud; by default the first one and some others, spread over the group.
        edge_index: ``(2, E)``, edges that the model is called with.
        labels: what is written on the points, such as the symbols of atoms.
        bonds: pairs of points between which a line is drawn.
        view: elevation and azimuth in degrees from which clouds in space are seen.
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
        >>> from escnn import gspaces, nn
        >>> from escnn_attention.models import PointTransformer
        >>> from escnn_attention.plotting import plot_cloud_attention
        >>> g = gspaces.rot2dOnR2(4)
        >>> network = PointTransformer(g, in_type=1, out_type=1, fields=4, num_blocks=2, num_heads=2)
        >>> cloud = nn.GeometricTensor(torch.ones(7, 1), network.in_type, torch.randn(7, 2))
        >>> figure = plot_cloud_attention(cloud, network, point=3)
        >>> len(figure.axes)  # two layers, the cloud and three turns of it
        8
    """
    figure_class()
    chosen = _find(model, layers)
    gspace = next(iter(chosen.values())).space
    coords = _check_cloud(x, gspace)
    point = check_index("point", point, len(coords))
    for layer in chosen.values():
        if layer.space != gspace:
            raise ValueError(f"layers: got some over {gspace.name} and some over {layer.space.name}, needed one gspace")
        if head is not None:
            head = check_index("head", head, layer.num_heads)
    names = None if labels is None else _check_labels(labels, len(coords))
    pairs = [] if bonds is None else _check_bonds(bonds, len(coords))
    seen_from = _check_view(view)
    tables = {name: _Poses(layer) for name, layer in chosen.items()}
    given = _some("poses", poses)
    queried = {name: [table.index(pose) for pose in given] for name, table in tables.items()}
    turns = _choose(elements, [(tables[name], pose) for name in tables for pose in queried[name]])

    clouds, found = [], []
    with evaluating(model):
        for element in turns:
            turned = _turned(x, element)
            clouds.append(turned.coords.detach().double().cpu().numpy())
            arrived = _arriving(model, turned, edge_index, chosen)
            weights = {}
            for name, layer in chosen.items():
                indices = [tables[name].turned(element, pose) for pose in queried[name]]
                weights[name] = _weights(layer, arrived[name], point, indices)
            found.append(weights)

    rows = []
    for name, layer in chosen.items():
        table = tables[name]
        for k, pose in enumerate(queried[name]):
            weights = np.stack([one[name][k] for one in found])  # columns, heads, N
            most = _most_concentrated(weights[0]) if head is None else head
            lines = [_short(name)] if name else []
            lines += [f"head {most}"] if layer.num_heads > 1 else []
            lines += [f"pose {_name(table.action[pose])}"] if len(given) > 1 else []
            lines.append(f"up to {np.abs(weights[0, most]).max():.2g}")
            frames = table.action[[table.turned(element, pose) for element in turns]]
            rows.append(_Row("\n".join(lines), weights[:, most], frames, len(table.action) > 1))
    headings = [
        "as it is" if np.allclose(matrix, np.eye(len(matrix))) else _name(matrix)
        for matrix in (gspace.basespace_action(element) for element in turns)
    ]
    return _draw(clouds, rows, headings, point, names, pairs, seen_from, title)


class _Poses:
    """The poses of a layer, and where a turn takes them.

    Args:
        layer: the layer.

    Attributes:
        elements: all elements of a finite group; of a continuous one as many as the layer has samples.
        action: ``(poses, d, d)``; the matrix of each pose.
    """

    def __init__(self, layer: _Layer):
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
        if pose.group != self._group:
            raise ValueError(f"poses: got an element of {pose.group.name}, needed one of {self._group.name}")
        if not self._group.continuous:
            return self.elements.index(pose)
        found = self._at(self._gspace.basespace_action(pose))
        if found < 0:
            raise ValueError(f"poses: {pose} is none of the {len(self.action)} samples of the layer")
        return found

    def turned(self, element: GroupElement, pose: int) -> int:
        """The index of the pose gh, or -1 if no sample is there."""
        if not self._group.continuous:
            return self.elements.index(element @ self.elements[pose])
        return self._at(self._gspace.basespace_action(element) @ self.action[pose])

    def _at(self, matrix: npt.NDArray[np.float64]) -> int:
        distances = np.abs(self.action - matrix).max(axis=(1, 2))
        return int(distances.argmin()) if distances.min() < self._near else -1


def _find(model: object, layers: Any) -> dict[str, _Layer]:
    """Layers by their names in the model; that of the model itself is empty."""
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
    chosen: dict[str, _Layer] = {}
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


def _check_cloud(x: object, gspace: GSpace) -> Tensor:
    if not isinstance(x, GeometricTensor):
        raise TypeError(f"x: got {type(x).__name__}, needed a GeometricTensor with coords")
    if x.coords is None:
        raise ValueError(f"x: got features on a grid, of shape {tuple(x.tensor.shape)}, needed points with coords")
    if x.type.gspace != gspace:
        raise ValueError(f"x: its gspace is {x.type.gspace.name}, that of the layers {gspace.name}")
    if gspace.dimensionality not in (2, 3):
        raise ValueError(f"x: got points in {gspace.dimensionality} dimensions, needed 2 or 3 to draw")
    coords: Tensor = x.coords
    return coords


def _check_labels(labels: Sequence[str], number: int) -> list[str]:
    if isinstance(labels, str) or not isinstance(labels, Iterable):
        raise TypeError(f"labels: got {labels!r}, needed a sequence with one for each point")
    names = [str(label) for label in labels]
    if len(names) != number:
        raise ValueError(f"labels: got {len(names)}, needed one for each of {number} points")
    return names


def _check_bonds(bonds: Any, number: int) -> list[tuple[int, int]]:
    try:
        pairs = [(i, j) for i, j in bonds]
    except (TypeError, ValueError):
        raise TypeError(f"bonds: got {bonds!r}, needed pairs of numbers of points") from None
    return [(check_index("bonds", i, number), check_index("bonds", j, number)) for i, j in pairs]


def _check_view(view: Any) -> tuple[float, float]:
    try:
        elevation, azimuth = view
        return float(elevation), float(azimuth)
    except (TypeError, ValueError):
        raise TypeError(f"view: got {view!r}, needed an elevation and an azimuth in degrees") from None


def _some(name: str, values: Any) -> list[Any]:
    if isinstance(values, (str, GroupElement)) or not isinstance(values, Iterable):
        raise TypeError(f"{name}: got {values!r}, needed a sequence")
    found = list(values)
    if not found:
        raise ValueError(f"{name}: got none, needed at least one")
    return found


def _choose(elements: Any, queries: Sequence[tuple[_Poses, int]]) -> list[GroupElement]:
    """The elements that turn the cloud, of those that take the poses of all queries to poses."""
    group = queries[0][0].elements[0].group

    def kept(element: GroupElement) -> bool:
        return all(poses.turned(element, pose) >= 0 for poses, pose in queries)

    if elements is None:
        others = [g for g in queries[0][0].elements if g != group.identity and kept(g)]
        candidates = [group.identity, *others]
        return [candidates[i] for i in sorted({k * len(candidates) // _COLUMNS for k in range(_COLUMNS)})]
    found = _some("elements", elements)
    for element in found:
        if not isinstance(element, GroupElement):
            raise TypeError(f"elements: got {element!r}, needed an element of {group.name}")
        if element.group != group:
            raise ValueError(f"elements: got an element of {element.group.name}, needed one of {group.name}")
        if not kept(element):
            raise ValueError(f"elements: {element} takes the pose of the query to none of the samples of the layers")
    return found


def _turned(x: GeometricTensor, element: GroupElement) -> GeometricTensor:
    """``x.transform(element)`` in any precision: escnn goes through NumPy."""
    precise = x.tensor.detach() if x.tensor.dtype == torch.float64 else x.tensor.detach().float()
    fields = GeometricTensor(precise, x.type, x.coords.detach().double()).transform_fibers(element)
    matrix = torch.as_tensor(x.type.gspace.basespace_action(element), dtype=torch.float64, device=x.coords.device)
    return GeometricTensor(fields.tensor.to(x.tensor), x.type, (x.coords.detach().double() @ matrix.T).to(x.coords))


def _arriving(
    model: torch.nn.Module, x: GeometricTensor, edge_index: Tensor | None, layers: dict[str, _Layer]
) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """The arguments with which the model calls its layers, for the first time."""
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
    """What a later module may work on in place."""
    if isinstance(value, GeometricTensor):
        return GeometricTensor(value.tensor.detach().clone(), value.type, value.coords)
    return value


def _weights(
    layer: _Layer, call: tuple[tuple[Any, ...], dict[str, Any]], point: int, poses: Sequence[int]
) -> npt.NDArray[np.float64]:
    """``(poses, heads, N)``, the attention of a point in some of the output poses.

    The output of the heads is linear in the values, and what a value is multiplied by is its weight.
    """
    plain, heads = layer.plain, layer.num_heads
    values: list[Tensor] = []
    outputs: list[Tensor] = []

    def project(module: torch.nn.Module, arguments: tuple[Any, ...], fields: Tensor) -> Tensor:
        q, v, k = fields.detach().unflatten(0, (3, heads)).unbind(0)
        values.append(torch.zeros_like(v).requires_grad_())  # (heads, 1, N, P, C)
        return torch.stack([q, values[0], k]).flatten(0, 1)

    def keep(module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        outputs.append(arguments[0])  # (heads, 1, N, |H|, C)

    handles = [plain.project_in.register_forward_hook(project), plain.project_out.register_forward_pre_hook(keep)]
    kernel, plain.values = plain.values, None
    try:
        with torch.enable_grad():
            layer(*call[0], **call[1])
            (v,), (y,) = values, outputs
            found = []
            for pose in poses:
                read = y[:, 0, point, pose, 0].sum()
                slope = None
                if read.requires_grad:  # which it does not where nobody sees anybody
                    (slope,) = torch.autograd.grad(read, v, retain_graph=True, allow_unused=True)
                # A head reads its own values only, and the first channel the first.
                found.append((torch.zeros_like(v) if slope is None else slope)[:, 0, :, :, 0].sum(-1))
    finally:
        plain.values = kernel
        for handle in handles:
            handle.remove()
    total = v.shape[3] * plain.query_weight if plain.query == "all" else 1.0
    return (torch.stack(found).detach().double() / total).cpu().numpy()


def _most_concentrated(weights: npt.NDArray[np.float64]) -> int:
    """The head of ``(heads, N)`` with the least entropy."""
    share = np.abs(weights) / np.maximum(np.abs(weights).sum(-1, keepdims=True), 1e-300)
    return int((-(share * np.log(np.maximum(share, 1e-12))).sum(-1)).argmin())


def _short(name: str) -> str:
    """Without the end that all layers have."""
    return name.removesuffix(".attention")


def _name(matrix: npt.NDArray[np.float64]) -> str:
    """An element by its orthogonal matrix: an angle, in space about an axis."""
    if len(matrix) == 2:
        return name_element(matrix)
    inverted = np.linalg.det(matrix) < 0
    turn = -matrix if inverted else matrix
    cosine = float(np.clip((np.trace(turn) - 1) / 2, -1, 1))
    degrees = round(math.degrees(math.acos(cosine)), 1)
    if degrees == 0:
        return "inversion" if inverted else "0°"
    # The symmetric part has the axis without a sign, the skew part the sign, but of turns by 180°.
    line = turn + turn.T - 2 * cosine * np.eye(3)
    axis = line[:, int(np.abs(np.diag(line)).round(6).argmax())]
    axis = axis / np.abs(axis).max()
    skew = np.array([turn[2, 1] - turn[1, 2], turn[0, 2] - turn[2, 0], turn[1, 0] - turn[0, 1]])
    axis = axis * (np.sign(axis @ skew) if degrees < 180 else np.sign(axis[np.abs(axis).round(6).argmax()]))
    if degrees < 180 and axis.round(6).sum() < 0:
        axis, degrees = -axis, round(360 - degrees, 1)
    numbers = [f"{a:.2f}".rstrip("0").rstrip(".") for a in np.where(np.abs(axis) < 5e-3, 0.0, axis)]
    lone = np.flatnonzero(np.abs(axis) > 1e-6)
    along = "xyz"[lone[0]] if len(lone) == 1 else f"({', '.join(numbers)})"
    if inverted and degrees == 180:
        return f"mirror along {along}"
    return f"{degrees:g}° about {along}" + (", inverted" if inverted else "")


def _draw(
    clouds: Sequence[npt.NDArray[np.float64]],
    rows: Sequence[_Row],
    headings: Sequence[str],
    point: int,
    labels: Sequence[str] | None,
    bonds: Sequence[tuple[int, int]],
    view: tuple[float, float],
    title: str,
) -> Figure:
    centred = [cloud - cloud.mean(axis=0) for cloud in clouds]
    axes = _screen(view) if clouds[0].shape[1] == 3 else np.eye(3)[:2, :2]
    # One scale for all panels, which are as high as they need to be.
    across, up = (max(float(np.abs(cloud @ axis).max()) for cloud in centred) for axis in axes[:2])
    reach = 1.16 * max(across, up) or 1.0
    cell, left, right, below = 2.1, 1.25, 0.15, 0.32
    high = cell * max(1.2 * up / reach, 0.5)
    inch = 2 * reach / cell
    diameter = 12.0 if labels else _diameter(centred[0] / inch * 72)
    marks = "ring and axes: the query and its pose" if rows[0].poses else "ring: the query"
    note = f"{marks}; colour and lines: its attention; below: the largest difference from the first column"
    sheet = Sheet(left + cell * len(clouds) + right, Sheet.TOP + 0.15 + len(rows) * (high + below), title, note)
    for r, row in enumerate(rows):
        y = Sheet.TOP + 0.1 + r * (high + below)
        sheet.text(left - 0.1, y + high / 2, row.name, ha="right", fontsize=9, linespacing=1.35)
        strongest = float(np.abs(row.weights).max()) or 1.0
        for c, cloud in enumerate(centred):
            x = left + c * cell
            ax = _panel(sheet, x, y, cell, high, reach, None if len(axes) == 2 else view)
            frame = row.frames[c] if row.poses else None
            nearness = np.zeros(len(cloud)) if len(axes) == 2 else cloud @ axes[2]
            _draw_cloud(ax, cloud, nearness, row.weights[c] / strongest, point, frame, inch, diameter, labels, bonds)
            if r == 0:
                sheet.text(x + cell / 2, y - 0.07, headings[c], ha="center", fontsize=9.5)
            if c:
                difference = float(np.abs(row.weights[c] - row.weights[0]).max())
                found = f"{difference:.0e}" if difference else "0"
                sheet.text(x + cell / 2, y + high + 0.07, found, ha="center", fontsize=8, color=SMALL_PRINT)
    return sheet.figure


def _diameter(points: npt.NDArray[np.float64]) -> float:
    """So wide that most points do not touch, all in points of typography."""
    if len(points) < 2:
        return 9.0
    apart = np.linalg.norm(points[:, None] - points, axis=-1) + np.diag(np.full(len(points), np.inf))
    return float(np.clip(0.7 * np.median(apart.min(axis=1)), 3.5, 9.0))


def _screen(view: tuple[float, float]) -> npt.NDArray[np.float64]:
    """The directions to the right, upwards, and to the eye, as rows."""
    elevation, azimuth = map(math.radians, view)
    right = np.array([-math.sin(azimuth), math.cos(azimuth), 0.0])
    eye = np.array([math.cos(elevation) * right[1], -math.cos(elevation) * right[0], math.sin(elevation)])
    return np.stack([right, np.cross(eye, right), eye])


def _panel(
    sheet: Sheet, x: float, y: float, width: float, height: float, reach: float, view: tuple[float, float] | None
) -> Any:
    """Axes with as many units in an inch in all directions, ``reach`` from the middle to the sides."""
    if view is None:
        ax = sheet.panel(x + 0.05, y + 0.05, width - 0.1, height - 0.1)
        ax.set_xlim(-reach, reach)
        ax.set_ylim(*(np.array([-reach, reach]) * (height - 0.1) / (width - 0.1)))
        for spine in ax.spines.values():
            spine.set_edgecolor("#DDDDDD")
        return ax
    from mpl_toolkits.mplot3d import Axes3D, proj3d  # type: ignore[import-untyped]

    # Axes in space are square: above and below they may reach into their neighbours.
    bottom = sheet.height - y - (height + width) / 2
    box = (x + sheet.left) / sheet.width, bottom / sheet.height, width / sheet.width, width / sheet.height
    space = Axes3D(sheet.figure, box, proj_type="ortho", computed_zorder=False)
    sheet.figure.add_axes(space)
    space.set_axis_off()
    space.patch.set_visible(False)
    space.set(xlim=(-reach, reach), ylim=(-reach, reach), zlim=(-reach, reach))
    space.set_box_aspect((1, 1, 1))
    space.view_init(*view)
    ends = np.outer([-reach, reach], _screen(view)[0])
    shown = proj3d.proj_transform(*ends.T, space.get_proj())[0]
    space.set_box_aspect((1, 1, 1), zoom=space.viewLim.width / float(np.ptp(shown)))
    return space


def _draw_cloud(
    ax: Any,
    cloud: npt.NDArray[np.float64],
    nearness: npt.NDArray[np.float64],
    shares: npt.NDArray[np.float64],
    point: int,
    frame: npt.NDArray[np.float64] | None,
    inch: float,
    diameter: float,
    labels: Sequence[str] | None,
    bonds: Sequence[tuple[int, int]],
) -> None:
    """One cloud with shares of attention between -1 and 1; what is near hides what is not.

    An ``inch`` is so many units of the coordinates; the ``diameter`` of points is in points of typography.
    """
    from matplotlib.patheffects import Normal, withStroke

    strength = np.sqrt(np.abs(shares))
    hue = np.where(shares[:, None] < 0, _NEGATIVE, _POSITIVE)
    order = 2 + (nearness - nearness.min()) / (np.ptp(nearness) or 1.0)
    for i, j in bonds:
        ax.plot(*cloud[[i, j]].T, color=_BOND, linewidth=2.2, zorder=min(order[i], order[j]), solid_capstyle="round")
    for j in range(len(cloud)):
        if j != point and strength[j] > 0.02:  # fainter ones cannot be seen
            width, alpha = 0.4 + 2.8 * abs(shares[j]), 0.8 * strength[j]
            ax.plot(*cloud[[point, j]].T, color=hue[j], linewidth=width, alpha=alpha, zorder=1.5)
    order[point] += 0.0 if np.ptp(nearness) else 0.5
    flat = {"depthshade": False} if cloud.shape[1] == 3 else {}
    for j in range(len(cloud)):
        ax.scatter(
            *cloud[j][:, None],
            s=(1.1 * diameter if j == point else diameter) ** 2,
            color=[1 - strength[j] * (1 - hue[j])],
            edgecolors="black" if j == point else GREY,
            linewidths=0.2 * diameter if j == point else 0.07 * diameter,
            zorder=order[j] + 0.001,
            **flat,
        )
        if labels:
            ax.text(*cloud[j], labels[j], ha="center", va="center", fontsize=7.5, zorder=order[j] + 0.002)
    if frame is not None:
        start = 0.85 * diameter / 72 * inch
        for k, axis in enumerate(frame.T):
            ends = cloud[point] + np.stack([start * axis, (start + _FRAME[k] * inch) * axis])
            (drawn,) = ax.plot(*ends.T, color="black", linewidth=2.0 - 0.4 * k, zorder=4, solid_capstyle="round")
            drawn.set_path_effects([withStroke(linewidth=4.4 - 0.4 * k, foreground="white"), Normal()])
