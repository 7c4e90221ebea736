"""What results say of the software that they come from."""

import shutil
import subprocess

import pytest

import escnn_attention
from escnn_attention.training.provenance import _commit, versions


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
