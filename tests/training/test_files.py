import errno
import json
import multiprocessing
import os
import re
import threading
import time

import pytest

from escnn_attention.training.errors import UserError
from escnn_attention.training.files import atomic_file, keep_aside, locked, locked_folder, write_csv, write_json


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


def test_one_at_a_time(tmp_path):
    inside, most, entered = 0, 0, 0

    def work():
        nonlocal inside, most, entered
        for _ in range(3):
            with locked(tmp_path / "file"):
                inside += 1
                most = max(most, inside)
                entered += 1
                time.sleep(0.0005)
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (most, entered) == (1, 12)


def test_locks_of_other_files_are_free_and_so_are_those_after_errors(tmp_path):
    (tmp_path / ".file.abcd_123.tmp").touch()  # of a killed process
    with pytest.raises(RuntimeError), locked(tmp_path / "one"), locked(tmp_path / "file"):
        raise RuntimeError
    with locked(tmp_path / "file"):
        assert not list(tmp_path.glob("*.tmp"))


def _hold(path, held):
    with locked_folder(path, "choose another"):
        held.set()
        time.sleep(100)


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="a fresh process takes long to start")
def test_a_killed_process_holds_nothing(tmp_path):
    context = multiprocessing.get_context("fork")
    held = context.Event()
    process = context.Process(target=_hold, args=(tmp_path, held))
    process.start()
    try:
        assert held.wait(10)
        with pytest.raises(UserError, match="another process uses"), locked_folder(tmp_path, "choose another", 0.1):
            pass
    finally:
        process.kill()
        process.join()
    with locked_folder(tmp_path, "choose another", 1.0):
        pass
