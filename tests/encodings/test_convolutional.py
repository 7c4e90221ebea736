"""Attention that begins as a convolution."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from escnn import gspaces
from escnn.group import cyclic_group

from escnn_attention import (
    AbsoluteEncoding,
    ConvolutionalEncoding,
    DilationSelfAttention,
    GroupSelfAttention,
    LiftingSelfAttention,
    MLPEncoding,
    PointSelfAttention,
    QuadraticEncoding,
    RotaryEncoding,
    Scales,
    SeparableEncoding,
)
from escnn_attention.geometry.grid import Grid
from escnn_attention.groups.spaces import OwnSpace
from escnn_attention.models import GSANet
from tests import spaces
from tests.spaces import mixed, random_field, regular, scalars

SPACES = spaces.PLANE | {name: spaces.VOLUME[name] for name in ("mirror", "C4 3D", "inversion")}
OCTAHEDRAL = spaces.VOLUME["octahedral"]
SHARP = 60.0
EXACT = 1e-10


def layer_on(space, width=3, *, lifting=False, heads=4, head_fields=4, encoding=None, **options):
    encoding = ConvolutionalEncoding(sharpness=SHARP) if encoding is None else encoding
    out_type = mixed(space)
    in_type, make = (scalars(space, 2), LiftingSelfAttention) if lifting else (out_type, GroupSelfAttention)
    return make(in_type, out_type, heads, width, head_fields=head_fields, encoding=encoding, **options).double()


def kernel_of(layer, width):
    """The kernel on the orbits of the places, K(hc) = ρ_out(h) Wᵒ Wᵛ ρ_in(h)⁻¹, written out."""
    plain, encoding = layer.plain, layer.plain.encoding
    rho_in, rho_out = layer.in_type.representation, layer.out_type.representation
    reads = plain.project_in.weight.unflatten(0, (3, layer.num_heads, layer.head_fields))[1]
    writes = plain.project_out.weight.unflatten(0, (layer.num_heads, layer.head_fields))
    radius, dim = width // 2, layer.space.dimensionality
    kernel = torch.zeros(layer.out_type.size, layer.in_type.size, *dim * [width], dtype=torch.float64)
    for h in layer.space.fibergroup.elements:
        act = torch.from_numpy(layer.space.basespace_action(h)).double()
        out, back = (torch.from_numpy(m).double() for m in (rho_out(h), rho_in(~h)))
        for place, read, write in zip(encoding.centre.detach(), reads, writes, strict=True):
            x, *others = (radius * (act @ place)).round().long().tolist()
            # x grows along the last axis, the others decrease along the axes before it.
            index = (*(radius - y for y in reversed(others)), radius + x)
            kernel[(..., *index)] += out @ write.T @ read @ back
    return kernel


class Line(OwnSpace):
    """The line and its reflection, which escnn has no gspace for."""

    def __init__(self):
        super().__init__(cyclic_group(2).irrep(1), "the line")


def convolved(kernel, x):
    return {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[kernel.dim() - 2](x, kernel)


def inside(y, radius):
    return y[(..., *(y.dim() - 2) * [slice(radius, -radius)])]


def difference(layer, width, x):
    """The relative difference of a layer from the convolution with its kernel, away from the border."""
    expected = convolved(kernel_of(layer, width), x.tensor)
    if layer.plain.query == "all":
        expected = expected * len(list(layer.space.fibergroup.elements)) * layer.plain.query_weight
    return ((inside(layer(x).tensor, width // 2) - expected).norm() / expected.norm()).item()


OPTIONS = {
    "own": {},
    "own keys": {"keys": "own"},
    "all queries": {"query": "all"},
    "lifting": {"lifting": True},
    "another encoding": {"encoding": ConvolutionalEncoding(MLPEncoding(), sharpness=SHARP)},
    "separable": {"encoding": ConvolutionalEncoding(SeparableEncoding(), sharpness=SHARP), "head_fields": 6},
}
ON_THE_GRID = [name for name in SPACES if name not in ("C3", "C8", "D3", "D6") and "odd" not in name]


@pytest.mark.sampled
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", ON_THE_GRID)
def test_it_is_a_convolution_on_the_orbits_of_places(name, options):
    layer = layer_on(SPACES[name](), **OPTIONS[options])
    x = random_field(layer.in_type, *spaces.shape_of(layer.space, 5), batch=1)
    assert difference(layer, 3, x) < EXACT
    # The control: the encoding sees other places than the formula takes.
    wrong = copy.deepcopy(layer)
    with torch.no_grad():
        wrong.plain.encoding.centre.copy_(layer.plain.encoding.centre.roll(1, 0))
    assert (wrong(x).tensor - layer(x).tensor).norm() > 1e-2 * layer(x).tensor.norm()


def test_it_is_a_convolution_for_the_octahedral_group():
    layer = layer_on(OCTAHEDRAL(), keys="own")
    assert len(layer.plain.encoding.centre.unique(dim=0)) == 4  # every orbit of 3 × 3 × 3
    assert difference(layer, 3, random_field(layer.in_type, 3, 4, 3, batch=1)) < EXACT


@pytest.mark.parametrize("options", [{}, {"keys": "own"}, {"lifting": True}], ids=str)
def test_it_is_a_convolution_on_the_line(options):
    layer = layer_on(Line(), 5, heads=3, **options)
    assert layer.plain.encoding.centre.abs().flatten().tolist() == [0.0, 0.5, 1.0]
    x = random_field(layer.in_type, 11)
    assert difference(layer, 5, x) < EXACT
    flipped = layer.in_type.transform_fibers(x.tensor.flip(2), layer.space.fibergroup.element(1))
    y = layer.out_type.transform_fibers(layer(x).tensor.flip(2), layer.space.fibergroup.element(1))
    torch.testing.assert_close(layer(layer.in_type(flipped)).tensor, y, rtol=EXACT, atol=EXACT)
    # The control: a reflection that leaves the channels alone.
    assert (layer(layer.in_type(x.tensor.flip(2))).tensor - layer(x).tensor.flip(2)).abs().max() > 1e-2


@pytest.mark.parametrize("width", [1, 5])
def test_it_is_a_convolution_in_windows_of_other_widths(width):
    layer = layer_on(gspaces.rot2dOnR2(4), width, heads=7)
    x = random_field(layer.in_type, width + 2, width + 3, batch=1)
    padded = layer.in_type(F.pad(x.tensor, 4 * [1])) if width == 1 else x
    if width == 1:
        expected = convolved(kernel_of(layer, 1), padded.tensor)
        torch.testing.assert_close(layer(padded).tensor, expected, rtol=EXACT, atol=EXACT)
    else:
        assert difference(layer, width, x) < EXACT
        # All heads together have a kernel that vanishes nowhere, and with a head less it does.
        assert (kernel_of(layer, width).abs().amax((0, 1)) > 0).all()
        fewer = layer_on(gspaces.rot2dOnR2(4), width, heads=6)
        assert not (kernel_of(fewer, width).abs().amax((0, 1)) > 0).all()


def test_places_and_poses_where_the_projections_tell_none_apart():
    """Mixing fields only, head m reads f(x + hc, hp) at the place c and the pose p that it has of all."""
    space = gspaces.rot2dOnR2(4)
    fields = regular(space, 2)
    encoding = ConvolutionalEncoding(sharpness=SHARP)
    layer = GroupSelfAttention(fields, fields, 9, 3, head_fields=2, encoding=encoding, projection="pointwise").double()
    x = random_field(fields, 5, 5, batch=1)
    of_poses = x.tensor.unflatten(1, (2, 4))
    elements = space.fibergroup.elements
    v = layer.plain.project_in.weight.unflatten(0, (3, 9, 2))[1]
    w = layer.plain.project_out.weight.unflatten(1, (9, 2))
    expected = torch.zeros(1, 2, 4, 3, 3, dtype=torch.float64)
    seen = layer.plain.encoding
    poses = seen.pose_preference.argmax(1).tolist()
    assert len(set(poses)) == 4
    for i, h in enumerate(elements):
        act = torch.from_numpy(space.basespace_action(h)).double()
        for m, (place, pose) in enumerate(zip(seen.centre.detach(), poses, strict=True)):
            dx, dy = (act @ place).round().long().tolist()
            of_pose = of_poses[:, :, elements.index(h @ elements[pose]), 1 - dy : 4 - dy, 1 + dx : 4 + dx]
            expected[:, :, i] += torch.einsum("oc,ci,bixy->boxy", w[:, m], v[m], of_pose)
    found = inside(layer(x).tensor, 1).unflatten(1, (2, 4))
    torch.testing.assert_close(found, expected, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("name", ["C4", "D4", "C8", "mirror"])
def test_at_any_sharpness_it_is_linear_and_steered(name):
    """A Gaussian for each place: the kernel has ρ_out(h) K(Δ) ρ_in(h)⁻¹ at hΔ."""
    space = SPACES[name]()
    layer = layer_on(space, encoding=ConvolutionalEncoding(sharpness=1.5))
    x, y = (random_field(layer.in_type, *spaces.shape_of(space, 5), batch=1) for _ in range(2))
    both = layer(layer.in_type(x.tensor + 2 * y.tensor)).tensor
    torch.testing.assert_close(both, layer(x).tensor + 2 * layer(y).tensor, rtol=EXACT, atol=EXACT)
    assert spaces.grid_error(layer, x) < EXACT
    # The control: with a share of the content it is not linear.
    other = layer_on(space, encoding=ConvolutionalEncoding(sharpness=1.5, content=1.0))
    both = other(layer.in_type(x.tensor + 2 * y.tensor)).tensor
    assert (both - other(x).tensor - 2 * other(y).tensor).abs().max() > 1e-2


def scores_written_out(layer, x, query, pose):
    """s_h(x; x', ĥ) for one head after another, number by number, at a query in the middle of its own pose."""
    plain, encoding, space = layer.plain, layer.plain.encoding, layer.space
    elements = list(space.fibergroup.elements)
    h = elements[pose]
    back = torch.from_numpy(space.basespace_action(~h)).double()
    channels = layer.head_fields
    weights = plain.project_in.weight.unflatten(0, (3, layer.num_heads, channels))
    bias = plain.project_in.bias.unflatten(0, (2, layer.num_heads, channels))[0]
    rho = layer.in_type.representation
    offsets = Grid((1, 1), plain.window).offsets
    found = []
    for m in range(layer.num_heads):
        q = weights[0, m] @ torch.from_numpy(rho(~h)).double() @ x[(0, slice(None), *query)] + bias[m]
        of_head = []
        for other in elements:
            frame = torch.from_numpy(rho(~other)).double()
            relative = elements.index(~h @ other)
            for delta in offsets:
                at = (query[0] - round(delta[1].item()), query[1] + round(delta[0].item()))
                k = weights[2, m] @ frame @ x[(0, slice(None), *at)]
                seen = back @ delta
                content = q @ k / math.sqrt(channels)
                place = -encoding.sharpness[m] * (seen - encoding.centre[m]).square().sum()
                place = place + encoding.pose_preference[m, relative]
                rest = encoding.rest.offsets(seen[None])[m, 0] + encoding.rest.poses()[m, relative]
                of_head.append(content + q[0] * place + q[1:] @ rest / math.sqrt(channels))
        found.append(torch.stack(of_head).softmax(0))
    return torch.stack(found).unflatten(1, (len(elements), -1))


def disturbed(layer):
    """The layer with parameters that are nothing in particular."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return layer


def test_the_formula():
    layer = disturbed(layer_on(gspaces.flipRot2dOnR2(2), heads=2, encoding=ConvolutionalEncoding(MLPEncoding())))
    x = random_field(layer.in_type, 5, 5, batch=1)
    for pose in (0, 3):
        maps = layer.attention_maps(x, [(2, 2)], poses=[pose])[0, :, 0, 0, 0]  # heads, key poses, space
        expected = scores_written_out(layer, x.tensor, (2, 2), pose)
        # Offsets go through the window row by row.
        torch.testing.assert_close(maps[..., 1:4, 1:4].flatten(2), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "options", [{}, {"query": "all"}, {"keys": "own"}, {"lifting": True}, {"width": None}], ids=str
)
@pytest.mark.parametrize("backend", ["blocked", "native", "dense", "auto"])
def test_every_backend_gives_the_formula(backend, options):
    options = {"width": 3, **options}
    if backend == "dense" and options["width"] is None:
        pytest.skip("dense attention to the whole grid is for encodings that factorise")
    encoding = ConvolutionalEncoding(
        MLPEncoding(), content=1.0, **({"width": 3, "reach": 0.25} if options["width"] is None else {})
    )
    layer = disturbed(layer_on(gspaces.flip2dOnR2(), heads=2, encoding=encoding, **options))
    x = random_field(layer.in_type, 5, 6)

    def values_and_gradients(backend):
        layer.plain.backend = backend
        y = layer(x).tensor
        return y, *torch.autograd.grad(y.square().sum(), list(layer.parameters()))

    for got, expected in zip(values_and_gradients(backend), values_and_gradients("reference"), strict=True):
        torch.testing.assert_close(got, expected)
        assert expected.abs().max() > 1e-5


@pytest.mark.sampled
@pytest.mark.parametrize("options", [{}, {"query": "all"}, {"keys": "own"}, {"lifting": True}], ids=str)
@pytest.mark.parametrize("window", [{"width": None}, {"width": 3}, {"width": 3, "dilation": 2}, {"width": 1}], ids=str)
@pytest.mark.parametrize("name", SPACES)
def test_equivariant(name, window, options):
    lattice = {"width": 3, "reach": 0.3} if window["width"] is None else {}
    layer = disturbed(
        layer_on(SPACES[name](), heads=2, encoding=ConvolutionalEncoding(MLPEncoding(), **lattice), **window, **options)
    )
    assert spaces.grid_error(layer, random_field(layer.in_type, *spaces.shape_of(layer.space, 4))) < EXACT


def test_equivariant_for_the_octahedral_group():
    layer = disturbed(layer_on(OCTAHEDRAL(), heads=2, keys="own", encoding=ConvolutionalEncoding()))
    x = random_field(layer.in_type, 3, 3, 3, batch=1)
    assert spaces.grid_error(layer, x) < EXACT
    # The control: a table of the group that is wrong.
    layer.plain.inverse_action[:] = layer.plain.inverse_action.roll(1, 0)
    assert spaces.grid_error(layer, x) > 1e-3


def test_it_learns_what_else_to_look_at():
    """The gradients of what is there from the beginning are not 0, and after a step none are."""
    layer = layer_on(gspaces.rot2dOnR2(4), encoding=ConvolutionalEncoding(MLPEncoding()))
    x = random_field(layer.in_type, 6, 6)
    wanted = torch.randn_like(layer(x).tensor)
    optimiser = torch.optim.Adam(layer.parameters(), lr=1e-2)
    encoding = layer.plain.encoding
    losses = []
    for step in range(20):
        optimiser.zero_grad()
        loss = (layer(x).tensor - wanted).square().mean()
        loss.backward()
        losses.append(loss.item())
        first = [encoding.centre, encoding.sharpness, encoding.pose_preference, layer.plain.project_in.weight]
        assert all(p.grad.abs().max() > 1e-6 for p in (first if step == 0 else layer.parameters()))
        queries = layer.plain.project_in.weight.grad.chunk(3)[0]
        assert queries.abs().max() > 1e-6
        optimiser.step()
    assert losses[-1] < losses[0]
    assert spaces.grid_error(layer, x) < EXACT


def test_a_network_of_the_paper_begins_with_convolutions():
    g = gspaces.rot2dOnR2(4)
    block = {"encoding": ConvolutionalEncoding()}
    network = GSANet(g, 1, 3, channels=6, blocks=(1,), num_heads=2, kernel_size=3, block=block)
    plain = network.stages["attention_1_1"][0].attention.plain
    assert not plain.project_in.weight.chunk(3)[0].any()
    assert plain.project_in.bias.chunk(2)[0].view(2, -1)[:, 0].tolist() == [1.0, 1.0]
    assert plain.project_in.weight.chunk(3)[2].any()


def test_lifting_has_no_table_of_poses():
    g = gspaces.rot2dOnR2(4)
    lifting = LiftingSelfAttention(scalars(g, 1), regular(g, 4), 2, 3, encoding="convolutional")
    assert not [name for name, _ in lifting.named_parameters() if "pose" in name]
    assert "ConvolutionalEncoding(sharpness=" in repr(lifting)


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (TypeError, "encoding: got str", {"encoding": "mlp"}),
        (ValueError, "encoding: got RotaryEncoding, needed one that is added", {"encoding": RotaryEncoding()}),
        (ValueError, "encoding: got AbsoluteEncoding", {"encoding": AbsoluteEncoding()}),
        (ValueError, "sharpness: got 0, needed a positive number", {"sharpness": 0}),
        (ValueError, r"sharpness: got 10000000.0, needed at most 1e\+06", {"sharpness": 1e7}),
        (ValueError, "content: got -1", {"content": -1}),
        (ValueError, "content: got 'much'", {"content": "much"}),
        (ValueError, "width: got 4, needed an odd number", {"width": 4}),
        (ValueError, "reach: got 0, needed a positive length", {"reach": 0}),
        (ValueError, "reach: got 2, needed at most 1", {"reach": 2}),
    ],
)
def test_bad_arguments(error, message, arguments):
    with pytest.raises(error, match=message):
        ConvolutionalEncoding(**arguments)


def test_layers_that_cannot_begin_as_a_convolution():
    g = gspaces.rot2dOnR2(4)
    fields = regular(g, 4)
    with pytest.raises(ValueError, match="bias: got False"):
        GroupSelfAttention(fields, fields, 2, 3, encoding="convolutional", bias=False)
    with pytest.raises(ValueError, match=r"needs 2 channels.*head_fields"):
        GroupSelfAttention(fields, fields, 4, 3, encoding="convolutional")
    with pytest.raises(ValueError, match="width, reach: got None"):
        GroupSelfAttention(fields, fields, 2, encoding="convolutional", kernel_size=None)
    nowhere = "needs a layer on a grid with a finite fiber group"
    with pytest.raises(ValueError, match=nowhere):
        PointSelfAttention(fields, fields, 2, encoding="convolutional")
    scales = Scales(2)
    with pytest.raises(ValueError, match=nowhere):
        DilationSelfAttention(*2 * [scales.repeat(fields)], scales, 2, 3, encoding="convolutional")
    turning = gspaces.rot2dOnR2(-1)
    disc = scalars(turning, 4)
    with pytest.raises(ValueError, match=nowhere):
        GroupSelfAttention(disc, disc, 2, 3, head_fields=2, encoding="convolutional", samples=4)
    encoding = ConvolutionalEncoding(QuadraticEncoding())
    layer = GroupSelfAttention(fields, fields, 1, 3, encoding=encoding)
    with pytest.raises(ValueError, match="belongs to a layer already"):
        GroupSelfAttention(fields, fields, 1, 3, encoding=layer.plain.encoding)
