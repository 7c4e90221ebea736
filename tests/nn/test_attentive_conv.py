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
from escnn_attention.groups.fibers import fibers
from escnn_attention.nn.attentive_conv import AttentiveConv
from escnn_attention.nn.kernels import complete_basis, fit_kernel
from tests import spaces
from tests.nn.attentive import EXACT, PLANE, VARIANTS, VOLUME, input_of, layer_on

# ------------------------------------------------------------------------------------------------------ the formula


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


@pytest.mark.sampled(4)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", PLANE | VOLUME)
def test_equivariant(name, variant):
    gspace = (PLANE | VOLUME)[name]()
    for kinds in (("regular", "regular"), ("trivial", "regular"), ("regular", "trivial"), ("trivial", "trivial")):
        layer = layer_on(gspace, (2, 1), kinds, **VARIANTS[variant])
        assert spaces.grid_error(layer, input_of(layer, 5 if gspace.dimensionality == 2 else 3)) < EXACT


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", sorted((spaces.PLANE | spaces.VOLUME).keys() - (PLANE | VOLUME).keys()))
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
