"""What was measured is kept, and what results say of the software that they come from."""

import json
import shutil
import subprocess

import pytest

import escnn_attention
from escnn_attention.training.experiment import run_experiment
from escnn_attention.training.experiment.result import _commit, versions
from tests.training.experiment.runs import SHORT, call


@pytest.mark.slow
def test_results_of_other_measurements_are_kept(configuration, fitted, tmp_path, capsys):
    folder = tmp_path / "run"
    file = configuration(**SHORT)
    fitted(file, folder)
    call("test", file, folder)
    call("predict", file, folder)
    full, predictions = (folder / "test.json").read_bytes(), (folder / "predictions.csv").read_bytes()
    call("test", file, folder)
    call("predict", file, folder)
    assert not list(folder.glob("*.old*"))  # the same again takes its place
    for command in ("test", "predict"):
        call(command, file, folder, "--data.init_args.limit_test", 7)
    assert (folder / "test.old-1.json").read_bytes() == full
    assert (folder / "predictions.old-1.csv").read_bytes() == predictions
    assert len((folder / "predictions.csv").read_text(encoding="utf-8").splitlines()) == 8
    assert "test.json was of another run: it is kept as test.old-1.json" in capsys.readouterr().err
    (folder / "test.json").write_text("my notes", encoding="utf-8")
    call("test", file, folder)
    assert (folder / "test.old-2.json").read_text(encoding="utf-8") == "my notes"


@pytest.mark.slow
def test_a_damaged_last_checkpoint_does_not_keep_the_best_one_from_being_measured(
    configuration, fitted, tmp_path, capsys
):
    folder, whole = tmp_path / "run", tmp_path / "whole"
    for path in (folder, whole):
        fitted(configuration(**SHORT), path)
    content = bytearray((folder / "last.ckpt").read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "last.ckpt").write_bytes(content)
    for path in (folder, whole):
        run_experiment(["test", "--folder", str(path)])
    found, expected = (json.loads((path / "test.json").read_text(encoding="utf-8")) for path in (folder, whole))
    assert {**found, "tested": None} == {**expected, "tested": None}
    said = capsys.readouterr().err
    assert "last.ckpt: it is damaged" in said
    assert "The curve in test.json ends with the epoch that was measured" in said


def test_versions_are_of_what_is_imported(monkeypatch):
    monkeypatch.setattr(escnn_attention, "__version__", "9.8.7")
    found = versions()
    assert found["escnn-attention"] == "9.8.7"
    assert found["torch"].partition(".")[0].isdigit()
    assert "not installed" not in "".join(found[name] for name in ("escnn", "torch", "lightning"))


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_of_a_checkout(tmp_path, monkeypatch):
    checkout, name = tmp_path / "checkout", ["-c", "user.name=a", "-c", "user.email=a@b"]
    (checkout / "site-packages" / "escnn_attention").mkdir(parents=True)
    (checkout / "escnn_attention").mkdir()
    file = checkout / "escnn_attention" / "__init__.py"
    file.write_text("1\n", encoding="utf-8")
    for command in (["init", "-q"], ["add", "escnn_attention"], [*name, "commit", "-q", "-m", "one"]):
        subprocess.run(["git", "-C", str(checkout), *command], check=True)
    clean = _commit(checkout)
    head = subprocess.run(
        ["git", "-C", str(checkout), "rev-parse", "HEAD"], check=True, capture_output=True, text=True
    ).stdout
    assert clean is not None
    assert head.startswith(clean)
    file.write_text("2\n", encoding="utf-8")
    assert _commit(checkout) == f"{clean}-dirty"
    # Installed inside a repository is not a file of it.
    assert _commit(checkout / "site-packages") is None
    monkeypatch.setattr(escnn_attention, "__file__", str(file))
    assert versions()["commit"] == f"{clean}-dirty"
    installed = checkout / "site-packages" / "escnn_attention" / "__init__.py"
    monkeypatch.setattr(escnn_attention, "__file__", str(installed))
    assert "commit" not in versions()


def test_a_checkout_without_git(tmp_path, monkeypatch):
    (tmp_path / ".git").mkdir()
    assert _commit(tmp_path) is None  # no repository
    monkeypatch.setenv("PATH", str(tmp_path))
    assert _commit(tmp_path) is None  # no git
