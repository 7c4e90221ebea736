"""Registers and masks of attention on grids and between points."""

from dataclasses import replace

import pytest
import torch
from escnn import gspaces
from escnn.nn import FieldType, GeometricTensor

from escnn_attention import (
    FourierEncoding,
    GroupSelfAttention,
    LiftingSelfAttention,
    Pair,
    PairKernel,
    PointAttentiveConv,
    PointSelfAttention,
    PointTransformerBlock,
    TransformerBlock,
)
from escnn_attention.functional.grid.native import why_not_built
from tests import spaces
from tests.layers import BATCH, EDGES, MASK, drawn
from tests.nn.points import cloud, error_of

COMPILED = () if why_not_built(torch.float64) else ("native",)
C4, D3, D4 = gspaces.rot2dOnR2(4), gspaces.flipRot2dOnR2(3), gspaces.flipRot2dOnR2(4)


ENCODINGS = pytest.mark.parametrize("encoding", ["mlp", "fourier", "rotary", "absolute", "none"])


@pytest.mark.sampled
@ENCODINGS
@pytest.mark.parametrize("query", ["own", "all"])
@pytest.mark.parametrize("size", [3, None])
def test_registers_on_grids(encoding, query, size):
    """Equivariant, exported, and the same by all backends; and they matter."""
    for in_type in (spaces.mixed(C4), spaces.scalars(C4, 2)):
        options = {"head_fields": 4, "encoding": encoding, "query": query, "registers": 3}
        layer = drawn(GroupSelfAttention(in_type, spaces.mixed(C4), 1, size, **options))
        x = spaces.random_field(in_type, 4, 4)
        assert spaces.grid_error(layer, x) < 1e-11
        y = layer(x).tensor
        torch.testing.assert_close(layer.export()(x.tensor), y)
        for backend in ("reference", "blocked", *COMPILED):
            layer.plain.backend = backend
            torch.testing.assert_close(layer(x).tensor, y)
        assert torch.allclose(layer.attention_maps(x, [(1, 1)]).sum((-3, -2, -1)), torch.ones(()).double())
        layer.plain.registers = None
        if encoding in ("mlp", "fourier") and in_type.size > 2:
            layer.plain.quotient = layer.plain.quotient[:, :4]
            assert (layer(x).tensor - y).abs().max() > 1e-3


def test_registers_of_a_pose_are_not_equivariant():
    fields = spaces.regular(C4, 2)
    layer, x = drawn(GroupSelfAttention(fields, fields, 1, 3, registers=1)), spaces.random_field(fields, 3, 3)
    assert spaces.grid_error(layer, x) < 1e-12
    layer.plain.quotient = layer.plain.quotient.clone()
    layer.plain.quotient[1, -1] = 0
    assert spaces.grid_error(layer, x) > 1e-3


def test_registers_hold_attention():
    """Where the key of a register is what all queries look for, its value is all that is left."""
    fields = spaces.regular(C4, 2)
    layer = GroupSelfAttention(fields, fields, 1, 3, encoding="none", registers=1, bias=False).double()
    x = spaces.random_field(fields, 3, 3)
    with torch.no_grad():
        assert layer.plain.to_heads(x.tensor.movedim(1, -1))[1].shape[3] == 5
        layer.plain.registers.values.fill_(2.0)
        layer.plain.project_in.weight.zero_()
        even = layer(x).tensor
        layer.plain.registers.values.fill_(4.0)
        torch.testing.assert_close(layer(x).tensor, 2 * even)  # the values of features are zero


def test_registers_without_change_nothing_is_saved():
    fields = spaces.regular(C4, 2)
    assert not any("registers" in key for key in GroupSelfAttention(fields, fields, kernel_size=None).state_dict())


POINT_ENCODINGS = {
    "mlp": "mlp",
    "Fourier": FourierEncoding(3),
    "rotary": "rotary",
    "absolute": "absolute",
    "none": "none",
    "LieTransformer": PairKernel(hidden=4),
    "raw": PairKernel("concat", "raw", "mlp", hidden=4),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("query", ["own", "all"])
@pytest.mark.parametrize("encoding", POINT_ENCODINGS)
def test_registers_between_points(encoding, query):
    for space in (D3, gspaces.invOnR3()):
        fields = spaces.mixed(space)
        options = {"head_fields": 4, "encoding": POINT_ENCODINGS[encoding], "query": query, "registers": 2}
        layer = drawn(PointSelfAttention(fields, fields, 1, **options))
        x = cloud(fields, 9)
        assert error_of(layer, x, spaces.generators(space), batch=BATCH) < 1e-11
        y = layer(x, batch=BATCH, mask=MASK).tensor
        torch.testing.assert_close(layer.export()(x.tensor, x.coords, None, BATCH, MASK), y)
        for backend in ("neighbours", *COMPILED):
            layer.plain.backend = backend
            torch.testing.assert_close(layer(x, batch=BATCH, mask=MASK).tensor, y)
        assert error_of(layer, x, spaces.generators(space), edge_index=EDGES) < 1e-11


def test_registers_of_convolutions_and_of_samples():
    fields = spaces.mixed(D3)
    layer = drawn(PointAttentiveConv(fields, fields, 1, head_fields=2, kernel_features=2, registers=2))
    assert error_of(layer, cloud(fields, 7), spaces.generators(D3)) < 1e-11
    so2 = gspaces.rot2dOnR2(-1)
    vectors = FieldType(so2, [so2.irrep(1), so2.trivial_repr])
    layer = drawn(GroupSelfAttention(vectors, vectors, 1, 3, head_fields=2, samples=4, registers=2))
    x = spaces.random_field(vectors, 3, 3)
    quarter = so2.fibergroup.element(torch.pi / 2)
    error = layer(x.transform(quarter)).tensor - layer(x).transform(quarter).tensor
    assert error.abs().max() < 1e-10
    scalars = spaces.scalars(C4, 2)
    lifting = drawn(LiftingSelfAttention(scalars, spaces.regular(C4, 2), 1, 3, registers=2))
    assert spaces.grid_error(lifting, spaces.random_field(scalars, 4, 4)) < 1e-11


def holes(*shape):
    return torch.rand(2, *shape, generator=torch.Generator().manual_seed(3)) > 0.3


@pytest.mark.sampled
@ENCODINGS
@pytest.mark.parametrize(("query", "keys"), [("own", "all"), ("all", "all"), ("own", "own")])
@pytest.mark.parametrize("size", [3, None])
def test_masks_on_grids(encoding, query, keys, size):
    """What is hidden reaches nothing, whatever it is; equivariant with the mask; the same by all backends."""
    in_type = spaces.mixed(C4)
    options = {"head_fields": 4, "encoding": encoding, "query": query, "keys": keys}
    layer = drawn(GroupSelfAttention(in_type, in_type, 1, size, **options))
    x, mask = spaces.random_field(in_type, 4, 4), holes(4, 4)
    y = layer(x, mask).tensor
    hidden = ~mask.unsqueeze(1).expand_as(y)
    assert not y[hidden].any()
    assert y[~hidden].abs().max() > 0
    other = in_type(torch.where(hidden, torch.nan, x.tensor).requires_grad_())
    out = layer(other, mask).tensor
    assert torch.equal(out, y)
    (gradient,) = torch.autograd.grad(out.sum(), other.tensor)
    assert gradient.isfinite().all()
    for g in spaces.generators(C4):
        turned = spaces.scalars(C4, 1)(mask.unsqueeze(1).double()).transform(g).tensor.squeeze(1) > 0.5
        torch.testing.assert_close(layer(x.transform(g), turned).tensor, layer(x, mask).transform(g).tensor)
    torch.testing.assert_close(layer.export()(x.tensor, mask), y)
    for backend in ("reference", "blocked", *COMPILED):
        layer.plain.backend = backend
        torch.testing.assert_close(layer(x, mask).tensor, y)
    torch.testing.assert_close(layer(x, torch.ones_like(mask)).tensor, layer(x).tensor)
    assert (layer(x).tensor - y)[~hidden].abs().max() > 1e-3


def test_a_mask_of_a_margin_is_a_smaller_grid():
    """Without what tells positions by the size of the grid: images of several sizes in one batch."""
    fields = spaces.regular(C4, 2)
    block = drawn(TransformerBlock(fields, fields, 1, 3, norm="pre", crop=0))
    small = spaces.random_field(fields, 3, 4)
    padded = torch.nn.functional.pad(small.tensor, (0, 2, 0, 3), value=7.0)
    mask = torch.zeros(2, 6, 6, dtype=torch.bool)
    mask[:, :3, :4] = True
    y = block(fields(padded), mask).tensor
    torch.testing.assert_close(y[:, :, :3, :4], block(small).tensor)
    assert not y[:, :, 3:].any()
    torch.testing.assert_close(block.export()(padded, mask), y)
    cropped = drawn(TransformerBlock(fields, fields, 1, 3, norm="pre", crop=1))
    z = cropped(fields(padded), mask).tensor
    assert z.shape[2:] == (4, 4)
    assert not z[:, :, 2:].any()
    assert not z[:, :, :, 3:].any()
    torch.testing.assert_close(cropped.export()(padded, mask), z)


def test_global_attention_measures_by_the_whole_grid():
    """Offsets are in units of the grid, hidden positions included; margins on all sides would not change a window."""
    fields = spaces.regular(C4, 2)
    layer = drawn(GroupSelfAttention(fields, fields, 1, None))
    small = spaces.random_field(fields, 3, 3)
    padded = torch.nn.functional.pad(small.tensor, (0, 2, 0, 2))
    mask = torch.zeros(2, 5, 5, dtype=torch.bool)
    mask[:, :3, :3] = True
    y = layer(fields(padded), mask).tensor[:, :, :3, :3]
    assert (y - layer(small).tensor).abs().max() > 1e-3
    # On a grid of its own it has the same features with an encoding that is stretched as much.
    stretch = torch.tensor(2.0 / 4.0, dtype=torch.float64)
    first = next(module for module in layer.plain.encoding.modules() if isinstance(module, torch.nn.Linear))
    with torch.no_grad():
        first.weight.mul_(stretch)
    torch.testing.assert_close(layer(small).tensor, y)


FIELDS = spaces.regular(C4, 2)


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (TypeError, "mask: got torch.float32", lambda f: f(mask=torch.ones(2, 3, 3))),
        (TypeError, "mask: got bool", lambda f: f(mask=True)),
        (ValueError, "mask: got shape", lambda f: f(mask=torch.ones(3, 3, dtype=torch.bool))),
    ],
)
def test_bad_masks(error, message, call):
    layer, x = GroupSelfAttention(FIELDS, FIELDS, 1, 3), FIELDS(torch.randn(2, 8, 3, 3))
    with pytest.raises(error, match=message):
        call(lambda mask: layer(x, mask))


def test_norms_over_positions_take_no_mask():
    x, mask = FIELDS(torch.randn(2, 8, 3, 3)), torch.ones(2, 3, 3, dtype=torch.bool)
    for options in ({"norm": "gsa"}, {"norm": "pre", "norm_kind": "batch"}):
        with pytest.raises(ValueError, match="mask: got one, and norms of this block are over positions"):
            TransformerBlock(FIELDS, FIELDS, 1, 3, **options)(x, mask)


@pytest.mark.parametrize("layer", [GroupSelfAttention, PointSelfAttention])
def test_bad_registers(layer):
    with pytest.raises(ValueError, match="registers: got 1, which belong to no pose"):
        layer(FIELDS, FIELDS, registers=1, keys="own")
    with pytest.raises(ValueError, match="registers: got -1"):
        layer(FIELDS, FIELDS, registers=-1)
    with pytest.raises(TypeError, match="registers: got"):
        layer(FIELDS, FIELDS, registers=1.5)


SHARED = {"head_fields": 3, "query": "own", "keys": "own", "shared_scores": True}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("encoding", ["mlp", "separable", "fourier", "none"])
@pytest.mark.parametrize("size", [3, None])
def test_shared_scores_are_the_formula(encoding, size):
    for in_type in (spaces.mixed(C4), FieldType(C4, 2 * [C4.irrep(1)]), spaces.scalars(C4, 2)):
        layer = drawn(GroupSelfAttention(in_type, spaces.mixed(C4), 2, size, encoding=encoding, **SHARED))
        x = spaces.random_field(in_type, 3, 4)
        assert spaces.grid_error(layer, spaces.random_field(in_type, 4, 4)) < 1e-11
        q, k, v = layer.plain.to_heads(x.tensor.movedim(1, -1))
        grid = layer.plain.positions(x.tensor)
        everything = torch.arange(12)
        rows = grid.rows(everything[:, None], everything)
        score = torch.einsum("mbnhc,mbkhc->mbnk", q, k)
        spatial = layer.plain.encoding.offsets(grid.offsets @ layer.plain.inverse_action.mT)
        if spatial is not None:
            seen = spatial[:, :, rows.clamp(min=0)].expand(2, -1, -1, -1, -1)
            score = score + torch.einsum("mbnhc,mhnkc->mbnk", q, seen)
        p = (score / (4 * 3) ** 0.5).masked_fill(rows < 0, -torch.inf).softmax(-1)
        y = layer.plain.project_out(torch.einsum("mbnk,mbkhc->mbnhc", p, v)).transpose(1, 2).unflatten(2, (3, 4))
        for backend in ("reference", "blocked", *COMPILED):
            layer.plain.backend = backend
            torch.testing.assert_close(layer(x).tensor, y)
        torch.testing.assert_close(layer.export()(x.tensor), y)
        maps = layer.attention_maps(x, [(1, 1)], [0, 3])
        assert maps.shape == (2, 2, 2, 1, 1, 1, 3, 4)  # the scores of one pose, for all
        torch.testing.assert_close(maps[:, :, 0, 0, 0, 0].flatten(2), p[:, :, 5].transpose(0, 1))


def test_scores_of_one_pose_for_all_are_not_equivariant():
    fields = spaces.regular(C4, 2)
    layer, x = drawn(GroupSelfAttention(fields, fields, 1, 3, **SHARED)), spaces.random_field(fields, 4, 4)
    assert spaces.grid_error(layer, x) < 1e-12
    first = torch.tensor([1.0, 0, 0, 0]).double().repeat_interleave(3)
    plain = layer.plain.call

    def of_first(*arguments):
        call = plain(*arguments)
        return replace(call, q=call.q * first)

    layer.plain.call = of_first
    assert spaces.grid_error(layer, x) > 1e-3


@pytest.mark.sampled(4)
@pytest.mark.parametrize("encoding", ["mlp", "separable", "fourier", "none"])
@pytest.mark.parametrize("options", [{}, {"radius": 2.0}, {"normalization": "count"}], ids=str)
def test_shared_scores_between_points_are_the_formula(encoding, options):
    count, measure = "normalization" in options, torch.linspace(0.5, 2, 9).double()
    for in_type in (spaces.mixed(C4), spaces.scalars(C4, 2)):
        layer = drawn(PointSelfAttention(in_type, spaces.mixed(C4), 2, encoding=encoding, **options, **SHARED))
        assert max(error for _, error in layer.check_equivariance(1e-10, 0)) < 1e-10
        coords = torch.randn(9, 2).double().requires_grad_()
        x = GeometricTensor(torch.randn(9, in_type.size).double().requires_grad_(), in_type, coords)
        q, k, v = (t[:, 0] for t in layer.plain.to_heads(x.tensor.unsqueeze(0)))  # M, N, P, C
        offsets = (coords - coords[:, None]) / layer.plain.length_scale
        score = torch.einsum("mihc,mjhc->mij", q, k)
        # What is seen of a point from each pose.
        spatial = layer.plain.encoding.offsets(torch.einsum("hab,ijb->hija", layer.plain.inverse_action, offsets))
        if spatial is not None:
            score = score + torch.einsum("mihc,mhijc->mij", q, spatial.expand(2, -1, -1, -1, -1))
        score, hidden = score / (4 * 3) ** 0.5, BATCH[:, None] != BATCH
        if "radius" in options:
            hidden = hidden | ((coords - coords[:, None]).norm(dim=-1) > 2)
        weights = measure.expand(9, 9).masked_fill(hidden, 0.0)
        if count:
            p = score * weights / weights.sum(-1, keepdim=True)
        else:
            p = score.exp() * weights / (score.exp() * weights).sum(-1, keepdim=True)
        expected = layer.plain.project_out(torch.einsum("mij,mjhc->mihc", p, v).unsqueeze(1))[0]
        for backend in ("neighbours", "auto", *COMPILED, *(() if options else ("reference",))):
            layer.plain.backend = backend
            y = layer(x, batch=BATCH, measure=measure).tensor
            torch.testing.assert_close(y, expected, rtol=1e-11, atol=1e-12)
            variables = [x.tensor, coords, *layer.parameters()]
            keep = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
            gradients = (torch.autograd.grad(t.sin().sum(), variables, **keep) for t in (y, expected))
            for found, needed in zip(*gradients, strict=True):
                torch.testing.assert_close(found, needed, rtol=1e-9, atol=1e-10)
        if not options and encoding in ("fourier", "none"):
            layer.plain.backend = "dense"
            torch.testing.assert_close(layer(x, batch=BATCH, measure=measure).tensor, expected, rtol=1e-11, atol=1e-12)
            layer.plain.backend = "auto"
        exported = layer.export()(x.tensor, coords, None, BATCH, None, measure)
        torch.testing.assert_close(exported, expected, rtol=1e-11, atol=1e-12)


def test_features_of_edges_add_to_shared_scores():
    fields, attr = spaces.regular(C4, 2), torch.randn(EDGES.shape[1], 3).double()
    layer, x = drawn(PointSelfAttention(fields, fields, 2, edge_dim=3, **SHARED)), cloud(fields, 9)
    y = layer(x, EDGES, edge_attr=attr)
    for g in C4.fibergroup.elements:
        moved = layer(x.transform(g), EDGES, edge_attr=attr).tensor
        torch.testing.assert_close(moved, y.transform_fibers(g).tensor, rtol=1e-10, atol=1e-11)
    q, k, v = (t[:, 0] for t in layer.plain.to_heads(x.tensor.unsqueeze(0)))
    (key, query), offsets = EDGES, (x.coords[EDGES[0]] - x.coords[EDGES[1]]) / layer.plain.length_scale
    seen = layer.plain.encoding.offsets(torch.einsum("hab,eb->hea", layer.plain.inverse_action, offsets))
    score = torch.einsum("mehc,mehc->me", q[:, query], k[:, key] + seen.expand(2, -1, -1, -1).transpose(1, 2))
    added, factor = torch.einsum("amf,ef->ame", layer.plain.edge_readout, attr)
    score = score / (4 * 3) ** 0.5 + added
    expected = []
    for i in range(len(x.coords)):
        p = score[:, query == i].softmax(-1) * (1 + factor[:, query == i])
        expected.append(torch.einsum("me,mehc->mhc", p, v[:, key[query == i]]))
    expected = layer.plain.project_out(torch.stack(expected, dim=1).unsqueeze(1))[0]
    for backend in ("neighbours", *COMPILED):
        layer.plain.backend = backend
        torch.testing.assert_close(layer(x, EDGES, edge_attr=attr).tensor, expected, rtol=1e-11, atol=1e-12)


def test_scores_between_points_of_one_pose_for_all_are_not_equivariant():
    fields = spaces.regular(C4, 2)
    layer = drawn(PointSelfAttention(fields, fields, 1, **SHARED))
    assert "shared_scores=True" in repr(layer)
    first, plain = torch.tensor([1.0, 0, 0, 0]).double().repeat_interleave(3), layer.plain.call

    def of_first(*arguments):
        call = plain(*arguments)
        return replace(call, q=call.q * first)

    layer.check_equivariance(1e-11, 0)
    layer.plain.call = of_first
    with pytest.raises(AssertionError, match="the error is"):
        layer.check_equivariance(1e-4, 0)


def test_shared_scores_between_points_are_of_offsets():
    fields = spaces.regular(C4, 2)
    for message, options in (
        ('needed "own" of both', {"keys": "all"}),
        ("RotaryEncoding is of every pose", {"encoding": "rotary"}),
        ("AbsoluteEncoding is of every pose", {"encoding": "absolute"}),
        ("PairKernel is of every pose", {"encoding": PairKernel()}),
        (r"got True with Pair\(\), needed the offset", {"relation": Pair()}),
    ):
        with pytest.raises(ValueError, match=f"^shared_scores: .*{message}"):
            PointSelfAttention(fields, fields, 1, **{**SHARED, **options})
    with pytest.raises(TypeError, match=r"^shared_scores: PointAttentiveConv has no such option"):
        PointAttentiveConv(fields, fields, 1, shared_scores=True)
    with pytest.raises(ValueError, match=r"^shared_scores: got True, but an attentive convolution"):
        PointTransformerBlock(fields, fields, kernel_features=2, shared_scores=True)


def test_shared_scores_take_masks_and_registers_not():
    fields = spaces.regular(C4, 2)
    layer, x = drawn(GroupSelfAttention(fields, fields, 1, 3, **SHARED)), spaces.random_field(fields, 4, 4)
    mask = holes(4, 4)
    y = layer(x, mask).tensor
    hidden = ~mask.unsqueeze(1).expand_as(y)
    assert torch.equal(layer(fields(torch.where(hidden, torch.nan, x.tensor)), mask).tensor, y)
    for message, options in (
        ('needed "own" of both', {"keys": "all"}),
        ("RotaryEncoding is of every pose", {"encoding": "rotary"}),
        ("AbsoluteEncoding is of every pose", {"encoding": "absolute"}),
    ):
        with pytest.raises(ValueError, match=message):
            GroupSelfAttention(fields, fields, 1, 3, **{**SHARED, **options})
    so2 = gspaces.rot2dOnR2(-1)
    vectors = FieldType(so2, [so2.irrep(1)])
    with pytest.raises(ValueError, match="samples of a continuous group"):
        GroupSelfAttention(vectors, vectors, 1, 3, samples=4, **SHARED)
