r"""The positions of images and volumes, and the tables that follow from their shape and window."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from escnn_attention._checks import check_grid
from escnn_attention.geometry.cache import constant_tables
from escnn_attention.geometry.windows import (
    Blocks,
    Window,
    WindowShape,
    form_of,
    is_causal,
    is_circular,
    shape_of,
)

__all__ = ["Grid", "GridPair", "kept_grid", "steps_within", "trimmed"]


@dataclass(frozen=True, eq=False)
class _SharedRows(Blocks):
    """Blocks that are translates of each other."""

    queries: Tensor
    keys: Tensor
    place: Tensor
    shared: Tensor

    def rows(self, start: int, stop: int) -> Tensor:
        return self.shared


@dataclass(frozen=True, eq=False)
class _ComputedRows(Blocks):
    """Blocks whose rows are too many to hold and are worked out when asked for."""

    queries: Tensor
    keys: Tensor
    place: Tensor
    positions: Grid

    def rows(self, start: int, stop: int) -> Tensor:
        queries = self.queries[start:stop].clamp(min=0)
        return self.positions.rows(queries[:, :, None], self.keys[:, None, :])


class Grid:
    r"""The positions of an image or volume, of a tensor of shape ``(..., *shape)``.

    escnn's convention: x grows along the last axis, y and z decrease along the axes before it.

    Args:
        shape: the spatial shape, of any number of axes; ``()`` is the single point of a gspace without a base space.
        window: the neighbourhood.
        dtype: the precision of ``offsets`` and ``coordinates``, which are computed in float64 and rounded once.
        device: where the tables are put.
        frame: an orthogonal ``(d, d)`` matrix by which the whole grid is transformed. With it equivariance can be
            checked exactly for elements that do not map the grid onto itself: features on the transformed grid are the
            transformed features.
        spacing: the distance of neighbouring positions, beside that of another grid: see :class:`GridPair`.

    Attributes:
        num_positions: N.
        index: ``(N, d)``; the number of each position along each axis.
        offsets: ``(L, d)``; the offsets between a query and the keys in its window, in units of the window's reach:
            within [-1, 1] along the axes. Positions half a torus apart have several, which are all among them: see
            :meth:`averaged`.
        coordinates: ``(N, d)``; the positions, relative to the centre, in units of half the extent.
        scale: the unit of the coordinates in units of the offsets: the offset between two positions is ``scale`` times
            the difference of their coordinates.
        complete: whether every position sees every other.
        key: what the tables follow from, equal for equal grids.

    Raises:
        ValueError: an axis has no positions, or a window reaches around a torus.

    Example:
        >>> from escnn_attention.geometry.grid import Grid
        >>> from escnn_attention.geometry.windows import Window
        >>> grid = Grid((2, 3), Window(3))
        >>> grid.num_positions, grid.offsets.shape
        (6, torch.Size([9, 2]))
        >>> grid.coordinates[0].tolist(), grid.coordinates[-1].tolist()  # the upper left, and the lower right
        ([-1.0, 0.5], [1.0, -0.5])
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        window: Window,
        *,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
        frame: Tensor | None = None,
        spacing: int = 1,
    ):
        # The length of a range is a number to a compiler, where the size of a tensor may stand for many.
        self.shape = tuple(len(range(n)) for n in shape)
        check_grid(self.shape)
        self.window = window
        self.num_positions = math.prod(self.shape)
        self.complete = window.looks_everywhere
        self.frame, self.spacing = frame, spacing
        self._periods = _periods(self.shape, window.shape)
        _check_torus(self._periods, window)
        key = (self.shape, window.kernel_size, window.shape, window.dilation, dtype, torch.device(device))
        self._box = _box(*key[:3])
        reach, self._step = _reach(self.shape, window)
        self.scale = _half_extent(self.shape) / (self._step * _longest(reach))
        self.index, self._lookup, self.offsets, self.coordinates, self._shortest = _tables(*key)
        self.key = key
        if frame is not None:
            exact = _tables(*key[:4], torch.float64, torch.device("cpu"))[2:4]
            self.offsets, self.coordinates = ((t @ frame.double().cpu().T).to(device, dtype) for t in exact)

    def rows(self, queries: Tensor, keys: Tensor) -> Tensor:
        """The row of the table of offsets for each pair of positions, broadcast against each other.

        It is -1 for a key that the query does not see.
        """
        row = torch.zeros_like(queries + keys)
        outside = torch.zeros_like(row, dtype=torch.bool)
        for axis, ((low, high), period) in enumerate(zip(self._box, self._periods, strict=True)):
            offset = self.index[keys, axis] - self.index[queries, axis]
            if period:
                most = (period - 1) // 2
                offset = (offset + most) % period - most
            if self._step > 1:
                outside |= offset % self._step != 0
                offset = offset.div(self._step, rounding_mode="floor")
            outside |= offset.abs() > high if low == -high else (offset < low) | (offset > high)
            row = row * (high - low + 1) + offset.clamp(low, high) - low
        return self._lookup[row].masked_fill(outside, -1)

    def averaged(self, table: Tensor) -> Tensor:
        """A function at all ``offsets``, ``(..., L, C)``, as the table that :meth:`rows` counts.

        Positions that lie half a torus apart have several shortest offsets, and the table has the mean over them: an
        element of the group maps the shortest offsets of a pair to those of another.

        Example:
            >>> from escnn_attention.geometry.grid import Grid
            >>> from escnn_attention.geometry.windows import Window
            >>> ring = Grid((4,), Window(None, "circular square"))
            >>> ring.offsets.squeeze(-1).tolist()  # in units of 2 positions
            [-1.0, -0.5, 0.0, 0.5, 1.0]
            >>> ring.averaged(ring.offsets + 10).squeeze(-1).tolist()  # of -1, 0, 1 and both -2 and 2 positions
            [9.5, 10.0, 10.5, 10.0]
        """
        if self._shortest is None:
            return table
        chosen = table.index_select(-2, self._shortest.flatten())
        return chosen.unflatten(-2, self._shortest.shape).mean(-2)

    def blocks(self, max_queries: int) -> Blocks:
        """A partition of the queries in blocks; ``max_queries`` limits blocks that see every position."""
        device = self.index.device
        everything = torch.arange(self.num_positions, device=device)
        if self.window.kernel_size is None:
            size = max(1, min(max_queries, self.num_positions))
            padding = -self.num_positions % size
            queries = torch.cat([everything, everything.new_full((padding,), -1)]).view(-1, size)
            return _ComputedRows(queries, everything[None], everything, self)
        return _SharedRows(*_tiles(*self.key[:4], self.key[-1]))


_MOST_KEPT, _MOST_POSITIONS = 64, 2**16
_kept: dict[tuple[Any, ...], Grid] = {}


def kept_grid(shape: torch.Size, window: Window, dtype: torch.dtype, device: torch.device) -> Grid:
    """The grid of these arguments. Small ones are made once; the oldest of many give way.

    Example:
        >>> import torch
        >>> from escnn_attention.geometry.grid import kept_grid
        >>> from escnn_attention.geometry.windows import Window
        >>> arguments = (torch.Size((5, 5)), Window(3), torch.float32, torch.device("cpu"))
        >>> kept_grid(*arguments) is kept_grid(*arguments)
        True
    """
    # A compiler has constants of its own, and other modes want tensors of another kind.
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or is_in_torch_dispatch_mode():
        return Grid(shape, window, dtype=dtype, device=device)
    key = (shape, window, dtype, device)
    grid = _kept.get(key)
    if grid is None:
        grid = Grid(shape, window, dtype=dtype, device=device)
        if grid.num_positions <= _MOST_POSITIONS:
            _kept[key] = grid
        if len(_kept) > _MOST_KEPT:
            _kept.pop(next(iter(_kept)), None)
    return grid


class GridPair:
    """The offsets between the positions of two grids that share their centre.

    Args:
        queries: with the window of keys that each of its positions sees: those less than half the width away, in steps
            of the grid of the keys. It is the same neighbourhood where both grids are the same.
        keys: its ``spacing`` and that of the queries have the same unit.

    Attributes:
        offsets: ``(L, d)``; the offsets that there are, in units of the reach of the window, or of the longest offset.
        complete: whether every query sees every key.

    Raises:
        ValueError: grids of different dimensions, or a dilated window.

    Example:
        >>> import torch
        >>> from escnn_attention.geometry.grid import Grid, GridPair
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
        self.complete = queries.complete
        # Twice the positions are whole numbers, and twice the offsets along an axis are equally spaced whole numbers.
        ends = [grid.spacing * (torch.tensor(grid.shape, dtype=torch.long) - 1) for grid in (queries, keys)]
        at = [
            2 * grid.spacing * grid.index - end.to(grid.index) for grid, end in zip((queries, keys), ends, strict=True)
        ]
        self._queries, self._keys = at
        self._step, farthest = 2 * math.gcd(queries.spacing, keys.spacing), ends[0] + ends[1]
        self._farthest = farthest.to(queries.index)
        self._counts = (2 * farthest // self._step + 1).tolist()
        box = _indices([torch.arange(n) for n in self._counts]) * self._step - farthest
        box = box.double() / 2
        inside = torch.ones(len(box), dtype=torch.bool)
        reach = keys.spacing * _longest(_reach(keys.shape, window)[0])
        if window.kernel_size is None:
            reach = max(1.0, *(farthest / 2).tolist())
        else:
            steps = box.abs() / keys.spacing
            inside = (steps < window.kernel_size / 2).all(-1)
            longest = _longest_square(window.kernel_size, window.shape)
            if longest is not None:
                inside &= steps.square().sum(-1) <= longest
        self._lookup = torch.where(inside, inside.cumsum(0) - 1, -1).to(queries.index.device)
        offsets = _to_space(box[inside]) / reach
        if queries.frame is not None:
            offsets = offsets @ queries.frame.double().cpu().T
        self.offsets = offsets.to(queries.offsets)

    def rows(self, queries: Tensor, keys: Tensor) -> Tensor:
        """The row of ``offsets`` for each pair of positions, broadcast against each other; -1 for no neighbours."""
        row = torch.zeros_like(queries + keys)
        for axis, number in enumerate(self._counts):
            offset = self._keys[keys, axis] - self._queries[queries, axis] + self._farthest[axis]
            row = row * number + offset // self._step
        return self._lookup[row]


def trimmed(shape: tuple[int, ...], window: Window) -> tuple[Window, Tensor | None]:
    """A window for the same neighbourhoods that does not reach beyond the grid.

    Returns:
        the window, and the rows of its offsets in the table of the one given; None where that one stays.

    Example:
        >>> from escnn_attention.geometry.grid import trimmed
        >>> from escnn_attention.geometry.windows import Window
        >>> window, rows = trimmed((2, 2), Window(7))
        >>> window, len(rows)
        (Window(kernel_size=3, shape='square', dilation=1), 9)
    """
    if window.kernel_size is None or window.circular:
        return window, None
    radius, most = window.kernel_size // 2, (max((1, *shape)) - 1) // window.dilation
    size, sides = 2 * most + 1, len(shape)
    if window.causal:
        # As many times as there are, and at each of them as many positions along the other axes.
        times, most, sides = (shape[0] - 1) // window.dilation, (max((1, *shape[1:])) - 1) // window.dilation, sides - 1
        size = max(min(times + 1, window.kernel_size), 2 * min(most, radius) + 1 if sides else 1)
        size += sides > 0 and size % 2 == 0
    longest = _longest_square(window.kernel_size, window.shape)
    if size >= window.kernel_size or (longest is not None and sides * most**2 > longest):
        return window, None  # of a disc that shows its edge no smaller window is the same
    form = shape_of("square", causal=window.causal)
    rows = _rows_within(len(shape), size, form, window.kernel_size, window.shape)
    return Window(size, form, window.dilation if size > 1 else 1), rows


@constant_tables
def _rows_within(dim: int, size: int, form: WindowShape, kernel_size: int, window_shape: WindowShape) -> Tensor:
    """The rows of a window's offsets that are those of a smaller one; any where it has none, beyond the grid."""
    point = (1,) * dim
    places = _indices([torch.arange(low, high + 1) for low, high in _box(point, size, form)])
    row = torch.zeros(len(places), dtype=torch.long)
    for axis, (low, high) in enumerate(_box(point, kernel_size, window_shape)):
        row = row * (high - low + 1) + places[:, axis] - low
    lookup = _tables(point, kernel_size, window_shape, 1, torch.float64, torch.device("cpu"))[1]
    return lookup[row].clamp(min=0)


def _periods(shape: tuple[int, ...], window_shape: WindowShape) -> tuple[int, ...]:
    """After how many positions each axis comes back; 0 for an axis that ends. A causal time ends."""
    if not is_circular(window_shape):
        return (0,) * len(shape)
    return tuple(0 if axis == 0 and is_causal(window_shape) else n for axis, n in enumerate(shape))


def _check_torus(periods: tuple[int, ...], window: Window) -> None:
    """No window reaches around a torus, where a query would see a key twice."""
    if window.kernel_size is None:
        return
    width = window.dilation * (window.kernel_size - 1) + 1
    shortest = min((n for n in periods if n), default=width)
    if width > shortest:
        of = f" with dilation={window.dilation} covers {width} positions and" if window.dilation > 1 else ""
        raise ValueError(
            f"kernel_size: {window.kernel_size}{of} reaches around a torus with {shortest} positions along an axis; "
            f"needed at most {shortest} positions, or None for all of them"
        )


def _box(shape: tuple[int, ...], kernel_size: int | None, window_shape: WindowShape) -> list[tuple[int, int]]:
    """The least and the largest step that a query sees along each axis."""
    sides = []
    for axis, (n, period) in enumerate(zip(shape, _periods(shape, window_shape), strict=True)):
        low, high = 1 - n, n - 1
        if kernel_size is not None:
            low, high = -(kernel_size // 2), kernel_size // 2
        elif period:
            # Of two steps half around, the positive one stands for both.
            low, high = -((n - 1) // 2), n // 2
        if axis == 0 and is_causal(window_shape):
            low, high = 1 - (n if kernel_size is None else kernel_size), 0
        sides.append((low, high))
    return sides


def steps_within(shape: tuple[int, ...], kernel_size: int | None, window_shape: WindowShape) -> Tensor:
    """The steps that a query sees along the axes, in the order of the table of offsets.

    Example:
        >>> from escnn_attention.geometry.grid import steps_within
        >>> steps_within((9,), 3, "square").squeeze(-1).tolist()
        [-1, 0, 1]
    """
    box = _indices([torch.arange(low, high + 1) for low, high in _box(shape, kernel_size, window_shape)])
    return box[_inside(box, kernel_size, window_shape)]


def _inside(box: Tensor, kernel_size: int | None, window_shape: WindowShape) -> Tensor:
    """Which of the steps in the box of a window belong to it, ``(n,)``."""
    longest = _longest_square(kernel_size, window_shape)
    if longest is None:
        return torch.ones(len(box), dtype=torch.bool)
    # At each of the last times there is the disc of space.
    return box[:, int(is_causal(window_shape)) :].square().sum(-1) <= longest


def _shortest_steps(steps: Tensor, periods: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
    """All shortest steps between positions of a torus, and which of them belong to each of ``steps``, ``(L, K)``.

    They are those given, and None, unless some lie half around an axis.
    """
    whole = torch.tensor(periods, dtype=torch.long)
    half = 2 * steps.abs() == whole
    if not (half & (steps != 0)).any():
        return steps, None
    signs = _indices([torch.tensor([1, -1] if n and n % 2 == 0 else [1]) for n in periods])
    each = torch.where(half.unsqueeze(1), signs * steps.unsqueeze(1), steps.unsqueeze(1))
    every, which = each.flatten(0, 1).unique(dim=0, return_inverse=True)
    return every, which.view(len(steps), -1)


def _reach(shape: tuple[int, ...], window: Window) -> tuple[tuple[int, ...], int]:
    """How many steps a query sees along each axis, and the length of a step."""
    reach = tuple(max(-low, high) for low, high in _box(shape, window.kernel_size, window.shape))
    return reach, 1 if window.kernel_size is None else window.dilation


def _longest_square(kernel_size: int | None, window_shape: WindowShape) -> int | None:
    """The square of the longest offset that a ball may have, in steps; None for a box."""
    form = form_of(window_shape)
    if kernel_size is None or form == "square":
        return None
    # Without a number it is the disc whose diameter is the width of the window: its edge lies half a step outside.
    number = form.partition(" ")[2]
    return int(number) if number else kernel_size**2 // 4


def _longest(reach: tuple[int, ...]) -> int:
    """The reach of the window in steps, by which offsets are measured; 1 where it has none."""
    return max((0, *reach)) or 1


def _half_extent(shape: tuple[int, ...]) -> float:
    """Half the longest side of the grid, by which coordinates are measured; 1 for a single point."""
    return (max((1, *shape)) - 1) / 2 or 1.0


@constant_tables
def _tables(
    shape: tuple[int, ...],
    kernel_size: int | None,
    window_shape: WindowShape,
    dilation: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """The tables of a :class:`Grid`.

    The index of every position, ``(N, d)``; the row of every offset in the box around the window, -1 where it is not
    in it; the offsets and the coordinates of the positions; and the numbers of the offsets that belong to each row,
    where there are several.
    """
    reach, _ = _reach(shape, Window(kernel_size, window_shape, dilation))
    index = _indices([torch.arange(n) for n in shape])
    box = _indices([torch.arange(low, high + 1) for low, high in _box(shape, kernel_size, window_shape)])
    inside = _inside(box, kernel_size, window_shape)
    lookup = torch.where(inside, inside.cumsum(0) - 1, -1)
    steps, shortest = box[inside], None
    if kernel_size is None and is_circular(window_shape):
        steps, shortest = _shortest_steps(steps, _periods(shape, window_shape))
    offsets = _to_space(steps.double()) / _longest(reach)
    centre = torch.tensor([(n - 1) / 2 for n in shape], dtype=torch.float64)
    coordinates = _to_space(index.double() - centre) / _half_extent(shape)
    shortest = None if shortest is None else shortest.to(device)
    return index.to(device), lookup.to(device), offsets.to(device, dtype), coordinates.to(device, dtype), shortest


@constant_tables
def _tiles(
    shape: tuple[int, ...], kernel_size: int, window_shape: WindowShape, dilation: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, places and shared rows of the tiles of a grid: see :class:`Blocks`."""
    radius = kernel_size // 2
    # Neighbouring queries share most of their keys: a tile of them against all keys around it reads a key once for all.
    # Larger windows pay for larger tiles; a tile of one position in a window of one has no keys to share.
    tile = 1 if radius == 0 else 2 if radius < 4 else 4
    box, periods = _box(shape, kernel_size, window_shape), _periods(shape, window_shape)
    axes = [_axis_tiles(n, tile, side, dilation, period) for n, side, period in zip(shape, box, periods, strict=True)]
    queries, keys = (_ravel(shape, [axis[i] for axis in axes]) for i in (0, 1))
    # Every position is a query once, and what fills up sorts in front; torch.export.save warns of parts of a tensor.
    place = queries.flatten().argsort()[queries.numel() - math.prod(shape) :].clone()
    # Whatever the tile, query number i and key number j lie apart by the same steps.
    step = _indices([torch.arange(low, tile + high) for low, high in box])
    start = _indices([torch.arange(tile)] * len(shape))
    offset = step[None] - start[:, None]
    row = torch.zeros(offset.shape[:-1], dtype=torch.long)
    outside = torch.zeros_like(row, dtype=torch.bool)
    for axis, (low, high) in enumerate(box):
        outside |= (offset[..., axis] < low) | (offset[..., axis] > high)
        row = row * (high - low + 1) + offset[..., axis].clamp(low, high) - low
    lookup = _tables(shape, kernel_size, window_shape, dilation, torch.float64, torch.device("cpu"))[1]
    shared = lookup[row].masked_fill(outside, -1)
    return queries.to(device), keys.to(device), place.to(device), shared[None].to(device)


def _ravel(shape: tuple[int, ...], axes: list[Tensor]) -> Tensor:
    """From the coordinates of tiles along each axis, ``(T_i, n_i)``, the positions ``(T, n)``; -1 off the grid."""
    tiles = torch.zeros(1, 1, dtype=torch.long)
    inside = torch.ones(1, 1, dtype=torch.bool)
    for n, axis in zip(shape, axes, strict=True):
        on_grid = (axis >= 0) & (axis < n)
        tiles = (tiles[:, None, :, None] * n + axis[None, :, None, :]).flatten(2).flatten(0, 1)
        inside = (inside[:, None, :, None] & on_grid[None, :, None, :]).flatten(2).flatten(0, 1)
    return tiles.masked_fill(~inside, -1)


def _axis_tiles(n: int, tile: int, side: tuple[int, int], dilation: int, period: int) -> tuple[Tensor, Tensor]:
    """Along one axis: the coordinates of the queries of each tile and of the keys that any of them sees.

    With a dilation the positions fall into classes that never see each other; a tile stays within one. On a torus a
    position may stand at several places of a tile, of which every query sees one at most.
    """
    origins = [origin for first in range(min(dilation, n)) for origin in range(first, n, dilation * tile)]
    origin = torch.tensor(origins)[:, None]
    queries = origin + dilation * torch.arange(tile)
    keys = origin + dilation * torch.arange(side[0], tile + side[1])
    return queries.masked_fill(queries >= n, -1), keys % period if period else keys


def _indices(axes: list[Tensor]) -> Tensor:
    """All combinations of the entries of the axes, the last one fastest: ``(product of lengths, number of axes)``."""
    if not axes:
        return torch.zeros(1, 0, dtype=torch.long)
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, -2)


def _to_space(index: Tensor) -> Tensor:
    """From steps along the axes of a tensor to vectors of R^d."""
    sign = torch.full((index.shape[-1],), -1.0, dtype=index.dtype)
    sign[:1] = 1.0
    return index.flip(-1) * sign
