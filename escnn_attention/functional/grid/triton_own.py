"""Every output pose with the queries of its own pose: the passes of :mod:`~escnn_attention.functional.grid.triton`.

The products of queries with the tables are made in the kernels, and the gradients of these products are held for some
images at a time: the gradient of the tables is a product of matrices with them. Queries, keys and values are read
where they lie, if positions are the last axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from escnn_attention.functional.grid.kernel import Arguments
from escnn_attention.functional.grid.triton_launch import (
    chunks,
    gradients_of_terms,
    grid_constants,
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

_MANY = 2**17
"""Positions of all images from which there are enough for programs of four warps, which share what they read."""


class Program(NamedTuple):
    """Sizes of a program of a kernel.

    Attributes:
        poses: how many poses each thread has.
        positions: how many positions, of a thread each.
        warps: how many warps.
    """

    poses: int
    positions: int
    warps: int


def program(poses: int, channels: int, number_size: int, positions: int) -> Program:
    """The program for vectors of so many poses and channels, and positions of all images."""
    if interpreted():  # Every program takes as long, however much it does.
        return Program(math.gcd(poses, 8), power_of_two(positions), 1)
    each = math.gcd(poses, _POSES)
    while each > 1 and each * channels * number_size // 4 > _NUMBERS:
        each //= 2
    warps = 4 if positions >= _MANY else 1
    return Program(each, 32 * warps, warps)


def forward_pass(call: Arguments) -> tuple[Tensor, Tensor]:
    """The output ``(M, B, N, H, C)``, and the logarithms of the sums of exponentials, ``(M, B, H, N)``."""
    heads, batch, positions, _, _ = call.q.shape
    inputs = {**_vectors(q=call.q, k=call.k, v=call.v), **_tables(call)}
    out = room_for_outputs(call)
    sums = call.q.new_empty(heads, batch, call.num_poses, positions)
    outputs = {**_vectors(out=out), "sums": sums}
    for rows in _chunks(call):
        _launch("forward", call, rows, {**inputs, "known": _known(call, rows), **outputs})
    return out, sums


def backward_pass(call: Arguments, grad: Tensor, out: Tensor, sums: Tensor) -> list[Tensor | None]:
    """The gradients of the leaves."""
    vectors = _vectors(q=call.q, k=call.k, v=call.v, grad=grad)
    inputs = {**vectors, **_tables(call)}
    grad_q, grad_k, grad_v = (torch.empty_like(vectors[name]) for name in ("q", "k", "v"))
    means = torch.empty_like(sums)
    of_queries, of_keys = {**_vectors(out=out), "grad_q": grad_q}, {"grad_k": grad_k, "grad_v": grad_v}
    of_tables = []
    for rows in _chunks(call):
        change = _products(call, rows, rows_of_tables(call))
        both = {**inputs, "known": _known(call, rows), "sums": sums, "means": means}
        _launch("backward_queries", call, rows, {**both, **of_queries, "change": change})
        _launch("backward_keys", call, rows, {**both, **of_keys})
        if change is not None:
            of_tables.append(change @ vectors["q"].flatten(0, 1)[rows].transpose(-1, -2))
    terms = gradients_of_terms(of_tables, call, factor=1 / math.sqrt(call.q.shape[-1]))
    return [*(t.permute(0, 1, 4, 2, 3) for t in (grad_q, grad_k, grad_v)), *terms]


def _vectors(**given: Tensor) -> dict[str, Tensor]:
    """Vectors ``(M, B, N, P, C)`` as ``(M, B, P, C, N)``, of which a head of an image is contiguous."""
    return {name: positions_side_by_side(t).permute(0, 1, 3, 4, 2) for name, t in given.items()}


def room_for_outputs(call: Arguments) -> Tensor:
    """Room for the output ``(M, B, N, H, C)``, of which an image is contiguous as ``(M, H, C, N)``."""
    heads, batch, positions, _, channels = call.q.shape
    return call.q.new_empty(batch, heads, call.num_poses, channels, positions).permute(1, 0, 4, 2, 3)


def _tables(call: Arguments) -> dict[str, Tensor | None]:
    """The tables of offsets and of poses, of every head or of all."""
    terms = {"table": call.spatial, "pose": call.pose}
    return {n: None if t is None else t.contiguous() for n, t in terms.items()}


def _chunks(call: Arguments) -> Iterator[slice]:
    """Stretches of images whose products with the tables fit."""
    return chunks(call, rows_of_tables(call) * call.num_poses * call.q.shape[2])


def _products(call: Arguments, rows: slice, count: int) -> Tensor | None:
    """Room for products of the queries of some images with so many rows of a table."""
    return call.q.new_empty(rows.stop - rows.start, call.num_poses, count, call.q.shape[2]) if count else None


def _known(call: Arguments, rows: slice) -> Tensor | None:
    return _products(call, rows, 0 if call.pose is None else call.k.shape[3])


@by_shapes
def constants(name: str, call: Arguments, chosen: Program) -> dict[str, float]:
    """The constants that a kernel is compiled for."""
    key_poses = call.k.shape[3]
    found = {
        **grid_constants(call),
        **{"N": call.q.shape[2], "H": call.num_poses, "P": key_poses, "C": call.q.shape[-1]},
        **{"BN": chosen.positions, "R": chosen.poses},
        "SPATIAL": call.spatial is not None,
        "POSE": call.pose is not None,
        "RATE": call.dropout,
        "SCALE": call.scale,
    }
    if name == "forward":
        found["PU"] = math.gcd(key_poses, _POSES)
    if name == "backward_queries":
        found["K"] = rows_of_tables(call)
    return found


def _launch(name: str, call: Arguments, rows: slice, tensors: dict[str, Tensor | None]) -> None:
    """Run a kernel on some images."""
    device, positions = call.q.device, (rows.stop - rows.start) * call.q.shape[2]
    poses = call.k.shape[3] if name == "backward_keys" else call.num_poses
    chosen = program(poses, call.q.shape[-1], call.q.element_size(), positions)
    sizes = {"first": rows.start, "total": positions, "batch": call.q.shape[1]}
    for vectors, t in tensors.items():
        if t is not None and t.dim() == 5:
            sizes |= {f"{vectors}_head": t.stride(0), f"{vectors}_image": t.stride(1)}
    for table in ("table", "pose"):
        t = tensors.get(table)
        sizes[f"{table}_head"] = 0 if t is None or len(t) == 1 else t.stride(0)
    kernel = getattr(kernels("grid.triton_kernels_own"), name)
    # What there is none of is not read.
    given = {n: call.q if t is None else t for n, t in tensors.items()}
    window = steps(tuple(call.shape), call.kernel_size, call.window, call.dilation, device)
    given |= {"steps": window, "seed": call.q if call.seed is None else call.seed}
    names = taken("grid.triton_kernels_own", name)
    arguments = {n: value for n, value in (given | sizes).items() if n in names}
    with on_device(device):
        kernel[-(-positions // chosen.positions), poses // chosen.poses](
            **arguments,
            **constants(name, call, chosen),
            num_warps=chosen.warps,
            num_stages=1,
            enable_fp_fusion=True,  # which is the default of some versions only
        )
