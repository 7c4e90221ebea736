r"""Windows on CUDA, and global attention there with tables of offsets, by kernels that Triton compiles.

No score is ever held: the backward pass makes them again. There are two kinds of passes:

- :mod:`~escnn_attention.functional.grid.triton_tiles`: products of tiles on tensor cores, for wide heads, half
  precision and global attention.
- :mod:`~escnn_attention.functional.grid.triton_windows`: narrow heads in windows, whose tiles would be mostly empty. A
  query goes over the keys of its window and over no others.

What queries know of the offsets and of the poses, :math:`\langle q, \rho_x\rangle` and :math:`\langle q, E\rangle`, are
products of ordinary matrices: a number for every query and offset, and for every query and pose. The kernels are
compiled for a group, a head, a window and a size of the grid where these are first met, which takes a second or two,
and kept on the disk by Triton.

With ``TRITON_INTERPRET=1`` in the environment Triton runs them by NumPy, on the CPU, to look into them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from escnn_attention.functional.autograd import Passes
from escnn_attention.functional.grid import triton_tiles, triton_windows
from escnn_attention.functional.grid.call import GridCall, GridLoop
from escnn_attention.functional.grid.portable import plainly
from escnn_attention.functional.grid.triton_launch import positions_side_by_side, steps
from escnn_attention.functional.launch import why_not_run
from escnn_attention.functional.registry import chunk_size
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
    if not call.query_grid.shape:
        return "there is no base space for a window"
    if call.query_grid.complete and call.bias.spatial is None:
        return "without a window it needs an encoding that does not factorise: MLP, separable"
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
    if tiled(call.query_grid.complete, channels, call.v.dtype):
        needed, most = triton_tiles.shared_memory(call), _shared_memory(call.q.device)
        if needed > most:
            return f"a program would have {needed} bytes of shared memory, at most {most}"
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
    return _loop(call, chunk)


def tiled(complete: bool, channels: int, dtype: torch.dtype) -> bool:
    """Whether products of tiles serve heads of so many channels, in a window or on the complete grid."""
    return complete or channels >= triton_tiles.CHANNELS or dtype.itemsize == 2


@constant_result
def _shared_memory(device: torch.device) -> int:
    """The most bytes of shared memory that a program may have: a GPU keeps 1 kB of those of a multiprocessor."""
    if device.type != "cuda":
        return 2**62
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor - 2**10


@constant_result
def _products_per_chunk(device: torch.device, number_size: int) -> int:
    """How many products are held at once: the same on every GPU of a kind, whatever else is in its memory."""
    if device.type != "cuda":
        return PRODUCTS_PER_CHUNK
    memory = torch.cuda.get_device_properties(device).total_memory
    return max(PRODUCTS_PER_CHUNK, int(memory * MEMORY_OF_PRODUCTS) // number_size)


_loop = GridLoop(
    "triton",
    Passes(triton_windows.forward_pass, triton_windows.backward_pass, triton_windows.room, plainly),
    laid_out=positions_side_by_side,
)
_tiles = GridLoop(
    "triton_tiles",
    Passes(triton_tiles.forward_pass, triton_tiles.backward_pass, triton_tiles.room, plainly),
    laid_out=triton_tiles.laid_out,
    keeps_half=True,
)
