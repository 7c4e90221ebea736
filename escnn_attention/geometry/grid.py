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
from escnn_attention.geometry.windows import Blocks, Window, WindowShape

__all__ = ["Grid", "GridPair", "kept_grid", "trimmed"]


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
            within [-1, 1] along the axes.
        coordinates: ``(N, d)``; the positions, relative to the centre, in units of half the extent.
        scale: the unit of the coordinates in units of the offsets: the offset between two positions is ``scale`` times
            the difference of their coordinates.
        complete: whether every position sees every other.
        key: what the tables follow from, equal for equal grids.

    Raises:
        ValueError: an axis has no positions.

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
        self.complete = window.kernel_size is None
        self.frame, self.spacing = frame, spacing
        key = (self.shape, window.kernel_size, window.shape, window.dilation, dtype, torch.device(device))
        self._reach, self._step = _reach(self.shape, window)
        self.scale = _half_extent(self.shape) / (self._step * _longest(self._reach))
        self.index, self._lookup, self.offsets, self.coordinates = _tables(*key)
        self.key = key
        if frame is not None:
            exact = _tables(*key[:4], torch.float64, torch.device("cpu"))[2:]
            self.offsets, self.coordinates = ((t @ frame.double().cpu().T).to(device, dtype) for t in exact)

    def rows(self, queries: Tensor, keys: Tensor) -> Tensor:
        """The row of ``offsets`` for each pair of positions, broadcast against each other; -1 for no neighbours."""
        row = torch.zeros_like(queries + keys)
        outside = torch.zeros_like(row, dtype=torch.bool)
        for axis, reach in enumerate(self._reach):
            offset = self.index[keys, axis] - self.index[queries, axis]
            if self._step > 1:
                outside |= offset % self._step != 0
                offset = offset.div(self._step, rounding_mode="floor")
            outside |= offset.abs() > reach
            row = row * (2 * reach + 1) + offset.clamp(-reach, reach) + reach
        return self._lookup[row].masked_fill(outside, -1)

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
    if window.kernel_size is None:
        return window, None
    radius, most = window.kernel_size // 2, (max((1, *shape)) - 1) // window.dilation
    corner = len(shape) * most**2
    longest = _longest_square(window.kernel_size, window.shape)
    if most >= radius or (longest is not None and corner > longest):
        return window, None  # of a disc that shows its edge no smaller window is the same
    rows = _rows_within(len(shape), most, window.kernel_size, window.shape)
    return Window(2 * most + 1, "square", window.dilation if most else 1), rows


@constant_tables
def _rows_within(dim: int, most: int, kernel_size: int, window_shape: WindowShape) -> Tensor:
    """The rows of a window's offsets of at most so many steps along each axis."""
    box = _indices([torch.arange(-most, most + 1)] * dim) + kernel_size // 2
    row = torch.zeros(len(box), dtype=torch.long)
    for axis in range(dim):
        row = row * kernel_size + box[:, axis]
    lookup = _tables((1,) * dim, kernel_size, window_shape, 1, torch.float64, torch.device("cpu"))[1]
    return lookup[row]


def _reach(shape: tuple[int, ...], window: Window) -> tuple[tuple[int, ...], int]:
    """How many steps a query sees along each axis, and the length of a step."""
    if window.kernel_size is None:
        return tuple(n - 1 for n in shape), 1
    return (window.kernel_size // 2,) * len(shape), window.dilation


def _longest_square(kernel_size: int | None, window_shape: WindowShape) -> int | None:
    """The square of the longest offset that a ball may have, in steps; None for a box."""
    if kernel_size is None or window_shape == "square":
        return None
    # Without a number it is the disc whose diameter is the width of the window: its edge lies half a step outside.
    number = window_shape.partition(" ")[2]
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The tables of a :class:`Grid`.

    The index of every position, ``(N, d)``; the row of every offset in the box around the window, -1 where it is not
    in it; the offsets and the coordinates of the positions.
    """
    reach, _ = _reach(shape, Window(kernel_size, window_shape, dilation))
    index = _indices([torch.arange(n) for n in shape])
    box = _indices([torch.arange(-r, r + 1) for r in reach])
    inside = torch.ones(len(box), dtype=torch.bool)
    longest = _longest_square(kernel_size, window_shape)
    if longest is not None:
        inside = (box**2).sum(-1) <= longest
    lookup = torch.where(inside, inside.cumsum(0) - 1, -1)
    offsets = _to_space(box[inside].double()) / _longest(reach)
    centre = torch.tensor([(n - 1) / 2 for n in shape], dtype=torch.float64)
    coordinates = _to_space(index.double() - centre) / _half_extent(shape)
    return index.to(device), lookup.to(device), offsets.to(device, dtype), coordinates.to(device, dtype)


@constant_tables
def _tiles(
    shape: tuple[int, ...], kernel_size: int, window_shape: WindowShape, dilation: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, places and shared rows of the tiles of a grid: see :class:`Blocks`."""
    radius = kernel_size // 2
    # Neighbouring queries share most of their keys: a tile of them against all keys around it reads a key once for all.
    # Larger windows pay for larger tiles; a tile of one position in a window of one has no keys to share.
    tile = 1 if radius == 0 else 2 if radius < 4 else 4
    axes = [_axis_tiles(n, tile, radius, dilation) for n in shape]
    queries, keys = (_ravel(shape, [axis[i] for axis in axes]) for i in (0, 1))
    # Every position is a query once, and what fills up sorts in front; torch.export.save warns of parts of a tensor.
    place = queries.flatten().argsort()[queries.numel() - math.prod(shape) :].clone()
    # Whatever the tile, query number i and key number j lie apart by the same steps.
    step = _indices([torch.arange(-radius, tile + radius)] * len(shape))
    start = _indices([torch.arange(tile)] * len(shape))
    offset = step[None] - start[:, None]
    row = torch.zeros(offset.shape[:-1], dtype=torch.long)
    for axis in range(len(shape)):
        row = row * kernel_size + offset[..., axis].clamp(-radius, radius) + radius
    lookup = _tables(shape, kernel_size, window_shape, dilation, torch.float64, torch.device("cpu"))[1]
    shared = lookup[row].masked_fill((offset.abs() > radius).any(-1), -1)
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


def _axis_tiles(n: int, tile: int, radius: int, dilation: int) -> tuple[Tensor, Tensor]:
    """Along one axis: the coordinates of the queries of each tile and of the keys that any of them sees.

    With a dilation the positions fall into classes that never see each other; a tile stays within one.
    """
    origins = [origin for first in range(min(dilation, n)) for origin in range(first, n, dilation * tile)]
    origin = torch.tensor(origins)[:, None]
    queries = origin + dilation * torch.arange(tile)
    keys = origin + dilation * torch.arange(-radius, tile + radius)
    return queries.masked_fill(queries >= n, -1), keys


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
