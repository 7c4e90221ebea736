import errno
import json
import os

import pytest

from escnn_attention.training.comparison.run_folder import open_run
from escnn_attention.training.errors import UserError

CONFIGURATION = {"data": "digits", "images": "a1", "epochs": 3, "limit-train": None}


@pytest.fixture
def folder(tmp_path):
    """A run with ``CONFIGURATION``."""
    path = tmp_path / "runs" / "one"
    with open_run(path, CONFIGURATION, restart=False) as moved:
        assert moved is None
        (path / "cnn").mkdir()
    return path


def test_the_same_run_goes_on(folder):
    with open_run(folder, CONFIGURATION, restart=False) as moved:
        assert moved is None
        assert (folder / "cnn").exists()
    assert json.loads((folder / "configuration.json").read_text()) == CONFIGURATION


def test_other_options_are_named(folder):
    other = CONFIGURATION | {"epochs": 4, "limit-train": 10, "images": "b2"}
    with pytest.raises(UserError) as caught, open_run(folder, other, restart=False):
        pass
    message = str(caught.value)
    assert "--epochs (3 there, 4 now), --limit-train (none there, 10 now). " in message
    assert "--restart" in message
    assert "--output" in message
    assert "images" not in message


def test_other_images_are_named(folder):
    other = CONFIGURATION | {"images": "b2"}
    with pytest.raises(UserError, match="the images themselves"), open_run(folder, other, restart=False):
        pass


def test_restart_moves_aside_and_deletes_nothing(folder):
    other = CONFIGURATION | {"epochs": 4}
    for number in (1, 2):
        with open_run(folder, other, restart=True) as moved:
            assert moved == folder.with_name(f"one.old-{number}")
            assert not (folder / "cnn").exists()
            (folder / "cnn").mkdir()
        assert (moved / "cnn").exists()
        assert (moved / "configuration.json").exists()
    assert json.loads((folder / "configuration.json").read_text()) == other


def test_foreign_files_are_left_alone(tmp_path):
    (tmp_path / "thesis.tex").touch()
    for restart in (False, True):
        with pytest.raises(UserError, match="no comparison"), open_run(tmp_path, CONFIGURATION, restart=restart):
            pass
    assert (tmp_path / "thesis.tex").exists()


def test_one_process_at_a_time(folder):
    with (
        open_run(folder, CONFIGURATION, restart=False),
        pytest.raises(UserError, match="another process"),
        open_run(folder, CONFIGURATION, restart=False),
    ):
        pass


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="not a folder"), open_run(tmp_path / "file", CONFIGURATION, restart=False):
        pass


@pytest.mark.parametrize(("output", "message"), [("file/x", "file/x: Not a directory"), (300 * "x", "name too long")])
def test_folders_that_cannot_be(tmp_path, output, message):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=message), open_run(tmp_path / output, CONFIGURATION, restart=False):
        pass


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_what_cannot_be_written_is_named(folder, code):
    with (
        pytest.raises(UserError, match=rf"^results\.json: {os.strerror(code)}$"),
        open_run(folder, CONFIGURATION, restart=False),
    ):
        raise OSError(code, os.strerror(code), "results.json")


def test_what_a_killed_process_left_is_removed(folder):
    (folder / "figures").mkdir()
    stale = [folder / f"{place}.abcd_123.tmp" for place in (".results.csv", "figures/.a.png", "cnn/.result.json")]
    other = folder / "cnn" / ".last.ckpt.abcd_123.tmp"  # which fit may be writing
    for path in [*stale, other]:
        path.touch()
    with open_run(folder, CONFIGURATION, restart=False):
        assert not any(path.exists() for path in stale)
        assert other.exists()


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may write everywhere")
def test_folder_that_cannot_be_written(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="Permission denied"), open_run(tmp_path / "x", CONFIGURATION, restart=False):
        pass


def test_damaged_configuration(folder):
    (folder / "configuration.json").write_text("{")
    with pytest.raises(UserError, match="damaged"), open_run(folder, CONFIGURATION, restart=False):
        pass
