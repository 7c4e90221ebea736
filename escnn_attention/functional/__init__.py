"""Attention on plain tensors: no escnn, and no group but for index tables and coordinates."""

from escnn_attention.functional.grid.call import KeyMode, PositionalBias, QueryMode, Waves
from escnn_attention.functional.grid.reference import probabilities
from escnn_attention.functional.memory import working_memory
from escnn_attention.functional.registry import (
    BACKENDS,
    Backend,
    attention,
    backends_for,
    check_backend,
    compute,
    preference,
)

__all__ = [
    "BACKENDS",
    "Backend",
    "KeyMode",
    "PositionalBias",
    "QueryMode",
    "Waves",
    "attention",
    "backends_for",
    "check_backend",
    "compute",
    "preference",
    "probabilities",
    "working_memory",
]
