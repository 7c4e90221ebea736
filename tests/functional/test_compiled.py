"""Libraries that are built where they are needed."""

import ctypes
import os
import stat
import sys

import pytest

from escnn_attention.functional import compiled


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "seven.cpp"
    path.write_text('extern "C" int number() { return NUMBER; }\n')
    return path


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ESCNN_ATTENTION_CACHE", str(tmp_path / "cache"))
    compiled.library.cache_clear()
    return tmp_path / "cache"


@pytest.fixture
def compiler():
    try:
        return compiled._compiler()
    except compiled.NotBuilt as reason:
        pytest.skip(str(reason))


def test_builds_once_and_again_where_the_source_or_a_macro_is_another(source, cache, compiler, monkeypatch):
    assert compiled.library(source, "NUMBER=7").number() == 7
    assert compiled.library(source, "NUMBER=8").number() == 8
    assert len(list(cache.iterdir())) == 2
    compiled.library.cache_clear()
    monkeypatch.setattr(compiled.tempfile, "TemporaryDirectory", lambda **_: pytest.fail("built again"))
    assert compiled.library(source, "NUMBER=7").number() == 7
    monkeypatch.undo()
    os.environ["ESCNN_ATTENTION_CACHE"] = str(cache)
    try:
        source.write_text('extern "C" int number() { return 2 * NUMBER; }\n')
        compiled.library.cache_clear()
        assert compiled.library(source, "NUMBER=7").number() == 14
    finally:
        del os.environ["ESCNN_ATTENTION_CACHE"]


def test_what_a_compiler_says_is_in_the_error(source, cache, compiler):
    source.write_text("this is no C++\n")
    with pytest.raises(compiled.NotBuilt, match=r"failed: .*seven.cpp"):
        compiled.library(source)
    assert not list(cache.iterdir())


def test_a_compiler_that_does_not_know_the_processor(source, cache, compiler, monkeypatch):
    monkeypatch.setattr(compiled, "_PROCESSORS", (["-march=nonsense"], []))
    assert compiled.library(source, "NUMBER=7").number() == 7


def test_no_compiler(source, cache, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(compiled.NotBuilt, match=r"there is no C\+\+ compiler: no g\+\+, clang\+\+ or c\+\+"):
        compiled.library(source)
    monkeypatch.setenv("CXX", "a-compiler-that-is-not-there")
    with pytest.raises(compiled.NotBuilt, match="a-compiler-that-is-not-there does not run"):
        compiled.library(source)


@pytest.mark.skipif(sys.platform == "win32", reason="permissions are of another kind there")
def test_a_folder_that_cannot_be_written_to(source, cache, compiler):
    """The library is built all the same, for this process."""
    cache.write_text("a file where the folder would be")
    assert compiled.library(source, "NUMBER=9").number() == 9
    assert cache.read_text() == "a file where the folder would be"


def test_no_home(source, cache, compiler, monkeypatch):
    monkeypatch.delenv("ESCNN_ATTENTION_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def homeless(_):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(compiled.Path, "expanduser", homeless)
    assert compiled.library(source, "NUMBER=7").number() == 7


def test_a_library_that_cannot_be_loaded(source, cache, compiler, monkeypatch):
    def refuse(*_):
        raise OSError("failed to map segment")

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    with pytest.raises(compiled.NotBuilt, match=r"seven.cpp could not be built: failed to map segment"):
        compiled.library(source, "NUMBER=7")


def test_only_its_user_can_write_to_the_folder(source, cache, compiler):
    compiled.library(source, "NUMBER=7")
    assert not cache.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)
