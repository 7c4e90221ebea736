"""``escnn-attention fit``, ``test`` and ``predict``, as users call them."""

import contextlib
import csv
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

pytest.importorskip("jsonargparse")

from escnn_attention.training.data import RotMNIST
from escnn_attention.training.errors import UserError
from escnn_attention.training.experiment import load_network, run_experiment
from escnn_attention.training.modules.classifier import Classifier
from tests import samples

ROOT = Path(__file__).parents[3]

# The parts of a checkpoint that Lightning needs.
WHOLE = {"state_dict": {}, "epoch": 0, "optimizer_states": [], "lr_schedulers": [], "loops": {"fit_loop": {}}}
WHOLE["pytorch-lightning_version"] = "2.6.0"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with a small rotMNIST."""
    folder = tmp_path_factory.mktemp("data")
    np.savez(folder / "rotmnist.npz", **samples.rotmnist(train=24, valid=11, test=13))
    return folder


@pytest.fixture
def configuration(tmp_path, data):
    """A small GSA-Net on a small rotMNIST: a file to call with, and what may be changed in it."""
    config = {
        "seed_everything": 3,
        "trainer": {"max_epochs": 3, "accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False},
        "model": {
            "network": {
                "class_path": "escnn_attention.models.GSANet",
                "init_args": {
                    "gspace": {"class_path": "escnn.gspaces.rot2dOnR2", "init_args": {"N": 4}},
                    "in_channels": 1,
                    "num_classes": 10,
                    "channels": 2,
                    "blocks": [1],
                    "crops": [8],
                    "pool": [True],
                    "num_heads": 1,
                    "kernel_size": 3,
                    "query": "own",
                    "encoding": "mlp",
                },
            },
            "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.05, "momentum": 0.9}},
            "schedule": "cosine",
            "warm_up": 1,
        },
        "data": {
            "class_path": "escnn_attention.training.RotMNIST",
            "init_args": {"batch_size": 8, "folder": str(data)},
        },
    }

    def write(**changes):
        changed = json.loads(json.dumps(config))
        for name, value in changes.items():
            part = changed
            *path, last = name.split("__")
            for key in path:
                part = part[key]
            part[last] = value
        file = tmp_path / "experiment.yaml"
        file.write_text(yaml.safe_dump(changed), encoding="utf-8")
        return file

    return write


def call(command, file, folder, *more):
    run_experiment([command, "--config", str(file), "--folder", str(folder), *map(str, more)])


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """``fit`` in a new folder, which is a copy where another test has trained the same."""
    kept = {}

    def fit(file, folder):
        content = file.read_text(encoding="utf-8")
        if content not in kept:
            kept[content] = tmp_path_factory.mktemp("fitted") / "run"
            call("fit", file, kept[content])
        shutil.copytree(kept[content], folder)

    return fit


def weights(folder, name="last.ckpt"):
    return torch.load(folder / name, weights_only=True)["state_dict"]


def rows(folder):
    with (folder / "epochs.csv").open() as file:
        return list(csv.DictReader(file))


def test_fit_test_and_predict(configuration, fitted, tmp_path, data):
    folder = tmp_path / "run"
    call("fit", configuration(), folder)
    history = rows(folder)
    assert [row["epoch"] for row in history] == ["1", "2", "3"]
    # Three steps an epoch: up in a line for one epoch, then down like half a cosine.
    assert float(history[0]["learning_rate"]) == pytest.approx(0.05)
    assert float(history[-1]["learning_rate"]) == pytest.approx(0.0, abs=1e-9)
    assert list((folder / "tensorboard").iterdir())
    stored = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    assert stored["model"]["network"]["init_args"]["channels"] == 2
    assert stored["model"]["network"]["init_args"]["num_heads"] == 1

    call("test", configuration(), folder)
    result = json.loads((folder / "test.json").read_text(encoding="utf-8"))
    assert result["seed"] == 3
    assert [row["epoch"] for row in result["curve"]] == [1, 2, 3]  # whichever of them was the best
    assert result["checkpoint"] == "best.ckpt"
    for step in ("trained", "tested"):
        assert {"torch", "escnn", "escnn-attention"} <= result[step]["versions"].keys()
        assert result[step]["hardware"]["cores"] >= 1
        assert result[step]["configuration"]["data"]["init_args"]["batch_size"] == 8
    # Of the weights alone: the same training elsewhere has the same checksum.
    fitted(configuration(), tmp_path / "again")
    call("test", configuration(), tmp_path / "again")
    again = json.loads((tmp_path / "again" / "test.json").read_text(encoding="utf-8"))
    assert again["weights_sha256"] == result["weights_sha256"]
    assert str(tmp_path) not in json.dumps(result)

    network = load_network(folder)
    images_of = RotMNIST(folder=data, batch_size=13)
    images_of.setup("test")
    images, labels = next(iter(images_of.test_dataloader()))
    with torch.no_grad():
        right = (network(images).argmax(1) == labels).float().mean().item()
    assert right == pytest.approx(result["accuracy"])
    with pytest.raises(UserError, match="holds no trained network"):
        load_network(tmp_path)

    call("predict", configuration(), folder)
    with (folder / "predictions.csv").open() as file:
        predictions = list(csv.DictReader(file))
    assert [int(p["image"]) for p in predictions] == list(range(13))
    with np.load(data / "rotmnist.npz") as arrays:
        labels = arrays["test_labels"]
    right = np.mean([int(p["class"]) == label for p, label in zip(predictions, labels, strict=True)])
    assert right == pytest.approx(result["accuracy"])
    assert sum(float(predictions[0][f"p{i}"]) for i in range(10)) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("encoding", ["mlp", "fourier"])
def test_mixed_precision(configuration, tmp_path, encoding):
    """As in App. F.1: close to single precision, with weights that stay in it."""
    single, mixed = tmp_path / "single", tmp_path / "mixed"
    changes = {"trainer__max_epochs": 1, "model__network__init_args__encoding": encoding}
    changes |= {f"model__network__init_args__{part}_dropout": 0.0 for part in ("attention", "value")}
    call("fit", configuration(**changes), single)
    call("fit", configuration(**changes, trainer__precision="bf16-mixed"), mixed)
    losses = [float(rows(folder)[0]["train_loss"]) for folder in (single, mixed)]
    assert losses[1] == pytest.approx(losses[0], rel=0.05)
    assert losses[1] != losses[0]
    assert {value.dtype for value in weights(mixed).values()} == {torch.float32}


def test_goes_on_to_the_same_weights(configuration, fitted, tmp_path, monkeypatch):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    fitted(configuration(), whole)

    def stop(module):
        if module.current_epoch == 2:
            raise RuntimeError("the power fails")

    with monkeypatch.context() as patch:
        patch.setattr(Classifier, "on_train_epoch_end", stop)
        with pytest.raises(RuntimeError, match="the power fails"):
            call("fit", configuration(), parts)
    assert len(rows(parts)) < 3
    call("fit", configuration(), parts)
    first, second = weights(whole), weights(parts)
    assert first.keys() == second.keys()
    for name, value in first.items():
        torch.testing.assert_close(second[name], value, rtol=0, atol=0)
    assert [row["train_loss"] for row in rows(parts)] == [row["train_loss"] for row in rows(whole)]


def test_survives_being_killed(configuration, tmp_path):
    """Killed at any moment, it goes on with whole files."""
    folder = tmp_path / "run"
    file = configuration(trainer__max_epochs=40, model__schedule="constant", model__warm_up=0)
    command = [
        sys.executable,
        "-m",
        "escnn_attention.training.cli",
        "fit",
        "--config",
        str(file),
        "--folder",
        str(folder),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command, env=environment, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + 100
    while not (folder / "last.ckpt").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert process.poll() is None, process.stderr.read().decode()
    time.sleep(0.3)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = torch.load(folder / "last.ckpt", weights_only=True)["epoch"] + 1
    assert 1 <= done < 40
    call("fit", file, folder, "--trainer.max_epochs", done + 1)
    assert [int(row["epoch"]) for row in rows(folder)] == list(range(1, done + 2))


def test_another_configuration_is_refused_and_nothing_is_lost(configuration, fitted, tmp_path):
    folder = tmp_path / "run"
    fitted(configuration(trainer__max_epochs=1), folder)
    before = (folder / "last.ckpt").read_bytes()
    with pytest.raises(UserError, match=r"model\.network\.init_args\.kernel_size \(3 there, 5 now\)"):
        call("fit", configuration(), folder, "--model.network.init_args.kernel_size", 5)
    with pytest.raises(UserError, match=r"seed_everything \(3 there, 4 now\)"):
        call("fit", configuration(seed_everything=4), folder)
    assert (folder / "last.ckpt").read_bytes() == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--trainer.precision", "bf16-mixed"], r"trainer\.precision"),
        (["--trainer.gradient_clip_val", 0.1], r"trainer\.gradient_clip_val"),
        (["--trainer.max_epochs", 4], r"trainer\.max_epochs"),  # the schedule is laid out for three
        (["--data.init_args.batch_size", 4], r"data\.init_args\.batch_size"),
    ],
)
def test_another_training_is_refused(configuration, fitted, tmp_path, options, message):
    folder = tmp_path / "run"
    fitted(configuration(), folder)
    with pytest.raises(UserError, match=message):
        call("fit", configuration(), folder, *options)


def test_what_may_change(configuration, fitted, tmp_path, data):
    folder = tmp_path / "run"
    file = configuration(model__schedule="constant", model__warm_up=0)
    fitted(file, folder)
    call("fit", file, folder, "--trainer.max_epochs", 4)  # without a schedule a training can be longer
    assert len(rows(folder)) == 4
    with pytest.raises(UserError, match=r"got 2, but .*last\.ckpt has finished 4"):
        call("fit", file, folder, "--trainer.max_epochs", 2)
    renamed = {"class_path": "escnn_attention.training.data.RotMNIST", "init_args": {"folder": str(data)}}
    other = configuration(data=renamed, model__schedule="constant")  # the same class by its other name
    call("test", other, folder, "--model.network.init_args.backend", "reference", "--data.init_args.limit_test", 5)
    with pytest.raises(UserError, match=r"model\.network\.init_args\.kernel_size"):
        call("test", file, folder, "--model.network.init_args.kernel_size", 5)


def test_a_fit_that_fails_leaves_its_folder_usable(configuration, tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(UserError, match="a margin of 14 leaves nothing of a grid of 28×28"):
        call("fit", configuration(model__network__init_args__crops=[14]), folder)
    call("fit", configuration(), folder)
    # The configuration that is kept is one for any folder.
    call("fit", folder / "config.yaml", tmp_path / "copy")
    torch.testing.assert_close(weights(folder), weights(tmp_path / "copy"), rtol=0, atol=0)


def test_a_dev_run_writes_nothing(configuration, fitted, tmp_path):
    folder = tmp_path / "run"
    call("fit", configuration(), folder, "--trainer.fast_dev_run", "true")
    assert not folder.exists()
    fitted(configuration(), folder)

    def content():
        return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    before = content()
    assert {"epochs.csv", "last.ckpt"} <= {path.name for path in before}  # which a run that is none writes
    for command in ("fit", "validate", "test", "predict"):
        # Not even a finished training goes on, so options may be others.
        more = ["--model.warm_up", 0] if command == "fit" else []
        call(command, configuration(), folder, "--trainer.fast_dev_run", 2, *more)
    assert content() == before
    call("test", configuration(), folder)
    assert content().keys() == before.keys() | {folder / "test.json"}


def test_checkpoints_of_other_networks(configuration, fitted, tmp_path):
    folder, other = tmp_path / "run", tmp_path / "other"
    fitted(configuration(trainer__max_epochs=1), folder)
    content = torch.load(folder / "last.ckpt", weights_only=True)
    unknown = tmp_path / "unknown.ckpt"  # from elsewhere: it does not say what it is of
    torch.save({name: value for name, value in content.items() if name != "callbacks"}, unknown)
    call("test", configuration(), tmp_path / "measured", "--ckpt_path", unknown)
    wider = configuration(trainer__max_epochs=1, model__network__init_args__channels=4)
    for command in ("fit", "test", "predict"):
        with pytest.raises(UserError, match=r"--ckpt_path: .*unknown\.ckpt is of another network: size mismatch"):
            call(command, wider, other, "--ckpt_path", unknown)
        with pytest.raises(UserError, match=r"--ckpt_path: .*channels \(2 there, 4 now\)\. Choose another checkpoint"):
            call(command, wider, other, "--ckpt_path", folder / "last.ckpt")
        with pytest.raises(UserError, match=r"^(?!--ckpt_path).*channels \(2 there, 4 now\)\. Choose another --folder"):
            call(command, wider, folder)
    torch.save(content["state_dict"], tmp_path / "weights.ckpt")
    with pytest.raises(UserError, match=r"--ckpt_path: .* is not a checkpoint to test from: no 'state_dict'"):
        call("test", configuration(), other, "--ckpt_path", tmp_path / "weights.ckpt")
    torch.save({name: content[name] for name in ("state_dict", "epoch")}, tmp_path / "weights.ckpt")
    with pytest.raises(UserError, match="not a checkpoint to fit from: no 'optimizer_states'"):
        call("fit", configuration(), other, "--ckpt_path", tmp_path / "weights.ckpt")


def test_checkpoints_run_no_code(configuration, fitted, tmp_path):
    class Evil:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "it ran",))

    fitted(configuration(trainer__max_epochs=1), tmp_path / "run")
    content = torch.load(tmp_path / "run" / "last.ckpt", weights_only=True)
    torch.save({**content, "evil": Evil()}, tmp_path / "evil.ckpt")
    for command in ("fit", "test"):
        with pytest.raises(UserError, match=r"cannot read the checkpoint .*evil\.ckpt"):
            call(command, configuration(), tmp_path / "other", "--ckpt_path", tmp_path / "evil.ckpt")
        with pytest.raises(UserError, match="there is no file http:/"):
            call(command, configuration(), tmp_path / "other", "--ckpt_path", "http://127.0.0.1:1/evil.ckpt")
    assert not (tmp_path / "it ran").exists()


_NETWORK = "escnn_attention.models.GSANet"
_PLANE = {"class_path": "escnn.gspaces.rot2dOnR2", "init_args": {"N": 4}}


@pytest.mark.parametrize(
    ("description", "message"),
    [
        # A function that runs what it is given.
        (
            {
                "class_path": "torch.fx.graph_module.reduce_graph_module",
                "init_args": {
                    "body": {"_code": "pass"},
                    "import_block": "open(MARK, 'w')\n",
                },
            },
            "names 'torch.fx.graph_module.reduce_graph_module'",
        ),
        # Modules that are on the path, which importing would run.
        ({"class_path": "evil_module.Net"}, r"names 'evil_module\.Net'"),
        ({"class_path": _NETWORK, "init_args": {"gspace": {"class_path": "evil_module.Net"}}}, r"'evil_module\.Net'"),
        ({"class_path": _NETWORK, "init_args": {"blocks": [{"class_path": "evil_module.Net"}]}}, r"'evil_module\.Net'"),
        ({"class_path": _NETWORK, "dict_kwargs": {"gspace": {"class_path": "os.mkdir"}}}, r"names 'os\.mkdir'"),
        # Something else than a network, reached through this package or escnn's gspaces.
        ({"class_path": "escnn_attention.training.experiment.command.Path", "init_args": {}}, "command.Path"),
        ({"class_path": "escnn_attention.training.experiment.run_experiment"}, "run_experiment"),
        ({"class_path": "escnn.gspaces.os.mkdir"}, "mkdir"),
        ({"class_path": "escnn_attention..models.GSANet"}, "GSANet"),
        (_PLANE, "is no network"),
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
    described = json.loads(json.dumps(description).replace("MARK", repr(str(mark))))
    trained = {"seed_everything": 3, "model": {"network": described}, "trainer": {}, "data": {}}
    content = {**WHOLE, "callbacks": {"_Provenance": {"configuration": trained}}}
    (tmp_path / "evil").mkdir()
    torch.save(content, tmp_path / "evil" / "best.ckpt")
    torch.save(content, tmp_path / "evil" / "last.ckpt")
    with pytest.raises(UserError, match=message):
        load_network(tmp_path / "evil")
    if "evil_module" in str(described["class_path"]):
        for command in ("fit", "test"):
            with pytest.raises(UserError, match=r"model\.network\.class_path .* Choose another --folder"):
                call(command, configuration(), tmp_path / "evil")
    assert not mark.exists()
    assert "evil_module" not in sys.modules


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
        call("fit", configuration(model__network=network, trainer__max_epochs=1), folder)
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


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")}


@pytest.mark.parametrize("lost", [["last.ckpt"], ["last.ckpt", "epochs.csv"], ["last.ckpt", "epochs.csv", "best.ckpt"]])
def test_a_training_without_its_last_checkpoint_is_left_alone(configuration, fitted, tmp_path, lost):
    folder = tmp_path / "run"
    file = configuration(trainer__max_epochs=2, model__optimizer__init_args__lr=1e-3)
    fitted(file, folder)
    call("test", file, folder)
    for name in lost:
        (folder / name).unlink()
    before = files(folder)
    for more in ([], ["--seed_everything", 9]):
        with pytest.raises(UserError, match=r"--folder: .*run holds .*test\.json of a training, but no last\.ckpt"):
            call("fit", file, folder, *more)
    assert files(folder) == before


def test_the_best_checkpoint_alone(configuration, fitted, tmp_path):
    """Of the first epoch, a kill can leave it alone: the same training makes it again. Any other is kept."""
    folder = tmp_path / "run"
    fitted(configuration(trainer__max_epochs=1, model__schedule="constant"), folder)
    for name in ("last.ckpt", "epochs.csv"):
        (folder / name).unlink()
    before = (folder / "best.ckpt").read_bytes()
    with pytest.raises(UserError, match=r"holds best\.ckpt of a training"):
        call("fit", configuration(trainer__max_epochs=1, model__schedule="constant", seed_everything=4), folder)
    content = torch.load(folder / "best.ckpt", weights_only=True)
    torch.save({**content, "epoch": 1}, folder / "best.ckpt")
    with pytest.raises(UserError, match=r"holds best\.ckpt of a training"):
        call("fit", configuration(trainer__max_epochs=1, model__schedule="constant"), folder)
    (folder / "best.ckpt").write_bytes(before)
    call("fit", configuration(trainer__max_epochs=1, model__schedule="constant"), folder)
    assert (folder / "last.ckpt").exists()


def test_a_folder_with_a_training_takes_none_from_elsewhere(configuration, fitted, tmp_path):
    file = configuration(model__schedule="constant", model__warm_up=0, trainer__max_epochs=1)
    for name in ("one", "other"):
        fitted(file, tmp_path / name)
    before = files(tmp_path / "one")
    given = ["--ckpt_path", tmp_path / "other" / "last.ckpt", "--trainer.max_epochs", 2]
    with pytest.raises(UserError, match=r"one holds a training \(last\.ckpt\): choose another"):
        call("fit", file, tmp_path / "one", *given)
    assert files(tmp_path / "one") == before
    call("test", file, tmp_path / "one", *given[:2])  # the control: it is read from anywhere


def test_a_configuration_of_ones_own_is_not_replaced(configuration, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    own = folder / "config.yaml"
    wanted = configuration(trainer__max_epochs=1).read_text(encoding="utf-8")
    own.write_text(f"# what I want\n{wanted}", encoding="utf-8")
    before = own.read_bytes()
    with pytest.raises(UserError, match=r"config\.yaml is not a file that fit has written"):
        call("fit", own, folder)
    assert own.read_bytes() == before
    assert list(folder.iterdir()) == [own]
    own.rename(folder / "mine.yaml")
    call("fit", folder / "mine.yaml", folder)
    call("fit", own, folder)  # now it is what fit has written
    assert own.read_text(encoding="utf-8").startswith("# Written by escnn-attention fit.\nseed_everything: 3\n")
    # What an older version wrote has no first line.
    own.write_text("\n".join(own.read_text(encoding="utf-8").split("\n")[1:]), encoding="utf-8")
    call("fit", own, folder)


def test_results_of_other_measurements_are_kept(configuration, fitted, tmp_path, capsys):
    folder = tmp_path / "run"
    file = configuration(trainer__max_epochs=1, model__schedule="constant")
    fitted(file, folder)
    call("test", file, folder)
    call("predict", file, folder)
    full, predictions = (folder / "test.json").read_bytes(), (folder / "predictions.csv").read_bytes()
    for _ in range(2):
        call("test", file, folder)
        call("predict", file, folder)
        assert not list(folder.glob("*.old*"))  # the same again takes its place
    for command in ("test", "predict"):
        call(command, file, folder, "--data.init_args.limit_test", 7)
    assert (folder / "test.old-1.json").read_bytes() == full
    assert (folder / "predictions.old-1.csv").read_bytes() == predictions
    assert len((folder / "predictions.csv").read_text(encoding="utf-8").splitlines()) == 8
    assert "test.json was of another measurement: it is kept as test.old-1.json" in capsys.readouterr().err
    (folder / "test.json").write_text("my notes", encoding="utf-8")
    call("test", file, folder)
    assert (folder / "test.old-2.json").read_text(encoding="utf-8") == "my notes"


def test_one_training_at_a_time_in_a_folder(configuration, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    monkeypatch.setattr("escnn_attention.training.experiment.command._PATIENCE", 0.1)
    file = configuration(trainer__max_epochs=1, model__schedule="constant")
    started = []

    def another(module):
        if not started:
            started.append(None)
            with pytest.raises(UserError, match=r"another process uses .*run: wait for it, or choose another --folder"):
                call("fit", file, folder)
            call("fit", file, tmp_path / "other")

    with monkeypatch.context() as patch:
        patch.setattr(Classifier, "on_train_epoch_start", another)
        call("fit", file, folder)
    assert started
    call("fit", file, folder)


def test_a_training_that_another_process_has_finished_meanwhile(configuration, fitted, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    file = configuration(trainer__max_epochs=1, model__schedule="constant")

    @contextlib.contextmanager
    def late(path, *_):
        shutil.copytree(tmp_path / "a copy", path, dirs_exist_ok=True)
        yield

    fitted(file, tmp_path / "a copy")
    monkeypatch.setattr("escnn_attention.training.experiment.command.held", late)
    with pytest.raises(UserError, match=r"another process has trained in .*run just now"):
        call("fit", file, folder)


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
        (_truncated, "it is damaged: it is not as it was written"),
        (lambda path: path.write_bytes(bytes(range(256))), "it is damaged|something else than tensors"),
        (_holding([1]), "it holds a list, not a checkpoint"),
        (_holding({"a": 1}), "is not a checkpoint to"),
        (_holding({"state_dict": {}, "epoch": "x"}), "its epoch is a str, needed a int"),
        (_holding({**WHOLE, "callbacks": 5}), "its callbacks is a int, needed a dict"),
        (_holding({**WHOLE, "loops": {"a": 1}}), "its loops have no fit_loop"),
        (_holding({**WHOLE, "lr_schedulers": [5]}), "its lr_schedulers are not all dictionaries"),
        (_holding({k: v for k, v in WHOLE.items() if k != "loops"}), "to fit from: no 'loops'"),
        (_holding({**WHOLE, "callbacks": {"_Provenance": {}}}), "another network"),
    ],
)
def test_damaged_checkpoints_are_said_to_be(configuration, tmp_path, damage, message):
    (tmp_path / "run").mkdir()
    damage(tmp_path / "run" / "last.ckpt")
    with pytest.raises(UserError, match=message) as caught:
        call("fit", configuration(), tmp_path / "run")
    assert "last.ckpt" in str(caught.value)


def test_a_full_disk_is_said_of_its_file(configuration, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(UserError, match=r"run.*: No space left on device"):
            call("fit", configuration(trainer__max_epochs=1), tmp_path / "run")
    call("fit", configuration(trainer__max_epochs=1), tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"in_channels": 3}, r"model\.network: it is for 3 channels, but RotMNIST has 1 \(in_channels\)"),
        ({"num_classes": 5}, r"model\.network: it is for 5 classes, but RotMNIST has 10 \(num_classes\)"),
    ],
)
def test_networks_for_other_images(configuration, tmp_path, changes, message):
    changes = {f"model__network__init_args__{name}": value for name, value in changes.items()}
    with pytest.raises(UserError, match=message):
        call("fit", configuration(**changes), tmp_path / "run")
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_networks_that_give_something_else_than_logits(configuration, tmp_path):
    network = {"class_path": "torch.nn.Linear", "init_args": {"in_features": 28, "out_features": 5}}
    with pytest.raises(UserError, match=r"network: got \(8, 1, 28, 5\) for 8 images, needed .* 10 classes, \(8, 10\)"):
        call("fit", configuration(model__network=network, model__num_classes=10), tmp_path / "run")


def test_convolutions_are_trained_and_measured_too(configuration, tmp_path):
    """Batch norms count their batches, in a number without dimensions."""
    gspace = {"class_path": "escnn.gspaces.rot2dOnR2", "init_args": {"N": 2}}
    options = {"gspace": gspace, "in_channels": 1, "num_classes": 10, "widths": [1, 2], "num_heads": 1}
    options |= {"convolutions": [1, 1], "attention": [0, 1]}
    network = {"class_path": "escnn_attention.models.HybridNet", "init_args": options}
    file = configuration(model__network=network, trainer__max_epochs=1)
    call("fit", file, tmp_path / "run")
    call("test", file, tmp_path / "run")
    first = json.loads((tmp_path / "run" / "test.json").read_text(encoding="utf-8"))["weights_sha256"]
    content = torch.load(tmp_path / "run" / "best.ckpt", weights_only=True)
    name = next(name for name, value in content["state_dict"].items() if value.dim() == 0)
    content["state_dict"][name] += 1
    torch.save(content, tmp_path / "run" / "best.ckpt")
    call("test", file, tmp_path / "run")
    assert json.loads((tmp_path / "run" / "test.json").read_text(encoding="utf-8"))["weights_sha256"] != first


def test_every_option_of_a_training_goes_on(configuration, tmp_path, monkeypatch):
    """Averages, decay of weights alone, smooth labels and rotated images, of a network with filters."""
    gspace = {"class_path": "escnn.gspaces.rot2dOnR2", "init_args": {"N": 2}}
    options = {"gspace": gspace, "in_channels": 1, "num_classes": 10, "widths": [1, 2], "num_heads": 1}
    options |= {"convolutions": [1, 1], "attention": [0, 1], "dropout": 0.1}
    changes = {"model__network": {"class_path": "escnn_attention.models.HybridNet", "init_args": options}}
    changes |= {"model__ema": 0.7, "model__decay": "weights", "model__label_smoothing": 0.1}
    adam = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.05, "weight_decay": 0.1}}
    changes |= {"model__optimizer": adam, "data__init_args__rotate_train": 180.0, "trainer__max_epochs": 2}
    file, whole, parts = configuration(**changes), tmp_path / "whole", tmp_path / "parts"
    call("fit", file, whole)

    def stop(module):
        if module.current_epoch == 1:
            raise RuntimeError("the power fails")

    with monkeypatch.context() as patch:
        patch.setattr(Classifier, "on_train_epoch_start", stop)
        with pytest.raises(RuntimeError, match="the power fails"):
            call("fit", file, parts)
    call("fit", file, parts)
    one, other = (torch.load(folder / "last.ckpt", weights_only=True) for folder in (whole, parts))
    assert len(one["optimizer_states"][0]["param_groups"]) == 2
    for part in ("state_dict", "current_model_state"):
        assert one[part].keys() == other[part].keys()
        assert all(torch.equal(value, other[part][name]) for name, value in one[part].items())
    assert any(not torch.equal(value, one["current_model_state"][name]) for name, value in one["state_dict"].items())
    call("test", file, parts)
    for option, message in (("ema", "0.7 there, 0.8 now"), ("decay", '"weights" there, "all" now')):
        with pytest.raises(UserError, match=rf"model\.{option} \({message}\)"):
            call("fit", file, parts, f"--model.{option}", {"ema": 0.8, "decay": "all"}[option])


def test_callbacks_of_ones_own(configuration, tmp_path):
    """In the configuration, for all commands."""
    callbacks = [
        {"class_path": "ModelCheckpoint", "init_args": {"monitor": "valid_accuracy", "mode": "max"}},
        {"class_path": "TQDMProgressBar"},
        {"class_path": "EarlyStopping", "init_args": {"monitor": "valid_loss", "patience": 9}},
    ]
    file = configuration(trainer__callbacks=callbacks, trainer__enable_progress_bar=True)
    call("fit", file, tmp_path / "run")
    call("test", file, tmp_path / "run")


def test_a_training_that_diverges_is_reported(configuration, tmp_path):
    file = configuration(model__optimizer__init_args__lr=1e30)
    call("fit", file, tmp_path / "run")
    call("test", file, tmp_path / "run", "--ckpt_path", "last")
    result = json.loads((tmp_path / "run" / "test.json").read_text(encoding="utf-8"))
    assert result["loss"] is None
    assert 0 <= result["accuracy"] <= 1


def test_epochs_without_validation(configuration, tmp_path):
    call("fit", configuration(trainer__check_val_every_n_epoch=3), tmp_path / "run")
    assert [bool(row["valid_accuracy"]) for row in rows(tmp_path / "run")] == [False, False, True]


def test_each_part_of_an_accumulated_batch_has_a_dropout_of_its_own(configuration, tmp_path, monkeypatch):
    drawn = []
    step = Classifier.training_step
    monkeypatch.setattr(Classifier, "training_step", lambda *a: (drawn.append(torch.rand(()).item()), step(*a))[1])
    call("fit", configuration(trainer__max_epochs=2, model__warm_up=0, trainer__accumulate_grad_batches=3), tmp_path)
    assert len(set(drawn)) == len(drawn) == 6


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"seed_everything": True}, [], "seed_everything: got True, needed an integer"),
        ({}, ["--trainer.default_root_dir", "x"], "default_root_dir is not an option here"),
        ({}, ["--trainer.enable_checkpointing", "false"], "enable_checkpointing is not an option here"),
        ({}, ["--ckpt_path", "no/such.ckpt"], r"there is no file no/such\.ckpt"),
        ({"model__warm_up": 9}, [], "warm_up: got 9 epochs, but the training has 3"),
        ({"model__network__init_args__num_heads": 0}, [], "num_heads: got 0, needed at least 1"),
        ({"model__network__init_args__crops": [1, 2]}, [], "crops: got 2 values, needed one for each block, 1"),
    ],
)
def test_mistakes_have_one_clear_line(configuration, tmp_path, changes, options, message):
    with pytest.raises(UserError, match=message):
        call("fit", configuration(**changes), tmp_path / "run", *options)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe\x00\x01", "is not a text file"),
        (b"a: \x00b", "is not YAML"),
        (b"a: [", "is not YAML: while parsing"),
    ],
)
def test_configurations_that_are_none(tmp_path, content, message):
    (tmp_path / "experiment.yaml").write_bytes(content)
    with pytest.raises(UserError, match=rf"^--config: .*experiment\.yaml {message}.*$"):
        call("fit", tmp_path / "experiment.yaml", tmp_path / "run")


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        ("", "--folder: got an empty name"),
        ("file", "--folder: file is not a folder"),
        ("file/run", "file/run.*: Not a directory"),
        (300 * "x", "x: File name too long"),
        ("/proc/run", "/proc/run"),
    ],
)
@pytest.mark.parametrize("command", ["fit", "test"])
def test_folders_that_cannot_be(configuration, tmp_path, monkeypatch, command, folder, message):
    file = configuration()
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    with pytest.raises(UserError, match=message) as caught:
        call(command, file, folder)
    assert "\n" not in str(caught.value)
    assert sorted(os.listdir()) == ["experiment.yaml", "file"]


def test_what_a_killed_process_left_is_removed(configuration, fitted, tmp_path):
    folder = tmp_path / "run"
    fitted(configuration(), folder)
    stale = {name: folder / f".{name}.abcd_123.tmp" for name in ("best.ckpt", "config.yaml", "test.json")}
    others = [folder / name for name in (".best.ckpt.tmp", ".mine.abcd_123.tmp", "best.ckpt.abcd_123.tmp")]
    for path in [*stale.values(), *others]:
        path.write_bytes(b"x")
    call("fit", configuration(), folder)
    # Another process may write the result of a test meanwhile.
    assert [name for name, path in stale.items() if path.exists()] == ["test.json"]
    call("test", configuration(), folder)
    assert not stale["test.json"].exists()
    assert all(path.exists() for path in others)


def test_without_a_trained_network(configuration, tmp_path):
    with pytest.raises(UserError, match="holds no trained network: run 'escnn-attention fit'"):
        call("test", configuration(), tmp_path / "nothing")


def test_mistakes_are_named(configuration, tmp_path, capsys):
    file = configuration()
    for name, value in (
        ("--model.schedule", "square"),
        ("--model.network.init_args.nonsense", 3),
        ("--nonsense", 3),
    ):
        with pytest.raises(SystemExit):
            call("fit", file, tmp_path / "run", name, value)
        assert name.split(".")[-1].strip("-") in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_two_processes_match_one(configuration, tmp_path):
    """On the same batches, to rounding errors: shares of a batch give its gradient."""
    one, two = tmp_path / "one", tmp_path / "two"
    # In float64 what differs is the order of additions only, and dropout is off: its masks are each process's own.
    off = {"attention_dropout": 0.0, "value_dropout": 0.0}
    changes = {f"model__network__init_args__{name}": value for name, value in off.items()}
    changes["trainer__precision"] = "64-true"
    call("fit", configuration(**changes), one)
    file = configuration(**changes)
    command = [sys.executable, "-m", "escnn_attention.training.cli", "fit", "--config", str(file), "--folder", str(two)]
    command += ["--trainer.devices", "2", "--trainer.strategy", "ddp"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert process.returncode == 0, process.stderr
    first, second = weights(one), weights(two)
    assert first.keys() == second.keys()
    for name, value in first.items():
        torch.testing.assert_close(second[name], value, rtol=1e-9, atol=1e-11)
    for a, b in zip(rows(one), rows(two), strict=True):
        for name in ("train_loss", "valid_loss"):
            assert float(a[name]) == pytest.approx(float(b[name]), rel=1e-6)
        assert float(a["valid_accuracy"]) == pytest.approx(float(b["valid_accuracy"]))


@pytest.mark.parametrize(
    "path", sorted((ROOT / "examples" / "gsa_nets" / "configurations").glob("*.yaml")), ids=lambda p: p.stem
)
def test_configurations_of_the_paper(path):
    """Every file is understood, and builds the network of the paper that it names."""
    import importlib

    from escnn_attention.models import GSANet

    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    arguments = config["model"]["network"]["init_args"]
    gspace = arguments.pop("gspace")
    module, _, name = gspace["class_path"].rpartition(".")
    space = getattr(importlib.import_module(module), name)(**gspace.get("init_args", {}))
    preset = {"rotmnist": GSANet.rotmnist, "cifar10": GSANet.cifar10, "pcam": GSANet.patch_camelyon}
    described, named = GSANet(space, **arguments), preset[path.stem.split("_")[0]](space)
    assert str(described) == str(named)
    assert {n: p.shape for n, p in described.named_parameters()} == {n: p.shape for n, p in named.named_parameters()}
