import pytest
import torch

from escnn_attention import equivariance_report
from escnn_attention.training.evaluate import TestSet, measure_accuracies, measure_equivariance_error
from escnn_attention.training.groups import gspace_by_name
from escnn_attention.training.networks import NETWORKS, build_network, count_parameters

EQUIVARIANT = ("steerable", "hybrid", "gsa-net")


@pytest.mark.parametrize("group", ["c4", "d4"])
def test_parameter_counts_are_about_equal(group):
    gspace = gspace_by_name(group)
    for name in NETWORKS:
        assert count_parameters(build_network(name, gspace, 8, 10, 20_000, 0)) == pytest.approx(20_000, rel=0.05), name


@pytest.mark.parametrize("name", list(NETWORKS))
@pytest.mark.parametrize("size", [7, 8, 12])
def test_sizes(name, size):
    network = build_network(name, gspace_by_name("c4"), size, 3, 900, 0)
    assert network(torch.randn(2, 1, size, size)).shape == (2, 3)


@pytest.mark.parametrize("name", EQUIVARIANT)
@pytest.mark.parametrize(("group", "size"), [("c4", 7), ("c4", 16), ("d4", 8)])
def test_equivariant_networks_are_exactly_so(name, group, size):
    gspace = gspace_by_name(group)
    network = build_network(name, gspace, size, 10, 900, 0)
    assert measure_equivariance_error(network, gspace, size, 10) < 1e-5


def test_the_error_tells_the_cnn_apart():
    gspace = gspace_by_name("c4")
    assert measure_equivariance_error(build_network("cnn", gspace, 8, 10, 2_000, 0), gspace, 8, 10) > 1e-3
    assert (
        measure_equivariance_error(build_network("cnn", gspace, 8, 10, 2_000, 0), gspace_by_name("c3"), 8, 10) is None
    )


@pytest.mark.parametrize("name", list(NETWORKS))
def test_weights_are_a_function_of_the_seed(name):
    gspace = gspace_by_name("c4")
    first, same, other = (build_network(name, gspace, 8, 10, 900, seed).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(first[key], same[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize("name", EQUIVARIANT)
def test_turned_images_are_recognised_as_well_as_upright_ones(name, digits):
    gspace = gspace_by_name("d4")
    network = build_network(name, gspace, 8, 10, 1_500, 0).train()
    with torch.no_grad():  # batch norms see data
        network(torch.from_numpy(digits.train.images[:64, None]))
    test = TestSet.of(digits.limited(None, 100), gspace)
    done = []
    accuracies = measure_accuracies(network, test, torch.device("cpu"), 64, lambda *progress: done.append(progress))
    assert len(accuracies.turned) == 7
    for turned in accuracies.turned.values():
        assert turned == pytest.approx(accuracies.upright, abs=1e-6)
    assert accuracies.rotated == pytest.approx(accuracies.upright, abs=1e-6)
    assert done[-1] == (900, 900)


def test_feature_maps_are_named_by_stage():
    network = build_network("gsa-net", gspace_by_name("c4"), 8, 10, 900, 0)
    maps = network.feature_maps(torch.randn(1, 1, 8, 8))
    assert list(maps) == ["lifting", "attention_1", "attention_2", "attention_3", "features"]
    assert maps["lifting"].shape[-2:] == (4, 4)


def test_whole_network_as_a_module():
    module = build_network("hybrid", gspace_by_name("c4"), 8, 10, 900, 0).as_fields()
    assert module.evaluate_output_shape((5, 1, 8, 8)) == (5, 10, 1, 1)
    assert equivariance_report(module, (2, 1, 8, 8)).relative_error < 1e-5
