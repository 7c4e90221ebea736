"""Sequences and images over time as gspaces of escnn."""

import math

import pytest
import torch
from escnn import group, gspaces
from escnn.nn import FieldType, GeometricTensor

from escnn_attention import (
    ConvolutionalEncoding,
    GroupSelfAttention,
    LiftingSelfAttention,
    TransformerBlock,
    equivariance_report,
    sequence_space,
    space_time,
)
from escnn_attention.functional import ON_GRIDS
from escnn_attention.functional.grid.native import why_not_built
from escnn_attention.groups.sequences import SpaceTime
from tests.layers import assert_formula, drawn
from tests.nn.attention import turned_error, written_out
from tests.packages import check_files
from tests.spaces import grid_error, random_field

COMPILED = () if why_not_built(torch.float64) else ("native",)

GROUPS = {
    "trivial": lambda: group.cyclic_group(1),
    "C8": lambda: group.cyclic_group(8),
    "D3": lambda: group.dihedral_group(3),
    "octahedral": group.octa_group,
}
IMAGES = {
    "C4": (lambda: gspaces.rot2dOnR2(4), (3, 4, 4)),
    "D4": (lambda: gspaces.flipRot2dOnR2(4), (2, 5, 3)),
    "octahedral": (gspaces.octaOnR3, (2, 3, 3, 3)),
}


def fields_over(space):
    """Scalars, all of the group's irreps at most twice, and regular fields."""
    return FieldType(space, [space.trivial_repr, *space.irreps[-2:], *2 * [space.regular_repr]])


@pytest.mark.parametrize("name", GROUPS)
def test_space_of_sequences(name):
    space = sequence_space(GROUPS[name]())
    assert space.dimensionality == space.basespace_action.size == 1
    assert space == sequence_space(GROUPS[name]())
    assert space != gspaces.no_base_space(space.fibergroup)


@pytest.mark.parametrize("name", IMAGES)
def test_images_over_time(name):
    make, shape = IMAGES[name]
    space = space_time(make())
    assert space.dimensionality == len(shape)
    fields = fields_over(space)
    layer = GroupSelfAttention(fields, fields, 1, 3, head_fields=1)
    report = equivariance_report(layer, (1, fields.size, *shape))
    assert any(row.exact for row in report.rows)
    assert max(row.relative for row in report.rows if row.exact) < 1e-12


def test_images_over_time_turn_one_by_one():
    space = space_time(gspaces.rot2dOnR2(4))
    video = FieldType(space, [space.trivial_repr, space.irrep(1)])
    image = FieldType(space.base, [space.base.trivial_repr, space.base.irrep(1)])
    x = torch.randn(1, 3, 2, 5, 5)
    for g in space.fibergroup.elements:
        turned = video(x).transform(g).tensor
        expected = [GeometricTensor(x[:, :, t], image).transform(g).tensor for t in range(2)]
        torch.testing.assert_close(turned, torch.stack(expected, 2), rtol=1e-5, atol=1e-5)


def test_a_group_that_moves_time_is_found():
    """A layer that mixes time with a component of a vector is not equivariant."""
    space = sequence_space(group.cyclic_group(4))
    vectors = FieldType(space, [space.irrep(1)])
    layer = GroupSelfAttention(vectors, vectors, 1, None, head_fields=2)
    forward = layer.plain.forward
    weights = torch.linspace(0, 1, 6) * torch.tensor([[1.0], [2.0]])
    layer.plain.forward = lambda x: forward(x * weights)
    assert equivariance_report(layer, (1, 2, 6)).relative_error > 1e-3


def test_subgroups():
    space = space_time(gspaces.flipRot2dOnR2(4))
    rotations, to_group, to_subgroup = space.restrict((None, 4))
    assert rotations == space_time(gspaces.rot2dOnR2(4))
    g = rotations.fibergroup.element(1)
    assert to_subgroup(to_group(g)) == g
    assert sequence_space(group.cyclic_group(6)).restrict(3)[0] == sequence_space(group.cyclic_group(3))


def test_bad_arguments():
    with pytest.raises(TypeError, match=r"group: .*group"):
        sequence_space(4)
    with pytest.raises(TypeError, match=r"gspace: .*gspace"):
        space_time(group.cyclic_group(4))
    space = SpaceTime(gspaces.rot2dOnR2(4))
    with pytest.raises(NotImplementedError, match="no steerable kernels"):
        space.build_kernel_basis(space.trivial_repr, space.trivial_repr, sigma=1.0, rings=[0.0])


def tokens_of(order=4):
    return fields_over(sequence_space(group.cyclic_group(order)))


def videos_of(make=IMAGES["C4"][0]):
    return fields_over(space_time(make()))


CAUSAL = {
    "all tokens": (tokens_of, (6,), {"kernel_size": None}),
    "four tokens": (tokens_of, (7,), {"kernel_size": 4}),
    "one token": (tokens_of, (3,), {"kernel_size": 1}),
    "every other token": (tokens_of, (8,), {"kernel_size": 3, "dilation": 2}),
    "more tokens than there are": (tokens_of, (3,), {"kernel_size": 8}),
    "all of a video": (videos_of, (3, 2, 2), {"kernel_size": None}),
    "a video": (videos_of, (5, 4, 3), {"kernel_size": 3}),
    "discs": (lambda: videos_of(lambda: gspaces.rot2dOnR2(3)), (4, 3, 3), {"kernel_size": 3}),
}


def causal_layer(name, encoding="mlp", **options):
    """The layer, and an input of random features."""
    make, shape, given = CAUSAL[name]
    fields = make()
    given = {"causal": True, **given, **options}
    layer = GroupSelfAttention(fields, fields, 2, encoding=encoding, head_fields=2, **given)
    return drawn(layer), random_field(fields, *shape)


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("encoding", ["none", "fourier", "mlp", "rotary", "absolute"])
@pytest.mark.parametrize("query", ["own", "all"])
@pytest.mark.sampled(12)
def test_no_output_depends_on_later_times(name, encoding, query):
    """By no backend: gradients are zeros, and a value that is not finite stays in the future."""
    layer, x = causal_layer(name, encoding, query=query)
    x.tensor.requires_grad_()
    expected = None
    for backend in ("reference", "blocked", *COMPILED):
        layer.plain.backend = backend
        y = layer(x).tensor
        expected = y if expected is None else expected
        assert_formula(y, expected, [x.tensor, *layer.parameters()], 1e-11, 1e-11)
        for t in range(1, x.shape[2]):
            (grad,) = torch.autograd.grad(layer(x).tensor[:, :, :t].square().sum(), x.tensor)
            assert not grad[:, :, t:].any()
            assert grad[:, :, t - 1].any()
            spoilt = x.tensor.detach().clone()
            spoilt[:, :, t:] = torch.nan
            earlier = layer(x.type(spoilt)).tensor
            assert (earlier[:, :, :t] - y[:, :, :t]).abs().max() < 1e-12
            assert earlier[:, :, t].isnan().all()


def test_other_layers_see_the_future():
    layer, x = causal_layer("four tokens", causal=False, kernel_size=3)
    x.tensor.requires_grad_()
    (grad,) = torch.autograd.grad(layer(x).tensor[:, :, :3].square().sum(), x.tensor)
    assert grad[:, :, 3:].any()


@pytest.mark.parametrize("name", CAUSAL)
def test_causal_attention_is_the_formula(name):
    layer, x = causal_layer(name)
    size, dilation = layer.plain.window.kernel_size, layer.plain.window.dilation
    reach = max(size - 1 if size else max(x.shape[2:]) - 1, 1)

    def steps(query, key):
        back, *along = ((b - a) / dilation for a, b in zip(query, key, strict=True))
        inside = size is None or (back > -size and sum(s * s for s in along) <= size**2 / 4)
        if layer.plain.window.form == "square":
            inside = size is None or (back > -size and all(abs(s) <= size // 2 for s in along))
        return [(back, *along)] if back <= 0 and inside and back == int(back) else []

    x.tensor.requires_grad_()
    expected = written_out(layer, x.tensor, steps, reach)
    assert_formula(layer(x).tensor, expected, [x.tensor, *layer.parameters()], 1e-11, 1e-11)


@pytest.mark.parametrize("name", ["four tokens", "all tokens", "a video", "discs"])
@pytest.mark.parametrize("encoding", ["fourier", "mlp", "rotary", "absolute", "convolutional"])
@pytest.mark.sampled(8)
def test_causal_attention_is_equivariant(name, encoding):
    if encoding == "convolutional" and name == "all tokens":
        encoding = ConvolutionalEncoding(width=3, reach=0.5)
    layer, x = causal_layer(name, encoding)
    if name.endswith("tokens"):
        assert equivariance_report(layer, tuple(x.shape)).relative_error < 1e-10
        return
    assert turned_error(layer, x) < 1e-10 if name == "discs" else grid_error(layer, x) < 1e-10
    layer.plain.inverse_action[:] = torch.eye(3)
    assert (turned_error(layer, x) if name == "discs" else grid_error(layer, x)) > 1e-4


def test_causal_attention_with_padding():
    """Tokens that a mask hides reach no others, and the rest are as without them."""
    layer, x = causal_layer("four tokens")
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[:, 5:] = mask[1, :2] = False
    y = layer(x, mask).tensor
    torch.testing.assert_close(y[0, :, :5], layer(x.type(x.tensor[:, :, :5])).tensor[0])
    torch.testing.assert_close(y[1, :, 2:5], layer(x.type(x.tensor[:, :, 2:5])).tensor[1])


def test_blocks_and_lifting_are_causal():
    fields = tokens_of()
    scalars = FieldType(fields.gspace, 3 * [fields.gspace.trivial_repr])
    lifting = LiftingSelfAttention(scalars, fields, 1, None, causal=True, head_fields=2)
    block = TransformerBlock(fields, fields, 1, 2, norm="pre", causal=True, head_fields=2)
    x = random_field(scalars, 6, dtype=torch.float32)
    x.tensor.requires_grad_()
    (grad,) = torch.autograd.grad(block(lifting(x)).tensor[:, :, 2].sum(), x.tensor)
    assert grad.abs().sum((0, 1)).nonzero().flatten().tolist() == [0, 1, 2]
    assert "causal=True" in repr(block)
    assert block.attention_maps(lifting(x), [(3,)])[..., 4:].sum() == 0


@pytest.mark.parametrize("name", ["four tokens", "all tokens"])
@pytest.mark.sampled(1, of="exported files")
def test_files_of_causal_attention(name, tmp_path):
    layer, x = causal_layer(name)
    check_files(layer.float().export(), x.tensor.float(), tmp_path)


def test_what_is_not_causal():
    plane = gspaces.rot2dOnR2(4)
    image, fields = (FieldType(plane, [plane.regular_repr]), tokens_of())
    with pytest.raises(ValueError, match=r"causal: got True.*sequence_space"):
        GroupSelfAttention(image, image, 1, 3, causal=True)
    with pytest.raises(TypeError, match=r"causal: .*bool|causal: .*True or False"):
        GroupSelfAttention(fields, fields, 1, 3, causal=1, head_fields=2)
    videos = videos_of()
    with pytest.raises(ValueError, match=r"kernel_size: got 4.*axes of space"):
        GroupSelfAttention(videos, videos, 1, 4, causal=True, head_fields=2)
    with pytest.raises(ValueError, match=r"kernel_size: got 4.*odd"):
        GroupSelfAttention(fields, fields, 1, 4, head_fields=2)
    with pytest.raises(ValueError, match=r"backend: 'dense' .*later times"):
        GroupSelfAttention(fields, fields, 1, None, causal=True, head_fields=2, backend="dense")(
            random_field(fields, 3, dtype=torch.float32)
        )
    assert set(ON_GRIDS.preference("cpu")) == {"native", "blocked", "linear"}


@pytest.mark.parametrize("encoding", ["mlp", "separable", "fourier", "rotary", "none"])
def test_sequences_of_continuous_groups(encoding):
    """Exact under the sampled rotations, whose relative poses every encoding tells apart, and for others nearly."""
    circle = gspaces.rot2dOnR2(-1).fibergroup
    space = sequence_space(circle)
    vectors = FieldType(space, 2 * [space.irrep(1)] + [space.trivial_repr])
    x = vectors(torch.randn(2, vectors.size, 5, dtype=torch.float64))

    def error(samples, angle):
        torch.manual_seed(0)
        options = {"kernel_size": 3, "head_fields": 4, "encoding": encoding, "samples": samples}
        layer = GroupSelfAttention(vectors, vectors, 2, **options).double()
        element = circle.element(angle)
        return (layer(x.transform(element)).tensor - layer(x).transform(element).tensor).norm().item()

    assert error(4, math.pi / 2) < 1e-12
    assert error(24, 0.3) < 0.1 * error(4, 0.3)
