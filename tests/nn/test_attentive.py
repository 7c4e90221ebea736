import pytest
import torch
import torch.nn.functional as F
from escnn import gspaces
from escnn.nn import FieldType, GeometricTensor, R2Conv

from escnn_attention.groups.fibers import fibers
from escnn_attention.nn.attentive import AttentiveConv, FeatureAttention, PoseAttention
from tests import spaces
from tests.layers import redrawn
from tests.nn.attentive import EXACT, PLANE, VARIANTS, VOLUME, input_of, layer_on

C4, D4 = gspaces.rot2dOnR2(4), gspaces.flipRot2dOnR2(4)


def attention_on(field_type, **options):
    """A layer with those of the options that its attention has."""
    options = {"kernel_size": 3, "channel": True, "spatial": True} | options
    absent = [] if options["channel"] else ["ratio"]
    absent += [] if options["spatial"] else ["kernel_size", "dilation", "basis"]
    return redrawn(FeatureAttention(field_type, **{n: v for n, v in options.items() if n not in absent}))


def planes(gspace, maps):
    """Spatial maps ``(B, poses, *space)`` as the field that they are."""
    kind = gspace.regular_repr if maps.shape[1] > 1 else gspace.trivial_repr
    return GeometricTensor(maps, FieldType(gspace, [kind]))


@pytest.mark.parametrize("residual", [True, False])
def test_the_published_conventions_of_group_layers(residual):
    """C4: both layers of channel attention are sums over the poses, and the spatial map is a group convolution."""
    module = attention_on(spaces.regular(C4, 4), residual=residual)
    first, second = module.plain.squeeze.weight.view(2, 4, 4), module.plain.excite.weight.view(4, 2, 4)
    psi = module.plain.spatial.weight.view(2, 4, 3, 3)
    x = input_of(module, 6)
    f = x.tensor.unflatten(1, (4, 4))

    def group(weight, s):
        return torch.stack([sum(s[..., j] @ weight[..., (j - i) % 4].T for j in range(4)) for i in range(4)], dim=-1)

    z = sum(group(second, group(first, s).relu()) for s in (f.flatten(3).mean(3), f.flatten(3).amax(3)))
    channel = z.sigmoid()
    g = channel[..., None, None] * f
    spatial = []
    for i in range(4):
        score = 0
        for j in range(4):
            statistics = torch.stack([g[:, :, j].mean(1), g[:, :, j].amax(1)], dim=1)
            score = score + F.conv2d(statistics, psi[:, (j - i) % 4].rot90(i, (-2, -1))[None], padding=1)
        spatial.append(score.sigmoid())
    spatial = torch.cat(spatial, dim=1)
    maps = module.attention_maps(x)
    torch.testing.assert_close(maps.channel, channel)
    torch.testing.assert_close(maps.spatial, spatial)
    alpha = channel[..., None, None] * spatial[:, None]
    expected = ((1 - alpha) if residual else alpha) * f
    torch.testing.assert_close(module(x).tensor, expected.flatten(1, 2))


def test_the_published_conventions_of_images():
    """Scalars for the channel, and the maximum over four turned kernels of dilation 4 for the positions."""
    image = spaces.scalars(C4, 1)
    module = attention_on(image, ratio=1, kernel_size=7, dilation=4)
    assert [tuple(p.shape) for p in module.plain.parameters()] == [(1, 1, 1), (1, 1, 1), (1, 2, 49)]
    w1, w2, psi = (p.detach() for p in module.plain.parameters())
    x = input_of(module, 28)
    f = x.tensor
    s = f.flatten(1).mean(1), f.flatten(1).amax(1)
    channel = sum((t * w1.item()).relu() * w2.item() for t in s).sigmoid().view(2, 1, 1, 1)
    g = channel * f
    kernel = torch.stack([psi.view(2, 7, 7).rot90(i, (-2, -1)) for i in range(4)])
    spatial = F.conv2d(torch.cat([g, g], 1), kernel, padding=12, dilation=4).amax(1, keepdim=True).sigmoid()
    torch.testing.assert_close(module(x).tensor, (1 - channel * spatial) * f)
    maps = module.attention_maps(x)
    torch.testing.assert_close(maps.channel, channel.view(2, 1, 1))
    torch.testing.assert_close(maps.spatial, spatial)


@pytest.mark.parametrize(("fields", "ratio", "hidden"), [(48, 16, 3), (96, 16, 6), (11, 5, 2), (3, 16, 1), (10, 1, 10)])
def test_the_hidden_layer(fields, ratio, hidden):
    module = FeatureAttention(spaces.scalars(C4, fields), ratio=ratio, spatial=False)
    assert module.plain.squeeze.weight.shape == (hidden, fields, 1)


@pytest.mark.parametrize("statistics", ["mean", "max", ("max", "mean")])
def test_statistics(statistics):
    module = attention_on(spaces.regular(C4, 2), statistics=statistics)
    x = input_of(module)
    assert spaces.grid_error(module, x) < EXACT
    number = 1 if isinstance(statistics, str) else 2
    assert module.plain.spatial.weight.shape[1] == number
    # What the other one would see does not matter: a spike changes the maximum, its opposite the mean.
    if statistics == "max":
        lower = x.tensor.clone()
        lower[0, :, 2, 2] -= 100.0
        before, after = (module.attention_maps(module.in_type(t)).channel for t in (x.tensor, lower))
        assert torch.equal(before, after) == torch.equal(x.tensor.amax((2, 3)), lower.amax((2, 3)))


@pytest.mark.parametrize(
    "make",
    [
        lambda gspace: attention_on(spaces.regular(gspace, 3), kernel_size=1),
        lambda gspace: layer_on(gspace, (2, 2), size=1, attention_size=1),
    ],
    ids=["FeatureAttention", "AttentiveConv"],
)
def test_elements_between_the_points_act_on_the_fibers(make):
    """All of C8 where space plays no part: kernels of one place on a constant field."""
    gspace = gspaces.rot2dOnR2(8)
    layer = make(gspace)
    x = layer.in_type(torch.randn(2, layer.in_type.size, 1, 1).double().expand(-1, -1, 3, 3))
    y = layer(x)
    for g in gspace.fibergroup.elements:
        turned, expected = (t.transform_fibers(g) for t in (x, y))
        torch.testing.assert_close(layer(turned).tensor, expected.tensor, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(
    ("layer", "part"),
    [
        *(("FeatureAttention", part) for part in ("squeeze", "excite", "spatial")),
        ("PoseAttention", "weight"),
        *(("AttentiveConv", part) for part in ("squeeze", "excite", "spatial")),
    ],
)
def test_theorem_1_an_attention_operator_that_is_not_equivariant_breaks_it(layer, part):
    fields = spaces.regular(C4, 2)
    module = {
        "FeatureAttention": lambda: attention_on(fields),
        "PoseAttention": lambda: pose_attention_on(fields),
        "AttentiveConv": lambda: layer_on(C4),
    }[layer]()
    x = input_of(module)
    assert spaces.grid_error(module, x) < EXACT
    operator = getattr(module.plain, part)
    places = torch.randperm(operator.orbits.numel())
    operator.orbits = operator.orbits.flatten()[places].view_as(operator.orbits)
    assert spaces.grid_error(module, x) > (1e-3 if part == "weight" else 1e-4)
    if layer == "AttentiveConv":  # the convolution under the attention is the same and equivariant
        module.plain.squeeze = module.plain.excite = module.plain.spatial = None
        assert spaces.grid_error(module, x) < EXACT


@pytest.mark.parametrize("kind", [spaces.regular, spaces.scalars])
def test_attention_maps_are_equivariant(kind):
    module, of_poses = attention_on(kind(D4, 2)), pose_attention_on(kind(D4, 2))
    x = input_of(module)
    maps, group = module.attention_maps(x), fibers(D4)
    for n, g in enumerate(group.elements):
        turned = module.attention_maps(x.transform(g))
        channel = maps.channel[..., group.quotient[n]] if maps.channel.shape[-1] > 1 else maps.channel
        torch.testing.assert_close(turned.channel, channel)
        torch.testing.assert_close(turned.spatial, planes(D4, maps.spatial).transform(g).tensor)
        expected = planes(D4, of_poses.attention_maps(x)).transform(g).tensor
        torch.testing.assert_close(of_poses.attention_maps(x.transform(g)), expected)


@pytest.mark.parametrize(("variant", "present"), [("full", (1, 1)), ("channel", (1, 0)), ("spatial", (0, 1))])
def test_shapes_of_the_maps(variant, present):
    gspace = gspaces.flipRot2dOnR2(2)
    for layer, shapes in (
        (attention_on(spaces.regular(gspace, 3), **VARIANTS[variant]), ((2, 3, 4), (2, 4, 5, 5))),
        (layer_on(gspace, (3, 2), padding=1, **VARIANTS[variant]), ((2, 2, 4, 3, 4), (2, 2, 4, 4, 5, 5))),
    ):
        maps = layer.attention_maps(input_of(layer, 5))
        found = [m if m is None else tuple(m.shape) for m in maps]
        assert found == [s if p else None for s, p in zip(shapes, present, strict=True)]
        assert all(((m > 0) & (m < 1)).all() for m in maps if m is not None)


def test_gradients():
    fields = spaces.regular(gspaces.rot2dOnR2(2), 2)
    for module in (attention_on(fields), pose_attention_on(fields)):
        x = input_of(module, 3, batch=1).tensor.requires_grad_()
        torch.autograd.gradcheck(module.plain, (x,))
        torch.autograd.gradgradcheck(module.plain, (x,))


LAYERS = [FeatureAttention, PoseAttention, lambda fields: AttentiveConv(fields, fields, 3)]


@pytest.mark.parametrize("layer", LAYERS)
def test_mistakes(layer):
    gspace, continuous = C4, gspaces.rot2dOnR2(-1)
    fields = spaces.regular(gspace, 2)
    for error, message, in_type in (
        (TypeError, "in_type: got str", "fields"),
        (ValueError, "in_type: .*fields only", spaces.mixed(gspace)),
        (NotImplementedError, "in_type: .*, which is continuous", FieldType(continuous, [continuous.trivial_repr])),
    ):
        with pytest.raises(error, match=message):
            layer(in_type)
    module, x = layer(fields), spaces.random_field(fields, 5, 5)
    for call in (module, module.attention_maps):
        with pytest.raises(TypeError, match=r"input: .*are float32"):
            call(x)


def test_mistakes_of_feature_attention():
    fields = spaces.regular(C4, 2)
    for in_type, message in (
        (FieldType(C4, [C4.quotient_repr(2)]), "in_type: FeatureAttention .* got quotient"),
        (spaces.regular(spaces.POINT["D4 on a point"](), 1), "in_type: .*3 dimensions"),
    ):
        with pytest.raises(ValueError, match=message):
            FeatureAttention(in_type)
    for error, message, options in (
        (ValueError, "channel, spatial: .*for both", {"channel": False, "spatial": False}),
        (ValueError, "kernel_size: .*needed an odd", {"kernel_size": 6}),
        *((ValueError, f"{name}: got 0, needed at least 1", {name: 0}) for name in ("ratio", "dilation")),
        (ValueError, "statistics: .*needed one of", {"statistics": ["median"]}),
        *((ValueError, "statistics: .*'mean', 'max'", {"statistics": some}) for some in ((), ("mean", "mean"))),
        (TypeError, "statistics: .*needed 'mean', 'max'", {"statistics": 2}),
        (ValueError, "basis: got 'all'", {"basis": "all"}),
        *(
            (TypeError, f"{name}: got 'yes', needed True or False", {name: "yes"})
            for name in ("channel", "spatial", "residual")
        ),
        (ValueError, "ratio: got 7, but there is no channel attention; leave it", {"channel": False, "ratio": 7}),
        *(
            (ValueError, f"{name}: got {value!r}, but there is no spatial attention", {"spatial": False, name: value})
            for name, value in (("kernel_size", 9), ("dilation", 2), ("basis", "bandlimited"))
        ),
    ):
        with pytest.raises(error, match=message):
            FeatureAttention(fields, **options)


def pose_attention_on(field_type, **options):
    module = PoseAttention(field_type, **options)
    with torch.no_grad():
        module.plain.weight.weight.normal_()
    return module.double()


@pytest.mark.parametrize("residual", [True, False])
def test_the_formula_for_a_cyclic_group(residual):
    """Co-attention (Romero and Hoogendoorn 2020): a circulant matrix over the poses, at every position."""
    module = pose_attention_on(spaces.regular(C4, 3), residual=residual)
    x = input_of(module, 5)
    f = x.tensor.unflatten(1, (3, 4))
    weight = module.plain.weight.weight[0]  # fields, relative poses
    circulant = torch.stack([weight.roll(i, 1) for i in range(4)], dim=1)  # fields, output poses, input poses
    alpha = torch.einsum("cij,bcjxy->bixy", circulant, f).sigmoid()
    torch.testing.assert_close(module.attention_maps(x), alpha)
    expected = (1 - alpha if residual else alpha).unsqueeze(1) * f
    torch.testing.assert_close(module(x).tensor, expected.flatten(1, 2))


def test_a_residual_branch_is_there_or_not():
    with pytest.raises(TypeError, match=r"residual: .*needed True or"):
        PoseAttention(spaces.regular(C4, 1), residual=1)


@pytest.mark.parametrize("kinds", [("regular", "regular"), ("trivial", "regular"), ("regular", "trivial")])
def test_without_attention_it_is_the_convolution_of_escnn(kinds):
    layer = layer_on(C4, (2, 3), kinds, channel=False, spatial=False, padding=1)
    theirs = R2Conv(layer.in_type, layer.out_type, 3, padding=1, initialize=False).eval()
    theirs.filter = layer.plain.kernel().flatten(0, 1).flatten(1, 2).detach().float()
    with torch.no_grad():
        theirs.expanded_bias.zero_()
        layer.plain.bias.zero_()
    x = input_of(layer, dtype=torch.float32)
    torch.testing.assert_close(theirs(x).tensor, layer.float()(x).tensor, atol=1e-4, rtol=1e-4)


TORI = {
    "full": lambda g, mode: layer_on(g, padding=1, **mode),
    "a stride": lambda g, mode: layer_on(g, size=2, stride=2, residual=False, **mode),
    "dilated": lambda g, mode: layer_on(g, dilation=2, padding=2, attention_dilation=2, attention_size=5, **mode),
    "none": lambda g, mode: layer_on(g, padding=1, **VARIANTS["none"], **mode),
    "features": lambda g, mode: attention_on(spaces.regular(g, 2), dilation=2, **mode),
    "of an image": lambda g, mode: attention_on(spaces.scalars(g, 2), channel=False, **mode),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", TORI)
@pytest.mark.parametrize("space", [PLANE["D4"](), VOLUME["C4 3D"](), PLANE["C2"]()], ids=["D4", "C4 3D", "C2"])
@pytest.mark.slow
def test_tori(name, space):
    """Exact under all rolls and all elements; padded with zeros, not."""
    shape = spaces.shape_of(space, 4)
    for mode, exact in (("circular", True), ("zeros", False)):
        layer = TORI[name](space, {"padding_mode": mode})
        assert mode == "zeros" or f"padding_mode={mode!r}" in repr(layer)
        x, step = input_of(layer, 4, batch=1), 2 if name == "a stride" else 1
        axes, y = tuple(range(2, 2 + len(shape))), layer(x).tensor
        rolled = layer(layer.in_type(x.tensor.roll([step] * len(axes), axes))).tensor
        error = (rolled - y.roll([1] * len(axes), axes)).abs().max()
        assert spaces.grid_error(layer, x) < EXACT
        assert error < EXACT if exact else error > 1e-4
    layer = TORI[name](space, {"padding_mode": "circular"}).export()
    program = torch.export.export(layer, (x.tensor,))
    torch.testing.assert_close(program.module()(x.tensor), layer(x.tensor))


def test_what_is_no_torus():
    fields, torus = spaces.regular(C4, 1), {"padding_mode": "circular"}
    of_eight = spaces.regular(gspaces.rot2dOnR2(8), 1)
    for make, message in (
        (lambda: AttentiveConv(of_eight, of_eight, 3, padding=1, **torus), "padding_mode: .*subgroup of D4"),
        (lambda: FeatureAttention(of_eight, **torus), "padding_mode: .*subgroup of D4"),
        (lambda: FeatureAttention(fields, padding_mode="none"), "padding_mode: got 'none', needed one of"),
        (lambda: FeatureAttention(fields, spatial=False, **torus), "padding_mode: .*no spatial"),
        (lambda: AttentiveConv(fields, fields, 3, **torus), "padding: got 0 .*here 1"),
        (lambda: AttentiveConv(fields, fields, 3, padding=1, stride=2, **torus), "padding: got 1 .*here 0.5"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
    layer = layer_on(C4, size=2, stride=2, **torus)
    with pytest.raises(ValueError, match=r"input: .*the stride, 2"):
        layer(input_of(layer, 5))


def test_attention_maps_are_equivariant_attentive_conv():
    layer = layer_on(D4, (2, 1), padding=1)
    x = input_of(layer, 4)
    maps = layer.attention_maps(x)
    group = fibers(D4)
    for n, g in enumerate(group.elements):
        back = group.quotient[n]  # the index of g⁻¹h
        turned = layer.attention_maps(x.transform(g))
        torch.testing.assert_close(turned.channel, maps.channel[:, :, back][..., back])
        planes = FieldType(D4, 64 * [D4.trivial_repr])(maps.spatial[:, 0].flatten(1, 2)).transform(g)
        expected = planes.tensor.unflatten(1, (8, 8))[:, back][:, :, back]
        torch.testing.assert_close(turned.spatial[:, 0], expected)


def test_mistakes_of_attentive_convolutions():
    fields, vectors = spaces.regular(C4, 2), FieldType(C4, [C4.irrep(1)])
    point = spaces.regular(spaces.POINT["D4 on a point"](), 1)
    for types, message in (
        ((fields, fields + vectors), "out_type: .*regular .*trivial"),
        ((fields, spaces.regular(gspaces.rot2dOnR2(8), 1)), "out_type: .*is C8"),
        ((point, point), "in_type: .*3 dimensions"),
    ):
        with pytest.raises(ValueError, match=message):
            AttentiveConv(*types, 1)
    least = {"ratio": 0, "stride": 0, "dilation": 0, "padding": -1, "attention_dilation": 0}
    for error, message, options in (
        *((ValueError, f"{name}: got {value}, needed at least", {name: value}) for name, value in least.items()),
        (ValueError, "attention_size: .*needed an odd", {"attention_size": 4}),
        (ValueError, "basis: got 'full'", {"basis": "full"}),
        *(
            (TypeError, f"{name}: got 'no', needed True or False", {name: "no"})
            for name in ("channel", "spatial", "bias", "residual")
        ),
        *(
            (ValueError, f"{name}: got {value}, but there is no .*; leave it at", {**off, name: value})
            for off, name, value in (
                ({"channel": False}, "ratio", 7),
                ({"spatial": False}, "attention_size", 9),
                ({"spatial": False}, "attention_dilation", 2),
                (VARIANTS["none"], "residual", False),
            )
        ),
    ):
        with pytest.raises(error, match=message):
            AttentiveConv(fields, fields, 3, **options)
    with pytest.raises(ValueError, match=r"input: .*which cov"):
        AttentiveConv(fields, fields, 5)(spaces.random_field(fields, 4, 6, dtype=torch.float32))
