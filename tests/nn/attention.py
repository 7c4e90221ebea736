"""Layers of self-attention on grids to test, and their equivariance errors."""

from escnn_attention import GroupSelfAttention, LiftingSelfAttention
from escnn_attention.geometry.grid import Grid
from tests import spaces
from tests.spaces import mixed, scalars

ENCODINGS = ["mlp", "separable", "fourier", "rotary", "absolute", "none"]
TOLERANCE = 1e-10


def turned_error(layer, x):
    def on_grid(values, frame):
        grid = Grid(values.shape[2:], layer.plain.window, dtype=values.dtype, frame=frame)
        return layer.plain.attend(values, grid)

    return spaces.turned_error(layer, x, on_grid)


def attention_for(space, *, lifting=False, encoding="mlp", size=None, **options):
    """A layer on mixed types in float64, with heads wide enough for every encoding."""
    out_type = mixed(space)
    if lifting:
        return LiftingSelfAttention(
            scalars(space, 2), out_type, 2, size, head_fields=4, encoding=encoding, **options
        ).double()
    return GroupSelfAttention(out_type, out_type, 2, size, head_fields=4, encoding=encoding, **options).double()
