"""Attention on grids by all backends against the formula; on tori: rolls, the group, and the formula written out."""

import itertools

import pytest
import torch
from escnn import group, gspaces
from escnn.nn import FieldType
from hypothesis import assume, given
from hypothesis import strategies as st

from escnn_attention import (
    ConvolutionalEncoding,
    GroupSelfAttention,
    LiftingSelfAttention,
    TransformerBlock,
    models,
    sequence_space,
    space_time,
)
from escnn_attention.functional import PositionalBias, attention
from escnn_attention.functional.grid import dense, native, portable
from escnn_attention.functional.grid.native import why_not_built
from escnn_attention.geometry.grid import Grid
from escnn_attention.geometry.windows import Window
from tests.functional.cases import assert_as_exact, assert_same, case, cases, outputs_and_gradients, refusal
from tests.layers import assert_formula, drawn
from tests.nn.attention import written_out
from tests.spaces import grid_elements, mixed, random_field, regular, size_of

BACKENDS = ("reference", "blocked", *(() if why_not_built(torch.float64) else ("native",)))
C4, D4 = gspaces.rot2dOnR2(4), gspaces.flipRot2dOnR2(4)

CHUNKS = {
    "native": [(native, "NUMBERS_PER_CHUNK")],
    "blocked": [(portable, "SCORES_PER_CHUNK"), (portable, "SCORES_PER_IMAGE")],
    "dense": [(dense, "ENTRIES_PER_CHUNK")],
}


@pytest.mark.parametrize("backend", CHUNKS)
@given(cases(max_side=4), st.sampled_from([1, 50, 1000, 5000, 2**24]))
@pytest.mark.slow
def test_backends_agree_with_the_reference_in_chunks_of_any_size(backend, arguments, chunk):
    reason = refusal(backend, *arguments)
    assert reason is None or backend == "dense" or not arguments[1].shape
    assume(reason is None)
    with pytest.MonkeyPatch.context() as patch:
        for module, name in CHUNKS[backend]:
            patch.setattr(module, name, chunk)
        got = outputs_and_gradients(backend, *arguments)
    assert_same(got, outputs_and_gradients("reference", *arguments))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("query", ["own", "all"])
@pytest.mark.parametrize(
    ("backend", "window", "terms"),
    [
        *(
            ("dense", *of)
            for of in ((Window(), {"waves", "pose"}), (Window(3), {"spatial", "pose"}), (Window(), set()))
        ),
        ("native", Window(3), {"spatial", "pose"}),
    ],
)
def test_backends_agree_with_the_reference_in_lower_precision(dtype, tolerance, query, backend, window, terms):
    tensors, grid, terms = case(4, 4, 4, (6, 5), window, terms, dtype=dtype)
    assert_as_exact(backend, tensors, grid, terms, query, tolerance)


TORI = {
    "odd": (lambda: C4, (5, 5), {"kernel_size": 3}),
    "as wide as the window": (lambda: D4, (5, 5), {"kernel_size": 5}),
    "even": (lambda: D4, (6, 6), {"kernel_size": 5}),
    "disc": (lambda: C4, (6, 6), {"kernel_size": 5, "window": "disc"}),
    "dilated": (lambda: C4, (6, 6), {"kernel_size": 3, "dilation": 2}),
    "global, odd": (lambda: D4, (3, 3), {"kernel_size": None}),
    "global, even": (lambda: D4, (4, 4), {"kernel_size": None}),
    "volume": (lambda: gspaces.rot2dOnR3(4), (3, 3, 3), {"kernel_size": 3}),
    "global volume": (lambda: gspaces.rot2dOnR3(4), (2, 2, 2), {"kernel_size": None}),
    "ring": (lambda: sequence_space(group.cyclic_group(4)), (6,), {"kernel_size": 5}),
    "global ring": (lambda: sequence_space(group.dihedral_group(3)), (6,), {"kernel_size": None}),
    "causal video": (lambda: space_time(C4), (3, 4, 4), {"kernel_size": 3, "causal": True}),
    "causal global video": (lambda: space_time(C4), (3, 2, 2), {"kernel_size": None, "causal": True}),
}
ENCODINGS = ["mlp", "separable", "fourier", "convolutional", "none"]


def torus(name, encoding="mlp", padding_mode="circular", **options):
    """The layer, and an input of random features."""
    make, shape, given = TORI[name]
    fields = regular(make(), 1)
    if encoding == "convolutional" and given["kernel_size"] is None:
        encoding = ConvolutionalEncoding(width=3, reach=0.5)
    given = {"head_fields": 4, "encoding": encoding, "padding_mode": padding_mode, **given, **options}
    return drawn(GroupSelfAttention(fields, fields, 1, **given)), random_field(fields, *shape, batch=1)


def rolled_axes(layer, x):
    """The axes of the tensor that come back."""
    return range(2 + layer.plain.window.causal, x.tensor.dim())


@torch.no_grad()
def roll_error(layer, x):
    """The largest relative error under all rolls along one axis, and one along all."""
    y, axes = layer(x).tensor, list(rolled_axes(layer, x))
    rolls = [(by, axis) for axis in axes for by in range(1, x.shape[axis])]
    rolls += [(tuple(range(1, len(axes) + 1)), tuple(axes))]
    errors = [(layer(x.type(x.tensor.roll(*r))).tensor - y.roll(*r)).norm() / size_of(y) for r in rolls]
    return max(map(float, errors))


@torch.no_grad()
def group_error(layer, x):
    """The largest relative error of all elements."""
    y = layer(x)
    elements = grid_elements(x.type.gspace)
    assert elements == list(x.type.gspace.fibergroup.elements)
    errors = [(layer(x.transform(g)).tensor - y.transform(g).tensor).norm() / size_of(y.tensor) for g in elements]
    return max(map(float, errors))


@pytest.mark.parametrize("name", TORI)
@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("query", ["own", "all"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sampled(14)
def test_tori_are_exact_under_rolls_and_the_group(name, encoding, query, backend):
    options = {"query": query, "keys": "own"} if name == "even" else {"query": query}
    layer, x = torus(name, encoding, backend=backend, **options)
    assert roll_error(layer, x) < 1e-10
    assert group_error(layer, x) < 1e-10


def test_without_a_torus_rolls_change_the_output():
    for name in ("odd", "global, even"):
        layer, x = torus(name, padding_mode="none")
        assert group_error(layer, x) < 1e-10
        assert roll_error(layer, x) > 1e-3


def test_another_action_is_not_exact():
    for name in ("even", "global, even"):
        layer, x = torus(name)
        layer.plain.inverse_action[1] = torch.eye(2)
        assert roll_error(layer, x) < 1e-10
        assert group_error(layer, x) > 1e-3


def test_one_of_two_shortest_offsets_is_not_enough():
    """Half around a torus the mean over both is what a rotation maps to itself."""
    layer, x = torus("global, even")
    positions = Grid(tuple(x.shape[2:]), layer.plain.window)
    positions._shortest = positions._shortest[:, :1]
    with torch.no_grad():
        y = layer.plain.attend(x.tensor, positions)
        errors = []
        for g in x.type.gspace.fibergroup.elements:
            turned = layer.plain.attend(x.transform(g).tensor, positions)
            errors.append((turned - layer.out_type(y).transform(g).tensor).norm() / y.norm())
        assert errors[0] < 1e-10
        assert max(errors) > 1e-3


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", TORI)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.slow
def test_tori_are_the_formula(name, backend):
    layer, x = torus(name, backend=backend)
    window, shape = layer.plain.window, x.shape[2:]

    def ways(n, a, b, wraps):
        around = [(b - a) % n, (b - a) % n - n] if wraps else [b - a]
        return [s for s in around if abs(s) == min(map(abs, around))]

    def steps(query, key):
        axes = enumerate(zip(shape, query, key, strict=True))
        found = list(itertools.product(*(ways(n, a, b, axis or not window.causal) for axis, (n, a, b) in axes)))
        times, along = ([found[0][0]], found[0][1:]) if window.causal else ([], found[0])
        seen = all(t <= 0 for t in times)
        if window.kernel_size is not None:
            along = [s / window.dilation for s in along]
            seen = seen and all(s == int(s) and abs(s) <= window.kernel_size // 2 for s in along)
            seen = seen and all(t > -window.kernel_size for t in times)
            seen = seen and (window.form == "square" or sum(s * s for s in along) <= window.kernel_size**2 / 4)
        return found if seen else []

    longest = max(n - 1 if window.causal and axis == 0 else n // 2 for axis, n in enumerate(shape))
    if window.kernel_size is not None:
        longest = window.kernel_size - 1 if window.causal else window.dilation * (window.kernel_size // 2)
    x.tensor.requires_grad_()
    expected = written_out(layer, x.tensor, steps, longest)
    assert_formula(layer(x).tensor, expected, [x.tensor, *layer.parameters()], 1e-11, 1e-11)


def test_sides_that_an_element_swaps():
    fields = mixed(D4)
    for size, shape in ((3, (4, 5)), (None, (2, 3))):
        layer = drawn(GroupSelfAttention(fields, fields, 1, size, padding_mode="circular", head_fields=2))
        x = random_field(fields, *shape)
        assert roll_error(layer, x) < 1e-10
        assert group_error(layer, x) < 1e-10


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_not_finite_stays_in_the_windows_that_see_it(backend):
    layer, x = torus("even", backend=backend)
    spoilt = x.tensor.clone()
    spoilt[:, :, 0, 5] = torch.inf
    y, whole = layer(x.type(spoilt)).tensor, layer(x).tensor
    seen = torch.zeros(6, 6, dtype=torch.bool)
    seen[torch.tensor([[4], [5], [0], [1], [2]]), torch.tensor([3, 4, 5, 0, 1])] = True
    assert y[..., seen].isnan().all()
    torch.testing.assert_close(y[..., ~seen], whole[..., ~seen])


def test_blocks_and_networks_on_tori():
    fields, scalars = regular(C4, 2), FieldType(C4, 3 * [C4.trivial_repr])
    lifting = LiftingSelfAttention(scalars, fields, 1, 3, padding_mode="circular").double()
    block = TransformerBlock(fields, fields, 1, 3, norm="pre", padding_mode="circular").double()
    assert "padding_mode='circular'" in repr(block)
    x = random_field(scalars, 4, 4)
    torch.testing.assert_close(
        block(lifting(scalars(x.tensor.roll((1, 2), (2, 3))))).tensor, block(lifting(x)).tensor.roll((1, 2), (2, 3))
    )
    circular = {"padding_mode": "circular"}
    net = models.GSANet(C4, 1, 3, blocks=(1,), channels=6, kernel_size=3, num_heads=1, block=circular)
    assert repr(net).count("padding_mode='circular'") == 2
    outline = {"widths": (2,), "convolutions": (1,), "attention": (1,), "stem": {"num_heads": 1, "kernel_size": 3}}
    net = models.HybridNet(C4, 1, 3, **outline, block=circular)
    assert repr(net).count("padding_mode='circular'") == 2


@pytest.mark.parametrize(
    "make", [lambda: gspaces.rot2dOnR2(8), lambda: gspaces.rot2dOnR2(3), lambda: gspaces.rot2dOnR3(3)]
)
def test_groups_that_keep_no_torus(make):
    fields = regular(make(), 1)
    for size in (3, None):
        with pytest.raises(ValueError, match=r"padding_mode: .*circular.*subgroup of D4"):
            GroupSelfAttention(fields, fields, 1, size, padding_mode="circular")


def test_what_is_no_torus():
    fields = regular(C4, 1)
    with pytest.raises(ValueError, match=r"padding_mode: got 'zeros', needed.*none"):
        GroupSelfAttention(fields, fields, 1, 3, padding_mode="zeros")
    for encoding in ("rotary", "absolute"):
        with pytest.raises(ValueError, match=r"encoding: got a .*circular.*needed one that is added to the keys"):
            GroupSelfAttention(fields, fields, 1, 3, padding_mode="circular", encoding=encoding, head_fields=2)
    with pytest.raises(ValueError, match=r"kernel_size: 5 reaches around a torus with 4 .*at most 4"):
        torus("even")[0](random_field(regular(D4, 1), 6, 4))
    with pytest.raises(ValueError, match=r"kernel_size: 3 with dilation=2 covers 5 .*at most 4"):
        torus("dilated")[0](random_field(fields, 6, 4))
    point = regular(gspaces.no_base_space(group.cyclic_group(4)), 1)
    with pytest.raises(ValueError, match=r"padding_mode: .*no base space"):
        GroupSelfAttention(point, point, 1, padding_mode="circular")
    tokens = regular(sequence_space(group.cyclic_group(4)), 1)
    with pytest.raises(ValueError, match=r"padding_mode: .*causal=True.*only axis is time"):
        GroupSelfAttention(tokens, tokens, 1, 3, causal=True, padding_mode="circular")


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_encodings_that_no_torus_keeps(backend):
    grid = Grid((4, 4), Window(3, "circular square"))
    q, k, v = torch.randn(3, 1, 1, 16, 2, 4, dtype=torch.float64)
    rotary = PositionalBias(2, rotary=torch.randn(1, 2, 2, 2, dtype=torch.float64))
    absolute = PositionalBias(2, absolute=True, spatial=torch.randn(1, 2, 16, 4, dtype=torch.float64))
    for bias, name in ((rotary, "rotary"), (absolute, "absolute")):
        with pytest.raises(ValueError, match=rf"encoding: .*{name}.*torus.*needed"):
            attention(q, k, v, grid, bias, backend=backend)
    with pytest.raises(ValueError, match=r"backend: .*torus"):
        attention(q, k, v, grid, PositionalBias(2), backend="dense")
