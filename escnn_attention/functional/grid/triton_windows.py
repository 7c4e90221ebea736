"""Narrow heads in windows without tensor cores: passes of :mod:`~escnn_attention.functional.grid.triton`.

The products of queries with the tables are made in the kernels. Those with the table of poses, and the gradients of all
of them, are held for some images at a time: the gradient of the tables is a product of matrices with the latter.
Queries, keys and values are read where they lie, if positions are the last axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from escnn_attention.functional.grid.call import Arguments
from escnn_attention.functional.grid.triton_launch import (
    chunks,
    gradients_of_terms,
    grid_constants,
    pairs,
    positions_side_by_side,
    rows_of_tables,
    steps,
    taken,
)
from escnn_attention.functional.launch import by_shapes, interpreted, kernels, on_device, power_of_two

_NUMBERS = 40
"""How many numbers of the vectors of its poses a thread has at most: its registers hold up to four such vectors."""

_POSES = 4
"""How many poses a thread has at most."""

_SHARED_KEYS = 2
"""How many key poses in float32 it has at most where it has tiles of query poses and output poses, too."""

_MANY = 2**17
"""Positions of all images from which there are enough for programs of four warps, which share what they read."""


class Program(NamedTuple):
    """Sizes of a program of a kernel.

    Attributes:
        queries, outputs, keys: how many query poses, output poses of each, and key poses a thread has at once.
        positions: how many positions, of a thread each.
        warps: how many warps.
    """

    queries: int
    outputs: int
    keys: int
    positions: int
    warps: int


def program(name: str, call: Arguments, positions: int) -> Program:
    """The program of a kernel for so many positions of all images."""
    most, warps, together = _POSES, 4 if positions >= _MANY else 1, call.sum_query_poses
    query_poses, key_poses, size = call.q.shape[3], call.k.shape[3], call.q.element_size()
    keys = _SHARED_KEYS * 4 // size if together else _POSES
    if interpreted():  # Every program takes as long, however much it does.
        positions, most, keys, warps = power_of_two(positions), 8, 8, 1
    else:
        positions, most = 32 * warps, min(most, max(1, 4 * _NUMBERS // (call.q.shape[-1] * size)))
    # Of poses side by side there is a power of two.
    power = 1 << (most.bit_length() - 1)
    queries, keys = math.gcd(query_poses, power), math.gcd(key_poses, keys)
    # What dropout draws takes registers, too.
    outputs = _divisor(call.num_poses, (most + 1) // 2 if call.dropout else most) if together else 1
    if name == "forward":
        queries, keys = 1 if together else queries, _divisor(key_poses, _POSES)
    if name == "backward_keys":
        queries, keys = _divisor(query_poses, most) if together else 1, math.gcd(keys, power)
    return Program(queries, outputs, keys, positions, warps)


def _divisor(poses: int, most: int) -> int:
    return max(n for n in range(1, most + 1) if poses % n == 0)


def forward_pass(call: Arguments) -> tuple[Tensor, Tensor]:
    """The output ``(M, B, N, H, C)``, and the logarithms of the sums of exponentials, ``(M, B, T, N)``."""
    inputs = {**_vectors(q=call.q, k=call.k, v=call.v), **_tables(call)}
    out, sums = room(call)
    outputs = {**_vectors(out=out), "sums": sums}
    of_poses = 0 if call.pose is None else call.k.shape[3]
    for rows in _chunks(call, of_poses):
        _launch("forward", call, rows, {**inputs, "known": _products(call, rows, of_poses), **outputs})
    return out, sums


def backward_pass(call: Arguments, grad: Tensor, out: Tensor | None, sums: Tensor, *_: Any) -> list[Tensor | None]:
    """The gradients of the leaves."""
    assert out is not None
    vectors = _vectors(q=call.q, k=call.k, v=call.v, grad=grad)
    inputs = {**vectors, **_tables(call)}
    grad_q, grad_k, grad_v = (torch.empty_like(vectors[name]) for name in ("q", "k", "v"))
    means = torch.empty_like(sums)
    of_queries, of_keys = {**_vectors(out=out), "grad_q": grad_q}, {"grad_k": grad_k, "grad_v": grad_v}
    of_poses, of_both, of_tables = 0 if call.pose is None else call.k.shape[3], rows_of_tables(call), []
    for rows in _chunks(call, of_poses + of_both):
        change = _products(call, rows, of_both)
        both = {**inputs, "known": _products(call, rows, of_poses), "sums": sums, "means": means}
        _launch("backward_queries", call, rows, {**both, **of_queries, "change": change})
        _launch("backward_keys", call, rows, {**both, **of_keys})
        if change is not None:
            queries = vectors["q"].flatten(0, 1)[rows]
            of_tables.append(change.view(*queries.shape[:2], -1, queries.shape[-1]) @ queries.mT)
    terms = gradients_of_terms(of_tables, call, factor=1 / math.sqrt(call.q.shape[-1]))
    return [*(t.permute(0, 1, 4, 2, 3) for t in (grad_q, grad_k, grad_v)), *terms]


def _vectors(**given: Tensor) -> dict[str, Tensor]:
    """Vectors ``(M, B, N, P, C)`` as ``(M, B, P, C, N)``, of which a head of an image is contiguous."""
    return {name: positions_side_by_side(t).permute(0, 1, 3, 4, 2) for name, t in given.items()}


def room(call: Arguments) -> tuple[Tensor, Tensor]:
    """Room for the output ``(M, B, N, H, C)``, of which an image is contiguous as ``(M, H, C, N)``, and for sums."""
    heads, batch, positions, _, channels = call.q.shape
    out = call.q.new_empty(batch, heads, call.num_poses, channels, positions).permute(1, 0, 4, 2, 3)
    return out, call.q.new_empty(heads, batch, pairs(call), positions)


def _tables(call: Arguments) -> dict[str, Tensor | None]:
    """The tables of offsets and of poses, of every head or of all."""
    terms = {"table": call.spatial, "pose": call.pose}
    return {n: None if t is None else t.contiguous() for n, t in terms.items()}


def _chunks(call: Arguments, count: int) -> Iterator[slice]:
    """Stretches of images of which so many products of each pair, and gradients of products, fit."""
    return chunks(call, -(-count * pairs(call) * call.q.shape[2] // 2))


def _products(call: Arguments, rows: slice, count: int) -> Tensor | None:
    """Room for products of the queries of some images with so many rows of a table."""
    return call.q.new_empty(rows.stop - rows.start, pairs(call), count, call.q.shape[2]) if count else None


@by_shapes
def constants(name: str, call: Arguments, chosen: Program) -> dict[str, float]:
    """The constants that a kernel is compiled for."""
    found = {
        **grid_constants(call, absent=0),
        **{"N": call.q.shape[2], "J": call.q.shape[3], "H": call.num_poses, "P": call.k.shape[3]},
        **{"T": pairs(call), "K": rows_of_tables(call), "C": call.q.shape[-1], "BN": chosen.positions},
        **{"RJ": chosen.queries, "RH": chosen.outputs, "RP": chosen.keys, "SUM": call.sum_query_poses},
        "SPATIAL": call.spatial is not None,
        "POSE": call.pose is not None,
        "RATE": call.dropout,
        "SCALE": call.scale,
    }
    names = taken("grid.triton_kernels", name)
    return {n: value for n, value in found.items() if n in names}


def _launch(name: str, call: Arguments, rows: slice, tensors: dict[str, Tensor | None]) -> None:
    """Run a kernel on some images."""
    device, positions = call.q.device, (rows.stop - rows.start) * call.q.shape[2]
    chosen = program(name, call, positions)
    programs = {
        "forward": call.num_poses // (chosen.outputs if call.sum_query_poses else chosen.queries),
        "backward_queries": call.q.shape[3] // chosen.queries,
        "backward_keys": call.k.shape[3] // chosen.keys,
    }[name]
    sizes = {"first": rows.start, "total": positions, "batch": call.q.shape[1]}
    for vectors, t in tensors.items():
        if t is not None and t.dim() == 5:
            sizes |= {f"{vectors}_head": t.stride(0), f"{vectors}_image": t.stride(1)}
    for table in ("table", "pose"):
        t = tensors.get(table)
        sizes[f"{table}_head"] = 0 if t is None or len(t) == 1 else t.stride(0)
    kernel = getattr(kernels("grid.triton_kernels"), name)
    window = steps(tuple(call.shape), call.kernel_size, call.window, call.dilation, device)
    given, names = {**tensors, **sizes, "steps": window, "seed": call.seed}, taken("grid.triton_kernels", name)
    # What there is none of is not read.
    arguments = {n: call.q if value is None else value for n, value in given.items() if n in names}
    # Where an output pose has all query poses, their gradients have a launch for each stretch of output poses: a loop
    # over these in the kernel would hold more pointers than registers do.
    stretches = range(0, call.num_poses if call.sum_query_poses else 1, chosen.outputs)
    with on_device(device):
        for more in [{"first_h": h} for h in stretches] if name == "backward_queries" else [{}]:
            kernel[-(-positions // chosen.positions), programs](
                **arguments,
                **more,
                **constants(name, call, chosen),
                num_warps=chosen.warps,
                num_stages=1,
                enable_fp_fusion=True,  # which is the default of some versions only
            )
