import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from escnn_attention.training.errors import UserError
from escnn_attention.training.experiment.checkpoints import read_checkpoint, write_checkpoint

CONTENT = {"state_dict": {"network.w": torch.arange(50.0)}, "epoch": 3, "callbacks": {"rows": [{"loss": 0.5}]}}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoints") / "last.ckpt"
    write_checkpoint(path, CONTENT)
    return path


def test_what_is_written_is_read(path, tmp_path):
    found = read_checkpoint(path)
    assert torch.equal(found["state_dict"]["network.w"], torch.arange(50.0))
    assert found["callbacks"] == CONTENT["callbacks"]
    # A copy of the one file has all that is needed, and so has one that was written before there were digests.
    (tmp_path / "copy.ckpt").write_bytes(path.read_bytes())
    torch.save(CONTENT, tmp_path / "old.ckpt")
    for name in ("copy.ckpt", "old.ckpt"):
        assert read_checkpoint(tmp_path / name)["epoch"] == 3


@given(st.data())
def test_a_flipped_bit_is_refused(path, data):
    content = bytearray(path.read_bytes())
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    content[bit // 8] ^= 1 << bit % 8
    flipped = path.with_name("flipped.ckpt")
    flipped.write_bytes(content)
    with pytest.raises(UserError, match=r"^cannot read the checkpoint .*flipped\.ckpt: it is damaged: .*\. Go\.$"):
        read_checkpoint(flipped, "Go.")


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ([torch.zeros(2)], "its state_dict is a list, needed a dict"),
        ({3: torch.zeros(2)}, "its state_dict has the key 3, needed names"),
        ({"network.w": "x"}, "its state_dict has a str as network.w, needed a tensor"),
    ],
)
def test_other_weights_are_refused(tmp_path, state, message):
    for save in (
        lambda path: torch.save({"state_dict": state}, path),
        lambda p: write_checkpoint(p, {"state_dict": state}),
    ):
        save(tmp_path / "last.ckpt")
        with pytest.raises(UserError, match=message):
            read_checkpoint(tmp_path / "last.ckpt")


def test_a_full_disk_is_said_of_its_file(tmp_path):
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    path = tmp_path / "last.ckpt"
    write_checkpoint(path, {"epoch": 1})
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
        with pytest.raises(OSError, match="File too large") as caught:
            write_checkpoint(path, {"state_dict": {"w": torch.zeros(5000)}})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.filename == str(path)
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]
    assert read_checkpoint(path) == {"epoch": 1}
