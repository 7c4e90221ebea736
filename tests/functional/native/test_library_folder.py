"""Folders of libraries, of which nothing is loaded that another user, or an accident, has put there."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from escnn_attention.functional.native.library_folder import LibraryFolder


@pytest.fixture(scope="module")
def libraries(compiler, tmp_path_factory) -> dict[int, Path]:
    """Libraries with a number each."""
    folder, found = tmp_path_factory.mktemp("libraries"), {}
    for number in (7, 666):
        source = folder / "number.cpp"
        source.write_text(f'extern "C" int number() {{ return {number}; }}\n')
        found[number] = folder / f"{number}.so"
        subprocess.run([*compiler, "-shared", "-fPIC", str(source), "-o", str(found[number])], check=True)
    return found


@pytest.fixture
def number(libraries, tmp_path):
    """The number that is loaded from a folder, and how often it is built for that."""
    built = []

    def build(path: Path) -> None:
        built.append(path)
        shutil.copy(libraries[7], path)

    def ask(folder: Path = tmp_path / "folder", stem: str = "number") -> tuple[int, int]:
        with LibraryFolder(folder) as opened:
            return opened.load(stem, build).number(), len(built)

    return ask


@pytest.fixture
def kept(number, tmp_path) -> Path:
    """The file of a library that was kept."""
    assert number() == (7, 1)
    assert number() == (7, 1)
    (path,) = (tmp_path / "folder").iterdir()
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert path.stat().st_mode & 0o777 == 0o700
    return path


def replaced(path: Path, content: bytes) -> None:
    """Another file of that name: what is loaded already stays as it is."""
    path.unlink()
    path.write_bytes(content)
    path.chmod(0o700)


def truncated(path: Path, foreign: Path) -> None:
    replaced(path, path.read_bytes()[:1000])


def emptied(path: Path, foreign: Path) -> None:
    replaced(path, b"")


def flipped(path: Path, foreign: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    replaced(path, bytes(content))


def planted(path: Path, foreign: Path) -> None:
    replaced(path, foreign.read_bytes())


def linked(path: Path, foreign: Path) -> None:
    path.unlink()
    path.symlink_to(foreign)


def linked_to_the_same(path: Path, foreign: Path) -> None:
    moved = foreign.with_name("moved.so")
    shutil.move(path, moved)
    path.symlink_to(moved)


def open_to_all(path: Path, foreign: Path) -> None:
    path.chmod(0o777)


def a_pipe(path: Path, foreign: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    "spoil", [truncated, emptied, flipped, planted, linked, linked_to_the_same, open_to_all, a_pipe]
)
def test_what_is_not_whole_is_built_again(number, kept, libraries, spoil):
    spoil(kept, libraries[666])
    assert number() == (7, 2)
    assert number() == (7, 2)
    assert [path.name for path in kept.parent.iterdir()] == [kept.name]
    assert kept.is_file()
    assert not kept.is_symlink()


def test_a_library_of_another_name_is_another(number, kept):
    assert number(stem="num") == (7, 2)
    assert number() == (7, 2)


def test_a_planted_library_would_run(kept, libraries):
    """By its name alone it is taken for the one that was there."""
    planted(kept, libraries[666])
    assert ctypes.CDLL(str(kept)).number() == 666


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_a_folder_that_others_can_write_to(number, kept, mode):
    kept.parent.chmod(mode)
    with pytest.raises(PermissionError, match=rf"others can write to it \(mode {mode:o}\); needed .* \(chmod go-w\)"):
        number()
    kept.parent.chmod(0o755)  # reading is for all
    assert number() == (7, 1)


def test_a_folder_of_another_user(number, kept, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: os.stat(kept).st_uid + 1)
    with pytest.raises(PermissionError, match=f"it belongs to user {os.stat(kept).st_uid}"):
        number()


def test_what_is_loaded_is_what_was_checked(number, kept, libraries, monkeypatch):
    """Whoever can rename a folder above puts another one in its place right after the check."""
    if not Path("/proc/self/fd").exists():
        pytest.skip("the folder that was opened has no path here")
    find = LibraryFolder._find

    def checked(self, stem):
        name = find(self, stem)
        kept.parent.rename(kept.parent.with_name("away"))
        kept.parent.mkdir()
        shutil.copy(libraries[666], kept)
        return name

    monkeypatch.setattr(LibraryFolder, "_find", checked)
    assert number() == (7, 1)


def test_libraries_of_several_folders_are_told_apart(number, libraries, tmp_path):
    """Their paths are the same while the folders are open."""

    def build(path: Path) -> None:
        shutil.copy(libraries[666], path)

    assert number()[0] == 7
    with LibraryFolder(tmp_path / "other") as folder:
        assert folder.load("number", build).number() == 666


def test_a_failed_build_leaves_nothing(number, tmp_path):
    def fail(path: Path) -> None:
        path.write_text("half of it")
        raise ValueError("broken")

    with LibraryFolder(tmp_path / "folder") as folder, pytest.raises(ValueError, match="broken"):
        folder.load("number", fail)
    with LibraryFolder(tmp_path / "folder") as folder, pytest.raises(OSError, match="number-"):
        folder.load("number", lambda path: path.write_text("no library"))
    assert not list((tmp_path / "folder").iterdir())


def test_what_a_killed_process_left_goes_with_the_next_build(number, tmp_path):
    def build(path: Path) -> None:
        path.write_text("half of it")
        os.kill(os.getpid(), signal.SIGKILL)

    if not (pid := os.fork()):
        try:
            LibraryFolder(tmp_path / "folder").load("number", build)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert [path.name[:9] for path in (tmp_path / "folder").iterdir()] == ["building-"]
    assert number() == (7, 1)
    assert [path.suffix for path in (tmp_path / "folder").iterdir()] == [".so"]


def test_two_at_once_build_one(libraries, tmp_path):
    """The second waits, and does not take the work of the first for what was left behind."""
    first_builds, second_came, built, found = threading.Event(), threading.Event(), [], []

    def build(path: Path) -> None:
        first_builds.set()
        second_came.wait(30)
        built.append(path)
        shutil.copy(libraries[7], path)

    def ask() -> None:
        with LibraryFolder(tmp_path / "folder") as folder:
            found.append(folder.load("number", build).number())

    threads = [threading.Thread(target=ask) for _ in range(2)]
    threads[0].start()
    assert first_builds.wait(30)
    threads[1].start()
    threading.Timer(0.3, second_came.set).start()
    for thread in threads:
        thread.join(60)
    assert (found, len(built)) == ([7, 7], 1)


def test_one_that_takes_too_long_is_not_waited_for(number, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[LibraryFolder.__module__], "_PATIENCE_S", 0.2)
    with LibraryFolder(tmp_path / "folder") as other, other._alone() as alone:
        assert alone
        left = tmp_path / "folder" / "building-elsewhere"
        left.mkdir()
        assert number() == (7, 1)
        assert left.exists()  # which may be at work
