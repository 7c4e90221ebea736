r"""What features of edges do in attention between points: they add to the scores, and multiply the weights of values.

.. math:: s \leftarrow s + w_m \cdot e_{ij}, \qquad \alpha \leftarrow (1 + u_m \cdot e_{ij})\, \alpha

for head m, query i and key j, after the scores have become weights.
"""

from __future__ import annotations

from torch import Tensor

from escnn_attention.functional.call import Call
from escnn_attention.functional.points.bias import PairScores
from escnn_attention.geometry.clouds import Chunk
from escnn_attention.geometry.points import Points

__all__ = ["with_edges"]


def with_edges(terms: PairScores, call: Call, some: Chunk) -> PairScores:
    """The terms of the scores of a chunk, with those of the features of its edges, if there are any."""
    if call.edges is None:
        return terms
    positions = call.positions
    assert isinstance(positions, Points)
    scores, factors = (t.transpose(0, 1) for t in _read(call, _rows(positions, positions.edge_rows(some))))
    extra = scores[:, None, None, None]
    return terms._replace(extra=extra if terms.extra is None else terms.extra + extra, factors=factors)


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
