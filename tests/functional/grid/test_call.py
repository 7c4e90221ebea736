"""The arguments of backends."""

import torch

from escnn_attention import FourierEncoding
from escnn_attention.functional.grid.call import PositionalBias, Waves
from escnn_attention.geometry.grid import Grid
from escnn_attention.geometry.windows import Window


def waves(heads=2):
    torch.manual_seed(0)
    return Waves(torch.randn(1, 3, 4, 2, dtype=torch.float64), torch.randn(heads, 5, 8, dtype=torch.float64))


def test_waves_are_a_function_of_the_turned_offset():
    encoding = FourierEncoding(4).bind(2, 2, 5, 3).double()
    turn = torch.linalg.qr(torch.randn(3, 2, 2, dtype=torch.float64))[0]
    delta = torch.randn(7, 2, dtype=torch.float64)
    frequencies, readout = encoding.waves()
    table = Waves((frequencies @ turn).unsqueeze(0), readout).table(delta)
    torch.testing.assert_close(table, encoding.offsets(delta @ turn.transpose(-1, -2)))


def test_explicit_terms():
    grid = Grid((3, 3), Window(3))
    terms = PositionalBias(3, pose=torch.randn(1, 3, 3, 5), waves=waves()).explicit(grid)
    assert terms.waves is None
    assert terms.explicit(grid) is terms
    torch.testing.assert_close(terms.spatial, waves().table(grid.offsets))
