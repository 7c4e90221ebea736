"""Attention on plain tensors: no escnn, and no group but for index tables and coordinates."""

from escnn_attention.functional.call import KeyMode, QueryMode
from escnn_attention.functional.grid.attention import ON_GRIDS, attention
from escnn_attention.functional.grid.call import GridCall, PositionalBias, Waves
from escnn_attention.functional.grid.reference import probabilities
from escnn_attention.functional.points.attention import BETWEEN_POINTS
from escnn_attention.functional.points.call import PointCall
from escnn_attention.functional.registry import Backend, Registry, working_memory

BACKENDS = ON_GRIDS.backends
"""The backends of attention on grids, by name."""

__all__ = [
    "BACKENDS",
    "BETWEEN_POINTS",
    "ON_GRIDS",
    "Backend",
    "GridCall",
    "KeyMode",
    "PointCall",
    "PositionalBias",
    "QueryMode",
    "Registry",
    "Waves",
    "attention",
    "probabilities",
    "working_memory",
]
