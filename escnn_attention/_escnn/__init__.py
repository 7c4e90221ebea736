"""Workarounds for releases of escnn, and its types for pickle."""
