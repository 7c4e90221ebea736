"""Steerable convolutions in front of the projections of attention."""

import itertools

import pytest
import torch
from escnn import gspaces
from escnn.nn import FieldType
from torch import nn

from escnn_attention import (
    GroupSelfAttention,
    LiftingSelfAttention,
    PointSelfAttention,
    TransformerBlock,
    sequence_space,
    tetraOnR3,
)
from escnn_attention._escnn.bases import elements_of
from escnn_attention.equivariance.report import maps_grid
from escnn_attention.models import HybridNet, exported
from escnn_attention.nn.field_convolution import field_convolution
from tests.layers import assert_formula, drawn
from tests.nn.attention import TOLERANCE
from tests.spaces import PLANE, grid_elements, grid_error, mixed, random_field, regular, scalars, shape_of, size_of

C4, D4 = gspaces.rot2dOnR2(4), gspaces.flipRot2dOnR2(4)
SPACES = PLANE | {
    "inversion": gspaces.invOnR3,
    "C4 3D": lambda: gspaces.rot2dOnR3(4),
}
LARGE = {
    "octahedral": (gspaces.octaOnR3, None),
    "SO(2)": (lambda: gspaces.rot2dOnR2(-1), 8),
    "O(2)": (lambda: gspaces.flipRot2dOnR2(-1), 8),
    "SO(3)": (gspaces.rot3dOnR3, 24),
}
ON_TORI = ("trivial", "flip", "C2", "C4", "D4", "inversion", "C4 3D")


def convolved(fields, out=None, size=3, **options):
    options = {"projection_kernel_size": 3, "head_fields": 4, **options}
    return drawn(GroupSelfAttention(fields, out or fields, 2, size, **options))


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", SPACES)
@pytest.mark.parametrize("filters", [1, 2, None])
@pytest.mark.parametrize(
    "options",
    [
        {"query": "all", "encoding": "separable"},
        {"keys": "own", "shared_scores": True, "projection_kernel_size": 5},
        {"encoding": "rotary", "size": None},
        {"padding_mode": "circular"},
        {"stride": 2, "registers": 1},
        {"scale_factor": 2, "qk_norm": True},
    ],
    ids=str,
)
def test_equivariant(name, filters, options):
    """Of any fields, on windows, tori and whole grids; and not with a filter that is no kernel of the group."""
    space = SPACES[name]()
    if "padding_mode" in options and name not in ON_TORI:
        options = {}
    layer = convolved(mixed(space), projection_filters=filters, **options)
    x = random_field(layer.in_type, *shape_of(space, 5), batch=1)
    assert grid_error(layer, x) < TOLERANCE
    if "padding_mode" in options:
        rolled = layer(layer.in_type(x.tensor.roll((1, 2), (-1, -2)))).tensor
        torch.testing.assert_close(rolled, layer(x).tensor.roll((1, 2), (-1, -2)), rtol=0, atol=1e-12)
    if len(grid_elements(space)) > 1:
        torch.nn.init.normal_(layer.plain.convolution.parts[0].module.filter)
        assert grid_error(layer, x) > 1e-3


@pytest.mark.sampled
@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("filters", [1, None])
@pytest.mark.slow
def test_equivariant_of_irreps(name, filters):
    """Of a continuous group under the samples that map the grid onto itself."""
    space, samples = LARGE[name][0](), LARGE[name][1]
    vector = next(r for r in space.fibergroup.irreps() if r.size == space.dimensionality)
    fields = FieldType(space, 2 * [space.trivial_repr, vector])
    layer, x = convolved(fields, samples=samples, projection_filters=filters), random_field(fields, *shape_of(space, 3))
    elements = [g for g in elements_of(space.fibergroup) if maps_grid(space, g)]

    def error():
        y = layer(x)
        return max((layer(x.transform(g)).tensor - y.transform(g).tensor).norm() / size_of(y.tensor) for g in elements)

    assert error() < TOLERANCE
    torch.nn.init.normal_(layer.plain.convolution.parts[0].module.filter)
    assert error() > 1e-3


def parts_written_out(x, layer):
    """Queries, keys and values of a layer between regular fields, of the filter at every place of its window."""
    (part,) = layer.plain.convolution.parts
    kernel, _ = part.module.expand_parameters()
    padded = nn.functional.pad(x, (1, 1, 1, 1))
    width = kernel.shape[1]
    made = []
    for number, row in enumerate(kernel):  # an output channel
        first = number // (len(kernel) // (x.shape[1] // width)) * width  # of the input channels of its field
        shifted = [
            row[c, i, j] * padded[:, first + c, i : i + x.shape[2], j : j + x.shape[3]]
            for c, i, j in itertools.product(range(width), range(3), range(3))
        ]
        made.append(sum(shifted))
    return torch.stack(made, 1)


@pytest.mark.parametrize("filters", [1, 3, None])
def test_the_formula(filters):
    """Attention of the fields after the filters, each of a field alone unless there are None: values and gradients."""
    fields = regular(C4, 2)
    layer = convolved(fields, projection_filters=filters).train()
    between = regular(C4, 2 * (filters or 1))
    alone = GroupSelfAttention(between, fields, 2, 3, head_fields=4).double()
    alone.load_state_dict({n: t for n, t in layer.state_dict().items() if "convolution" not in n})
    x = torch.randn(2, 8, 5, 4, dtype=torch.float64, requires_grad=True)
    weights = layer.plain.convolution.parts[0].module.weights
    expected = alone(between(parts_written_out(x, layer))).tensor
    assert_formula(layer(fields(x)).tensor, expected, [x, weights], 1e-13, 1e-13)


@pytest.mark.parametrize("filters", [1, 2])
def test_filters_of_a_field_see_that_field(filters):
    """Of fields of several kinds, out of order."""
    fields = mixed(D4)
    made, out = field_convolution(fields, 3, filters, circular=False)
    assert list(out) == [fields.representations[i] for i in (0, 3, 1, 2) for _ in range(filters)]
    x = torch.randn(1, fields.size, 3, 3, requires_grad=True)
    for number, i in enumerate((0, 3, 1, 2)):
        y = made(x)[:, out.fields_start[number * filters] : out.fields_end[(number + 1) * filters - 1]]
        (gradient,) = torch.autograd.grad(y.square().sum(), x)
        seen = gradient.abs().sum((0, 2, 3)) > 0
        assert seen.nonzero().flatten().tolist() == [*range(fields.fields_start[i], fields.fields_end[i])]


def test_masks_and_maps():
    """In a window images have what they have on a grid of their own, and maps are those of the output."""
    fields = mixed(C4)
    layer, x = convolved(fields), random_field(fields, 6, 6)
    mask = torch.zeros(2, 6, 6, dtype=torch.bool)
    mask[:, :4, :5] = True
    x.tensor[~mask.unsqueeze(1).expand_as(x.tensor)] = torch.nan
    small = fields(x.tensor[..., :4, :5])
    torch.testing.assert_close(layer(x, mask).tensor[..., :4, :5], layer(small).tensor)
    maps = layer.attention_maps(x, [(1, 2)], mask=mask)
    torch.testing.assert_close(maps[..., :4, :5], layer.attention_maps(small, [(1, 2)]))
    v = layer.plain.to_heads(layer.plain.convolution(small.tensor).movedim(1, -1))[2]
    heads = torch.einsum("bmhqjpk,mbkpc->mbqhc", maps[..., :4, :5].flatten(6), v)
    torch.testing.assert_close(layer.plain.project(heads)[:, 0], layer(small).tensor[..., 1, 2])


def test_programs_and_networks():
    """Exports hold convolutions of PyTorch, in blocks and networks too."""
    fields = mixed(C4)
    block = TransformerBlock(fields, fields, 1, 3, norm="pre", projection_kernel_size=3, projection_filters=2)
    options = {"widths": (2, 2), "convolutions": (1, 0), "attention": (0, 1), "num_heads": 1}
    stem = {"num_heads": 2, "projection_kernel_size": 3}
    net = HybridNet(C4, 1, 3, **options, stem=stem, block={"projection_kernel_size": 3, "projection_filters": None})
    for module, channels in ((block, fields.size), (net, 1)):
        module = drawn(module)
        x = torch.randn(2, channels, 5, 5, dtype=torch.float64)
        expected = module(module.in_type(x)).tensor if module is block else module(x)
        plain = exported(module)
        assert not any(type(part).__module__.startswith("escnn.") for part in plain.modules())
        assert any(isinstance(part, nn.Conv2d) for part in plain.modules())
        torch.testing.assert_close(plain(x), expected)
    assert "projection_kernel_size=3, projection_filters=2" in repr(block.attention)


def test_refused():
    fields, image, tokens = regular(C4, 2), scalars(C4, 2), regular(sequence_space(C4.fibergroup), 2)
    on_point = regular(gspaces.no_base_space(C4.fibergroup), 2)
    for layer, error, match in (
        (lambda: convolved(fields, projection_kernel_size=4), ValueError, "projection_kernel_size: got 4, .* odd"),
        (lambda: convolved(fields, projection_kernel_size=3.0), TypeError, "projection_kernel_size: .*integer"),
        (lambda: convolved(fields, projection_filters=0), ValueError, "projection_filters: got 0"),
        (
            lambda: convolved(fields, projection_kernel_size=1, projection_filters=2),
            ValueError,
            "projection_filters: got 2, but projection_kernel_size is 1",
        ),
        (lambda: convolved(tokens), ValueError, "projection_kernel_size: .*no convolutions"),
        (lambda: convolved(on_point, size=None), ValueError, "projection_kernel_size: .*no convolutions"),
        (lambda: convolved(scalars(tetraOnR3(), 2)), ValueError, "projection_kernel_size: .*no convolutions"),
        (
            lambda: PointSelfAttention(fields, fields, projection_kernel_size=3),
            TypeError,
            "projection_kernel_size: .*no such option",
        ),
    ):
        with pytest.raises(error, match=match):
            layer()
    lifting = drawn(LiftingSelfAttention(image, fields, 1, 3, projection_kernel_size=3))
    assert grid_error(lifting, random_field(image, 5, 5)) < TOLERANCE
