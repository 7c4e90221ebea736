"""Checkpoints are read whole or refused; a training that is killed at any operation on its files ends as others."""

import os
import random
import re
import signal
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from escnn_attention.training.errors import UserError
from escnn_attention.training.experiment import command
from escnn_attention.training.experiment.checkpoints import AtomicCheckpointIO, read_checkpoint
from tests.training.experiment.runs import SHORT, WHOLE, call, files, of, rows

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
    for name in ("fit", "test"):
        with pytest.raises(UserError, match=r"--ckpt_path: .*another network: (Missing|size)"):
            call(name, wider, other, "--ckpt_path", unknown)
        with pytest.raises(UserError, match=r"--ckpt_path: .*channels .*another checkpoint"):
            call(name, wider, other, "--ckpt_path", folder / "last.ckpt")
        with pytest.raises(UserError, match=r"^(?!--ckpt_path).*channels .*another folder"):
            call(name, wider, folder)
    torch.save(content["state_dict"], tmp_path / "weights.ckpt")
    with pytest.raises(UserError, match=r"--ckpt_path: .*no 'state_dict'"):
        call("test", configuration(), other, "--ckpt_path", tmp_path / "weights.ckpt")
    torch.save({name: content[name] for name in ("state_dict", "epoch")}, tmp_path / "weights.ckpt")
    with pytest.raises(UserError, match=r"to fit .*no 'optimizer_states'"):
        call("fit", configuration(), other, "--ckpt_path", tmp_path / "weights.ckpt")


@pytest.mark.parametrize("name", ["fit", "test"])
def test_checkpoints_are_files_that_run_no_code(configuration, tmp_path, name):
    torch.save({**WHOLE, "evil": Path("object")}, tmp_path / "evil.ckpt")
    for path, message in (
        (tmp_path / "evil.ckpt", r"cannot read .*evil\.ckpt"),
        ("http://host/a.ckpt", "no file http:/"),
    ):
        with pytest.raises(UserError, match=message):
            call(name, configuration(), tmp_path / "other", "--ckpt_path", path)


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


EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.chmod", "shutil.rmtree"}
EPOCHS = 3
DIGITS = {
    "trainer__max_epochs": EPOCHS,
    "trainer__num_sanity_val_steps": 0,
    "model__network__init_args__crops": [1],
    "data": of("escnn_attention.training.Digits", batch_size=8, limit_train=24, limit_valid=40, eval_batch_size=40),
}
"""Changes of the configuration of tests, for a training of a second."""


def fit(folder, kill_at, said):
    """Train in ``folder``; killed before an operation on a file in it, from 1. A file says how many there were."""
    operations = 0

    def count(*_):
        nonlocal operations
        operations += 1
        if operations == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(event, arguments):
        if event in EVENTS and str(arguments[0]).startswith(str(folder)):
            count()

    sync = os.fsync
    os.fsync = lambda descriptor: (count(), sync(descriptor))
    sys.addaudithook(watch)
    call("fit", folder.parent / "experiment.yaml", folder)
    said.write_text(str(operations), encoding="utf-8")


def end(folder):
    """What is left of a training: weights, rows without times, names of files."""
    timeless = [{k: v for k, v in row.items() if k not in ("seconds", "memory")} for row in rows(folder)]
    checkpoints = {name: read_checkpoint(folder / name) for name in ("last.ckpt", "best.ckpt")}
    weights = {f"{name} {k}": v for name, content in checkpoints.items() for k, v in content["state_dict"].items()}
    return weights, timeless, sorted(path.name for path in folder.iterdir())


def finished(folder):
    """The epochs that are safe; every checkpoint that is there is whole."""
    epochs = {path.name: read_checkpoint(path)["epoch"] + 1 for path in folder.glob("*.ckpt")}
    return epochs.get("last.ckpt", 0)


def after_kills(fork, folder, draw=None, sample=None):
    """What is wrong after trainings that were killed and started again, and the epochs that were finished before.

    Their configuration is ``experiment.yaml`` in ``folder``.
    """

    def train(run, kill_at=None):
        said = folder / "operations"
        said.unlink(missing_ok=True)
        process = fork(fit, run, kill_at, said)
        process.join()
        return int(said.read_text(encoding="utf-8")) if said.exists() else process.exitcode

    operations = train(folder / "whole")
    assert operations > 4 * EPOCHS
    weights, timeless, names = end(folder / "whole")
    points = range(1, operations + 1)
    wrong, seen = [], []
    for point in points if sample is None else sorted(draw.sample(points, sample)):
        run = folder / f"killed-{point}"
        if (ended := train(run, point)) != -signal.SIGKILL:
            wrong.append(f"{point}: not killed, {ended}")
            continue
        seen.append(finished(run) if run.exists() else 0)
        if train(run) < 1:
            wrong.append(f"{point}: does not go on")
            continue
        found, found_rows, found_names = end(run)
        if found.keys() != weights.keys() or not all(torch.equal(found[name], weights[name]) for name in weights):
            wrong.append(f"{point}: other weights")
        if found_rows != timeless:
            wrong.append(f"{point}: other rows")
        if found_names != names:
            wrong.append(f"{point}: other files, {found_names}")
    return wrong, seen


@pytest.mark.slow
def test_killed_at_some_operation(fork, configuration, tmp_path, pytestconfig):
    """At another in every run; the seed is in the header."""
    configuration(**DIGITS)
    draw = random.Random(pytestconfig.option.hypothesis_seed)
    wrong, seen = after_kills(fork, tmp_path, draw, sample=1)
    assert wrong == []
    assert len(seen) == 1


@pytest.mark.exhaustive
def test_killed_at_every_operation(fork, configuration, tmp_path):
    configuration(**DIGITS)
    wrong, seen = after_kills(fork, tmp_path)
    assert wrong == []
    assert set(seen) == set(range(EPOCHS + 1))


@pytest.mark.exhaustive
def test_what_is_left_behind_is_found(fork, configuration, tmp_path, monkeypatch):
    """The control."""
    configuration(**DIGITS)
    monkeypatch.setattr(command, "remove_temporaries", lambda *_: None)
    wrong, _ = after_kills(fork, tmp_path)
    assert wrong
    assert all("other files" in line for line in wrong)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("lost", [["last.ckpt"], ["last.ckpt", "epochs.csv"], ["last.ckpt", "epochs.csv", "best.ckpt"]])
@pytest.mark.slow
def test_a_training_without_its_last_checkpoint_is_left_alone(configuration, fitted, tmp_path, lost):
    folder = tmp_path / "run"
    file = configuration(**SHORT)
    fitted(file, folder)
    call("test", file, folder)
    for name in lost:
        (folder / name).unlink()
    before = files(folder)
    for more in ([], ["--seed_everything", 9]):
        with pytest.raises(UserError, match=r"--folder: .*test\.json .*no last\.ckpt"):
            call("fit", file, folder, *more)
    assert files(folder) == before


@pytest.mark.slow
def test_the_best_checkpoint_alone(configuration, fitted, tmp_path):
    """Of the first epoch, a kill can leave it alone: the same training makes it again. Any other is kept."""
    folder = tmp_path / "run"
    fitted(configuration(**SHORT), folder)
    for name in ("last.ckpt", "epochs.csv"):
        (folder / name).unlink()
    before = (folder / "best.ckpt").read_bytes()
    with pytest.raises(UserError, match=r"holds best\.ckpt of"):
        call("fit", configuration(**SHORT, seed_everything=4), folder)
    content = torch.load(folder / "best.ckpt", weights_only=True)
    torch.save({**content, "epoch": 1}, folder / "best.ckpt")
    with pytest.raises(UserError, match=r"holds best\.ckpt of"):
        call("fit", configuration(**SHORT), folder)
    (folder / "best.ckpt").write_bytes(before)
    call("fit", configuration(**SHORT), folder)
    assert (folder / "last.ckpt").exists()


def test_a_folder_with_a_training_takes_none_from_elsewhere(configuration, fitted, tmp_path):
    file = configuration(**SHORT)
    for name in ("one", "other"):
        fitted(file, tmp_path / name)
    before = files(tmp_path / "one")
    given = ["--ckpt_path", tmp_path / "other" / "last.ckpt", "--trainer.max_epochs", 2]
    with pytest.raises(UserError, match=r"one holds .*\(last\.ckpt\)"):
        call("fit", file, tmp_path / "one", *given)
    assert files(tmp_path / "one") == before
    call("test", file, tmp_path / "one", *given[:2])  # the control: it is read from anywhere


@pytest.mark.slow
def test_a_configuration_of_ones_own_is_not_replaced(configuration, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    own = folder / "config.yaml"
    wanted = configuration(**SHORT).read_text(encoding="utf-8")
    own.write_text(f"# what I want\n{wanted}", encoding="utf-8")
    before = own.read_bytes()
    with pytest.raises(UserError, match=r"config\.yaml .*fit has written"):
        call("fit", own, folder)
    assert own.read_bytes() == before
    assert list(folder.iterdir()) == [own]
    own.rename(folder / "mine.yaml")
    call("fit", folder / "mine.yaml", folder)
    call("fit", own, folder)  # now it is what fit has written
    assert own.read_text(encoding="utf-8").startswith("# Written by escnn-attention fit.\nseed_everything: 3\n")
