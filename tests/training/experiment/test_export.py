"""Trained networks are written to files, and what these say is checked."""

import json

import pytest
import torch
from escnn import gspaces
from escnn.nn import FieldType

pytest.importorskip("jsonargparse")
pytest.importorskip("onnxruntime")

import onnxruntime
from typer.testing import CliRunner

from escnn_attention import LiftingSelfAttention
from escnn_attention.models import EquivariantClassifier
from escnn_attention.training.cli import app
from escnn_attention.training.errors import UserError
from escnn_attention.training.experiment import export
from escnn_attention.training.experiment.export import export_network
from tests.training.experiment.runs import SHORT, files


@pytest.fixture
def folder(configuration, fitted, tmp_path):
    fitted(configuration(**SHORT), tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def small(monkeypatch):
    """A smaller network in place of the one that is loaded: what takes long is to write it down."""
    gspace = gspaces.rot2dOnR2(4)
    image, fields = (FieldType(gspace, [field]) for field in (gspace.trivial_repr, gspace.regular_repr))
    network = EquivariantClassifier({"lifting": LiftingSelfAttention(image, fields, 1, 3)}, 3).eval()
    monkeypatch.setattr(export, "load_network", lambda _: network)
    return network


def test_the_command(folder, small, tmp_path, monkeypatch):
    monkeypatch.setenv("_TYPER_FORCE_DISABLE_TERMINAL", "1")
    images, file = torch.randn(4, 1, 5, 5), tmp_path / "new" / "n.onnx"
    result = CliRunner().invoke(app, ["export", str(folder), str(file), "--size", "5"])
    assert result.exit_code == 0, result.output
    assert "for any number of images 1×5×5" in result.output
    assert "values: as those of the network, to " in result.output
    assert "the file is equivariant: relative error " in result.output
    session = onnxruntime.InferenceSession(str(file))
    (found,) = map(torch.from_numpy, session.run(["logits"], {"images": images.numpy()}))
    with torch.no_grad():
        torch.testing.assert_close(found, small(images), atol=1e-5, rtol=1e-5)
    again = CliRunner().invoke(app, ["export", str(folder), str(file)])
    assert again.exit_code == 2
    assert "is there already: give it another name, or --replace" in " ".join(again.output.split())


def test_a_network_of_the_size_of_its_images(folder, small, tmp_path):
    """The checkpoint says of which data they are."""
    file, images = tmp_path / "n.pt2", torch.randn(2, 1, 28, 28)
    written = export_network(folder / "last.ckpt", file)
    assert written.shape == (1, 28, 28)
    with torch.no_grad():
        torch.testing.assert_close(torch.export.load(file).module()(images), small(images), atol=1e-5, rtol=1e-5)
    assert max(written.error, written.report.relative_error) < 1e-5
    assert written.num_bytes == file.stat().st_size


def test_a_file_that_says_something_else_is_not_written(folder, small, tmp_path, monkeypatch):
    file = tmp_path / "n.pt2"
    file.write_text("mine", encoding="utf-8")
    with pytest.raises(UserError, match=r"n\.pt2 is there already: give it another name, or --replace"):
        export_network(folder, file)
    wrong = {".pt2": lambda content: lambda images: torch.ones(len(images), 3)}
    for readers, why in ((wrong, r"its outputs are off by .* it is not written"), ({}, "cannot be read again")):
        monkeypatch.setattr(export, "_READERS", readers)
        monkeypatch.setattr(export, "_WRITERS", {".pt2": lambda *_: b"content"})
        before = files(tmp_path)
        with pytest.raises(UserError, match=why):
            export_network(folder, file, size=5, replace=True)
        assert files(tmp_path) == before


def test_a_file_that_is_not_equivariant_says_so(folder, small, tmp_path):
    class Broken(type(small)):
        def export(self):
            plain = super().export()

            class Sees(torch.nn.Module):
                def __init__(self):
                    super().__init__()
                    self.plain = plain

                def forward(self, images):
                    return self.plain(images) + images[:, 0, 0, :1]

            return Sees().eval()

    small.__class__ = Broken
    written = export_network(folder, tmp_path / "n.pt2", size=5)
    assert written.error < 1e-5
    assert written.report.relative_error > 1e-2


@pytest.mark.parametrize(
    ("file", "options", "why"),
    [
        ("n.tflite", {}, r"got .*n\.tflite, needed a name that ends in \.onnx or \.pt2"),
        ("n.onnx", {"opset": 11}, r"--opset: got 11, needed one from 18 to \d+"),
        ("n.pt2", {"opset": 20}, r"--opset: got 20 for n\.pt2, which has none"),
        ("folder.pt2", {}, r"folder\.pt2 is a folder"),
        ("n.pt2", {"size": 0}, "--size: got 0, needed a positive number"),
    ],
)
def test_what_cannot_be_written(folder, tmp_path, file, options, why):
    (tmp_path / "folder.pt2").mkdir()
    with pytest.raises(UserError, match=why):
        export_network(folder, tmp_path / file, **options)
    assert not (tmp_path / "n.pt2").exists()


def test_what_is_missing(folder, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="holds no trained network"):
        export_network(tmp_path, tmp_path / "n.pt2")
    monkeypatch.setattr(export, "provenance_of", lambda _: None)
    with pytest.raises(UserError, match=r"--size: .* does not say how large its images are"):
        export_network(folder, tmp_path / "n.pt2")
    monkeypatch.setattr(export, "load_network", lambda _: torch.nn.Linear(2, 2))
    with pytest.raises(UserError, match="Linear is not a network of images"):
        export_network(folder, tmp_path / "n.pt2", size=8)
    monkeypatch.setattr(export, "find_spec", lambda name: None if name == "onnxruntime" else "there")
    with pytest.raises(UserError, match=r"needs onnxruntime: pip install 'escnn-attention\[export\]'"):
        export_network(folder, tmp_path / "n.onnx")


@pytest.mark.parametrize(
    ("description", "size"),
    [
        ({"class_path": "escnn_attention.training.CIFAR10"}, 32),
        ({"class_path": "escnn_attention.training.Springs"}, None),
        ({"class_path": "os.path"}, None),
        ({"class_path": 3}, None),
        (None, None),
    ],
)
def test_the_size_of_images(description, size):
    assert export._size_of_data(json.loads(json.dumps(description))) == size
