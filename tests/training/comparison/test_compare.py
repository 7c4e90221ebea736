import csv
import importlib.metadata
import json
import os
import signal
from dataclasses import asdict, replace

import pytest
import torch

from escnn_attention.training.comparison.compare import compare
from escnn_attention.training.comparison.networks import describe_network
from escnn_attention.training.errors import UserError
from escnn_attention.training.experiment.checkpoints import read_checkpoint, write_checkpoint
from escnn_attention.training.experiment.described import build_described
from escnn_attention.training.modules.classifier import Classifier

ALL = ("cnn", "steerable", "hybrid", "gsa-net")


def epochs_of(folder):
    with open(folder / "epochs.csv", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_the_whole_comparison(tiny, listener):
    comparison = compare(replace(tiny, networks=ALL), listener)
    folder = tiny.folder
    assert [result.network for result in comparison.results] == list(ALL)
    assert comparison.elements == ["90°", "180°", "270°"]

    with open(folder / "results.csv", encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    stored = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    for row, result, kept in zip(table, comparison.results, stored["networks"], strict=True):
        assert kept == asdict(result)
        assert int(row["parameters"]) == result.parameters
        assert float(row["accuracy_upright"]) == result.accuracy_upright
        assert set(result.accuracy_by_element) == {"90°", "180°", "270°"}
        assert result.seconds_per_epoch > 0
        if result.network == "cnn":
            assert result.equivariance_error > 1e-3
        else:
            assert result.equivariance_error < 1e-5
            assert result.accuracy_rotated == pytest.approx(result.accuracy_upright, abs=1e-6)
    assert stored["configuration"]["seed"] == 0
    assert stored["versions"]["torch"] == importlib.metadata.version("torch")  # PyTorch may add a device to its own
    assert stored["hardware"]["cores"] > 0

    names = {path.name for path in (folder / "figures").iterdir()}
    assert names == {
        "accuracies.png",
        *(f"{kind}-{network}.png" for kind in ("feature_maps", "attention") for network in ("hybrid", "gsa-net")),
    }
    for path in comparison.files:
        assert path.stat().st_size > 100
        if path.suffix == ".png":
            assert path.read_bytes().startswith(b"\x89PNG")
    for name in ALL:
        assert [row["epoch"] for row in epochs_of(folder / name)] == ["1"]
        assert (folder / name / "last.ckpt").exists()
    assert not list(folder.rglob("*.tmp"))


def test_finished_networks_are_not_trained_again(tiny, compared, listener):
    first = compared(tiny)
    checkpoint = tiny.folder / "cnn" / "last.ckpt"
    written = checkpoint.stat().st_mtime_ns
    second = compare(replace(tiny, networks=("cnn", "steerable")), listener)
    assert listener.heard("cnn is finished, it is not trained again")
    assert not listener.heard("steerable is finished")
    assert checkpoint.stat().st_mtime_ns == written
    assert [result.network for result in second.results] == ["cnn", "steerable"]
    assert second.results[0] == first.results[0]
    # What was finished before stays in the table when it is not asked for.
    assert [result.network for result in compare(replace(tiny, networks=("steerable",))).results] == [
        "cnn",
        "steerable",
    ]


def test_training_that_was_finished_is_only_measured(tiny, compared, listener):
    first = compared(tiny)
    (tiny.folder / "cnn" / "result.json").unlink()  # as if killed before it was written
    second = compare(tiny, listener)
    assert listener.heard("cnn: all 1 epochs are in")
    assert second.results == first.results


def compare_until_killed(settings):
    """Which comes at once in the third epoch."""

    def kill(module):
        if module.current_epoch == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    Classifier.on_train_epoch_start = kill
    compare(settings)


def test_a_killed_run_goes_on_and_gives_the_same(tiny, listener, fork, one_thread):
    settings = replace(tiny, epochs=3)
    folder = settings.folder / "cnn"
    process = fork(compare_until_killed, settings)
    process.join(timeout=200)
    assert process.exitcode == -signal.SIGKILL
    finished = read_checkpoint(folder / "last.ckpt")["epoch"] + 1
    before = epochs_of(folder)
    assert len(before) == finished == 2

    resumed = compare(settings, listener).results[0]
    assert listener.heard(f"resuming cnn at epoch {finished + 1} of {settings.epochs} from {folder / 'last.ckpt'}")
    after = epochs_of(folder)
    assert [int(row["epoch"]) for row in after] == list(range(1, settings.epochs + 1))
    assert after[: len(before)] == before  # the times they took included: none was run again

    whole = replace(settings, output=settings.folder.with_name("whole"))
    uninterrupted = compare(whole).results[0]
    assert replace(resumed, seconds_per_epoch=0) == replace(uninterrupted, seconds_per_epoch=0)
    one, other = (read_checkpoint(path / "cnn" / "last.ckpt")["state_dict"] for path in (settings.folder, whole.folder))
    assert all(torch.equal(one[name], other[name]) for name in other)
    losses = [[row["train_loss"] for row in epochs_of(path / "cnn")] for path in (settings.folder, whole.folder)]
    assert losses[0] == losses[1]


def test_changed_options(tiny, compared):
    compared(tiny)
    with pytest.raises(UserError, match=r"--epochs \(1 there, 2 now\), --seed \(0 there, 1 now\)"):
        compare(replace(tiny, epochs=2, seed=1))
    compare(replace(tiny, epochs=2, seed=1, restart=True))
    assert len(epochs_of(tiny.folder / "cnn")) == 2
    assert len(epochs_of(tiny.folder.with_name("run.old-1") / "cnn")) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"networks": ("cnn", "resnet")}, "unknown network resnet"),
        ({"networks": ()}, "choose from cnn, steerable"),
        ({"group": "q8"}, "unknown group"),
        ({"learning_rate": 0.0}, "--learning-rate must be positive"),
        ({"batch_size": -1}, "--batch-size must be positive"),
        ({"learning_rate": float("inf")}, "--learning-rate must be positive and finite"),
        ({"seed": -1}, "--seed: got -1, needed an integer from 0"),
        ({"seed": 2**80}, "--seed: got"),
        ({"jobs": 0}, "--jobs must be positive and finite, got 0"),
        ({"accelerator": "tpu"}, "unknown accelerator"),
    ],
)
def test_options_that_cannot_be_met(tiny, change, message):
    with pytest.raises(UserError, match=message):
        compare(replace(tiny, **change))


def test_networks_side_by_side_are_those_of_one_after_the_other(tiny, compared, listener, one_thread):
    both = replace(tiny, networks=("cnn", "steerable"))
    one_by_one = compare(both).results
    apart = replace(both, output=tiny.folder.with_name("apart"), jobs=2)
    together = compare(apart, listener).results
    assert [replace(r, seconds_per_epoch=0) for r in together] == [replace(r, seconds_per_epoch=0) for r in one_by_one]
    for name in both.networks:
        one, other = (read_checkpoint(s.folder / name / "last.ckpt")["state_dict"] for s in (both, apart))
        assert all(torch.equal(one[key], other[key]) for key in other)


def test_damaged_checkpoint(tiny, compared):
    compared(tiny)
    (tiny.folder / "cnn" / "result.json").unlink()
    (tiny.folder / "cnn" / "last.ckpt").write_bytes(b"nonsense")
    with pytest.raises(UserError, match=r"cannot read the checkpoint .*--restart"):
        compare(tiny)


def test_checkpoint_of_another_network(tiny, compared, digits):
    compared(tiny)
    (tiny.folder / "cnn" / "result.json").unlink()
    last = tiny.folder / "cnn" / "last.ckpt"
    larger = build_described(describe_network("cnn", tiny.group, digits.size, digits.num_classes, 2_000)).state_dict()
    write_checkpoint(last, read_checkpoint(last) | {"state_dict": {f"network.{n}": t for n, t in larger.items()}})
    with pytest.raises(UserError, match="another network"):
        compare(tiny)


def test_group_without_turns_that_keep_the_grid(tiny):
    comparison = compare(replace(tiny, networks=("steerable",), group="c3"))
    assert comparison.elements == []
    (result,) = comparison.results
    assert result.accuracy_rotated is None
    assert result.equivariance_error is None
