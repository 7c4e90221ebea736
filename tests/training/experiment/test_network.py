"""Trained networks are loaded."""

import sys

import pytest
import torch

pytest.importorskip("jsonargparse")

from escnn_attention.training.errors import UserError
from escnn_attention.training.experiment import load_network
from tests.training.experiment.runs import SHORT, call, weights


class Mine(torch.nn.Sequential):
    """A network from elsewhere."""

    def __init__(self, classes: int):
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(784, classes))
        self.num_classes = classes


def test_networks_from_elsewhere_are_built_by_those_who_load_them(configuration, tmp_path):
    folder = tmp_path / "run"
    sys.modules["mine"] = sys.modules[__name__]
    try:
        network = {"class_path": "mine.Mine", "init_args": {"classes": 10}}
        call("fit", configuration(model__network=network, **SHORT), folder)
    finally:
        del sys.modules["mine"]
    with pytest.raises(UserError, match=r"best\.ckpt: it names '.*Mine', .* give it as `network`"):
        load_network(folder)
    mine = Mine(10)
    assert load_network(folder, mine) is mine
    assert not mine.training
    assert torch.equal(mine[1].weight, weights(folder, "best.ckpt")["network.1.weight"])
    with pytest.raises(UserError, match=r"best\.ckpt is of another network: size mismatch for 1\.weight"):
        load_network(folder, Mine(9))
    with pytest.raises(TypeError, match="network: got type, needed"):
        load_network(folder, Mine)
