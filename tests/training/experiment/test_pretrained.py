"""Networks in folders are measured by a command."""

import pytest
import torch

pytest.importorskip("jsonargparse")

from typer.testing import CliRunner

from escnn_attention import models
from escnn_attention.models import registry
from escnn_attention.training import Classifier, Digits
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


def test_a_folder_is_measured(folder):
    found = run_pretrained(["--pretrained", str(folder), *DATA, *QUIET])
    assert found.accuracy == pytest.approx(expected(folder))
    assert found.accuracy > 0.2
    assert (found.data, found.images) == ("Digits", 600)


def test_a_name_knows_its_data_and_the_command_prints_the_accuracy(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "_WEIGHTS", tmp_path)
    named = registry._NETWORKS["p4-cnn-rotmnist"]
    monkeypatch.setitem(registry._NETWORKS, "digits", registry._Named(named.make, named.gspace, "Digits"))
    models.from_pretrained(folder).save_pretrained(tmp_path / "digits")
    found = CliRunner().invoke(app, ["test", "--pretrained=digits", *QUIET])
    assert found.exit_code == 0, found.output
    assert f"digits on the test part of Digits: accuracy {100 * expected(folder):.2f} %" in found.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pretrained", "hybrid-rotmnist"], "no weights of 'hybrid-rotmnist'"),
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


def test_a_network_that_is_no_classifier_is_told(tmp_path):
    from escnn import gspaces

    network = models.PointTransformer(gspaces.trivialOnR2(), 2, 1, fields=2, num_blocks=1, num_heads=1)
    network.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="is a PointTransformer, needed a classifier of images"):
        run_pretrained(["--pretrained", str(tmp_path), *DATA, *QUIET])


def test_a_name_has_to_be_given(capsys):
    for arguments in (["--pretrained"], ["--pretrained="]):
        with pytest.raises((SystemExit, UserError)):
            run_pretrained(arguments)


def test_it_is_asked_for_by_its_option_alone():
    assert is_asked_for(["--folder", "a", "--pretrained=b"])
    assert not is_asked_for(["--folder", "pretrained", "--config", "x"])
