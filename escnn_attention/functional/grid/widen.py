r"""Positional terms as more channels, which leaves ordinary scaled dot-product attention to compute.

A term of the score can ride in the product of the queries with the keys if it *factorises*, into something that the
query knows and something that the key knows:

- **Poses**. The keys that output pose h sees are :math:`k + E[h^{-1}\hat h]`.
- **Waves**. With :math:`\varphi_h(x) = \Omega h^{-1} x` and :math:`(a, b) = W^T q`,

  .. math::
      \langle q, W [\cos\Omega h^{-1}\Delta, \sin\Omega h^{-1}\Delta] \rangle
          &= \langle a \cos\varphi_h(x) - b \sin\varphi_h(x), \, \cos\varphi_h(x') \rangle \\
          &+ \langle a \sin\varphi_h(x) + b \cos\varphi_h(x), \, \sin\varphi_h(x') \rangle ,

  so keys are widened by the cosine and the sine of their own phase.
- **Windows**. In a window of w positions along an axis, the position of a key modulo w tells which of the w neighbours
  it is, for every query that sees it. So keys are widened by an indicator of this class, whatever the encoding, and
  queries by their products with the table of offsets, in the order of the classes as seen from where they are.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from escnn_attention.functional.call import QueryMode
from escnn_attention.functional.grid.call import PositionalBias, angles
from escnn_attention.functional.rotate import attach_waves
from escnn_attention.geometry.cache import constant_tables
from escnn_attention.geometry.grid import Grid
from escnn_attention.geometry.lattice import indices
from escnn_attention.geometry.windows import Window, WindowShape

MAX_CLASSES = 256
"""The most classes of a window by which keys are widened: beyond, kernels are slow or do not exist."""


def of_images(x: Tensor, positions: int) -> Tensor:
    """Values at points, ``(M, H, B · N, C)``, of the N positions of each image; B is 1 where all are alike."""
    return x.unflatten(2, (-1, positions))


def angles_of(
    q: Tensor, k: Tensor, frequencies: Tensor, points: Tensor, key_points: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The angles ``(M, H, B, N, 1, F)`` at the positions of queries and at those of keys, both ``(M, H, B, N, J, C)``.

    Args:
        q, k: queries and keys.
        frequencies: ``(M, H, F, d)``.
        points, key_points: as in :func:`widen`.
    """
    near = of_images(angles(points, frequencies), q.shape[3]).unsqueeze(4)
    if key_points is None:
        return near, near
    return near, of_images(angles(key_points, frequencies), k.shape[3]).unsqueeze(4)


def widen(
    q: Tensor,
    k: Tensor,
    bias: PositionalBias,
    query: QueryMode,
    points: Tensor,
    grid: Grid | None = None,
    key_points: Tensor | None = None,
    width: int = 0,
) -> tuple[Tensor, Tensor]:
    """Queries and keys of every output pose, whose products are the scores times the square root of C.

    Args:
        q: ``(M, B, N, J, C)``.
        k: ``(M, B, N', P, C)``.
        bias, query: as in :class:`~escnn_attention.functional.grid.call.GridCall`, after folding.
        points: ``(N, d)``, or ``(B · N, d)`` where images differ; the positions.
        grid: for a table over the offsets, with a window: see :func:`num_classes`.
        key_points: the positions of the keys, where these are others.
        width: the number of channels to which those with waves are filled up by zeros.

    Returns:
        ``(M, B, N, H', J', E)`` and ``(M, B, N', H'', P, E)``. H' and H'' are the number of output poses, or 1 where
        all share them. J' is J, or 1 in the own mode, in which the poses of the queries are those of the output.
    """
    dtype = q.dtype
    q, k = q.unsqueeze(4 if query == "own" else 3), k.unsqueeze(3)
    pose = bias.pose if k.shape[4] > 1 else None
    if bias.waves is not None:
        # All queries of a head are rows of one product.
        amplitudes = (q.flatten(1, -2) @ bias.waves.readout.to(dtype).expand(len(q), -1, -1)).unflatten(
            1, q.shape[1:-1]
        )
        # Between two positions the phase is that of their offset, so the origin may lie anywhere.
        q, k, amplitudes = (t.movedim(3, 1) for t in (q, k, amplitudes))  # M, H, B, N, J, C
        near, far = angles_of(q, k, bias.waves.frequencies, points, key_points)
        q = attach_waves(q, near, amplitudes, width=width)
        k = attach_waves(k, far, pose=None if pose is None else pose[:, :, None, None], width=width)
        return q.movedim(1, 3), k.movedim(1, 3)
    if pose is not None:
        k = k + pose[:, None, None]
    if bias.spatial is not None and grid is not None:
        indicator, rows = _classes(grid)
        spatial = bias.spatial.to(dtype).expand(len(q), -1, -1, -1)
        table = torch.einsum("mbnhjc,mhlc->mbnhjl", q.expand(-1, -1, -1, spatial.shape[1], -1, -1), spatial)
        # Of a class without a row this query sees no key, and what stands there is masked.
        index = rows.clamp(min=0)[:, None, None]
        table = table.gather(-1, index.expand(*table.shape[:-1], -1))
        q = join(dtype, q, table)
        k = join(dtype, k, indicator[:, None, None])
    return q.to(dtype), k.to(dtype)


def join(dtype: torch.dtype, *parts: Tensor) -> Tensor:
    """Tensors side by side as channels, with the other axes broadcast."""
    shape = torch.broadcast_shapes(*(t.shape[:-1] for t in parts))
    return torch.cat([t.to(dtype).expand(*shape, -1) for t in parts], dim=-1)


def num_channels(channels: int, grid: Grid | None, bias: PositionalBias) -> int:
    """E, the number of channels of widened queries and keys."""
    if bias.waves is not None:
        return channels + bias.waves.readout.shape[-1]
    return channels if bias.spatial is None or grid is None else channels + (num_classes(grid) or 0)


def num_classes(grid: Grid) -> int | None:
    """The number of classes of a window, or None where there is no window."""
    if grid.window.kernel_size is None:
        return None
    return math.prod(_moduli(grid.shape, grid.window.kernel_size, grid.window.dilation))


def _moduli(shape: tuple[int, ...], kernel_size: int, dilation: int) -> list[int]:
    """The number of classes along each axis: no more than there are positions that may see each other."""
    return [min(kernel_size, -(-n // dilation)) for n in shape]


def _classes(grid: Grid) -> tuple[Tensor, Tensor]:
    """The class of every position, ``(N, K)`` zeros and ones, and the row of every class as seen from it, ``(N, K)``.

    The row is -1 for a class of which the position sees no key.
    """
    window, device = grid.window, grid.coordinates.device
    assert window.kernel_size is not None
    return _class_tables(grid.shape, window.kernel_size, window.shape, window.dilation, device)


@constant_tables
def _class_tables(
    shape: tuple[int, ...], kernel_size: int, window_shape: WindowShape, dilation: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    moduli, coordinates = _moduli(shape, kernel_size, dilation), indices([torch.arange(n) for n in shape])
    label, count = torch.zeros(len(coordinates), dtype=torch.long), math.prod(moduli)
    for x, modulus in zip(coordinates.unbind(1), moduli, strict=True):
        label = label * modulus + x // dilation % modulus
    rows = torch.full((len(label), count), -1)
    blocks = Grid(shape, Window(kernel_size, window_shape, dilation)).blocks(1)
    of_pairs = blocks.rows(0, len(blocks.queries))
    queries, keys, row = torch.broadcast_tensors(blocks.queries[:, :, None], blocks.keys[:, None], of_pairs)
    seen = (queries >= 0) & (keys >= 0) & (row >= 0)
    rows[queries[seen], label[keys[seen]]] = row[seen]
    return torch.eye(count)[label].to(device), rows.to(device)
