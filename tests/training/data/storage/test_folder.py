from pathlib import Path

import pytest

from escnn_attention.training.data.storage.folder import data_folder, default_folder
from escnn_attention.training.errors import UserError


def test_the_environment_names_the_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("ESCNN_ATTENTION_DATA", str(tmp_path))
    assert default_folder() == data_folder(None, "x", "--x") == tmp_path
    monkeypatch.setenv("ESCNN_ATTENTION_DATA", str(tmp_path / "none"))
    with pytest.raises(UserError, match=r"none does not exist: give one that holds x\.npz with --where .*ESCNN"):
        data_folder(None, "x.npz", "--where")


@pytest.mark.parametrize("value", [None, ""])
def test_the_cache_is_made(monkeypatch, tmp_path, value):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("ESCNN_ATTENTION_DATA", raising=False)
    if value is not None:
        monkeypatch.setenv("ESCNN_ATTENTION_DATA", value)
    assert not (tmp_path / "cache").exists()
    assert data_folder(None, "x", "--x") == tmp_path / "cache" / "escnn-attention"
    assert (tmp_path / "cache" / "escnn-attention").is_dir()


def test_a_cache_that_cannot_be_made(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.delenv("ESCNN_ATTENTION_DATA", raising=False)
    with pytest.raises(UserError, match=r"cannot make the data folder .*--x"):
        data_folder(None, "x", "--x")


def test_the_home_folder_is_found(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "data").mkdir()
    assert data_folder(Path("~/data"), "x", "--x") == tmp_path / "data"
    monkeypatch.setenv("ESCNN_ATTENTION_DATA", "~/data")
    assert data_folder(None, "x", "--x") == tmp_path / "data"


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="does not exist"):
        data_folder(tmp_path / "file", "x", "--x")
