"""Scales and what is done to each of them."""

import math

import numpy as np
import pytest
import torch
from escnn.nn import FieldType

from escnn_attention import FieldLayerNorm, HalvingPool, PoseLinear
from escnn_attention.nn.scales import PerScale, Scales
from tests.nn.scales import THREE, drawn, lifting
from tests.spaces import PLANE, mixed, random_field, regular, shape_of


class TestPerScale:
    def test_is_the_module_on_every_scale(self):
        fields = mixed(PLANE["C4"]())
        inner = PoseLinear(fields, regular(fields.gspace, 2)).double()
        layer = PerScale(inner, THREE)
        x = random_field(layer.in_type, 4, 5)
        each = [inner(fields(t)).tensor for t in x.tensor.unflatten(1, (3, -1)).unbind(1)]
        torch.testing.assert_close(layer(x).tensor, torch.cat(each, 1))
        assert sum(p.numel() for p in layer.parameters()) == sum(p.numel() for p in inner.parameters())

    def test_modules_that_change_the_grid(self):
        layer = PerScale(HalvingPool(regular(PLANE["C4"](), 1)), THREE)
        x = random_field(layer.in_type, 8, 6)
        assert layer(x).shape == layer.evaluate_output_shape(x.shape) == (2, 12, 4, 3)

    def test_exports_what_it_holds(self):
        layer = drawn(PerScale(FieldLayerNorm(regular(PLANE["C4"](), 1)), THREE))
        x = random_field(layer.in_type, 4, 4)
        assert torch.equal(layer.export()(x.tensor), layer(x).tensor)


class TestScales:
    def test_values(self):
        assert Scales(3, 3).values == (1.0, 3.0, 9.0)
        assert Scales(1.5, 1).values == (1.0,)
        assert Scales(np.int64(2), 3) == Scales(np.float32(2), 3) == THREE
        assert [type(s) for s in Scales(np.float32(2), 2).values] == [float, float]

    def test_types_there_and_back(self):
        fields = mixed(PLANE["D4"]())
        assert THREE.single(THREE.repeat(fields)) == fields

    @pytest.mark.parametrize("base", [1, 0.5, "2", True, math.inf, math.nan, None])
    def test_base(self, base):
        with pytest.raises(ValueError, match=r"base: got .*, needed a number above 1"):
            Scales(base)

    def test_count(self):
        with pytest.raises(ValueError, match="count: got 0, needed at least 1"):
            Scales(2, 0)
        with pytest.raises(TypeError, match=r"count: got 2.5, needed an integer"):
            Scales(2, 2.5)

    def test_types_that_differ(self):
        space = PLANE["C4"]()
        for fields in ([space.regular_repr] * 4, [space.regular_repr, space.trivial_repr, space.regular_repr]):
            with pytest.raises(ValueError, match=r"field_type: got .*, needed the same fields at each of 3 scales"):
                THREE.single(FieldType(space, fields))
        with pytest.raises(TypeError, match="field_type: got int"):
            THREE.repeat(3)


def test_shape_of_types():
    """A tensor can be viewed as (B, n, fields, |H|, *space)."""
    layer = lifting(PLANE["C4"](), out=lambda space: regular(space, 3), head_fields=1)
    y = layer(random_field(layer.in_type, *shape_of(layer.space, 5))).tensor
    assert y.unflatten(1, (3, 3, 4)).shape == (2, 3, 3, 4, 5, 5)
