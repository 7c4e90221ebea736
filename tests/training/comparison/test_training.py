"""What a training of the comparison shares with `escnn-attention fit`."""

import copy
import shutil
from dataclasses import replace

import pytest
import torch
import yaml

from escnn_attention.training import load_network
from escnn_attention.training.comparison.networks import describe_network
from escnn_attention.training.comparison.progress import Reporter
from escnn_attention.training.comparison.training import configure, read_network, train
from escnn_attention.training.errors import UserError
from escnn_attention.training.experiment import run_experiment


@pytest.fixture(scope="module")
def trained(tiny_in, digits, tmp_path_factory):
    """Settings, description and result of a training, of which none is to be changed."""
    network = describe_network("hybrid", "c4", 8, 10, 300)
    settings = tiny_in(tmp_path_factory.mktemp("trained"))
    return (
        settings,
        network,
        train("hybrid", configure(network, digits.limited(50, None), settings), settings, Reporter()),
    )


def test_its_folder_is_that_of_an_experiment(trained, tmp_path):
    settings, _, training = trained
    folder = settings.folder / "hybrid"
    stored = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    assert stored["model"]["network"]["class_path"] == "escnn_attention.models.HybridNet"
    images, network = torch.randn(2, 1, 8, 8), copy.deepcopy(training.network).eval()
    with torch.no_grad():
        assert torch.equal(load_network(folder)(images), network(images))
    # The same from a file, to the last bit.
    run_experiment(["fit", "--config", str(folder / "config.yaml"), "--folder", str(tmp_path / "fit")])
    with torch.no_grad():
        assert torch.equal(load_network(tmp_path / "fit")(images), network(images))


def test_weights_are_a_function_of_the_seed(trained, digits, tmp_path):
    settings, description, training = trained
    data = digits.limited(50, None)
    assert configure(description, data, settings)["seed_everything"] == settings.seed == 0
    first = {name: value.clone() for name, value in training.network.state_dict().items()}
    other = replace(settings, seed=1, output=tmp_path)
    changed = train("hybrid", configure(description, data, other), other, Reporter()).network.state_dict()
    assert any(not torch.equal(first[name], changed[name]) for name in first)


def test_other_names_of_the_same_weights_are_understood(trained, tmp_path):
    settings, description, training = trained
    path = tmp_path / "last.ckpt"
    shutil.copy(settings.folder / "hybrid" / "last.ckpt", path)
    content = torch.load(path, weights_only=True)
    state = content["state_dict"]
    content["state_dict"] = {name.replace("convolution_1_1", "lifting"): value for name, value in state.items()}
    assert content["state_dict"].keys() != state.keys()
    torch.save(content, path)
    network, finished = read_network(description, path)
    assert finished == 1
    assert all(torch.equal(value, training.network.state_dict()[name]) for name, value in network.state_dict().items())
    assert list(torch.load(path, weights_only=True)["state_dict"]) == list(state)
    content["state_dict"] = state
    for layout in state._metadata.values():
        layout["version"] = 2
    torch.save(content, path)
    with pytest.raises(UserError, match="are in layout 2, and this version of escnn_attention knows those up to 1"):
        read_network(description, path)
    torch.save({"state_dict": state}, path)
    with pytest.raises(UserError, match="is of another network than this version"):
        read_network(description, path)
    with pytest.raises(UserError, match="is of another network than this version of escnn_attention builds"):
        read_network(describe_network("hybrid", "c4", 8, 10, 900), path)
