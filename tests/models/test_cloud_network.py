"""What the networks on point clouds share: features in two forms, export, and what is no cloud."""

import pytest
import torch
from escnn import gspaces
from escnn.nn import GeometricTensor

from escnn_attention.models import LieTransformer, PlatonicTransformer, PointTransformer

SMALL = {"fields": 4, "num_blocks": 1, "num_heads": 2}
NETWORKS = {
    "ours": lambda g: PointTransformer(g, 2, 1, **SMALL),
    "positions": lambda g: PointTransformer(g, 2, 1, positions=True, attention={"layer_scale": 0.5}, **SMALL),
    "LieTransformer": lambda g: LieTransformer(g, 2, 1, **SMALL),
    "Platonic": lambda g: PlatonicTransformer(g, 2, 1, positions=True, block={"layer_scale": 0.5}, **SMALL),
}
BATCH = torch.tensor([0, 0, 0, 2, 2, 1, 1, 1, 1])


@pytest.fixture(params=NETWORKS)
def network(request):
    return NETWORKS[request.param](gspaces.rot2dOnR2(3)).double().eval()


@pytest.fixture
def cloud():
    return torch.randn(9, 2, dtype=torch.float64), torch.randn(9, 2, dtype=torch.float64)


def test_features_are_given_in_two_ways(network, cloud):
    x, coords = cloud
    field = GeometricTensor(x, network.in_type, coords)
    assert network(field, batch=BATCH).equal(network(x, coords, batch=BATCH))
    with pytest.raises(ValueError, match="coords: got some beside"):
        network(field, coords)


def test_export_gives_the_same(network, cloud):
    x, coords = cloud
    mask, measure = torch.arange(9) % 4 != 1, torch.rand(9, dtype=torch.float64) + 0.5
    expected = network(x, coords, batch=BATCH, mask=mask, measure=measure)
    given = network.export()(x, coords, None, BATCH, mask, measure)
    torch.testing.assert_close(given, expected, rtol=1e-12, atol=1e-12)
    for other in (network(x, coords), network(x, coords, batch=BATCH), network(x, coords, batch=BATCH, mask=mask)):
        assert (other - expected).abs().max() > 1e-6


def test_clouds_do_not_see_each_other(network, cloud):
    x, coords = cloud
    each = [network(x[own], coords[own]) for own in (number == BATCH for number in range(3))]
    torch.testing.assert_close(network(x, coords, batch=BATCH), torch.cat(each), rtol=1e-10, atol=1e-10)


def test_hidden_points_reach_no_gradient_and_no_statistics():
    """Whatever they hold: of every network, all parameters, and of batch norms in training."""
    normed = lambda g: PointTransformer(g, 2, 1, **SMALL, attention={"norm_kind": "batch"})  # noqa: E731
    mask, x, coords = torch.arange(9) % 4 != 1, torch.randn(9, 2), torch.randn(9, 2)
    x[~mask] = coords[~mask] = torch.nan
    for make in [*NETWORKS.values(), normed]:
        found = []
        for masked in (True, False):
            torch.manual_seed(0)
            network = make(gspaces.rot2dOnR2(3))
            given = {"batch": BATCH, "mask": mask} if masked else {"batch": BATCH[mask]}
            network(*((x, coords) if masked else (x[mask], coords[mask])), **given).square().sum().backward()
            found.append([*(p.grad for p in network.parameters()), *network.buffers()])
        torch.testing.assert_close(*found)


# What is wrong with the cloud numbers of nine points, and how it is told.
BAD_BATCHES = {
    "a list": (TypeError, "batch: got list, needed a tensor", BATCH.tolist()),
    "float": (TypeError, r"batch: got torch.float32, needed a tensor of torch.int64", BATCH.float()),
    "int32": (TypeError, r"batch: got torch.int32, needed a tensor of torch.int64", BATCH.int()),
    "bool": (TypeError, r"batch: got torch.bool, needed a tensor of torch.int64", BATCH > 0),
    "negative": (ValueError, "batch: got -1, needed the numbers of the clouds from 0", BATCH - 1),
    "short": (ValueError, r"batch: got shape \(8,\), needed \(9,\)", BATCH[:8]),
    "long": (ValueError, r"batch: got shape \(18,\), needed \(9,\)", BATCH.repeat(2)),
    "a matrix": (ValueError, r"batch: got shape \(9, 1\), needed \(9,\)", BATCH[:, None]),
    "elsewhere": (ValueError, "batch: got a tensor on meta, needed one on cpu", BATCH.to("meta")),
    "a gap": (ValueError, "batch: cloud 1 has no points", torch.where(BATCH == 1, 2, BATCH)),
}


@pytest.mark.sampled(12)
@pytest.mark.parametrize("wrong", BAD_BATCHES)
def test_bad_batches(wrong, network, cloud):
    error, message, batch = BAD_BATCHES[wrong]
    x, coords = cloud
    plain = network.export()
    for called in (network, plain):
        with pytest.raises(error, match=message):
            called(x, coords, batch=batch)
        assert called(x, coords, batch=BATCH).isfinite().all()


def test_bad_masks_and_measures(network, cloud):
    x, coords = cloud
    for called in (network, network.export()):
        with pytest.raises(TypeError, match=r"mask: got torch.int64"):
            called(x, coords, mask=torch.ones(9, dtype=torch.long))
        with pytest.raises(ValueError, match=r"mask: got shape \(8,\)"):
            called(x, coords, batch=BATCH, mask=torch.ones(8, dtype=torch.bool))
    with pytest.raises(ValueError, match="measure: got shape"):
        network(x, coords, measure=torch.ones(8, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"coords: .*not finite"):
        network(x, coords * torch.inf)


def test_bad_coords(network, cloud):
    x, coords = cloud
    for error, message, wrong in (
        (ValueError, r"coords: got none, needed \(points, 2\)", None),
        (TypeError, r"coords: got ndarray, needed \(points, 2\)", coords.numpy()),
        (ValueError, r"coords: got shape \(8, 2\), needed \(9, 2\)", coords[:8]),
        (ValueError, r"coords: got shape \(9, 3\), needed \(9, 2\)", torch.cat([coords, coords[:, :1]], dim=1)),
        (ValueError, r"coords: got shape \(18,\), needed \(9, 2\)", coords.flatten()),
        (TypeError, r"coords: got torch.int64, needed floating-point", coords.long()),
        (ValueError, r"coords: got a tensor on meta, needed one on cpu", coords.to("meta")),
    ):
        with pytest.raises(error, match=message):
            network(x, wrong)
    with pytest.raises(ValueError, match=r"input: .*needed \(points, 2\)"):
        network(torch.cat([x, x[:, :1]], dim=1), coords)
    plain = network.export()
    for features, wrong in ((x, coords[:8]), (x[:8], coords), (x, coords[0])):
        with pytest.raises(ValueError, match="coords: got shape"):
            plain(features, wrong)


def test_clouds_without_points(network, cloud):
    x, coords = cloud
    with pytest.raises(ValueError, match="batch: cloud 1"):
        network(x, coords, batch=BATCH, mask=BATCH != 1)
    with pytest.raises(ValueError, match="batch: cloud 0"):
        network(x[:0], coords[:0])
