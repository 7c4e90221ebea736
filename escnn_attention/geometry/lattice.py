"""Positions on grids as whole numbers along axes, and blocks of queries among them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from escnn_attention.geometry.windows import Blocks, WindowShape, form_of


def everything(
    row: Callable[[Tensor, Tensor], Tensor], queries: int, keys: int, max_queries: int, device: torch.device
) -> Blocks:
    """Stretches of at most ``max_queries`` queries, each of which sees so many keys.

    ``row`` gives that of the table of offsets, for each pair of a query and a key.
    """
    places = torch.arange(queries, device=device)
    size = max(1, min(max_queries, queries))
    padded = torch.cat([places, places.new_full((-queries % size,), -1)]).view(-1, size)
    return Blocks(padded, torch.arange(keys, device=device)[None], places, row)


def tiles(
    shape: tuple[int, ...],
    key_shape: tuple[int, ...],
    axes: Sequence[tuple[Tensor, Tensor, Tensor]],
    box: tuple[int, ...],
    lookup: Tensor,
    device: torch.device,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The attributes of :class:`Blocks` that are translates of each other.

    Along each axis there are the queries of each tile, the keys that any of them sees, and the number of each pair's
    offset in a ``box`` of so many, of whose offsets ``lookup`` has the rows; numbers off the box are of unseen keys.
    """
    sides = (shape, key_shape, box)
    queries, keys, number = (ravel(sides[i], [axis[i] for axis in axes]) for i in range(3))
    # Every position is a query once, and what fills up sorts in front; torch.export.save warns of parts of a tensor.
    place = queries.flatten().argsort()[queries.numel() - math.prod(shape) :].clone()
    row = lookup[number.clamp(min=0)].masked_fill(number < 0, -1)
    return queries.to(device), keys.to(device), place.to(device), row[None].to(device)


def longest_square(kernel_size: int | None, window_shape: WindowShape) -> int | None:
    """The square of the longest offset that a ball may have, in steps; None for a box."""
    form = form_of(window_shape)
    if kernel_size is None or form == "square":
        return None
    # Without a number it is the disc whose diameter is the width of the window: its edge lies half a step outside.
    number = form.partition(" ")[2]
    return int(number) if number else kernel_size**2 // 4


def ravel(shape: tuple[int, ...], axes: Sequence[Tensor]) -> Tensor:
    """From the coordinates of tiles along each axis, ``(T_i, n_i)``, the positions ``(T, n)``; -1 off the grid."""
    tiles = torch.zeros(1, 1, dtype=torch.long)
    inside = torch.ones(1, 1, dtype=torch.bool)
    for n, axis in zip(shape, axes, strict=True):
        on_grid = (axis >= 0) & (axis < n)
        tiles = (tiles[:, None, :, None] * n + axis[None, :, None, :]).flatten(2).flatten(0, 1)
        inside = (inside[:, None, :, None] & on_grid[None, :, None, :]).flatten(2).flatten(0, 1)
    return tiles.masked_fill(~inside, -1)


def indices(axes: list[Tensor]) -> Tensor:
    """All combinations of the entries of the axes, the last one fastest: ``(product of lengths, number of axes)``."""
    if not axes:
        return torch.zeros(1, 0, dtype=torch.long)
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, -2)


def to_space(index: Tensor) -> Tensor:
    """From steps along the axes of a tensor to vectors of R^d."""
    sign = torch.full((index.shape[-1],), -1.0, dtype=index.dtype)
    sign[:1] = 1.0
    return index.flip(-1) * sign
