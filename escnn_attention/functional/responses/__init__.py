"""Convolutions with kernels of their own for every pose, and attention on their responses."""
