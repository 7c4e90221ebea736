r"""Attention through FlexAttention: for windows, and for tables over the offsets, on CUDA.

FlexAttention compiles a fused kernel for a score and a mask that are written in Python. It skips blocks of queries and
keys that do not see each other; the positions are taken along a curve that fills the plane, so that a block is compact
and its window touches few others.

Terms of the score that factorise are channels (:mod:`~escnn_attention.functional.widen`). For other tables over the
offsets, such as any of a global attention, the products of the queries with all rows are held, and the kernel reads
that of each pair.

Both the mask and the row are looked up by one number: the positions are numbered such that the difference of two
numbers tells the offset.

There are no second derivatives, and on CPU there are no first ones either.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from escnn_attention.functional.bias import QueryMode, Terms
from escnn_attention.functional.widen import join, merge, neighbours, num_classes, widen
from escnn_attention.geometry.grid import Grid, Positions, Window, WindowShape

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

__all__ = ["MAX_PRODUCTS", "NARROW", "attention", "refuses"]

MAX_PRODUCTS = 2**30
"""The most products of queries with rows of a table that are held. 4 GB in float32."""

NARROW = 128
"""The number of channels up to which a window is written as channels."""

_BLOCK = 128  # The number of queries, and of keys, of a block that is skipped or not.


def refuses(q: Tensor, positions: Positions, terms: Terms, query: QueryMode, dropout: float) -> str | None:
    """Why this backend cannot serve a call, or None if it can."""
    if importlib.util.find_spec("torch.nn.attention.flex_attention") is None:
        return "it needs PyTorch 2.5 or later"
    if not isinstance(positions, Grid):
        return f"it needs positions on a grid, got {type(positions).__name__}"
    if dropout > 0:
        return "it has no dropout"
    if q.device.type == "cpu":
        waves = (terms.waves.frequencies, terms.waves.readout) if terms.waves else ()
        needed = any(t is not None and t.requires_grad for t in (q, terms.spatial, terms.pose, *waves))
        if needed and torch.is_grad_enabled():
            return "FlexAttention has no backward pass on CPU"
    elif q.device.type != "cuda":
        return f"it needs CUDA, got {q.device.type}"
    elif q.dtype == torch.float64:
        return "on CUDA it has no float64"
    elif importlib.util.find_spec("triton") is None:
        return "it needs Triton"
    if _by_row(q, positions, terms):
        products = q[..., 0].numel() * (terms.num_poses if query == "all" else 1) * len(positions.offsets)
        if products > MAX_PRODUCTS:
            return f"it would hold {products} products of queries with the table of offsets, at most {MAX_PRODUCTS}"
    return None


def attention(
    q: Tensor, k: Tensor, v: Tensor, positions: Positions, terms: Terms, *, query: QueryMode, dropout: float = 0.0
) -> Tensor:
    """See :func:`escnn_attention.functional.attention`."""
    assert isinstance(positions, Grid)
    num_poses, scale = terms.num_poses, 1 / math.sqrt(q.shape[-1])
    terms, mode = merge(terms, query, k.shape[2])
    table = None
    if _by_row(q, positions, terms):
        table, terms = terms.spatial, replace(terms, spatial=None)
    layout = _Layout.of(positions, q.shape[2] if mode == "all" else 1, k.shape[2], q.device)
    wide_q, wide_k = widen(q, k, positions, terms, mode)
    poses = terms.num_poses
    score_mod = None
    if table is not None:
        own = q.unsqueeze(3 if mode == "own" else 2)
        products = scale * (own @ table.unsqueeze(2).transpose(-1, -2).to(q.dtype))
        score_mod = layout.score_mod(layout.tokens(products, poses))
    # The output poses are heads; those that share their keys are a group.
    shared = wide_k.shape[2]
    out = _kernel(q.device)(
        layout.tokens(_pad(wide_q), poses),
        layout.tokens(_pad(wide_k), shared),
        layout.tokens(_pad(v.unsqueeze(2)), shared),
        score_mod=score_mod,
        block_mask=layout.block_mask(),
        scale=scale,
        enable_gqa=shared < poses,
        kernel_options={"FORCE_USE_FLEX_ATTENTION": True},  # and not one for a few queries, with limits of its own
    )
    out = out[..., : v.shape[-1]].unflatten(1, (-1, poses)).unflatten(3, (-1, wide_q.shape[3])).transpose(3, 4)
    return join(out.index_select(4, layout.place), query, mode, num_poses)


def _by_row(q: Tensor, positions: Positions, terms: Terms) -> bool:
    """Whether the kernel reads the products of the queries with the table of offsets, row by row."""
    classes = num_classes(positions)
    return terms.spatial is not None and (classes is None or q.shape[-1] + classes > NARROW)


def _pad(x: Tensor) -> Tensor:
    """With zeros, to as many channels as the kernel computes with: a power of two, of at least 16."""
    return F.pad(x, (0, (1 << max(4, (x.shape[-1] - 1).bit_length())) - x.shape[-1]))


def _kernel(device: torch.device) -> Callable[..., Tensor]:
    """FlexAttention: compiled where that gives a fused kernel, unless the caller is being compiled already."""
    from torch.nn.attention import flex_attention

    if device.type == "cpu" or torch.compiler.is_compiling():
        return flex_attention.flex_attention
    return _compiled()


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    options: dict[str, Any] = {"dynamic": False}
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        # A network has layers of many sizes, each of which has a kernel of its own. Beyond the limit there would be
        # none, and the scores would be held.
        options.update(recompile_limit=256, isolate_recompiles=True)
    return torch.compile(flex_attention, **options)


@dataclass(frozen=True, eq=False)
class _Layout:
    """In which order the kernel takes queries and keys, and who sees whom.

    A token is a position in one of its poses. The poses of a position follow each other, which makes a block of tokens
    narrow in space.

    Attributes:
        order: ``(N,)``; the positions one after the other.
        place: ``(N,)``; where each of them stands.
        query_codes, key_codes: ``(N · J,)``, ``(N · P,)``; for every token a number of its position, such that the
            difference of that of a key and that of a query tells their offset, and is not negative.
        rows: the row of the table of offsets for each of these differences.
        seen: whether it has one.
        blocks: which blocks of keys each block of queries sees, and the other way round: their number, and which. Empty
            where all tokens see each other.
    """

    order: Tensor
    place: Tensor
    query_codes: Tensor
    key_codes: Tensor
    rows: Tensor
    seen: Tensor
    blocks: tuple[Tensor, ...]

    @classmethod
    def of(cls, grid: Grid, query_poses: int, key_poses: int, device: torch.device) -> _Layout:
        w = grid.window
        return cls(*_tables(grid.shape, w.kernel_size, w.shape, w.dilation, query_poses, key_poses, device))

    def tokens(self, x: Tensor, poses: int) -> Tensor:
        """From ``(B, M, H or 1, P, N, C)`` to ``(B, M · H, N · P, C)``."""
        x = x.index_select(4, self.order).transpose(3, 4).flatten(3, 4)
        return x.expand(-1, -1, poses, -1, -1).flatten(1, 2)

    def score_mod(self, products: Tensor) -> Callable[..., Tensor]:
        """Adds the entry of ``products``, ``(B, M · H, N · J, L)``, that belongs to a pair."""
        query_codes, key_codes, rows = self.query_codes, self.key_codes, self.rows

        def add(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score + products[b, h, i, rows[key_codes[j] - query_codes[i]]]

        return add

    def block_mask(self) -> BlockMask | None:
        """The blocks that are not skipped, and in them the pairs that see each other."""
        from torch.nn.attention.flex_attention import BlockMask

        if not self.blocks:
            return None
        query_codes, key_codes, seen = self.query_codes, self.key_codes, self.seen

        def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return seen[key_codes[j] - query_codes[i]]

        num_keys, which_keys, num_queries, which_queries = self.blocks
        return BlockMask(
            seq_lengths=(len(query_codes), len(key_codes)),
            kv_num_blocks=num_keys,
            kv_indices=which_keys,
            full_kv_num_blocks=None,
            full_kv_indices=None,
            q_num_blocks=num_queries,
            q_indices=which_queries,
            full_q_num_blocks=None,
            full_q_indices=None,
            BLOCK_SIZE=(_BLOCK, _BLOCK),
            mask_mod=mask_mod,
        )


# As the tables of a grid: made once for each size, and constants to a compiler.
@torch.compiler.assume_constant_result
def _tables(
    shape: tuple[int, ...],
    kernel_size: int | None,
    window_shape: WindowShape,
    dilation: int,
    query_poses: int,
    key_poses: int,
    device: torch.device,
) -> tuple[Any, ...]:
    """The attributes of a :class:`_Layout`."""
    return _cached_tables(shape, Window(kernel_size, window_shape, dilation), query_poses, key_poses, device)


@lru_cache(maxsize=64)
def _cached_tables(
    shape: tuple[int, ...], window: Window, query_poses: int, key_poses: int, device: torch.device
) -> tuple[Any, ...]:
    grid = Grid(shape, window)
    index = _index(shape)
    # As in a grid so wide that the difference of two numbers belongs to one offset only.
    wide = [2 * n - 1 for n in shape]
    code = _ravel(index, wide)
    offset = [digit - (n - 1) for digit, n in zip(_index(wide), shape, strict=True)]
    rows = grid.rows(*(_ravel([(sign * o).clamp(min=0) for o in offset], shape) for sign in (-1, 1)))
    seen = rows >= 0
    # Masked pairs read the table too, and add zeros to its gradient: spread out, so as not to queue up for one entry.
    rows = torch.where(seen, rows, torch.arange(len(rows)) % len(grid.offsets))

    order = torch.arange(grid.num_positions)
    blocks: tuple[Tensor, ...] = ()
    if not seen.all():
        orders = (order, _curve(index, window.dilation))
        maps = [_touched(shape, window, o.argsort(), query_poses, key_poses) for o in orders]
        order, touched = min(zip(orders, maps, strict=True), key=lambda pair: int(pair[1].sum()))
        blocks = (*_listed(touched), *_listed(touched.T))
    code = code[order].int()
    codes = ((code - code.max()).repeat_interleave(query_poses), code.repeat_interleave(key_poses))
    tables = (order, order.argsort(), *codes, rows.int(), seen)
    return *(t.to(device) for t in tables), tuple(t.to(device) for t in blocks)


def _index(shape: Sequence[int]) -> list[Tensor]:
    """The coordinates of all positions, one tensor for each axis."""
    position = torch.arange(math.prod(shape))
    return [position // math.prod(shape[axis + 1 :]) % n for axis, n in enumerate(shape)]


def _ravel(index: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """The number of a position in a grid."""
    number = torch.zeros(1, dtype=torch.long)
    for coordinate, n in zip(index, shape, strict=True):
        number = number * n + coordinate
    return number


def _curve(index: Sequence[Tensor], dilation: int) -> Tensor:
    """The positions along a curve that fills the grid (Morton's), for each of the classes that never see each other."""
    steps = [coordinate // dilation for coordinate in index]
    key = _ravel([coordinate % dilation for coordinate in index], [dilation] * len(index))
    for bit in reversed(range(max((int(s.max()) for s in steps), default=0).bit_length())):
        for step in steps:
            key = 2 * key + (step >> bit & 1)
    return key.argsort()


def _touched(shape: tuple[int, ...], window: Window, place: Tensor, query_poses: int, key_poses: int) -> Tensor:
    """Which blocks of queries see anything of which blocks of keys."""
    queries, keys, _ = neighbours(shape, window)
    queries, keys = (place[p] * n for p, n in ((queries, query_poses), (keys, key_poses)))
    blocks = (-(-len(place) * n // _BLOCK) for n in (query_poses, key_poses))
    touched = torch.zeros(*blocks, dtype=torch.bool)
    # The tokens of a position lie in one block, or in several that follow each other.
    for i in {*range(0, query_poses, _BLOCK), query_poses - 1}:
        for j in {*range(0, key_poses, _BLOCK), key_poses - 1}:
            touched[(queries + i) // _BLOCK, (keys + j) // _BLOCK] = True
    return touched


def _listed(touched: Tensor) -> tuple[Tensor, Tensor]:
    """For every row the number of its true entries, and all columns with these in front."""
    columns = touched.int().argsort(dim=-1, descending=True, stable=True).int()
    return touched.sum(-1, dtype=torch.int32)[None, None], columns.contiguous()[None, None]
