import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from escnn_attention.training.errors import UserError
from escnn_attention.training.experiment.checkpoints import AtomicCheckpointIO, read_checkpoint
from tests.training.experiment.runs import SHORT, WHOLE, call

CONTENT = {"state_dict": {"network.w": torch.arange(50.0)}, "epoch": 3, "callbacks": {"rows": [{"loss": 0.5}]}}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoints") / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint(CONTENT, path)
    return path


def test_what_is_written_is_read(path, tmp_path):
    found = read_checkpoint(path)
    assert torch.equal(found["state_dict"]["network.w"], torch.arange(50.0))
    assert found["callbacks"] == CONTENT["callbacks"]
    for name, zipped in (("zip.ckpt", True), ("old.ckpt", False)):
        torch.save(CONTENT, tmp_path / name, _use_new_zipfile_serialization=zipped)
        assert read_checkpoint(tmp_path / name)["epoch"] == 3


def flip(path, bit):
    """Read a checkpoint in which a bit is flipped: the message of the error, or the content."""
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    flipped = path.with_name("flipped.ckpt")
    flipped.write_bytes(content)
    try:
        return read_checkpoint(flipped)
    except UserError as error:
        return str(error)


@given(st.data())
def test_a_flipped_bit_is_refused_or_does_not_matter(path, data):
    found = flip(path, data.draw(st.integers(0, 8 * path.stat().st_size - 1)))
    if isinstance(found, str):
        assert re.fullmatch(
            r"cannot read the checkpoint .*flipped\.ckpt: .*\. Move it away, or choose another folder", found
        )
    else:
        assert torch.equal(found["state_dict"]["network.w"], torch.arange(50.0))
        assert found["callbacks"] == CONTENT["callbacks"]


def test_a_flipped_bit_of_the_weights_or_of_their_entry_is_refused(path):
    content = path.read_bytes()
    weights = content.index(torch.arange(50.0).numpy().tobytes())
    entry = content.rindex(b"PK\x01\x02", 0, content.rindex(b"data/0"))
    folder = 8 * (entry + 38) + 4  # the bit that marks an entry as a folder
    for bit in (*range(8 * weights, 8 * weights + 64), folder):
        assert "it is damaged" in flip(path, bit)


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
        lambda p: AtomicCheckpointIO().save_checkpoint({"state_dict": state}, p),
    ):
        save(tmp_path / "last.ckpt")
        with pytest.raises(UserError, match=message):
            read_checkpoint(tmp_path / "last.ckpt")


def test_a_full_disk_is_said_of_its_file(tmp_path):
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    path = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"epoch": 1}, path)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
        with pytest.raises(OSError, match="File too large") as caught:
            AtomicCheckpointIO().save_checkpoint({"state_dict": {"w": torch.zeros(5000)}}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.filename == str(path)
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]
    assert read_checkpoint(path) == {"epoch": 1}


@pytest.mark.slow
def test_checkpoints_of_other_networks(configuration, fitted, tmp_path):
    folder, other = tmp_path / "run", tmp_path / "other"
    fitted(configuration(**SHORT), folder)
    content = torch.load(folder / "last.ckpt", weights_only=True)
    unknown = tmp_path / "unknown.ckpt"  # from elsewhere: it does not say what it is of
    torch.save({name: value for name, value in content.items() if name != "callbacks"}, unknown)
    call("test", configuration(), tmp_path / "measured", "--ckpt_path", unknown)
    wider = configuration(**SHORT, model__network__init_args__channels=4)
    for command in ("fit", "test"):
        with pytest.raises(UserError, match=r"--ckpt_path: .*another network: (Missing|size)"):
            call(command, wider, other, "--ckpt_path", unknown)
        with pytest.raises(UserError, match=r"--ckpt_path: .*channels .*another checkpoint"):
            call(command, wider, other, "--ckpt_path", folder / "last.ckpt")
        with pytest.raises(UserError, match=r"^(?!--ckpt_path).*channels .*another folder"):
            call(command, wider, folder)
    torch.save(content["state_dict"], tmp_path / "weights.ckpt")
    with pytest.raises(UserError, match=r"--ckpt_path: .*no 'state_dict'"):
        call("test", configuration(), other, "--ckpt_path", tmp_path / "weights.ckpt")
    torch.save({name: content[name] for name in ("state_dict", "epoch")}, tmp_path / "weights.ckpt")
    with pytest.raises(UserError, match=r"to fit .*no 'optimizer_states'"):
        call("fit", configuration(), other, "--ckpt_path", tmp_path / "weights.ckpt")


@pytest.mark.parametrize("command", ["fit", "test"])
def test_checkpoints_are_files_that_run_no_code(configuration, tmp_path, command):
    torch.save({**WHOLE, "evil": Path("object")}, tmp_path / "evil.ckpt")
    for path, message in (
        (tmp_path / "evil.ckpt", r"cannot read .*evil\.ckpt"),
        ("http://host/a.ckpt", "no file http:/"),
    ):
        with pytest.raises(UserError, match=message):
            call(command, configuration(), tmp_path / "other", "--ckpt_path", path)


def _truncated(path):
    torch.save({"state_dict": {"w": torch.zeros(1000)}, "epoch": 0, "optimizer_states": []}, path)
    path.write_bytes(path.read_bytes()[:2000])


def _holding(value):
    return lambda path: torch.save(value, path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_text("hello\n", encoding="utf-8"), "it is damaged, or not a checkpoint"),
        (lambda path: path.write_bytes(b""), "it is damaged, or not a checkpoint"),
        (_truncated, "it is damaged: its checksums do not match"),
        (lambda path: path.write_bytes(bytes(range(256))), "it is damaged|something else than tensors"),
        (_holding([1]), "it holds a list, not a checkpoint"),
        (_holding({"state_dict": {}, "epoch": "x"}), "its epoch is a str, needed a int"),
        (_holding({**WHOLE, "callbacks": 5}), "its callbacks is a int, needed a dict"),
        (_holding({**WHOLE, "loops": {"a": 1}}), "its loops have no fit_loop"),
        (_holding({**WHOLE, "lr_schedulers": [5]}), "its lr_schedulers are not all dictionaries"),
    ],
)
def test_damaged_checkpoints_are_said_to_be(tmp_path, damage, message):
    damage(tmp_path / "last.ckpt")
    with pytest.raises(UserError, match=message) as caught:
        read_checkpoint(tmp_path / "last.ckpt")
    assert "last.ckpt" in str(caught.value)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_truncated, "it is damaged: its checksums do not match"),
        (_holding({"a": 1}), "is not a checkpoint to"),
        (_holding({k: v for k, v in WHOLE.items() if k != "loops"}), "to fit from: no 'loops'"),
        (_holding({**WHOLE, "callbacks": {"_Provenance": {}}}), "another network"),
    ],
)
def test_no_training_goes_on_from_such_a_checkpoint(configuration, tmp_path, damage, message):
    (tmp_path / "run").mkdir()
    damage(tmp_path / "run" / "last.ckpt")
    with pytest.raises(UserError, match=message) as caught:
        call("fit", configuration(), tmp_path / "run")
    assert "last.ckpt" in str(caught.value)
