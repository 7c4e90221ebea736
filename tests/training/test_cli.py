import json

import pytest
import torch
from typer.testing import CliRunner

import escnn_attention
from escnn_attention.training.cli import app

TINY = ["--networks", "cnn", "--group", "c4", "--epochs", "1", "--parameters", "600"]
TINY += ["--limit-train", "50", "--limit-test", "20", "--batch-size", "25", "--accelerator", "cpu"]


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("_TYPER_FORCE_DISABLE_TERMINAL", "1")  # no colours in the middle of words, on CI either

    def invoke(*arguments):
        return CliRunner().invoke(app, ["compare", *map(str, arguments)], prog_name="escnn-attention")

    return invoke


@pytest.mark.slow
def test_table_and_files(run, tmp_path):
    output = tmp_path / "run"
    result = run(*TINY, "--output", output)
    assert result.exit_code == 0, result.output
    stored = json.loads((output / "results.json").read_text(encoding="utf-8"))
    for network in stored["networks"]:
        for value in (network["accuracy_upright"], network["accuracy_rotated"], network["accuracy_any_angle"]):
            assert f"{100 * value:.1f}" in result.output
        assert f"{network['parameters']:,}" in result.output
    for part in (
        "upright",
        "parameters",
        "equiv.",
        "each test image transformed by 90°; 180°; 270°",
    ):
        assert part in result.output
    assert str(output / "results.csv") in result.output
    # Every option is part of the run.
    told = {"data": "digits", "group": "c4", "networks": "cnn", "epochs": 1, "seed": 0, "limit_train": 50}
    assert stored["configuration"].items() >= told.items()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--group", "so3"], "error: unknown group 'so3'"),
        (["--networks", "cnn,mlp"], "error: unknown network mlp"),
        (["--data-dir", "."], "error: --data-dir: the digits ship with scikit-learn"),
        (
            ["--data", "rotmnist", "--data-dir", "no/such/folder"],
            "error: the data folder no/such/folder does not exist",
        ),
        (["--data", "cifar"], "cifar"),
        (["--epochs", "0"], "epochs"),
        (["--limit-test", "0"], "error: Invalid value for '--limit-test'"),
        (["--nonsense", "1"], "error: No such option: --nonsense"),
    ],
)
def test_mistakes_end_in_one_clear_line(run, tmp_path, arguments, message):
    result = run(*TINY, "--output", tmp_path / "run", *arguments)
    assert result.exit_code == 2
    (line,) = result.output.splitlines()
    assert message in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compre"], "error: No such command 'compre'. Did you mean 'compare'? (see escnn-attention --help)"),
        (["--nonsense"], "error: No such option: --nonsense"),
        (["export"], "error: Missing argument 'RUN_OR_NAME' (see escnn-attention export --help)"),
        (["fit", "--nonsense", "--folder", "run"], " (see escnn-attention fit --help)"),
        (["test", "--pretrained"], "error: --pretrained: needed a name or a folder"),
        (["test", "--pretrained", "none", "--nonsense"], " (see escnn-attention test --pretrained none --help)"),
    ],
)
def test_misuse_is_told_in_one_line(run, arguments, message):
    result = CliRunner().invoke(app, arguments, prog_name="escnn-attention")
    assert result.exit_code == 2
    (line,) = result.output.splitlines()
    assert message in line


@pytest.mark.slow
def test_a_comparison_that_diverges_has_a_table(run, tmp_path):
    result = run(*TINY, "--output", tmp_path / "run", "--learning-rate", 1e30)
    assert result.exit_code == 0, result.output
    (network,) = json.loads((tmp_path / "run" / "results.json").read_text(encoding="utf-8"))["networks"]
    assert network["equivariance_error"] is None


def test_threads(run, tmp_path, monkeypatch):
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for given, expected in (("2", 2), (None, 1)):
            monkeypatch.delenv("OMP_NUM_THREADS") if given is None else monkeypatch.setenv("OMP_NUM_THREADS", given)
            run(*TINY, "--group", "none", "--output", tmp_path)
            assert torch.get_num_threads() == expected
        run(*TINY, "--group", "none", "--output", tmp_path, "--threads", 3)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)


def test_without_a_command_help_is_shown():
    assert "compare" in CliRunner().invoke(app, []).output


def test_version():
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output.split() == ["escnn-attention", escnn_attention.__version__]
