"""The ways to compute attention on a grid, one a file: see :mod:`escnn_attention.functional.registry`."""
