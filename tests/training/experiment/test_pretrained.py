"""Networks in folders are measured by a command."""

import json

import pytest
import torch
from escnn import gspaces
from typer.testing import CliRunner

from escnn_attention import models
from escnn_attention.models import registry
from escnn_attention.training import ChargedParticles, Classifier, Digits, PointForecast, PoissonOnTorus
from escnn_attention.training.cli import app
from escnn_attention.training.errors import UserError
from escnn_attention.training.experiment.pretrained import is_asked_for, run_pretrained

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
