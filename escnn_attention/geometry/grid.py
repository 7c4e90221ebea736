r"""The positions of images and volumes, and the tables that follow from their shape and window."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from escnn_attention._checks import check_grid
from escnn_attention.geometry.cache import constant_tables
from escnn_attention.geometry.windows import Blocks, Positions, Window, WindowShape

__all__ = ["Grid", "trimmed"]


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
    positions: Positions

    def rows(self, start: int, stop: int) -> Tensor:
        queries = self.queries[start:stop].clamp(min=0)
        return self.positions.rows(queries[:, :, None], self.keys[:, None, :])


class Grid(Positions):
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
    ):
        # The length of a range is a number to a compiler, where the size of a tensor may stand for many.
        self.shape = tuple(len(range(n)) for n in shape)
        check_grid(self.shape)
        self.window = window
        self.num_positions = math.prod(self.shape)
        self.complete = window.kernel_size is None
        key = (self.shape, window.kernel_size, window.shape, window.dilation, dtype, torch.device(device))
        self._reach, self._step = _reach(self.shape, window)
        self.scale = _half_extent(self.shape) / (self._step * _longest(self._reach))
        self._grid, self._lookup, self.offsets, self.coordinates = _tables(*key)
        self._key = key
        if frame is not None:
            exact = _tables(*key[:4], torch.float64, torch.device("cpu"))[2:]
            self.offsets, self.coordinates = ((t @ frame.double().cpu().T).to(device, dtype) for t in exact)

    def rows(self, queries: Tensor, keys: Tensor) -> Tensor:
        row = torch.zeros_like(queries + keys)
        outside = torch.zeros_like(row, dtype=torch.bool)
        for axis, reach in enumerate(self._reach):
            offset = self._grid[keys, axis] - self._grid[queries, axis]
            if self._step > 1:
                outside |= offset % self._step != 0
                offset = offset.div(self._step, rounding_mode="floor")
            outside |= offset.abs() > reach
            row = row * (2 * reach + 1) + offset.clamp(-reach, reach) + reach
        return self._lookup[row].masked_fill(outside, -1)

    def blocks(self, max_queries: int) -> Blocks:
        device = self._grid.device
        everything = torch.arange(self.num_positions, device=device)
        if self.window.kernel_size is None:
            size = max(1, min(max_queries, self.num_positions))
            padding = -self.num_positions % size
            queries = torch.cat([everything, everything.new_full((padding,), -1)]).view(-1, size)
            return _ComputedRows(queries, everything[None], everything, self)
        return _SharedRows(*_tiles(*self._key[:4], self._key[-1]))


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
    in it; the offsets and the coordinates of :class:`Positions`.
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
