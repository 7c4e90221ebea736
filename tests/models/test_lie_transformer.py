import math

import pytest
import torch
from escnn import gspaces
from escnn.nn import FieldType

from escnn_attention import LiftedMotion, Offset
from escnn_attention.geometry.relations import product, rotate
from escnn_attention.models import LieTransformer


def small(gspace, **options):
    return LieTransformer(gspace, 2, 3, **{"fields": 4, "num_blocks": 1, "num_heads": 2, **options}).double().eval()


@pytest.mark.parametrize(
    "make", [lambda: gspaces.flipRot2dOnR2(3), lambda: gspaces.octaOnR3(), lambda: gspaces.trivialOnR3()]
)
@pytest.mark.parametrize("options", [{}, {"readout": "points", "pool": "max", "encoding": "rotary"}])
def test_is_invariant(make, options):
    gspace = make()
    network, x = small(gspace, **options), torch.randn(5, 2, dtype=torch.float64)
    coords = torch.randn(5, gspace.dimensionality, dtype=torch.float64)
    expected = network(x, coords)
    for g in gspace.fibergroup.generators:
        matrix = torch.tensor(gspace.basespace_action(g), dtype=torch.float64)
        torch.testing.assert_close(network(x, coords @ matrix.T + 1), expected, rtol=1e-10, atol=1e-10)
    assert (network(x, 2 * coords) - expected).abs().max() > 1e-6
    torch.testing.assert_close(network.export()(x, coords), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("make", [lambda: gspaces.rot2dOnR2(-1), gspaces.rot3dOnR3])
@pytest.mark.parametrize("options", [{}, {"readout": "points", "pool": "max", "normalization": "count"}])
def test_is_invariant_when_lifts_move_along(make, options):
    torch.manual_seed(0)
    gspace = make()
    network, x = small(gspace, lift_samples=2, **options), torch.randn(5, 2, dtype=torch.float64)
    coords = torch.randn(5, gspace.dimensionality, dtype=torch.float64)
    turn = torch.randn(1 if gspace.dimensionality == 2 else 4, dtype=torch.float64)
    lifts = torch.randn(5, 2, len(turn), dtype=torch.float64)
    if len(turn) == 4:
        turn, lifts = turn / turn.norm(), lifts / lifts.norm(dim=-1, keepdim=True)
    with torch.no_grad():  # that a difference of the features is one of the output
        for parameter in network.head.parameters():
            parameter.mul_(10)
    after, shape = product(turn.expand_as(lifts), lifts), (5, 2) if len(turn) == 1 else (5, 2, 4)
    expected = network(x, coords, lifts=lifts.view(shape))
    moved = rotate(turn, coords) + 1
    torch.testing.assert_close(network(x, moved, lifts=after.view(shape)), expected, rtol=1e-11, atol=1e-11)
    assert (network(x, moved, lifts=lifts.view(shape)) - expected).abs().max() > 1e-4
    exported = network.export()(x, coords, None, None, None, None, lifts.view(shape))
    torch.testing.assert_close(exported, expected, rtol=1e-12, atol=1e-12)
    # Mirror images are others.
    mirrored = network(x, coords * torch.tensor([-1.0, *[1.0] * (coords.shape[1] - 1)]), lifts=lifts.view(shape))
    assert (mirrored - expected).abs().max() > 1e-4


def test_lifts_of_a_cloud_are_no_matter_of_its_batch_and_are_random_in_training():
    torch.manual_seed(0)
    network = small(gspaces.rot2dOnR2(-1), lift_samples=2)
    x, coords = torch.randn(7, 2, dtype=torch.float64), torch.randn(7, 2, dtype=torch.float64)
    batch, mask = torch.tensor([1, 0, 0, 1, 0, 1, 1]), torch.arange(7) != 3
    y = network(x, coords, batch=batch, mask=mask)
    torch.testing.assert_close(network.export()(x, coords, None, batch, mask), y, rtol=1e-12, atol=1e-12)
    for i in (0, 1):
        there = (batch == i) & mask
        torch.testing.assert_close(network(x[there], coords[there])[0], y[i], rtol=1e-12, atol=1e-12)
    everyone = torch.cartesian_prod(torch.arange(7), torch.arange(7)).T
    torch.testing.assert_close(network(x, coords, everyone), network(x, coords), rtol=1e-12, atol=1e-12)
    network.train()
    assert (network(x, coords) - network(x, coords)).abs().max() > 1e-6


@pytest.mark.parametrize("given", [False, True])
def test_programs_lift_any_number_of_points(given):
    torch.manual_seed(0)
    plain = small(gspaces.rot2dOnR2(-1), lift_samples=2).export()
    x, coords, lifts = (torch.randn(7, size, dtype=torch.float64) for size in (2, 2, 2))
    inputs = {"x": x, "coords": coords} | ({"lifts": lifts} if given else {})
    shapes = {name: {0: torch.export.Dim("N", min=2)} for name in inputs}
    program = torch.export.export(plain, (), inputs, dynamic_shapes=shapes).module()
    fewer = {name: tensor[:4] for name, tensor in inputs.items()}
    torch.testing.assert_close(program(**fewer), plain(**fewer), rtol=1e-12, atol=1e-12)


def test_in_the_mean_over_lifts_turned_clouds_are_alike():
    torch.manual_seed(0)
    network = small(gspaces.rot2dOnR2(-1), lift_samples=1)
    x, coords = torch.randn(3, 2, dtype=torch.float64), torch.randn(3, 2, dtype=torch.float64)
    turned = rotate(torch.tensor([1.1], dtype=torch.float64), coords)

    def mean(cloud, steps):
        """The mean over a grid of angles of every point: for periodic functions nearly the integral."""
        angles = torch.arange(steps, dtype=torch.float64) * 2 * math.pi / steps
        lifts = torch.cartesian_prod(angles, angles, angles)
        number = len(lifts)
        batch = torch.arange(number).repeat_interleave(3)
        return network(x.repeat(number, 1), cloud.repeat(number, 1), batch=batch, lifts=lifts.view(-1, 1)).mean(0)

    coarse, fine = ((mean(turned, n) - mean(coords, n)).abs().max() for n in (1, 12))
    assert fine < coarse / 20


def test_bad_arguments():
    gspace = gspaces.rot2dOnR2(4)
    lifted = {"lift_samples": 2, "positive_quaternions": True}
    for space, options, message in (
        (gspace, {"pool": "sum"}, "pool: got 'sum'"),
        (gspace, {"readout": "all"}, "readout: got 'all'"),
        (gspace, {"lift_samples": 2}, "lift_samples: .*C4 is finite"),
        (gspaces.rot2dOnR2(-1), {}, r"lift_samples: .*SO\(2\) is continuous"),
        (gspaces.rot2dOnR2(-1), {"lift_samples": 2, "relation": Offset()}, "relation: .*LiftedMotion"),
        (gspaces.rot3dOnR3(), lifted, "positive_quaternions: .*quaternions are seen"),
        (gspaces.rot3dOnR3(), lifted | {"relation": LiftedMotion()}, "positive_quaternions: .*quaternions are seen"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            small(space, **options)
    with pytest.raises(TypeError, match=r"^projection: .*no such option"):
        small(gspace, projection="group")
    with pytest.raises(ValueError, match=r"^lifts: .*has no lift_samples"):
        small(gspace)(torch.zeros(3, 2).double(), torch.zeros(3, 2).double(), lifts=torch.zeros(3, 1))
    with pytest.raises(ValueError, match=r"^in_type: LieTransformer needs trivial"):
        LieTransformer(gspace, FieldType(gspace, [gspace.irrep(1)]), 1, fields=4, num_blocks=1, num_heads=2)


def test_a_lone_scalar_reaches_other_points():
    """Its scale, too, which the norm takes from a map without a bias: the negative control."""
    torch.manual_seed(0)
    x, coords = torch.randn(5, 1, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    network = LieTransformer(gspaces.rot2dOnR2(4), 1, 3, fields=8, num_blocks=1, num_heads=2).double()
    changed = x.clone()
    changed[0] *= 3

    def of_others(features):
        return network.blocks[0](network.embedding(network.in_type(features, coords))).tensor[1:]

    assert (of_others(changed) - of_others(x)).abs().max() > 1e-3
    network.embedding.plain.projection.bias.data.zero_()
    assert (of_others(changed) - of_others(x)).abs().max() < 1e-4
