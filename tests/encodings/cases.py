"""The encodings, and offsets to evaluate them at."""

import pytest
import torch

from escnn_attention import AbsoluteEncoding, FourierEncoding, MLPEncoding, NoEncoding, SeparableEncoding

NAMES = {
    "mlp": MLPEncoding,
    "separable": SeparableEncoding,
    "fourier": FourierEncoding,
    "absolute": AbsoluteEncoding,
    "none": NoEncoding,
}
POSITIONAL = {name: cls for name, cls in NAMES.items() if name != "none"}
every_encoding = pytest.mark.parametrize("make", NAMES.values(), ids=NAMES)
positional = pytest.mark.parametrize("make", POSITIONAL.values(), ids=POSITIONAL)


def cube(dim, size=9):
    """Offsets that fill a window."""
    axis = torch.linspace(-1, 1, size)
    return torch.stack(torch.meshgrid([axis] * dim, indexing="ij"), dim=-1).flatten(0, -2)
