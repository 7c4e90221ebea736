"""Windows on the CPU, and global attention there with terms that factorise, by tiles.

Small tiles of queries meet their halo, or stretches of queries everything;
:mod:`~escnn_attention.functional.backends.pieces` says how.
"""

from __future__ import annotations

from torch import Tensor

from escnn_attention.functional.autograd import Operators, contained, why_not_on_the_cpu, why_not_served
from escnn_attention.functional.backends.pieces import backward_pass, empty_sums, forward_pass
from escnn_attention.functional.bias import QueryMode, Terms
from escnn_attention.functional.memory import pieces_of
from escnn_attention.geometry.grid import Grid, Positions

__all__ = ["PIECE", "attention", "refuses"]

PIECE = 2**20
"""The number of scores that are worked on at once. 4 MB in float32, two to seven times over."""

_operators = Operators("tiled", contained(forward_pass), backward_pass, empty_sums)


def refuses(q: Tensor, positions: Positions, terms: Terms, query: QueryMode, dropout: float) -> str | None:
    """Why this backend cannot serve a call."""
    if reason := why_not_on_the_cpu(q) or why_not_served(q, positions):
        return reason
    if positions.complete and terms.spatial is not None:
        return "without a window it needs an encoding that factorises: Fourier, rotary, absolute, none"
    return None


def attention(
    q: Tensor, k: Tensor, v: Tensor, positions: Positions, terms: Terms, *, query: QueryMode, dropout: float = 0.0
) -> Tensor:
    """See :func:`escnn_attention.functional.attention`."""
    assert isinstance(positions, Grid)
    if query == "all" and q.shape[2] == 1:
        # One query for all output poses: there is nothing to sum.
        q, query = q.expand(-1, -1, terms.num_poses, -1, -1), "own"
    piece = pieces_of(PIECE, q, copies=7)
    return _operators(q, k, v, positions, terms, query=query, dropout=dropout, piece=piece)
