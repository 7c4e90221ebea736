import numpy as np
import pytest
import torch
from escnn import group, gspaces
from escnn.nn import FieldType
from hypothesis import given
from hypothesis import strategies as st

from escnn_attention.groups.fibers import fibers, frames, invariant_vectors
from escnn_attention.plain.projections import FromPoses, Scalars, ToPoses
from tests import spaces

GSPACES = {
    name: make for name, make in spaces.ALL.items() if name not in {"octahedral on a point", "D4 about an odd axis"}
} | {
    "a product": lambda: gspaces.no_base_space(group.direct_product(group.dihedral_group(3), group.cyclic_group(2))),
}
every_gspace = pytest.mark.parametrize("make", GSPACES.values(), ids=GSPACES)


def rich_type(gspace):
    """Fields of all kinds, interleaved, one of them not orthogonal."""
    last = gspace.fibergroup.irreps()[-1]
    trivial = gspace.trivial_repr
    two = group.directsum([last, trivial], name="a vector and a scalar")
    basis = np.eye(two.size) + np.triu(np.ones((two.size, two.size)), 1)
    oblique = group.change_basis(two, basis, name="oblique", supported_nonlinearities=[])
    fields = [last, oblique, gspace.regular_repr, trivial, last, oblique, trivial]
    return FieldType(gspace, fields)


def to_poses(field_type, fields, **options):
    order = fibers(field_type.gspace).order
    return ToPoses(frames(field_type), field_type.size, fields, order, **options).double()


def from_poses(field_type, fields, *, bias=False, **options):
    order = fibers(field_type.gspace).order
    invariants = invariant_vectors(field_type) if bias else None
    return FromPoses(
        frames(field_type, dual=True), field_type.size, fields, order, invariants=invariants, **options
    ).double()


def read(projection, size):
    """The matrix of a map to poses, rows in the order of escnn's channels."""
    with torch.no_grad():
        out = projection(torch.eye(size, dtype=torch.float64)[None]) - projection(torch.zeros(1, 1, size).double())
        return out[0, 0].permute(2, 1, 0).flatten(0, 1).numpy()


def written(projection, fields, order):
    """The matrix of a map from poses, columns in the order of escnn's channels."""
    basis = torch.eye(fields * order, dtype=torch.float64).view(1, -1, fields, order).transpose(-1, -2).unsqueeze(0)
    with torch.no_grad():
        return (projection(basis) - projection(torch.zeros_like(basis)))[0].T.numpy()


def span(projection, matrix):
    """The matrices of all weights with one entry of one, flat, one a row."""
    rows = []
    for i in range(projection.weight.numel()):
        with torch.no_grad():
            projection.weight.zero_().view(-1)[i] = 1
        rows.append(matrix(projection).ravel())
    return np.stack(rows)


def intertwiners(in_type, out_type):
    """All equivariant maps by brute force: the null space of M ρ(g) - ρ'(g) M."""
    rho, rho_ = in_type.representation, out_type.representation
    n, m = in_type.size, out_type.size
    group_ = in_type.fibergroup
    equations = [
        np.kron(np.eye(m), np.asarray(rho(g)).T) - np.kron(np.asarray(rho_(g)), np.eye(n))
        for g in group_.generators or group_.elements
    ]
    _, s, vh = np.linalg.svd(np.concatenate(equations))
    return vh[np.concatenate([s, np.zeros(n * m - len(s))]) < 1e-9 if len(s) < n * m else s < 1e-9]


def check_intertwines(matrix, in_type, out_type):
    for g in in_type.fibergroup.elements:
        left = matrix @ np.asarray(in_type.representation(g))
        right = np.asarray(out_type.representation(g)) @ matrix
        assert np.abs(left - right).max() <= 1e-13 * max(1.0, np.abs(matrix).max()) * in_type.size


@every_gspace
def test_both_directions_intertwine(make):
    gspace = make()
    field_type, poses = rich_type(gspace), spaces.regular(gspace, 2)
    check_intertwines(read(to_poses(field_type, 2, bias=1), field_type.size), field_type, poses)
    matrix = written(from_poses(field_type, 2, bias=True), 2, gspace.fibergroup.order())
    check_intertwines(matrix, poses, field_type)


@given(st.data())
def test_both_directions_intertwine_for_types_drawn(data):
    gspace = data.draw(st.sampled_from(list(GSPACES.values())))()
    field_type, poses = data.draw(spaces.field_types(gspace, 4)), spaces.regular(gspace, 2)
    check_intertwines(read(to_poses(field_type, 2), field_type.size), field_type, poses)
    check_intertwines(written(from_poses(field_type, 2), 2, gspace.fibergroup.order()), poses, field_type)


def rank(matrix):
    return np.linalg.matrix_rank(matrix, tol=1e-8)


@pytest.mark.parametrize("name", ["trivial", "flip", "C3", "C4", "D3", "dihedral 3D", "conical"])
def test_both_directions_are_complete(name):
    """As many independent maps as parameters, and they are all the equivariant ones."""
    gspace = GSPACES[name]()
    field_type, poses = rich_type(gspace), spaces.regular(gspace, 2)
    order = gspace.fibergroup.order()
    for projection, matrix, types in (
        (to_poses(field_type, 2), lambda p: read(p, field_type.size), (field_type, poses)),
        (from_poses(field_type, 2), lambda p: written(p, 2, order), (poses, field_type)),
    ):
        made, all_maps = span(projection, matrix), intertwiners(*types)
        assert rank(made) == len(made) == len(all_maps) == 2 * field_type.size
        assert rank(np.concatenate([made, all_maps])) == len(made)


@every_gspace
def test_fields_of_one_representation_may_lie_apart(make):
    """The order of the fields is no more than the order of the channels."""
    gspace = make()
    last, trivial, regular = gspace.fibergroup.irreps()[-1], gspace.trivial_repr, gspace.regular_repr
    apart, sorted_ = (
        FieldType(gspace, [last, regular, trivial, last]),
        FieldType(gspace, [last, last, regular, trivial]),
    )
    n, r = last.size, regular.size
    order = [*range(n), *range(2 * n, 2 * n + r + 1), *range(n, 2 * n)]  # of sorted channels, as they lie apart
    for make_projection in (to_poses, from_poses):
        one, other = make_projection(apart, 2), make_projection(sorted_, 2)
        with torch.no_grad():
            one.weight.copy_(other.weight[:, order])
        if make_projection is to_poses:
            np.testing.assert_allclose(read(one, apart.size), read(other, apart.size)[:, order], atol=1e-12)
        else:
            matrix = written(other, 2, gspace.fibergroup.order())
            np.testing.assert_allclose(written(one, 2, gspace.fibergroup.order()), matrix[order], atol=1e-12)


@every_gspace
def test_pointwise_leaves_the_poses_alone(make):
    gspace = make()
    order = gspace.fibergroup.order()
    in_type = spaces.regular(gspace, 3)
    projection = to_poses(in_type, 2, kind="pointwise", bias=2)
    assert projection.weight.shape == (2, 3)
    expected = np.kron(projection.weight.detach().numpy(), np.eye(order))
    np.testing.assert_allclose(read(projection, in_type.size), expected, atol=1e-12)
    projection = from_poses(in_type, 2, kind="pointwise", bias=True)
    assert projection.weight.shape == (3, 2)
    expected = np.kron(projection.weight.detach().numpy(), np.eye(order))
    np.testing.assert_allclose(written(projection, 2, order), expected, atol=1e-12)


@every_gspace
@pytest.mark.parametrize("kind", ["group", "pointwise"])
def test_biases_are_invariant(make, kind):
    gspace = make()
    order = gspace.fibergroup.order()
    field_type = rich_type(gspace) if kind == "group" else spaces.regular(gspace, 2)
    reading = to_poses(field_type, 3, kind=kind, bias=2)
    writing = from_poses(field_type, 3, kind=kind, bias=True)
    assert reading.bias.shape == (2,)
    assert writing.bias.shape == (invariant_vectors(field_type).shape[1],)
    for projection in reading, writing:
        assert not projection.bias.any()  # it starts at zero
        with torch.no_grad():
            projection.bias.normal_()
    with torch.no_grad():
        constant = reading(torch.zeros(1, 1, field_type.size).double())[0, 0, 0]
        # One number a field, on every pose; the last field, the keys of an attention, has none.
        assert torch.equal(constant, torch.nn.functional.pad(reading.bias, (0, 1)).expand(order, 3))
        vector = writing(torch.zeros(1, 1, 1, order, 3).double())[0, 0].numpy()
    assert np.abs(vector).max() > 0.01
    for g in gspace.fibergroup.elements:
        np.testing.assert_allclose(np.asarray(field_type.representation(g)) @ vector, vector, atol=1e-9)


def test_without_invariant_vectors_there_is_no_bias():
    gspace = gspaces.rot2dOnR2(6)
    vectors = FieldType(gspace, 2 * [gspace.irrep(1)])
    assert from_poses(vectors, 2, bias=True).bias is None
    assert from_poses(rich_type(gspace), 2, bias=False).bias is None
    assert to_poses(vectors, 2).bias is None


@pytest.mark.parametrize("made", [torch.float32, torch.bfloat16])
def test_exact_after_a_change_of_precision(made):
    gspace = gspaces.flipRot2dOnR2(3, axis=0.2)
    field_type = rich_type(gspace)
    for projection in to_poses(field_type, 2), from_poses(field_type, 2, bias=True):
        projection.to(made).double()
        if isinstance(projection, ToPoses):
            check_intertwines(read(projection, field_type.size), field_type, spaces.regular(gspace, 2))
        else:
            check_intertwines(written(projection, 2, 6), spaces.regular(gspace, 2), field_type)


@pytest.mark.parametrize("kind", ["group", "pointwise"])
@pytest.mark.parametrize("name", ["trivial", "C4", "D3", "octahedral"])
def test_unit_variance_stays_unit_variance(name, kind):
    gspace = GSPACES[name]()
    order = gspace.fibergroup.order()
    if kind == "pointwise":
        field_type = spaces.regular(gspace, 20)
    else:
        field_type = FieldType(gspace, 10 * [gspace.trivial_repr, gspace.regular_repr, gspace.fibergroup.irreps()[-1]])
    with torch.no_grad():
        poses = to_poses(field_type, 30, kind=kind)(torch.randn(1, 50, field_type.size).double())
        features = from_poses(field_type, 30, kind=kind)(torch.randn(1, 1, 50, order, 30).double())
    assert poses.var().item() == pytest.approx(1, rel=0.2)
    assert features.var().item() == pytest.approx(1, rel=0.2)


def test_shapes_and_gradients():
    field_type = rich_type(gspaces.flipRot2dOnR2(3))
    reading, writing = to_poses(field_type, 3, bias=2), from_poses(field_type, 3, bias=True)
    x = torch.randn(2, 5, field_type.size, dtype=torch.float64, requires_grad=True)
    poses = reading(x)
    assert poses.shape == (1, 2, 5, 6, 3)
    out = writing(poses)
    assert out.shape == x.shape
    out.square().sum().backward()
    tensors = [x, *reading.parameters(), *writing.parameters()]
    assert len(tensors) == 5
    assert all(t.grad.abs().max() > 0 for t in tensors)


def test_scalars_are_a_linear_layer():
    scalars = Scalars(4, 6, bias=3).double()
    x = torch.randn(2, 5, 4).double()
    assert scalars(x).shape == (1, 2, 5, 1, 6)
    assert not scalars.bias.any()
    with torch.no_grad():
        scalars.bias.normal_()
    bias = torch.cat([scalars.bias, torch.zeros(3).double()])
    torch.testing.assert_close(scalars(x)[0, :, :, 0], x @ scalars.weight.T + bias)
    assert Scalars(4, 6).bias is None
    assert Scalars(400, 200)(torch.randn(1, 50, 400)).var().item() == pytest.approx(1, rel=0.2)


@pytest.mark.parametrize("kind", ["group", "pointwise"])
@pytest.mark.parametrize("bias", [0, 4])
def test_groups_are_the_fields_taken_apart(kind, bias):
    gspace = gspaces.rot2dOnR2(3)
    field_type, x = spaces.regular(gspace, 2), torch.randn(2, 5, 6).double()
    whole = to_poses(field_type, 6, kind=kind, bias=bias)
    apart = to_poses(field_type, 6, kind=kind, bias=bias, groups=3)
    apart.load_state_dict(whole.state_dict())
    torch.testing.assert_close(apart(x), whole(x).view(2, 5, 3, 3, 2).movedim(-2, 0))
    back, back_apart = from_poses(field_type, 6, kind=kind), from_poses(field_type, 6, kind=kind, groups=3)
    back_apart.load_state_dict(back.state_dict())
    torch.testing.assert_close(back_apart(apart(x)), back(whole(x)))
    scalars, scalars_apart = Scalars(6, 6, bias=4).double(), Scalars(6, 6, bias=4, groups=2).double()
    scalars_apart.load_state_dict(scalars.state_dict())
    torch.testing.assert_close(scalars_apart(x), scalars(x).view(2, 5, 1, 2, 3).movedim(-2, 0))
