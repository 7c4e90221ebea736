r"""Attention on grids on the CPU, by a loop that is compiled for the machine.

``grids.cpp`` takes as many queries at a time as a vector of the processor has lanes through scores, softmax and the
product with the values, so that no score leaves the cache; its backward pass makes them again. Windows, and global
attention with a table of all offsets, go over the offsets; global attention with terms that factorise
(:mod:`~escnn_attention.functional.grid.widen`) goes over the keys, queries and keys being widened by waves as they are
met, and values not. It needs a C++ compiler (:mod:`~escnn_attention.functional.native.build`).
"""

from __future__ import annotations

import math
from dataclasses import replace
from operator import itemgetter
from typing import Annotated, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from escnn_attention.exporting.packaged import PackagedLoop
from escnn_attention.functional.autograd import PRECISE, Passes, exactly, needs_operators
from escnn_attention.functional.grid.call import Arguments, GridCall, GridLoop, PositionalBias
from escnn_attention.functional.grid.portable import plainly
from escnn_attention.functional.native.arguments import Array, Kernel, num_threads
from escnn_attention.functional.native.build import FOLDER, archive, why_no_compiler
from escnn_attention.functional.registry import chunk_size
from escnn_attention.geometry.cache import constant_result, constant_tables
from escnn_attention.geometry.grid import steps_of
from escnn_attention.geometry.grid_pair import cell_of, cell_tables
from escnn_attention.geometry.windows import WindowShape, is_causal, torus_from

NUMBERS_PER_CHUNK = 2**19
"""The numbers of an image that each thread has laid out at once. 2 MB in float32."""

_MOST_KEYS = 2**16  # Each of some tables of the scores of a vector has 16 MB then.

_PARTS = 8
"""Into how many parts a batch falls, in each of which the gradients of the terms are added up."""


_FUSED_CHANNELS = 16  # Of so many PyTorch's fused attention takes less time.


class LoopArguments(NamedTuple):
    """Inputs of the loop; C++ and its header follow from this list.

    Unless they are ``by_position``, vectors of queries, keys, values, outputs, amplitudes and their gradients lie in
    memory as ``(heads, poses, channels, images, positions)`` where queries see ``everything``, and as ``(images, heads,
    poses, channels, positions)`` elsewhere: see :func:`_order`.
    """

    q: Annotated[Tensor, Array("heads, images, positions, query_poses, channels", gradient="void")]
    k: Annotated[Tensor, Array("heads, images, key_positions, key_poses, channels", gradient="void")]
    v: Annotated[Tensor, Array("heads, images, key_positions, key_poses, channels", gradient="void")]
    spatial: Annotated[Tensor | None, Array("spatial_heads, num_poses, offsets, channels", gradient="double")]
    pose: Annotated[Tensor | None, Array("pose_heads, num_poses, key_poses, channels", gradient="double")]
    waves: Annotated[
        Tensor | None,
        Array(
            "wave_heads, num_poses, wave_positions, num_waves",
            "cosines and sines, of the queries and behind them of keys elsewhere",
            gradient="double",
        ),
    ]
    amplitudes: Annotated[
        Tensor | None, Array("heads, images, positions, query_poses, num_waves", "of the queries", gradient="void")
    ]
    shape: Annotated[Tensor, Array("dim", "of the grid of the queries", element="int64_t")]
    key_shape: Annotated[Tensor, Array("dim", "of that of the keys", element="int64_t")]
    steps: Annotated[
        Tensor,
        Array(
            "neighbours, dim + 2",
            "cells to a key along each axis, its slot, the row of its offset",
            element="int64_t",
        ),
    ]
    starts: Annotated[
        Tensor, Array("slots + 1", "of the neighbours of the queries of each slot, and their end", element="int64_t")
    ]
    seed: Annotated[Tensor | None, Array("1", "of dropout", element="int64_t")]
    num_poses: Annotated[int, "of the output"]
    everything: Annotated[bool, "whether queries see all keys, without a table; the grid has one axis then"]
    by_position: Annotated[bool, "whether vectors lie in memory as their axes say, where queries see everything"]
    in_window: Annotated[bool, "whether queries see the keys of a window"]
    queries_of_cell: Annotated[int, "along an axis"]
    keys_of_cell: Annotated[int, "along an axis"]
    torus_from: Annotated[int, "the first axis of which both ends meet, as those of all behind it do; dim for none"]
    chunk: Annotated[int, "how many numbers are laid out at once"]
    parts: Annotated[int, "of a batch, in each of which the gradients of tables are added up"]
    sum_query_poses: Annotated[bool, "whether every output pose sums over the query poses"]
    dropout: Annotated[float, "the probability"]
    scale: Annotated[float, "by which scores are multiplied"]


class LoopResults(NamedTuple):
    """Outputs of the loop, and inputs of its backward pass."""

    out: Annotated[Tensor | None, Array("heads, images, positions, num_poses, channels")] = None
    sums: Annotated[
        Tensor | None,
        Array("heads, images, 2, num_poses or 1, query_poses, positions", "the largest scores, and what makes sums 1"),
    ] = None
    grad: Annotated[Tensor | None, Array("as out", "in the backward pass")] = None


KERNEL = Kernel(FOLDER / "grids.cpp", "attention on grids", LoopArguments, LoopResults)
_packaged_loop = PackagedLoop("grids", archive, why_no_compiler)


def why_unsupported(call: GridCall) -> str | None:
    """Why this backend cannot serve a call."""
    positions, device = call.query_grid, call.q.device
    if device.type != "cpu":
        return f"it runs on the CPU, and the tensors are on {device}"
    if not positions.complete and not positions.shape:
        return "there is no base space for a window"
    has_table = call.bias.spatial is not None or not positions.complete
    if has_table and not (positions.spacing and call.key_grid.spacing):
        return "queries and keys of different spaces have no table of offsets"
    if positions.window.kernel_size is None and has_table:
        if not positions.shape:
            return "there is no base space for a table of offsets"
        if len(call.offsets.offsets) * call.bias.num_poses > _MOST_KEYS:
            return f"without a window it serves at most {_MOST_KEYS} offsets and poses"
    return why_not_built(PRECISE[call.q.dtype])


def attention(call: GridCall) -> Tensor:
    """Attention by the compiled loop over grids: see :func:`escnn_attention.functional.attention`."""
    chunk = chunk_size(NUMBERS_PER_CHUNK, call.q.element_size(), copies=num_threads())
    if not call.query_grid.complete or call.bias.spatial is not None:
        q, k, v = _laid_out(call.q, _BY_IMAGE), _laid_out(call.k, _BY_IMAGE), _laid_out(call.v, _BY_IMAGE)
        lie = q is call.q and k is call.k and v is call.v
        return _loop(call if lie else replace(call, q=q, k=k, v=v), chunk)
    if call.query == "all" and call.q.shape[3] == 1:
        # One query for all output poses: there is nothing to sum.
        call = replace(call, q=call.q.expand(-1, -1, -1, call.bias.num_poses, -1), query="own")
    without_poses = call.bias.pose is None or call.k.shape[3] == 1  # the term of a single pose is that of every key
    if call.bias.waves is None and without_poses and (call.query == "own" or not call.dropout):
        return _without_bias(call, chunk)
    return _loop(call, chunk)


def fuses(channels: int) -> bool:
    """Whether PyTorch's fused attention takes less time than the loop, where all queries see the same.

    It takes more for narrow heads. Gradients, with their derivatives and for scores of any size, are those of the loop.
    """
    return channels >= _FUSED_CHANNELS and not torch.is_grad_enabled()


def reads_channels(x: Tensor, channels: int) -> bool:
    """Whether the loop reads features where all queries see the same, best with positions side by side."""
    if x.device.type != "cpu" or fuses(channels) or needs_operators(x):
        return False
    return why_not_built(PRECISE[x.dtype]) is None


def _without_bias(call: GridCall, chunk: int) -> Tensor:
    """Queries that all see the same, once for all output poses."""
    q = call.q.flatten(2, 3)
    if fuses(q.shape[-1]) and not call.dropout and not needs_operators(q, call.k, call.v):
        exact = PRECISE[q.dtype]
        # Images in front of the heads: so each position has its heads side by side in memory.
        q, k, v = (t.transpose(0, 1).to(exact) for t in (q, call.k.flatten(2, 3), call.v.flatten(2, 3)))
        with exactly("cpu"):
            out = F.scaled_dot_product_attention(q, k, v).to(call.v.dtype)
        return _of_poses(out.transpose(0, 1).unflatten(2, call.q.shape[2:4]), call)
    return _of_poses(_loop(replace(call, bias=PositionalBias(call.q.shape[3]), query="own"), chunk), call)


def _of_poses(out: Tensor, call: GridCall) -> Tensor:
    """What the output poses have of what the query poses have."""
    return out if call.query == "own" else out.sum(3, keepdim=True).expand(-1, -1, -1, call.bias.num_poses, -1)


@constant_result
def why_not_built(dtype: torch.dtype) -> str | None:
    """Why there is no compiled loop for numbers of this type, if there is none."""
    return KERNEL.why_not_built(dtype)


def _prepared(call: Arguments) -> LoopArguments:
    """The arguments as the loop reads them."""
    order = _BY_IMAGE if call.kernel_size else _order(call)
    everything = order != _BY_IMAGE
    q, k, v = _laid_out(call.q, order), _laid_out(call.k, order), _laid_out(call.v, order)
    heads, images, positions, _, channels = q.shape
    parts = torch.sym_min(images, max(1, _PARTS // heads) if everything else _PARTS)
    cell = (1, 1)
    if everything:
        space = _line(positions, k.shape[2])
    elif call.spacings:
        (query_spacing, key_spacing), size = call.spacings, call.kernel_size or None
        of_pair = (tuple(call.shape), query_spacing, tuple(call.key_shape), key_spacing, size, call.window)
        space = _Space(*cell_tables(*of_pair), torus_from(call.window, len(call.shape)))
        cell = cell_of(query_spacing, key_spacing)
    else:
        space = _space(tuple(call.shape), call.kernel_size, call.window, call.dilation)
    return LoopArguments(
        *(q, k, v),
        None if call.spatial is None else call.spatial.contiguous(),
        None if call.pose is None else call.pose.contiguous(),
        # Cosines and sines of the phases side by side, and what every query sees of these waves.
        waves=None if call.cos is None or call.sin is None else torch.cat([call.cos, call.sin], dim=-1),
        amplitudes=None
        if call.readout is None
        else _laid_out((q.flatten(1, -2) @ call.readout).unflatten(1, q.shape[1:-1]), order),
        shape=space.shape,
        key_shape=space.key_shape,
        steps=space.steps,
        starts=space.starts,
        seed=call.seed,
        num_poses=call.num_poses,
        everything=everything,
        by_position=order == _BY_POSITION,
        in_window=call.kernel_size > 0 or is_causal(call.window),
        queries_of_cell=cell[0],
        keys_of_cell=cell[1],
        torus_from=space.torus_from,
        chunk=call.chunk,
        parts=parts,
        sum_query_poses=call.sum_query_poses,
        dropout=call.dropout,
        scale=1 / math.sqrt(channels),
    )


class _Order(NamedTuple):
    """The axes of vectors (heads, images, positions, poses, channels) in the order in which they lie in memory."""

    axes: tuple[int, ...]
    back: tuple[int, ...]


_BY_POSITION, _BY_CHANNEL = _Order((0, 1, 2, 3, 4), (0, 1, 2, 3, 4)), _Order((0, 3, 4, 1, 2), (0, 3, 4, 1, 2))
_BY_IMAGE = _Order((1, 0, 3, 4, 2), (1, 0, 4, 2, 3))


def _order(call: Arguments) -> _Order:
    """The order in which the loop takes vectors, that of the projections: they are not copied.

    Linear maps of images of channels give positions side by side, and the loop reads rows of them. Where queries see
    everything it takes others, too.
    """
    if call.kernel_size or call.spatial is not None or is_causal(call.window):
        return _BY_IMAGE
    return _BY_CHANNEL if call.q.stride(2) == 1 else _BY_POSITION


def _laid_out(vectors: Tensor, order: _Order) -> Tensor:
    """Vectors whose axes lie in memory in this order; the same tensor if they already do, which saves time."""
    shape, strides, expected = vectors.shape, vectors.stride(), 1
    for axis in reversed(order.axes):
        # A program takes any number of images.
        if type(shape[axis]) is not int or (shape[axis] != 1 and strides[axis] != expected):
            return vectors.permute(order.axes).contiguous().permute(order.back)
        expected *= shape[axis]
    return vectors


def _packaged(call: Arguments) -> Tensor:
    """The output of the kernel in a package."""
    arguments, order = _prepared(call), _order(call)
    members = KERNEL.structure.members(arguments, LoopResults())
    in_memory = [t if t is None or t.dim() < 5 else t.permute(order.axes) for t in members.arrays]
    # A view in place of this order lets the compiler take the number of images for any that it was shown.
    shape = itemgetter(*order.axes)((*call.q.shape[:3], call.num_poses, call.q.shape[4]))
    return _packaged_loop(call.q.dtype, members._replace(arrays=in_memory), shape).permute(order.back)


class _Space(NamedTuple):
    """Grids and a window as the loop has them: see :class:`LoopArguments`."""

    shape: Tensor
    key_shape: Tensor
    steps: Tensor
    starts: Tensor
    torus_from: int


@constant_tables
def _space(shape: tuple[int, ...], kernel_size: int, window: WindowShape, dilation: int) -> _Space:
    """A grid with a window, or with all offsets: cells of one position."""
    steps = steps_of(shape, kernel_size, window, dilation)
    number = torch.arange(len(steps)).unsqueeze(1)
    of_cells = torch.cat([steps, torch.zeros_like(number), number], dim=1)
    sizes, starts = torch.tensor(shape), torch.tensor([0, len(steps)])
    return _Space(sizes, sizes, of_cells, starts, torus_from(window, len(shape)))


@constant_tables
def _line(positions: int, keys: int) -> _Space:
    """Positions that all see as many keys as the loop has them: a line of them, and no offsets."""
    return _Space(
        torch.tensor([positions]),
        torch.tensor([keys]),
        torch.zeros(0, 3, dtype=torch.long),
        torch.zeros(2, dtype=torch.long),
        1,
    )


def _empty(call: Arguments) -> tuple[Tensor, Tensor]:
    """Room for the output, and for what the backward pass makes probabilities from."""
    heads, batch, positions, poses, channels = call.q.shape
    sums = call.q.new_empty(heads, batch, 2, call.num_poses if call.sum_query_poses else 1, poses, positions)
    order = _BY_IMAGE if call.kernel_size else _order(call)
    shape = itemgetter(*order.axes)((heads, batch, positions, call.num_poses, channels))
    return call.q.new_empty(shape).permute(order.back), sums


def _forward_pass(call: Arguments) -> tuple[Tensor, Tensor]:
    out, sums = _empty(call)
    KERNEL.run(out.dtype, _prepared(call), LoopResults(out, sums))
    return out, sums


def _backward_pass(call: Arguments, grad: Tensor, out: Tensor | None, sums: Tensor, *_: Any) -> list[Tensor | None]:
    arguments = _prepared(call)
    grad_q, grad_k, grad_v = map(torch.empty_like, (arguments.q, arguments.k, arguments.v))
    tables = [
        None if t is None else torch.zeros_like(t, dtype=torch.float64, memory_format=torch.contiguous_format)
        for t in (arguments.spatial, arguments.pose, arguments.waves)
    ]
    grad_amplitudes = None if arguments.amplitudes is None else torch.empty_like(arguments.amplitudes)
    gradients = (grad_q, grad_k, grad_v, *tables, grad_amplitudes)
    grad = _laid_out(grad, _order(call))
    KERNEL.run(grad_q.dtype, arguments, LoopResults(out, sums, grad), gradients)
    grad_spatial, grad_pose, grad_waves = (None if t is None else t.to(grad_q.dtype) for t in tables)
    grad_cos = grad_sin = None
    if grad_waves is not None:
        grad_cos, grad_sin = (t.contiguous() for t in grad_waves.chunk(2, dim=-1))
    grad_readout = None
    if call.readout is not None and grad_amplitudes is not None:
        of_queries = grad_amplitudes.flatten(1, -2)
        grad_q += (of_queries @ call.readout.mT).view_as(grad_q)
        grad_readout = (call.q.flatten(1, -2).mT @ of_queries).sum_to_size(call.readout.shape)
    return [grad_q, grad_k, grad_v, grad_spatial, grad_pose, grad_cos, grad_sin, grad_readout]


_loop = GridLoop("native", Passes(_forward_pass, _backward_pass, _empty, plainly, _packaged))
