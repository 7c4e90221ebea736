"""Continuous positional encodings, one a file."""

from escnn_attention.encodings.base import (
    AbsoluteEncoding,
    Encoding,
    FourierEncoding,
    MLPEncoding,
    NoEncoding,
    RotaryEncoding,
    SeparableEncoding,
    as_encoding,
)
from escnn_attention.encodings.pair_kernel import PairKernel
from escnn_attention.encodings.quadratic import QuadraticEncoding

__all__ = [
    "AbsoluteEncoding",
    "Encoding",
    "FourierEncoding",
    "MLPEncoding",
    "NoEncoding",
    "PairKernel",
    "QuadraticEncoding",
    "RotaryEncoding",
    "SeparableEncoding",
    "as_encoding",
]
