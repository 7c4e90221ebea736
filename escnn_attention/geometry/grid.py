r"""The positions of images and volumes, and the tables that follow from their shape and window."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from escnn_attention._checks import check_grid
from escnn_attention.geometry.cache import constant_tables
from escnn_attention.geometry.lattice import everything, indices, longest_square, tiles, to_space
from escnn_attention.geometry.windows import (
    Blocks,
    Window,
    WindowShape,
    is_causal,
    is_circular,
    shape_of,
)


class Offsets:
    """Offsets between positions, of which some are as short as others on a torus."""

    _shortest: Tensor | None

    def averaged(self, table: Tensor) -> Tensor:
        """A function at all ``offsets``, ``(..., L, C)``, as the table that :meth:`rows` counts.

        Positions that lie half a torus apart have several shortest offsets, and the table has the mean over them: an
        element of the group maps the shortest offsets of a pair to those of another.

        >>> ring = Grid((4,), Window(None, "circular square"))
        >>> ring.offsets.squeeze(-1).tolist()  # in units of 2 positions
        [-1.0, -0.5, 0.0, 0.5, 1.0]
        >>> ring.averaged(ring.offsets + 10).squeeze(-1).tolist()  # of -1, 0, 1 and both -2 and 2 positions
        [9.5, 10.0, 10.5, 10.0]
        """
        if self._shortest is None:
            return table
        return table.index_select(-2, self._shortest.flatten()).unflatten(-2, self._shortest.shape).mean(-2)


class Grid(Offsets):
    r"""The positions of an image or volume, of a tensor of shape ``(..., *shape)``.

    escnn's convention: x grows along the last axis, y and z decrease along the axes before it.

    Args:
        shape: the spatial shape, of any number of axes; ``()`` is the single point of a gspace without a base space.
        window: the neighbourhood.
        dtype: the precision of offsets and positions, which are computed in float64 and rounded once.
        device: where the tables are put.
        frame: an orthogonal ``(d, d)`` matrix by which the whole grid is transformed, by which equivariance is checked
            for elements that do not map the grid onto itself.
        spacing: the distance of neighbouring positions, beside that of another grid: see
            :class:`~escnn_attention.geometry.grid_pair.GridPair`.

    Attributes:
        num_positions: N.
        index: ``(N, d)``; the number of each position along each axis.
        offsets: ``(L, d)``; the offsets between a query and the keys in its window, in units of the window's reach:
            within [-1, 1] along the axes. Positions half a torus apart have several, which are all among them: see
            :meth:`averaged`.
        coordinates: ``(N, d)``; the positions, relative to the centre, in units of half the extent.
        places: ``(N, d)``; the same in units of the offsets: the offset between two positions is the difference of
            their places.
        complete: whether every position sees every other.
        trimmed: a window for the same neighbourhoods that does not reach beyond the grid: see :func:`trimmed`.
        key: what the tables follow from, equal for equal grids.

    Raises:
        ValueError: an axis has no positions, or a window reaches around a torus.

    Example:
        >>> grid = Grid((2, 3), Window(3))
        >>> grid.num_positions, grid.offsets.shape
        (6, torch.Size([9, 2]))
        >>> grid.coordinates[0].tolist(), grid.coordinates[-1].tolist()  # the upper left, and the lower right
        ([-1.0, 0.5], [1.0, -0.5])
    """

    key_coordinates: Tensor | None = None
    key_places: Tensor | None = None
    """The positions of the keys, where they are others than those of the queries."""

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
        self.complete, self.trimmed = window.looks_everywhere, trimmed(self.shape, window)
        self.frame, self.spacing = frame, spacing
        self._periods = _periods(self.shape, window.shape)
        if spacing == 1:  # The positions of keys decide: of a grid beside a coarser one they are fewer.
            check_around(self.shape, window)
        key = (self.shape, window.kernel_size, window.shape, window.dilation, dtype, torch.device(device))
        self._box = _box(*key[:3])
        self._step = 1 if window.kernel_size is None else window.dilation
        self.index, self._lookup, self._shortest, *points = _tables(*key)
        self.key = key
        if frame is not None:
            exact = _tables(*key[:4], torch.float64, torch.device("cpu"))[3:]
            points = [(t @ frame.double().cpu().T).to(device, dtype) for t in exact]
        self.offsets, self.coordinates, self.places = points

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

    def blocks(self, max_queries: int) -> Blocks:
        """A partition of the queries in blocks; ``max_queries`` limits blocks that see every position."""
        if self.window.kernel_size is None:
            return everything(self.rows, self.num_positions, self.num_positions, max_queries, self.index.device)
        return Blocks(*_tiles(*self.key[:4], self.key[-1]))


_MOST_KEPT, _MOST_POSITIONS = 64, 2**16
_kept: dict[tuple[Any, ...], Grid] = {}


def kept_grid(shape: Sequence[int], window: Window, dtype: torch.dtype, device: torch.device, spacing: int = 1) -> Grid:
    """The grid of these arguments. Small ones are made once; the oldest of many give way."""
    shape = tuple(shape)
    # A compiler has constants of its own, and other modes want tensors of another kind.
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or is_in_torch_dispatch_mode():
        return Grid(shape, window, dtype=dtype, device=device, spacing=spacing)
    key = (shape, window, dtype, device, spacing)
    grid = _kept.get(key)
    if grid is None:
        grid = Grid(shape, window, dtype=dtype, device=device, spacing=spacing)
        if grid.num_positions <= _MOST_POSITIONS:
            _kept[key] = grid
        if len(_kept) > _MOST_KEPT:
            _kept.pop(next(iter(_kept)), None)
    return grid


def trimmed(shape: tuple[int, ...], window: Window) -> tuple[Window, Tensor | None]:
    """A window for the same neighbourhoods that does not reach beyond the grid, and the rows of its offsets.

    The rows are None where the window stays.

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
    longest = longest_square(window.kernel_size, window.shape)
    if size >= window.kernel_size or (longest is not None and sides * most**2 > longest):
        return window, None  # of a disc that shows its edge no smaller window is the same
    form = shape_of("square", causal=window.causal)
    rows = _rows_within(len(shape), size, form, window.kernel_size, window.shape)
    return Window(size, form, window.dilation if size > 1 else 1), rows


@constant_tables
def _rows_within(dim: int, size: int, form: WindowShape, kernel_size: int, window_shape: WindowShape) -> Tensor:
    """The rows of a window's offsets that are those of a smaller one; any where it has none, beyond the grid."""
    point = (1,) * dim
    places, _ = _steps_within(point, size, form)
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


def check_around(shape: tuple[int, ...], window: Window) -> None:
    """Check that no window reaches around a torus of keys, where a query would see one twice."""
    around = [n for n in _periods(shape, window.shape) if n]
    if window.kernel_size is None or not around:
        return
    width, shortest = window.dilation * (window.kernel_size - 1) + 1, min(around)
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


def _steps_within(shape: tuple[int, ...], kernel_size: int | None, window_shape: WindowShape) -> tuple[Tensor, Tensor]:
    """The steps along the axes in the box around a window, in the order of its table, and which of them it has."""
    box = indices([torch.arange(low, high + 1) for low, high in _box(shape, kernel_size, window_shape)])
    longest = longest_square(kernel_size, window_shape)
    if longest is None:
        return box, torch.ones(len(box), dtype=torch.bool)
    # At each of the last times there is the disc of space.
    return box, box[:, int(is_causal(window_shape)) :].square().sum(-1) <= longest


@constant_tables
def steps_of(shape: tuple[int, ...], kernel_size: int, window: WindowShape, dilation: int) -> Tensor:
    """The offsets of a window in positions along each axis, ``(L, dim)``."""
    if not shape:
        return torch.zeros(1, 0, dtype=torch.long)
    box, inside = _steps_within(shape, kernel_size or None, window)
    return ((dilation if kernel_size else 1) * box[inside]).contiguous()


def shortest_steps(steps: Tensor, periods: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
    """All shortest steps between positions of a torus, and which of them belong to each of ``steps``, ``(L, K)``.

    They are those given, and None, unless some lie half around an axis.
    """
    whole = torch.tensor(periods, dtype=torch.long)
    half = 2 * steps.abs() == whole
    if not (half & (steps != 0)).any():
        return steps, None
    signs = indices([torch.tensor([1, -1] if n and n % 2 == 0 else [1]) for n in periods])
    each = torch.where(half.unsqueeze(1), signs * steps.unsqueeze(1), steps.unsqueeze(1))
    every, which = each.flatten(0, 1).unique(dim=0, return_inverse=True)
    return every, which.view(len(steps), -1)


@constant_tables
def _tables(
    shape: tuple[int, ...],
    kernel_size: int | None,
    window_shape: WindowShape,
    dilation: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor]:
    """The tables of a :class:`Grid`.

    The index of every position, ``(N, d)``; the row of every offset in the box around the window, -1 where it is not
    in it; the numbers of the offsets that belong to each row, where there are several; the offsets, and the coordinates
    and the places of the positions.
    """
    index = indices([torch.arange(n) for n in shape])
    box, inside = _steps_within(shape, kernel_size, window_shape)
    lookup = torch.where(inside, inside.cumsum(0) - 1, -1)
    steps, shortest = box[inside], None
    if kernel_size is None and is_circular(window_shape):
        steps, shortest = shortest_steps(steps, _periods(shape, window_shape))
    # The units of offsets, in steps, and of coordinates: 1 for a single point.
    reach = max([1, *(max(-low, high) for low, high in _box(shape, kernel_size, window_shape))])
    half = (max((1, *shape)) - 1) / 2 or 1.0
    offsets = to_space(steps.double()) / reach
    centre = torch.tensor([(n - 1) / 2 for n in shape], dtype=torch.float64)
    coordinates = to_space(index.double() - centre) / half
    places = coordinates * (half / ((1 if kernel_size is None else dilation) * reach))
    shortest = None if shortest is None else shortest.to(device)
    points = [t.to(device, dtype) for t in (offsets, coordinates, places)]
    return index.to(device), lookup.to(device), shortest, points[0], points[1], points[2]


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
    lookup = _tables(shape, kernel_size, window_shape, dilation, torch.float64, torch.device("cpu"))[1]
    return tiles(shape, shape, axes, tuple(high - low + 1 for low, high in box), lookup, device)


def _axis_tiles(n: int, tile: int, side: tuple[int, int], dilation: int, period: int) -> tuple[Tensor, Tensor, Tensor]:
    """Along one axis: the coordinates of the queries of each tile and of the keys that any of them sees, and the number
    of the offset between those of one tile, which are the same in all.

    With a dilation the positions fall into classes that never see each other; a tile stays within one. On a torus a
    position may stand at several places of a tile, of which every query sees one at most.
    """
    origins = [origin for first in range(min(dilation, n)) for origin in range(first, n, dilation * tile)]
    origin, steps = torch.tensor(origins)[:, None], torch.arange(tile + side[1] - side[0])
    queries = origin + dilation * torch.arange(tile)
    keys = origin + dilation * (side[0] + steps)
    keys = keys % period if period else keys
    return queries.masked_fill(queries >= n, -1), keys, steps - torch.arange(tile)[:, None]
