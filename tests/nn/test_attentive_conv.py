import copy
import io

import pytest
import torch
import torch.nn.functional as F
from escnn import gspaces
from escnn.nn import FieldType, R2Conv
from hypothesis import given
from hypothesis import strategies as st

from escnn_attention import equivariance_report, working_memory
from escnn_attention.functional.convolutions import attentive, responses
from escnn_attention.groups.fibers import fibers
from escnn_attention.nn.attentive_conv import AttentiveConv
from escnn_attention.nn.feature_attention import FeatureAttention
from escnn_attention.nn.kernels import complete_basis, fit_kernel
from escnn_attention.nn.pose_attention import PoseAttention
from tests import spaces

EXACT = 1e-12
PLANE = {n: spaces.PLANE[n] for n in ("trivial", "flip", "C2", "C4", "C8", "D3", "D4")}
VOLUME = {n: spaces.VOLUME[n] for n in ("trivial 3D", "mirror", "C4 3D")}
VARIANTS = {
    "full": {},
    "channel": {"spatial": False},
    "spatial": {"channel": False},
    "none": {"channel": False, "spatial": False},
}


def drawn(module, scale=1.0):
    """Weights so large that the maps are far from 1/2."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=scale)
    return module.double()


def layer_on(gspace, fields=(2, 2), kinds=("regular", "regular"), size=3, **options):
    """A layer with those of the options that its attention has."""
    make = {"regular": spaces.regular, "trivial": spaces.scalars}
    types = [make[k](gspace, n) for k, n in zip(kinds, fields, strict=True)]
    options = {"attention_size": 3, "ratio": 1, "channel": True, "spatial": True} | options
    absent = [] if options["channel"] else ["ratio"]
    absent += [] if options["spatial"] else ["attention_size", "attention_dilation"]
    absent += [] if options["channel"] or options["spatial"] else ["residual"]
    return drawn(AttentiveConv(*types, size, **{n: v for n, v in options.items() if n not in absent}), 0.5)


def input_of(layer, size=5, **options):
    return spaces.random_field(layer.in_type, *spaces.shape_of(layer.in_type.gspace, size), **options)


def written_out(layer, x):
    """The formula, one output field and one pair of poses at a time, with all responses at once."""
    plain, gspace = layer.plain, layer.in_type.gspace
    group = fibers(gspace)
    kernel = plain.kernel()
    outs, out_poses, ins, in_poses = kernel.shape[:4]
    conv = [F.conv2d, F.conv3d][gspace.dimensionality - 2]
    x = x.unflatten(1, (ins, in_poses))
    shared = min(out_poses, in_poses) == 1
    rows = []
    for c in range(outs):
        poses = []
        for h in range(out_poses):
            total = 0
            for g in range(in_poses):
                f = torch.cat(
                    [
                        conv(
                            x[:, i, g, None],
                            kernel[c, h, i, g][None, None],
                            stride=plain.stride,
                            padding=plain.padding,
                            dilation=plain.dilation,
                        )
                        for i in range(ins)
                    ],
                    dim=1,
                )
                alpha = torch.ones_like(f)
                relative = 0 if shared else int(group.quotient[h, g])
                if plain.squeeze is not None:
                    first = plain.squeeze.weight.unflatten(0, (outs, -1))[c, :, :, relative]
                    second = plain.excite.weight.unflatten(0, (outs, -1))[c, :, :, relative]
                    z = sum((s @ first.T).relu() @ second.T for s in (f.flatten(2).mean(2), f.flatten(2).amax(2)))
                    alpha = alpha * z.sigmoid().view(*z.shape, *[1] * gspace.dimensionality)
                if plain.spatial is not None:
                    attended = alpha * f
                    statistics = torch.stack([attended.mean(1), attended.amax(1)], dim=1)
                    psi = plain.spatial()[c, h, :, g][None]
                    padding = plain.attention_dilation * (psi.shape[-1] // 2)
                    alpha = alpha * conv(statistics, psi, padding=padding, dilation=plain.attention_dilation).sigmoid()
                if plain.squeeze is None and plain.spatial is None:
                    alpha = 0 * f if plain.residual else alpha
                total = total + ((1 - alpha if plain.residual else alpha) * f).sum(1)
            poses.append(total)
        rows.append(torch.stack(poses, dim=1) + (0 if plain.bias is None else plain.bias[c]))
    return torch.stack(rows, dim=1).flatten(1, 2)


# ------------------------------------------------------------------------------------------------------ the formula


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("variant", VARIANTS)
def test_values_and_gradients_are_those_of_the_formula(variant, residual):
    layer = layer_on(gspaces.flipRot2dOnR2(2), (3, 2), residual=residual, ratio=2, **VARIANTS[variant])
    x = input_of(layer).tensor.requires_grad_()
    inputs = [x, *layer.parameters()]
    with working_memory(2**14):  # many chunks
        y = layer.plain(x)
        weight = torch.randn_like(y)
        got = torch.autograd.grad((y * weight).sum(), inputs)
    expected = written_out(layer, x)
    torch.testing.assert_close(y, expected, atol=1e-11, rtol=1e-11)
    for a, b in zip(got, torch.autograd.grad((expected * weight).sum(), inputs), strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize(
    "options",
    [
        {"stride": 2},
        {"padding": 2},
        {"dilation": 2, "padding": 1},
        {"size": 4},
        {"attention_dilation": 2},
        {"size": 1},
        {"bias": False},
        {"attention_size": 5},
    ],
)
@pytest.mark.parametrize("kinds", [("regular", "regular"), ("trivial", "regular"), ("regular", "trivial")])
def test_options_are_those_of_the_formula(kinds, options):
    layer = layer_on(gspaces.rot2dOnR2(4), (2, 2), kinds, **options)
    x = input_of(layer, 6)
    y = layer(x)
    assert y.shape == layer.evaluate_output_shape(tuple(x.shape))
    torch.testing.assert_close(y.tensor, written_out(layer, x.tensor), atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("kinds", [("regular", "regular"), ("trivial", "regular")])
def test_the_formula_in_space(kinds):
    layer = layer_on(gspaces.mirOnR3(), (2, 2), kinds)
    x = input_of(layer, 4)
    torch.testing.assert_close(layer(x).tensor, written_out(layer, x.tensor), atol=1e-11, rtol=1e-11)


def test_the_published_conventions():
    """C4, with the weights as published: ψ, W1, W2 and ψ^X indexed by the relative pose, and turned by rot90."""
    layer = layer_on(gspaces.rot2dOnR2(4), (4, 3), ratio=2, bias=False)
    psi = layer.plain.kernel.weight.view(3, 4, 4, 3, 3)
    first, second = layer.plain.squeeze.weight.view(3, 2, 4, 4), layer.plain.excite.weight.view(3, 4, 2, 4)
    psi_x = layer.plain.spatial.weight.view(3, 2, 4, 3, 3)
    x = input_of(layer, 6)
    f = x.tensor.unflatten(1, (4, 4))
    out = torch.zeros(2, 3, 4, 4, 4, dtype=torch.float64)
    for c in range(3):
        for h in range(4):
            for g in range(4):
                p = (g - h) % 4
                kernel = psi[c, :, p].rot90(h, (-2, -1))[:, None]
                responses = F.conv2d(f[:, :, g], kernel, groups=4)
                s = responses.flatten(2)
                z = sum((t @ first[c, :, :, p].T).relu() @ second[c, :, :, p].T for t in (s.mean(2), s.amax(2)))
                attended = z.sigmoid()[..., None, None] * responses
                statistics = torch.stack([attended.mean(1), attended.amax(1)], dim=1)
                spatial = F.conv2d(statistics, psi_x[c, :, p].rot90(h, (-2, -1))[None], padding=1).sigmoid()
                out[:, c, h] += (responses - spatial * attended).sum(1)
    torch.testing.assert_close(layer(x).tensor, out.flatten(1, 2), atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize(("ratio", "numbers"), [(2, (48_630 - 24_610, 49_110 - 24_610))])
def test_as_many_parameters_as_published(ratio, numbers):
    """What the attention adds to the seven layers of the p4 network on rotated MNIST."""
    gspace = gspaces.rot2dOnR2(4)
    image, fields = spaces.scalars(gspace, 1), spaces.regular(gspace, 10)

    def attention(**options):
        ratios = [{"ratio": n} if options.get("channel", True) else {} for n in (1, ratio)]
        first = AttentiveConv(image, fields, 3, bias=False, **ratios[0], **options)
        second = AttentiveConv(fields, fields, 3, bias=False, **ratios[1], **options)
        layers = [first, *[second] * 6]
        return sum(p.numel() for m in layers for n, p in m.named_parameters() if not n.startswith("plain.kernel"))

    assert (attention(spatial=False), attention(channel=False)) == numbers
    assert attention() == sum(numbers)


@pytest.mark.parametrize("kinds", [("regular", "regular"), ("trivial", "regular"), ("regular", "trivial")])
def test_without_attention_it_is_the_convolution_of_escnn(kinds):
    layer = layer_on(gspaces.rot2dOnR2(4), (2, 3), kinds, channel=False, spatial=False, padding=1)
    theirs = R2Conv(layer.in_type, layer.out_type, 3, padding=1, initialize=False, **complete_basis(3))
    assert fit_kernel(theirs, layer.plain.kernel().flatten(0, 1).flatten(1, 2)) < 1e-5
    with torch.no_grad():
        theirs.bias.zero_()
        layer.plain.bias.zero_()
    x = input_of(layer, dtype=torch.float32)
    torch.testing.assert_close(theirs(x).tensor, layer.float()(x).tensor, atol=1e-4, rtol=1e-4)


# ---------------------------------------------------------------------------------------------------- equivariance


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", PLANE | VOLUME)
def test_equivariant(name, variant):
    gspace = (PLANE | VOLUME)[name]()
    for kinds in (("regular", "regular"), ("trivial", "regular"), ("regular", "trivial"), ("trivial", "trivial")):
        layer = layer_on(gspace, (2, 1), kinds, **VARIANTS[variant])
        assert spaces.grid_error(layer, input_of(layer, 5 if gspace.dimensionality == 2 else 3)) < EXACT


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", (spaces.PLANE | spaces.VOLUME).keys() - (PLANE | VOLUME).keys())
def test_equivariant_for_every_group(name):
    gspace = (spaces.PLANE | spaces.VOLUME)[name]()
    for kinds in (("regular", "regular"), ("trivial", "regular")):
        layer = layer_on(gspace, (1, 1), kinds)
        assert spaces.grid_error(layer, input_of(layer, 3)) < EXACT


@given(st.data())
def test_equivariant_for_layers_drawn(data):
    gspace = PLANE[data.draw(st.sampled_from(list(PLANE)))]()
    kinds = [data.draw(st.sampled_from(["regular", "trivial"])) for _ in range(2)]
    layer = layer_on(
        gspace,
        (data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))),
        kinds,
        data.draw(st.sampled_from([1, 3, 5])),
        **VARIANTS[data.draw(st.sampled_from(list(VARIANTS)))],
        attention_size=data.draw(st.sampled_from([1, 3, 5])),
        attention_dilation=data.draw(st.integers(1, 2)),
        padding=data.draw(st.integers(1, 3)),
        ratio=data.draw(st.integers(1, 3)),
        residual=data.draw(st.booleans()),
        bias=data.draw(st.booleans()),
        basis=data.draw(st.sampled_from(["auto", "bandlimited"])),
    )
    assert spaces.grid_error(layer, input_of(layer, data.draw(st.integers(4, 6)), batch=1)) < EXACT


def test_elements_between_the_points_act_on_the_fibers():
    """All of C8 where space plays no part: kernels of one place on a constant field."""
    gspace = gspaces.rot2dOnR2(8)
    layer = layer_on(gspace, (2, 2), size=1, attention_size=1)
    x = layer.in_type(torch.randn(2, 16, 1, 1).double().expand(-1, -1, 3, 3))
    y = layer(x)
    for g in gspace.fibergroup.elements:
        turned, expected = (t.transform_fibers(g) for t in (x, y))
        torch.testing.assert_close(layer(turned).tensor, expected.tensor, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("part", ["squeeze", "excite", "spatial"])
def test_theorem_1_an_attention_operator_that_is_not_equivariant_breaks_it(part):
    """The attention decides, and nothing else: the convolution under it is the same and equivariant."""
    layer = layer_on(gspaces.rot2dOnR2(4))
    x = input_of(layer)
    assert spaces.grid_error(layer, x) < EXACT
    operator = getattr(layer.plain, part)
    places = torch.randperm(operator.orbits.numel())
    operator.orbits = operator.orbits.flatten()[places].view_as(operator.orbits)
    assert spaces.grid_error(layer, x) > 1e-4
    layer.plain.squeeze = layer.plain.excite = layer.plain.spatial = None
    assert spaces.grid_error(layer, x) < EXACT


def test_check_equivariance_and_report():
    layer = layer_on(gspaces.flipRot2dOnR2(4), (1, 1))
    assert len(layer.check_equivariance(atol=1e-10, rtol=1e-10)) == 8
    assert equivariance_report(layer, (1, 8, 6, 6)).relative_error < EXACT


# --------------------------------------------------------------------------------------------------------- the maps


def test_attention_maps():
    layer = layer_on(gspaces.rot2dOnR2(4), (3, 2), padding=1)
    x = input_of(layer, 5)
    maps = layer.attention_maps(x)
    assert maps.channel.shape == (2, 2, 4, 3, 4)
    assert maps.spatial.shape == (2, 2, 4, 4, 5, 5)
    # They give the output with the responses.
    kernel = layer.plain.kernel()
    out = layer.plain.bias.view(1, 2, 1, 1, 1).expand(2, 2, 4, 5, 5).clone()
    for i in range(3):
        for g in range(4):
            response = F.conv2d(
                x.tensor.unflatten(1, (3, 4))[:, i, g, None], kernel[:, :, i, g].flatten(0, 1)[:, None], padding=1
            )
            alpha = maps.channel[:, :, :, i, g, None, None] * maps.spatial[:, :, :, g]
            out = out + (1 - alpha) * response.unflatten(1, (2, 4))
    torch.testing.assert_close(layer(x).tensor, out.flatten(1, 2), atol=1e-11, rtol=1e-11)
    with working_memory(2**12):
        for a, b in zip(layer.attention_maps(x), maps, strict=True):
            torch.testing.assert_close(a, b)


def test_attention_maps_are_equivariant():
    gspace = gspaces.flipRot2dOnR2(4)
    layer = layer_on(gspace, (2, 1), padding=1)
    x = input_of(layer, 4)
    maps = layer.attention_maps(x)
    group = fibers(gspace)
    for n, g in enumerate(group.elements):
        back = group.quotient[n]  # the index of g⁻¹h
        turned = layer.attention_maps(x.transform(g))
        torch.testing.assert_close(turned.channel, maps.channel[:, :, back][..., back])
        planes = FieldType(gspace, 64 * [gspace.trivial_repr])(maps.spatial[:, 0].flatten(1, 2)).transform(g)
        expected = planes.tensor.unflatten(1, (8, 8))[:, back][:, :, back]
        torch.testing.assert_close(turned.spatial[:, 0], expected)


@pytest.mark.parametrize(("variant", "present"), [("channel", (1, 0)), ("spatial", (0, 1)), ("none", (0, 0))])
def test_maps_that_are_turned_off(variant, present):
    layer = layer_on(gspaces.rot2dOnR2(4), **VARIANTS[variant])
    if variant == "none":
        assert not layer.plain._attends
        return
    assert tuple(m is not None for m in layer.attention_maps(input_of(layer))) == present


# ---------------------------------------------------------------------------------------------------- memory, state


def test_responses_are_never_all_there(monkeypatch):
    layer = layer_on(gspaces.rot2dOnR2(4), (4, 4)).float()
    x = input_of(layer, 12, batch=8, dtype=torch.float32)
    everything, sizes = 8 * 16 * 16 * 100, []
    make = responses._Chunk.__init__

    def watched(chunk, *arguments):
        make(chunk, *arguments)
        sizes.append(chunk.responses.numel())

    monkeypatch.setattr(responses._Chunk, "__init__", watched)
    with working_memory(attentive.COPIES * 4 * 10_000):
        layer(x).tensor.sum().backward()
    assert max(sizes) <= 10_000
    assert sum(sizes) == 2 * everything  # forward, and again in the backward pass
    assert len(sizes) > 1


def test_autograd_keeps_no_responses():
    """What is saved for the backward pass does not grow with the number of pairs of poses and fields."""
    layer = layer_on(gspaces.rot2dOnR2(4), (4, 4)).float()
    x = input_of(layer, 12, batch=8, dtype=torch.float32).tensor.requires_grad_()
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = layer.plain(x)
    assert y.requires_grad
    assert sum(kept.values()) < 4 * (8 * 16 * 16 * 100) / 4


def test_chunks_do_not_change_the_result():
    layer = layer_on(gspaces.rot2dOnR2(4), (3, 3))
    x = input_of(layer, 6, batch=5)
    y = layer(x).tensor
    for limit in (1, 2**12, 2**16, 2**20):
        with working_memory(limit), torch.no_grad():
            torch.testing.assert_close(layer(x).tensor, y)


def test_compiles_in_one_graph():
    exported = layer_on(gspaces.rot2dOnR2(4), (2, 2)).eval().export()
    x = input_of(layer_on(gspaces.rot2dOnR2(4), (2, 2)), 6).tensor.requires_grad_()
    compiled = torch.compile(exported, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), exported(x))
    got, expected = (
        torch.autograd.grad(f(x).square().sum(), [x, *exported.parameters()]) for f in (compiled, exported)
    )
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_second_derivatives():
    layer = layer_on(gspaces.rot2dOnR2(2), (1, 1))
    x = input_of(layer, 3, batch=1).tensor.requires_grad_()
    torch.autograd.gradgradcheck(layer.plain, (x,))


def test_exports_need_no_escnn(without_escnn):
    """Neither this layer nor the other two of the paper."""
    layer = layer_on(gspaces.rot2dOnR2(8), (2, 2))
    x = input_of(layer)
    for module in (layer, drawn(FeatureAttention(layer.in_type, kernel_size=3)), drawn(PoseAttention(layer.in_type))):
        exported = module.eval().export()
        torch.testing.assert_close(exported(x.tensor), module(x).tensor)
        torch.testing.assert_close(without_escnn(exported, x.tensor), module(x).tensor)


def test_state():
    layer, other = (layer_on(gspaces.rot2dOnR2(8), (2, 2)) for _ in range(2))
    x = input_of(layer)
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer))
    torch.testing.assert_close(other(x).tensor, layer(x).tensor)
    torch.testing.assert_close(copy.deepcopy(layer)(x).tensor, layer(x).tensor)
    names = {n for n, _ in layer_on(gspaces.rot2dOnR2(4)).named_parameters()}
    assert names == {"plain.bias"} | {f"plain.{p}.weight" for p in ("kernel", "squeeze", "excite", "spatial")}


def test_equivariance_survives_changes_of_precision():
    layer = layer_on(gspaces.rot2dOnR2(8), (2, 2)).to(torch.bfloat16).float().double()
    assert spaces.grid_error(layer, input_of(layer)) < EXACT


def test_autocast():
    layer = layer_on(gspaces.rot2dOnR2(4), (2, 2)).float()
    x = input_of(layer, dtype=torch.float32)
    expected = layer(x).tensor
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x).tensor
        y.float().sum().backward()
    assert (y - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize("variant", ["full", "channel", "spatial"])
@pytest.mark.parametrize("residual", [True, False])
def test_derivatives_in_forward_mode_are_finite_differences(variant, residual):
    layer = layer_on(gspaces.rot2dOnR2(4), padding=1, residual=residual, **VARIANTS[variant])
    x, direction = (input_of(layer, batch=1).tensor for _ in range(2))
    step = 1e-6
    with torch.no_grad():
        expected = (layer.plain(x + step * direction) - layer.plain(x - step * direction)) / (2 * step)
    got = torch.func.jvp(layer.plain, (x,), (direction,))[1]
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)
    assert (got - layer.plain(direction)).abs().max() > 1e-2  # it is not linear


def test_a_tensor_of_another_precision_is_named():
    layer = layer_on(gspaces.rot2dOnR2(4)).float()
    x = input_of(layer)
    for call in (layer, layer.attention_maps):
        with pytest.raises(TypeError, match="input: AttentiveConv got a tensor of float64, but its parameters are fl"):
            call(x)
    layer.double()(x)
    with torch.autocast("cpu", torch.bfloat16):  # which mixes precisions
        layer.float()(layer.in_type(x.tensor.bfloat16()))


def test_repr():
    layer = layer_on(gspaces.rot2dOnR2(4), (1, 1), stride=2, residual=False, bias=False, spatial=False)
    for part in ("kernel_size=3", "ratio=1", "spatial=False", "stride=2", "residual=False", "bias=False"):
        assert part in repr(layer)


def test_mistakes():
    gspace = gspaces.rot2dOnR2(4)
    fields, vectors = spaces.regular(gspace, 2), FieldType(gspace, [gspace.irrep(1)])
    with pytest.raises(TypeError, match="in_type: got str"):
        AttentiveConv("fields", fields, 3)
    with pytest.raises(ValueError, match=r"in_type: AttentiveConv needs regular fields only, or .* got irrep_1"):
        AttentiveConv(vectors, fields, 3)
    with pytest.raises(ValueError, match=r"out_type: AttentiveConv needs regular fields only, or trivial .* regular"):
        AttentiveConv(fields, fields + vectors, 3)
    with pytest.raises(ValueError, match="out_type: its gspace is C8"):
        AttentiveConv(fields, spaces.regular(gspaces.rot2dOnR2(8), 1), 3)
    point = spaces.regular(spaces.POINT["D4 on a point"](), 1)
    with pytest.raises(ValueError, match="in_type: AttentiveConv needs a grid of 2 or 3 dimensions"):
        AttentiveConv(point, point, 1)
    for argument, value in (("ratio", 0), ("stride", 0), ("dilation", 0), ("padding", -1), ("attention_dilation", 0)):
        with pytest.raises(ValueError, match=f"{argument}: got {value}, needed at least"):
            AttentiveConv(fields, fields, 3, **{argument: value})
    with pytest.raises(ValueError, match="attention_size: got 4, needed an odd number"):
        AttentiveConv(fields, fields, 3, attention_size=4)
    with pytest.raises(ValueError, match="basis: got 'full'"):
        AttentiveConv(fields, fields, 3, basis="full")
    for argument in ("channel", "spatial", "bias", "residual"):
        with pytest.raises(TypeError, match=f"{argument}: got 'no', needed True or False"):
            AttentiveConv(fields, fields, 3, **{argument: "no"})
    for off, argument, value in (
        ({"channel": False}, "ratio", 7),
        ({"spatial": False}, "attention_size", 9),
        ({"spatial": False}, "attention_dilation", 2),
        (VARIANTS["none"], "residual", False),
    ):
        with pytest.raises(ValueError, match=rf"{argument}: got {value}, but there is no .*; leave it at"):
            AttentiveConv(fields, fields, 3, **off, **{argument: value})
    with pytest.raises(ValueError, match="input: a grid of 4×6 with padding 0 is smaller than the kernel, which cov"):
        AttentiveConv(fields, fields, 5)(spaces.random_field(fields, 4, 6, dtype=torch.float32))
    with pytest.raises(TypeError, match="input: AttentiveConv got Tensor"):
        AttentiveConv(fields, fields, 3)(torch.zeros(1, 8, 5, 5))
    continuous = gspaces.rot2dOnR2(-1)
    scalars = FieldType(continuous, [continuous.trivial_repr])
    with pytest.raises(NotImplementedError, match=r"in_type: .*, which is continuous"):
        AttentiveConv(scalars, scalars, 3)
