import pytest
import torch

from escnn_attention.models.registry import description_of
from escnn_attention.nn.summary import count_parameters
from escnn_attention.training.comparison import TITLES, Settings, networks
from escnn_attention.training.comparison.compare import measure_equivariance_error
from escnn_attention.training.comparison.networks import describe_network, gspace_by_name
from escnn_attention.training.errors import UserError
from escnn_attention.training.experiment.network import build_described

EQUIVARIANT = ("steerable", "hybrid", "gsa-net")


def build(name, group="c4", size=8, num_classes=10, parameters=900):
    return build_described(describe_network(name, group, size, num_classes, parameters))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("group", ["c4", "d4"])
@pytest.mark.parametrize("name", TITLES)
@pytest.mark.slow
def test_parameter_counts_are_about_equal(name, group):
    assert count_parameters(build(name, group, parameters=5_000)) == pytest.approx(5_000, rel=0.05)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", TITLES)
@pytest.mark.parametrize("size", [7, 8, 12])
def test_sizes(name, size):
    network = build(name, size=size, num_classes=3)
    assert network(torch.randn(2, 1, size, size)).shape == (2, 3)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", EQUIVARIANT)
@pytest.mark.parametrize(("group", "size"), [("c4", 7), ("c4", 16), ("d4", 8)])
@pytest.mark.slow
def test_equivariant_networks_are_exactly_so(name, group, size):
    assert measure_equivariance_error(build(name, group, size), gspace_by_name(group), size, 10) < 1e-5


def test_grids_are_halved_where_that_is_exact_and_leaves_enough():
    layers = {}
    for size in (7, 8, 12, 16, 28):
        options = networks._outline("hybrid", "c4", size)[1]["init_args"]
        layers[size] = [sum(counts) for counts in zip(options["convolutions"], options["attention"], strict=True)]
        assert (sum(options["convolutions"]), sum(options["attention"])) == (3, 1)
    assert layers == {7: [4], 8: [4], 12: [1, 3], 16: [1, 3], 28: [1, 1, 2]}


def test_the_state_of_the_random_numbers_is_left_as_it_was():
    torch.manual_seed(1)
    expected = torch.randn(3)
    torch.manual_seed(1)
    describe_network("cnn", "c4", 8, 10, 900)
    assert torch.equal(torch.randn(3), expected)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", EQUIVARIANT)
@pytest.mark.slow
def test_the_shipped_networks_of_digits_are_those_of_the_defaults(name):
    settings = Settings()
    found = describe_network(name, settings.group, 16, 10, settings.parameters)
    assert found == description_of(f"{name}-digits")


@pytest.mark.parametrize(("name", "order"), [("c2", 2), ("C4", 4), ("c12", 12), ("d1", 2), ("d4", 8), ("D6", 12)])
def test_groups_by_name(name, order):
    assert gspace_by_name(name).fibergroup.order() == order


@pytest.mark.parametrize("name", ["", "so2", "c", "c0", "4", "c4 ", "c-4", "c1", "c64", "d17", "c99999"])
def test_unknown_groups(name):
    with pytest.raises(UserError, match="group"):
        gspace_by_name(name)
