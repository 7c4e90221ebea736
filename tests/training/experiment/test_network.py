"""Trained networks are loaded; a checkpoint names the network that it is of, and nothing else is run."""

import sys

import pytest
import torch
from escnn import gspaces, nn

from escnn_attention import PoseLinear
from escnn_attention.training.errors import UserError
from escnn_attention.training.experiment import load_network
from escnn_attention.training.experiment.checkpoints import AtomicCheckpointIO, read_checkpoint
from tests.training.experiment.runs import SHORT, WHOLE, call, weights


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
    with pytest.raises(UserError, match=r"best\.ckpt: .*Mine', .*as `network`"):
        load_network(folder)
    mine = Mine(10)
    assert load_network(folder, mine) is mine
    assert not mine.training
    assert read_checkpoint(folder / "best.ckpt")["state_dict"]._metadata["network.1"] == {"version": 1}
    assert torch.equal(mine[1].weight, weights(folder, "best.ckpt")["network.1.weight"])
    with pytest.raises(UserError, match=r"another network: .*for 1\.weight"):
        load_network(folder, Mine(9))
    with pytest.raises(TypeError, match="network: got type, needed"):
        load_network(folder, Mine)


def test_checkpoints_carry_the_layout_of_weights(tmp_path):
    space = gspaces.rot2dOnR2(4)
    fields = nn.FieldType(space, 2 * [space.regular_repr])
    layer = PoseLinear(fields, fields)
    state = torch.nn.ModuleDict({"network": layer}).state_dict()
    AtomicCheckpointIO().save_checkpoint({"state_dict": state}, tmp_path / "best.ckpt")
    assert read_checkpoint(tmp_path / "best.ckpt")["state_dict"]._metadata["network.plain.projection"] == {"version": 1}
    load_network(tmp_path, PoseLinear(fields, fields))
    state._metadata["network.plain.projection"]["version"] = 2
    AtomicCheckpointIO().save_checkpoint({"state_dict": state}, tmp_path / "best.ckpt")
    with pytest.raises(UserError, match=r"newer version: .*in layout 2"):
        load_network(tmp_path, layer)


_NETWORK = "escnn_attention.models.GSANet"


@pytest.mark.parametrize(
    ("description", "message"),
    [
        # Modules that are on the path, which importing would run.
        ({"class_path": "evil_module.Net"}, r"names 'evil_module\.Net'"),
        ({"class_path": _NETWORK, "init_args": {"gspace": {"class_path": "evil_module.Net"}}}, r"'evil_module\.Net'"),
        ({"class_path": _NETWORK, "init_args": {"blocks": [{"class_path": "evil_module.Net"}]}}, r"'evil_module\.Net'"),
        ({"class_path": _NETWORK, "dict_kwargs": {"gspace": {"class_path": "os.mkdir"}}}, r"names 'os\.mkdir'"),
        ({"class_path": "escnn.gspaces.rot2dOnR2", "init_args": {"N": 4}}, "is no network"),
        # An import path where a value is due.
        ({"class_path": _NETWORK, "init_args": {"gspace": "evil_module.Net"}}, "this version cannot build"),
        ({"class_path": _NETWORK, "nonsense": 1}, "needed init_args"),
        ({"class_path": "escnn_attention.models.Nonsense"}, "this version has no escnn_attention.models.Nonsense"),
        ({"class_path": ["os", "mkdir"]}, r"names \['os', 'mkdir'\]"),
    ],
)
def test_no_code_that_a_checkpoint_names_is_run(configuration, tmp_path, monkeypatch, description, message):
    mark = tmp_path / "it ran"
    (tmp_path / "evil_module.py").write_text(f"open({str(mark)!r}, 'w')\nclass Net:\n    pass\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    trained = {"seed_everything": 3, "model": {"network": description}, "trainer": {}, "data": {}}
    content = {**WHOLE, "callbacks": {"_Provenance": {"configuration": trained}}}
    (tmp_path / "evil").mkdir()
    torch.save(content, tmp_path / "evil" / "best.ckpt")
    torch.save(content, tmp_path / "evil" / "last.ckpt")
    with pytest.raises(UserError, match=message):
        load_network(tmp_path / "evil")
    if "evil_module" in str(description["class_path"]):
        for command in ("fit", "test"):
            with pytest.raises(UserError, match=r"class_path .*another folder"):
                call(command, configuration(), tmp_path / "evil")
    assert not mark.exists()
    assert "evil_module" not in sys.modules
