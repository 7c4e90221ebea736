"""Measures of how exactly a module commutes with its group, and tools to inspect its layers."""

from escnn_attention.equivariance.angles import EquivarianceErrors, equivariance_errors
from escnn_attention.equivariance.inspection import AttentionLayer, attention_layers, find_attention, find_layer, watch
from escnn_attention.equivariance.report import (
    EquivarianceReport,
    EquivarianceRow,
    assert_equivariant,
    equivariance_report,
)

__all__ = [
    "AttentionLayer",
    "EquivarianceErrors",
    "EquivarianceReport",
    "EquivarianceRow",
    "assert_equivariant",
    "attention_layers",
    "equivariance_errors",
    "equivariance_report",
    "find_attention",
    "find_layer",
    "watch",
]
