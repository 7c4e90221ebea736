"""What each relation does not change under."""

from __future__ import annotations

import math

import pytest
import torch

from escnn_attention import LogPolar, Offset, Pair, Relation


def turn(angle: float) -> torch.Tensor:
    return torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]], dtype=torch.float64)


def test_sizes_and_names():
    x, y = torch.randn(4, 1, 3), torch.randn(1, 5, 3)
    for relation, size in ((Offset(), 3), (Pair(), 6)):
        assert relation.size(3) == size
        assert relation(x, y).shape == (4, 5, size)
    assert LogPolar().size(2) == 3
    assert LogPolar()(x[..., :2], y[..., :2]).shape == (4, 5, 3)
    assert repr(Pair()) == "Pair()"
    with pytest.raises(ValueError, match="plane"):
        LogPolar().size(3)


def test_what_they_are():
    x, y = torch.randn(2, 7, 2, dtype=torch.float64).unbind()
    torch.testing.assert_close(Offset()(x, y), y - x)
    torch.testing.assert_close(Pair()(x, y), torch.cat([x, y], dim=-1))
    ratio, cos, sin = LogPolar()(x, y).unbind(-1)
    angle = torch.atan2(y[:, 1], y[:, 0]) - torch.atan2(x[:, 1], x[:, 0])
    torch.testing.assert_close(ratio, (y.norm(dim=-1) / x.norm(dim=-1)).log())
    torch.testing.assert_close(torch.stack([cos, sin]), torch.stack([angle.cos(), angle.sin()]))


def test_log_polar_is_invariant_to_turns_and_scalings():
    x, y = torch.randn(2, 7, 2, dtype=torch.float64).unbind()
    m = 3.7 * turn(1.1)
    torch.testing.assert_close(LogPolar()(x @ m.T, y @ m.T), LogPolar()(x, y))
    flipped = torch.tensor([1.0, -1.0], dtype=torch.float64)
    assert not torch.allclose(LogPolar()(x * flipped, y * flipped), LogPolar()(x, y))


def test_a_relation_of_ones_own():
    from escnn import gspaces
    from escnn.nn import FieldType, GeometricTensor

    from escnn_attention import PointSelfAttention

    class Distance(Relation):
        def size(self, dim: int) -> int:
            return 1

        def __call__(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return (key - query).square().sum(-1, keepdim=True)

    torch.manual_seed(0)
    space = gspaces.trivialOnR2()
    scalars = FieldType(space, 2 * [space.trivial_repr])
    layer = PointSelfAttention(scalars, scalars, relation=Distance()).double()
    x, coords = torch.randn(2, 5, 2, dtype=torch.float64).unbind()
    y = layer(GeometricTensor(x, scalars, coords)).tensor
    torch.testing.assert_close(layer(GeometricTensor(x, scalars, coords @ turn(0.4).T + 1)).tensor, y)
