r"""Attention between points in chunks: of groups of queries to the keys that they share.

The formula is that of :mod:`escnn_attention.functional.grid.reference`, with neighbours in place of a window. The
groups are taken a few at a time; their scores are made, used and dropped, and the backward pass makes them again. What
is written down for a file is a loop over them.

The axes of what belongs to the queries of a chunk are group, head m, output pose h, query pose h̃ and query. In the own
mode h̃ = h, so that the query poses stand on the axis of h and that of h̃ has one entry. Those of the keys are key pose ĥ
and key: what all poses of a key share is added to stretches of keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from escnn_attention.exporting.loops import while_loop
from escnn_attention.exporting.mode import in_rows
from escnn_attention.functional.autograd import PRECISE, recompute
from escnn_attention.functional.call import Normalization
from escnn_attention.functional.matmul import matmul
from escnn_attention.functional.points.call import PairScores, PointCall, Values
from escnn_attention.functional.registry import chunk_size
from escnn_attention.geometry.at_once import Rows
from escnn_attention.geometry.neighbours import Chunk

_WRITTEN_NUMBERS = 2**21
"""The numbers of a step of the loop that files have."""


@dataclass(frozen=True)
class Weights:
    """How scores weigh values.

    Attributes:
        num_poses: H, of the output.
        query_poses: J.
        sum_query_poses: whether all query poses contribute to every output pose.
        own_keys: whether a query sees keys of its own pose only.
        normalization: a softmax, or scores divided by the measure of the keys.
        dropout: the probability.
    """

    num_poses: int
    query_poses: int
    sum_query_poses: bool
    own_keys: bool
    normalization: Normalization
    dropout: float

    @property
    def own_axis(self) -> int:
        """The axis of the query poses, where they are those of the output, and the other way round."""
        return 2 if self.sum_query_poses else 3

    def near(self, keys: Tensor) -> Tensor:
        """Keys ``(G, K, M, P, C)`` as scores take them, ``(G, M, H', J', P, K, C)``."""
        keys = keys.permute(0, 2, 3, 1, 4)
        if not self.own_keys:
            return keys[:, :, None, None]
        return keys.unsqueeze(self.own_axis).unsqueeze(4)

    def probabilities(
        self,
        terms: PairScores,
        keys: Callable[[], Tensor],
        unseen: Tensor | None,
        log_measure: Tensor | None,
    ) -> Tensor:
        """Probabilities, or shares of the scores, after dropout, times the factors of the terms.

        Args:
            terms: of the scores.
            keys: gives the keys of each group, ``(G, K, M, P, C)``.
            unseen: ``(G, K)``, which keys fill up, or None.
            log_measure: ``(G, K, P or 1)``, of the keys, or None.
        """
        if unseen is not None:
            unseen = unseen[:, None, None, None, None, None]
        mu = None if log_measure is None else log_measure.transpose(1, 2)[:, None, None, None, None]
        p = F.dropout(self._normalize(terms, terms.scores(lambda: self.near(keys())), unseen, mu), self.dropout)
        return p if terms.factors is None else p * terms.factors.transpose(0, 1)[:, :, None, None, :, None]

    def weighted_sum(self, p: Tensor, values: Tensor, mix: Values | None = None, seen: Tensor | None = None) -> Tensor:
        """The output ``(G · A, M, H, C)`` of probabilities and the values ``(G, K, M, P, C)`` of each group.

        Args:
            p: the probabilities.
            values: of the keys.
            mix: the kernel that values pass through, with ``seen``, what it sees of the keys; None for their sum.
            seen: the relation to every key.
        """
        values = values.permute(0, 2, 3, 1, 4).unsqueeze(self.own_axis if self.own_keys else 2)
        if self.own_keys and self.sum_query_poses:
            # Keys of the query's own pose stand on the axis of the query poses.
            p = p.squeeze(-2).movedim(3, -2)
        elif self.sum_query_poses:
            p = p.sum(3)
        else:
            p = p.squeeze(3)
        p = in_rows(p.to(values.dtype))
        out = sum_values(p, values) if mix is None or seen is None else mix(p, values, seen)
        return out.permute(0, 3, 1, 2, 4).flatten(0, 1)

    def _normalize(self, terms: PairScores, weights: Tensor, unseen: Tensor | None, mu: Tensor | None) -> Tensor:
        """Probabilities, or shares of the scores, of scores that broadcast to all pairs of poses."""
        precise = PRECISE[weights.dtype]
        poses = self.query_poses if self.sum_query_poses else 1
        weights = weights.expand(*weights.shape[:2], self.num_poses, poses, *weights.shape[4:]).to(precise)
        envelope = None if terms.envelope is None else terms.envelope[:, None, None, None, :, None].to(precise)
        if self.normalization == "softmax":
            if mu is not None:
                weights = weights + mu.to(precise)
            if envelope is not None:
                return _enveloped_softmax(weights, envelope, unseen)
            if unseen is None:
                return weights.flatten(-2).softmax(-1).unflatten(-1, weights.shape[-2:])
            weights = weights.masked_fill(unseen, torch.finfo(precise).min)
            # A query that fills up sees no key at all, and all of them have got a share.
            return weights.flatten(-2).softmax(-1).unflatten(-1, weights.shape[-2:]).masked_fill(unseen, 0.0)
        mass = weights.new_ones(weights.shape[-2:]) if mu is None else mu.to(precise).exp()
        mass = mass.expand(*mass.shape[:-2], *weights.shape[-2:])
        mass = mass if unseen is None else mass.masked_fill(unseen, 0.0)
        mass = mass if envelope is None else mass * envelope
        return weights * (mass / mass.sum((-1, -2), keepdim=True).clamp(min=torch.finfo(precise).tiny))


def _enveloped_softmax(scores: Tensor, envelope: Tensor, unseen: Tensor | None) -> Tensor:
    """Probabilities of scores whose exponentials are multiplied by an envelope; without keys, zeros.

    No derivative passes through a logarithm of the envelope: that would be infinite where it vanishes.
    """
    limits = torch.finfo(scores.dtype)
    scores = scores if unseen is None else scores.masked_fill(unseen, limits.min)
    largest = (scores + envelope.log()).detach().amax((-1, -2), keepdim=True).clamp(min=limits.min)
    # Exponentials and their squares, which second derivatives have, are finite.
    most = torch.where(envelope == 0, 0.0, 0.45 * math.log(limits.max))
    e = envelope * torch.minimum(scores - largest, most).exp()
    e = e if unseen is None else e.masked_fill(unseen, 0.0)
    return e / e.sum((-1, -2), keepdim=True).clamp(min=torch.finfo(e.dtype).tiny)


def sum_values(p: Tensor, v: Tensor) -> Tensor:
    """The sum of the values, weighed: the arguments and the result of :class:`Values`."""
    weights, values = p.flatten(-2), v.flatten(3, 4)
    if v.shape[2] == 1:
        return matmul(weights.flatten(2, 3), values[:, :, 0]).unflatten(2, p.shape[2:4])
    return matmul(weights, values)


class Chunks:
    """The attention of one call, chunk by chunk, by operations of PyTorch.

    Vectors are those of points, ``(N, M, P, C)``; where something fills up there is one point more.

    Args:
        call: the attention.

    Attributes:
        measure: ``(N', P or 1)``, the logarithm of the measure of the keys, or None.
        layer: that of the functions of the location which are made in the loop, see :meth:`PairBias.first_layer`.
        shares: whether groups with the same relations to their keys may share functions of them.
        keep: the operators whose outputs the backward pass does not compute again.
        on_rings: how many times as much is worked on at once where points on rings see all others: no score is held.
        makes_features: whether it makes functions of the location by itself, where they are those of a layer.
    """

    shares = True
    keep: Sequence[Any] = ()
    on_rings = 1
    makes_features = False

    def __init__(self, call: PointCall):
        self.call, self.measure = call, call.bias.log_measure
        self.layer = call.bias.first_layer() if self.makes_features else None
        options = (call.query == "all", call.keys == "own", call.normalization, call.dropout)
        self.weights = Weights(call.bias.num_poses, call.q.shape[3], *options)

    def attend(self, some: Chunk, q: Tensor, k: Tensor, v: Tensor, asking: Tensor, asked: Tensor) -> Tensor:
        """The output of the queries of a chunk, ``(G · A, M, H, C)``, of queries and keys at coordinates."""
        weights, bias, seen = self.weights, self.call.bias, q.new_zeros(0)
        if self.call.values is not None or not bias.adds_nothing:
            few = some.firsts() if some.repeats > 1 else some
            queries, keys = rows_of(asking, few.queries, few), rows_of(asked, few.keys, few)
            seen = bias.tables.relate(queries.unsqueeze(2), keys.unsqueeze(1))
            seen = seen if self.call.values is None else seen.repeat_interleave(some.repeats, 0)
        some = some if some.keys_of is None else self.groups(some, seen)
        q = rows_of(q, some.queries, some).permute(0, 2, 3, 1, 4).unsqueeze(weights.own_axis)  # G, M, H, J, A, C
        terms = self.terms(q, lambda: weights.near(rows_of(k, some.keys, some)), seen, some.queries is some.keys)
        return self.combine(with_pairs(terms, self.call, some), k, v, some, seen)

    def groups(self, some: Chunk, seen: Tensor) -> Chunk:
        """A chunk with the keys of all its groups, which have the relations ``seen`` of the first to its keys."""
        return some.whole()

    def terms(self, q: Tensor, keys: Callable[[], Tensor], seen: Tensor, mutual: bool) -> PairScores:
        """The terms of the scores of a chunk: see :meth:`escnn_attention.functional.points.call.PairBias.scores`."""
        # The loop has no gradient of the relation.
        if self.layer is None or seen.requires_grad:
            return self.call.bias.scores(q, keys, seen, mutual)
        return self.call.bias.read(q, self.layer[2])

    def combine(self, terms: PairScores, k: Tensor, v: Tensor, some: Chunk, seen: Tensor | None) -> Tensor:
        """The output of a chunk, of the terms of its scores; ``seen`` is for values that pass through a kernel."""
        keys, unseen = partial(rows_of, index=some.keys, some=some), some.keys < 0 if some.padded else None
        measure = None if self.measure is None else keys(self.measure)
        p = self.weights.probabilities(terms, lambda: keys(k), unseen, measure)
        return self.weights.weighted_sum(p, keys(v), None if seen is None else self.call.values, seen)


def attend_in_chunks(call: PointCall, kind: type[Chunks], fastest: int, copies: int = 6) -> Tensor:
    """The output ``(M, 1, N, |H|, C)`` of a call, chunk by chunk.

    Args:
        call: the attention.
        kind: what attends in a chunk.
        fastest: the numbers of a chunk that are worked on at once, where that is fastest.
        copies: how many tensors as large are held at once, at least.
    """
    points, keys = call.query_points, call.key_points
    shares = points.repeats > 1 and kind.shares and not call.bias.adds_nothing
    fastest *= kind.on_rings if shares and points.whole and call.k.shape[3] == 1 else 1
    # The backward pass of every chunk makes a gradient of all keys.
    fastest, repeats = max(fastest, call.k.numel()), points.repeats if shares else 1
    rule = kind(call)
    # Of functions that the loop makes, their arguments are held: as the relation gives them, and in rows.
    pairs = _pairs(call, fastest, copies, None if rule.layer is None else 2 * rule.layer[0].shape[1], repeats)
    chunks = (points.shared(keys) if shares else points.neighbours(keys)).chunks(pairs)
    tensors, rule.measure = _vectors(call, any(map(attrgetter("padded"), chunks)))
    attend = rule.attend
    if torch.is_grad_enabled() and len(chunks) > 1:
        attend = partial(recompute, attend, draws=call.dropout > 0, keep=kind.keep)
    return in_place(list(map(attend, chunks, *map(repeat, tensors))), chunks, call)


def attend_in_export(call: PointCall, kind: type[Chunks]) -> Tensor:
    """As :func:`attend_in_chunks`, in a program that PyTorch exports: for any number of points, in a loop.

    ``torch.jit.trace`` has no loops: there all is one chunk.
    """
    one, rule = call.query_points.at_once(call.key_points), kind(call)
    if torch.jit.is_tracing():
        tensors, rule.measure = _vectors(call, one.padded)
        return in_place([rule.attend(one, *tensors)], [one], call)
    rows = Rows(one, _pairs(call, _WRITTEN_NUMBERS))
    tensors, rule.measure = _vectors(call, True)

    def there_are_more(first: Tensor, out: Tensor) -> Tensor:
        return first < rows.number

    def attend(first: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        some = rows.some(first)
        places = torch.where(some.queries < 0, out.shape[0] - 1, some.queries).flatten()
        return first + rows.step, out.index_copy(0, places, rule.attend(some, *tensors).to(out.dtype))

    # One more is for what fills up.
    empty = _empty(call, 1)
    _, out = while_loop(there_are_more, attend, (torch.zeros_like(rows.number), empty))
    return out[:-1].transpose(0, 1).unsqueeze(1)


def _empty(call: PointCall, more: int = 0) -> Tensor:
    """Zeros for the output of all points, and so many more: ``(N, M, |H|, C)``."""
    heads, _, number, _, channels = call.q.shape
    return call.v.new_zeros(number + more, heads, call.num_poses, channels)


def _pairs(call: PointCall, fastest: int, copies: int = 6, num_features: int | None = None, repeats: int = 1) -> int:
    """How many pairs of points there are in a chunk of at most so many numbers, as many copies of which are held.

    Functions of the location are held once for so many points that repeat the same.
    """
    heads, _, _, poses, _ = call.q.shape
    query_poses, key_poses = (1 if call.query == "own" else poses), (1 if call.keys == "own" else call.k.shape[3])
    size, bias, points = call.q.element_size(), call.bias, call.query_points
    # The numbers of every score while it is made: itself, its exponential, its probability and the gradient, or more.
    mutual = points.whole and call.key_points is points
    width = max(4, bias.widths[mutual], 1 if call.values is None else call.values.features)
    copies, num_features = max(copies, width), bias.num_features if num_features is None else num_features
    pairs = chunk_size(fastest // width, size, copies=copies) // (heads * bias.num_poses * query_poses * key_poses)
    if num_features:
        features = _FEATURES_PER_CHUNK if call.q.device.type == "cpu" else _NUMBERS_PER_WIDE_CHUNK
        distinct = chunk_size(features, size, copies=copies) // (bias.num_poses * num_features)
        pairs = min(pairs, distinct * repeats)
    return max(1, pairs)


def _vectors(call: PointCall, padded: bool) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Queries, keys, values and the coordinates of queries and keys, point by point, and the measure of the keys.

    Args:
        call: the attention.
        padded: whether there is one point more, which is what fills up: it keeps values that are not finite from those
            who do not see them. It lies where every relation is finite.
    """
    q, k, v = call.q.squeeze(1), call.k.squeeze(1), call.v.squeeze(1)
    asking, asked = call.query_points.coordinates, call.key_points.coordinates
    measure = call.bias.log_measure
    measure = None if measure is None else measure.expand(k.shape[1], -1)
    if padded:
        q, k, v = (torch.cat([t, t.new_zeros(len(t), 1, *t.shape[2:])], dim=1) for t in (q, k, v))
        points = [torch.cat([t, t.new_ones(1, t.shape[1])]) for t in ((asking,) if call.one_set else (asking, asked))]
        asking, asked = points[0], points[-1]
        measure = None if measure is None else torch.cat([measure, measure.new_zeros(1, measure.shape[1])])
    return (q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), asking, asked), measure


def in_place(out: list[Tensor], chunks: list[Chunk], call: PointCall) -> Tensor:
    """The output ``(M, 1, N, |H|, C)``: the rows of all chunks at their queries, and zeros at points without keys."""
    first = list(map(attrgetter("first"), chunks))
    if None not in first:
        out = list(map(out.__getitem__, sorted(range(len(out)), key=first.__getitem__)))
    rows = (out[0] if len(out) == 1 else torch.cat(out)).to(call.v.dtype) if out else _empty(call)
    if None in first:
        places = torch.cat([some.queries.flatten() for some in chunks])
        # One row more is for those that fill up; which they are no GPU has to be waited for.
        places = torch.where(places < 0, call.q.shape[2], places)
        rows = _empty(call, 1).index_copy(0, places, rows)[:-1]
    return rows.transpose(0, 1).unsqueeze(1)


def rows_of(rows: Tensor, index: Tensor, some: Chunk) -> Tensor:
    """The rows ``(G, n, ...)`` of queries or keys of a chunk, whose ``index`` this is; the last one fills up.

    There is no copy where they are in one stretch.
    """
    number = index.numel()
    if some.first is None:
        index = torch.where(index < 0, rows.shape[0] - 1, index) if some.padded else index
        rows = rows.index_select(0, index.flatten())
    elif rows.shape[0] > number:
        rows = rows[some.first : some.first + number]
    return rows.unflatten(0, index.shape)


def with_pairs(terms: PairScores, call: PointCall, some: Chunk) -> PairScores:
    """The terms of the scores of a chunk, with those of the features of its edges and with the envelope, if any."""
    if call.envelope is not None:
        terms = terms._replace(envelope=call.envelope(*call.query_points.places_of(call.key_points, some)))
    if call.edges is None:
        return terms
    scores, factors = _read(call, call.query_points.edge_rows(some))
    extra = scores[:, None, None, None]
    return terms._replace(extra=extra if terms.extra is None else terms.extra + extra, factors=factors)


def _read(call: PointCall, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Terms of edge features that add to the scores of each head, and factors of the weights, ``(M, G, A, K)``.

    Args:
        call: the attention.
        rows: ``(G, A, K)``, which of the features; -1 for none, which are zeros.
    """
    readout, features, index = call.edges, call.query_points.edge_attr, rows.flatten()
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

_FEATURES_PER_CHUNK = 7 * 2**20
"""Of the functions of the location. The GNU C library gives memory of 32 MB or more back at once, and each of its pages
costs an interrupt when it is used next."""


def attention(call: PointCall) -> Tensor:
    """Attention between points in bounded chunks: see :func:`escnn_attention.functional.attention`."""
    return attend_in_chunks(
        call, Chunks, _NUMBERS_PER_CHUNK if call.q.device.type == "cpu" else _NUMBERS_PER_WIDE_CHUNK
    )


def exported(call: PointCall) -> Tensor:
    """The same attention in a program that PyTorch exports."""
    return attend_in_export(call, Chunks)
