"""The transformer block on points."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from escnn import gspaces, nn
from escnn.group import cyclic_group, direct_product
from escnn.nn import FieldType, GeometricTensor
from torch.utils.checkpoint import checkpoint

from escnn_attention import (
    AttentiveConv,
    FieldLayerNorm,
    GroupCrossAttention,
    GroupSelfAttention,
    PointSelfAttention,
    PointTransformerBlock,
    PoseLinear,
    SiLU,
    SphereSelfAttention,
    SphereTransformerBlock,
    TransformerBlock,
    sequence_space,
)
from escnn_attention.nn.pointwise import dropout_of, shortcut_of
from tests import spaces
from tests.layers import drawn, redrawn
from tests.nn import spheres
from tests.nn.points import cloud, mixed

norms = pytest.mark.parametrize("norm", ["gsa", "pre"])
C4 = gspaces.rot2dOnR2(4)
REGULAR_FIELD = [C4.regular_repr]
REGULAR, VECTORS = spaces.regular(C4, 2), FieldType(C4, [C4.irrep(1)])


def without(block, branch):
    """The block without one of its branches, whose last map gives zero."""
    last = [m for m in block.modules() if isinstance(m, PoseLinear)][-1]
    assert last is not block.shortcut
    with torch.no_grad():
        for parameter in (last if branch == "network" else block.attention.plain.project_out).parameters():
            parameter.zero_()
    return block


@norms
@pytest.mark.parametrize("same", [True, False])
def test_is_the_formula(norm, same):
    out_type = spaces.regular(C4, 4)
    in_type = out_type if same else spaces.scalars(C4, 3)
    block = drawn(TransformerBlock(in_type, out_type, 2, 3, norm=norm, dropout=0.3))
    assert isinstance(block.shortcut, nn.IdentityModule if same else PoseLinear)

    def silu(y):
        return nn.GeometricTensor(torch.nn.functional.silu(y.tensor), y.type)

    x = spaces.random_field(in_type, 4, 4)
    start = x if same else block.shortcut(x)
    (before, *_), (after, *_) = block.before, block.after
    if norm == "gsa":
        expand, inside, _, contract, last, *_ = block.feed_forward
        y = start + silu(after(block.attention(silu(before(x)))))
        expected = y + last(contract(silu(inside(expand(y)))))
    else:
        middle, expand, _, contract, *_ = block.feed_forward
        y = start + block.attention(before(x))
        expected = y + contract(silu(expand(middle(y))))
    torch.testing.assert_close(block(x).tensor, expected.tensor)


def test_scopes_of_the_norms():
    for norm, norm_scope, expected in (
        ("gsa", None, "sample"),
        ("pre", None, "position"),
        ("gsa", "position", "position"),
        ("pre", "sample", "sample"),
    ):
        block = TransformerBlock(REGULAR, REGULAR, norm=norm, norm_scope=norm_scope, kernel_size=None)
        assert {m.plain.scope for m in block.modules() if isinstance(m, FieldLayerNorm)} == {expected}


@pytest.mark.parametrize(
    ("norm", "fields", "hidden_fields", "expected"),
    [
        *(("gsa", 8 * REGULAR_FIELD, None, 4), ("gsa", REGULAR_FIELD, None, 1), ("gsa", 3 * REGULAR_FIELD, 5, 5)),
        *(("pre", 8 * REGULAR_FIELD, None, 16), ("pre", 3 * REGULAR_FIELD, 5, 5)),
        ("pre", 6 * [C4.irrep(1)], None, 6),  # 12 channels, 3 regular fields
    ],
)
def test_hidden_fields(norm, fields, hidden_fields, expected):
    field_type = FieldType(C4, fields)
    block = TransformerBlock(field_type, field_type, norm=norm, hidden_fields=hidden_fields, kernel_size=None)
    expand, contract = (m for m in block.modules() if isinstance(m, PoseLinear))
    assert expand.out_type == contract.in_type == spaces.regular(C4, expected)


def test_options_reach_the_attention():
    hidden = spaces.regular(C4, 4)
    options = {"head_fields": 3, "query": "all", "encoding": "fourier", "window": "disc", "dilation": 2}
    options |= {"projection": "pointwise", "bias": False, "backend": "reference"}
    block = TransformerBlock(hidden, hidden, 2, 5, attention_dropout=0.25, **options)
    alone = GroupSelfAttention(hidden, hidden, 2, 5, dropout=0.25, **options)
    assert repr(block.attention) == repr(alone)
    shapes = [[tuple(p.shape) for p in m.parameters()] for m in (block.attention, alone)]
    assert shapes[0] == shapes[1]
    linear = [m for m in block.modules() if isinstance(m, PoseLinear)]
    assert [len(list(m.parameters())) for m in linear] == [1, 1]  # no biases
    assert {m.plain.projection.kind for m in linear} == {"pointwise"}


@pytest.mark.parametrize(("norm", "branch"), [("gsa", "network"), ("pre", "network"), ("pre", "attention")])
def test_dropout_keeps_the_mean_and_stops_in_eval_mode(norm, branch):
    """Of either branch, where the other is silent."""
    hidden = spaces.regular(C4, 4)
    block = without(TransformerBlock(hidden, hidden, 2, 3, norm=norm, dropout=0.4), branch)
    if norm == "gsa":  # its last norm gives zero for zero
        assert not any(m.plain.bias.any() for m in block.modules() if isinstance(m, FieldLayerNorm))
    x = hidden(torch.randn(1, 16, 5, 5).expand(400, -1, -1, -1))
    with torch.no_grad():
        kept = block.eval()(x).tensor - x.tensor
        assert torch.equal(block(x).tensor - x.tensor, kept)
        runs = block.train()(x).tensor - x.tensor
    dropped = (runs == 0).float().mean().item()
    assert dropped == pytest.approx(0.4, abs=0.02)
    torch.testing.assert_close(runs[runs != 0], kept[runs != 0] / 0.6, rtol=1e-3, atol=1e-5)
    assert (runs.mean(0) - kept[0]).norm() < 0.1 * kept[0].norm()


def test_dropout_takes_vectors_as_a_whole():
    """Its coordinates alone would not turn like a vector."""
    vectors = FieldType(C4, 5 * [C4.irrep(1)])
    block = without(TransformerBlock(vectors, vectors, kernel_size=3, norm="pre", dropout=0.5), "network").train()
    x = spaces.random_field(vectors, 4, 4, batch=40, dtype=torch.float32)
    with torch.no_grad():
        branch = (block(x).tensor - x.tensor).unflatten(1, (5, 2))
    gone = branch.abs() < 1e-6
    assert torch.equal(gone[:, :, 0], gone[:, :, 1])
    assert 0.3 < gone.float().mean() < 0.7


def test_dropout_takes_channels_of_products_one_by_one():
    """Also beside their trivial representation, of which escnn does not say that the group permutes channels."""
    space = gspaces.no_base_space(direct_product(cyclic_group(2), cyclic_group(3)))
    fields = FieldType(space, [space.trivial_repr, space.regular_repr])
    x, dropout = torch.ones(60, 7), dropout_of(fields, 0.5)
    gone = dropout(fields(x)).tensor == 0
    assert {1, 2, 3, 4, 5} <= set(gone[:, 1:].sum(1).tolist())
    assert dropout.export().train()(x).equal(x)


POINTWISE = {"norm": "pre", "projection": "pointwise"}


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((None, REGULAR), {}, TypeError, "in_type: got NoneType"),
        ((REGULAR, 3), {}, TypeError, "out_type: got int"),
        ((REGULAR, spaces.regular(gspaces.rot2dOnR2(3), 2)), {}, ValueError, "out_type: its gspace is C3"),
        ((VECTORS, REGULAR), {}, ValueError, "in_type: .*irrep_1"),
        ((REGULAR, VECTORS), {}, ValueError, "out_type: .*irrep_1"),
        ((REGULAR, REGULAR, 3), {}, ValueError, "num_heads: "),
        ((REGULAR, REGULAR, 1, 4), {}, ValueError, "kernel_size: got 4"),
        ((REGULAR, REGULAR), {}, TypeError, "kernel_size: got none, needed the odd width .* or None"),
        ((VECTORS, REGULAR), {}, ValueError, 'in_type: norm="gsa" .* irrep_1 .* give norm="pre"'),
        ((REGULAR, REGULAR), {"norm": "post"}, ValueError, "norm: got 'post', needed one of 'gsa', 'pre'"),
        ((REGULAR, REGULAR), {"norm_scope": "batch"}, ValueError, "norm_scope: got 'batch'"),
        ((REGULAR, REGULAR), {"norm_scope": ""}, ValueError, "norm_scope: got ''"),
        ((REGULAR, REGULAR, 1, 3), {"hidden_fields": 0}, ValueError, "hidden_fields: got 0, needed at least 1"),
        ((REGULAR, REGULAR, 1, 3), {"hidden_fields": 1.5}, TypeError, "hidden_fields: got 1.5, needed an integer"),
        ((REGULAR, REGULAR), {"dropout": 1}, ValueError, r"dropout: got 1, needed a probability in \[0, 1\)"),
        ((REGULAR, REGULAR), {"attention_dropout": -0.1}, ValueError, "attention_dropout: got -0.1"),
        ((REGULAR, REGULAR), {"projection": "none"}, ValueError, "projection: got 'none'"),
        ((VECTORS, REGULAR, 1, 3), POINTWISE, ValueError, 'in_type: projection="pointwise"'),
        ((REGULAR, REGULAR), {"quary": "all"}, TypeError, "quary: .* no such option, needed some of .*norm.*query"),
        ((REGULAR, REGULAR), {"attention": 3}, TypeError, "attention: got int, needed an equivariant module"),
        ((REGULAR, REGULAR), {"attention": lambda *_: None}, TypeError, "attention: got NoneType, needed"),
        (
            (VECTORS, REGULAR),
            {"attention": SiLU(REGULAR), "norm": "pre"},
            ValueError,
            "attention: its in_type is .*, n",
        ),
    ],
)
def test_wrong_arguments_are_named(arguments, options, error, message):
    with pytest.raises(error, match=f"^{message}"):
        TransformerBlock(*arguments, **options)


@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_types_of_which_neither_is_regular(dropout):
    """The shortcut goes through regular fields."""
    space = spaces.VOLUME["full cylindrical"]()
    irrep = space.fibergroup.irreps()[-1]
    in_type, out_type = spaces.scalars(space, 2), FieldType(space, [space.trivial_repr, irrep, irrep])
    block = TransformerBlock(in_type, out_type, 1, 3, norm="pre", dropout=dropout).double()
    x = spaces.random_field(in_type, 3, 3, 3)
    exported = block.export()
    torch.testing.assert_close(exported(x.tensor), block(x).tensor)
    assert spaces.grid_error(block, x) < 1e-10


def test_scalars_of_a_product_of_groups_are_activated():
    scalar = spaces.scalars(spaces.VOLUME["full cylindrical"](), 2)
    block = TransformerBlock(scalar, scalar, 1, 3, dropout=0.1).double().eval()
    assert spaces.grid_error(block, spaces.random_field(scalar, 3, 3, 3)) < 1e-10


@pytest.mark.parametrize("size", [7, 8])
@pytest.mark.parametrize("norm", ["gsa", "pre"])
def test_a_cropped_block_is_exact_and_takes_the_margin(norm, size):
    fields = spaces.regular(gspaces.flipRot2dOnR2(4), 2)
    block = TransformerBlock(fields, fields, 1, 3, norm=norm, norm_scope="position", crop=2).double().eval()
    whole = TransformerBlock(fields, fields, 1, 3, norm=norm, norm_scope="position").double().eval()
    whole.load_state_dict(block.state_dict())
    x = spaces.random_field(fields, size, size)
    y = block(x)
    assert tuple(y.shape) == block.evaluate_output_shape(tuple(x.shape)) == (2, 16, size - 4, size - 4)
    # Statistics by position do not see that the margin is gone.
    torch.testing.assert_close(y.tensor, whole(x).tensor[:, :, 2:-2, 2:-2])
    torch.testing.assert_close(block.export()(x.tensor), y.tensor)
    assert spaces.grid_error(block, x) < 1e-12


@pytest.mark.parametrize(
    ("block", "layer", "options", "x"),
    [
        (
            partial(TransformerBlock, norm="pre"),
            GroupSelfAttention,
            {"kernel_size": 3, "query": "all"},
            spaces.random_field(REGULAR, 5, 4),
        ),
        (PointTransformerBlock, PointSelfAttention, {"num_neighbours": 4, "query": "all"}, cloud(mixed(C4, 2), 7)),
        (
            partial(SphereTransformerBlock, samples=6),
            partial(SphereSelfAttention, samples=6),
            {"num_neighbours": 4},
            spheres.on_sphere(spheres.mixed(spheres.ROTATIONS), 9),
        ),
    ],
    ids=["grid", "points", "sphere"],
)
def test_any_attention(block, layer, options, x):
    """As a module, or as a function of the types, it is that of the block with its options, which has none beside."""

    def attention(*types):
        return layer(*types, 2, head_fields=2, dropout=0.1, **options)

    def made(**given):
        torch.manual_seed(0)
        return block(x.type, x.type, **given).double().eval()

    by_options = made(num_heads=2, head_fields=2, attention_dropout=0.1, **options)
    by_module = made(attention=attention(x.type, x.type))
    by_module.load_state_dict(by_options.state_dict())
    expected, tensors = by_options(x).tensor, (x.tensor,) if x.coords is None else (x.tensor, x.coords)
    for other in (by_module, made(attention=attention)):
        assert torch.equal(other(x).tensor, expected)
        assert torch.equal(other.export()(*tensors), expected)
    for name, value in {**options, "attention_dropout": 0.5}.items():
        with pytest.raises(ValueError, match=f"^{name}: got {value!r} beside an attention"):
            made(attention=attention, **{name: value})


def test_an_attentive_convolution_has_no_maps_of_queries():
    block = TransformerBlock(REGULAR, REGULAR, norm="pre", attention=lambda *types: AttentiveConv(*types, 3, padding=1))
    x = spaces.random_field(REGULAR, 6, 6)
    assert spaces.grid_error(block.double().eval(), x) < 1e-10
    with pytest.raises(TypeError, match=r"attention: .*needed GroupSelfAttention"):
        block.attention_maps(x, [(0, 0)])
    with pytest.raises(ValueError, match=r"^mask: .*AttentiveConv .*needed GroupSelfAttention"):
        block(x, torch.ones(2, 6, 6, dtype=torch.bool))


def test_a_bias_that_the_norm_takes_out_is_none():
    """The first bias of the network of a GSA-Nets block with a single hidden field."""
    name = "feed_forward.0.plain.projection.bias"
    assert name not in TransformerBlock(REGULAR, REGULAR, 2, 3).state_dict()
    assert name in TransformerBlock(REGULAR, REGULAR, 2, 3, hidden_fields=2).state_dict()
    assert name.replace("0", "1") in TransformerBlock(REGULAR, REGULAR, 2, 3, norm="pre", hidden_fields=1).state_dict()


def test_hidden_fields_of_scalars_are_not_normalised_away():
    """They are the same number at every pose: of one a layer norm leaves zero, of two a sign."""
    scalars = spaces.scalars(C4, 4)
    options = {"kernel_size": 3, "norm": "gsa", "norm_scope": "position"}
    for kind, least in (("layer", 3), ("rms", 2), (None, 3)):
        with pytest.raises(ValueError, match=f"^hidden_fields: got {least - 1}, .*at least {least}"):
            TransformerBlock(REGULAR, scalars, **options, norm_kind=kind, hidden_fields=least - 1)
        block = redrawn(TransformerBlock(REGULAR, scalars, **options, norm_kind=kind, hidden_fields=least))
        block(spaces.random_field(REGULAR, 4, 4)).tensor.square().sum().backward()
        assert all(p.grad.abs().max() > 1e-6 for p in block.feed_forward.parameters())
    TransformerBlock(REGULAR, scalars, kernel_size=3)


@pytest.mark.parametrize("kind", ["gsa", "pre", "points"])
def test_networks_may_end_in_a_nonlinearity(kind):
    fields, at_points = spaces.regular(C4, 3), kind == "points"
    make = PointTransformerBlock if at_points else partial(TransformerBlock, kernel_size=3, norm=kind)
    block, plain = (drawn(make(fields, fields, last_activation=last)) for last in (True, False))
    plain.load_state_dict(block.state_dict())
    x = cloud(fields, 8) if at_points else spaces.random_field(fields, 4, 4)
    y = x + block.after(block.attention((block.norm if at_points else block.before)(x)))
    before = plain(x).tensor - y.tensor
    torch.testing.assert_close(block(x).tensor, y.tensor + torch.nn.functional.silu(before), rtol=1e-11, atol=1e-11)
    block.check_equivariance(1e-11, 0)
    with pytest.raises(ValueError, match=r"^last_activation: .*every channel .*irrep_1"):
        PointTransformerBlock(fields, VECTORS, last_activation=True)
    with pytest.raises(TypeError, match=r"^last_activation: got 1"):
        make(fields, fields, last_activation=1)


def test_norms_have_an_epsilon():
    on_sphere = spheres.mixed(spheres.ROTATIONS)
    for make in (
        partial(TransformerBlock, REGULAR, REGULAR, 1, 3),
        partial(PointTransformerBlock, REGULAR, REGULAR),
        partial(SphereTransformerBlock, on_sphere, on_sphere),
    ):
        norms = [part for part in make(norm_eps=0.2).modules() if isinstance(part, FieldLayerNorm)]
        assert {norm.plain.eps for norm in norms} == {0.2}
        with pytest.raises(ValueError, match=r"^eps: got -1"):
            make(norm_eps=-1)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("gspace", [C4, gspaces.flipRot2dOnR2(3), gspaces.octaOnR3(), gspaces.invOnR3()])
def test_shortcuts_lose_nothing_that_fits(gspace):
    """Of each irrep as many copies come through as both types have, however many scalars they are."""
    irreps = gspace.fibergroup.irreps()[:3]
    for counts, others in (((6, 2, 1), (5, 3, 0)), ((1, 1, 0), (0, 4, 0)), ((9, 0, 0), (7, 0, 2))):
        in_type, out_type = (
            FieldType(gspace, [field for field, n in zip(irreps, several, strict=False) for _ in range(n)])
            for several in (counts, others)
        )
        shortcut = shortcut_of(in_type, out_type, "group").double()
        space = (1,) * gspace.dimensionality
        x = torch.randn(60, in_type.size, *space).double()
        y = shortcut(in_type(x)).tensor.flatten(1)
        rank = sum(min(n, m) * irrep.size for n, m, irrep in zip(counts, others, irreps, strict=False))
        assert torch.linalg.matrix_rank(y - y.mean(0), atol=1e-8) == rank
        assert spaces.grid_error(shortcut, in_type(x)) < 1e-12


@pytest.mark.sampled(1, of="compiled graphs")
@norms
def test_a_block_that_trains_compiles_to_one_graph(norm):
    fields = FieldType(C4, 2 * [C4.regular_repr])
    block = TransformerBlock(fields, fields, num_heads=1, kernel_size=3, norm=norm).double()
    x = torch.randn(2, fields.size, 5, 5).double()

    def results():
        block.zero_grad()
        y = block(fields(x)).tensor
        y.square().sum().backward()
        return [y.detach(), *(p.grad.clone() for p in block.parameters())]

    expected = results()
    torch.compiler.reset()
    block.compile(backend="eager", fullgraph=True)
    torch.testing.assert_close(results(), expected)


MEMORIES = {
    "points": (C4, {"radius": 1.5, "encoding": "fourier"}),
    "image": (C4, {"encoding": "mlp"}),
    "sequence": (sequence_space(C4.fibergroup), {"encoding": "mlp"}),
}


def with_memory(name, condition=3):
    """A block of a decoder, its features at points, and what else it is called with."""
    torch.manual_seed(0)
    space, options = MEMORIES[name]
    in_type, memory_type = mixed(C4, 2), spaces.mixed(space)
    attention = GroupCrossAttention(in_type, memory_type, in_type, head_fields=2, **options)
    block = PointTransformerBlock(in_type, in_type, head_fields=2, condition=condition, cross_attention=attention)
    rows = {"batch": torch.tensor([0, 0, 0, 1, 1, 1, 1, 1])}
    rows |= {} if condition is None else {"condition": torch.randn(2, condition).double()}
    rows |= {"memory_batch": torch.tensor([0, 1, 0, 1, 0, 0, 1, 1])} if name == "points" else {}
    memory = spaces.random_field(memory_type, *spaces.shape_of(space, 3))
    return drawn(block), cloud(in_type, 8), {"memory": cloud(memory_type, 8) if name == "points" else memory, **rows}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("condition", [None, 3])
@pytest.mark.parametrize("name", MEMORIES)
@pytest.mark.slow
def test_points_attend_to_a_memory(name, condition):
    block, x, others = with_memory(name, condition)
    assert len(block.check_equivariance(1e-10, 0)) == 4
    g = C4.fibergroup.generators[0]
    wrong = block(x.transform(g), **others).tensor - block(x, **others).transform_fibers(g).tensor
    assert wrong.abs().max() > 1e-3  # a memory that stays
    # The formula, of its layers.
    leaves = [x.tensor.requires_grad_(), others["memory"].tensor.requires_grad_(), *block.parameters()]
    c = () if condition is None else (others["condition"], others["batch"])
    norm, attention, gate = (getattr(block.cross_attention, part) for part in ("norm", "attention", "gate"))
    hidden = block.attention(block.norm(x, *c), batch=others["batch"])
    z = x + (hidden if gate is None else block.attention_gate(hidden, *c))
    places = {"query_batch": others["batch"], "key_batch": others.get("memory_batch")}
    seen = attention(norm(z, *c), others["memory"], **places)
    z = z + (seen if gate is None else gate(seen, *c))
    last = block.feed_forward(z if gate is None else block.feed_forward_norm(z, *c))
    z = z + (last if gate is None else block.feed_forward_gate(last, *c))

    def results(y):
        return [y, *torch.autograd.grad(y.square().sum(), leaves)]

    expected = results(z.tensor)
    for backend in ("auto", "reference"):
        attention.plain.backend = backend
        torch.testing.assert_close(results(block(x, **others).tensor), expected, rtol=1e-10, atol=1e-10)
    checkpointed = checkpoint(lambda: block(x, **others).tensor, use_reentrant=False)
    torch.testing.assert_close(results(checkpointed), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", MEMORIES)
def test_masked_points_beside_a_memory(name):
    block, x, others = with_memory(name)
    mask = torch.tensor([True, True, False, True, False, True, True, True])
    hidden = GeometricTensor(x.tensor.masked_fill(~mask[:, None], torch.nan), x.type, x.coords)
    y = block(hidden, mask=mask, **others).tensor
    there = {**others, "batch": others["batch"][mask]}
    alone = block(GeometricTensor(x.tensor[mask], x.type, x.coords[mask]), **there).tensor
    torch.testing.assert_close(y[mask], alone, rtol=1e-10, atol=1e-10)
    assert not y[~mask].any()
    arguments, named = of_plain(hidden, {**others, "mask": mask})
    torch.testing.assert_close(block.export()(*arguments, **named), y)


@pytest.mark.sampled(1, of="programs")
@pytest.mark.parametrize("name", MEMORIES)
def test_programs_of_points_beside_a_memory(name):
    block, x, others = with_memory(name)
    plain, (arguments, named) = block.export(), of_plain(x, {**others, "mask": torch.arange(8) != 5})
    program = torch.export.export(plain, arguments, named, strict=False)
    torch.testing.assert_close(program.module()(*arguments, **named), plain(*arguments, **named))


def of_plain(x, others):
    """The arguments of an exported block, in order and by name."""
    memory = others["memory"]
    coords = {} if memory.coords is None else {"memory_coords": memory.coords}
    return (x.tensor, x.coords), {**others, "memory": memory.tensor, **coords}


def test_a_memory_that_does_not_fit():
    block, x, others = with_memory("image")
    without = {name: value for name, value in others.items() if name != "memory"}
    with pytest.raises(ValueError, match="memory: PointTransformerBlock got None"):
        block(x, **without)
    plain = PointTransformerBlock(x.type, x.type).double()
    with pytest.raises(ValueError, match="memory: PointTransformerBlock got one and has no cross-attention"):
        plain(x, memory=others["memory"])
    attention = block.cross_attention.attention
    for error, options in ((TypeError, {"cross_attention": 3}), (ValueError, {"out_type": spaces.regular(C4, 1)})):
        with pytest.raises(error, match="cross_attention: "):
            PointTransformerBlock(**{"in_type": x.type, "out_type": x.type, "cross_attention": attention, **options})


def test_bad_arguments():
    space = gspaces.rot2dOnR2(4)
    in_type = mixed(space, 2)
    for message, arguments in (
        ("keys: got 'own', but an attentive convolution", {"keys": "own", "kernel_features": 2}),
        ("backend: got 'dense', but an attentive convolution", {"backend": "dense", "kernel_features": 2}),
        ("hidden_fields", {"hidden_fields": 0}),
        ("dropout", {"dropout": 1.0}),
        ("attention_dropout", {"attention_dropout": -0.1}),
        ("norm_scope: got 'batch'", {"norm_scope": "batch"}),
        ("norm_scope", {"norm_scope": "pose", "norm_kind": "batch"}),
        ("kernel_features: .*an attention", {"attention": PointSelfAttention, "kernel_features": 3}),
    ):
        with pytest.raises(ValueError, match=message):
            PointTransformerBlock(in_type, in_type, **arguments)
    with pytest.raises(TypeError, match=r"raduis: .*needed .*radius"):
        PointTransformerBlock(in_type, in_type, raduis=1.0)
    block, x = PointTransformerBlock(in_type, in_type).double(), cloud(in_type, 8)
    with pytest.raises(ValueError, match="mask"):
        block(x, mask=torch.ones(3, dtype=torch.bool))
    everyone = torch.ones(len(x.tensor), dtype=torch.bool)
    for message, arguments in (
        ("edge_index", {"edge_index": torch.tensor([[len(everyone)], [0]])}),
        ("batch", {"batch": torch.zeros(2, dtype=torch.long)}),
        ("measure", {"measure": torch.ones(2)}),
    ):
        with pytest.raises(ValueError, match=message):
            block(x, mask=everyone, **arguments)


def test_parts_of_a_block_can_be_watched_and_replaced():
    """The computation is that of the plain block, with the equivariant parts as they are when the block is called."""
    block, other = (layer(REGULAR, REGULAR, 1, 3).double() for layer in (TransformerBlock, GroupSelfAttention))
    x, seen = spaces.random_field(REGULAR, 5, 5), []
    block.attention.register_forward_hook(lambda _, inputs, output: seen.extend([*inputs, output]))
    before = block(x)
    assert [type(value) for value in seen] == [GeometricTensor, GeometricTensor]
    block.attention = other
    y = block.shortcut(x) + block.after(other(block.before(x)))
    after = y + block.feed_forward(y)
    assert torch.equal(block(x).tensor, after.tensor)
    assert not torch.allclose(after.tensor, before.tensor)
    torch.testing.assert_close(block.export()(x.tensor), after.tensor, rtol=1e-12, atol=1e-12)
