"""The script that measures published weights."""

import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("typer")

from typer.testing import CliRunner

from examples import published_weights
from tests import samples

DATA = Path(os.environ.get("ESCNN_ATTENTION_DATA", ""))


def run(*arguments):
    return CliRunner().invoke(
        published_weights.app, [str(a) for a in arguments], env={"COLUMNS": "200", "TERM": "dumb"}
    )


@pytest.fixture
def files(tmp_path):
    """Random weights and images."""
    draw = np.random.default_rng(0)
    weights = {"c1.weight": draw.normal(size=(2, 1, 3, 3)), "c7.weight": draw.normal(size=(10, 2, 4, 4, 4))}
    weights |= {f"c{i}.weight": draw.normal(size=(2, 2, 4, 3, 3)) for i in range(2, 7)}
    for i in range(1, 7):
        weights |= {f"bn{i}.{n}": draw.uniform(size=2) for n in ("weight", "bias", "running_mean", "running_var")}
    np.savez(tmp_path / "weights.npz", **weights)
    np.savez(tmp_path / "data.npz", **samples.rotmnist(20, 5, 30))
    return tmp_path


def test_accuracy_is_what_the_network_reaches(files):
    result = run(files / "weights.npz", "--data", files / "data.npz", "--batch-size", 7)
    assert result.exit_code == 0, result.output
    arrays = samples.rotmnist(20, 5, 30)
    pixels = arrays["train_images"] / 255
    x = torch.tensor((arrays["test_images"] / 255 - pixels.mean()) / pixels.std(), dtype=torch.float32)[:, None]
    with torch.no_grad():
        right = (
            published_weights.load(published_weights.read(files / "weights.npz"))(x).argmax(1).numpy()
            == arrays["test_labels"]
        ).sum()
    assert f"accuracy: {right / 30:.2%}, {right} of 30 test images" in result.output
    assert "weights.npz: GroupCNN on C4_on_R2" in result.output
    assert "logits" not in result.output
    result = run(files / "weights.npz", "--data", files / "data.npz", "--limit", 3)
    assert "of 3 test images" in result.output


def test_logits_are_compared_where_the_file_has_them(files):
    weights = published_weights.read(files / "weights.npz")
    x = np.random.default_rng(1).normal(size=(2, 1, 28, 28)).astype(np.float32)
    with torch.no_grad():
        logits = published_weights.load(weights)(torch.from_numpy(x)).numpy()
    np.savez(files / "all.npz", **{f"weight/{n}": a for n, a in weights.items()}, input=x, logits=logits + 0.5)
    result = run(files / "all.npz", "--data", files / "data.npz")
    assert "logits: at most 5.0e-01 from those of the file, for 2 images" in result.output


def test_mistakes_are_messages(files):
    weights = published_weights.read(files / "weights.npz")
    del weights["c3.weight"]
    np.savez(files / "few.npz", **weights)
    (files / "text.npz").write_text("nothing")
    for name, data, message in [
        ("few.npz", "data.npz", "c3.weight: missing"),
        ("text.npz", "data.npz", "not a file of arrays"),
        ("none.npz", "data.npz", "does not exist"),
        ("weights.npz", "weights.npz", "has no array train_images"),
    ]:
        result = run(files / name, "--data", files / data)
        assert result.exit_code == 2
        assert message in " ".join(re.sub(r"[│╭╮╰╯─]", " ", result.output).split()), result.output


@pytest.mark.sampled(4, of="commands of the examples")
@pytest.mark.parametrize("name", ["p4cnn", "alpha_f_p4cnn"])
@pytest.mark.skipif(
    not ((DATA / "authors").is_dir() and (DATA / "rotmnist.npz").exists()),
    reason="ESCNN_ATTENTION_DATA names no folder with authors/ and rotmnist.npz",
)
def test_the_published_weights_reach_what_they_should_on_the_first_images(name):
    result = run(DATA / "authors" / f"{name}.npz", "--data", DATA / "rotmnist.npz", "--limit", 300, "--batch-size", 100)
    assert result.exit_code == 0, result.output
    assert float(re.search(r"accuracy: ([0-9.]+)%", result.output)[1]) > 95
    assert float(re.search(r"at most (\S+) from", result.output)[1]) < 1e-4
