r"""Attention between points in chunks: of groups of queries to the keys that they share.

The formula is that of :mod:`escnn_attention.functional.grid.reference`, with neighbours in place of a window. The
groups are taken a few at a time; their scores are made, used and dropped, and the backward pass makes them again. What
is written down for a file is a loop over them.

The axes of what belongs to the queries of a chunk are group, head m, output pose h, query pose h̃ and query. In the own
mode h̃ = h, so that the query poses stand on the axis of h and that of h̃ has one entry. Those of the keys are key pose ĥ
and key: what all poses of a key share is added to stretches of keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from escnn_attention._export import exporting, while_loop
from escnn_attention.functional.autograd import recompute
from escnn_attention.functional.grid.call import Call
from escnn_attention.functional.memory import chunk_size
from escnn_attention.functional.points.bias import PairBias, PairScores
from escnn_attention.functional.points.weights import Weights
from escnn_attention.geometry.at_once import Rows
from escnn_attention.geometry.neighbours import Chunk
from escnn_attention.geometry.points import Points

__all__ = ["Chunks", "RowsOf", "attend_in_chunks", "attention", "in_place", "with_edges"]

_WRITTEN_NUMBERS = 2**19
"""The scores of a step of the loop that files have."""


@dataclass(frozen=True)
class Chunks:
    """The attention of one call, chunk by chunk, by operations of PyTorch.

    Vectors are those of points, ``(N, M, P, C)``; where something fills up there is one point more.

    Attributes:
        call: the attention.
        measure: ``(N, P or 1)``, the logarithm of the measure of the keys, or None.
    """

    call: Call
    measure: Tensor | None

    @property
    def weights(self) -> Weights:
        """How scores become probabilities."""
        call, poses = self.call, self.call.q.shape[3]
        options = (call.query == "all", call.keys == "own", call.normalization, call.dropout)
        return Weights(self.bias.num_poses, poses, *options)

    @property
    def bias(self) -> PairBias:
        """The bias of the call."""
        assert isinstance(self.call.bias, PairBias)
        return self.call.bias

    def attend(self, some: Chunk, q: Tensor, k: Tensor, v: Tensor, coords: Tensor) -> Tensor:
        """The output of the queries of a chunk, ``(G · A, M, H, C)``."""
        queries, keys = (self.rows(some, index) for index in (some.queries, some.keys))
        seen = self.bias.tables.relate(queries(coords).unsqueeze(2), keys(coords).unsqueeze(1))
        asking = queries(q).permute(0, 2, 3, 1, 4)  # G, M, J, A, C
        asking = asking.unsqueeze(self.weights.own_axis)
        terms = self.bias.scores(asking, lambda: self.weights.near(keys(k)), seen, some.queries is some.keys)
        return self.combine(with_edges(terms, self.call, some), k, v, some, seen)

    def rows(self, some: Chunk, index: Tensor) -> RowsOf:
        """What takes the rows of an index from tensors."""
        return RowsOf(index, self.call.positions.num_positions if some.padded else None, some.first)

    def combine(self, terms: PairScores, k: Tensor, v: Tensor, some: Chunk, seen: Tensor | None) -> Tensor:
        """The output of a chunk, of the terms of its scores; ``seen`` is for values that pass through a kernel."""
        keys = self.rows(some, some.keys)
        measure = None if self.measure is None else keys(self.measure)
        p = self.weights.probabilities(terms, lambda: keys(k), some.keys < 0 if some.padded else None, measure)
        return self.weights.weighted_sum(p, keys(v), None if seen is None else self.call.values, seen)


def attend_in_chunks(call: Call, kind: type[Chunks], fastest: int, copies: int = 6) -> Tensor:
    """The output ``(M, 1, N, |H|, C)`` of a call, chunk by chunk.

    Args:
        call: the attention.
        kind: what attends in a chunk.
        fastest: the numbers of a chunk that are worked on at once, where that is fastest.
        copies: how many tensors as large are held at once, at least.
    """
    positions, bias = call.positions, call.bias
    assert isinstance(positions, Points)
    assert isinstance(bias, PairBias)
    q, k, v = (t.squeeze(1).transpose(0, 1) for t in (call.q, call.k, call.v))
    number, heads, _, channels = q.shape
    # Dynamo, which follows the loop, has no part in what is traced.
    in_loop = exporting() and not torch.jit.is_tracing()
    pairs = _pairs(call, fastest, copies)
    chunks = [positions.at_once()] if exporting() else positions.neighbours().chunks(pairs)
    coords = positions.coordinates
    measure = None if bias.log_measure is None else bias.log_measure.expand(number, -1)
    if in_loop or any(chunk.padded for chunk in chunks):
        # One more point is what fills up: it keeps values that are not finite from those who do not see them. It lies
        # where every relation is finite.
        q, k, v = (torch.cat([t, t.new_zeros(1, *t.shape[1:])]) for t in (q, k, v))
        coords = torch.cat([coords, coords.new_ones(1, coords.shape[1])])
        measure = None if measure is None else torch.cat([measure, measure.new_zeros(1, measure.shape[1])])
        k, v = (t.transpose(0, 1).contiguous().transpose(0, 1) for t in (k, v))
    rule, points = kind(call, measure), (q, k, v, coords)
    shape = (number, heads, bias.num_poses, channels)
    out = _in_loop(rule, Rows(chunks[0], pairs), points, shape) if in_loop else _in_turn(rule, chunks, points, shape)
    return out.transpose(0, 1).unsqueeze(1)


def _pairs(call: Call, fastest: int, copies: int) -> int:
    """How many pairs of points there are in a chunk: see :func:`attend_in_chunks`."""
    positions, bias = call.positions, call.bias
    assert isinstance(positions, Points)
    assert isinstance(bias, PairBias)
    heads, _, _, poses, _ = call.q.shape
    query_poses, key_poses = (1 if call.query == "own" else poses), (1 if call.keys == "own" else call.k.shape[3])
    # A score, its exponential, its probability, and the gradient.
    width = max(4, bias.width(positions.whole), 1 if call.values is None else call.values.features)
    # The backward pass of every chunk makes a gradient of all keys; files have none, and any number of keys.
    fastest = _WRITTEN_NUMBERS if exporting() else max(fastest, call.k.numel()) // width
    numbers = chunk_size(fastest, call.q.element_size(), copies=max(copies, width))
    return max(1, numbers // (heads * bias.num_poses * query_poses * key_poses))


def _in_turn(rule: Chunks, chunks: list[Chunk], points: tuple[Tensor, ...], shape: tuple[int, ...]) -> Tensor:
    """The output ``(N, M, H, C)``, chunk by chunk.

    Args:
        rule: what attends.
        chunks: of all points.
        points: queries, keys, values and coordinates of all points, and of the one that fills up.
        shape: of the output.
    """
    values = points[2]
    if not chunks:
        return values.new_zeros(shape)
    if torch.is_grad_enabled() and len(chunks) > 1:
        out = [recompute(rule.attend, some, *points, draws=rule.call.dropout > 0) for some in chunks]
    else:
        out = [rule.attend(some, *points) for some in chunks]
    return in_place(out, chunks, shape).to(values.dtype)


def _in_loop(rule: Chunks, rows: Rows, points: tuple[Tensor, ...], shape: tuple[int, ...]) -> Tensor:
    """As :func:`_in_turn`, some rows of a chunk at a time, in a loop that is written down as one."""
    values = points[2]

    def there_are_more(first: Tensor, out: Tensor) -> Tensor:
        return first < rows.number

    def attend(first: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        some = rows.some(first)
        places = torch.where(some.queries < 0, out.shape[0] - 1, some.queries).flatten()
        return first + rows.step, out.index_copy(0, places, rule.attend(some, *points).to(out.dtype))

    # One more is for what fills up.
    empty = values.new_zeros(shape[0] + 1, *shape[1:])
    _, out = while_loop(there_are_more, attend, (torch.zeros_like(rows.number), empty))
    return out[:-1]


def in_place(out: list[Tensor], chunks: list[Chunk], shape: tuple[int, ...]) -> Tensor:
    """The rows of all chunks at the points of their queries, and zeros at points without keys."""
    stretches = [some.first for some in chunks if some.first is not None]
    if len(stretches) == len(chunks):
        out = [out[i] for i in sorted(range(len(out)), key=stretches.__getitem__)]
    rows = out[0] if len(out) == 1 else torch.cat(out)
    if len(stretches) == len(chunks):
        return rows
    places = torch.cat([some.queries.flatten() for some in chunks])
    # One row more is for those that fill up; which they are no GPU has to be waited for.
    places = torch.where(places < 0, shape[0], places)
    return rows.new_zeros(shape[0] + 1, *shape[1:]).index_copy(0, places, rows)[:-1]


class RowsOf:
    """Takes the rows of an index ``(G, n)`` from tensors: without a copy, where they are in one stretch.

    Args:
        index: of the rows.
        filling: the row, or those ``(G, 1)`` of each group, that is meant by -1.
        first: the first of the rows, if they are all that follow.
    """

    def __init__(self, index: Tensor, filling: int | Tensor | None, first: int | None):
        self._index = index if filling is None else torch.where(index < 0, filling, index)
        self._first = first

    def __call__(self, rows: Tensor) -> Tensor:
        number = self._index.numel()
        if self._first is None:
            rows = rows.index_select(0, self._index.flatten())
        elif rows.shape[0] > number:
            rows = rows[self._first : self._first + number]
        return rows.unflatten(0, self._index.shape)


def with_edges(terms: PairScores, call: Call, some: Chunk) -> PairScores:
    """The terms of the scores of a chunk, with those of the features of its edges, if there are any."""
    if call.edges is None:
        return terms
    positions = call.positions
    assert isinstance(positions, Points)
    scores, factors = _read(call, positions, positions.edge_rows(some))
    extra = scores[:, None, None, None]
    return terms._replace(extra=extra if terms.extra is None else terms.extra + extra, factors=factors)


def _read(call: Call, positions: Points, rows: Tensor) -> tuple[Tensor, Tensor]:
    """What features of edges add to the scores of each head and multiply weights with, ``(M, G, A, K)``.

    Args:
        call: the attention.
        positions: with the features.
        rows: ``(G, A, K)``, which of the features; -1 for none, which are zeros.
    """
    readout, features, index = call.edges, positions.edge_attr, rows.flatten()
    assert readout is not None
    assert features is not None
    # Flat until they are read: AOTInductor multiplies no matrix that is a view of sizes that it does not know.
    of_pairs = features.flatten(0, -2).index_select(0, index.clamp(min=0)).masked_fill((index < 0).unsqueeze(1), 0.0)
    made = (of_pairs.to(readout.dtype) @ readout.flatten(0, 1).T).T.unflatten(1, rows.shape)
    # Where heads have become several, such as one for each pose, these are side by side.
    scores, changes = made.unflatten(0, readout.shape[:2]).repeat_interleave(len(call.q) // readout.shape[1], 1)
    return scores, 1 + changes


# The least numbers of a chunk: fewer pay for more operations, and more leave the cache. A GPU wants much at once.
_NUMBERS_PER_CHUNK, _NUMBERS_PER_WIDE_CHUNK = 2**21, 2**26


def attention(call: Call) -> Tensor:
    """Attention between points in bounded chunks: see :func:`escnn_attention.functional.attention`."""
    return attend_in_chunks(
        call, Chunks, _NUMBERS_PER_CHUNK if call.q.device.type == "cpu" else _NUMBERS_PER_WIDE_CHUNK
    )
