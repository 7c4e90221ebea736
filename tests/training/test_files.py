import errno
import json
import os
import re

import pytest

from escnn_attention.training.files import atomic_file, keep_aside, write_csv, write_json


def test_the_old_file_stays_when_writing_fails(tmp_path):
    path = tmp_path / "table.txt"
    path.write_text("old")

    def fail():
        with atomic_file(path, "w") as file:
            file.write("half of the n")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_new_file_has_the_mode_of_any_other(tmp_path):
    write_json(tmp_path / "a.json", {"ü": [1, None]})
    (tmp_path / "b").touch()
    assert (tmp_path / "a.json").stat().st_mode == (tmp_path / "b").stat().st_mode
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8")) == {"ü": [1, None]}


def test_nan_is_not_json(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "a.json", float("nan"))
    assert os.listdir(tmp_path) == []


def test_csv_has_a_header(tmp_path):
    write_csv(tmp_path / "a.csv", [{"x": 1, "y": None}, {"x": 2, "y": "b,c"}])
    assert (tmp_path / "a.csv").read_text() == 'x,y\n1,\n2,"b,c"\n'


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EFBIG])
def test_a_file_that_cannot_be_written_is_named(tmp_path, code):
    path = tmp_path / "a.json"
    path.write_text("old")
    with pytest.raises(OSError, match=re.escape(str(path))) as caught, atomic_file(path, "w"):
        raise OSError(code, os.strerror(code))
    assert (caught.value.errno, caught.value.filename) == (code, str(path))
    assert path.read_text() == "old"
    missing = tmp_path / "missing" / "a.json"
    with pytest.raises(FileNotFoundError) as caught, atomic_file(missing):
        pass
    assert caught.value.filename == str(missing)
    # What has gone wrong elsewhere is left as it is.
    with pytest.raises(ConnectionResetError, match="by peer"), atomic_file(path):
        raise ConnectionResetError(errno.ECONNRESET, "by peer")


def test_files_are_kept_aside(tmp_path):
    path = tmp_path / "a.json"
    for number in (1, 2):
        path.write_text(str(number))
        assert keep_aside(path) == tmp_path / f"a.old-{number}.json"
        assert not path.exists()
    assert (tmp_path / "a.old-1.json").read_text() == "1"
