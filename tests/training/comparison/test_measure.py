import pytest
import torch

from escnn_attention.training.comparison.groups import gspace_by_name
from escnn_attention.training.comparison.measure import measure_accuracies, measure_equivariance_error, orient
from escnn_attention.training.comparison.networks import describe_network
from escnn_attention.training.experiment.described import build_described


def test_the_error_tells_the_cnn_apart():
    network = build_described(describe_network("cnn", "c4", 8, 10, 2_000))
    assert measure_equivariance_error(network, gspace_by_name("c4"), 8, 10) > 1e-3
    assert measure_equivariance_error(network, gspace_by_name("c3"), 8, 10) is None


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["steerable", "hybrid", "gsa-net"])
def test_transformed_images_are_recognised_as_well_as_upright_ones(name, digits):
    torch.manual_seed(0)
    network = build_described(describe_network(name, "d4", 8, 10, 1_500)).train()
    with torch.no_grad():  # batch norms see data
        network(torch.from_numpy(digits.train.images[:64, None]))
    data = digits.limited(None, 100)
    oriented = orient(data.test.images, gspace_by_name("d4"))
    done = []
    accuracies = measure_accuracies(
        network, oriented, data, torch.device("cpu"), 64, lambda *progress: done.append(progress)
    )
    assert list(accuracies) == list(oriented)
    assert len(accuracies) == 9  # upright, seven elements, any angle
    for element in list(accuracies)[1:-1]:
        assert accuracies[element] == pytest.approx(accuracies["upright"], abs=1e-6)
    assert done[-1] == (900, 900)
