"""A training that is killed at any operation on its files goes on to the same end, and leaves nothing behind."""

import os
import random
import signal
import sys

import pytest
import torch

from escnn_attention.training.errors import UserError
from escnn_attention.training.experiment import command
from escnn_attention.training.experiment.checkpoints import read_checkpoint
from tests.training.experiment.runs import SHORT, call, files, of, rows

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
