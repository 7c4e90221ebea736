import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from escnn import gspaces
from escnn.nn import FieldType, R2Conv, R3Conv
from hypothesis import given, reject
from hypothesis import strategies as st

from escnn_attention import GroupSelfAttention
from escnn_attention.geometry.grid import Grid
from escnn_attention.geometry.windows import Window
from escnn_attention.groups.fibers import fibers
from escnn_attention.nn.convolution import attention_from_convolution
from tests.layers import assert_formula
from tests.spaces import PLANE, VOLUME, field_types, grid_error, mixed, random_field, regular, scalars

EXACT = 1e-13  # relative, in float64
PLANE_GROUPS = ["trivial", "flip", "C2", "C4", "D4"]


def convolution_on(space, width=3, fields=(2, 3), *, dtype=torch.float64, **options):
    """A convolution with random weights and biases between regular fields."""
    make = {2: R2Conv, 3: R3Conv}[space.dimensionality]
    dilation = options.get("dilation", 1)
    options = {"padding": dilation * (width // 2), "initialize": False} | options
    return drawn(make(regular(space, fields[0]), regular(space, fields[1]), width, **options), dtype)


def drawn(convolution, dtype=torch.float64):
    # A copy: escnn's convolutions of one kind share the tensors of their basis, and to one precision they all go.
    convolution = copy.deepcopy(convolution).to(dtype)
    with torch.no_grad():
        for parameter in convolution.parameters():
            parameter.normal_()
    return convolution


def inside(convolution, y):
    """What the border does not reach."""
    reach = convolution.dilation * (convolution.kernel_size // 2)
    return y[(..., *[slice(reach, n - reach) for n in y.shape[2:]])]


def difference(convolution, layer, x, part=inside):
    """Relative to the size of the output."""
    with torch.no_grad():
        expected, got = (part(convolution, module(x).tensor) for module in (convolution, layer))
    assert expected.numel() > 0
    return ((got - expected).abs().max() / expected.abs().max()).item()


@torch.no_grad()
def symmetrised(convolution):
    """The convolution in eval mode, with filters that are turned to rounding error: escnn's are in single precision."""
    space, convolution = convolution.in_type.gspace, convolution.eval()
    places = Grid((1,) * space.dimensionality, Window(convolution.kernel_size)).offsets
    kernel, bias = torch.zeros_like(convolution.filter), convolution.expanded_bias
    biases = []
    for h, matrix in zip(fibers(space).elements, fibers(space).action, strict=True):
        to = torch.cdist(places @ torch.tensor(matrix).T, places).argmin(-1)  # where h puts each place
        rho_out, rho_in = (torch.tensor(t.representation(g)) for t, g in _sides(convolution, h))
        kernel.flatten(2)[..., to] += torch.einsum("ij,jkn,kl->iln", rho_out, convolution.filter.flatten(2), rho_in)
        biases.append(None if bias is None else rho_out @ bias)
    convolution.filter = kernel / len(biases)
    convolution.expanded_bias = None if bias is None else torch.stack(biases).mean(0)
    return convolution


def _sides(convolution, h):
    return (convolution.out_type, h), (convolution.in_type, ~h)


# --------------------------------------------------------------------------------------------------------- agreement


def orbits(space, width):
    """How many places of a kernel the group tells apart."""
    places = Grid((1,) * space.dimensionality, Window(width)).offsets
    moved = torch.stack([places @ torch.tensor(matrix).T for matrix in fibers(space).action], 1)
    return len({frozenset(map(tuple, images)) for images in (100 * moved).round().int().tolist()})


OPTIONS = [{}, {"projection": "pointwise"}, {"heads": "orbits"}]
OPTIONS += [{"backend": backend} for backend in ("reference", "blocked", "native", "dense")]


@pytest.mark.sampled
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dilation", [1, 2, 3])
@pytest.mark.parametrize("width", [1, 3, 5, 7])
@pytest.mark.parametrize("name", [*PLANE_GROUPS, "trivial 3D", "inversion", "C4 3D"])
@pytest.mark.slow
def test_agrees_away_from_the_border(name, width, dilation, bias, options):
    """With one head for each pose and place, or for each orbit of places."""
    space = (PLANE | VOLUME)[name]()
    if space.dimensionality == 3:
        width, dilation = min(width, 3), 1
    convolution = convolution_on(space, width, fields=(1, 2), dilation=dilation, bias=bias)
    layer = attention_from_convolution(convolution, **options)
    assert type(layer) is GroupSelfAttention
    assert layer.plain.backend == options.get("backend", "auto")
    every = width**space.dimensionality * space.fibergroup.order()
    assert layer.num_heads == (orbits(space, width) if "heads" in options else every)
    size = 2 * dilation * (width // 2) + 3
    x = random_field(convolution.in_type, *(size, size + 1, size)[: space.dimensionality], batch=1)
    # Its heads turn exactly, where escnn turns its filters in single precision.
    assert difference(convolution, layer, x) < 1e-5
    single = attention_from_convolution(convolution.float(), **options)
    assert single(x.type(x.tensor.float())).tensor.dtype == torch.float32
    assert difference(convolution, single, x.type(x.tensor.float())) < 1e-5
    convolution = symmetrised(convolution.double())
    assert difference(convolution, attention_from_convolution(convolution, **options), x) < EXACT


@pytest.mark.parametrize(
    ("width", "heads", "number"),
    [
        (1, "all", 24),
        pytest.param(3, "all", 648, marks=pytest.mark.exhaustive),
        pytest.param(3, "orbits", 4, marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.slow
def test_agrees_for_the_octahedral_group(width, heads, number):
    convolution = convolution_on(VOLUME["octahedral"](), width, fields=(1, 1))
    layer = attention_from_convolution(convolution, heads=heads)
    assert layer.num_heads == number
    assert difference(convolution, layer, random_field(convolution.in_type, 3, 3, 3, batch=1)) < 1e-5


@pytest.mark.sampled(6)
@pytest.mark.parametrize("width", [1, 3, 5, 7])
@pytest.mark.parametrize("dilation", [1, 2, 3])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", PLANE_GROUPS)
def test_agrees_for_all_sizes(name, width, dilation, bias):
    convolution = convolution_on(PLANE[name](), width, fields=(1, 2), dilation=dilation, bias=bias)
    size = 2 * dilation * (width // 2) + 3
    x = random_field(convolution.in_type, size, size + 1, batch=1)
    assert difference(convolution, attention_from_convolution(convolution), x) < 1e-5


@pytest.mark.parametrize("backend", ["reference", "blocked", "native", "dense"])
def test_agrees_with_every_backend(backend):
    convolution = convolution_on(PLANE["C4"](), fields=(1, 1))
    layer = attention_from_convolution(convolution, backend=backend)
    assert layer.plain.backend == backend
    assert difference(convolution, layer, random_field(convolution.in_type, 5, 5)) < 1e-5


# ------------------------------------------------------------------------------------------------ one head an orbit


@given(st.data())
def test_one_head_for_each_orbit_is_enough_for_fields_of_any_type(data):
    space = PLANE[data.draw(st.sampled_from(PLANE_GROUPS))]()
    types = data.draw(field_types(space)), data.draw(field_types(space))
    options = {"bias": data.draw(st.booleans()), "dilation": data.draw(st.integers(1, 2)), "initialize": False}
    try:
        convolution = symmetrised(drawn(R2Conv(*types, 3, padding=options["dilation"], **options)))
    except ValueError:
        reject()  # no kernels between these fields
    x = random_field(types[0], 6, 7)
    assert difference(convolution, attention_from_convolution(convolution, heads="orbits"), x) < EXACT


@pytest.mark.parametrize("name", ["inversion", "mirror", "C4 3D"])
@pytest.mark.slow
def test_one_head_for_each_orbit_is_enough_in_space(name):
    space = VOLUME[name]()
    convolution = drawn(R3Conv(mixed(space), mixed(space), 3, padding=1))
    x = random_field(convolution.in_type, 4, 3, 4, batch=1)
    assert difference(convolution, attention_from_convolution(convolution, heads="orbits"), x) < 1e-5


@pytest.mark.parametrize("heads", ["all", "orbits"])
def test_ordinary_convolutions(heads):
    """Of fields of the trivial group, which are all alike."""
    image = scalars(PLANE["trivial"](), 3)
    convolution = drawn(R2Conv(image, scalars(image.gspace, 2), 3, padding=1))
    layer = attention_from_convolution(convolution, heads=heads)
    assert layer.num_heads == 9
    assert difference(convolution, layer, random_field(image, 5, 6)) < EXACT


# ----------------------------------------------------------------------------------------------------- where it ends


def whole(convolution, y):
    return y


def test_differs_at_the_border_where_one_sees_zeros_and_the_other_its_nearest_key():
    convolution = convolution_on(PLANE["C4"]())
    layer = attention_from_convolution(convolution)
    x = random_field(convolution.in_type, 6, 6)
    assert difference(convolution, layer, x) < 1e-5
    assert difference(convolution, layer, x, whole) > 0.1


@pytest.mark.parametrize("heads", ["all", "orbits"])
@pytest.mark.parametrize("dilation", [1, 2])
def test_agrees_on_a_torus_everywhere(heads, dilation):
    """With the symmetrised filter to rounding error; and not where the layer is on none."""
    convolution = symmetrised(convolution_on(PLANE["C4"](), padding_mode="circular", dilation=dilation))
    layer = attention_from_convolution(convolution, heads=heads)
    x = random_field(convolution.in_type, 5, 6)
    assert difference(convolution, layer, x, whole) < 1e-12
    convolution.padding_mode = "zeros"
    assert difference(convolution, layer, x, whole) > 0.1


@pytest.mark.parametrize("dilation", [1, 2])
def test_agrees_at_the_border_too_where_zeros_are_features(dilation):
    convolution = convolution_on(PLANE["D4"](), fields=(1, 2), dilation=dilation)
    x = random_field(convolution.in_type, 5, 6)
    padded = convolution.in_type(F.pad(x.tensor, [dilation] * 4))
    y = inside(convolution, attention_from_convolution(convolution)(padded).tensor)
    torch.testing.assert_close(y, convolution(x).tensor, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wrong", ["poses", "table", "places", "a head less"])
@pytest.mark.parametrize("name", ["C2", "C4", "D4"])
def test_other_poses_and_places_break_it(name, wrong):
    """Negative controls: the heads look at the wrong ones, a table of the group is wrong, or one head is silent."""
    convolution = convolution_on(PLANE[name]())
    layer = attention_from_convolution(convolution, heads="orbits" if wrong == "a head less" else "all")
    encoding = layer.plain.encoding
    with torch.no_grad():
        if wrong == "poses":
            encoding.pose_embedding.copy_(encoding.pose_embedding.roll(1, dims=1))
        elif wrong == "places":
            encoding.centre.copy_(encoding.centre.roll(1, dims=0))
        elif wrong == "a head less":
            layer.plain.project_out.weight[: layer.head_fields] = 0
        else:
            layer.plain.quotient = layer.plain.quotient.roll(1, dims=0)
    assert difference(convolution, layer, random_field(convolution.in_type, 6, 6)) > 0.1


def test_sharpness_is_what_the_other_keys_lose():
    convolution = symmetrised(convolution_on(PLANE["C4"](), bias=False))
    x = random_field(convolution.in_type, 6, 6)
    exact = inside(convolution, convolution(x).tensor)
    error = {}
    for sharpness in (5, 10, 20):
        layer = attention_from_convolution(convolution, sharpness=sharpness)
        maps = layer.attention_maps(x, [(3, 3)], poses=[1])
        largest, second = maps.flatten(5).topk(2).values.unbind(-1)
        torch.testing.assert_close((largest / second).log(), torch.full_like(largest, sharpness))
        got = inside(convolution, layer(x).tensor)
        error[sharpness] = ((got - exact).norm() / exact.norm()).item()
    assert 1e-3 < error[5] < 1e-1
    assert error[10] < 0.02 * error[5]
    assert error[20] < 0.001 * error[10]


# ------------------------------------------------------------------------------------------------------ as any layer


def test_equivariant_with_a_border_and_after_training():
    convolution = convolution_on(PLANE["C4"](), fields=(2, 2))
    layer = attention_from_convolution(convolution, sharpness=3.0)
    x = random_field(convolution.in_type, 5, 5)
    assert grid_error(layer, x) < 1e-12
    optimiser = torch.optim.Adam(layer.parameters(), lr=1e-2)
    wanted = torch.randn_like(layer(x).tensor)
    losses = []
    for _ in range(10):
        optimiser.zero_grad()
        loss = (layer(x).tensor - wanted).square().mean()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in layer.plain.encoding.parameters())
    assert grid_error(layer, x) < 1e-12


def test_gradients_of_the_input_are_those_of_the_convolution():
    convolution = convolution_on(PLANE["C4"]())
    layer = attention_from_convolution(convolution)
    x = torch.randn(1, convolution.in_type.size, 7, 7, dtype=torch.float64, requires_grad=True)
    found, expected = (inside(convolution, m(convolution.in_type(x)).tensor) for m in (layer, convolution))
    assert_formula(found, expected, [x], 1e-6, 1e-6)


def test_the_layer_shares_nothing_with_the_convolution():
    convolution = convolution_on(PLANE["C4"]())
    layer = attention_from_convolution(convolution)
    x = random_field(convolution.in_type, 5, 5)
    before = layer(x).tensor
    with torch.no_grad():
        convolution.weights.mul_(3)
    torch.testing.assert_close(layer(x).tensor, before)
    assert difference(convolution, layer, x) > 0.1
    assert difference(convolution, attention_from_convolution(convolution), x) < 1e-5


def test_takes_the_filter_that_the_mode_of_the_convolution_uses():
    convolution = convolution_on(PLANE["C4"]()).eval()
    with torch.no_grad():
        convolution.weights.mul_(3)  # in eval mode escnn keeps the old filter
    x = random_field(convolution.in_type, 5, 5)
    assert difference(convolution, attention_from_convolution(convolution), x) < 1e-5
    convolution.train()
    assert difference(convolution, attention_from_convolution(convolution), x) < 1e-5


# --------------------------------------------------------------------------------------------------------- arguments

C4 = PLANE["C4"]
GRIDS = [
    ("C8", ".* does not map the grid onto itself", {"fields": (1, 1)}),
    ("flip about an odd axis", "the fiber group of .* look between its points", {"fields": (1, 1)}),
    ("C4", "its kernel_size is 4, needed an odd number", {"width": 4, "fields": (1, 1)}),
    ("C4", "its stride is 2, needed 1", {"stride": 2}),
    ("C4", "its groups is 2, needed 1", {"fields": (2, 2), "groups": 2}),
    ("C4", "its padding is 0, needed 1", {"padding": 0}),
    ("C4", "its padding is 1, needed 2", {"padding": 1, "dilation": 2}),
    ("C4", r"its padding is \(1, 2\), needed 1", {"padding": (1, 2)}),
    ("C4", "its padding_mode is 'reflect', needed 'zeros' or 'circular'", {"padding_mode": "reflect"}),
]


@pytest.mark.parametrize(("name", "message", "options"), GRIDS)
def test_convolutions_that_are_no_attention(name, message, options):
    with pytest.raises(ValueError, match=f"convolution: {message}"):
        attention_from_convolution(convolution_on(PLANE[name](), **options))


def test_types_of_convolutions_that_are_no_attention():
    image, fields, circle = scalars(C4(), 1), regular(C4(), 1), scalars(gspaces.rot2dOnR2(-1), 1)
    vectors = FieldType(C4(), [C4().irrep(1)])
    for error, message, make in (
        (TypeError, "convolution: got Conv2d, needed an R2Conv or R3Conv", lambda: torch.nn.Conv2d(1, 1, 3)),
        (NotImplementedError, r"gspace: the fiber group SO\(2\) is", lambda: R2Conv(circle, circle, 3, padding=1)),
        (ValueError, "convolution.in_type: .* only, got also irrep_0", lambda: R2Conv(image, fields, 3, padding=1)),
        (ValueError, "convolution.out_type: .* only, got also irrep_1", lambda: R2Conv(fields, vectors, 3, padding=1)),
    ):
        with pytest.raises(error, match=message):
            attention_from_convolution(make())


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), "much", True])
def test_wrong_sharpness(value):
    convolution = convolution_on(C4(), fields=(1, 1))
    with pytest.raises(ValueError, match=r"sharpness: .*positive number"):
        attention_from_convolution(convolution, sharpness=value)
    with pytest.raises(ValueError, match=r"sharpness: .*at most 1e\+06"):
        attention_from_convolution(convolution, sharpness=1e300)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sharpness", [1e6, np.float32(30)])
def test_sharpness_to_the_end(sharpness, dtype):
    convolution = convolution_on(C4(), fields=(1, 1), dtype=dtype)
    x = convolution.in_type(torch.randn(1, 4, 6, 6, dtype=dtype))
    inside = (..., slice(1, -1), slice(1, -1))
    got = attention_from_convolution(convolution, sharpness=sharpness)(x).tensor[inside]
    torch.testing.assert_close(got, convolution(x).tensor[inside], rtol=1e-4, atol=1e-5)


def test_wrong_options():
    convolution = convolution_on(C4(), fields=(1, 1))
    for options, message in (
        ({"heads": "one"}, "heads: got 'one'"),
        ({"heads": "orbits", "projection": "pointwise"}, "projection: got 'pointwise', but heads=\"orbits\" needs"),
        ({"projection": "full"}, "projection: got 'full'"),
        ({"backend": "fast"}, "backend: got 'fast'"),
    ):
        with pytest.raises(ValueError, match=message):
            attention_from_convolution(convolution, **options)
