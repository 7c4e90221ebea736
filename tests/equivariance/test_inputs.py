"""Errors of interpolation beside those of one convolution of escnn."""

import pytest
import torch
from escnn import gspaces, nn

from escnn_attention import GroupSelfAttention, equivariance_report
from escnn_attention.equivariance.inputs import convolution_beside, features_on_grid
from tests import spaces


def test_interpolated_elements_have_the_error_of_a_convolution_beside_them():
    fields = spaces.scalars(gspaces.rot2dOnR2(8), 2)
    net = nn.SequentialModule(GroupSelfAttention(fields, fields, 1, 3))
    state = torch.get_rng_state()
    report = equivariance_report(net, (1, 2, 15, 15))
    assert torch.equal(torch.get_rng_state(), state)
    interpolated = [row.element for row in report.rows if row.layer == "whole module" and not row.exact]
    assert list(report.convolution) == interpolated
    assert len(interpolated) == 4
    x = features_on_grid(net, (1, 2, 15, 15), seed=0, smooth=True)
    convolution = convolution_beside(x, seed=0)
    with torch.no_grad():
        y = convolution(x)
    for g in interpolated:
        error = float((convolution(x.transform(g)).tensor - y.transform(g).tensor).norm().detach() / y.tensor.norm())
        assert report.convolution[g] == pytest.approx(error)
        assert 1e-4 < error < 0.5
        assert f"interpolated; one convolution: {error:.1e}" in str(report)
    assert report.to_dict()["convolution"] == {str(g): error for g, error in report.convolution.items()}


@pytest.mark.parametrize("make", [lambda: gspaces.rot2dOnR2(4), lambda: spaces.POINT["D4 on a point"]()])
def test_no_convolution_where_nothing_is_interpolated(make):
    space = make()
    fields = spaces.regular(space, 1)
    shape = (1, fields.size, *spaces.shape_of(space, 4))
    report = equivariance_report(nn.IdentityModule(fields), shape)
    assert report.convolution == {}
    assert "one convolution" not in str(report)


def test_in_space():
    space = gspaces.rot3dOnR3()
    fields = nn.FieldType(space, [space.trivial_repr, space.irrep(1), space.irrep(1)])
    convolution = convolution_beside(fields(torch.randn(1, 7, 3, 3, 3)), seed=0)
    assert isinstance(convolution, nn.R3Conv)
    assert convolution.out_type.size == 4
