"""Layers inside modules that are not sequential."""

import torch
from escnn import gspaces, nn

from escnn_attention import equivariance_report
from escnn_attention.equivariance.parts import inner_layers
from escnn_attention.models import ResidualBlock
from tests import spaces

C4 = gspaces.rot2dOnR2(4)
FIELDS = spaces.regular(C4, 1)


class Branches(nn.EquivariantModule):
    """A convolution beside a pooling that loses exactness at even sizes, in dictionaries and sequences."""

    def __init__(self, pool):
        super().__init__()
        self.in_type = self.out_type = FIELDS
        self.inside = torch.nn.ModuleDict({"first": nn.SequentialModule(nn.ReLU(FIELDS), pool)})

    def forward(self, x):
        return self.inside["first"](x)

    def evaluate_output_shape(self, input_shape):
        return self.inside["first"].evaluate_output_shape(input_shape)


def antialiased():
    return nn.PointwiseAvgPoolAntialiased2D(FIELDS, sigma=0.66, stride=2)


def test_the_report_names_what_is_inside():
    report = equivariance_report(Branches(antialiased()), (1, 4, 8, 8))
    pool = "inside.first.1 (PointwiseAvgPoolAntialiased2D)"
    assert report.inexact_layers == ("Branches", pool)
    assert report.exact_sizes[pool] == ((7, 7), (9, 9))
    sequential = equivariance_report(nn.SequentialModule(nn.ReLU(FIELDS), Branches(antialiased())), (1, 4, 8, 8))
    assert sequential.inexact_layers == ("1 (Branches)", f"1.{pool}")


def test_nothing_is_named_where_all_is_exact():
    report = equivariance_report(Branches(antialiased()), (1, 4, 9, 9))
    assert report.inexact_layers == report.layers == ()
    assert not report.exact_sizes


def test_inputs_are_those_of_the_layers():
    block = ResidualBlock(FIELDS, FIELDS).eval()
    x = spaces.random_field(FIELDS, 5, 5, dtype=torch.float32)
    found = inner_layers(block, x)
    assert len(found) == 7
    for layer, given in found.values():
        assert given.type == layer.in_type
    assert torch.equal(next(iter(found.values()))[1].tensor, x.tensor)
    assert not any(m._forward_pre_hooks for m in block.modules())
