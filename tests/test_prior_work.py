"""Visual attention of prior work as special cases: against their formulas, written out for plain tensors."""

from pathlib import Path

import pytest
import torch
from escnn import gspaces, nn
from torch.nn import functional

from escnn_attention import AttentiveConv, FeatureAttention, assert_equivariant, equivariance_report
from tests.test_readme_and_docs import programs

PLANE = gspaces.trivialOnR2()
CHANNELS = nn.FieldType(PLANE, 8 * [PLANE.regular_repr])
GSPACES = [gspaces.rot2dOnR2(4), gspaces.flipRot2dOnR2(4)]


def features():
    return torch.randn(3, 8, 10, 9, dtype=torch.float64)


def weights(layer):
    """The two layers of channel attention as matrices, and the kernel of spatial attention."""
    plain = layer.plain
    matrices = [None if k is None else k()[:, 0, :, 0] for k in (plain.squeeze, plain.excite)]
    return (*matrices, None if plain.spatial is None else plain.spatial()[:, 0, :, 0])


def squeeze_and_excitation(f, w1, w2):
    """Hu et al. 2018, Eqs. 2 to 4."""
    z = functional.adaptive_avg_pool2d(f, 1).flatten(1)
    s = torch.sigmoid(functional.linear(functional.relu(functional.linear(z, w1)), w2))
    return f * s[:, :, None, None]


def cbam(f, w1, w2, kernel):
    """Woo et al. 2018, Eqs. 1 to 3."""

    def mlp(z):
        return functional.linear(functional.relu(functional.linear(z, w1)), w2)

    mean, largest = functional.adaptive_avg_pool2d(f, 1).flatten(1), functional.adaptive_max_pool2d(f, 1).flatten(1)
    f = torch.sigmoid(mlp(mean) + mlp(largest))[:, :, None, None] * f
    pooled = torch.cat([f.mean(1, keepdim=True), f.amax(1, keepdim=True)], dim=1)
    return torch.sigmoid(functional.conv2d(pooled, kernel, padding=kernel.shape[-1] // 2)) * f


def both_sides(layer, f, formula):
    """Values and gradients of a layer, and of a formula with its weights."""
    results = []
    for function in (lambda x: layer(layer.in_type(x)).tensor, lambda x: formula(x, *weights(layer))):
        x = f.clone().requires_grad_()
        y = function(x)
        results.append([y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])])
    return zip(*results, strict=True)


def test_squeeze_and_excitation():
    layer = FeatureAttention(CHANNELS, ratio=4, spatial=False, statistics="mean", residual=False).double()
    f = features()
    for ours, theirs in both_sides(layer, f, lambda x, w1, w2, _: squeeze_and_excitation(x, w1, w2)):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    # The other statistics, and what is left in place of what is attended to, are something else.
    for options in ({"statistics": "max", "residual": False}, {"statistics": "mean", "residual": True}):
        other = FeatureAttention(CHANNELS, ratio=4, spatial=False, **options).double()
        y = other(CHANNELS(f)).tensor
        assert (y - squeeze_and_excitation(f, *weights(other)[:2])).abs().max() > 1e-2


def test_cbam():
    layer = FeatureAttention(CHANNELS, ratio=4, residual=False).double()
    f = features()
    for ours, theirs in both_sides(layer, f, cbam):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    w1, w2, kernel = weights(layer)
    assert kernel.shape == (1, 2, 7, 7)
    # Spatial attention first is not the same.
    pooled = torch.cat([f.mean(1, keepdim=True), f.amax(1, keepdim=True)], dim=1)
    spatial = torch.sigmoid(functional.conv2d(pooled, kernel, padding=3))
    reordered = FeatureAttention(CHANNELS, ratio=4, spatial=False, residual=False).double()
    reordered.load_state_dict(layer.state_dict(), strict=False)
    y = reordered(CHANNELS(spatial * f)).tensor
    assert (y - cbam(f, w1, w2, kernel)).abs().max() > 1e-3


# ---------------------------------------------------------------------------------------------------- BAM, on the site


@pytest.fixture(scope="module")
def bam_class():
    """The class as the site shows it."""
    page = Path(__file__).parents[1] / "docs" / "attentive.md"
    (code,) = [code for code, *_ in programs(page) if "class BAM" in code]
    namespace = {"nn": nn, "AttentiveConv": AttentiveConv}
    exec(code.partition("\n\n\nbam = ")[0], namespace)
    return namespace["BAM"]


def bam(f, channel, spatial):
    """Park et al. 2018, Eqs. 1 to 4, in evaluation mode."""

    def branch(x, layers):
        for weight, bias, norm, spread in layers:
            x = functional.conv2d(x, weight, bias, padding=spread * (weight.shape[-1] // 2), dilation=spread)
            if norm is not None:
                x = functional.relu(functional.batch_norm(x, norm[2], norm[3], norm[0], norm[1]))
        return x

    attention = branch(functional.adaptive_avg_pool2d(f, 1), channel) + branch(f, spatial)
    return f + torch.sigmoid(attention) * f


def as_tensors(sequence):
    """The filters, biases and norms of a branch."""
    layers = []
    for module in sequence:
        if isinstance(module, AttentiveConv):
            plain = module.plain
            layers.append([plain.kernel()[:, 0, :, 0], plain.bias, None, plain.geometry.dilation])
        elif isinstance(module, nn.InnerBatchNorm):
            norm = next(m for m in module.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm))
            layers[-1][2] = (norm.weight, norm.bias, norm.running_mean, norm.running_var)
    return layers


def test_bam_with_the_trivial_group(bam_class):
    layer = bam_class(CHANNELS, ratio=4).double()
    f = features()
    layer(CHANNELS(f))  # statistics of the norms
    layer.eval()
    with torch.no_grad():
        expected = bam(f, as_tensors(layer.channel), as_tensors(layer.spatial))
        torch.testing.assert_close(layer(CHANNELS(f)).tensor, expected, rtol=1e-12, atol=1e-12)
        assert ((layer(CHANNELS(f)).tensor / f) > 1).all()  # it never suppresses
    shapes = [(weight.shape[-1], spread) for weight, _, _, spread in as_tensors(layer.spatial)]
    assert shapes == [(1, 1), (3, 4), (3, 4), (1, 1)]


@pytest.mark.parametrize("gspace", GSPACES, ids=str)
def test_equivariant_versions(gspace, bam_class):
    """The same layers with a group, and a negative control: attention of a network without it."""
    fields = nn.FieldType(gspace, 4 * [gspace.regular_repr])
    shape = (2, fields.size, 9, 9)
    for options in ({"spatial": False, "statistics": "mean"}, {}):
        assert_equivariant(FeatureAttention(fields, residual=False, **options), shape, tolerance=1e-12)
    layer = bam_class(fields, ratio=2)
    layer(fields(torch.randn(shape)))
    assert_equivariant(layer.eval(), shape, tolerance=1e-12)

    class Ordinary(nn.EquivariantModule):
        """CBAM that takes poses for channels."""

        def __init__(self):
            super().__init__()
            self.in_type = self.out_type = fields
            self.inside = FeatureAttention(nn.FieldType(PLANE, fields.size * [PLANE.regular_repr]), residual=False)

        def forward(self, x):
            return nn.GeometricTensor(self.inside(self.inside.in_type(x.tensor)).tensor, self.out_type)

        def evaluate_output_shape(self, shape):
            return shape

    assert max(row.relative for row in equivariance_report(Ordinary(), shape, layers=False).rows) > 1e-3
