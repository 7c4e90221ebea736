"""Trained networks are loaded."""

import sys

import pytest
import torch
from escnn import gspaces, nn

pytest.importorskip("jsonargparse")

from escnn_attention import PoseLinear
from escnn_attention.training.errors import UserError
from escnn_attention.training.experiment import load_network
from escnn_attention.training.experiment.checkpoints import read_checkpoint, write_checkpoint
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
    assert read_checkpoint(folder / "best.ckpt")["state_dict"]._metadata["network.1"] == {"version": 1}
    assert torch.equal(mine[1].weight, weights(folder, "best.ckpt")["network.1.weight"])
    with pytest.raises(UserError, match=r"best\.ckpt is of another network: size mismatch for 1\.weight"):
        load_network(folder, Mine(9))
    with pytest.raises(TypeError, match="network: got type, needed"):
        load_network(folder, Mine)


def test_checkpoints_carry_the_layout_of_weights(tmp_path):
    space = gspaces.rot2dOnR2(4)
    fields = nn.FieldType(space, 2 * [space.regular_repr])
    layer = PoseLinear(fields, fields)
    state = torch.nn.ModuleDict({"network": layer}).state_dict()
    write_checkpoint(tmp_path / "best.ckpt", {"state_dict": state})
    assert read_checkpoint(tmp_path / "best.ckpt")["state_dict"]._metadata["network.plain.projection"] == {"version": 1}
    load_network(tmp_path, PoseLinear(fields, fields))
    state._metadata["network.plain.projection"]["version"] = 2
    write_checkpoint(tmp_path / "best.ckpt", {"state_dict": state})
    with pytest.raises(UserError, match=r"best\.ckpt is of a newer version: plain\.projection: its .* in layout 2"):
        load_network(tmp_path, layer)
