"""Attention between points."""
