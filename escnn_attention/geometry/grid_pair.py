"""The offsets between the positions of two grids."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from escnn_attention.geometry.cache import constant_tables
from escnn_attention.geometry.grid import Grid, Offsets, check_around, shortest_steps
from escnn_attention.geometry.lattice import everything, indices, longest_square, tiles, to_space
from escnn_attention.geometry.windows import Blocks, WindowShape, is_circular


class GridPair(Offsets):
    """The offsets between the positions of two grids that share their centre; attributes are those of :class:`Grid`.

    On a torus they are the shortest ones, of which positions half a torus apart have several: see
    :meth:`Grid.averaged`. Both grids cover the same torus. A ValueError for grids of different dimensions, a dilated
    window, or a query that sees no key.

    Args:
        queries: with the window of keys that each of its positions sees: those less than half the width away, in steps
            of the grid of the keys. It is the same neighbourhood where both grids are the same.
        keys: its ``spacing`` and that of the queries have the same unit; one of 0 puts all positions at the centre.

    >>> from escnn_attention.geometry.windows import Window
    >>> fine, coarse = Grid((4,), Window(3)), Grid((2,), Window(), spacing=2)
    >>> pair = GridPair(fine, coarse)  # queries at -1.5, -0.5, 0.5, 1.5, and keys at -1, 1
    >>> pair.offsets[pair.rows(torch.arange(4)[:, None], torch.arange(2)).clamp(min=0)].squeeze(-1)[0]
    tensor([0.2500, 1.2500], dtype=torch.float64)
    """

    def __init__(self, queries: Grid, keys: Grid):
        if len(queries.shape) != len(keys.shape):
            raise ValueError(f"key_grid: got shape {keys.shape}, needed {len(queries.shape)} axes as of the queries")
        window = queries.window
        if window.dilation != 1:
            raise ValueError(f"dilation: got {window.dilation} for keys on another grid, needed 1")
        if window.causal:
            raise ValueError(f"window: got {window.shape!r} for keys on another grid, needed {window.form!r}")
        if window.circular:
            _check_torus(queries, keys)
        self.window, self.complete = window, queries.complete
        shapes = (queries.shape, queries.spacing, keys.shape, keys.spacing, window.kernel_size, window.shape)
        self._key = (*shapes, queries.offsets.dtype, queries.offsets.device)
        tables = _pair_tables(*self._key)
        self._queries, self._keys, self._lookup, self._shortest, *points = tables
        if queries.frame is not None:
            exact = _pair_tables(*shapes, torch.float64, torch.device("cpu"))[4:]
            points = [(t @ queries.frame.double().cpu().T).to(queries.offsets) for t in exact]
        self.offsets, self.coordinates, self.key_coordinates, self.places, self.key_places = points
        self._axes = _axes(*shapes[:4], window.circular)

    def rows(self, queries: Tensor, keys: Tensor) -> Tensor:
        """The row of ``offsets`` for each pair of positions, broadcast against each other; -1 for no neighbours."""
        row = torch.zeros_like(queries + keys)
        for axis, side in enumerate(self._axes):
            row = row * side.number + side.row(self._keys[keys, axis] - self._queries[queries, axis])
        return self._lookup[row]

    def blocks(self, max_queries: int) -> Blocks:
        """A partition of the queries in blocks; ``max_queries`` limits blocks that see every position."""
        if self.complete:
            return everything(self.rows, len(self._queries), len(self._keys), max_queries, self._queries.device)
        return Blocks(*_pair_tiles(*self._key[:6], self._key[-1]))


def _check_torus(queries: Grid, keys: Grid) -> None:
    """Both grids cover one torus, around which no window reaches."""
    sides = [tuple(n * grid.spacing for n in grid.shape) for grid in (queries, keys)]
    if sides[0] != sides[1]:
        raise ValueError(
            f"spacing: got tori of sides {sides[0]} for queries and {sides[1]} for keys, needed the same sides: "
            f"spacings in inverse proportion to the numbers of positions, {queries.shape} and {keys.shape}"
        )
    check_around(keys.shape, queries.window)


class _Axis(NamedTuple):
    """The offsets between two grids along an axis, in half steps; ``period`` is that of a torus, or 0."""

    low: int
    step: int
    number: int
    period: int

    def row(self, offset: Tensor) -> Tensor:
        """Which of the offsets it is, or is equivalent to."""
        away = offset - self.low
        return (away % self.period if self.period else away) // self.step

    def steps(self) -> Tensor:
        """All of them."""
        return self.low + self.step * torch.arange(self.number)


def _axes(
    query_shape: tuple[int, ...], query_spacing: int, key_shape: tuple[int, ...], key_spacing: int, circular: bool
) -> list[_Axis]:
    """The offsets along the axes of two grids; on a torus the shortest, of two half around the positive one."""
    step = 2 * math.gcd(query_spacing, key_spacing) or 1
    axes = []
    for n, m in zip(query_shape, key_shape, strict=True):
        low, period = -(query_spacing * (n - 1) + key_spacing * (m - 1)), 0
        number = -2 * low // step + 1
        if circular and (side := n * query_spacing):
            low, number, period = (low + side - 1) % step - side + 1, 2 * side // step, 2 * side
        axes.append(_Axis(low, step, number, period))
    return axes


def cell_of(query_spacing: int, key_spacing: int) -> tuple[int, int]:
    """How many queries and how many keys lie in a cell along an axis, alike in all cells.

    >>> cell_of(1, 2), cell_of(6, 4)
    ((2, 1), (2, 3))
    """
    common = math.gcd(query_spacing, key_spacing)
    return key_spacing // common, query_spacing // common


@constant_tables
def cell_tables(
    query_shape: tuple[int, ...],
    query_spacing: int,
    key_shape: tuple[int, ...],
    key_spacing: int,
    kernel_size: int | None,
    window_shape: WindowShape,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The keys that queries see, told by cells.

    Position number b along an axis lies in cell b // n, in slot b % n of its n. The result is both shapes; for every
    key of a query in each slot the number of cells to it along the axes, its slot, and the row of
    :attr:`GridPair.offsets`, ``(K, d + 2)``; and where those of each slot begin, and the last end, ``(slots + 1,)``.

    >>> *_, keys, starts = cell_tables((4,), 1, (2,), 2, 1, "square")  # queries at -1.5 to 1.5, keys at -1 and 1
    >>> keys.tolist(), starts.tolist()  # the first query of a cell sees the key half a step behind it
    ([[0, 0, 1], [0, 0, 0]], [0, 1, 2])
    """
    queries, keys = cell_of(query_spacing, key_spacing)
    sides = _axes(query_shape, query_spacing, key_shape, key_spacing, is_circular(window_shape))
    lookup = _pair_tables(
        *(query_shape, query_spacing, key_shape, key_spacing, kernel_size, window_shape),
        *(torch.float64, torch.device("cpu")),
    )[2]
    found, dim = [], len(query_shape)
    for slot in itertools.product(range(queries), repeat=dim):
        axes = []
        for at, n, m, side in zip(slot, query_shape, key_shape, sides, strict=True):
            key = torch.arange(-m, 2 * m) if side.period else torch.arange(-keys * ((n - 1) // queries), m)
            # Twice the offset.
            offset = 2 * (key_spacing * key - query_spacing * at) + query_spacing * (n - 1) - key_spacing * (m - 1)
            row = (offset - side.low) // side.step
            seen = (row >= 0) & (row < side.number)
            if kernel_size is not None:
                seen &= offset.abs() < kernel_size * key_spacing
            axes.append((key[seen], row[seen]))
        places, boxes = (indices([axis[i] for axis in axes]) for i in (0, 1))
        row = torch.zeros(len(boxes), dtype=torch.long)
        slot_of_key = torch.zeros_like(row)
        for axis, side in enumerate(sides):
            row = row * side.number + boxes[:, axis]
            slot_of_key = slot_of_key * keys + places[:, axis] % keys
        row = lookup[row]
        cells = places.div(keys, rounding_mode="floor")
        found.append(torch.cat([cells, slot_of_key.unsqueeze(1), row.unsqueeze(1)], dim=1)[row >= 0])
    starts = torch.tensor([0, *(len(t) for t in found)]).cumsum(0)
    return torch.tensor(query_shape), torch.tensor(key_shape), torch.cat(found), starts


@constant_tables
def _pair_tables(
    query_shape: tuple[int, ...],
    query_spacing: int,
    key_shape: tuple[int, ...],
    key_spacing: int,
    kernel_size: int | None,
    window_shape: WindowShape,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The tables of a :class:`GridPair`.

    Twice the positions of queries and keys, which are whole numbers; the row of every offset in the box of their
    differences, -1 where it is not in the window; the numbers of the offsets that belong to each row, where there are
    several; the offsets, and the coordinates and the places of queries and keys.
    """
    # Twice the offsets along an axis are equally spaced whole numbers.
    grids = (query_shape, query_spacing), (key_shape, key_spacing)
    ends = [spacing * (torch.tensor(shape, dtype=torch.long) - 1) for shape, spacing in grids]
    at = [
        2 * spacing * indices([torch.arange(n) for n in shape]) - end
        for (shape, spacing), end in zip(grids, ends, strict=True)
    ]
    sides = _axes(query_shape, query_spacing, key_shape, key_spacing, is_circular(window_shape))
    box, shortest = indices([side.steps() for side in sides]), None
    inside, reach = torch.ones(len(box), dtype=torch.bool), max((1.0, *(box.abs().amax(0) / 2).tolist()))
    if kernel_size is not None:
        reach = key_spacing * max(1, kernel_size // 2)
        inside = _in_window(box.double() / 2 / max(1, key_spacing), kernel_size, window_shape)
        _check_seen(at, sides, key_spacing, kernel_size, window_shape)
    unit = max((0.0, *(t.item() / 2 for end in ends for t in end))) or 1.0
    lookup, steps = torch.where(inside, inside.cumsum(0) - 1, -1), box[inside]
    if kernel_size is None:
        steps, shortest = shortest_steps(steps, tuple(side.period for side in sides))
    points = [to_space(t.double() / 2) for t in at]
    exact = (to_space(steps.double() / 2) / reach, *(t / unit for t in points), *(t / reach for t in points))
    whole = (None if t is None else t.to(device) for t in (*at, lookup, shortest))
    return (*whole, *(t.to(device, dtype) for t in exact))  # type: ignore[return-value]


def _in_window(steps: Tensor, kernel_size: int, window_shape: WindowShape) -> Tensor:
    """Whether offsets ``(n, d)``, in steps that need not be whole, are in a window."""
    inside = (steps.abs() < kernel_size / 2).all(-1)
    longest = longest_square(kernel_size, window_shape)
    return inside if longest is None else inside & (steps.square().sum(-1) <= longest)


def _check_seen(
    at: list[Tensor], sides: list[_Axis], key_spacing: int, kernel_size: int, window_shape: WindowShape
) -> None:
    """Every query sees a key: the one that is farthest from its nearest key does."""
    nearest = [
        side.steps()[side.row(y.unique() - x.unique().unsqueeze(1))].abs().amin(1).max()
        for x, y, side in zip(at[0].T, at[1].T, sides, strict=True)
    ]
    steps = torch.stack(nearest).double() / 2 / max(1, key_spacing)
    if not bool(_in_window(steps.unsqueeze(0), kernel_size, window_shape)):
        apart = ", ".join(f"{s:g}" for s in steps.tolist())
        raise ValueError(
            f"kernel_size: got {kernel_size}, and a query whose nearest key is {apart} steps of the grid of the keys "
            "away along the axes sees none; needed a larger window, or None for all keys"
        )


@constant_tables
def _pair_tiles(
    query_shape: tuple[int, ...],
    query_spacing: int,
    key_shape: tuple[int, ...],
    key_spacing: int,
    kernel_size: int,
    window_shape: WindowShape,
    device: torch.device,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, places and shared rows of the tiles of two grids: see :class:`Blocks`."""
    circular, axes = is_circular(window_shape), []
    box = _axes(query_shape, query_spacing, key_shape, key_spacing, circular)
    for n, m, side in zip(query_shape, key_shape, box, strict=True):
        queries, keys, offsets = _pair_axis_tiles(n, m, (query_spacing, key_spacing), kernel_size)
        # Offsets beyond those of the box are of keys beyond the grid, or that are nearer the other way around a torus.
        axes.append((queries, keys % m if circular else keys, (offsets - side.low) // side.step))
    lookup = _pair_tables(
        *(query_shape, query_spacing, key_shape, key_spacing, kernel_size, window_shape),
        *(torch.float64, torch.device("cpu")),
    )[2]
    return tiles(query_shape, key_shape, axes, tuple(side.number for side in box), lookup, device)


def _pair_axis_tiles(n: int, m: int, spacings: tuple[int, int], kernel_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Along one axis of n queries and m keys: the queries of each tile, the keys that any of them sees, and twice the
    offsets between those of one tile, which are the same in all.

    Behind so many queries the keys lie as they do behind the first: a tile has a multiple of these.
    """
    of_query, of_key = spacings
    common = math.gcd(of_query, of_key)
    period, keys_of_period = of_key // common, of_query // common
    tile = period * -(-(1 if kernel_size == 1 else 2 if kernel_size < 8 else 4) // period)
    at, first_key = of_query * (2 * torch.arange(tile) - (n - 1)), -of_key * (m - 1)
    low, high = int(at[0]) - kernel_size * of_key - first_key, int(at[-1]) + kernel_size * of_key - first_key
    seen = torch.arange(low // (2 * of_key) + 1, -(-high // (2 * of_key)))
    tiles = torch.arange(-(-n // tile)).unsqueeze(1)
    queries = tiles * tile + torch.arange(tile)
    keys = tiles * (keys_of_period * tile // period) + seen
    return queries.masked_fill(queries >= n, -1), keys, 2 * of_key * seen + first_key - at.unsqueeze(1)
