r"""What features of edges do in attention between points: they add to the scores, and multiply the weights of values.

.. math:: s \leftarrow s + w_m \cdot e_{ij}, \qquad \alpha \leftarrow (1 + u_m \cdot e_{ij})\, \alpha

for head m, query i and key j, after the scores have become weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from escnn_attention.functional.call import Call
from escnn_attention.functional.points.bias import PairScores
from escnn_attention.geometry.clouds import Chunk
from escnn_attention.geometry.points import Points

__all__ = ["with_edges", "with_table"]


def with_edges(terms: PairScores, call: Call, some: Chunk) -> PairScores:
    """The terms of the scores of a chunk, with those of the features of its edges, if there are any."""
    if call.edges is None:
        return terms
    positions = call.positions
    assert isinstance(positions, Points)
    rows = positions.edge_rows(some)
    return _with(terms, *_read(call, _rows(positions, rows)))


def with_table(terms: PairScores, call: Call, times: Tensor | None) -> list[PairScores]:
    """The terms of the scores of all pairs of points, with those of the features of edges, if there are any.

    Args:
        terms: without.
        call: the attention.
        times: ``(N, N)``, how many times a query sees a key; None where each sees all once.

    Returns:
        terms whose weights are to be added up: shares by count are a sum over edges that are there several times.
    """
    if call.edges is None:
        return [terms]
    positions, number = call.positions, call.positions.num_positions
    assert isinstance(positions, Points)
    if positions.edge_index is None:
        points = torch.arange(number, device=call.q.device).unsqueeze(0)
        rows = positions.edge_rows(Chunk(points, points, False))
        found = _rows(positions, rows)
        if times is not None:  # Tables have anything between clouds, and beyond their points.
            found = found.masked_fill((times == 0)[None, :, :, None], 0.0)
        return [_with(terms, *_read(call, found))]
    assert positions.edge_attr is not None
    assert times is not None
    scores, factors = (t[0, :, 0] for t in _read(call, positions.edge_attr[None, None]))  # M, E
    keys, queries = positions.edge_index.long()
    index = (queries * number + keys).expand(len(scores), -1)
    zeros = scores.new_zeros(len(scores), number * number)
    seen = times.flatten().clamp(min=1).to(scores.dtype)

    def table(of_edges: Tensor) -> Tensor:
        """The sums over the edges of each pair, ``(1, M, N, N)``."""
        return zeros.scatter_add(1, index, of_edges)

    def square(of_pairs: Tensor) -> Tensor:
        return of_pairs.unflatten(1, (number, number)).unsqueeze(0)

    if call.normalization == "count":
        # Linear in the scores.
        mean, by_itself = (square(table(t) / seen) for t in (factors, scores * factors))
        poses = 1 if call.keys == "own" else call.k.shape[3]
        every_pose = PairScores(None, extra=scores.new_zeros(1, 1, 1, poses, 1, 1, 1))
        return [_with(terms, None, mean), _with(every_pose, by_itself, None)]
    least = torch.finfo(scores.dtype).min
    top = torch.full_like(zeros, least).scatter_reduce(1, index, scores.detach(), "amax")
    shares = (scores - top.gather(1, index)).exp()
    total = table(shares)
    there = total > 0
    added = torch.where(there, top + (total.clamp(min=torch.finfo(total.dtype).tiny) / seen).log(), 0.0)
    return [_with(terms, square(added), square(table(shares * factors) / torch.where(there, total, 1.0)))]


def _rows(positions: Points, rows: Tensor) -> Tensor:
    """The features ``(G, A, K, F)`` in so many rows ``(G, A, K)``, with zeros where these are -1."""
    assert positions.edge_attr is not None
    features = positions.edge_attr.flatten(0, -2).index_select(0, rows.clamp(min=0).flatten()).unflatten(0, rows.shape)
    return features.masked_fill((rows < 0).unsqueeze(-1), 0.0)


def _read(call: Call, features: Tensor) -> tuple[Tensor, Tensor]:
    """What features ``(G, A, K, F)`` add to the scores of each head and multiply weights with, ``(G, M, A, K)``."""
    readout = call.edges
    assert readout is not None
    made = features.to(readout.dtype) @ readout.flatten(0, 1).T
    # Where heads have become several, such as one for each pose, these are side by side.
    made = made.movedim(-1, 1).unflatten(1, readout.shape[:2])
    made = made.repeat_interleave(len(call.q) // readout.shape[1], 2)
    return made[:, 0], 1 + made[:, 1]


def _with(terms: PairScores, scores: Tensor | None, factors: Tensor | None) -> PairScores:
    """The terms with more scores ``(G, M, A, K)``, and factors of the weights."""
    factors = None if factors is None else factors.transpose(0, 1)
    if scores is None:
        return terms._replace(factors=factors)
    extra = scores.transpose(0, 1)[:, None, None, None]
    return terms._replace(extra=extra if terms.extra is None else terms.extra + extra, factors=factors)
