r"""Windows on CUDA, and global attention there with tables of offsets, by kernels that Triton compiles.

A query goes over the keys of its window and over no others, and no score is ever held: the backward pass makes them
again. What queries know of the offsets and of the poses, :math:`\langle q, \rho_x\rangle` and
:math:`\langle q, E\rangle`, are products of ordinary matrices: a number for every query and offset, and for every query
and pose, that are held for some images at a time. The kernels are in
:mod:`~escnn_attention.functional.backends.triton_kernels`. They are compiled for a group, a head, a window and a size
of the grid where these are first met, which takes a second or two, and kept on the disk by Triton.

With ``TRITON_INTERPRET=1`` in the environment Triton runs them by NumPy, on the CPU, to look into them.
"""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import cache
from types import ModuleType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from escnn_attention.functional.backends.grid_loop import Arguments, GridLoop, steps_of, why_not_a_table
from escnn_attention.functional.call import Call
from escnn_attention.functional.memory import chunk_size
from escnn_attention.geometry.cache import constant_result, constant_tables
from escnn_attention.geometry.grid import Grid, trimmed
from escnn_attention.geometry.positions import WindowShape

__all__ = ["MAX_PRODUCTS", "PRODUCTS_PER_CHUNK", "attention", "why_not_run", "why_unsupported"]

PRODUCTS_PER_CHUNK = 2**24
"""How many products of queries with tables are held at once, at least: 64 MB in float32, and a gradient of each."""

MEMORY_OF_PRODUCTS = 1 / 128
"""The part of a GPU's memory that they may take, and their gradients as much again.

On a GPU of 80 GB these are 160 million in float32: enough queries for several waves of programs.
"""

MAX_PRODUCTS = 2**29
"""The most of them that a head of a single image may have, with the rows of offsets and those of poses."""


def why_unsupported(call: Call) -> str | None:
    """Why this backend cannot serve a call, or None if it can."""
    if reason := why_not_run(call.q.device.type):
        return reason
    if reason := why_not_a_table(call):
        return reason
    assert isinstance(call.positions, Grid)
    if len(call.positions.shape) > 3:
        return f"it needs a grid of one to three axes, got {len(call.positions.shape)}"
    _, _, num_positions, query_poses, channels = call.q.shape
    key_poses = 0 if call.bias.pose is None else call.bias.pose.shape[2]
    if max(query_poses, call.bias.num_poses, key_poses) * num_positions * channels >= 2**30:
        return "the numbers of a head of an image are more than 32 bits count"
    pairs = call.bias.num_poses * (query_poses if call.query == "all" else 1)
    products = pairs * num_positions * (len(call.positions.offsets) + key_poses)
    if products > MAX_PRODUCTS:
        return f"a head would have {products} products of queries with tables, at most {MAX_PRODUCTS}"
    return None


@constant_result
def why_not_run(device: str) -> str | None:
    """Why kernels of Triton cannot run on a type of device."""
    if not _installed():
        return "it needs Triton"
    if _interpreted():
        return None if device in ("cpu", "cuda") else f"it needs CPU or CUDA, got {device}"
    if device != "cuda":
        return f"it needs CUDA, got {device}"
    if not _has_compiler(os.environ.get("CC")):
        return "Triton needs a C compiler, and there is none"
    return None


@cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@cache
def _has_compiler(chosen: str | None) -> bool:
    return any(shutil.which(name) for name in (chosen, "cc", "gcc", "clang") if name)


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def attention(call: Call) -> Tensor:
    """Attention by kernels that Triton compiles: see :func:`escnn_attention.functional.attention`."""
    assert isinstance(call.positions, Grid)
    number_size = max(4, call.q.element_size())
    chunk = chunk_size(_products_per_chunk(call.q.device, number_size), number_size, copies=2)
    window, _ = trimmed(call.positions.shape, call.positions.window)
    # Before the operator is called: what is made inside belongs to a graph that may be recorded there.
    _steps(call.positions.shape, window.kernel_size or 0, window.shape, window.dilation, call.q.device)
    return _loop(call, chunk)


@constant_result
def _products_per_chunk(device: torch.device, number_size: int) -> int:
    """How many products are held at once: the same on every GPU of a kind, whatever else is in its memory."""
    if device.type != "cuda":
        return PRODUCTS_PER_CHUNK
    memory = torch.cuda.get_device_properties(device).total_memory
    return max(PRODUCTS_PER_CHUNK, int(memory * MEMORY_OF_PRODUCTS) // number_size)


def _forward_pass(call: Arguments) -> tuple[Tensor, Tensor]:
    heads, batch, positions, _, channels = call.q.shape
    out, sums = call.q.new_empty(heads * batch, call.num_poses, channels, positions), _empty_sums(call)
    everything = [_images(call.q * call.scale), _images(call.k), _images(call.v), out, sums.flatten(0, 1)]
    for rows in _chunks(call):
        q, k, v, *filled = (_some(t, rows) for t in everything)
        _launch("forward", call, rows, [q, k, v, _known(_table(call, rows), q)], filled)
    return _as_projected(out, call), sums


def _backward_pass(call: Arguments, grad: Tensor, out: Tensor, sums: Tensor) -> list[Tensor | None]:
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
            grad_q += table.transpose(-1, -2) @ change
            of_tables.append(change @ q.transpose(-1, -2))
    terms = [None if t is None else torch.empty_like(t) for t in call.leaves[3:]]
    if of_tables:
        _fill_terms(terms, of_tables, call)
    grads[0] *= call.scale
    return [*(_as_projected(t, call) for t in grads), *terms]


def _empty_sums(call: Arguments) -> Tensor:
    """Room for the logarithms of the sums, ``(M, B, T, N)`` for T pairs of an output and a query pose."""
    heads, batch, positions, _, _ = call.q.shape
    return call.q.new_empty(heads, batch, _pairs(call), positions)


def _pairs(call: Arguments) -> int:
    """How many pairs of an output and a query pose there are."""
    return call.num_poses * (call.q.shape[3] if call.sum_query_poses else 1)


def _rows(call: Arguments) -> int:
    """How many rows the table of the terms of an output pose has."""
    return sum(t.shape[2] for t in (call.spatial, call.pose) if t is not None)


_loop = GridLoop("triton", _forward_pass, _backward_pass, _empty_sums)


def _images(t: Tensor) -> Tensor:
    """Vectors ``(M, B, N, P, C)`` of every head of every image, ``(M · B, P, C, N)``: positions side by side."""
    return t.permute(0, 1, 3, 4, 2).contiguous().flatten(0, 1)


def _as_projected(images: Tensor, call: Arguments) -> Tensor:
    """Vectors ``(M · B, P, C, N)`` of every head of every image, ``(M, B, N, P, C)``."""
    return images.unflatten(0, call.q.shape[:2]).permute(0, 1, 4, 2, 3).contiguous()


def _some(images: Tensor, rows: slice) -> Tensor:
    """Some images, without an operation where they are all."""
    return images if rows.stop - rows.start >= len(images) else images[rows]


def _chunks(call: Arguments) -> Iterator[slice]:
    """Images whose products with the tables fit, and these tables, of which each image has its own."""
    heads, batch, positions, _, channels = call.q.shape
    numbers = _rows(call) * max(call.num_poses * channels, _pairs(call) * positions)
    images = heads * batch
    fit = max(1, min(images, call.chunk // max(1, numbers)))
    # Chunks of one size: all of them keep the device as busy.
    at_once = -(-images // -(-images // fit))
    yield from (slice(start, min(start + at_once, images)) for start in range(0, images, at_once))


def _table(call: Arguments, rows: slice) -> Tensor | None:
    """The terms of the heads of some images, those of the offsets and those of the poses in one table of K rows.

    ``(images, H, K, C)``, or ``(images, 1, H · K, C)`` where every output pose meets every query pose.
    """
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
    return table.flatten(1, 2).unsqueeze(1) if call.sum_query_poses else table


def _known(table: Tensor | None, q: Tensor) -> Tensor | None:
    """The products of queries with a table, ``(images, H, K, N)`` or ``(images, J, H · K, N)``."""
    return None if table is None else table @ q


def _fill_terms(terms: list[Tensor | None], of_tables: list[Tensor], call: Arguments) -> None:
    """Write the gradients of the offsets' and the poses' terms, from those of the tables of all images."""
    of_images = torch.cat(of_tables) if len(of_tables) > 1 else of_tables[0]
    # (M, B, J, H · K, C) where every output pose meets every query pose, else (M, B, H, K, C)
    of_heads = of_images.unflatten(0, call.q.shape[:2]).sum([1, 2] if call.sum_query_poses else [1])
    of_heads = of_heads.view(len(of_heads), call.num_poses, -1, of_heads.shape[-1])
    start = 0
    for term, to in zip((call.spatial, call.pose), terms[:2], strict=True):
        if term is not None and to is not None:
            of_term = of_heads[:, :, start : start + term.shape[2]]
            start += term.shape[2]
            # Into room that lies in memory as the term does: compilers count on it.
            to.copy_(of_term.sum(0, keepdim=True) if len(term) < len(of_term) else of_term)


class _Shape(NamedTuple):
    """What a program of a kernel has, which is one warp.

    Attributes:
        positions: how many positions.
        output, query, key: how many output poses, query poses and key poses of each.
    """

    positions: int
    output: int
    query: int
    key: int


def _launch(
    name: str, call: Arguments, rows: slice, inputs: Sequence[Tensor | None], others: Sequence[Tensor | None]
) -> None:
    """Run a kernel on some images."""
    q, shape = call.q, _shape(name, call)
    blocks = -(-q.shape[2] // shape.positions)
    programs = {
        "forward": call.num_poses // shape.output,
        "backward_queries": q.shape[3] // shape.query if call.sum_query_poses else call.num_poses // shape.output,
        "backward_keys": call.k.shape[3] // shape.key,
    }[name]
    steps = _steps(tuple(call.shape), call.kernel_size, call.window, call.dilation, q.device)
    # What there is none of is not read.
    tensors = (q if t is None else t for t in (*inputs, steps, call.seed, *others))
    with torch.cuda.device(q.device) if q.device.type == "cuda" else nullcontext():
        getattr(_kernels(), name)[blocks * (rows.stop - rows.start), programs](
            *tensors,
            rows.start,
            **_constants(name, call, shape),
            num_warps=1,
            enable_fp_fusion=True,  # which is the default of some versions only
        )


_POSES = 4
"""How many output poses, query poses or key poses a thread has at most."""

_NUMBERS = 48
"""How many numbers of vectors of these poses it has at most: its registers hold two to four times as many."""


def _shape(name: str, call: Arguments) -> _Shape:
    """The shape in which a kernel keeps what it works on in registers.

    Positions have as many threads in every kernel, so that sums over channels are the same in all.
    """
    # Interpreted, every program takes as long, however much it does.
    most = 8 if _interpreted() else _POSES
    output, query, key = (math.gcd(n, most) for n in (call.num_poses, call.q.shape[3], call.k.shape[3]))
    channels, poses = call.q.shape[-1], max(output, query, key) * call.q.element_size() // 4
    # One thread leaves out the channels that are there to fill up, but where they are shared some would have nothing.
    numbers = poses * (channels if poses * channels <= _NUMBERS else _power(channels))
    positions = max(1, 32 // _power(-(-numbers // _NUMBERS)))
    if _interpreted():
        positions = _power(math.prod(call.shape))
    if call.sum_query_poses:
        return _Shape(positions, output, query, 1)
    # Elsewhere a thread with keys has several of them and a pair of poses at a time, and one with queries no tiles.
    return _Shape(positions, 1, 1, key) if name == "backward_keys" else _Shape(positions, output, 1, 1)


def _constants(name: str, call: Arguments, shape: _Shape) -> dict[str, float]:
    """What a kernel is compiled for."""
    n0, n1, n2 = _sides(tuple(call.shape))
    offsets = len(steps_of(tuple(call.shape), call.kernel_size, call.window, call.dilation)[0])
    constants = {
        "num_positions": n0 * n1 * n2,
        **{"n0": n0, "n1": n1, "n2": n2},
        **{"J": call.q.shape[3], "P": call.k.shape[3], "H": call.num_poses, "L": offsets},
        **{"T": _pairs(call), "K": _rows(call)},
        **{"C": call.q.shape[-1], "CP": _power(call.q.shape[-1])},
        **{"BN": shape.positions, "RH": shape.output, "RJ": shape.query},
        "SUMMED": call.sum_query_poses,
        "SPATIAL": call.spatial is not None,
        "POSE": call.pose is not None,
        "RATE": call.dropout,
    }
    return constants | ({"RP": shape.key} if name == "backward_keys" else {})


def _power(n: int) -> int:
    """The least power of two that is no less."""
    return 1 << max(0, n - 1).bit_length()


@constant_tables
def _steps(
    shape: tuple[int, ...], kernel_size: int, window: WindowShape, dilation: int, device: torch.device
) -> Tensor:
    """The offsets of a window, ``(L, 4)``: along each of three axes, and in the number of the position."""
    steps, _ = steps_of(shape, kernel_size, window, dilation)
    steps = F.pad(steps, (3 - len(shape), 0))
    _, rows, columns = _sides(shape)
    far = steps @ torch.tensor([rows * columns, columns, 1])
    return torch.cat([steps, far.unsqueeze(1)], dim=1).to(device, torch.int32)


def _sides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The grid with three axes."""
    return (1,) * (3 - len(shape)) + shape


@cache
def _kernels() -> ModuleType:
    return importlib.import_module("escnn_attention.functional.backends.triton_kernels")
