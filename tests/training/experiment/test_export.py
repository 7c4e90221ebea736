from __future__ import annotations

import json
import os
from pathlib import Path

import onnxruntime
import pytest
import torch
from escnn import gspaces
from escnn.nn import FieldType, IdentityModule
from typer.testing import CliRunner

from escnn_attention import LiftingSelfAttention, sequence_space
from escnn_attention.exporting import loops
from escnn_attention.models import (
    EquivariantClassifier,
    FieldTransformer,
    FieldUNet,
    HamiltonianNetwork,
    HybridNet,
    LieTransformer,
    PlatonicTransformer,
    PointTransformer,
    from_pretrained,
)
from escnn_attention.training.cli import app
from escnn_attention.training.errors import UserError
from escnn_attention.training.experiment import export
from escnn_attention.training.experiment.export import export_network, size_of_data, subject_of_clouds, subject_of_grids
from tests.packages import NEEDS_LOOPS
from tests.training.experiment.runs import SHORT, files

TOKENS = sequence_space(gspaces.rot2dOnR2(4).fibergroup)


def test_clouds_are_as_large_as_neighbourhoods():
    def spread(**attention):
        network = PointTransformer(gspaces.rot2dOnR2(2), 2, 1, fields=1, num_blocks=1, num_heads=1, attention=attention)
        return [float(coords.std()) for _, coords, *_ in subject_of_clouds(network).trials]

    assert spread(radius=100.0) == pytest.approx([100 * x for x in spread()])
    assert spread(num_neighbours=2) == spread()


@pytest.mark.parametrize(
    ("description", "size"),
    [
        ({"class_path": "escnn_attention.training.CIFAR10"}, 32),
        ({"class_path": "escnn_attention.training.Digits", "init_args": {"batch_size": 4}}, 8),
        ({"class_path": "escnn_attention.training.Digits", "init_args": {"size": 16}}, 16),
        ({"class_path": "escnn_attention.training.PoissonOnTorus"}, 32),
        ({"class_path": "escnn_attention.training.Springs", "init_args": {"size": 16}}, None),
        ({"class_path": "os.path"}, None),
        ({"class_path": 3}, None),
        (None, None),
    ],
)
def test_the_size_of_images(description, size):
    assert size_of_data(json.loads(json.dumps(description))) == size


@pytest.fixture
def folder(configuration, fitted, tmp_path):
    fitted(configuration(**SHORT), tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def as_modules(monkeypatch):
    """Files that hold what is exported as it is: what takes long is to write it down."""
    written = []

    monkeypatch.setattr(export, "_written", lambda _, subject, opset: written.append(subject.plain) or b"content")
    monkeypatch.setattr(export, "_loaded", lambda *_: written[-1])
    return written


@pytest.fixture
def small(monkeypatch):
    """Attention of a few operations in place of the network that is loaded: what takes long is to write them down."""
    gspace = gspaces.rot2dOnR2(4)
    image, fields = (FieldType(gspace, [field]) for field in (gspace.trivial_repr, gspace.regular_repr))
    network = EquivariantClassifier({"lifting": LiftingSelfAttention(image, fields, 1, 3)}, 3).eval()
    monkeypatch.setattr(export, "load_network", lambda _: network)
    return network


@pytest.mark.sampled(1, of="exported files")
def test_the_command(folder, small, tmp_path, monkeypatch):
    monkeypatch.setenv("_TYPER_FORCE_DISABLE_TERMINAL", "1")
    images, file = torch.randn(4, 1, 5, 5), tmp_path / "n.onnx"
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


@pytest.mark.sampled(1, of="exported files")
def test_a_network_of_the_size_of_its_images(folder, small, tmp_path):
    """The checkpoint says of which data they are."""
    file, images = tmp_path / "n.pt2", torch.randn(2, 1, 28, 28)
    written = export_network(folder / "last.ckpt", file)
    assert (written.things, written.inputs) == ("images 1×28×28", ("images",))
    with torch.no_grad():
        torch.testing.assert_close(torch.export.load(file).module()(images), small(images), atol=1e-5, rtol=1e-5)
    assert max(written.error, written.report.relative_error) < 1e-5
    assert written.num_bytes == file.stat().st_size


@pytest.mark.sampled(1, of="networks that a command exports")
@pytest.mark.usefixtures("as_modules")
def test_a_network_by_its_name(tmp_path):
    """Its data say how large its images are; a folder of save_pretrained does not."""
    written = export_network("hybrid-digits", tmp_path / "n.pt2")
    assert (written.things, written.inputs) == ("images 1×16×16", ("images",))
    assert max(written.error, written.report.relative_error) < 1e-4
    from_pretrained("hybrid-digits").save_pretrained(tmp_path / "mine")
    with pytest.raises(UserError, match=r"--size: .*mine does not say"):
        export_network(tmp_path / "mine", tmp_path / "m.pt2")
    assert export_network(tmp_path / "mine", tmp_path / "m.pt2", size=8).things == "images 1×8×8"
    with pytest.raises(UserError, match=r"RUN_OR_NAME: got hybrid-digit, .*hybrid-digits"):
        export_network("hybrid-digit", tmp_path / "d.pt2")


@NEEDS_LOOPS
@pytest.mark.usefixtures("as_modules")
def test_a_network_of_points_by_its_name(tmp_path):
    clouds = export_network("point-transformer-constellations", tmp_path / "c.pt2")
    assert clouds.inputs == ("features", "coords", "batch")


def test_a_file_that_says_something_else_is_not_written(folder, small, tmp_path, monkeypatch):
    file = tmp_path / "n.pt2"
    file.write_text("mine", encoding="utf-8")
    with pytest.raises(UserError, match=r"n\.pt2 is there .*--replace"):
        export_network(folder, file)
    monkeypatch.setattr(export, "_written", lambda *_: b"content")

    def wrong(*_):
        return lambda images: torch.ones(len(images), 3)

    for read, why in ((wrong, "its outputs are off by"), (export._loaded, "cannot be read again")):
        monkeypatch.setattr(export, "_loaded", read)
        before = files(tmp_path)
        with pytest.raises(UserError, match=why):
            export_network(folder, file, size=5, replace=True)
        assert files(tmp_path) == before


@pytest.mark.usefixtures("as_modules")
def test_a_file_that_is_not_equivariant_says_so(folder, small, tmp_path):
    """Its values are those of what was exported, which is at fault."""

    class Broken(type(small)):
        def export(self):
            plain = super().export()
            plain.register_forward_hook(lambda _, inputs, output: output + inputs[0][:, 0, 0, :1])
            return plain

    assert export_network(folder, tmp_path / "whole.pt2", size=5).report.relative_error < 1e-5
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
        ("missing/n.pt2", {}, r"FILE: got .*n\.pt2, but there is no folder .*missing"),
        ("n.pt2", {"size": 0}, "--size: got 0, needed a positive number"),
        ("n.pt2", {"size": (5, 0)}, "--size: got 5×0, needed a positive number, or 2, one for each axis"),
        ("n.pt2", {"size": (5, 5, 5)}, "--size: got 5×5×5, needed a positive number, or 2"),
        ("n.onnx", {"compiled": True}, r"--compiled: got n\.onnx, needed a name that ends in \.pt2"),
    ],
)
def test_what_cannot_be_written(folder, tmp_path, file, options, why):
    (tmp_path / "folder.pt2").mkdir()
    before = os.listdir(tmp_path)
    with pytest.raises(UserError, match=why):
        export_network(folder, tmp_path / file, **options)
    assert os.listdir(tmp_path) == before


@pytest.mark.exhaustive
def test_a_network_that_is_compiled(folder, tmp_path, monkeypatch):
    """The loop of attention is in the package, and what it says is checked."""
    network = HybridNet(gspaces.rot2dOnR2(4), 1, 3, widths=(2, 2), convolutions=(1, 0), attention=(0, 1), num_heads=1)
    monkeypatch.setattr(export, "load_network", lambda _: network.eval())
    file, images = tmp_path / "n.pt2", torch.randn(5, 1, 9, 9)
    written = export_network(folder, file, size=9, compiled=True)
    assert max(written.error, written.report.relative_error) < 1e-5
    with torch.no_grad():
        torch.testing.assert_close(
            torch._inductor.aoti_load_package(str(file))(images), network(images), atol=1e-5, rtol=1e-5
        )
    assert b"packaged_grids_float" in file.read_bytes()


def test_the_command_compiles(folder, small, tmp_path, as_modules, monkeypatch):
    monkeypatch.setattr(export, "why_not_linked", lambda: None)
    result = CliRunner().invoke(app, ["export", str(folder), str(tmp_path / "n.pt2"), "--size", "5", "--compiled"])
    assert result.exit_code == 0, result.output
    assert len(as_modules) == 1
    monkeypatch.setattr(export, "why_not_linked", lambda: "there is no C++ compiler")
    with pytest.raises(UserError, match=r"--compiled: .*C\+\+ compiler"):
        export_network(folder, tmp_path / "m.pt2", size=5, compiled=True)


def test_what_is_missing(folder, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="holds no trained network"):
        export_network(tmp_path, tmp_path / "n.pt2")
    monkeypatch.setattr(export, "provenance_of", lambda _: None)
    with pytest.raises(UserError, match=r"--size: .*does not say"):
        export_network(folder, tmp_path / "n.pt2")
    monkeypatch.setattr(export, "load_network", lambda _: torch.nn.Linear(2, 2))
    with pytest.raises(UserError, match=r"got Linear, needed a classifier .*export\(\)"):
        export_network(folder, tmp_path / "n.pt2", size=8)
    monkeypatch.setattr(export, "find_spec", lambda name: None if name == "onnxruntime" else "there")
    with pytest.raises(UserError, match=r"needs onnxruntime: .*extra export"):
        export_network(folder, tmp_path / "n.onnx")


def unet(**options):
    sizes = {"widths": (2, 2), "convolutions": (1, 0), "attention": (0, 1), "num_heads": 1, "kernel_size": 3}
    fields = {"scalar": 1, "vector": 1}
    return FieldUNet(gspaces.flipRot2dOnR2(4), fields, **{"out_type": fields, **sizes, **options})


def actions(**options):
    """A network on sequences of vectors and scalars."""
    action = FieldType(TOKENS, [TOKENS.irrep(1), TOKENS.trivial_repr])
    return FieldTransformer(action, action, fields=2, num_heads=1, num_decoder_layers=1, **options)


@pytest.mark.sampled(1, of="exported files")
@pytest.mark.parametrize(
    ("make", "suffix", "size"),
    [(unet, ".pt2", "7"), (unet, ".onnx", "7"), (actions, ".pt2", "7"), (unet, ".pt2", "6x9")],
)
def test_networks_from_fields_to_fields(make, suffix, size, tmp_path, monkeypatch):
    monkeypatch.setenv("_TYPER_FORCE_DISABLE_TERMINAL", "1")
    network, file = loaded(make(), monkeypatch), tmp_path / f"n{suffix}"
    result = CliRunner().invoke(app, ["export", "run", str(file), "--size", size])
    assert result.exit_code == 0, result.output
    shape = 3, *([int(n) for n in size.split("x")] if "x" in size else [7] * network.gspace.dimensionality)
    assert f"for any number of fields {'×'.join(map(str, shape))}\n" in result.output
    assert "the file is equivariant: relative error " in result.output
    x = torch.randn(5, *shape)
    with torch.no_grad():
        expected = network(network.in_type(x)).tensor
        if suffix == ".onnx":
            session = onnxruntime.InferenceSession(str(file))
            (found,) = map(torch.from_numpy, session.run(["output"], {"fields": x.numpy()}))
        else:
            found = torch.export.load(file).module()(x)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("as_modules")
def test_fields_that_are_not_equivariant(tmp_path, monkeypatch):
    """One component of a vector is doubled in the file."""
    network = loaded(unet(), monkeypatch)

    class Broken(type(network)):
        def export(self):
            plain = super().export()
            plain.register_forward_hook(lambda _, inputs, output: output * torch.tensor([1.0, 2, 1]).view(3, 1, 1))
            return plain

    written = export_network("run", tmp_path / "whole.pt2", size=(6, 8))
    assert written.report.relative_error < 1e-5
    assert len(written.report.rows) == 4  # half of D4 keeps the sides
    network.__class__ = Broken
    written = export_network("run", tmp_path / "n.pt2", size=6)
    assert written.error < 1e-5
    assert written.report.relative_error > 1e-2


def test_elements_between_those_of_the_grid_are_reported():
    space = gspaces.rot2dOnR2(8)
    subject = subject_of_grids(IdentityModule(FieldType(space, [space.trivial_repr])), (1, 6, 8))
    report = subject.equivariance(lambda x: x, 1e-6)
    assert [row.exact for row in report.rows] == 2 * [True] + 4 * [False]


@pytest.mark.parametrize(
    ("make", "size", "why"),
    [
        (
            lambda: unet(widths=(2, 2, 2), convolutions=(1, 1, 0), attention=(0, 0, 1)),
            3,
            "refuses fields 3×3×3 alone: .*3×3 cannot be halved 2 times",
        ),
        (lambda: unet(out_type=None, features_only=True), 6, r"several levels; use its export\(\)"),
        (lambda: actions(memory_type=FieldType(TOKENS, [TOKENS.trivial_repr])), 6, "memory: .* got None"),
        (lambda: actions(condition=2), 6, "condition: .* got None, needed vectors"),
        (unet, None, "--size: .*does not say how large its fields are"),
    ],
)
@pytest.mark.usefixtures("as_modules")
def test_fields_that_cannot_be_written(make, size, why, tmp_path, monkeypatch):
    loaded(make(), monkeypatch)
    with pytest.raises(UserError, match=why):
        export_network("run", tmp_path / "n.pt2", size=size)
    assert not any(tmp_path.iterdir())


def points(gspace, in_type, out_type, **options):
    return PointTransformer(gspace, in_type, out_type, fields=2, num_blocks=1, num_heads=1, **options)


def loaded(network, monkeypatch):
    """Have a network of points in place of the one that is loaded."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    monkeypatch.setattr(export, "load_network", lambda _: network.eval())
    monkeypatch.setattr(export, "checkpoint_of", lambda source: Path(source))
    monkeypatch.setattr(export, "read_checkpoint", lambda checkpoint: {})
    return network


class Short(torch.nn.Module):
    """What a network of points gives, vectors, in a few operations: what takes long is to write attention down."""

    def forward(self, x, coords, batch, edge_attr):
        return x[:, 1:] * (1 + batch[:, None]) + (coords - coords.mean(0)) * edge_attr.square().mean()


@pytest.mark.sampled(1, of="networks that a command exports")
@NEEDS_LOOPS
def test_the_command_writes_networks_of_points(tmp_path, monkeypatch):
    monkeypatch.setenv("_TYPER_FORCE_DISABLE_TERMINAL", "1")
    fields = {"scalar": 1, "vector": 1}
    attention = {"edge_dim": 1}
    network = loaded(points(gspaces.rot2dOnR2(3), fields, "vector", pool=None, attention=attention), monkeypatch)
    monkeypatch.setattr(type(network), "export", lambda _: Short())
    file = tmp_path / "n.onnx"
    result = CliRunner().invoke(app, ["export", "run", str(file)])
    assert result.exit_code == 0, result.output
    takes = "for any number of points in 2 dimensions with 3 features: features, coords, batch, edge_attr"
    assert takes in " ".join(result.output.split())
    assert "the file is equivariant: relative error " in result.output
    session = onnxruntime.InferenceSession(str(file))
    batch, tables = torch.tensor([0, 0, 1, 1, 1, 2]), torch.randn(3, 4, 4, 1)
    inputs = {"features": torch.randn(6, 3), "coords": torch.randn(6, 2), "batch": batch, "edge_attr": tables}
    (found,) = map(torch.from_numpy, session.run(["output"], {name: t.numpy() for name, t in inputs.items()}))
    torch.testing.assert_close(found, Short()(*inputs.values()), atol=1e-5, rtol=1e-5)
    again = CliRunner().invoke(app, ["export", "run", str(file), "--replace", "--size", "5"])
    assert again.exit_code == 2
    assert "--size: got 5, and PointTransformer is a network of points" in " ".join(again.output.split())


@NEEDS_LOOPS
@pytest.mark.sampled(1, of="exported files")
@pytest.mark.parametrize("kind", ["invariants", "tensors", "LieTransformer", "PlatonicTransformer"])
def test_programs_of_points(kind, tmp_path, monkeypatch):
    on_r3 = gspaces.rot2dOnR3(3)
    makes = {
        "invariants": lambda: points(on_r3, 2, 3, attention={"radius": 1.5}),
        "tensors": lambda: points(on_r3, 2, "symmetric tensor", positions=True),
        "LieTransformer": lambda: LieTransformer(gspaces.rot2dOnR2(4), 2, 3, fields=4, num_blocks=1, num_heads=2),
        "PlatonicTransformer": lambda: PlatonicTransformer(
            on_r3, 2, {"scalar": 1, "vector": 1}, fields=4, num_blocks=1, num_heads=1, pool=None
        ),
    }
    network, file, read = loaded(makes[kind](), monkeypatch), tmp_path / "n.pt2", []
    load = export._loaded
    monkeypatch.setattr(export, "_loaded", lambda *args: read.append((args[-1], load(*args))) or read[-1][-1])
    written = export_network("run", file)
    assert written.inputs == ("features", "coords", "batch")
    assert written.error < 1e-5
    assert written.report.relative_error < 1e-5
    assert len(written.report.rows) == network.gspace.fibergroup.order()
    ((content, run),) = read  # to load it again would take seconds
    assert file.read_bytes() == content
    inputs, batch = (torch.randn(6, 2), torch.randn(6, network.gspace.dimensionality)), torch.tensor([0, 0, 1, 1, 1, 2])
    with torch.no_grad():
        found, expected = run(*inputs, batch), network(*inputs, batch=batch)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@NEEDS_LOOPS
@pytest.mark.usefixtures("as_modules")
def test_points_that_are_not_equivariant(tmp_path, monkeypatch):
    """A file that says where points are; and a network of which there is no file."""
    network = loaded(points(gspaces.rot2dOnR2(3), 2, "vector", pool=None), monkeypatch)

    class Broken(type(network)):
        def export(self):
            plain = super().export()
            plain.register_forward_hook(lambda _, inputs, output: output + inputs[1].abs())
            return plain

    network.__class__ = Broken
    written = export_network("run", tmp_path / "n.pt2")
    assert written.error < 1e-5
    assert written.report.relative_error > 1e-2
    loaded(HamiltonianNetwork(points(gspaces.rot2dOnR2(3), 2, 1)), monkeypatch)
    with pytest.raises(UserError, match=r"run: .*gradients .*network\.potential"):
        export_network("run", tmp_path / "h.pt2")


def test_networks_of_points_where_there_are_no_loops(tmp_path, monkeypatch):
    monkeypatch.setattr(loops, "_OLDEST", "99.0")
    loaded(points(gspaces.rot2dOnR2(3), 2, 3), monkeypatch)
    with pytest.raises(UserError, match=r"run: PointTransformer .*needed 99\.0"):
        export_network("run", tmp_path / "n.pt2")
