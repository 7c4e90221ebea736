"""What all modules have in common, and what those between points are given besides features."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch
from escnn import gspaces, nn
from escnn.nn import GeometricTensor

import escnn_attention as ea
from escnn_attention import (
    FieldLayerNorm,
    GroupSelfAttention,
    PointSelfAttention,
    PointTransformerBlock,
    PoseLinear,
    SiLU,
    TransformerBlock,
    equivariance_report,
)
from escnn_attention.nn.module import GridModule, PlainModule
from tests import spaces
from tests.layers import CASES, EDGES, MASK, TABLES, Case
from tests.nn.points import cloud

C4 = spaces.regular(gspaces.rot2dOnR2(4), 4)
POINT = spaces.regular(spaces.POINT["D4 on a point"](), 2)
VOLUME = spaces.mixed(gspaces.conicalOnR3(2))
MIXED = spaces.mixed(C4.gspace)
SCALARS = spaces.scalars(C4.gspace, 3)

MODULES = {
    **{name: case for name, case in CASES.items() if case.on_one_plane and name.split(",")[0] in ea.__all__},
    "FieldLayerNorm in 3D": Case(lambda: FieldLayerNorm(VOLUME, "sample"), (2, 4, 4, 4)),
    "FieldLayerNorm on a point": Case(lambda: FieldLayerNorm(POINT), (2,)),
    "PoseLinear in 3D": Case(lambda: PoseLinear(spaces.regular(VOLUME.gspace, 2), VOLUME), (2, 3, 3, 3)),
    "GroupSelfAttention on a point": Case(lambda: GroupSelfAttention(POINT, POINT, encoding="fourier"), (2,)),
    "TransformerBlock in 3D": Case(lambda: TransformerBlock(VOLUME, VOLUME, 1, 3, norm="pre"), (2, 3, 3, 3)),
}


@pytest.fixture(params=MODULES)
def module(request):
    return MODULES[request.param].drawn().float()


@pytest.fixture
def x(request, module):
    shape = MODULES[request.node.callspec.params["module"]].shape
    return module.in_type(torch.randn(shape[0], module.in_type.size, *shape[1:]))


def test_wrong_shapes_are_refused(module, x):
    name = type(module).__name__
    for shape in (x.shape[:-1], (*x.shape, 3), (2, module.in_type.size + 1, *x.shape[2:])):
        with pytest.raises(ValueError, match=rf"input_shape: {name} .*\(batch, {module.in_type.size}"):
            module.evaluate_output_shape(shape)


def test_wrong_input_is_refused(module, x):
    name = type(module).__name__
    with pytest.raises(TypeError, match=rf"input: {name} .*escnn.nn.GeometricTensor"):
        module(x.tensor)
    other = spaces.regular(gspaces.rot2dOnR2(7), 1)
    with pytest.raises(ValueError, match=rf"input: {name} .*gspace C7"):
        module(spaces.random_field(other, 3, 3))
    more = x.type + x.type
    with pytest.raises(ValueError, match=rf"input: {name} .*of type"):
        module(spaces.random_field(more, *x.shape[2:]))


def test_scattered_points_are_refused_where_positions_see_each_other(module):
    d = module.in_type.gspace.dimensionality
    points = nn.GeometricTensor(torch.randn(5, module.in_type.size), module.in_type, torch.randn(5, d)) if d else None
    if points is None:
        pytest.skip("without a base space there are no coordinates")
    if module.pointwise:
        module.train(not isinstance(module, ea.DropPath))
        y = module(points)
        assert y.coords is points.coords
        assert tuple(y.shape) == module.evaluate_output_shape(tuple(points.shape))
        if not isinstance(module, ea.PositionEmbedding):
            alone = GeometricTensor(points.tensor[(..., *d * [None])], module.in_type)  # each on a grid of its own
            torch.testing.assert_close(module(alone).tensor.view_as(y.tensor), y.tensor)
        return
    with pytest.raises(ValueError, match=r"input: .*scattered points"):
        module(points)


LAYERS = MODULES | {name: case for name, case in CASES.items() if name.split(",")[0] in ea.__all__ and not case.unit}


@pytest.mark.parametrize("how", ["single", "half", "autocast"])
@pytest.mark.parametrize("name", [name for name, case in LAYERS.items() if not case.training])
def test_lower_precision(name, how):
    case = LAYERS[name]
    module = case.drawn()
    inputs = [x.mul(0.9).bfloat16().double() for x in case.inputs(module)]  # with no point at the edge of a window
    expected = case.output(module, *inputs)
    module.to(torch.bfloat16 if how == "half" else torch.float32)
    for dtype in {"single": [torch.float32], "half": [torch.bfloat16]}.get(how, [torch.float32, torch.bfloat16]):
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            y = case.output(module, *(x.to(dtype) for x in inputs))
        assert how == "autocast" or y.dtype == dtype
        assert (y.double() - expected).norm() < (1e-6 if how == "single" else 2e-2) * expected.norm()
        if y.requires_grad:
            y.float().square().sum().backward()
            assert all(p.grad is None or p.grad.isfinite().all() for p in module.parameters())
    # Nothing of the exactness is lost on the way back but what the parameters lost.
    if how == "half" and name in MODULES and module.space.fibergroup.order() > 0:
        assert spaces.grid_error(module.double(), module.in_type(inputs[0])) < 1e-12


@pytest.fixture(scope="module")
def convolutional():
    """A network with a convolution of escnn."""
    return nn.SequentialModule(
        nn.R2Conv(SCALARS, C4, 3, padding=1),
        nn.ReLU(C4),
        GroupSelfAttention(C4, C4, 2, 3),
        SiLU(C4),
        FieldLayerNorm(C4),
    )


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", [*MODULES, "a network with a convolution"])
def test_exports_need_no_escnn(without_escnn, convolutional, name):
    case = MODULES.get(name, Case(lambda: convolutional, (2, 5, 5)))
    module = case.drawn().eval()
    x = torch.randn(2, module.in_type.size, *case.shape[1:], dtype=torch.float64)
    exported, expected = module.export(), module(module.in_type(x)).tensor.detach()
    torch.testing.assert_close(without_escnn(exported, x), expected)
    torch.testing.assert_close(exported.float()(x.float()).double(), expected, rtol=1e-3, atol=1e-3)


def test_others_do(without_escnn, convolutional):
    """They cannot even be loaded there."""
    with pytest.raises(AssertionError, match="No module named 'escnn"):
        without_escnn(convolutional, torch.randn(2, 3, 5, 5))


def test_constants_follow_from_the_group(module):
    """So that a state dict has parameters only, but for batch statistics and what modules of escnn keep."""
    others = {
        name for name in module.state_dict() if not re.search("indices|running|batches|network|filter|basis", name)
    }
    assert others == {name for name, _ in module.named_parameters() if "network" not in name}


def test_repr_is_one_line_and_names_the_types(module):
    text = repr(module)
    assert text.startswith(type(module).__name__)
    if isinstance(module, PlainModule):
        assert "\n" not in text
        assert str(module.in_type) in text
        assert str(module.out_type) in text


class Broken(torch.nn.Module):
    """A function that the group does not commute with."""

    def forward(self, x):
        return torch.cat([2 * x[:, :1], x[:, 1:]], dim=1)


class Late(GridModule):
    """Equivariant to the identity and the half turn, not to the quarter turns."""

    def forward(self, input):
        x = input.tensor
        return nn.GeometricTensor(x + x.flip(-1) + 0 * x, self.out_type)


SCALES, C8 = ea.Scales(2, 3), spaces.regular(gspaces.rot2dOnR2(8), 2)
TWO, SCALED = spaces.regular(C4.gspace, 2), SCALES.repeat(spaces.regular(C4.gspace, 2))
STRIDED = {"stride": 2, "ratio": 1, "residual": False, "bias": False, "spatial": False}
LOCAL, OF_SCALES = (
    "kernel_size=5 (disc)",
    "Scales(base=2, count=3); interval=2; measure='haar'; kernel_size=5 (disc, scaled)",
)
DEFAULTS = "query='own'; MLPEncoding(hidden=16"
# What layers are made of, by name, and what else they say, or do not.
SAID = [
    (FieldLayerNorm, (C4, "sample"), {}, "regular (x4); scope='sample', eps=1e-05, affine=True", ""),
    (FieldLayerNorm, (TWO, "pose"), {"kind": "rms"}, "scope='pose', kind='rms', eps", ""),
    (FieldLayerNorm, (TWO,), {"num_groups": 2, "affine": False}, "eps=1e-05", ""),
    (PoseLinear, (C4, C4), {"projection": "pointwise", "bias": False}, "", ""),
    (PoseLinear, (C4, MIXED), {}, "projection='group', bias=True", ""),
    (ea.ConditionedFieldNorm, (C4, 5), {}, "n=5, scope='position', eps=1e-05)", ""),
    (ea.ConditionedGate, (C4, 5), {}, "n=5)", ""),
    (
        ea.FeatureAttention,
        (TWO,),
        {"dilation": 2, "residual": False, "statistics": ("max",)},
        "ratio=2; kernel_size=7",
        "",
    ),
    (ea.PoseAttention, (TWO,), {"residual": False}, "", ""),
    (ea.AttentiveConv, (TWO, TWO, 3), STRIDED, "kernel_size=3", ""),
    (GroupSelfAttention, (C8, C8, 2, 5), {"head_fields": 4, "dilation": 2, "dropout": 0.1}, f"{LOCAL}; {DEFAULTS}", ""),
    (GroupSelfAttention, (C8, C8, 2, None), {}, "num_heads=2; global", ""),
    (
        ea.DilationSelfAttention,
        2 * (SCALES.repeat(C8),),
        {"scales": SCALES, "kernel_size": 5, "dropout": 0.1},
        DEFAULTS,
        "",
    ),
    (ea.DilationSelfAttention, (*2 * (SCALES.repeat(C8),), SCALES, 2, 5), {"head_fields": 4}, OF_SCALES, ""),
    (
        *(
            ea.DilationLiftingSelfAttention,
            (SCALARS, SCALED, SCALES, 2, 3),
            {"measure": "printed", "windows": "dilated"},
        ),
        *("kernel_size=3 (square, dilated), measure='printed'", "interval"),
    ),
    (ea.GroupCrossAttention, 3 * (TWO,), {"kernel_size": 3, "qk_norm": True, "registers": 2}, "(square)", ""),
    (ea.GroupCrossAttention, 3 * (TWO,), {"kernel_size": 3, "padding_mode": "circular"}, "(square)", "spacing=; qk"),
    (ea.GroupCrossAttention, 3 * (TWO,), {"spacing": 0.5, "dropout": 0.1}, "global", "length_scale=; qk"),
    (ea.GroupCrossAttention, 3 * (TWO,), {"length_scale": 2.0, "num_neighbours": 3}, "", "spacing="),
]


@pytest.mark.parametrize(("layer", "arguments", "options", "more", "absent"), SAID)
def test_repr_tells_how_the_layers_were_made(layer, arguments, options, more, absent):
    text = repr(layer(*arguments, **options))
    by_name = [f"{name}={value!r}" for name, value in options.items() if name not in ("scales", "windows")]
    assert [part for part in (*by_name, *more.split("; ")) if part not in text] == []
    assert not any(part in text for part in filter(None, absent.split("; ")))


def test_check_equivariance_prints_nothing(capsys):
    for name in "FieldLayerNorm", "GroupSelfAttention", "TransformerBlock", "FieldLayerNorm on a point":
        module = MODULES[name].drawn().float()
        module.train()
        errors = module.check_equivariance()
        assert [g for g, _ in errors] == spaces.grid_elements(module.in_type.gspace)
        assert all(0 <= error < 1e-12 for _, error in errors)
        assert module.training
    assert capsys.readouterr() == ("", "")


def test_check_equivariance_finds_broken_modules():
    for module in PlainModule(C4, C4, Broken()), Late(C4, C4):
        with pytest.raises(AssertionError, match="the error is"):
            module.check_equivariance()
    errors = dict(PlainModule(C4, C4, Broken()).check_equivariance(atol=100))
    assert min(error for g, error in errors.items() if g != C4.fibergroup.identity) > 0.01


def test_modules_work_among_those_of_escnn():
    gspace = gspaces.flipRot2dOnR2(4)
    image, hidden = spaces.scalars(gspace, 3), spaces.regular(gspace, 4)
    network = nn.SequentialModule(
        nn.R2Conv(image, hidden, 3, padding=1),
        nn.InnerBatchNorm(hidden),
        nn.ReLU(hidden),
        TransformerBlock(hidden, hidden, 2, 3),
        nn.PointwiseAvgPool2D(hidden, 2),
        GroupSelfAttention(hidden, hidden, num_heads=4, kernel_size=7),
        FieldLayerNorm(hidden),
        nn.GroupPooling(hidden),
    )
    x = image(torch.randn(2, 3, 6, 6))
    assert network(x).shape == network.evaluate_output_shape(x.shape) == (2, 4, 3, 3)
    network(x).tensor.square().sum().backward()
    assert all(p.grad is not None for p in network.parameters())
    assert equivariance_report(network, x.shape, layers=False).relative_error < 1e-6


def test_points_that_have_nothing_to_attend_to():
    in_type = spaces.regular(C4.gspace, 1)
    layer = PointSelfAttention(in_type, in_type)
    x = GeometricTensor(torch.randn(3, in_type.size), in_type, torch.randn(3, 2))
    with pytest.raises(ValueError, match=r"edge_index: .*point 0 \(2 such"):
        layer(x, torch.tensor([[0], [1]]))
    with pytest.raises(ValueError, match=r"edge_index: .*point 0 \(3 such"):
        layer(x, torch.zeros(2, 0, dtype=torch.long))
    # An edge from a point that is not there does not count, and a point that is not there needs none.
    edges, mask = torch.tensor([[0, 1, 2], [1, 0, 2]]), torch.tensor([True, False, True])
    with pytest.raises(ValueError, match=r"edge_index: .*point 0 \(1 such"):
        layer(x, edges, mask=mask)
    assert not layer(x, torch.tensor([[0, 1, 2], [0, 0, 2]]), mask=mask).tensor[1].any()
    with pytest.raises(ValueError, match="mask: hides all points"):
        layer(x, mask=torch.zeros(3, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"input: .*without points"):
        layer(GeometricTensor(x.tensor[:0], in_type, x.coords[:0]))


@pytest.mark.parametrize("name", [n for n, case in CASES.items() if case.points and n != "HamiltonianNetwork"])
def test_hidden_points_are_not_there(name):
    case = CASES[name]
    module, given = case.drawn(), case.arguments
    there, inputs = torch.arange(9) > 0 if "edge_index" in given else MASK, case.inputs(module)
    alone = {name: value[there] if len(value) == 9 else value for name, value in given.items() if name != "mask"}
    if "edge_index" in given:
        seen = there[EDGES].all(0)
        alone |= {name: value[seen] for name, value in given.items() if name == "edge_attr"}
        alone["edge_index"] = (there.cumsum(0) - 1)[EDGES[:, seen]]
    elif "edge_attr" in given:  # MASK hides the fourth point of both clouds
        alone["edge_attr"] = TABLES[:, [0, 1, 2, 4]][:, :, [0, 1, 2, 4]]
    expected = replace(case, arguments=alone).output(module, *(t[there] for t in inputs))
    spoilt = [t.masked_fill(~there[:, None], torch.nan) for t in inputs]
    weights = {name: value.where(there, torch.nan) for name, value in given.items() if name == "measure"}
    masked = replace(case, arguments=given | {"mask": there} | weights)
    y = masked.output(module, *spoilt)
    torch.testing.assert_close(masked.exported(module.export(), *spoilt), y)
    if len(y) == 9:
        assert not y[~there].any()
        y = y[there]
    torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-10)
    everyone = replace(case, arguments=given | {"mask": None}).output(module, *inputs)
    assert ((everyone[there] if len(everyone) == 9 else everyone) - y).abs().max() > 1e-3


MASKED = "AttentionPool|(Group|Lifting)SelfAttention|TransformerBlock, |FieldTransformer|attention_from"


@pytest.mark.parametrize("name", [n for n, case in CASES.items() if re.match(MASKED, n) and not case.training])
def test_what_is_hidden_on_a_grid_reaches_nothing(name):
    case = CASES[name]
    module = case.drawn()
    mask = torch.rand(case.shape, generator=torch.Generator().manual_seed(3)) > 0.3
    (x,), hidden = case.inputs(module), ~mask.unsqueeze(1)
    masked, shown = (replace(case, arguments=case.arguments | {"mask": m}) for m in (mask, torch.ones_like(mask)))
    y = masked.output(module, x)
    spoilt = x.masked_fill(hidden, torch.nan).requires_grad_()
    out = masked.output(module, spoilt)
    assert torch.equal(out, y)
    (gradient,) = torch.autograd.grad(out.sum(), spoilt)
    assert gradient.isfinite().all()
    torch.testing.assert_close(masked.exported(module.export(), spoilt), y)
    torch.testing.assert_close(shown.output(module, x), case.output(module, x))
    second = replace(case, arguments={name: value[1:] for name, value in masked.arguments.items()})
    torch.testing.assert_close(second.output(module, x[1:]), y[1:])
    apart = (case.output(module, x.masked_fill(hidden, 0.0)) - y).abs()  # zeros are something to attend to
    if y.shape[2:] == x.shape[2:]:
        assert not y[hidden.expand_as(y)].any()
        apart = apart.masked_fill(hidden, 0.0)
    assert apart.max() > 1e-3


def test_not_a_number_stays_where_it_is_seen():
    in_type = spaces.regular(C4.gspace, 1)
    layer = PointSelfAttention(in_type, in_type, radius=1.0).double()
    coords = torch.tensor([[0.0, 0.0], [0.5, 0.0], [5.0, 0.0], [5.5, 0.0], [5.2, 0.0]]).double()
    x = torch.randn(5, 4).double()
    x[0] = torch.nan
    y = layer(GeometricTensor(x, in_type, coords)).tensor
    assert y[:2].isnan().all()
    assert y[2:].isfinite().all()


def test_bad_inputs():
    fields = spaces.regular(C4.gspace, 2)
    layer = PointSelfAttention(fields, fields)
    x = GeometricTensor(torch.randn(4, 8), fields, torch.randn(4, 2))
    long = torch.long
    with pytest.raises(TypeError, match="GeometricTensor"):
        layer(x.tensor)
    with pytest.raises(ValueError, match="coords"):
        layer(GeometricTensor(torch.randn(1, 8, 4, 4), fields))
    for error, message, arguments in (
        (TypeError, "edge_index", {"edge_index": torch.zeros(2, 3)}),
        (ValueError, "edge_index", {"edge_index": torch.zeros(3, 2, dtype=long)}),
        (ValueError, "edge_index", {"edge_index": torch.full((2, 3), 4)}),
        (ValueError, "edge_index", {"edge_index": torch.full((2, 3), -1)}),
        (
            ValueError,
            "different clouds",
            {"edge_index": torch.tensor([[0, 1], [1, 2]]), "batch": torch.tensor([0, 0, 1, 1])},
        ),
        (TypeError, "batch", {"batch": torch.zeros(4)}),
        (ValueError, "batch", {"batch": torch.zeros(3, dtype=long)}),
        (ValueError, "batch", {"batch": torch.full((4,), -1)}),
        (ValueError, "mask", {"mask": torch.ones(4)}),
        (ValueError, "mask", {"mask": torch.ones(3, dtype=torch.bool)}),
        (ValueError, "measure", {"measure": torch.ones(3)}),
        (ValueError, "measure", {"measure": torch.zeros(4)}),
        (ValueError, "measure", {"measure": torch.full((4,), math.inf)}),
        (TypeError, "edge_index", {"edge_index": [[0], [1]]}),
        (TypeError, "mask", {"mask": [True] * 4}),
        (TypeError, "measure", {"measure": 1.0}),
    ):
        with pytest.raises(error, match=message):
            layer(x, **arguments)
    for rule in ({}, {"radius": 1.0}):
        with pytest.raises(ValueError, match=r"coords: .*not finite"):
            PointSelfAttention(fields, fields, **rule)(
                GeometricTensor(torch.randn(4, 8), fields, torch.tensor([[0.0, 1.0]] * 3 + [[math.nan, 0.0]]))
            )
    with pytest.raises(ValueError, match="edge_index"):
        PointSelfAttention(fields, fields, radius=1.0)(x, torch.zeros(2, 1, dtype=long))
    with pytest.raises(ValueError, match="dense"):
        PointSelfAttention(fields, fields, radius=1.0, backend="dense")(x)
    with pytest.raises(ValueError, match="input_shape"):
        layer.evaluate_output_shape((4, 8, 3))
    with pytest.raises(ValueError, match="type"):
        layer(cloud(spaces.regular(C4.gspace, 1), 4))


def test_bad_features_of_edges():
    fields = spaces.regular(C4.gspace, 2)
    layer, without = PointSelfAttention(fields, fields, edge_dim=2), PointSelfAttention(fields, fields)
    x, edges = GeometricTensor(torch.randn(4, 8), fields, torch.randn(4, 2)), torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
    batch, mask = torch.tensor([0, 0, 0, 1]), torch.tensor([True, True, True, False])
    tables, rows = torch.randn(2, 3, 3, 2), torch.randn(4, 2)
    layer(x, batch=batch, edge_attr=tables)
    layer(x, edges, edge_attr=rows)
    nan = torch.where(torch.arange(3)[:, None] == 1, torch.nan, tables)
    for error, message, arguments in (
        (ValueError, r"got None, .* edge_dim=2; needed \(clouds, points, points, 2\) without edge_index", {}),
        (ValueError, r"got None, .* edge_dim=2; needed \(edges, 2\) with edge_index", {"edge_index": edges}),
        (TypeError, "got list", {"edge_attr": [1.0]}),
        (TypeError, "got torch.int64, needed floating-point", {"edge_attr": tables.long(), "batch": batch}),
        (ValueError, r"shape \(3, 2\) for 4 edges", {"edge_attr": rows[:3], "edge_index": edges}),
        (ValueError, r"shape \(2, 3, 3, 2\) for 4 edges", {"edge_attr": tables, "edge_index": edges}),
        (ValueError, r"shape \(4, 2\) for 1 clouds of up to 4 points", {"edge_attr": rows}),
        (ValueError, "for 1 clouds of up to 4 points", {"edge_attr": tables}),
        (ValueError, "for 2 clouds of up to 3 points", {"edge_attr": tables[:1], "batch": batch}),
        (ValueError, "for 2 clouds of up to 3 points", {"edge_attr": tables[:, :, :2], "batch": batch}),
        (ValueError, r"needed \(clouds, points, points, 2\)", {"edge_attr": tables[..., :1], "batch": batch}),
        (ValueError, r"needed \(edges, 2\)", {"edge_attr": rows[:, :1], "edge_index": edges}),
        (ValueError, "not finite", {"edge_attr": nan, "batch": batch}),
        (ValueError, "not finite", {"edge_attr": rows / 0, "edge_index": edges}),
    ):
        with pytest.raises(error, match=f"edge_attr: .*{message}"):
            layer(x, **arguments)
    # What belongs to no pair of points that are there may be anything.
    layer(x, batch=batch, edge_attr=torch.where(torch.arange(2).view(2, 1, 1, 1) == 1, nan, tables), mask=mask)
    padded = torch.full((2, 5, 5, 2), torch.nan)
    padded[:, :3, :3] = tables
    assert torch.equal(layer(x, batch=batch, edge_attr=padded).tensor, layer(x, batch=batch, edge_attr=tables).tensor)
    for module in (without, PointTransformerBlock(fields, fields)):
        with pytest.raises(ValueError, match=r"edge_attr: .*no edge_dim"):
            module(x, edges, edge_attr=rows)
    with pytest.raises(ValueError, match=r"edge_attr: .*\(edges, 2\)"):
        layer.export()(x.tensor, x.coords, edges, edge_attr=rows[:3])
    for wrong in (0, -1):
        with pytest.raises(ValueError, match="edge_dim"):
            PointSelfAttention(fields, fields, edge_dim=wrong)
    with pytest.raises(TypeError, match="edge_dim"):
        PointSelfAttention(fields, fields, edge_dim=1.5)
