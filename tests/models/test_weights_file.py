import json
import os

import pytest
import torch
from escnn import gspaces
from safetensors.torch import load_file, save_file

from escnn_attention import models
from escnn_attention._escnn.buffers import derived_buffers
from escnn_attention.models.weights_file import WEIGHTS, read_weights, write_weights


@pytest.fixture
def network():
    return models.HybridNet(gspaces.rot2dOnR2(4), 1, 3, widths=(2,), convolutions=(4,), attention=(1,), kernel_size=3)


def test_equal_buffers_are_written_once(network, tmp_path):
    write_weights(network, tmp_path)
    stored, derived = load_file(tmp_path / WEIGHTS), derived_buffers(network)
    state = {name: tensor for name, tensor in network.state_dict().items() if name not in derived}
    bases = [name for name in state if name.endswith("sampled_basis")]
    assert sum(name in stored for name in bases) < len(bases)
    assert stored.keys() >= dict(network.named_parameters()).keys()
    found = read_weights(tmp_path / WEIGHTS)
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert torch.equal(found[name], tensor)
        assert found[name].dtype == tensor.dtype
    assert len({tensor.data_ptr() for tensor in found.values()}) == len(stored)  # however many names there are


def test_files_without_names_of_others_are_read(network, tmp_path):
    state = {name: tensor.contiguous() for name, tensor in network.state_dict().items()}
    save_file(state, tmp_path / WEIGHTS, metadata={"format": "pt"})
    assert read_weights(tmp_path / WEIGHTS).keys() == state.keys()
    save_file(state, tmp_path / WEIGHTS)
    assert read_weights(tmp_path / WEIGHTS).keys() == state.keys()


@pytest.mark.parametrize(
    ("same", "message"),
    [
        ("{", "'same' in its metadata is not JSON"),
        ("[1]", "is no object of names"),
        (json.dumps({"b": 1}), "is no object of names"),
        (json.dumps({"b": "c"}), "b is marked as equal to c"),
        (json.dumps({"a": "a"}), "a is marked as equal to a"),
    ],
)
def test_damaged_files(tmp_path, same, message):
    save_file({"a": torch.ones(1)}, tmp_path / WEIGHTS, metadata={"same": same})
    with pytest.raises(ValueError, match=message):
        read_weights(tmp_path / WEIGHTS)


@pytest.mark.skipif(os.name != "posix", reason="permissions of files")
def test_files_are_as_readable_as_others(network, tmp_path):
    (tmp_path / "another").touch()
    write_weights(network, tmp_path)
    assert (tmp_path / WEIGHTS).stat().st_mode == (tmp_path / "another").stat().st_mode
