"""Positional encodings as every pose sees them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from escnn.group import GroupElement

from escnn_attention._checks import check_int
from escnn_attention.equivariance.inspection import evaluating, find_attention
from escnn_attention.groups.fibers import Fibers
from escnn_attention.nn.self_attention import GroupSelfAttention, LiftingSelfAttention
from escnn_attention.plotting._drawing import Frame, Sheet, figure_class
from escnn_attention.plotting._elements import MOST_COLUMNS, check_index, name_element, planar, pose_indices

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_FINE = 121  # points along each side of a panel; odd, so that one of them is the centre
_MOST_MARKS = 21  # positions along a side beyond which they are not marked one by one
_COLUMN_WIDTH = 1.4


def plot_encoding(
    model: torch.nn.Module,
    layer: str | torch.nn.Module | None = None,
    *,
    head: int = 0,
    channels: int | Sequence[int] | None = None,
    poses: Sequence[int | GroupElement] | None = None,
    size: int | None = None,
    pose_table: bool = True,
    title: str = "The positional encoding, as every pose sees it",
) -> Figure:
    r"""The positional encoding of a layer under the action of the group (GSA-Nets, Figures 2, B.1 and B.2).

    A panel belongs to a pose h and shows :math:`\rho_x(h^{-1}\Delta)` for one channel, over offsets Δ from the query,
    which is in the middle. The encoding is a continuous function, evaluated on a grid much finer than that of the
    positions (dots): transforming it interpolates nothing. Of a causal layer there are the earlier times only, upwards
    from the query. The arrow is the first axis as h transforms it, and for
    groups with reflections the short one is the second. In the frame of the arrows all panels show the same.

    At the right, where keys have poses, is the table over them: the row of pose h and the column of key pose ĥ show
    :math:`E[h^{-1}\hat h]`. Each row is the first one with its entries permuted by h.

    A constant is lost in the softmax: colours are centred at the mean over the window, for offsets, and over the poses,
    for the table. Of a :class:`RotaryEncoding`, which rotates pairs of channels by the angles Ωδ, a "channel" is the
    sine of one of the angles; an :class:`AbsoluteEncoding` is drawn over positions in place of offsets.

    Args:
        model: an attention layer, or any module that has some.
        layer: the layer: its name in the model, itself, or a block that contains it; by default the first.
        head: the head.
        channels: the channel, or channels, one below the other; by default the one that varies most with the offset.
        poses: the poses, as indices or elements; by default all.
        size: for global attention, the side of the grid, whose positions are marked and in whose units the axes are. By
            default offsets are in units of the longest.
        pose_table: whether to draw the table over the poses of the keys, where the layer has one.
        title: above the figure.

    Raises:
        TypeError: ``model`` is not a module, ``layer`` neither a module nor a name, or a head, channel, pose or size is
            of another type.
        ValueError: there is no such layer, head, channel or pose, the layer has no encoding of positions or is not one
            of the plane, or ``size`` is given for a window or below 2.

    Example:
        >>> from escnn_attention.models import GSANet
        >>> from escnn_attention.plotting import plot_encoding
        >>> from escnn import gspaces
        >>> network = GSANet(gspaces.rot2dOnR2(4), 1, 10, channels=8, blocks=(1,), num_heads=2)
        >>> figure = plot_encoding(network, "stages.attention_1_1", channels=[0, 1], pose_table=False)
        >>> len(figure.axes)  # two channels in four poses, each with a scale of colours
        10
    """
    figure_class()
    attention = find_attention(model, layer)
    table = planar(attention.in_type.gspace)
    shown = pose_indices(table, poses)
    head = check_index("head", head, attention.num_heads)
    domain = _domain(attention, size)
    values = _values(attention, head, domain.points)  # |H|, fine, fine, channels
    chosen = _channels(channels, values[0][domain.inside].var(axis=0))
    rotary = attention.plain.encoding.rotations() is not None
    tables = _tables(attention, table, head) if pose_table and not rotary else None

    # Rotations in one line and reflections below them, for the groups that are common.
    columns = min(len(shown), 4 if len(shown) <= 8 else MOST_COLUMNS)
    lines = -(-len(shown) // columns)  # of panels, for each channel
    cell, left, bar_width, above = _COLUMN_WIDTH, 0.95, 0.65, 0.3
    step = cell + above
    table_width = 0.0 if tables is None else 0.55 + cell
    total = Sheet.TOP - 0.1 + len(chosen) * (lines * step + 0.2) + 0.1
    what = "position" if domain.absolute else "offset from the query"
    note = f"{type(attention.plain.encoding).__name__}, head {head}; over the {what}, {domain.unit}"
    sheet = Sheet(left + columns * cell + bar_width + table_width + 0.15, total, title, note)
    for row, channel in enumerate(chosen):
        top = Sheet.TOP - 0.1 + row * (lines * step + 0.2) + above - 0.15
        high = lines * step - above - 0.1 * cell  # of the panels of this channel
        name = f"{'pair' if rotary else 'channel'} {channel}"
        sheet.text(left - 0.6, top + high / 2, name, rotation=90, ha="center", fontsize=10)
        fields = values[..., channel]
        fields = fields - fields[0][domain.inside].mean()
        limit = float(np.abs(fields[shown][:, domain.inside]).max()) or 1.0
        for place, pose in enumerate(shown):
            x, y = left + place % columns * cell, top + place // columns * step
            ax = sheet.panel(x + 0.05 * cell, y, 0.9 * cell)
            _draw(ax, fields[pose], limit, domain, table, pose)
            if place % columns == 0:
                ax.set_yticks(domain.ticks, domain.names, fontsize=7)
            if place + columns >= len(shown):
                ax.set_xticks(domain.ticks, domain.names, fontsize=7)
        x, names = left + columns * cell, [f"−{limit:.2g}", "0", f"{limit:.2g}"]
        sheet.bar(x + 0.08, top, min(high, 0.9 * cell), np.linspace(1, -1, 64)[:, None], names, cmap="PuOr_r")
        if tables is not None:
            entries = tables[..., channel] - tables[0, :, channel].mean()
            _draw_table(sheet.panel(x + bar_width + 0.5, top, 0.9 * cell), entries[shown], shown)
    return sheet.figure


@dataclass(frozen=True)
class _Domain:
    """Over what an encoding is drawn, in units of its argument."""

    points: npt.NDArray[np.float64]  # (fine, fine, 2), the arguments, y upwards along the first axis
    inside: npt.NDArray[np.bool_]  # (fine, fine), which of them are in the window
    radius: float | None  # of the disc that the window is; None where it is a square
    # Of a causal window, whose earlier times are above, half its width and how far below the query it begins.
    past: tuple[float, float] | None
    half: float  # of the side of the panel
    marks: npt.NDArray[np.float64]  # (n, 2), the positions of the window
    ticks: list[float]  # along each axis
    names: list[str]  # of the ticks
    unit: str  # of the names, for people
    absolute: bool  # positions and not offsets


def _domain(attention: GroupSelfAttention | LiftingSelfAttention, size: int | None) -> _Domain:
    """The window of a layer, or for global attention a grid of a side of ``size``."""
    window = attention.plain.window
    absolute = attention.plain.encoding.absolute
    if window.kernel_size is not None and not absolute:
        if size is not None:
            raise ValueError(f"size: got {size}, but the layer has a window of {window.kernel_size}; leave it at None")
        steps = window.kernel_size - 1 if window.causal else window.kernel_size // 2
        reach, margin, scale = max(steps, 1), 0.5, window.dilation
        unit = "in positions"
    elif size is not None:
        check_int("size", size, least=2)
        # Positions are measured from the centre, which lies between two of them where the size is even.
        steps = reach = size - 1
        margin, scale = 0.5, 1
        unit = "in positions"
    else:
        steps, reach, margin, scale = 0, 1, 0.0, 1
        unit = "in units of half the grid" if absolute else "in units of the longest"
    halves = 2 if absolute and size is not None else 1  # the extent of a grid is twice the reach of its coordinates
    half = (reach + halves * margin) / reach
    axis = np.linspace(-half, half, _FINE)
    points = np.stack(np.meshgrid(axis, axis), axis=-1)
    inside, radius = np.ones(points.shape[:2], dtype=bool), None
    if steps:
        along = np.arange(-steps, steps + 1, halves, dtype=np.float64)
        marks = np.stack(np.meshgrid(along, along), axis=-1).reshape(-1, 2) / reach
    else:
        along = np.zeros(1)
        marks = np.zeros((int(window.kernel_size is not None and not absolute), 2))
    past = None
    if window.causal and not absolute:
        width = half if window.kernel_size is None else (window.kernel_size // 2 + margin) / reach
        past = width, margin / reach
        inside = (np.abs(points[..., 0]) <= width) & (points[..., 1] >= -past[1])
        marks = marks[(np.abs(marks[:, 0]) <= width) & (marks[:, 1] >= 0)]
    elif window.kernel_size is not None and window.form == "disc" and not absolute:
        radius = window.kernel_size / 2 / reach
        inside = np.hypot(points[..., 0], points[..., 1]) <= radius
        marks = marks[np.hypot(marks[:, 0], marks[:, 1]) <= radius]
    if len(along) > _MOST_MARKS:
        marks = marks[:0]
    ticks = [-1.0, 0.0, 1.0]
    names = [f"{t * reach * scale / halves:g}".replace("-", "−") for t in ticks]
    return _Domain(points, inside, radius, past, half, marks, ticks, names, unit, absolute)


def _values(
    attention: GroupSelfAttention | LiftingSelfAttention, head: int, points: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """``(|H|, *points, channels)``: the encoding of one head, as each pose sees it."""
    core = attention.plain
    inverse = core.inverse_action
    with evaluating(attention):
        delta = torch.as_tensor(points, dtype=inverse.dtype, device=inverse.device)
        # As the layer does it: row vectors times the transposed matrix are h⁻¹ applied to every offset.
        seen = delta @ inverse.transpose(-1, -2)[:, None]
        frequencies = core.encoding.rotations()
        if frequencies is not None:
            frequencies = frequencies[min(head, len(frequencies) - 1)]
            values = (seen @ frequencies.transpose(-1, -2).to(seen.dtype)).sin()
        else:
            every_head = core.encoding.offsets(seen)
            if every_head is None:
                raise ValueError(f"layer: its {type(core.encoding).__name__} encodes no positions that could be drawn")
            values = every_head[min(head, len(every_head) - 1)]
    return values.cpu().double().numpy()


def _tables(
    attention: GroupSelfAttention | LiftingSelfAttention, table: Fibers, head: int
) -> npt.NDArray[np.float64] | None:
    """``(|H|, |H|, channels)``: the encoding of pose ĥ of the key for pose h of the query, where the layer has one."""
    embedding = attention.plain.encoding.poses()
    if embedding is None:
        return None
    per_head = embedding.detach().cpu().double().numpy()
    return per_head[min(head, len(per_head) - 1)][table.quotient]


def _channels(channels: int | Sequence[int] | None, variation: npt.NDArray[np.float64]) -> list[int]:
    """Chosen channels, by default the one that varies most."""
    if channels is None:
        return [int(variation.argmax())]
    chosen = list(channels) if isinstance(channels, Iterable) else [channels]
    if not chosen:
        raise ValueError("channels: got none, needed at least one")
    return [check_index("channels", channel, len(variation)) for channel in chosen]


def _draw(
    ax: Axes,
    field: npt.NDArray[np.float64],
    limit: float,
    domain: _Domain,
    table: Fibers,
    pose: int,
) -> None:
    """Draw the encoding that a pose sees, and the pose."""
    # Pixels of the picture are centred at the points that were evaluated: the outer ones stand out by half.
    edge = domain.half * (1 + 1 / (_FINE - 1))
    picture = ax.imshow(
        field, origin="lower", extent=(-edge, edge, -edge, edge), cmap="PuOr_r", vmin=-limit, vmax=limit,
        interpolation="bilinear",
    )  # fmt: skip
    axis = np.linspace(-domain.half, domain.half, _FINE)
    levels = np.linspace(-limit, limit, 9)
    lines = ax.contour(axis, axis, field, levels=levels, colors="#333333", linewidths=0.35, linestyles="solid")
    if domain.radius is not None or domain.past is not None:
        from matplotlib.patches import Circle, Patch, Rectangle

        window: Patch
        if domain.past is None:
            window = Circle((0, 0), domain.radius or 0.0, transform=ax.transData)
        else:
            width, below = domain.past
            window = Rectangle((-width, -below), 2 * width, edge + below, transform=ax.transData)
        picture.set_clip_path(window)
        lines.set_clip_path(window)
    if len(domain.marks):
        size = min(4.0, 60 / math.sqrt(len(domain.marks)) ** 1.5)
        ax.scatter(domain.marks[:, 0], domain.marks[:, 1], s=size, color="#333333", linewidths=0)
    # A little room, so that the frame covers nothing.
    ax.set_xlim(-1.04 * domain.half, 1.04 * domain.half)
    ax.set_ylim(-1.04 * domain.half, 1.04 * domain.half)
    mirrors = bool((np.linalg.det(table.action) < 0).any())
    for axis_index, length in ((0, 0.62), *(((1, 0.4),) if mirrors else ())):
        tip = length * domain.half * table.action[pose][:, axis_index]
        for colour, width in (("white", 3.2), ("black", 1.5)):
            ax.annotate(
                "", xy=tuple(tip), xytext=(0, 0),
                arrowprops={"arrowstyle": "-|>", "color": colour, "linewidth": width, "mutation_scale": 8},
            )  # fmt: skip
    ax.set_title(f"pose {name_element(table.action[pose])}", fontsize=8.5, pad=4)
    Frame(ax, pose, table.order)
    ax.tick_params(length=2, pad=2)


def _draw_table(ax: Axes, entries: npt.NDArray[np.float64], poses: Sequence[int]) -> None:
    """Draw the encoding of key poses (columns) for ``poses`` of the query (rows)."""
    largest = float(np.abs(entries).max()) or 1.0
    ax.imshow(entries, cmap="PuOr_r", vmin=-largest, vmax=largest, interpolation="nearest", aspect="auto")
    ax.set_title("table over poses", fontsize=8.5, pad=4)
    if entries.shape[1] <= MOST_COLUMNS:
        ax.set_xticks(range(entries.shape[1]), map(str, range(entries.shape[1])), fontsize=7)
        ax.set_yticks(range(len(poses)), map(str, poses), fontsize=7)
    ax.tick_params(length=0, pad=2)
    ax.set_xlabel("pose of the key", fontsize=7.5, labelpad=2)
    ax.set_ylabel("pose h", fontsize=7.5, labelpad=4)
