"""Windows, and tables of all offsets, by products of tiles: passes of :mod:`~escnn_attention.functional.grid.triton`.

A program has the query poses of a block of neighbouring positions, and goes over the positions that their windows
reach, of which every query sees most. The products of queries with the tables, and the gradients of these products, are
held for some images at a time. Channels lie side by side, and so do the poses of a position.

Products of single precision are exact to rounding (three products of TensorFloat-32), unless
``torch.set_float32_matmul_precision`` allows less.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from escnn_attention.functional.autograd import PRECISE
from escnn_attention.functional.grid.call import Arguments, GridCall
from escnn_attention.functional.grid.triton_launch import (
    chunks,
    gradients_of_terms,
    grid_constants,
    pairs,
    rows_of_tables,
    taken,
)
from escnn_attention.functional.launch import by_shapes, interpreted, kernels, on_device, power_of_two
from escnn_attention.geometry.cache import constant_tables
from escnn_attention.geometry.grid import steps_of
from escnn_attention.geometry.windows import WindowShape, torus_from

CHANNELS = 16
"""Channels of a head from which these passes serve windows, too."""

ROWS = 16
"""Rows and columns that a tile has at least, in windows: query poses and key poses."""

GLOBAL_ROWS = 32
"""The same in global attention."""

_NUMBERS = 512
"""How many scores of a tile, or numbers of its vectors, a warp has: with more, registers do not hold its sums."""

_OUTPUTS = 4
"""How many output poses share the products of queries and keys at most, fewer in programs of several warps."""

_MOST_NUMBERS = 2**31
"""Kernels count the numbers of an image in 32 bits, with a sign."""

_ROWS_OF_TABLES = 64
"""How many queries at least, and how many rows of a table at most, a tile of their products has."""


class Reach(NamedTuple):
    """The positions that are reached from a block.

    Attributes:
        places: ``(U', 4)``: from the first position of the block on, or on the grid, and the place in the table of
            differences; the last ones only fill up.
        lut: the offset of every difference of positions, and -1 where it is not in the window.
        everywhere: whether places are those of the grid.
        number: U, how many there are.
        widths: of the last two axes of the table of differences.
        low: the place of the difference of zero.
    """

    places: Tensor
    lut: Tensor
    everywhere: bool
    number: int
    widths: tuple[int, int]
    low: int


@constant_tables
def reach(
    shape: tuple[int, ...],
    kernel_size: int,
    window: WindowShape,
    dilation: int,
    block: tuple[int, int, int],
    columns: int,
    of_keys: bool,
    device: torch.device,
) -> Reach:
    """The keys that the queries of a block see, or the queries that see its keys, in multiples of so many columns."""
    steps = steps_of(shape, kernel_size, window, dilation).tolist()
    steps = [(0,) * (3 - len(shape)) + tuple(step) for step in steps]
    grid = (1,) * (3 - len(shape)) + shape
    sign = -1 if of_keys else 1
    rows, everything = (list(itertools.product(*map(range, sides))) for sides in (block, grid))
    others = everything
    if kernel_size:
        others = sorted({tuple(x + sign * s for x, s in zip(row, step, strict=True)) for row in rows for step in steps})
    everywhere = len(others) >= len(everything)
    if everywhere:
        rows = others = everything
    of_rows, of_others = torch.tensor(rows), torch.tensor(others)
    first, last = (of_rows, of_others) if of_keys else (of_others, of_rows)
    low, high = first.amin(0) - last.amax(0), first.amax(0) - last.amin(0)
    widths = high - low + 1
    strides = torch.tensor([int(widths[1] * widths[2]), int(widths[2]), 1])
    lut = torch.full((int(widths.prod()),), -1)
    around = 3 - len(shape) + torus_from(window, len(shape))
    turns = [(-n, 0, n) if everywhere and axis >= around else (0,) for axis, n in enumerate(grid)]
    offsets = torch.tensor(steps)
    for turn in itertools.product(*turns):
        at = offsets + torch.tensor(turn) - low
        inside = ((at >= 0) & (at < widths)).all(1)
        lut[(at[inside] * strides).sum(1)] = inside.nonzero().squeeze(1)
    places = torch.cat([of_others, (of_others * strides).sum(1, keepdim=True)], dim=1)
    places = torch.cat([places, places[-1:].expand(-len(places) % columns, -1)])
    found = places.to(device, torch.int32), lut.to(device, torch.int32)
    return Reach(*found, everywhere, len(others), (int(widths[1]), int(widths[2])), -int((low * strides).sum()))


class Tiles(NamedTuple):
    """Sizes of the tiles of a pass.

    Attributes:
        block: how many positions of each axis the rows are of.
        others: how many positions the columns are of.
        warps: how many warps a program has.
    """

    block: tuple[int, int, int]
    others: int
    warps: int


def tiles(shape: tuple[int, ...], kernel_size: int, row_poses: int, column_poses: int, channels: int) -> Tiles:
    """The tiles for so many poses of rows and of columns, and heads of so many channels."""
    most = ROWS if kernel_size else GLOBAL_ROWS
    left, block = max(1, most // power_of_two(row_poses)), [1, 1, 1]
    sides = (1,) * (3 - len(shape)) + shape
    while left > 1:
        # Blocks are as wide as they are high: their windows have most in common. Axes that are covered come last.
        axis = 2
        for other in (1, 0):
            covered = block[axis] >= sides[axis], block[other] >= sides[other]
            if covered == (True, False) or (covered[0] == covered[1] and block[other] < block[axis]):
                axis = other
        block[axis] *= 2
        left //= 2
    others = max(1, most // power_of_two(column_poses))
    rows, columns = math.prod(block) * power_of_two(row_poses), others * power_of_two(column_poses)
    numbers = rows * max(columns, power_of_two(channels))
    return Tiles((block[0], block[1], block[2]), others, min(8, max(1, numbers // _NUMBERS)))


def shared_memory(call: GridCall) -> int:
    """How many bytes of shared memory a program of these passes has at most.

    These are the operands of its products, three of them, and five in single precision, whose products are three; or
    one of them less and the scores of a tile. Where tiles have 64 rows, tensor cores may read three more there, and
    there may be both. Products with tables have two.
    """
    poses, (channels, dtype) = (call.q.shape[3], call.k.shape[3]), (call.q.shape[-1], call.v.dtype)
    chosen = tiles(call.query_grid.shape, call.query_grid.trimmed[0].kernel_size or 0, *poses, channels)
    rows, columns = (n * power_of_two(p) for n, p in zip((math.prod(chosen.block), chosen.others), poses, strict=True))
    operands, vector = 5 if dtype == torch.float32 else 3, dtype.itemsize * max(16, power_of_two(channels))
    operand, scores = max(rows, columns) * vector, rows * columns * PRECISE[dtype].itemsize
    if max(rows, columns) >= 64:
        of_pass = (operands + (0 if dtype == torch.float64 else 3)) * operand + scores
    else:
        of_pass = (operands - 1) * operand + max(operand, scores)
    return max(of_pass, 2 * max(_ROWS_OF_TABLES, power_of_two(poses[0])) * vector)


def prepare(call: GridCall) -> None:
    """Make the tables of a call: what is made inside an operator belongs to a graph that may be recorded there."""
    window, _ = call.query_grid.trimmed
    sizes = (call.query_grid.shape, window.kernel_size or 0, window.shape, window.dilation)
    for of_keys in (False, True):
        _tiles_of(sizes, call.q, call.k, of_keys)


def forward_pass(call: Arguments) -> tuple[Tensor, Tensor]:
    """The output ``(M, B, N, H, C)``, and the logarithms of the sums of exponentials, ``(M, B, N, T)``."""
    out, sums = room(call)
    vectors, table = {"q": call.q, "k": call.k, "v": call.v, "out": out}, _table(call)
    marks = torch.empty(sums.shape[:3], dtype=sums.dtype, device=sums.device)
    everything = slice(0, call.q.shape[0] * call.q.shape[1])
    _launch("mark", call, everything, vectors, {"marks": marks})
    for rows in _chunks(call):
        _launch("forward", call, rows, vectors, {"known": _known(call, table, rows), "marks": marks, "sums": sums})
    return out, sums


def backward_pass(call: Arguments, grad: Tensor, out: Tensor | None, sums: Tensor, *_: Any) -> list[Tensor | None]:
    """The gradients of the leaves."""
    assert out is not None
    grads = {"grad_q": room_for(call.q), "grad_k": room_for(call.k), "grad_v": room_for(call.v)}
    vectors = {"q": call.q, "k": call.k, "v": call.v, "out": out, "grad": laid_out(grad.to(out.dtype)), **grads}
    table, means, of_tables = _table(call), torch.empty_like(sums), []
    for rows in _chunks(call):
        known = _known(call, table, rows)
        others = {"known": known, "sums": sums, "means": means}
        # Beyond the edge of the grid there are no keys.
        change = None if known is None else torch.zeros_like(known)
        _launch("backward_queries", call, rows, vectors, {**others, "change": change})
        _launch("backward_keys", call, rows, vectors, others)
        if table is not None and known is not None:
            _launch("of_queries", call, rows, vectors, {"change": change, "table": table})
            of_images = torch.empty(len(known), *table.shape[1:], dtype=known.dtype, device=known.device)
            _launch("of_tables", call, rows, vectors, {"change": change, "grad_table": of_images})
            of_tables.append(of_images)
    return [*grads.values(), *gradients_of_terms(of_tables, call)]


def laid_out(vectors: Tensor) -> Tensor:
    """Vectors ``(M, B, N, P, C)`` of which the channels lie side by side, and the poses of a position."""
    channels, poses = vectors.shape[-1], vectors.shape[-2]
    fits = (channels == 1 or vectors.stride(-1) == 1) and (poses == 1 or vectors.stride(-2) == channels)
    fits &= all(vectors.stride(axis) % channels == 0 for axis in range(3))
    fits &= vectors.shape[2] * vectors.stride(2) < _MOST_NUMBERS
    return vectors if fits else vectors.contiguous()


def room_for(vectors: Tensor) -> Tensor:
    """Room for vectors ``(M, B, N, P, C)``, as a projection makes them: the heads of a position lie side by side."""
    heads, batch, *others = vectors.shape
    if heads * math.prod(others) >= _MOST_NUMBERS:
        return vectors.new_empty(vectors.shape)
    return vectors.new_empty(batch, others[0], heads, *others[1:]).permute(2, 0, 1, 3, 4)


def room(call: Arguments) -> tuple[Tensor, Tensor]:
    """Room for the output ``(M, B, N, H, C)``, and for a number of every pair of poses, ``(M, B, N, T)``."""
    out = room_for(call.q[..., :1, :].expand(-1, -1, -1, call.num_poses, -1))
    return out, torch.empty(*call.q.shape[:3], pairs(call), dtype=PRECISE[call.q.dtype], device=call.q.device)


def _table(call: Arguments) -> Tensor | None:
    """The terms of every head, those of offsets and of poses one behind the other, ``(M, H, K, C)``."""
    terms = [t.expand(len(call.q), -1, -1, -1) for t in (call.spatial, call.pose) if t is not None]
    return torch.cat(terms, dim=2).to(call.q.dtype) if terms else None


def _chunks(call: Arguments) -> Iterator[slice]:
    """Stretches of images whose products with the tables fit."""
    return chunks(call, rows_of_tables(call) * pairs(call) * call.q.shape[2])


def _known(call: Arguments, table: Tensor | None, rows: slice) -> Tensor | None:
    """The products of the queries of some images with the tables, of every position those of T pairs and K rows."""
    if table is None:
        return None
    sizes = rows.stop - rows.start, call.q.shape[2], pairs(call), table.shape[2]
    known = torch.empty(sizes, dtype=PRECISE[call.q.dtype], device=call.q.device)
    _launch("know", call, rows, {"q": call.q}, {"table": table, "known": known})
    return known


class Launched(NamedTuple):
    """How a kernel is launched.

    Attributes:
        programs: how many programs an image has.
        tables: tensors that it reads beside those of the call.
        warps: how many warps a program has.
        constants: the constants that it is compiled for.
        taken: the names of its arguments.
    """

    programs: int
    tables: dict[str, Tensor]
    warps: int
    constants: dict[str, Any]
    taken: frozenset[str] = frozenset()


def _launch(
    name: str, call: Arguments, rows: slice, vectors: Mapping[str, Tensor], others: Mapping[str, Tensor | None]
) -> None:
    """Run a kernel on some images, with vectors and what else there is."""
    kernel, chosen = getattr(kernels("grid.triton_kernels_tiles"), name), launched(name, call)
    given = {**others, **chosen.tables, "seed": call.seed, "first": rows.start, "batch": call.q.shape[1]}
    for n, t in vectors.items():
        if n in chosen.taken:
            channels, (head, image, place, _, _) = t.shape[-1], t.stride()
            given[n] = t
            given |= {f"{n}_head": head // channels, f"{n}_image": image // channels, f"{n}_place": place // channels}
    # What there is none of is not read.
    arguments = {n: call.q if value is None else value for n, value in given.items() if n in chosen.taken}
    with on_device(call.q.device):
        kernel[((rows.stop - rows.start) * chosen.programs,)](
            **arguments, **chosen.constants, num_warps=chosen.warps, num_stages=1
        )


def launched(name: str, call: Arguments) -> Launched:
    """How a kernel is launched for a call."""
    precision = "ieee"
    if call.q.dtype == torch.float32 and not interpreted():
        precision = "exact" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    return _launched(name, call, ROWS, precision, interpreted())


@by_shapes
def _launched(name: str, call: Arguments, rows: int, precision: str, by_numpy: bool) -> Launched:
    names = taken("grid.triton_kernels_tiles", name)
    of_products = name in ("mark", "know", "of_queries", "of_tables")
    programs, tables, warps, found, _ = _of_products(name, call) if of_products else _of_pass(name, call)
    found |= _constants(call, by_numpy) | {"IN": precision}
    return Launched(programs, tables, warps, {n: v for n, v in found.items() if n in names}, names)


def _of_products(name: str, call: Arguments) -> Launched:
    """A kernel of products with tables: rows are queries of 64 positions, or of 64 pairs of a position and a pose."""
    table, query_poses = rows_of_tables(call), power_of_two(call.q.shape[3])
    columns, rows = min(_ROWS_OF_TABLES, max(16, power_of_two(table))), max(_ROWS_OF_TABLES, query_poses)
    poses = query_poses if call.sum_query_poses and name != "mark" else 1
    blocks, tables = -(-call.q.shape[2] * poses // rows), -(-table // columns)
    programs = {
        "mark": blocks,
        "know": blocks * tables * call.num_poses,
        "of_queries": blocks * (1 if call.sum_query_poses else call.num_poses),
        "of_tables": tables * call.num_poses,
    }[name]
    return Launched(programs, {}, 4, {"N": call.q.shape[2], "KT": columns, "BR": rows})


def _of_pass(name: str, call: Arguments) -> Launched:
    """A pass: rows of a tile are the poses of a block, and columns those of some positions that it reaches."""
    sizes = (tuple(call.shape), call.kernel_size, call.window, call.dilation)
    chosen, reached = _tiles_of(sizes, call.q, call.k, name == "backward_keys")
    tables = {"places": reached.places, "lut": reached.lut}
    most = max(1, _OUTPUTS // chosen.warps) if call.sum_query_poses else 1
    outputs = max(n for n in range(1, most + 1) if call.num_poses % n == 0)
    found: dict[str, Any] = {
        **grid_constants(call),
        **{"EVERYWHERE": reached.everywhere, "W1": reached.widths[0], "W2": reached.widths[1]},
        **{"LOW": reached.low, "U": reached.number, "BU": chosen.others, "RH": outputs, "RATE": call.dropout},
        **dict(zip(("B0", "B1", "B2"), chosen.block, strict=True)),
        **{"SPATIAL": call.spatial is not None, "POSE": call.pose is not None},
    }
    sides = (found["n0"], found["n1"], found["n2"])
    programs = math.prod(-(-side // n) for side, n in zip(sides, chosen.block, strict=True))
    if name == "forward" and call.sum_query_poses:
        programs *= call.num_poses // outputs
    return Launched(programs, tables, chosen.warps, found)


def _tiles_of(
    sizes: tuple[tuple[int, ...], int, WindowShape, int], q: Tensor, k: Tensor, of_keys: bool
) -> tuple[Tiles, Reach]:
    """The tiles of a pass, and the positions that it reaches from a block."""
    poses = (k.shape[3], q.shape[3]) if of_keys else (q.shape[3], k.shape[3])
    chosen = tiles(*sizes[:2], *poses, q.shape[-1])
    return chosen, reach(*sizes, chosen.block, chosen.others, of_keys, q.device)


def _constants(call: Arguments, by_numpy: bool) -> dict[str, Any]:
    """The constants of all kernels, which NumPy may interpret."""
    (query_poses, channels), key_poses = call.q.shape[3:], call.k.shape[3]
    table, count = rows_of_tables(call), pairs(call)
    kinds = {name: kernels("grid.triton_kernels_tiles").tl.dtype(name) for name in ("fp64", "fp32", "bf16", "fp16")}
    sums = kinds[f"fp{8 * PRECISE[call.q.dtype].itemsize}"]
    own = {torch.bfloat16: kinds["bf16"], torch.float16: kinds["fp16"]}.get(call.q.dtype, sums)
    return {
        **{"J": query_poses, "JP": power_of_two(query_poses), "P": key_poses, "PP": power_of_two(key_poses)},
        **{"H": call.num_poses, "T": count, "K": table, "C": channels, "CP": max(16, power_of_two(channels))},
        # Poses of a query lie side by side where all of them see a table, and else its rows.
        **({"TS": 1, "KS": count} if call.sum_query_poses else {"TS": table, "KS": 1}),
        **{"SUM": call.sum_query_poses, "SCALE": call.scale, "F": sums},
        "E": sums if by_numpy else own,  # NumPy has no bfloat16
    }
