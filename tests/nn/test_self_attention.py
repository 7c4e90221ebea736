"""Registers and masks of attention on grids and between points."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from escnn import gspaces
from escnn.nn import FieldType, GeometricTensor

from escnn_attention import (
    GroupCrossAttention,
    GroupSelfAttention,
    LiftingSelfAttention,
    Pair,
    PairKernel,
    PointAttentiveConv,
    PointSelfAttention,
    PointTransformerBlock,
    TransformerBlock,
    sequence_space,
)
from escnn_attention.functional import ON_GRIDS
from escnn_attention.functional.grid.native import why_not_built
from escnn_attention.groups.fibers import fibers
from tests import spaces
from tests.layers import assert_formula, drawn
from tests.nn.attention import ENCODINGS, TOLERANCE, attention_for, turned_error
from tests.nn.points import worst_error
from tests.spaces import ALL, PLANE, grid_error, mixed, random_field, regular, scalars, shape_of

COMPILED = () if why_not_built(torch.float64) else ("native",)
C4, D3, D4 = gspaces.rot2dOnR2(4), gspaces.flipRot2dOnR2(3), gspaces.flipRot2dOnR2(4)
FIELDS = spaces.regular(C4, 2)


def test_registers_of_a_pose_are_not_equivariant():
    layer, x = drawn(GroupSelfAttention(FIELDS, FIELDS, 1, 3, registers=1)), spaces.random_field(FIELDS, 3, 3)
    assert grid_error(layer, x) < 1e-12
    layer.plain.quotient = layer.plain.quotient.clone()
    layer.plain.quotient[1, -1] = 0
    assert grid_error(layer, x) > 1e-3


def test_registers_hold_attention():
    """Where the key of a register is what all queries look for, its value is all that is left."""
    layer = GroupSelfAttention(FIELDS, FIELDS, 1, 3, encoding="none", registers=1, bias=False).double()
    x = spaces.random_field(FIELDS, 3, 3)
    with torch.no_grad():
        assert layer.plain.to_heads(x.tensor.movedim(1, -1))[1].shape[3] == 5
        layer.plain.registers.values.fill_(2.0)
        layer.plain.project_in.weight.zero_()
        even = layer(x).tensor
        layer.plain.registers.values.fill_(4.0)
        torch.testing.assert_close(layer(x).tensor, 2 * even)  # the values of features are zero


def test_a_mask_of_a_margin_is_a_smaller_grid():
    """Without what tells positions by the size of the grid: images of several sizes in one batch."""
    block = drawn(TransformerBlock(FIELDS, FIELDS, 1, 3, norm="pre", crop=0))
    small = spaces.random_field(FIELDS, 3, 4)
    padded = torch.nn.functional.pad(small.tensor, (0, 2, 0, 3), value=7.0)
    mask = torch.zeros(2, 6, 6, dtype=torch.bool)
    mask[:, :3, :4] = True
    y = block(FIELDS(padded), mask).tensor
    torch.testing.assert_close(y[:, :, :3, :4], block(small).tensor)
    assert not y[:, :, 3:].any()
    torch.testing.assert_close(block.export()(padded, mask), y)
    cropped = drawn(TransformerBlock(FIELDS, FIELDS, 1, 3, norm="pre", crop=1))
    z = cropped(FIELDS(padded), mask).tensor
    assert z.shape[2:] == (4, 4)
    assert not z[:, :, 2:].any()
    assert not z[:, :, :, 3:].any()
    torch.testing.assert_close(cropped.export()(padded, mask), z)


def test_global_attention_measures_by_the_whole_grid():
    """Offsets are in units of the grid, hidden positions included; margins on all sides would not change a window."""
    layer = drawn(GroupSelfAttention(FIELDS, FIELDS, 1, None))
    small = spaces.random_field(FIELDS, 3, 3)
    padded = torch.nn.functional.pad(small.tensor, (0, 2, 0, 2))
    mask = torch.zeros(2, 5, 5, dtype=torch.bool)
    mask[:, :3, :3] = True
    y = layer(FIELDS(padded), mask).tensor[:, :, :3, :3]
    assert (y - layer(small).tensor).abs().max() > 1e-3
    # On a grid of its own it has the same features with an encoding that is stretched as much.
    stretch = torch.tensor(2.0 / 4.0, dtype=torch.float64)
    first = next(module for module in layer.plain.encoding.modules() if isinstance(module, torch.nn.Linear))
    with torch.no_grad():
        first.weight.mul_(stretch)
    torch.testing.assert_close(layer(small).tensor, y)


BOTH = pytest.mark.parametrize("layer", [partial(GroupSelfAttention, kernel_size=3), PointSelfAttention])


def test_bad_masks():
    layer, x, mask = GroupSelfAttention(FIELDS, FIELDS, 1, 3), FIELDS(torch.randn(2, 8, 3, 3)), torch.ones(2, 3, 3)
    block = partial(TransformerBlock, FIELDS, FIELDS, 1, 3)
    for error, message, module, given in (
        (TypeError, "mask: got torch.float32", layer, mask),
        (TypeError, "mask: got bool", layer, True),
        (ValueError, "mask: got shape", layer, mask[0].bool()),
        (ValueError, "mask: .*over positions", block(norm="gsa"), mask.bool()),
        (ValueError, "mask: .*over positions", block(norm="pre", norm_scope="sample"), mask.bool()),
        (ValueError, "mask: .*over positions", block(norm="pre", norm_kind="batch"), mask.bool()),
    ):
        with pytest.raises(error, match=message):
            module(x, given)


@BOTH
def test_bad_registers(layer):
    for error, message, options in (
        (ValueError, "registers: .*no pose", {"registers": 1, "keys": "own"}),
        (ValueError, "registers: got -1", {"registers": -1}),
        (TypeError, "registers: got", {"registers": 1.5}),
    ):
        with pytest.raises(error, match=message):
            layer(FIELDS, FIELDS, **options)


SHARED = {"head_fields": 3, "query": "own", "keys": "own", "shared_scores": True}


@pytest.mark.parametrize("kind", [partial(GroupSelfAttention, kernel_size=3), PointSelfAttention])
def test_scores_of_one_pose_for_all_are_not_equivariant(kind):
    layer = drawn(kind(FIELDS, FIELDS, 1, **SHARED))
    assert "shared_scores=True" in repr(layer)
    first, plain = torch.tensor([1.0, 0, 0, 0]).double().repeat_interleave(3), layer.plain.call

    def of_first(*arguments):
        call = plain(*arguments)
        return replace(call, q=call.q * first)

    layer.check_equivariance(1e-11, 0)
    layer.plain.call = of_first
    with pytest.raises(AssertionError, match="the error is"):
        layer.check_equivariance(1e-3, 0)


@BOTH
def test_shared_scores_that_there_are_not(layer):
    so2 = gspaces.rot2dOnR2(-1)
    vectors = FieldType(so2, [so2.irrep(1)])
    for message, types, options in (
        ('needed "own" of both', (FIELDS, FIELDS), {"keys": "all"}),
        ("RotaryEncoding is evaluated per pose", (FIELDS, FIELDS), {"encoding": "rotary"}),
        ("AbsoluteEncoding is evaluated per pose", (FIELDS, FIELDS), {"encoding": "absolute"}),
        ("samples of a continuous group", (vectors, vectors), {"samples": 4}),
    ):
        with pytest.raises(ValueError, match=f"^shared_scores: .*{message}"):
            layer(*types, **{**SHARED, **options})


def test_shared_scores_between_points_are_of_offsets():
    for error, message, layer, options in (
        (ValueError, "PairKernel is evaluated per pose", PointSelfAttention, {**SHARED, "encoding": PairKernel()}),
        (ValueError, r"got True with Pair\(\), needed the offset", PointSelfAttention, {**SHARED, "relation": Pair()}),
        (TypeError, "no such option", PointAttentiveConv, {"shared_scores": True}),
        (ValueError, "attentive convolution", PointTransformerBlock, {"kernel_features": 2, "shared_scores": True}),
    ):
        with pytest.raises(error, match=f"^shared_scores: .*{message}"):
            layer(FIELDS, FIELDS, 1, **options)


@pytest.mark.parametrize("query", ["own", "all"])
def test_sharp_attention(query):
    # With weights this large the softmax picks single keys, and small errors of the scores would show.
    layer = attention_for(PLANE["D4"](), query=query, size=3)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(4)
    assert turned_error(layer, random_field(layer.in_type, 5, 5)) < TOLERANCE


class TestNegativeControls:
    """Without the action of the group on either argument of the encoding the tests above fail."""

    @pytest.mark.sampled
    @pytest.mark.parametrize("encoding", ["mlp", "separable", "fourier", "rotary", "absolute"])
    @pytest.mark.parametrize("query", ["own", "all", "lifting", "own keys", "all queries, own keys", "own, by count"])
    def test_without_the_action_on_offsets(self, query, encoding):
        options = {"lifting": True} if query == "lifting" else {"query": query[:3]}
        if "keys" in query:
            options["keys"] = "own"
        if "count" in query and encoding not in ("mlp", "separable"):
            options["normalization"] = "count"
        layer = attention_for(PLANE["D3"](), encoding=encoding, **options)
        x = random_field(layer.in_type, 4, 4)
        assert turned_error(layer, x) < TOLERANCE
        layer.plain.inverse_action[:] = torch.eye(2)
        assert turned_error(layer, x) > 1e-3

    @pytest.mark.sampled
    @pytest.mark.parametrize("encoding", ["mlp", "separable", "fourier", "rotary", "absolute"])
    @pytest.mark.parametrize("query", ["own", "all"])
    @pytest.mark.parametrize("name", ["D3", "D4 on a point"])
    def test_without_the_action_on_poses(self, name, query, encoding):
        layer = attention_for(ALL[name](), encoding=encoding, query=query)
        x = random_field(layer.in_type, *shape_of(layer.space, 4))
        assert turned_error(layer, x) < TOLERANCE
        layer.plain.quotient[:] = torch.arange(len(layer.plain.quotient))
        assert turned_error(layer, x) > 1e-3

    @pytest.mark.parametrize("resampling", [{}, {"stride": 2}, {"scale_factor": 2}], ids=str)
    def test_with_the_other_orientation_of_the_grid(self, resampling):
        layer = attention_for(PLANE["C4"](), size=3, **resampling)
        x = random_field(layer.in_type, 5, 5)
        assert grid_error(layer, x) < TOLERANCE
        # y growing downwards: the transposed matrices.
        layer.plain.inverse_action[:] = layer.plain.inverse_action.transpose(1, 2).clone()
        assert grid_error(layer, x) > 1e-3


class TestModule:
    def test_head_fields(self):
        space = PLANE["D4"]()
        fields = regular(space, 6)
        assert GroupSelfAttention(fields, fields, 3, kernel_size=None).head_fields == 2
        assert GroupSelfAttention(fields, fields, 4, head_fields=5, kernel_size=None).head_fields == 5
        with pytest.raises(ValueError, match=r"num_heads: .*set head_fields"):
            GroupSelfAttention(fields, fields, 4, kernel_size=None)
        # Without regular fields: the least number whose 2 heads have at least 33 channels with 8 poses each.
        assert GroupSelfAttention(fields, scalars(space, 33), 2, kernel_size=None).head_fields == 3
        assert GroupSelfAttention(fields, scalars(space, 32), 2, kernel_size=None).head_fields == 2
        vectors = FieldType(space, [space.irrep(1, 1)])
        assert GroupSelfAttention(vectors, vectors, 1, kernel_size=None).head_fields == 1

    @pytest.mark.parametrize(
        ("name", "square"),
        [
            *((name, True) for name in ("trivial", "flip", "C4", "D4", "octahedral", "cylindrical")),
            *((name, False) for name in ("C3", "C8", "D6", "flip about an odd axis", "C3 3D")),
        ],
    )
    def test_auto_picks_the_square_where_the_group_preserves_it(self, name, square):
        fields = regular(ALL[name](), 1)
        layer = GroupSelfAttention(fields, fields, 1, 3)
        assert layer.plain.window.shape == ("square" if square else "disc")
        assert GroupSelfAttention(fields, fields, 1, 3, window="disc").plain.window.shape == "disc"
        if not square:
            with pytest.raises(ValueError, match='window: got "square"'):
                GroupSelfAttention(fields, fields, 1, 3, window="square")

    def test_biases_are_invariant_and_optional(self):
        layer = attention_for(PLANE["D4"](), bias=False)
        assert not [name for name, _ in layer.plain.project_in.named_parameters() if "bias" in name]
        assert not [name for name, _ in layer.plain.project_out.named_parameters() if "bias" in name]
        space = PLANE["D4"]()
        vectors = FieldType(space, [space.irrep(1, 1)])
        assert GroupSelfAttention(vectors, vectors, kernel_size=None).plain.project_out.bias is None

    def test_lifting_computes_the_content_once(self, monkeypatch):
        """The product of queries and keys is as large for eight poses as for one."""
        sizes = {}
        matmul = torch.Tensor.__matmul__

        def watch(a, b):
            out = matmul(a, b)
            sizes.setdefault(name, []).append(out.numel())
            return out

        for name in ("trivial", "D4"):
            types = scalars(PLANE[name](), 1), regular(PLANE[name](), 4)
            layer = LiftingSelfAttention(*types, 2, None, head_fields=2, backend="blocked")
            with monkeypatch.context() as patch:
                patch.setattr(torch.Tensor, "__matmul__", watch)
                layer(random_field(layer.in_type, 5, 4, dtype=torch.float32))
        scores = 2 * 2 * 20 * 20  # of two heads in two images
        assert sizes["D4"].count(scores) == sizes["trivial"].count(scores) == 1
        assert 8 * scores not in sizes["D4"]

    def test_attention_maps_turn_with_the_image(self):
        layer = attention_for(PLANE["C4"](), size=3)
        x = random_field(layer.in_type, 5, 5, batch=1)
        g = list(layer.space.fibergroup.elements)[1]
        before = layer.attention_maps(x, [(1, 3)])
        # A quarter turn takes the pixel (1, 3) to (1, 1), and pose h to gh.
        after = layer.attention_maps(x.transform(g), [(1, 1)])
        turned = before.rot90(1, (-2, -1)).roll((1, 1), (2, 5))
        torch.testing.assert_close(after, turned)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("size", [3, None])
@pytest.mark.parametrize("modes", [("own", "all"), ("all", "all"), ("own", "own")], ids="-".join)
def test_a_stride_leaves_out_outputs(encoding, size, modes):
    """The others are those of the layer without one, masks and maps included."""
    fields = mixed(D4)
    options = {"head_fields": 4, "encoding": encoding, "query": modes[0], "keys": modes[1]}
    layer = drawn(GroupSelfAttention(fields, fields, 2, size, stride=2, **options))
    own = drawn(GroupSelfAttention(fields, fields, 2, size, **options))
    own.load_state_dict(layer.state_dict())
    x, mask = random_field(fields, 5, 3), torch.rand(2, 5, 3) < 0.8
    torch.testing.assert_close(layer(x).tensor, own(x).tensor[:, :, ::2, ::2])
    torch.testing.assert_close(layer(x, mask).tensor, own(x, mask).tensor[:, :, ::2, ::2])
    assert layer.evaluate_output_shape(x.shape) == (2, fields.size, 3, 2)
    for hidden in (None, mask):
        maps = layer.attention_maps(x, [(1, -1)], poses=[0], mask=hidden)
        torch.testing.assert_close(maps, own.attention_maps(x, [(2, 2)], poses=[0], mask=hidden))
    with pytest.raises(ValueError, match="stride: got 2 on a grid of 4×5"):
        layer(random_field(fields, 4, 5))


@pytest.mark.parametrize("size", [3, None])
@pytest.mark.parametrize("space", [D4, sequence_space(C4.fibergroup)], ids=["D4", "sequence"])
def test_a_stride_on_a_torus(size, space):
    """Outputs of the layer without one, for the group and rolls by multiples; without a torus, or by others, not."""
    fields = mixed(space)
    options = {"head_fields": 4, "padding_mode": "circular"}
    layer = drawn(GroupSelfAttention(fields, fields, 1, size, stride=3, **options))
    own = drawn(GroupSelfAttention(fields, fields, 1, size, **options))
    own.load_state_dict(layer.state_dict())
    x = random_field(fields, *shape_of(space, 6), batch=1)
    axes, middle = tuple(range(2, x.tensor.dim())), (..., *space.dimensionality * [slice(1, None, 3)])
    for backend in ("reference", "blocked", "auto"):
        layer.plain.backend = backend
        torch.testing.assert_close(layer(x).tensor, own(x).tensor[middle])
    assert layer(x).shape == layer.evaluate_output_shape(x.shape) == (1, fields.size, *shape_of(space, 2))
    assert grid_error(layer, x) < 1e-10

    def error_of_roll(step):
        rolled = layer(fields(x.tensor.roll([step] * len(axes), axes))).tensor
        return (rolled - layer(x).tensor.roll([1] * len(axes), axes)).abs().max()

    assert error_of_roll(3) < 1e-12
    assert error_of_roll(2) > 1e-5
    with pytest.raises(ValueError, match="stride: got 3 on a torus of"):
        layer(random_field(fields, *shape_of(space, 4)))


@pytest.mark.sampled(1, of="programs")
@pytest.mark.parametrize(
    ("size", "options"),
    [
        (3, {"stride": 5, "padding_mode": "circular"}),
        (3, {"scale_factor": 2, "padding_mode": "circular"}),
        (None, {"encoding": "rotary", "normalization": "count"}),
    ],
    ids=str,
)
def test_programs(size, options):
    """For any number of images."""
    fields = regular(C4, 1)
    layer = drawn(GroupSelfAttention(fields, fields, 1, size, head_fields=2, **options))
    x = random_field(fields, 5, 5).tensor
    images = ({0: torch.export.Dim("images", min=1)},)
    program = torch.export.export(layer.export(), (x,), dynamic_shapes=images).module()
    more = torch.cat([x, x, x])
    torch.testing.assert_close(program(more), layer(fields(more)).tensor)


def test_options_that_outputs_elsewhere_do_not_have():
    fields, tokens = regular(C4, 1), regular(sequence_space(C4.fibergroup), 1)
    for types, options, message in (
        (fields, {"stride": 2, "scale_factor": 2}, "stride: got 2 with scale_factor"),
        (fields, {"stride": 2, "padding_mode": "circular"}, "stride: got 2 with padding_mode.* odd"),
        (fields, {"scale_factor": 2, "dilation": 2}, "scale_factor: got 2 with dilation"),
        (tokens, {"stride": 2, "is_causal": True}, "stride: got 2 with causal"),
        (fields, {"stride": 0}, "stride: got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            GroupSelfAttention(types, types, 1, 3, **options)
    with pytest.raises(TypeError, match=r"stride: .*no such option .it keeps the grid"):
        TransformerBlock(fields, fields, 1, 3, stride=2)


@pytest.mark.parametrize("encoding", ["separable", "mlp", "fourier"])
def test_encodings_of_scalars_have_no_poses(encoding):
    """Whether the layer lifts scalars only or any fields, on grids or between points: no channel is left for poses."""
    space = PLANE["D4"]()
    image, fields = scalars(space, 2), regular(space, 2)
    options = {"head_fields": 6, "encoding": encoding}
    shapes = [
        {name: parameter.shape for name, parameter in layer.plain.encoding.named_parameters()}
        for layer in (
            LiftingSelfAttention(image, fields, 2, 3, **options),
            GroupSelfAttention(image, fields, 2, 3, **options),
            GroupCrossAttention(image, image, fields, 2, **options),
            PointSelfAttention(image, fields, 2, **options),
        )
    ]
    assert all(shape == shapes[0] for shape in shapes)
    of_fields = GroupSelfAttention(fields, fields, 2, 3, **options).plain.encoding
    assert {name: parameter.shape for name, parameter in of_fields.named_parameters()} != shapes[0]


def test_shares_by_count_need_products():
    fields, tokens = regular(C4, 2), regular(sequence_space(C4.fibergroup), 2)
    for types, size, options in (
        (fields, 3, {}),
        (fields, None, {"encoding": "mlp"}),
        (fields, None, {"dropout": 0.1}),
        (fields, None, {"padding_mode": "circular", "encoding": "none"}),
        (tokens, None, {"causal": True}),
    ):
        with pytest.raises(ValueError, match=r'normalization: got "count" with .* needed global'):
            GroupSelfAttention(types, types, 1, size, **{"encoding": "fourier", "normalization": "count"} | options)
    with pytest.raises(ValueError, match="normalization: got 'mean'"):
        GroupSelfAttention(fields, fields, 1, None, normalization="mean")
    block = TransformerBlock(fields, fields, 1, None, encoding="none", normalization="count")
    assert "normalization=count" in repr(block).replace("'", "")


QUOTIENTS = {
    "C8, 4": (lambda: gspaces.rot2dOnR2(8), 4),
    "D4, mirror": (lambda: D4, (0, 1)),
    "D4, turns": (lambda: D4, (None, 4)),
    "octahedral, axes": (gspaces.octaOnR3, (False, 4)),
    "cylindrical, mirror": (lambda: gspaces.conicalOnR3(4), (0, 1)),
}
COSET_MODES = [("own", "all"), ("all", "all"), ("own", "own")]


def on_cosets(name, encoding, modes, layer=GroupSelfAttention, *size, **options):
    make, subgroup = QUOTIENTS[name]
    options |= dict(zip(("query", "keys"), modes, strict=True)) | {"encoding": encoding, "head_fields": 4}
    return drawn(layer(mixed(make()), mixed(make()), 2, *size, poses=subgroup, **options))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("encoding", ["mlp", "fourier", "rotary", "absolute", "separable"])
@pytest.mark.parametrize("modes", COSET_MODES, ids="-".join)
@pytest.mark.parametrize("name", QUOTIENTS)
@pytest.mark.slow
def test_poses_that_are_cosets(name, modes, encoding):
    """Equivariant, and not without the mean of the encoding; on grids and between points."""
    if encoding == "rotary" and name in ("C8, 4", "D4, turns"):
        encoding = "fourier"
    layer = on_cosets(name, encoding, modes, GroupSelfAttention, 3)
    x = random_field(layer.in_type, *shape_of(layer.space, 3))
    group = layer.space.fibergroup
    assert layer.plain.to_heads(x.tensor.movedim(1, -1))[0].shape[3] == group.order() // len(layer.plain.stabilizer)
    assert turned_error(layer, x) < TOLERANCE
    assert grid_error(layer, x) < TOLERANCE
    between = on_cosets(name, encoding, modes, PointSelfAttention)
    at = torch.randn(5, layer.space.dimensionality, dtype=torch.float64)
    x_at = GeometricTensor(torch.randn(5, layer.in_type.size, dtype=torch.float64), layer.in_type, at)
    assert worst_error(between, x_at) < TOLERANCE
    for some, value, error in ((layer, x, turned_error), (between, x_at, worst_error)):
        some.plain.stabilizer = some.plain.stabilizer[:1]
        assert error(some, value) > 1e-3


@pytest.mark.sampled(4)
@pytest.mark.parametrize("modes", COSET_MODES, ids="-".join)
@pytest.mark.parametrize("name", QUOTIENTS)
def test_cosets_are_functions_on_the_group(name, modes):
    """The formula on all elements, of queries, keys and values that are the same on each coset."""
    layer = on_cosets(name, "mlp", modes, GroupSelfAttention, 3)
    make, subgroup = QUOTIENTS[name]
    x, core, every = random_field(layer.in_type, *shape_of(layer.space, 3)), layer.plain, fibers(make())
    cosets = fibers(make(), subgroup=subgroup).cosets
    call = core.call(x.tensor, core.positions(x.tensor))
    of = torch.tensor([int((cosets == h).any(1).argmax()) for h in range(every.order)])
    seen = call.query_grid.offsets @ torch.tensor(every.inverse_action).mT
    rho = core.encoding.offsets(torch.stack([seen[torch.tensor(cosets[c])].mT for c in of], 1).mT)
    poses = core.encoding.poses()
    bias = replace(call.bias, num_poses=every.order, spatial=rho.mean(1))
    if poses is not None:
        table = core.quotient[of][:, of]
        bias = replace(bias, pose=poses[:, table])
    whole = replace(call, bias=bias, **{n: getattr(call, n)[:, :, :, of] for n in "qkv"})
    expected = ON_GRIDS.compute(whole, "reference")[:, :, :, cosets[:, 0]]
    if modes[0] == "all":
        expected = expected / cosets.shape[1]
    wanted = [*core.encoding.parameters(), core.project_in.weight]
    assert_formula(ON_GRIDS.compute(call), expected, wanted, 1e-12, 1e-12)


def test_cosets_that_there_are_not():
    odd, on_grid = FieldType(C4, [C4.irrep(1)]), partial(GroupSelfAttention, kernel_size=3, poses=2)
    for message, layer, fields, options in (
        ("poses: got 3, needed the id of a subgroup", on_grid, FIELDS, {"poses": 3}),
        ("poses: got cosets with projection", on_grid, FIELDS, {"projection": "pointwise"}),
        ("poses: got cosets with a ConvolutionalEncoding", on_grid, FIELDS, {"encoding": "convolutional"}),
        ("poses: .* keeps no direction", on_grid, FIELDS, {"encoding": "rotary"}),
        ("poses: .* to which .* equivariant map", on_grid, odd, {}),
        ("poses: .* from which .* equivariant map", partial(on_grid, out_type=odd), FIELDS, None),
        ("poses: got cosets with a PairKernel", PointSelfAttention, FIELDS, {"encoding": PairKernel(), "poses": 2}),
        ("poses: got 2 with Pair", PointSelfAttention, FIELDS, {"relation": Pair(), "poses": 2}),
    ):
        with pytest.raises(ValueError, match=message):
            layer(fields, **({} if options is None else {"out_type": fields} | options))
    quotient = FieldType(C4, 4 * [C4.quotient_repr(2)])
    layer = TransformerBlock(quotient, quotient, 2, 3, poses=2).attention
    assert layer.head_fields == 2
    assert "poses=2" in repr(layer)
    x = random_field(quotient, 3, 3, dtype=torch.float32)
    assert layer.attention_maps(x, [(0, 0)], [C4.fibergroup.element(2)]).shape[2] == 1


def test_causal_as_torch_calls_it():
    tokens = regular(sequence_space(C4.fibergroup), 2)
    layer = drawn(GroupSelfAttention(tokens, tokens, 1, None, encoding="none", is_causal=True))
    assert "causal=True" in repr(layer)
    x = random_field(tokens, 5)
    later = tokens(torch.cat([x.tensor[..., :3], torch.randn(2, 8, 2).double()], -1))
    torch.testing.assert_close(layer(x).tensor[..., :3], layer(later).tensor[..., :3])
