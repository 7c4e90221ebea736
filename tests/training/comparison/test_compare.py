import copy
import csv
import functools
import importlib.metadata
import json
import multiprocessing
import os
import signal
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import yaml

from escnn_attention.training import load_network
from escnn_attention.training.comparison.compare import compare, configure, side_by_side, train
from escnn_attention.training.comparison.networks import describe_network
from escnn_attention.training.errors import UserError
from escnn_attention.training.experiment import run_experiment
from escnn_attention.training.experiment.checkpoints import read_checkpoint
from escnn_attention.training.modules.classifier import Classifier

ALL = ("cnn", "steerable", "hybrid")


def epochs_of(folder):
    with open(folder / "epochs.csv", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_the_whole_comparison(tiny, capsys):
    comparison = compare(replace(tiny, networks=ALL), print)
    lines = capsys.readouterr().out
    assert all(f"{name}: epoch 1 of 1, valid " in lines for name in ALL)
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
    tested = json.loads((folder / "hybrid" / "test.json").read_text(encoding="utf-8"))
    assert tested["accuracy"] == tested["accuracy_upright"] == comparison.results[2].accuracy_upright
    assert tested["trained"]["configuration"] == tested["tested"]["configuration"]

    names = {path.name for path in (folder / "figures").iterdir()}
    assert names == {
        "accuracies.png",
        *(f"{kind}-hybrid.png" for kind in ("feature_maps", "attention")),
    }
    for path in comparison.files:
        assert path.stat().st_size > 100
        if path.suffix == ".png":
            assert path.read_bytes().startswith(b"\x89PNG")
    for name in ALL:
        assert [row["epoch"] for row in epochs_of(folder / name)] == ["1"]
        assert (folder / name / "last.ckpt").exists()
    assert not list(folder.rglob("*.tmp"))


def test_finished_networks_are_not_trained_again(tiny, compared):
    first = compared(tiny)
    checkpoint = tiny.folder / "cnn" / "last.ckpt"
    written, said = checkpoint.stat().st_mtime_ns, []
    second = compare(replace(tiny, networks=("cnn", "steerable")), said.append)
    assert any(line.startswith("cnn is finished, it is not trained again") for line in said)
    assert not any("steerable is finished" in line for line in said)
    assert checkpoint.stat().st_mtime_ns == written
    assert [result.network for result in second.results] == ["cnn", "steerable"]
    assert second.results[0] == first.results[0]
    # What was finished before stays in the table when it is not asked for.
    assert [result.network for result in compare(replace(tiny, networks=("steerable",))).results] == [
        "cnn",
        "steerable",
    ]


def test_training_that_was_finished_is_only_measured(tiny, compared):
    first = compared(tiny)
    (tiny.folder / "cnn" / "test.json").unlink()  # as if killed before it was written
    second = compare(tiny)
    assert second.results == first.results


def compare_until_killed(settings):
    """Which comes at once in the third epoch."""

    def kill(module):
        if module.current_epoch == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    Classifier.on_train_epoch_start = kill
    compare(settings)


def test_a_killed_run_goes_on_and_gives_the_same(tiny, fork, one_thread):
    settings = replace(tiny, epochs=3)
    folder = settings.folder / "cnn"
    process = fork(compare_until_killed, settings)
    process.join(timeout=200)
    assert process.exitcode == -signal.SIGKILL
    finished = read_checkpoint(folder / "last.ckpt")["epoch"] + 1
    before = epochs_of(folder)
    assert len(before) == finished == 2

    said = []
    resumed = compare(settings, said.append).results[0]
    assert f"resuming cnn at epoch {finished + 1} of {settings.epochs} from {folder / 'last.ckpt'}" in said
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
    with pytest.raises(UserError, match=r"--epochs \(1 .*--seed \(0"):
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
        ({"accelerator": "gaudi"}, "accelerator"),
    ],
)
def test_options_that_cannot_be_met(tiny, change, message):
    with pytest.raises(UserError, match=message):
        compare(replace(tiny, **change))


@pytest.fixture
def _forks(monkeypatch):
    """New processes import for seconds."""
    if "fork" not in multiprocessing.get_all_start_methods():
        pytest.skip("needs fork")
    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr(multiprocessing, "get_context", {"spawn": fork, "fork": fork}.__getitem__)


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.exhaustive)])
def test_networks_side_by_side_are_those_of_one_after_the_other(tiny, one_thread, start, request):
    if start == "fork":
        request.getfixturevalue("_forks")
    both = replace(tiny, networks=("cnn", "steerable"))
    one_by_one = compare(both).results
    apart = replace(both, output=tiny.folder.with_name("apart"), jobs=2)
    together = compare(apart).results
    assert [replace(r, seconds_per_epoch=0) for r in together] == [replace(r, seconds_per_epoch=0) for r in one_by_one]
    for name in both.networks:
        one, other = (read_checkpoint(s.folder / name / "last.ckpt")["state_dict"] for s in (both, apart))
        assert all(torch.equal(one[key], other[key]) for key in other)


def test_group_without_turns_that_keep_the_grid(tiny):
    comparison = compare(replace(tiny, networks=("steerable",), group="c3"))
    assert comparison.elements == []
    (result,) = comparison.results
    assert result.accuracy_rotated is None
    assert result.equivariance_error is None


@pytest.fixture(scope="module")
def trained(tiny_in, tmp_path_factory):
    """The configuration and the result of a training, of which none is to be changed."""
    from escnn_attention.training.comparison.measure import load_images

    settings = tiny_in(tmp_path_factory.mktemp("trained"))
    config = configure("hybrid", load_images("digits", None, 50), settings)
    config["model"]["network"] = describe_network("hybrid", "c4", 16, 10, 300)
    return config, settings.folder, train(config, settings.folder).model.network


def test_its_folder_is_that_of_an_experiment(trained, tmp_path):
    _, folder, network = trained
    stored = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    assert stored["model"]["network"]["class_path"] == "escnn_attention.models.HybridNet"
    images, network = torch.randn(2, 1, 16, 16), copy.deepcopy(network.train()).eval()
    with torch.no_grad():
        assert torch.equal(load_network(folder)(images), network(images))
    # The same from a file, to the last bit.
    run_experiment(["fit", "--config", str(folder / "config.yaml"), "--folder", str(tmp_path / "fit")])
    with torch.no_grad():
        assert torch.equal(load_network(tmp_path / "fit")(images), network(images))


def test_weights_are_a_function_of_the_seed(trained, tmp_path):
    config, _, network = trained
    assert config["seed_everything"] == 0
    changed = train({**config, "seed_everything": 1}, tmp_path / "other").model.network.state_dict()
    assert any(not torch.equal(value, changed[name]) for name, value in network.state_dict().items())


# Several networks at a time.


def tell(folder, name):
    """Leaves the process and its threads in a file."""
    (folder / name).write_text(f"{os.getpid()} {torch.get_num_threads()}")
    while len(list(folder.iterdir())) < 2:  # so that one process does not do everything
        time.sleep(0.01)


def fail(folder, name):
    """One of the names fails, another waits for ever."""
    if name == "sleeping":
        (folder / name).write_text(str(os.getpid()))
        time.sleep(1000)
    while not (folder / "sleeping").exists():
        time.sleep(0.01)
    if name == "wrong":
        raise UserError("a wrong option")
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.usefixtures("_forks")
def test_every_part_is_done_by_one_of_a_few_processes(tmp_path):
    names = ["one", "two", "three", "four"]
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        side_by_side(functools.partial(tell, tmp_path), names, 2)
    finally:
        torch.set_num_threads(threads)
    found = [(tmp_path / name).read_text().split() for name in names]
    assert len({process for process, _ in found} - {str(os.getpid())}) == 2
    assert {threads for _, threads in found} == {"3"}


@pytest.mark.usefixtures("_forks")
@pytest.mark.parametrize(("name", "message"), [("wrong", "^a wrong option$"), ("killed", "was killed")])
def test_what_fails_ends_the_others(tmp_path, name, message):
    with pytest.raises(UserError, match=message):
        side_by_side(functools.partial(fail, tmp_path), [name, "sleeping"], 2)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "sleeping").read_text()), 0)


def is_running(process):
    """Whether a process is there, and not only the entry of one that has ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8").split()[2] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs the processes of Linux")
@pytest.mark.usefixtures("_forks")
def test_processes_end_with_the_one_that_began_them(tmp_path, fork):
    process = fork(side_by_side, functools.partial(fail, tmp_path), ["sleeping", "sleeping"], 2)
    until = time.monotonic() + 100
    while not (tmp_path / "sleeping").exists() or not (tmp_path / "sleeping").read_text():
        assert time.monotonic() < until
        time.sleep(0.01)
    process.kill()
    process.join()
    working = int((tmp_path / "sleeping").read_text())
    while is_running(working):
        assert time.monotonic() < until
        time.sleep(0.01)
