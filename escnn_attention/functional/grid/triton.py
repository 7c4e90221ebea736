r"""Windows on CUDA, and global attention there with tables of offsets, by kernels that Triton compiles.

No score is ever held: the backward pass makes them again. There are three kinds of passes:

- :mod:`~escnn_attention.functional.grid.triton_tiles`: products of tiles on tensor cores, for wide heads, half
  precision and global attention.
- :mod:`~escnn_attention.functional.grid.triton_own`: narrow heads in windows, whose tiles would be mostly empty, where
  a query belongs to one output pose.
- those here: the same where every output pose sums over the query poses.

In the last two a query goes over the keys of its window and over no others. What queries know of the offsets and of the
poses, :math:`\langle q, \rho_x\rangle` and :math:`\langle q, E\rangle`, are products of ordinary matrices: a number
for every query and offset, and for every query and pose, that are held for some images at a time. The kernels are
compiled for a group, a head, a window and a size of the grid where these are first met, which takes a second or two,
and kept on the disk by Triton.

With ``TRITON_INTERPRET=1`` in the environment Triton runs them by NumPy, on the CPU, to look into them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from escnn_attention.functional.grid import triton_own, triton_tiles
from escnn_attention.functional.grid.call import GridCall
from escnn_attention.functional.grid.kernel import Arguments, GridLoop, why_not_a_table
from escnn_attention.functional.grid.triton_launch import (
    chunks,
    gradients_of_terms,
    grid_constants,
    positions_side_by_side,
    rows_of_tables,
    steps,
)
from escnn_attention.functional.launch import by_shapes, interpreted, kernels, on_device, power_of_two, why_not_run
from escnn_attention.functional.memory import chunk_size
from escnn_attention.geometry.cache import constant_result

PRODUCTS_PER_CHUNK = 2**24
"""How many products of queries with tables are held at once, at least: 64 MB in float32, and a gradient of each."""

MEMORY_OF_PRODUCTS = 1 / 128
"""The part of a GPU's memory that they may take, and their gradients as much again.

On a GPU of 80 GB these are 160 million in float32: enough queries for several waves of programs.
"""

MAX_PRODUCTS = 2**29
"""The most of them that a head of a single image may have, with the rows of offsets and those of poses."""


def why_unsupported(call: GridCall) -> str | None:
    """Why this backend cannot serve a call, or None if it can."""
    if reason := why_not_run(call.q.device.type):
        return reason
    if reason := why_not_a_table(call):
        return reason
    if len(call.query_grid.shape) > 3:
        return f"it needs a grid of one to three axes, got {len(call.query_grid.shape)}"
    _, _, num_positions, query_poses, channels = call.q.shape
    key_poses = 0 if call.bias.pose is None else call.bias.pose.shape[2]
    if max(query_poses, call.bias.num_poses, key_poses) * num_positions * channels >= 2**30:
        return "the numbers of a head of an image are more than 32 bits count"
    pairs = call.bias.num_poses * (query_poses if call.query == "all" else 1)
    products = pairs * num_positions * (len(call.query_grid.offsets) + key_poses)
    if products > MAX_PRODUCTS:
        return f"a head would have {products} products of queries with tables, at most {MAX_PRODUCTS}"
    return None


def attention(call: GridCall) -> Tensor:
    """Attention by kernels that Triton compiles: see :func:`escnn_attention.functional.attention`."""
    number_size = max(4, call.q.element_size())
    chunk = chunk_size(_products_per_chunk(call.q.device, number_size), number_size, copies=2)
    if tiled(call.query_grid.complete, call.q.shape[-1], call.v.dtype):
        triton_tiles.prepare(call)
        return _tiles(call, chunk)
    window, _ = call.query_grid.trimmed
    # Before the operator is called: what is made inside belongs to a graph that may be recorded there.
    steps(call.query_grid.shape, window.kernel_size or 0, window.shape, window.dilation, call.q.device)
    if call.query == "all":
        # Before that, too: both passes read them as images that lie one after the other.
        q, k, v = (t.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3) for t in (call.q, call.k, call.v))
        call = replace(call, q=q, k=k, v=v)
    return _loop(call, chunk)


def tiled(complete: bool, channels: int, dtype: torch.dtype) -> bool:
    """Whether products of tiles serve heads of so many channels, in a window or on the complete grid."""
    return complete or channels >= triton_tiles.CHANNELS or dtype.itemsize == 2


@constant_result
def _products_per_chunk(device: torch.device, number_size: int) -> int:
    """How many products are held at once: the same on every GPU of a kind, whatever else is in its memory."""
    if device.type != "cuda":
        return PRODUCTS_PER_CHUNK
    memory = torch.cuda.get_device_properties(device).total_memory
    return max(PRODUCTS_PER_CHUNK, int(memory * MEMORY_OF_PRODUCTS) // number_size)


def _forward_pass(call: Arguments) -> tuple[Tensor, Tensor]:
    if not call.sum_query_poses:
        return triton_own.forward_pass(call)
    out, sums = _empty(call)
    everything = [*map(_images, (call.q * call.scale, call.k, call.v, out)), sums.flatten(0, 1)]
    for rows in _chunks(call):
        q, k, v, *filled = (_some(t, rows) for t in everything)
        _launch("forward", call, rows, [q, k, v, _known(_table(call, rows), q)], filled)
    return out, sums


def _backward_pass(call: Arguments, grad: Tensor, out: Tensor, sums: Tensor) -> list[Tensor | None]:
    if not call.sum_query_poses:
        return triton_own.backward_pass(call, grad, out, sums)
    vectors = [_images(t) for t in (call.q * call.scale, call.k, call.v, out, grad)]
    grads = [torch.empty_like(t) for t in vectors[:3]]
    everything = [*vectors, *grads, sums.flatten(0, 1)]
    of_tables = []
    for rows in _chunks(call):
        q, k, v, out, grad, grad_q, grad_k, grad_v, sums = (_some(t, rows) for t in everything)
        table = _table(call, rows)
        known, change = _known(table, q), None
        if known is not None:
            change = torch.empty_like(known)
            if call.pose is not None:
                # What they have is added up.
                change.view(*sums.shape[:2], -1, sums.shape[2])[:, :, -call.pose.shape[2] :].zero_()
        inputs, means = [q, k, v, known], torch.empty_like(sums)
        _launch("backward_queries", call, rows, inputs, [out, sums, grad, grad_q, means, change])
        _launch("backward_keys", call, rows, inputs, [sums, means, grad, grad_k, grad_v])
        if table is not None and change is not None:
            of_queries = table.mT.expand(*grad_q.shape[:2], -1, -1).flatten(0, 1)
            grad_q.flatten(0, 1).baddbmm_(of_queries, change.flatten(0, 1), beta=call.scale, alpha=call.scale)
            of_tables.append(change @ q.mT)
        else:
            grad_q *= call.scale
    return [
        *(_as_projected(t, call) for t in grads),
        *gradients_of_terms(of_tables, call),
    ]


def _empty(call: Arguments) -> tuple[Tensor, Tensor]:
    """Room for the output and for the logarithms of the sums."""
    if not call.sum_query_poses:
        return triton_own.room_for_outputs(call), _empty_sums(call)
    heads, batch, positions, _, channels = call.q.shape
    out = call.q.new_empty(heads * batch, call.num_poses, channels, positions)
    return _as_projected(out, call), _empty_sums(call)


def _empty_sums(call: Arguments) -> Tensor:
    """Room for the logarithms of the sums, ``(M, B, T, N)`` for T pairs of an output and a query pose."""
    heads, batch, positions, _, _ = call.q.shape
    return call.q.new_empty(heads, batch, _pairs(call), positions)


def _pairs(call: Arguments) -> int:
    """How many pairs of an output and a query pose there are."""
    return call.num_poses * (call.q.shape[3] if call.sum_query_poses else 1)


_loop = GridLoop("triton", _forward_pass, _backward_pass, _empty, laid_out=positions_side_by_side)
_tiles = GridLoop(
    "triton_tiles",
    triton_tiles.forward_pass,
    triton_tiles.backward_pass,
    triton_tiles.room,
    laid_out=triton_tiles.laid_out,
    keeps_half=True,
)


def _images(t: Tensor) -> Tensor:
    """Vectors ``(M, B, N, P, C)`` of every head of every image, ``(M · B, P, C, N)``: positions side by side."""
    return t.permute(0, 1, 3, 4, 2).contiguous().flatten(0, 1)


def _as_projected(images: Tensor, call: Arguments) -> Tensor:
    """Vectors ``(M · B, P, C, N)`` of every head of every image, ``(M, B, N, P, C)``."""
    return images.unflatten(0, call.q.shape[:2]).permute(0, 1, 4, 2, 3)


def _some(images: Tensor, rows: slice) -> Tensor:
    """Some images, without an operation where they are all."""
    return images if rows.stop - rows.start >= len(images) else images[rows]


def _chunks(call: Arguments) -> Iterator[slice]:
    """Images whose products with the tables fit, and these tables, of which each image has its own."""
    _, _, positions, _, channels = call.q.shape
    return chunks(call, rows_of_tables(call) * max(call.num_poses * channels, _pairs(call) * positions))


def _table(call: Arguments, rows: slice) -> Tensor | None:
    """The terms of the heads of some images, of offsets and of poses in one table, ``(images, 1, H · K, C)``."""
    terms = [t for t in (call.spatial, call.pose) if t is not None]
    if not terms:
        return None
    heads = max(map(len, terms))
    table = torch.cat([t.expand(heads, -1, -1, -1) for t in terms], dim=2) if len(terms) > 1 else terms[0]
    if heads > 1:
        batch = call.q.shape[1]
        # The images of a head lie side by side.
        first, last = rows.start // batch, (rows.stop - 1) // batch
        start = rows.start - first * batch
        table = table[first : last + 1].unsqueeze(1).expand(-1, batch, -1, -1, -1).flatten(0, 1)
        table = table[start : start + rows.stop - rows.start]
    else:
        table = table.expand(rows.stop - rows.start, -1, -1, -1)
    return table.flatten(1, 2).unsqueeze(1)


def _known(table: Tensor | None, q: Tensor) -> Tensor | None:
    """The products of queries with a table, ``(images, J, H · K, N)``."""
    return None if table is None else table @ q


class _Shape(NamedTuple):
    """Sizes of a program of a kernel, which is one warp.

    Attributes:
        positions: how many positions.
        output, query: how many output poses and query poses of each.
    """

    positions: int
    output: int
    query: int


def _launch(
    name: str, call: Arguments, rows: slice, inputs: Sequence[Tensor | None], others: Sequence[Tensor | None]
) -> None:
    """Run a kernel on some images."""
    q, shape = call.q, _shape(call)
    blocks = -(-q.shape[2] // shape.positions)
    programs = {
        "forward": call.num_poses // shape.output,
        "backward_queries": q.shape[3] // shape.query,
        "backward_keys": call.k.shape[3],
    }[name]
    window = steps(tuple(call.shape), call.kernel_size, call.window, call.dilation, q.device)
    # What there is none of is not read.
    tensors = (q if t is None else t for t in (*inputs, window, call.seed, *others))
    with on_device(q.device):
        getattr(kernels("grid.triton_kernels"), name)[blocks * (rows.stop - rows.start), programs](
            *tensors,
            rows.start,
            **_constants(call, shape),
            num_warps=1,
            enable_fp_fusion=True,  # which is the default of some versions only
        )


_POSES = 4
"""How many output poses or query poses a thread has at most."""

_NUMBERS = 48
"""How many numbers of vectors of these poses it has at most: its registers hold two to four times as many."""


def _shape(call: Arguments) -> _Shape:
    """The shape in which kernels keep what they work on in registers.

    Positions have as many threads in every kernel, so that sums over channels are the same in all.
    """
    # Interpreted, every program takes as long, however much it does.
    most = 8 if interpreted() else _POSES
    output, query = (math.gcd(n, most) for n in (call.num_poses, call.q.shape[3]))
    channels, poses = call.q.shape[-1], max(output, query) * call.q.element_size() // 4
    # One thread leaves out the channels that are there to fill up, but where they are shared some would have nothing.
    numbers = poses * (channels if poses * channels <= _NUMBERS else power_of_two(channels))
    positions = max(1, 32 // power_of_two(-(-numbers // _NUMBERS)))
    return _Shape(power_of_two(math.prod(call.shape)) if interpreted() else positions, output, query)


@by_shapes
def _constants(call: Arguments, shape: _Shape) -> dict[str, float]:
    """The constants that a kernel is compiled for."""
    return {
        **grid_constants(call),
        **{"num_positions": call.q.shape[2], "J": call.q.shape[3], "P": call.k.shape[3], "H": call.num_poses},
        **{"T": _pairs(call), "K": rows_of_tables(call)},
        **{"C": call.q.shape[-1], "CP": power_of_two(call.q.shape[-1])},
        **{"BN": shape.positions, "RH": shape.output, "RJ": shape.query},
        "SPATIAL": call.spatial is not None,
        "POSE": call.pose is not None,
        "RATE": call.dropout,
    }
