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
