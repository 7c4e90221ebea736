"""The encodings, and offsets to evaluate them at."""

import pytest
import torch

from escnn_attention import (
    AbsoluteEncoding,
    FourierEncoding,
    MLPEncoding,
    NoEncoding,
    QuadraticEncoding,
    SeparableEncoding,
)

NAMES = {
    "mlp": MLPEncoding,
    "separable": SeparableEncoding,
    "fourier": FourierEncoding,
    "absolute": AbsoluteEncoding,
    "none": NoEncoding,
}
EVERY = NAMES | {"quadratic": QuadraticEncoding}  # which has no name
POSITIONAL = {name: cls for name, cls in EVERY.items() if name != "none"}
every_encoding = pytest.mark.parametrize("make", EVERY.values(), ids=EVERY)
positional = pytest.mark.parametrize("make", POSITIONAL.values(), ids=POSITIONAL)


def cube(dim, size=9):
    """Offsets that fill a window."""
    axis = torch.linspace(-1, 1, size)
    return torch.stack(torch.meshgrid([axis] * dim, indexing="ij"), dim=-1).flatten(0, -2)
