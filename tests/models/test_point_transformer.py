"""Transformers on points: equivariance, heads, pooling, export, tensors, errors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from escnn import gspaces
from escnn.nn import FieldType, GeometricTensor

from escnn_attention import Pair, PairKernel
from escnn_attention.geometry.neighbours import Neighbourhood
from escnn_attention.models import PointTransformer
from tests import spaces
from tests.nn.points import mixed

SMALL = {"fields": 2, "num_blocks": 2, "num_heads": 2}
BATCH = torch.tensor([0, 0, 0, 2, 2, 1, 1, 1, 1])


def cloud(in_type: FieldType, number: int = len(BATCH), seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(number, in_type.size, generator=generator, dtype=torch.float64)
    return x, torch.randn(number, in_type.gspace.dimensionality, generator=generator, dtype=torch.float64)


def turned(values: torch.Tensor, field_type: FieldType, element) -> torch.Tensor:
    return values @ torch.as_tensor(field_type.representation(element)).T


def agree(a: torch.Tensor, b: torch.Tensor) -> None:
    assert (a - b).norm() <= 1e-10 * b.norm()


def test_a_network_of_another_symmetry_is_found_out():
    """Rotations change what a network with the trivial group says, and a pair relation sees where the origin is."""
    angle = torch.tensor(2 * torch.pi / 3, dtype=torch.float64)
    turn = torch.stack([torch.stack([angle.cos(), -angle.sin()]), torch.stack([angle.sin(), angle.cos()])])
    for space, same in ((gspaces.rot2dOnR2(3), True), (gspaces.trivialOnR2(), False), (gspaces.rot2dOnR2(4), False)):
        network = PointTransformer(space, 2, 3, encoding=PairKernel(hidden=4), **SMALL).double()
        x, coords = cloud(network.in_type)
        y = network(x, coords, batch=BATCH)
        difference = (network(x, coords @ turn.T, batch=BATCH) - y).norm() / y.norm()
        assert difference < 1e-10 if same else difference > 1e-6
    network = PointTransformer(gspaces.rot2dOnR2(3), 2, 3, relation=Pair(), encoding="mlp", **SMALL).double()
    y = network(x, coords, batch=BATCH)
    agree(network(x, coords @ turn.T, batch=BATCH), y)
    assert (network(x, coords + 1.0, batch=BATCH) - y).norm() > 1e-6 * y.norm()


def test_neighbours_are_searched_once(monkeypatch):
    searched = []
    search = Neighbourhood._by_tree
    monkeypatch.setattr(Neighbourhood, "_by_tree", lambda *a: searched.append(True) or search(*a))
    network = PointTransformer(
        gspaces.rot2dOnR2(3), 2, 1, fields=2, num_blocks=3, num_heads=1, attention={"num_neighbours": 3}
    )
    x, coords = torch.randn(8, 2), torch.randn(8, 2)
    y = network(x, coords)
    assert len(searched) == 1
    exported = network.export()
    torch.testing.assert_close(exported(x, coords), y)
    assert len(searched) == 1
    # Points that have moved have other neighbours.
    coords += torch.randn(8, 2)
    assert not torch.allclose(network(x, coords), y)
    assert len(searched) == 2
    torch.testing.assert_close(exported(x, coords), network(x, coords))


@pytest.mark.parametrize("pool", ["mean", "sum", "max", None])
def test_pooling_is_the_formula(pool):
    """Cloud by cloud."""
    space = gspaces.rot2dOnR2(4)
    network = PointTransformer(space, 3, 2, pool=pool, head={"layers": 2, "poses": "max"}, **SMALL).double()
    x, coords = cloud(network.in_type)
    features = network.embedding(GeometricTensor(x, network.in_type, coords))
    assert all(r.is_trivial() for r in features.type.representations)
    for block in network.blocks:
        features = block(features, batch=BATCH)
    z = torch.nn.functional.silu(network.head.to_poses(network.norm(features).tensor[None])[0, 0]).amax(1)
    pooled = z
    if pool is not None:
        reduce = {"mean": torch.mean, "sum": torch.sum, "max": torch.amax}[pool]
        pooled = torch.stack([reduce(z[i == BATCH], 0) for i in range(3)])
    _, first, _, second, _, third = network.head.perceptron
    silu = torch.nn.functional.silu
    expected = third(silu(second(silu(first(pooled)))))
    torch.testing.assert_close(network(x, coords, batch=BATCH), expected)


def test_batch_norm():
    """Standardised over the clouds of a batch in training, by running statistics afterwards, and invariant in both."""
    space = gspaces.rot2dOnR2(4)
    network = PointTransformer(space, 3, 2, head={"batch_norm": True, "layers": 0}, **SMALL).double()
    x, coords = cloud(network.in_type)
    turn = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)
    agree(network(x, coords @ turn.T, batch=BATCH), network(x, coords, batch=BATCH))
    norm, _ = network.head.perceptron
    seen = []
    norm.register_forward_hook(lambda module, inputs, output: seen.append(output))
    network(x, coords, batch=BATCH)
    torch.testing.assert_close(seen[0].mean(0), torch.zeros(2, dtype=torch.float64), rtol=0, atol=1e-10)
    network.eval()
    agree(network(x, coords @ turn.T, batch=BATCH), network(x, coords, batch=BATCH))
    agree(network.export()(x, coords, batch=BATCH), network(x, coords, batch=BATCH))
    with pytest.raises(ValueError, match="batch_norm"):
        PointTransformer(space, 3, "vector", head={"batch_norm": True})


def test_points_of_measure_two_count_as_two():
    space = gspaces.rot2dOnR2(3)
    for pool in ("mean", "sum"):
        for out in (2, "vector"):
            network = PointTransformer(space, 3, out, pool=pool, positions=True, **SMALL).double()
            x, coords = cloud(network.in_type, 5)
            measure = torch.ones(5, dtype=torch.float64)
            measure[1] = 2
            twice = torch.tensor([0, 1, 1, 2, 3, 4])
            agree(network(x, coords, measure=measure), network(x[twice], coords[twice]))


@pytest.mark.parametrize("batch_norm", [False, True])
def test_masked_points_reach_nothing(batch_norm):
    """No output at other points, and no statistics of a batch."""
    space = gspaces.rot2dOnR2(3)
    mask = torch.tensor([True, False, True, True, True, True, True, False, True])
    for pool in ("mean", "sum", "max", None):
        head = {"batch_norm": batch_norm}
        network = PointTransformer(space, 3, 2, pool=pool, positions=True, head=head, **SMALL).double()
        x, coords = cloud(network.in_type)
        alone = network(x[mask], coords[mask], batch=BATCH[mask])
        x[~mask] = coords[~mask] = torch.nan
        y = network(x, coords, batch=BATCH, mask=mask)
        agree(y[mask] if pool is None else y, alone)
        if pool is None:
            assert not y[~mask].any()


@pytest.mark.parametrize("even_in", [[1], [0, 1]])
def test_even_in_some_fields(even_in):
    """To the last bit, of the mean of both signs, and in the common sign only."""
    space = gspaces.flipRot2dOnR2(4)
    network = PointTransformer(space, mixed(space), "vector", even_in=even_in, pool=None, **SMALL).double()
    signs = torch.tensor([-1.0 if 0 in even_in else 1.0] * 8 + [-1.0] + [1.0] * 2, dtype=torch.float64)
    x, coords = cloud(network.in_type)
    y = network(x, coords, batch=BATCH)
    assert torch.equal(network(x * signs, coords, batch=BATCH), y)
    assert torch.equal(network.export()(x * signs, coords, batch=BATCH), network.export()(x, coords, batch=BATCH))
    agree(network.export()(x, coords, batch=BATCH), y)
    # The controls: other signs, and the network without the option, whose mean it is.
    assert (network(x * -signs, coords, batch=BATCH) - y).norm() > 1e-3 * y.norm()
    odd = PointTransformer(space, mixed(space), "vector", pool=None, **SMALL).double()
    odd.load_state_dict(network.state_dict())
    assert (odd(x * signs, coords, batch=BATCH) - odd(x, coords, batch=BATCH)).norm() > 1e-3 * y.norm()
    agree((odd(x, coords, batch=BATCH) + odd(x * signs, coords, batch=BATCH)) / 2, y)


def test_positions_tell_equal_points_apart():
    """Without features a softmax over them sees nothing; positions, kernels and counts see the geometry."""
    space = gspaces.flipRot2dOnR2(4)
    ones = torch.ones(9, 1, dtype=torch.float64)
    _, coords = cloud(FieldType(space, [space.trivial_repr]))
    for options, blind in (
        ({}, True),
        ({"positions": True}, False),
        ({"attention": {"kernel_features": 2}}, False),
        ({"attention": {"normalization": "count"}}, False),
    ):
        network = PointTransformer(space, 1, 3, **options, **SMALL).double()
        y = network(ones, coords, batch=BATCH)
        spread = (y - y[0]).abs().max()
        assert spread < 1e-12 if blind else spread > 1e-6
    plain = PointTransformer(space, 1, 1, positions=True, attention={"length_scale": 2.0}, **SMALL).double()
    halved = PointTransformer(space, 1, 1, positions=True, attention={"length_scale": 4.0}, **SMALL).double()
    halved.load_state_dict(plain.state_dict())
    agree(halved(ones, 2 * coords, batch=BATCH), plain(ones, coords, batch=BATCH))


def test_a_head_of_spectra_is_exact_for_continuous_groups():
    """Attention and pooling over poses sample the group; the spectrum does not."""
    space = gspaces.rot3dOnR3()
    fields = FieldType(space, 2 * [space.trivial_repr, space.irrep(1), space.irrep(2)])
    sizes = {"fields": fields, "num_blocks": 1, "num_heads": 2, "samples": 4}
    network = PointTransformer(space, fields, 3, head={"poses": "spectrum"}, **sizes).double().eval()
    x, _ = cloud(fields)
    generator = np.random.default_rng(0)
    for _ in range(3):
        matrix = torch.linalg.qr(torch.tensor(generator.normal(size=(3, 3))))[0]
        g = space.fibergroup.element(matrix.numpy() * np.sign(np.linalg.det(matrix)), "MAT")
        given, expected = network.head(x, None, 1), network.head(turned(x, fields, g), None, 1)
        agree(given, expected)
    with pytest.raises(ValueError, match=r"^poses: .*which are invariants"):
        PointTransformer(space, fields, "vector", head={"poses": "spectrum"}, **sizes)
    pooled = PointTransformer(space, fields, 3, **sizes).double().eval()  # the negative control
    assert (pooled.head(x, None, 1) - pooled.head(turned(x, fields, g), None, 1)).norm() > 1e-6


def test_numbers_of_fields_by_name():
    space = gspaces.flipRot2dOnR2(4)
    network = PointTransformer(space, {"vector": 1, "scalar": 2}, "vector", pool=None, **SMALL)
    assert network.in_type == FieldType(space, [space.basespace_action] + 2 * [space.trivial_repr])
    network = PointTransformer(space, 1, 3, **SMALL | {"fields": {"scalar": 4, "vector": 2}})
    assert network.blocks[-1].out_type == FieldType(space, 4 * [space.trivial_repr] + 2 * [space.basespace_action])


def test_embeddings_and_heads_are_as_wide_as_the_scalars():
    space = gspaces.octaOnR3()
    cases = [
        ({"scalar": 8, "vector": 8}, 8, 8),
        ({"scalar": 24, "vector": 16}, 24, 24),
        ({"vector": 3}, 3, 3),
        ({"scalar": 1, "vector": 3}, 2, 1),
        (5, 5, 5),
        (1, 2, 1),
        (FieldType(space, 2 * [space.regular_repr, space.trivial_repr]), 4, 4),
    ]
    for fields, embedded, read in cases:
        network = PointTransformer(space, 2, 3, **SMALL | {"fields": fields, "num_heads": 1})
        assert network.embedding.out_type == FieldType(space, embedded * [space.trivial_repr])
        assert network.head.perceptron[-1].in_features == read


LONE = gspaces.flipRot2dOnR2(4)
_PSEUDOSCALAR = LONE.irrep(1, 0)


def as_seen(network, x, coords):
    """How much the first feature of the first point changes what is said of the others, and the forces on them."""
    x, coords = x.clone().requires_grad_(), coords.clone().requires_grad_()
    given = network(x, coords)[1:]
    size = given.square().sum()
    of_features, forces = torch.autograd.grad(size, (x, coords))
    found = [of_features[0, 0].abs() / size, forces.abs().max() / size]
    for factor in (3.0, -1.0):
        changed = x.detach().clone()
        changed[0, 0] *= factor
        found.append((network(changed, coords)[1:] - given).abs().max() / given.abs().max())
    return min(value.item() for value in found)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("attention", [{}, {"kernel_features": 4}])
@pytest.mark.parametrize("fields", [{"scalar": 1, "vector": 1}, {"scalar": 2, "vector": 2}, {"vector": 2}, 2])
@pytest.mark.parametrize(
    "in_type",
    [1, 2, {"scalar": 1, "vector": 1}, [_PSEUDOSCALAR, LONE.trivial_repr], [_PSEUDOSCALAR, LONE.basespace_action]],
)
def test_lone_fields_reach_other_points(in_type, fields, attention):
    torch.manual_seed(0)
    in_type = FieldType(LONE, in_type) if isinstance(in_type, list) else in_type
    options = {**SMALL, "num_blocks": 1, "fields": fields, "attention": {**attention, "norm_eps": 1e-12}}
    network = PointTransformer(LONE, in_type, 1, pool=None, head={"fields": 2}, **options).double()
    x, coords = cloud(network.in_type, 6)
    assert as_seen(network, x, coords) > 1e-6
    y = network(x, coords)
    for g in spaces.generators(LONE):
        action = torch.as_tensor(LONE.basespace_action(g))
        agree(network(turned(x, network.in_type, g), coords @ action.T), y)


@pytest.mark.parametrize("kernel_features", [None, 8])
def test_energies_and_forces_depend_on_the_cloud(kernel_features):
    torch.manual_seed(0)
    space = gspaces.octaOnR3()
    options = {"fields": {"scalar": 8, "vector": 8}, "num_blocks": 1, "pool": "sum", "num_heads": 1}
    options["attention"] = {"kernel_features": kernel_features} if kernel_features else {}
    network = PointTransformer(space, 2, 1, **options).double()
    x, coords = cloud(network.in_type, 9)
    x.requires_grad_()
    coords.requires_grad_()
    energy = network(x, coords)
    forces, of_features = torch.autograd.grad(energy.sum(), (coords, x))
    assert forces.abs().max() > 1e-3 * energy.abs()
    assert of_features.abs().max() > 1e-3 * energy.abs()
    # The negative control: of one scalar, here eight times the same, a norm with a mean leaves nothing.
    with torch.no_grad():
        for parameter in network.embedding.parameters():
            parameter.copy_(parameter[:1].expand_as(parameter))
    network.blocks[0].norm.plain.kind = "layer"
    (forces,) = torch.autograd.grad(network(x, coords).sum(), coords)
    assert forces.abs().max() < 1e-9 * energy.abs()


@pytest.mark.parametrize("out", [2, "symmetric tensor"])
@pytest.mark.parametrize("scalar", [True, False])
def test_continuous_groups(out, scalar):
    """Exact for the samples where they are a subgroup, and for all elements the nearer the more there are."""
    space = gspaces.rot2dOnR2(-1)
    group = space.fibergroup
    fields = FieldType(space, 2 * [group.bl_regular_representation(2)])
    in_type = 3 if scalar else FieldType(space, [space.basespace_action, space.trivial_repr])
    errors = {}
    for samples in (8, 32):
        torch.manual_seed(0)
        options = {**SMALL, "fields": fields, "samples": samples, "positions": True}
        network = PointTransformer(space, in_type, out, **options).double()
        x, coords = cloud(network.in_type)
        y = network(x, coords, batch=BATCH)
        agree(network.export()(x, coords, batch=BATCH), y)
        for name, angle in (("sample", 2 * torch.pi * 3 / 8), ("any", 1.0)):
            h = group.element(angle)
            matrix = torch.as_tensor(space.basespace_action(h))
            z = network(turned(x, network.in_type, h), coords @ matrix.T, batch=BATCH)
            expected = y if out == 2 else matrix @ y @ matrix.T
            errors[name, samples] = (z - expected).norm() / y.norm()
    assert errors["sample", 8] < 1e-10
    assert errors["sample", 32] < 1e-10
    assert errors["any", 8] > 1e-8
    assert errors["any", 32] < 0.1 * errors["any", 8]
    assert network.pool == "mean"


def test_bad_arguments():
    space = gspaces.rot2dOnR2(4)
    for error, message, arguments in (
        (ValueError, "pool: got 'median'", {"pool": "median"}),
        (ValueError, "poses", {"head": {"poses": "sum"}}),
        (ValueError, "readout", {"readout": "edges"}),
        (ValueError, 'pool: got "max"', {"pool": "max", "out_type": "vector"}),
        (ValueError, "out_type: got 'tensor'", {"out_type": "tensor"}),
        (
            ValueError,
            "in_type: its gspace",
            {"in_type": FieldType(gspaces.trivialOnR2(), 1 * [gspaces.trivialOnR2().trivial_repr])},
        ),
        (ValueError, "in_type: got {'tensor': 1}, needed numbers of \"scalar\"", {"in_type": {"tensor": 1}}),
        (ValueError, "in_type: got {}, needed", {"in_type": {}}),
        (ValueError, r"in_type\['vector'\]: got 0", {"in_type": {"vector": 0}}),
        (ValueError, "fields: got {'tensor': 1}, needed numbers of \"scalar\"", {"fields": {"tensor": 1}}),
        (TypeError, "radus: attention has no such option", {"attention": {"radus": 1.0}}),
        (TypeError, "encoding: attention has no such option", {"attention": {"encoding": "mlp"}}),
        (ValueError, "radius", {"attention": {"radius": -1.0}}),
        (TypeError, "num_blocks", {"num_blocks": 1.5}),
        (ValueError, "out_type", {"out_type": 0}),
        (ValueError, "samples", {"samples": 4}),
        (ValueError, "even_in: got 2, needed numbers of the 2 fields", {"even_in": [2]}),
        (ValueError, "even_in: got -1", {"even_in": [-1]}),
        (TypeError, "even_in: got 1, needed a list", {"even_in": 1}),
        (NotImplementedError, "samples=8", {"gspace": gspaces.rot2dOnR2(-1)}),
    ):
        with pytest.raises(error, match=message):
            PointTransformer(**{"gspace": space, "in_type": 2, "out_type": 1, **arguments})


@pytest.mark.parametrize("readout", ["clouds", "points"])
def test_batch_norm_of_a_single_cloud(readout):
    """Nothing to standardise over: an error in training only, and only where the MLP sees one vector."""
    network = PointTransformer(gspaces.rot2dOnR2(3), 2, 1, head={"batch_norm": True}, readout=readout, **SMALL).double()
    x, coords = cloud(network.in_type)
    if readout == "clouds":
        with pytest.raises(ValueError, match="batch: got one cloud"):
            network(x, coords)
    else:
        assert network(x, coords).isfinite().all()
        with pytest.raises(ValueError, match="batch: got one point"):
            network(x[:1], coords[:1])
    assert network(x, coords, batch=BATCH).isfinite().all()
    assert network.eval()(x, coords).isfinite().all()
