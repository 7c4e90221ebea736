"""Code that all launches of Triton kernels share: the steps of a window, stretches of images, and the device."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from escnn_attention.functional.grid.call import Arguments
from escnn_attention.functional.launch import kernels, on_device
from escnn_attention.geometry.cache import constant_tables
from escnn_attention.geometry.grid import steps_of
from escnn_attention.geometry.windows import WindowShape, torus_from


@cache
def taken(module: str, kernel: str) -> frozenset[str]:
    """The names of the arguments of a kernel."""
    return frozenset(getattr(kernels(module), kernel).arg_names)


def positions_side_by_side(vectors: Tensor) -> Tensor:
    """Vectors ``(M, B, N, P, C)``, of which a head of an image is contiguous as ``(P, C, N)``: both passes read it."""
    by_channel = vectors.permute(0, 1, 3, 4, 2)
    if by_channel[:1, :1].is_contiguous():
        return vectors
    return by_channel.contiguous().permute(0, 1, 4, 2, 3)


def pairs(call: Arguments) -> int:
    """How many pairs of an output and a query pose there are."""
    return call.num_poses * (call.q.shape[3] if call.sum_query_poses else 1)


def rows_of_tables(call: Arguments) -> int:
    """How many rows the tables of an output pose have, of the offsets and of the poses."""
    return sum(t.shape[2] for t in (call.spatial, call.pose) if t is not None)


def chunks(call: Arguments, numbers: int) -> Iterator[slice]:
    """Stretches of the images of all heads, of which each takes so many numbers of a chunk.

    Kernels count the positions of a stretch, and those that the last program has beyond them, in 32 bits.
    """
    images = call.q.shape[0] * call.q.shape[1]
    fit = max(1, min(images, call.chunk // max(1, numbers), 2**30 // call.q.shape[2]))
    # Chunks of one size: all of them keep the device as busy.
    at_once = -(-images // -(-images // fit))
    yield from (slice(start, min(start + at_once, images)) for start in range(0, images, at_once))


def gradients_of_terms(of_tables: list[Tensor], call: Arguments, factor: float = 1.0) -> list[Tensor | None]:
    """The gradients of the leaves behind queries, keys and values: of the terms, from those of the tables.

    Args:
        of_tables: ``(images, ..., H, K, C)``, of stretches of the images of all heads; what is between is summed.
        call: the arguments.
        factor: by which they are multiplied.
    """
    terms = [None if t is None else t.new_empty(t.shape) for t in call.leaves[3:]]
    if of_tables:
        of_images = torch.cat(of_tables) if len(of_tables) > 1 else of_tables[0]
        heads = len(call.q)
        # What there is none of has no rows, and is not written.
        found = [of_images.new_empty(heads, 0, 0, 0) if t is None else t for t in terms[:2]]
        sizes = [*map(len, found), *(t.shape[2] for t in found), call.q.shape[-1]]
        numbers = call.num_poses * rows_of_tables(call) * call.q.shape[-1]
        with on_device(of_images.device):
            kernels("grid.triton_kernels").sum_tables[-(-numbers // 128), heads](
                *(of_images, *found, of_images.numel() // (heads * numbers), numbers, heads, *sizes),
                **{"FACTOR": factor, "BI": 8, "BE": 128},
            )
    return terms


def grid_constants(call: Arguments, absent: int = 1) -> dict[str, int]:
    """The sides of the grid, as three, the number of offsets, and the first axis of a torus, 3 where there is none.

    Axes that the grid does not have are sides of ``absent`` positions.
    """
    n0, n1, n2 = _sides(tuple(call.shape), absent)
    torus = 3 - len(call.shape) + torus_from(call.window, len(call.shape))
    offsets = len(steps_of(tuple(call.shape), call.kernel_size, call.window, call.dilation))
    return {"n0": n0, "n1": n1, "n2": n2, "TORUS": torus, "L": offsets}


@constant_tables
def steps(shape: tuple[int, ...], kernel_size: int, window: WindowShape, dilation: int, device: torch.device) -> Tensor:
    """The offsets of a window, ``(L, 4)``: along each of three axes, and in the number of the position."""
    offsets = steps_of(shape, kernel_size, window, dilation)
    offsets = F.pad(offsets, (3 - len(shape), 0))
    _, rows, columns = _sides(shape)
    far = offsets @ torch.tensor([rows * columns, columns, 1])
    return torch.cat([offsets, far.unsqueeze(1)], dim=1).to(device, torch.int32)


def _sides(shape: tuple[int, ...], absent: int = 1) -> tuple[int, ...]:
    """The grid with three axes."""
    return (absent,) * (3 - len(shape)) + shape
