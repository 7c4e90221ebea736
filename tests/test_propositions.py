"""The propositions of GSA-Nets (Romero and Cordonnier 2021), each as a test of its name, in float64.

A function f on a set of positions x(i) is moved by g in two ways that are the same (App. D): with new values at the old
positions, where g maps these onto themselves, or with the old values at the positions g x(i). For the second the grid
need not be preserved: ``Grid(..., frame=matrix)`` is the grid turned by a matrix.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from escnn import gspaces
from escnn.nn import GeometricTensor

from escnn_attention import Encoding, GroupSelfAttention, LiftingSelfAttention, NoEncoding
from escnn_attention.encodings.quadratic import QuadraticEncoding
from escnn_attention.functional import ON_GRIDS
from escnn_attention.geometry.grid import Grid
from escnn_attention.geometry.windows import Window
from escnn_attention.groups.fibers import fibers
from tests.spaces import grid_error, random_field, regular, scalars, shape_of, size_of, turned_error

EXACT = 2e-14  # relative, in float64
BROKEN = 1e-3

GROUPS = {
    "trivial": gspaces.trivialOnR2,
    "flip": gspaces.flip2dOnR2,
    "C2": lambda: gspaces.rot2dOnR2(2),
    "C4": lambda: gspaces.rot2dOnR2(4),
    "D4": lambda: gspaces.flipRot2dOnR2(4),
}
OFF_THE_GRID = {
    "C8": lambda: gspaces.rot2dOnR2(8),
    "D6": lambda: gspaces.flipRot2dOnR2(6),
    "flip about an odd axis": lambda: gspaces.flip2dOnR2(axis=0.3),
}
IN_SPACE = {"mirror": gspaces.mirOnR3, "C4 in 3D": lambda: gspaces.rot2dOnR3(4)}
EVERY_GROUP = GROUPS | OFF_THE_GRID | IN_SPACE

RELATIVE = {
    "mlp": "mlp",
    "separable": "separable",
    "fourier": "fourier",
    "rotary": "rotary",
    "quadratic": QuadraticEncoding(),
}


def attention_on(space, encoding, kernel_size=None, **options):
    fields = regular(space, 2)
    return GroupSelfAttention(fields, fields, 2, kernel_size, head_fields=4, encoding=encoding, **options).double()


def lifting_on(space, encoding, kernel_size=None, **options):
    types = scalars(space, 2), regular(space, 2)
    return LiftingSelfAttention(*types, 2, kernel_size, head_fields=4, encoding=encoding, **options).double()


def relative(got, expected):
    return ((got - expected).norm() / size_of(expected)).item()


@torch.no_grad()
def permutation_error(layer, x, order):
    """The positions of x are permuted; poses stay with their position."""

    def permute(t):
        return t.flatten(2)[:, :, order].view_as(t)

    return relative(layer(x.type(permute(x.tensor))).tensor, permute(layer(x).tensor))


@torch.no_grad()
def translation_error(layer, reach=3, by=(2, 1, 1)):
    """Two views of one field, one of them moved; where neither sees a border both must show the same."""
    dim, size = layer.space.dimensionality, 2 * reach + 4
    by = by[:dim]
    x = torch.randn(1, layer.in_type.size, *[size + n for n in by], dtype=torch.float64)
    still = x[(..., *[slice(0, size) for _ in by])]
    moved = x[(..., *[slice(n, n + size) for n in by])]
    y, moved_y = layer(layer.in_type(still)).tensor, layer(layer.in_type(moved)).tensor
    return relative(
        moved_y[(..., *[slice(reach, size - reach - n) for n in by])],
        y[(..., *[slice(reach + n, size - reach) for n in by])],
    )


def turned(layer, x, matrix):
    """The layer on the values x, whose positions are turned by a matrix."""
    grid = Grid(x.shape[2:], layer.plain.window, dtype=x.dtype, frame=torch.as_tensor(matrix))
    return layer.plain.attend(x, grid)


def turning_error(layer, x):
    """The largest error over all elements of the fiber group, on or off the grid."""
    return turned_error(layer, x, lambda values, matrix: turned(layer, values, matrix))


# --------------------------------------------------------------------------------------------------- Proposition 4.1


@pytest.mark.parametrize("query", ["own", "all"])
@pytest.mark.parametrize("name", GROUPS)
def test_proposition_4_1_global_attention_without_positions_commutes_with_permutations(name, query):
    layer = attention_on(GROUPS[name](), "none", query=query)
    x = random_field(layer.in_type, 4, 5)
    for _ in range(3):
        assert permutation_error(layer, x, torch.randperm(20)) < EXACT


@pytest.mark.parametrize("name", GROUPS)
def test_proposition_4_1_needs_that_all_is_seen_and_that_there_are_no_positions(name):
    order = torch.randperm(25)
    for layer in (attention_on(GROUPS[name](), "none", 3), attention_on(GROUPS[name](), "mlp")):
        assert permutation_error(layer, random_field(layer.in_type, 5, 5), order) > BROKEN


def test_proposition_4_1_local_attention_keeps_the_permutations_that_keep_neighbourhoods():
    layer = attention_on(GROUPS["trivial"](), "none", 3)
    x = random_field(layer.in_type, 5, 5)
    index = torch.arange(25).view(5, 5)
    for kept in (index.rot90(), index.flip(1), index.T):
        assert permutation_error(layer, x, kept.flatten()) < EXACT
    assert permutation_error(layer, x, index.roll(1, dims=0).flatten()) > BROKEN


# --------------------------------------------------------------------------------------------------- Proposition 4.2


@pytest.mark.parametrize("make", [attention_on, lifting_on])
@pytest.mark.parametrize("name", GROUPS)
def test_proposition_4_2_absolute_positions_commute_with_neither_permutations_nor_translations(name, make):
    space = GROUPS[name]()
    layer = make(space, "absolute")
    assert permutation_error(layer, random_field(layer.in_type, 4, 4), torch.randperm(16)) > BROKEN
    assert translation_error(make(space, "absolute", 3)) > BROKEN
    # They are no loss to the fiber group, which acts about the centre of the grid.
    assert turning_error(layer, random_field(layer.in_type, 4, 4)) < EXACT


# --------------------------------------------------------------------------------------------------- Proposition 4.3


@pytest.mark.sampled
@pytest.mark.parametrize("encoding", RELATIVE)
@pytest.mark.parametrize("name", [*GROUPS, *IN_SPACE])
def test_proposition_4_3_relative_positions_commute_with_translations(name, encoding):
    space = EVERY_GROUP[name]()
    reach = 2 if space.dimensionality == 2 else 1
    for make in (attention_on, lifting_on):
        layer = make(space, RELATIVE[encoding], 2 * reach + 1)
        assert translation_error(layer, reach) < EXACT


# ------------------------------------------------------------------------------------------- Propositions 5.1 and 5.2

# A map that commutes with the translations and with H commutes with what they generate, G = R^d ⋊ H.


@pytest.mark.sampled(4)
@pytest.mark.parametrize("encoding", ["mlp", "fourier"])
@pytest.mark.parametrize("name", EVERY_GROUP)
def test_proposition_5_1_lifting_attention_is_equivariant(name, encoding):
    space = EVERY_GROUP[name]()
    for kernel_size in (None, 3):
        layer = lifting_on(space, encoding, kernel_size)
        x = random_field(layer.in_type, *shape_of(space, 4))
        assert turning_error(layer, x) < EXACT
        assert grid_error(layer, x) < EXACT
    assert translation_error(layer, 1) < EXACT


@pytest.mark.sampled(4)
@pytest.mark.parametrize("query", ["own", "all"])
@pytest.mark.parametrize("encoding", ["mlp", "fourier"])
@pytest.mark.parametrize("name", EVERY_GROUP)
def test_proposition_5_2_group_attention_is_equivariant(name, encoding, query):
    space = EVERY_GROUP[name]()
    for kernel_size in (None, 3):
        layer = attention_on(space, encoding, kernel_size, query=query)
        x = random_field(layer.in_type, *shape_of(space, 4), batch=1)
        assert turning_error(layer, x) < EXACT
        assert grid_error(layer, x) < EXACT
    assert translation_error(layer, 1) < EXACT


@pytest.mark.parametrize("make", [lifting_on, attention_on])
@pytest.mark.parametrize("name", [name for name in GROUPS | OFF_THE_GRID if name != "trivial"])
def test_propositions_5_1_and_5_2_need_the_encoding_to_turn(name, make):
    """The same layer, whose encoding is the same at all poses."""
    layer = make(EVERY_GROUP[name](), "mlp", 3)
    x = random_field(layer.in_type, 4, 4)
    layer.plain.inverse_action.copy_(torch.eye(2).expand_as(layer.plain.inverse_action))
    assert turning_error(layer, x) > BROKEN
    if name in GROUPS:
        assert grid_error(layer, x) > BROKEN


def equation_16(layer, x, matrix, printed):
    r"""Group self-attention with one sum for each query pose.

    It encodes :math:`h^{-1}(\tilde h^{-1} \hat h)`, as Eq. 16 is printed, or :math:`h^{-1} \hat h`.
    """
    plain = layer.plain
    grid = Grid(x.shape[2:], plain.window, dtype=x.dtype, frame=torch.as_tensor(matrix))
    call, quotient = plain.call(x, grid), plain.quotient
    total = 0
    for pose in range(len(quotient)):
        seen = quotient[:, quotient[pose]] if printed else quotient
        bias = replace(call.bias, pose=plain.encoding.poses()[:, seen])
        one = replace(call, q=call.q[..., pose : pose + 1, :], bias=bias, query="all")
        total = total + ON_GRIDS.compute(one, "reference")
    y = plain.project_out(total)
    return y.transpose(1, 2).unflatten(2, x.shape[2:])


@pytest.mark.parametrize("name", ["flip", "C2", "C4", "D4"])
@torch.no_grad()
@pytest.mark.slow
def test_proposition_5_2_does_not_hold_for_equation_16_as_printed(name):
    layer = attention_on(GROUPS[name](), "mlp", 3, query="all")
    x = random_field(layer.in_type, 4, 4)
    group = fibers(layer.space)
    errors = {}
    for printed in (False, True):
        y = equation_16(layer, x.tensor, np.eye(2), printed)
        if not printed:
            assert relative(y, layer(x).tensor) < EXACT
        errors[printed] = max(
            relative(
                equation_16(layer, x.transform_fibers(g).tensor, matrix, printed),
                GeometricTensor(y, layer.out_type).transform_fibers(g).tensor,
            )
            for g, matrix in zip(group.elements, group.action, strict=True)
        )
    assert errors[False] < EXACT
    assert errors[True] > BROKEN


def keeps_its_window(window, matrices):
    """Whether the neighbourhood, as a part of the plane or of space, is mapped onto itself."""
    dim = matrices.shape[-1]
    reach = window.kernel_size / 2
    points = np.random.default_rng(0).uniform(-1.5 * reach, 1.5 * reach, (2000, dim))

    def inside(p):
        return (np.abs(p).max(-1) if window.shape == "square" else np.linalg.norm(p, axis=-1)) <= reach

    return all((inside(points @ matrix.T) == inside(points)).all() for matrix in matrices)


@pytest.mark.sampled
@pytest.mark.parametrize("name", EVERY_GROUP)
@pytest.mark.parametrize("make", [lifting_on, attention_on], ids=["lifting", "group"])
def test_propositions_5_1_and_5_2_need_a_neighbourhood_that_the_group_keeps(name, make):
    """A turned grid takes its neighbourhoods along; that N itself is invariant is what discs are for."""
    layer = make(EVERY_GROUP[name](), "mlp", 3)
    matrices = fibers(layer.space).action
    assert keeps_its_window(layer.plain.window, matrices)
    on_grid = all(np.allclose(np.abs(m), np.abs(m).round()) for m in matrices)
    assert keeps_its_window(Window(3, "square"), matrices) == on_grid


# ------------------------------------------------------------------------------------------------------ Definition 4.3


def dihedral(n):
    """The matrices of all turns by multiples of 2π/n, and of the turns after a flip."""
    angles = 2 * math.pi * np.arange(n) / n
    rotations = [np.array([[np.cos(a), -np.sin(a)], [np.sin(a), np.cos(a)]]) for a in angles]
    return rotations + [r @ np.diag([-1.0, 1.0]) for r in rotations]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [*GROUPS, "C8"])
def test_definition_4_3_equivariance_is_unique(name):
    """A network of H from scalars to scalars commutes with the elements of H, and with no others of D16.

    On scalars every motion of the plane acts, and every permutation of the positions.
    """
    space = EVERY_GROUP[name]()
    lifting = lifting_on(space, "mlp", 3)
    group = GroupSelfAttention(lifting.out_type, scalars(space, 1), 2, 3, head_fields=4).double()
    x = random_field(lifting.in_type, 5, 5)

    def commutes(matrix):
        with torch.no_grad():
            error = relative(turned(group, turned(lifting, x.tensor, matrix), matrix), group(lifting(x)).tensor)
        assert error < EXACT or error > BROKEN
        return error < EXACT

    for matrix in dihedral(16):
        assert commutes(matrix) == any(np.allclose(matrix, h) for h in fibers(space).action)
    assert permutation_error(lambda t: group(lifting(t)), x, torch.randperm(25)) > BROKEN


# --------------------------------------------------------------------------------------------------------- Section 4.3


class _FunctionOf(Encoding):
    """A random linear function of some features of the offset."""

    def __init__(self, features):
        super().__init__()
        self.features = features

    def _build_offsets(self):
        self.readout = torch.nn.Linear(len(self.features(torch.zeros(self.dim))), self.num_heads * self.channels)

    def offsets(self, delta):
        return self.readout(self.features(delta)).unflatten(-1, (self.num_heads, self.channels)).movedim(-2, 0)


ENCODINGS = {
    # What it is a function of, and the elements of D8 that leave that as it is.
    "the distance": (lambda d: torch.stack([d.norm(dim=-1), d.square().sum(-1)], -1), dihedral(8)),
    "the axes, up to sign": (
        lambda d: d.abs(),
        [np.diag(s) for s in ([1.0, 1.0], [-1.0, 1.0], [1.0, -1.0], [-1.0, -1.0])],
    ),
    "the height": (lambda d: d[..., 1:], [np.diag(s) for s in ([1.0, 1.0], [-1.0, 1.0])]),
    "the offset, up to sign": (
        lambda d: torch.stack([d[..., 0] ** 2, d[..., 0] * d[..., 1]], -1),
        [np.eye(2), -np.eye(2)],
    ),
    "the offset": (lambda d: d, [np.eye(2)]),
}


@pytest.mark.parametrize("name", ENCODINGS)
def test_section_4_3_attention_commutes_with_what_leaves_the_encoding_as_it_is(name):
    """Layers that know of no group: their encoding alone decides."""
    features, invariant = ENCODINGS[name]
    image = scalars(GROUPS["trivial"](), 2)
    layer = GroupSelfAttention(image, image, 2, 3, head_fields=4, encoding=_FunctionOf(features)).double()
    x = random_field(image, 5, 5)
    offsets = Grid((5, 5), layer.plain.window).offsets
    for matrix in dihedral(8):
        with torch.no_grad():
            seen = (layer.plain.encoding.offsets(offsets @ m) for m in (torch.tensor(matrix).T, torch.eye(2).double()))
            encoding_error = relative(*seen)
            layer_error = relative(turned(layer, x.tensor, matrix), layer(x).tensor)
        expected = any(np.allclose(matrix, m) for m in invariant)
        assert encoding_error < EXACT if expected else encoding_error > BROKEN
        assert layer_error < EXACT if expected else layer_error > BROKEN


def test_section_4_3_a_constant_encoding_is_none():
    """It is invariant to every permutation of the positions."""
    image = scalars(GROUPS["trivial"](), 2)
    constant = _FunctionOf(lambda d: torch.ones_like(d[..., :1]))
    layer = GroupSelfAttention(image, image, 2, head_fields=4, encoding=constant, kernel_size=None).double()
    x = random_field(image, 4, 5)
    assert permutation_error(layer, x, torch.randperm(20)) < EXACT
    with_none = GroupSelfAttention(image, image, 2, head_fields=4, encoding=NoEncoding(), kernel_size=None).double()
    with_none.load_state_dict({k: v for k, v in layer.state_dict().items() if ".encoding." not in k})
    torch.testing.assert_close(with_none(x).tensor, layer(x).tensor, rtol=1e-12, atol=1e-12)
