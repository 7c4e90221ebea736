import multiprocessing
import os
import threading
import time

import pytest

from escnn_attention.training.locking import locked


def test_one_at_a_time(tmp_path):
    inside, most, entered = 0, 0, 0

    def work():
        nonlocal inside, most, entered
        for _ in range(20):
            with locked(tmp_path / "file"):
                inside += 1
                most = max(most, inside)
                entered += 1
                time.sleep(0.0005)
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (most, entered) == (1, 160)
    assert os.listdir(tmp_path) == []


def test_different_files_have_different_locks(tmp_path):
    with locked(tmp_path / "one"), locked(tmp_path / "other"):
        assert set(os.listdir(tmp_path)) == {".one.lock", ".other.lock"}


def test_the_lock_is_free_after_an_error(tmp_path):
    with pytest.raises(RuntimeError), locked(tmp_path / "file"):
        raise RuntimeError
    with locked(tmp_path / "file"):
        pass
    assert os.listdir(tmp_path) == []


def _hold(path, held):
    with locked(path):
        held.set()
        time.sleep(100)


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="a fresh process takes long to start")
def test_a_process_that_is_killed_holds_nothing(tmp_path):
    context = multiprocessing.get_context("fork")
    held, got = context.Event(), threading.Event()
    process = context.Process(target=_hold, args=(tmp_path / "file", held))
    process.start()
    try:
        assert held.wait(10)

        def wait():
            with locked(tmp_path / "file"):
                got.set()

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        assert not got.wait(0.3)
    finally:
        process.kill()
        process.join()
    assert got.wait(10)
    thread.join()
    assert os.listdir(tmp_path) == []
