"""The offsets between the positions of two grids."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from escnn_attention.geometry.cache import constant_tables
from escnn_attention.geometry.grid import Grid
from escnn_attention.geometry.lattice import SharedRows, everything, indices, longest_square, ravel, to_space
from escnn_attention.geometry.windows import Blocks, WindowShape

__all__ = ["GridPair", "cell_of", "cell_tables"]


class GridPair:
    """The offsets between the positions of two grids that share their centre.

    Args:
        queries: with the window of keys that each of its positions sees: those less than half the width away, in steps
            of the grid of the keys. It is the same neighbourhood where both grids are the same.
        keys: its ``spacing`` and that of the queries have the same unit. A spacing of 0 puts all positions of a grid at
            the centre.

    Attributes:
        offsets: ``(L, d)``; the offsets that there are, in units of the reach of the window, or of the longest offset.
        coordinates, key_coordinates: ``(N, d)`` and ``(N', d)``; the positions, relative to the centre, in units of
            half the extent of the larger grid.
        scale: the unit of the coordinates in units of the offsets.
        window: that of the queries.
        complete: whether every query sees every key.

    Raises:
        ValueError: grids of different dimensions, a dilated window, or a window without a key for some query.

    Example:
        >>> import torch
        >>> from escnn_attention.geometry.grid import Grid
        >>> from escnn_attention.geometry.grid_pair import GridPair
        >>> from escnn_attention.geometry.windows import Window
        >>> fine, coarse = Grid((4,), Window(3)), Grid((2,), Window(), spacing=2)
        >>> pair = GridPair(fine, coarse)  # queries at -1.5, -0.5, 0.5, 1.5, and keys at -1, 1
        >>> pair.offsets[pair.rows(torch.arange(4)[:, None], torch.arange(2)).clamp(min=0)].squeeze(-1)
        tensor([[ 0.2500,  1.2500],
                [-0.2500,  0.7500],
                [-0.7500,  0.2500],
                [-1.2500, -0.2500]], dtype=torch.float64)
    """

    def __init__(self, queries: Grid, keys: Grid):
        if len(queries.shape) != len(keys.shape):
            raise ValueError(f"key_grid: got shape {keys.shape}, needed {len(queries.shape)} axes as of the queries")
        window = queries.window
        if window.dilation != 1:
            raise ValueError(f"dilation: got {window.dilation} for keys on another grid, needed 1")
        if window.shape != window.form:
            raise ValueError(f"window: got {window.shape!r} for keys on another grid, needed {window.form!r}")
        self.window, self.complete = window, queries.complete
        shapes = (queries.shape, queries.spacing, keys.shape, keys.spacing, window.kernel_size, window.shape)
        self._key = (*shapes, queries.offsets.dtype, queries.offsets.device)
        tables = _pair_tables(*self._key)
        self._queries, self._keys, self._farthest, self._lookup, offsets, coordinates, key_coordinates, scale = tables
        if queries.frame is not None:
            exact = _pair_tables(*shapes, torch.float64, torch.device("cpu"))[4:7]
            turned = [(t @ queries.frame.double().cpu().T).to(queries.offsets) for t in exact]
            offsets, coordinates, key_coordinates = turned
        self.offsets, self.coordinates, self.key_coordinates, self.scale = offsets, coordinates, key_coordinates, scale
        self._step, self._counts = _steps(*shapes[:4])

    def rows(self, queries: Tensor, keys: Tensor) -> Tensor:
        """The row of ``offsets`` for each pair of positions, broadcast against each other; -1 for no neighbours."""
        row = torch.zeros_like(queries + keys)
        for axis, number in enumerate(self._counts):
            offset = self._keys[keys, axis] - self._queries[queries, axis] + self._farthest[axis]
            row = row * number + offset // self._step
        return self._lookup[row]

    def averaged(self, table: Tensor) -> Tensor:
        """A function at all ``offsets``, of which there is one between two positions: see :meth:`Grid.averaged`."""
        return table

    def blocks(self, max_queries: int) -> Blocks:
        """A partition of the queries in blocks; ``max_queries`` limits blocks that see every position."""
        if self.complete:
            return everything(self.rows, len(self._queries), len(self._keys), max_queries, self._queries.device)
        return SharedRows(*_pair_tiles(*self._key[:6], self._key[-1]))


def _steps(
    query_shape: tuple[int, ...], query_spacing: int, key_shape: tuple[int, ...], key_spacing: int
) -> tuple[int, list[int]]:
    """How far the offsets of two grids lie apart along an axis, as numbers of half steps, and how many there are."""
    step = 2 * math.gcd(query_spacing, key_spacing) or 1
    ends = [query_spacing * (n - 1) + key_spacing * (m - 1) for n, m in zip(query_shape, key_shape, strict=True)]
    return step, [2 * end // step + 1 for end in ends]


def cell_of(query_spacing: int, key_spacing: int) -> tuple[int, int]:
    """How many queries and how many keys lie in a cell along an axis: whatever its number, they lie alike in all.

    Example:
        >>> from escnn_attention.geometry.grid_pair import cell_of
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

    Position number b along an axis lies in cell b // n, where it is in slot b % n of the n of a cell. Slots are counted
    as the positions of a grid are.

    Returns:
        ``query_shape`` and ``key_shape`` as tensors; for every key of a query in each slot the number of cells from one
        to the other along the axes, the slot of the key, and the row of :attr:`GridPair.offsets`, ``(K, d + 2)``; and
        where those of each slot begin, and the last end, ``(slots + 1,)``.

    Example:
        >>> from escnn_attention.geometry.grid_pair import cell_tables
        >>> *_, keys, starts = cell_tables((4,), 1, (2,), 2, 1, "square")  # queries at -1.5 to 1.5, keys at -1 and 1
        >>> keys.tolist(), starts.tolist()  # the first query of a cell sees the key half a step behind it
        ([[0, 0, 1], [0, 0, 0]], [0, 1, 2])
    """
    queries, keys = cell_of(query_spacing, key_spacing)
    step, counts = _steps(query_shape, query_spacing, key_shape, key_spacing)
    lookup = _pair_tables(
        *(query_shape, query_spacing, key_shape, key_spacing, kernel_size, window_shape),
        *(torch.float64, torch.device("cpu")),
    )[3]
    found, dim = [], len(query_shape)
    for slot in itertools.product(range(queries), repeat=dim):
        axes = []
        for at, n, m, number in zip(slot, query_shape, key_shape, counts, strict=True):
            key = torch.arange(-keys * ((n - 1) // queries), m)
            # Twice the offset, from the farthest one on.
            offset = 2 * (key_spacing * key + query_spacing * (n - 1 - at))
            seen = (offset >= 0) & (offset < step * number)
            if kernel_size is not None:
                away = offset - query_spacing * (n - 1) - key_spacing * (m - 1)
                seen &= away.abs() < kernel_size * key_spacing
            axes.append((key[seen], offset[seen] // step))
        places, boxes = (indices([axis[i] for axis in axes]) for i in (0, 1))
        row = torch.zeros(len(boxes), dtype=torch.long)
        slot_of_key = torch.zeros_like(row)
        for axis, number in enumerate(counts):
            row = row * number + boxes[:, axis]
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float]:
    """The tables of a :class:`GridPair`.

    Twice the positions of queries and keys, which are whole numbers; the farthest of their differences along each axis;
    the row of every offset in the box of these, -1 where it is not in the window; the offsets, the coordinates of
    queries and keys, and the unit of these.
    """
    # Twice the offsets along an axis are equally spaced whole numbers.
    shapes, spacings = (query_shape, key_shape), (query_spacing, key_spacing)
    ends = [
        spacing * (torch.tensor(shape, dtype=torch.long) - 1) for shape, spacing in zip(shapes, spacings, strict=True)
    ]
    at = [
        2 * spacing * indices([torch.arange(n) for n in shape]) - end
        for shape, spacing, end in zip(shapes, spacings, ends, strict=True)
    ]
    (step, counts), farthest = _steps(query_shape, query_spacing, key_shape, key_spacing), ends[0] + ends[1]
    box = (indices([torch.arange(n) for n in counts]) * step - farthest).double() / 2
    inside, reach = torch.ones(len(box), dtype=torch.bool), max((1.0, *(farthest / 2).tolist()))
    if kernel_size is not None:
        reach = key_spacing * max(1, kernel_size // 2)
        inside = _in_window(box / max(1, key_spacing), kernel_size, window_shape)
        _check_seen(at, key_spacing, kernel_size, window_shape)
    unit = max((0.0, *(t.item() / 2 for end in ends for t in end))) or 1.0
    lookup = torch.where(inside, inside.cumsum(0) - 1, -1)
    exact = (to_space(box[inside]) / reach, *(to_space(t.double() / 2) / unit for t in at))
    offsets, *coordinates = (t.to(device, dtype) for t in exact)
    whole = (t.to(device) for t in (*at, farthest, lookup))
    return (*whole, offsets, *coordinates, unit / reach)  # type: ignore[return-value]


def _in_window(steps: Tensor, kernel_size: int, window_shape: WindowShape) -> Tensor:
    """Whether offsets ``(n, d)``, in steps that need not be whole, are in a window."""
    inside = (steps.abs() < kernel_size / 2).all(-1)
    longest = longest_square(kernel_size, window_shape)
    return inside if longest is None else inside & (steps.square().sum(-1) <= longest)


def _check_seen(at: list[Tensor], key_spacing: int, kernel_size: int, window_shape: WindowShape) -> None:
    """Every query sees a key: the one that is farthest from its nearest key does."""
    nearest = [
        (y.unique() - x.unique().unsqueeze(1)).abs().amin(1).max() for x, y in zip(at[0].T, at[1].T, strict=True)
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
    spacings = (query_spacing, key_spacing)
    sides = zip(query_shape, key_shape, strict=True)
    axes = [_pair_axis_tiles(n, m, spacings, kernel_size) for n, m in sides]
    queries, keys = (ravel(shape, [axis[i] for axis in axes]) for i, shape in enumerate((query_shape, key_shape)))
    place = queries.flatten().argsort()[queries.numel() - math.prod(query_shape) :].clone()
    step, counts = _steps(query_shape, query_spacing, key_shape, key_spacing)
    # Offsets beyond those of the box belong to keys beyond the grid.
    row = ravel(tuple(counts), [(axis[2] + (n - 1) * step // 2) // step for axis, n in zip(axes, counts, strict=True)])
    lookup = _pair_tables(
        *(query_shape, query_spacing, key_shape, key_spacing, kernel_size, window_shape),
        *(torch.float64, torch.device("cpu")),
    )[3]
    shared = lookup[row.clamp(min=0)].masked_fill(row < 0, -1)
    return queries.to(device), keys.to(device), place.to(device), shared[None].to(device)


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
