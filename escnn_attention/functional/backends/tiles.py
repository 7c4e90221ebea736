"""A grid cut in tiles of queries and their halos, as views of padded buffers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from escnn_attention.geometry.grid import Grid
from escnn_attention.geometry.positions import Window, WindowShape

__all__ = ["Chunks", "Piece", "Tiles", "chunks_of", "tile_counts", "tiles_of"]

Piece = tuple[slice, ...]
"""Some of the tiles of an image: a range along every axis."""


@dataclass(frozen=True, eq=False)
class Tiles:
    """How a grid is cut, axis by axis.

    Position ``c + dilation * (size * i + j)`` is query j of tile i of class c: with a dilation positions fall into
    classes that never see each other, and a tile stays within one. Its halo starts radius steps before.

    Attributes:
        shape: the grid.
        counts: the number of tiles of a class, along each axis.
        size: the queries of a tile, along each axis.
        radius, dilation: of the window.
        rows: ``(Q, S)``, the row of the table of offsets for each query of a tile and place of its halo, or -1.
    """

    shape: tuple[int, ...]
    counts: tuple[int, ...]
    size: int
    radius: int
    dilation: int
    rows: Tensor

    def padded(self, margin: int) -> list[int]:
        """The shape of a buffer that has room for whole tiles and a margin of steps around them."""
        return [self.dilation * (self.size * n + 2 * margin) for n in self.counts]

    def inner(self, buffer: Tensor, margin: int) -> Tensor:
        """The grid in a buffer, ``(b, P, *shape, width)``."""
        start = self.dilation * margin
        return buffer[(slice(None), slice(None), *(slice(start, start + n) for n in self.shape))]

    def view(self, buffer: Tensor, margin: int) -> Tensor:
        """The tiles of a buffer, ``(b, *counts, *classes, P, *sides, width)``; with a margin they overlap."""
        batch, poses, *axes, channel = buffer.stride()
        side, dim, d = self.size + 2 * margin, len(self.shape), self.dilation
        return buffer.as_strided(
            (buffer.shape[0], *self.counts, *[d] * dim, buffer.shape[1], *[side] * dim, buffer.shape[-1]),
            (batch, *(s * d * self.size for s in axes), *axes, poses, *(s * d for s in axes), channel),
        )

    def overlaps(self, buffer: Tensor, tiles: Tensor, piece: Piece, margin: int) -> list[tuple[Tensor, Tensor]]:
        """Views of a buffer, and of contiguous tiles ``(t, P · places, width)``, that are to be added up in turn.

        A tile consists of blocks as long as the step from tile to tile. Equal blocks of all tiles do not overlap.
        """
        where = self.view(buffer, margin)[(slice(None), *piece)]
        tiles = tiles.view(where.shape)
        pairs = []
        for corner in itertools.product(range(0, self.size + 2 * margin, self.size), repeat=len(self.shape)):
            places = tuple(slice(i, i + self.size) for i in corner)
            block: Any = (..., *places, slice(None))
            pairs.append((where[block], tiles[block]))
        return pairs

    def pieces(self, images: int, scores: int, limit: int) -> tuple[list[slice], list[Piece]]:
        """Images, and tiles of an image, in equal pieces of at most ``limit`` scores; a tile has ``scores``."""
        left = max(1, limit // (scores * self.dilation ** len(self.shape)))
        ranges = []
        for n in (*reversed(self.counts), images):
            step = math.ceil(n / math.ceil(n / left))
            ranges.append([slice(i, min(i + step, n)) for i in range(0, n, step)])
            left = max(1, left // n)
        first, *rest = reversed(ranges)
        return first, list(itertools.product(*rest))


def tile_counts(shape: Sequence[int], dilation: int, size: int) -> tuple[int, ...]:
    """The number of tiles of a class along each axis: of the largest class, rounded up."""
    return tuple(math.ceil(math.ceil(n / dilation) / size) for n in shape)


@lru_cache(maxsize=64)
def tiles_of(shape: tuple[int, ...], kernel_size: int, window: WindowShape, dilation: int, size: int) -> Tiles:
    """The tiles of a grid for a window, of ``size`` queries along each axis."""
    radius = kernel_size // 2
    # A grid that is one tile with its halo, undilated, shows the rows of them all.
    grid = Grid((size + 2 * radius,) * len(shape), Window(kernel_size, window))
    places = torch.arange(grid.num_positions).view(grid.shape)
    queries = places[(slice(radius, radius + size),) * len(shape)].flatten()
    return Tiles(
        shape, tile_counts(shape, dilation, size), size, radius, dilation, grid.rows(queries[:, None], places.flatten())
    )


@dataclass(frozen=True, eq=False)
class Chunks:
    """Positions that all see each other, cut in stretches of queries: :class:`Tiles` whose halo is everything.

    Attributes:
        shape: the number of positions.
        counts: the number of stretches.
        size: the queries of a stretch.
        radius: 1; with this margin, or any, a buffer holds the keys.
        rows: ``(Q, S)``, of which only the shape means anything.
    """

    shape: tuple[int]
    counts: tuple[int]
    size: int
    rows: Tensor
    radius: int = 1

    def padded(self, margin: int) -> list[int]:
        return list(self.shape) if margin else [self.size * self.counts[0]]

    def inner(self, buffer: Tensor, margin: int) -> Tensor:
        return buffer[:, :, : self.shape[0]]

    def view(self, buffer: Tensor, margin: int) -> Tensor:
        """Buffers as a view of tiles, ``(b, *counts, 1, P, places, width)``."""
        if margin:
            return buffer[:, None, None].expand(-1, *self.counts, -1, -1, -1, -1)
        return buffer.unflatten(2, (*self.counts, self.size)).transpose(1, 2).unsqueeze(2)

    def overlaps(self, buffer: Tensor, tiles: Tensor, piece: Piece, margin: int) -> list[tuple[Tensor, Tensor]]:
        where = self.view(buffer, margin)[(slice(None), *piece)]
        return [(where, tiles.view(where.shape))]

    def pieces(self, images: int, scores: int, limit: int) -> tuple[list[slice], list[Piece]]:
        """One stretch of one image each."""
        return [slice(i, i + 1) for i in range(images)], [(slice(i, i + 1),) for i in range(self.counts[0])]


def chunks_of(positions: int, scores: int, limit: int) -> Chunks:
    """Stretches of at most ``limit`` scores, where one query has ``scores``, or of one query."""
    number = math.ceil(positions / max(1, min(positions, limit // scores)))
    size = math.ceil(positions / number)
    rows = torch.zeros(1, 1, dtype=torch.long).expand(size, positions)
    return Chunks((positions,), (math.ceil(positions / size),), size, rows)
