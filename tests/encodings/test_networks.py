"""Small networks of coordinates."""

import torch

from escnn_attention.encodings.networks import coordinate_mlp, last_linear


def test_hidden_layers_between_coordinates_and_a_readout():
    mlp = coordinate_mlp(2, 8, 3, 5, normalize_hidden=False)
    assert [tuple(m.weight.shape) for m in mlp if isinstance(m, torch.nn.Linear)] == [(8, 2), (8, 8), (8, 8), (5, 8)]
    assert last_linear(mlp) is mlp[-1]
    assert mlp[-1].bias is None


def test_normalised_hidden_units_have_unit_variance():
    normed, plain = (coordinate_mlp(2, 8, 1, 5, normalize_hidden=n) for n in (True, False))
    x = torch.randn(20, 2)
    assert torch.allclose(normed[:2](x).var(-1, correction=0), torch.ones(20))
    assert not normed[0].bias.any()
    assert not torch.allclose(plain[:1](x).var(-1, correction=0), torch.ones(20))
