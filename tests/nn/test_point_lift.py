"""Layers on lifted points: invariant when the lifts move along with the points, and not when they stay."""

import pytest
import torch
from escnn import gspaces
from escnn.nn import FieldType, GeometricTensor

from escnn_attention import LiftAverage, LiftedMotion, PairKernel, PointAttentiveConv, PointLift, PointSelfAttention
from escnn_attention.geometry.relations import product, rotate
from tests import spaces
from tests.layers import assert_formula
from tests.nn.points import cloud

pytestmark = pytest.mark.usefixtures("double")

SPACES = {2: lambda: gspaces.rot2dOnR2(-1), 3: gspaces.rot3dOnR3}
RELATIONS = [(2, LiftedMotion()), (3, LiftedMotion()), (3, LiftedMotion("quaternion"))]


def moved(coords, lifts):
    """A cloud and its lifts after a random motion."""
    dim = coords.shape[1]
    rotation = torch.randn(1) if dim == 2 else torch.nn.functional.normalize(torch.randn(4), dim=0)
    lifts = lifts.unsqueeze(-1) if dim == 2 else lifts
    after = product(rotation.expand_as(lifts), lifts)
    return rotate(rotation, coords) + torch.randn(dim), after.squeeze(-1) if dim == 2 else after


@pytest.mark.parametrize(("dim", "relation"), RELATIONS, ids=str)
@pytest.mark.parametrize("encoding", ["mlp", "fourier", PairKernel(hidden=3)], ids=str)
def test_layers_are_invariant_when_lifts_move_along(dim, relation, encoding):
    torch.manual_seed(0)
    lift = PointLift(spaces.scalars(SPACES[dim](), 2), 3)
    fields = lift.out_type
    layers = [PointSelfAttention(fields, fields, 2, encoding=encoding, relation=relation)]
    if dim == 2:
        layers.append(PointAttentiveConv(fields, fields, 1, encoding=encoding, relation=relation))
    x, coords, lifts = torch.randn(5, 2), torch.randn(5, dim), torch.randn(5, 3) if dim == 2 else torch.randn(5, 3, 4)
    after, lifts_after = moved(coords, lifts)

    def output(layer, coords, lifts):
        y, edges, batch, mask, measure = lift(GeometricTensor(x, lift.in_type, coords), lifts=lifts)
        return layer(y, edges, batch, mask=mask, measure=measure).tensor

    for layer in layers:
        y = output(layer, coords, lifts)
        torch.testing.assert_close(output(layer, after, lifts_after), y, rtol=1e-11, atol=1e-11)
        assert (output(layer, after, lifts) - y).abs().max() > 1e-4


@pytest.mark.parametrize(("dim", "relation"), [*RELATIONS, (3, LiftedMotion("quaternion", limit=7.0))], ids=str)
@pytest.mark.parametrize("rule", [{"num_neighbours": 4}, {"radius": 1.2}], ids=str)
def test_neighbours_move_along(dim, relation, rule):
    torch.manual_seed(0)
    lift = PointLift(spaces.scalars(SPACES[dim](), 2), 3)
    rule = {"radius": 0.25} if "radius" in rule and relation.limit else rule  # limited motions are short
    layer = PointSelfAttention(lift.out_type, lift.out_type, 2, relation=relation, **rule)
    x, coords, lifts = torch.randn(7, 2), torch.randn(7, dim), torch.randn(7, 3) if dim == 2 else torch.randn(7, 3, 4)

    def output(coords, lifts):
        y, *_ = lift(GeometricTensor(x, lift.in_type, coords), lifts=lifts)
        return layer(y).tensor, y.coords

    y, motions = output(coords, lifts)
    z, _ = output(*moved(coords, lifts))
    torch.testing.assert_close(z, y, rtol=1e-11, atol=1e-11)
    # Neither does it matter by which numbers the rotations are given, where the relation is not of those numbers.
    other = lifts + 2 * torch.pi if dim == 2 else -lifts
    if relation.rotation == "vector":
        torch.testing.assert_close(output(coords, other)[0], y, rtol=1e-11, atol=1e-11)
    # The distance is symmetric, a motion is the nearest to itself, and some are no neighbours.
    distance = relation.distance(motions[:, None], motions)
    torch.testing.assert_close(distance, distance.T)
    assert (distance >= distance.diagonal() - 1e-12).all()
    seen = [set(row.tolist()) for chunk in layer.plain.neighbourhood(motions).chunks(1) for row in chunk.keys]
    assert all(0 < len(keys - {-1}) < len(motions) for keys in seen)
    everyone = PointSelfAttention(lift.out_type, lift.out_type, 2, relation=relation)
    everyone.load_state_dict(layer.state_dict())
    assert (everyone(GeometricTensor(x.repeat_interleave(3, 0), lift.out_type, motions)).tensor - y).abs().max() > 1e-4


def element_of(group, lift):
    """escnn's element of an angle, or of a quaternion with its real part first."""
    if lift.dim() == 0:
        return group.element(float(lift), "radians")
    return group.element(lift[[1, 2, 3, 0]].detach().numpy() / float(lift.norm()), "Q")


def steerable(dim):
    """A type of scalars and vectors, with irreps of higher order and a sum that is not in a basis of irreps."""
    gspace = SPACES[dim]()
    irreps = [gspace.irrep(i) for i in (1, 0, 2, 1)]
    return FieldType(gspace, [*irreps, gspace.fibergroup.bl_regular_representation(1)])


@pytest.mark.parametrize("dim", [2, 3])
def test_fields_in_the_frames_of_lifts_are_the_formula(dim):
    torch.manual_seed(0)
    fields = steerable(dim)
    lift, average = PointLift(fields, 3), LiftAverage(fields, 3)
    assert len(lift.out_type) == lift.out_type.size == fields.size
    x, coords = torch.randn(4, fields.size, requires_grad=True), torch.randn(4, dim)
    lifts = torch.randn(4, 3) if dim == 2 else torch.randn(4, 3, 4)
    matrices = torch.stack(
        [
            torch.stack([torch.tensor(fields.representation(element_of(fields.fibergroup, r))) for r in rotations])
            for rotations in lifts
        ]
    )
    y, *_ = lift(GeometricTensor(x, fields, coords), lifts=lifts)
    expected = torch.einsum("isba,ib->isa", matrices, x)  # orthogonal: the inverse is the transpose
    assert_formula(y.tensor, expected.flatten(0, 1), [x], 1e-12, 1e-12)
    f = torch.randn(12, fields.size, requires_grad=True)
    z = average(GeometricTensor(f, average.in_type, y.coords))
    mean = torch.einsum("isab,isb->ia", matrices, f.view(4, 3, -1)) / 3
    assert_formula(z.tensor, mean, [f], 1e-12, 1e-12)
    torch.testing.assert_close(z.coords, coords)
    # The one takes back the other.
    torch.testing.assert_close(average(y).tensor, x, rtol=1e-12, atol=1e-12)
    for module in (lift, average):
        module.float()
    single = average(lift(GeometricTensor(x.float(), fields, coords.float()), lifts=lifts.float())[0]).tensor
    torch.testing.assert_close(single, x.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("dim", "relation"), RELATIONS, ids=str)
def test_vectors_are_rotated_when_lifts_move_along(dim, relation):
    torch.manual_seed(0)
    fields = steerable(dim)
    lift, average = PointLift(fields, 2), LiftAverage(fields, 2)
    layer = PointSelfAttention(lift.out_type, average.in_type, 2, head_fields=3, relation=relation, num_neighbours=6)
    x, coords, lifts = torch.randn(5, fields.size), torch.randn(5, dim), torch.randn(5, 2, *(() if dim == 2 else (4,)))
    rotation = torch.randn(()) if dim == 2 else torch.nn.functional.normalize(torch.randn(4), dim=0)
    g = torch.tensor(fields.representation(element_of(fields.fibergroup, rotation)))
    turn = rotation.view(-1)
    after = product(turn.expand(5, 2, -1), lifts.view(5, 2, -1)).view(lifts.shape)

    def output(x, coords, lifts):
        y, *others = lift(GeometricTensor(x, fields, coords), lifts=lifts)
        return average(layer(y, *others[:2])).tensor

    y = output(x, coords, lifts)
    places = rotate(turn, coords) + 1
    torch.testing.assert_close(output(x @ g.T, places, after), y @ g.T, rtol=1e-11, atol=1e-11)
    for wrong in (output(x, places, after), output(x @ g.T, places, lifts)):
        assert (wrong - y @ g.T).abs().max() > 1e-3


def test_what_is_drawn_and_what_is_not():
    lift = PointLift(spaces.scalars(SPACES[2](), 1), 2)
    x = GeometricTensor(torch.randn(4, 1), lift.in_type, torch.randn(4, 2))
    assert not torch.equal(lift(x)[0].coords, lift(x)[0].coords)
    torch.manual_seed(3)
    first = lift(x)[0].coords
    torch.manual_seed(3)
    assert torch.equal(lift(x)[0].coords, first)
    lift.eval()
    state = torch.get_rng_state()
    assert torch.equal(lift(x)[0].coords, lift(x)[0].coords)
    assert torch.equal(torch.get_rng_state(), state)
    assert "num_samples=2" in repr(lift)
    assert "positive" not in repr(lift)
    positive = PointLift(spaces.scalars(SPACES[3](), 1), 2, positive_quaternions=True)
    assert "num_samples=2, positive_quaternions=True" in repr(positive)
    assert (positive(GeometricTensor(torch.randn(9, 1), positive.in_type, torch.randn(9, 3)))[0].coords[:, 3] > 0).all()


def test_bad_arguments():
    scalars, in_space = (spaces.scalars(space(), 1) for space in SPACES.values())
    lift, average, lift_in_space = PointLift(scalars, 2), LiftAverage(scalars, 2), PointLift(in_space)
    x, lifted = cloud(scalars, 3), cloud(average.in_type, 3)
    wrong = torch.zeros(3, 2).index_fill(0, torch.tensor([1]), torch.nan)
    others = [gspaces.rot2dOnR2(4), gspaces.rot2dOnR3(-1), gspaces.flipRot2dOnR2(-1)]
    for error, message, call in (
        *((ValueError, "in_type: .*all rotations", lambda g=g: PointLift(spaces.scalars(g, 1))) for g in others),
        *((ValueError, "out_type: .*all rotations", lambda g=g: LiftAverage(spaces.scalars(g, 1))) for g in others[:2]),
        (ValueError, "num_samples: got 0", lambda: LiftAverage(scalars, 0)),
        (ValueError, "num_samples: got 0", lambda: PointLift(scalars, 0)),
        (ValueError, "positive_quaternions: .*plane are angles", lambda: PointLift(scalars, 1, True)),
        (TypeError, "positive_quaternions: .*True or False", lambda: PointLift(in_space, 1, 1)),
        (ValueError, "input: .*needed 2 for each", lambda: average(lifted)),
        (ValueError, "lifts: .*angles of shape", lambda: lift(x, lifts=torch.zeros(3, 1))),
        (TypeError, "lifts: got list", lambda: lift(x, lifts=[0.0])),
        (ValueError, "lifts: .*not finite", lambda: lift(x, lifts=wrong)),
        (
            ValueError,
            "lifts: got .* quaternions of length 0",
            lambda: lift_in_space(cloud(in_space, 3), lifts=torch.zeros(3, 1, 4)),
        ),
    ):
        with pytest.raises(error, match=f"^{message}"):
            call()
    lift(x, lifts=wrong, mask=torch.tensor([True, False, True]))
