"""``escnn-attention fit``, ``test`` and ``predict``, as users call them."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from escnn import gspaces
from lightning.pytorch.cli import LightningCLI
from typer.testing import CliRunner

from escnn_attention import models
from escnn_attention.models import registry
from escnn_attention.training import ChargedParticles, Classifier, Digits, PointForecast, PoissonOnTorus, RotMNIST
from escnn_attention.training.cli import app
from escnn_attention.training.errors import UserError
from escnn_attention.training.experiment import load_network, run_experiment
from escnn_attention.training.experiment.command import ExperimentCLI, is_asked_for, run_pretrained
from escnn_attention.training.experiment.configuration import plain
from tests.training.experiment.runs import ROOT, SHORT, call, of, rows, weights

OTHER = of("torch.nn.Linear", in_features=28, out_features=5)
"""A network that gives something else than logits."""


@pytest.mark.slow
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
    predictions = rows(folder, "predictions.csv")
    assert [int(p["image"]) for p in predictions] == list(range(13))
    with np.load(data / "rotmnist.npz") as arrays:
        test_images, labels = arrays["test_images"], arrays["test_labels"]
    assert [int(p["label"]) for p in predictions] == labels.tolist()
    right = np.mean([int(p["class"]) == label for p, label in zip(predictions, labels, strict=True)])
    assert right == pytest.approx(result["accuracy"])
    assert sum(float(predictions[0][f"p{i}"]) for i in range(10)) == pytest.approx(1.0, abs=1e-5)

    # The same images as one's own give the same, but for labels that nobody says. The file of the data is transposed.
    np.savez(tmp_path / "own.npz", images=test_images.transpose(0, 2, 1))
    run_experiment(["predict", "--folder", str(tmp_path / "again"), "--images", str(tmp_path / "own.npz")])
    unlabelled = [{k: v for k, v in p.items() if k != "label"} for p in predictions]
    assert rows(tmp_path / "again", "predictions.csv") == unlabelled

    # Without a configuration they take that of the folder, which is the same one.
    before = (folder / "predictions.csv").read_bytes()
    for name in ("test.json", "predictions.csv"):
        (folder / name).rename(folder / f"first-{name}")
    for command in ("test", "validate", "predict"):
        run_experiment([command, "--folder", str(folder)])
    again = json.loads((folder / "test.json").read_text(encoding="utf-8"))
    assert {**again, "tested": None} == {**result, "tested": None}
    assert again["tested"]["configuration"]["model"] == result["tested"]["configuration"]["model"]
    assert (folder / "predictions.csv").read_bytes() == before


@pytest.mark.sampled(1)
@pytest.mark.parametrize("encoding", ["mlp", "fourier"])
@pytest.mark.slow
def test_mixed_precision(configuration, tmp_path, encoding):
    """As in App. F.1: close to single precision, with weights that stay in it."""
    single, mixed = tmp_path / "single", tmp_path / "mixed"
    block = {"encoding": encoding, "attention_dropout": 0.0, "dropout": 0.0}
    changes = {"trainer__max_epochs": 1, "model__network__init_args__block": block}
    call("fit", configuration(**changes), single)
    call("fit", configuration(**changes, trainer__precision="bf16-mixed"), mixed)
    losses = [float(rows(folder)[0]["train_loss"]) for folder in (single, mixed)]
    assert losses[1] == pytest.approx(losses[0], rel=0.05)
    assert losses[1] != losses[0]
    assert {value.dtype for value in weights(mixed).values()} == {torch.float32}


@pytest.mark.slow
def test_where_all_images_train_the_last_epoch_counts(configuration, tmp_path, recwarn):
    folder = tmp_path / "run"
    everything = configuration(data__init_args__full_train=True)
    call("fit", everything, folder)
    history = rows(folder)
    assert [(row["epoch"], row["valid_loss"], row["valid_accuracy"]) for row in history] == [
        (str(epoch), "", "") for epoch in (1, 2, 3)
    ]
    call("test", everything, folder)
    result = json.loads((folder / "test.json").read_text(encoding="utf-8"))
    assert (result["epoch"], result["checkpoint"]) == (3, "best.ckpt")
    torch.testing.assert_close(weights(folder), weights(folder, "best.ckpt"), rtol=0, atol=0)
    with pytest.raises(UserError, match=r"none .*left to validate"):
        call("validate", everything, folder)
    assert not [str(warning.message) for warning in recwarn if "is zero" in str(warning.message)]


@pytest.mark.slow
def test_a_fit_that_fails_leaves_its_folder_usable(configuration, tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(UserError, match="margin of 14"):
        call("fit", configuration(model__network__init_args__crops=[14]), folder)
    call("fit", configuration(**SHORT), folder)
    # The configuration that is kept is one for any folder.
    call("fit", folder / "config.yaml", tmp_path / "copy")
    torch.testing.assert_close(weights(folder), weights(tmp_path / "copy"), rtol=0, atol=0)


@pytest.mark.slow
def test_a_dev_run_writes_nothing(configuration, fitted, tmp_path):
    folder = tmp_path / "run"
    call("fit", configuration(), folder, "--trainer.fast_dev_run", "true")
    assert not folder.exists()
    fitted(configuration(), folder)

    def content():
        return {path: path.read_bytes() for path in folder.rglob("[!.]*") if path.is_file()}

    before = content()
    assert {"epochs.csv", "last.ckpt"} <= {path.name for path in before}  # which a run that is none writes
    for command in ("fit", "validate", "test", "predict"):
        # Not even a finished training goes on, so options may be others.
        more = ["--model.warm_up", 0] if command == "fit" else []
        call(command, configuration(), folder, "--trainer.fast_dev_run", 2, *more)
    assert content() == before
    call("test", configuration(), folder)
    assert content().keys() == before.keys() | {folder / "test.json"}


@pytest.mark.slow
def test_one_training_at_a_time_in_a_folder(configuration, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    monkeypatch.setattr("escnn_attention.training.experiment.command._PATIENCE", 0.1)
    file = configuration(**SHORT)
    started = []

    def another(module):
        if not started:
            started.append(None)
            with pytest.raises(UserError, match=r"another process uses .*run"):
                call("fit", file, folder)
            call("fit", file, tmp_path / "other")

    with monkeypatch.context() as patch:
        patch.setattr(Classifier, "on_train_epoch_start", another)
        call("fit", file, folder)
    assert started
    call("fit", file, folder)


def test_a_training_that_another_process_has_finished_meanwhile(configuration, fitted, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    file = configuration(**SHORT)

    @contextlib.contextmanager
    def late(path, *_):
        shutil.copytree(tmp_path / "a copy", path, dirs_exist_ok=True)
        yield

    fitted(file, tmp_path / "a copy")
    monkeypatch.setattr("escnn_attention.training.experiment.checkpoints.locked_folder", late)
    with pytest.raises(UserError, match=r"another process has trained"):
        call("fit", file, folder)


@pytest.mark.slow
def test_convolutions_are_trained_and_measured_too(configuration, tmp_path):
    """Batch norms count their batches, in a number without dimensions."""
    sizes = {"widths": [1], "convolutions": [1], "attention": [0], "in_channels": 1, "num_classes": 10}
    network = of("escnn_attention.models.HybridNet", gspace=of("escnn.gspaces.rot2dOnR2", N=2), **sizes)
    file = configuration(model__network=network, **SHORT)
    call("fit", file, tmp_path / "run")
    call("test", file, tmp_path / "run")
    first = json.loads((tmp_path / "run" / "test.json").read_text(encoding="utf-8"))["weights_sha256"]
    content = torch.load(tmp_path / "run" / "best.ckpt", weights_only=True)
    name = next(name for name, value in content["state_dict"].items() if value.dim() == 0)
    content["state_dict"][name] += 1
    torch.save(content, tmp_path / "run" / "best.ckpt")
    call("test", file, tmp_path / "run")
    assert json.loads((tmp_path / "run" / "test.json").read_text(encoding="utf-8"))["weights_sha256"] != first


@pytest.mark.slow
def test_callbacks_of_ones_own(configuration, tmp_path):
    """In the configuration, for all commands."""
    callbacks = [
        of("ModelCheckpoint", monitor="valid_accuracy", mode="max"),
        {"class_path": "TQDMProgressBar"},
        of("EarlyStopping", monitor="valid_loss", patience=9),
    ]
    file = configuration(trainer__callbacks=callbacks, trainer__enable_progress_bar=True, **SHORT)
    call("fit", file, tmp_path / "run")
    call("test", file, tmp_path / "run")
    kept = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text(encoding="utf-8"))["trainer"]["callbacks"]
    assert [callback["class_path"].rpartition(".")[2] for callback in kept] == [c["class_path"] for c in callbacks]
    assert list((tmp_path / "run").rglob("epoch=*.ckpt"))


@pytest.mark.slow
def test_a_training_that_diverges_is_reported(configuration, tmp_path):
    file = configuration(model__optimizer__init_args__lr=1e30)
    call("fit", file, tmp_path / "run")
    call("test", file, tmp_path / "run", "--ckpt_path", "last")
    result = json.loads((tmp_path / "run" / "test.json").read_text(encoding="utf-8"))
    assert result["loss"] is None
    assert 0 <= result["accuracy"] <= 1


@pytest.mark.slow
def test_each_part_of_an_accumulated_batch_has_a_dropout_of_its_own(configuration, tmp_path, monkeypatch):
    drawn = []
    step = Classifier.training_step
    monkeypatch.setattr(Classifier, "training_step", lambda *a: (drawn.append(torch.rand(()).item()), step(*a))[1])
    call("fit", configuration(trainer__max_epochs=2, model__warm_up=0, trainer__accumulate_grad_batches=3), tmp_path)
    assert len(set(drawn)) == len(drawn) == 6


@pytest.mark.sampled
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
    fitted(configuration(**SHORT), folder)
    stale = {name: folder / f".{name}.abcd_123.tmp" for name in ("best.ckpt", "config.yaml", "test.json")}
    others = [folder / name for name in (".best.ckpt.tmp", ".mine.abcd_123.tmp", "best.ckpt.abcd_123.tmp")]
    for path in [*stale.values(), *others]:
        path.write_bytes(b"x")
    call("fit", configuration(**SHORT), folder)
    # Another process may write the result of a test meanwhile.
    assert [name for name, path in stale.items() if path.exists()] == ["test.json"]
    call("test", configuration(**SHORT), folder)
    assert not stale["test.json"].exists()
    assert all(path.exists() for path in others)


@pytest.mark.parametrize("command", ["validate", "test", "predict"])
def test_a_folder_without_a_configuration(command, tmp_path):
    with pytest.raises(UserError, match=r"--folder: .*holds no config.yaml"):
        run_experiment([command, "--folder", str(tmp_path / "none")])
    with pytest.raises(UserError, match=f"--folder: got none, .*{command}"):
        run_experiment([command])


def test_a_configuration_is_printed_without_a_folder(capsys):
    with pytest.raises(SystemExit) as ended:
        run_experiment(["test", "--print_config"])
    assert ended.value.code == 0
    assert "trainer:" in capsys.readouterr().out


def test_without_a_trained_network(configuration, tmp_path):
    with pytest.raises(UserError, match="holds no trained network"):
        call("test", configuration(), tmp_path / "nothing")


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("--model.schedule=square", r"model\.schedule.* Got value: square \(see escnn-attention fit --help\)$"),
        ("--model.network.init_args.nonsense=3", r"'nonsense' is not accepted \(see escnn-attention fit --help\)$"),
        ("--nonsense=3", r"unrecognized arguments: --nonsense=3 \(see escnn-attention fit --help\)$"),
        ('--model.network.init_args.block={"encoding": "mlp", "x": 1}', "x: block has no such option"),
        ("--model.label_smoothing=2", "label_smoothing: got 2.0, needed"),
        ("--seed_everything=-1", "--seed_everything: got -1, needed an integer from 0 to 4294967295"),
        (f"--seed_everything={2**80}", f"--seed_everything: got {2**80}, needed an integer"),
        ("--model.network.init_args.gspace.init_args.N=-1", "gspace: the network needs a finite fiber group"),
        ("--model.warm_up=9", "warm_up: got 9 epochs, but the training has 3"),
        ("--data.init_args.folder=no/such", "no/such does not exist"),
        ("--trainer.default_root_dir=x", "default_root_dir is not an option here"),
        ("--trainer.enable_checkpointing=false", "enable_checkpointing is not an option here"),
        ("--ckpt_path=no/such.ckpt", r"there is no file no/such\.ckpt"),
        ({"seed_everything": True}, "seed_everything: got True, needed an integer"),
        ({"model__network__init_args__num_heads": 0}, "num_heads: got 0, needed at least 1"),
        ({"model__network__init_args__crops": [1, 2]}, "crops: got 2 values, needed one for each block, 1"),
        ({"model__network__init_args__in_channels": 3}, r"network: it is for 3 channels, but RotMNIST has 1 \(in_ch"),
        ({"model__network__init_args__num_classes": 5}, "network: it is for 5 classes, but RotMNIST has 10"),
        ({"model__network": OTHER, "model__num_classes": 10}, r"network: .*needed .*\(8, 10\)"),
        ({"data__init_args__batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"data__class_path": "escnn_attention.training.No"}, "data.*module '.*' has no attribute 'No'"),
    ],
)
def test_a_refused_training_is_told_in_one_line_and_leaves_nothing(configuration, tmp_path, capfd, change, message):
    changes, options = (change, []) if isinstance(change, dict) else ({}, [change])
    with pytest.raises(UserError, match=message) as caught:
        call("fit", configuration(**changes), tmp_path / "missing" / "run", *options)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 250 or "no such option" in message  # where those that there are follow
    assert capfd.readouterr().err == ""
    assert os.listdir(tmp_path) == ["experiment.yaml"]


def test_a_refused_training_leaves_a_folder_as_it_was(configuration, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="warm_up"):
        call("fit", configuration(), folder, "--model.warm_up", 9)
    assert os.listdir(folder) == ["notes.txt"]


@pytest.mark.parametrize("option", ["--conf", "--tas", "--trainer.max_e"])
def test_options_have_no_short_forms(option):
    """By a short form the task and the configuration would not be known before all options are parsed."""
    with pytest.raises(UserError, match=f"unrecognized arguments: {option} 3"):
        run_experiment(["fit", "--folder", "run", option, "3"])


@pytest.mark.slow
def test_options_are_those_that_lightning_parses(configuration, monkeypatch, capsys):
    """Though by the parser of the command alone, which is made once."""

    class ParsedError(Exception):
        pass

    def stop(cli):
        raise ParsedError(cli.config, plain(cli.parser, cli.config, cli.subcommand))

    def parsed(*options):
        with pytest.raises(ParsedError) as caught:
            call("fit", file, "run", *options)
        return caught.value.args

    file, options = configuration(), ["--trainer.max_epochs", 7, "--model.network.init_args.num_heads", 2]
    monkeypatch.setattr(ExperimentCLI, "before_instantiate_classes", stop)
    with monkeypatch.context() as patch:
        patch.setattr("escnn_attention.training.experiment.command._PARSERS", {})
        patch.setattr(ExperimentCLI, "parse_arguments", LightningCLI.parse_arguments)
        expected = parsed(*options)
    assert parsed(*options) == expected != parsed()
    with pytest.raises(UserError, match="--nonsense 3"):
        call("fit", file, "run", "--print_config", "--nonsense", 3)
    assert parsed(*options) == expected  # which the wrong arguments before would have printed
    capsys.readouterr()
    with pytest.raises(SystemExit):
        call("fit", file, "run", *options, "--print_config")
    assert yaml.safe_load(capsys.readouterr().out)["trainer"]["max_epochs"] == 7
    assert parsed(*options) == expected


def as_users_do(file, folder, *options):
    """Lightning starts the second process by the command of the first."""
    command = [sys.executable, "-m", "escnn_attention.training.cli", "fit", "--config", file, "--folder", folder]
    command = [*map(str, command), *map(str, options)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    process = subprocess.run(command, env=environment, cwd=folder.parent, capture_output=True, text=True, timeout=200)
    assert process.returncode == 0, process.stderr


@pytest.mark.sampled(1, of="trainings in two processes")
@pytest.mark.parametrize("command", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_two_processes_match_one(configuration, tmp_path, in_two_processes, command):
    """On the same batches, to rounding errors: shares of a batch give its gradient."""
    one, two = tmp_path / "one", tmp_path / "two"
    # In float64 what differs is the order of additions only, and dropout is off: its masks are each process's own.
    block = {"encoding": "mlp", "attention_dropout": 0.0, "dropout": 0.0}
    changes = {"model__network__init_args__block": block, "trainer__precision": "64-true", "trainer__max_epochs": 2}
    file = configuration(**changes)
    call("fit", file, one)
    several = ["--trainer.devices", 2, "--trainer.strategy", "ddp"]
    if command:
        as_users_do(file, two, *several)
    else:
        in_two_processes(call, "fit", file, two, *several)
    first, second = weights(one), weights(two)
    assert first.keys() == second.keys()
    for name, value in first.items():
        torch.testing.assert_close(second[name], value, rtol=1e-9, atol=1e-11)
    for a, b in zip(rows(one), rows(two), strict=True):
        for name in ("train_loss", "valid_loss"):
            assert float(a[name]) == pytest.approx(float(b[name]), rel=1e-6)
        assert float(a["valid_accuracy"]) == pytest.approx(float(b["valid_accuracy"]))


DATA = ["--data", "escnn_attention.training.Digits"]
QUIET = ["--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("cnn")
    network = models.CNN(1, 10, widths=(8,), convolutions=(1,), features=16)
    data = Digits(batch_size=1000)
    data.setup("fit")
    images, labels = next(iter(data.train_dataloader()))
    optimizer = torch.optim.Adam(network.parameters(), lr=0.05)
    for _ in range(40):
        optimizer.zero_grad()
        Classifier(network).loss(network(images), labels).backward()
        optimizer.step()
    network.save_pretrained(folder)
    return folder


def expected(folder):
    data = Digits(batch_size=1000)
    data.setup("test")
    images, labels = next(iter(data.test_dataloader()))
    with torch.no_grad():
        return (models.from_pretrained(folder)(images).argmax(1) == labels).float().mean().item()


@pytest.mark.slow
def test_a_folder_is_measured(folder):
    found = run_pretrained(["--pretrained", str(folder), *DATA, *QUIET])
    assert found.numbers["accuracy"] == pytest.approx(expected(folder))
    assert found.numbers["accuracy"] > 0.2
    assert (found.data, found.size, found.things) == ("Digits", 600, "images")
    assert run_pretrained(["--pretrained", str(folder), *DATA, "--data.init_args.limit_test", "7", *QUIET]).size == 7


def test_a_name_knows_its_data_and_the_command_prints_the_accuracy(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "_WEIGHTS", tmp_path)
    models.from_pretrained(folder).save_pretrained(tmp_path / "digits")
    recipe = {"data": {"class_path": DATA[1], "init_args": {}}}
    registry.recipe_file("digits").write_text(json.dumps(recipe), encoding="utf-8")
    found = CliRunner().invoke(app, ["test", "--pretrained=digits", *QUIET])
    assert found.exit_code == 0, found.output
    assert f"digits on the test part of Digits: accuracy {100 * expected(folder):.2f} %" in found.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pretrained", "resnet44-cifar10"], "no weights of 'resnet44-cifar10'"),
        (["--pretrained", "hybrid"], "needed one of"),
        (["--pretrained", "./nothing", *DATA], "there is no folder"),
        (["--pretrained", "FOLDER"], "--data: FOLDER does not say"),
        (["--pretrained", "FOLDER", *DATA, "--tas", "fields"], "unrecognized arguments: --tas fields"),
        (["--pretrained", "FOLDER", "--data", "escnn_attention.training.CIFAR10"], "for 1 channels, but CIFAR10 has 3"),
    ],
)
def test_what_cannot_be_measured_is_told(folder, arguments, message):
    with pytest.raises(UserError) as error:
        run_pretrained([str(folder) if a == "FOLDER" else a for a in arguments] + QUIET)
    assert message.replace("FOLDER", str(folder)) in str(error.value)


def test_networks_of_points_have_other_tasks(tmp_path):
    kinds, options = {"scalar": 1, "vector": 1}, {"fields": 2, "num_blocks": 1, "num_heads": 1, "pool": None}
    network = models.PointTransformer(gspaces.trivialOnR3(), kinds, "vector", **options).eval()
    network.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"PointTransformer, .*got classification"):
        run_pretrained(["--pretrained", str(tmp_path), *DATA, *QUIET])
    few = {"num_train": 2, "num_valid": 2, "num_test": 5, "start_frame": 0, "end_frame": 1, "batch_size": 2}
    data = ["--data", "escnn_attention.training.ChargedParticles"]
    data += [text for name, value in few.items() for text in (f"--data.init_args.{name}", str(value))]
    found = run_pretrained(["--pretrained", str(tmp_path), "--task", "point-forecast", *data, *QUIET])
    module, (batch,) = PointForecast(network, step=0.1), _test_batches(ChargedParticles(**few | {"eval_batch_size": 5}))
    with torch.no_grad():
        error = (module(batch) - batch.point_targets[:, -1, 0]).square().mean().item()
    assert found.numbers == {"error": pytest.approx(error), "loss": pytest.approx(error)}
    assert list(found.numbers) == ["error", "loss"]
    assert (found.size, found.things) == (5, "clouds")
    assert f"error {error:.4f}, loss {error:.4f}, 5 clouds" in str(found)


def test_networks_of_fields_have_other_tasks(tmp_path):
    network = models.FieldUNet(gspaces.rot2dOnR2(4), 1, {"vector": 1}, widths=(1,), attention=(1,), num_heads=1).eval()
    network.save_pretrained(tmp_path)
    data = ["--data", "escnn_attention.training.PoissonOnTorus", "--data.init_args.size", "8"]
    data += ["--data.init_args.num_test", "5", "--data.init_args.batch_size", "3"]
    found = run_pretrained(["--pretrained", str(tmp_path), "--task", "fields", *data, *QUIET])
    x, y = _test_batches(PoissonOnTorus(size=8, num_test=5, batch_size=5))[0]
    with torch.no_grad():
        error = ((network(x) - y).square().sum() / y.square().sum()).item()
    assert found.numbers["error"] == pytest.approx(error)
    assert (found.size, found.things) == (5, "fields")
    with pytest.raises(UserError, match=r"FieldUNet, a network of fields, got point-forecast"):
        run_pretrained(["--pretrained", str(tmp_path), "--task", "point-forecast", *data, *QUIET])
    canvas = ["--data", "escnn_attention.training.DigitCanvas", "--data.init_args.num_test", "2"]
    with pytest.raises(UserError, match=r"it is for 2 classes, but DigitCanvas has 11"):
        run_pretrained(["--pretrained", str(tmp_path), "--task", "segmentation", *canvas, *QUIET])


def _test_batches(data):
    data.setup("test")
    return list(data.test_dataloader())


def test_it_is_asked_for_by_its_option_alone():
    assert is_asked_for(["--folder", "a", "--pretrained=b"])
    assert not is_asked_for(["--folder", "pretrained", "--config", "x"])


def test_several_classifications_of_clouds():
    found = run_pretrained(["--pretrained", "point-transformer-constellations", *QUIET, "--data.init_args.num_test=40"])
    assert (found.size, found.things) == (40, "clouds")
    assert found.numbers["exact"] < found.numbers["accuracy"] <= 1  # all four counts, and each by itself
    assert found.numbers["accuracy"] > 0.95
