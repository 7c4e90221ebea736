"""Libraries that are built where they are needed."""

import ctypes
import os
import stat
import sys

import pytest
import torch

from escnn_attention.functional.native import build as compiled
from escnn_attention.functional.native.fields import Field, Fields


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
        return compiled.find_compiler()
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


@pytest.mark.parametrize("header", ["more.h", "folder/more.h"])
def test_headers_beside_the_source_count(source, cache, compiler, header):
    source.write_text(f'#include "{header}"\nextern "C" int number() {{ return MORE; }}\n')
    path = source.parent / header
    path.parent.mkdir(exist_ok=True)
    for more in (3, 4):
        path.write_text(f"#define MORE {more}\n")
        compiled.library.cache_clear()
        assert compiled.library(source).number() == more


COUNTING = Fields(
    "Sizes: n numbers.",
    Field("x", "const void*", "(n)", optional=True),
    Field("y", "void*", "(n)"),
    Field("n", "int64_t", "how many"),
    Field("fails", "int64_t", "what is given back"),
    Field("times", "double", "a factor"),
)


@pytest.fixture
def counting(source):
    """A loop whose arguments are those fields."""
    source.with_name("arguments.h").write_text(COUNTING.header())
    source.write_text(
        '#include "arguments.h"\n'
        'extern "C" int escnn_attention(const Arguments* a) {\n'
        "    const NUMBER* x = static_cast<const NUMBER*>(a->x);\n"
        "    for (int64_t i = 0; i < a->n; i++) static_cast<NUMBER*>(a->y)[i] = x ? a->times * x[i] : a->times;\n"
        "    return int(a->fails);\n"
        "}\n"
    )
    return source


def test_a_kernel_gets_its_arguments_in_order(counting, cache, compiler):
    kernel = compiled.Kernel(counting, "counting", COUNTING)
    for dtype in (torch.float32, torch.float64):
        assert kernel.why_not_built(dtype) is None
        x, y = torch.randn(5, dtype=dtype), torch.zeros(5, dtype=dtype)
        kernel.run(dtype, {"n": 4, "fails": 0, "times": 2.0, "x": x, "y": y})
        assert torch.equal(y, torch.cat([2 * x[:4], torch.zeros(1, dtype=dtype)]))
        kernel.run(dtype, {"n": 5, "fails": 0, "times": 3.0, "x": None, "y": y})
        assert torch.equal(y, torch.full_like(y, 3))
        with pytest.raises(RuntimeError, match="can't allocate memory for counting"):
            kernel.run(dtype, {"n": 0, "fails": 1, "times": 0.0, "x": x, "y": y})


def test_a_kernel_gets_each_field_and_no_other(counting, cache, compiler):
    kernel, x = compiled.Kernel(counting, "counting", COUNTING), torch.zeros(1)
    values = {"x": x, "y": x, "n": 1, "fails": 0, "times": 1.0}
    for change, complaint in (
        ({"times": ...}, "got no times"),
        ({"x": ...}, "got no x"),  # may be None, but only in so many words
        ({"x": ..., "n": ...}, "got no n, x"),
        ({"xs": x}, "got unknown xs"),
        ({"times": ..., "tines": 1.0}, "got no times and unknown tines"),
        ({"y": None}, "got None for y"),
        ({"n": None, "x": None}, "got None for n"),
    ):
        wrong = {name: value for name, value in (values | change).items() if value is not ...}
        with pytest.raises(TypeError, match=rf"seven.cpp: {complaint}, needed its fields, each once"):
            kernel.run(torch.float32, wrong)
    kernel.run(torch.float32, values)


@pytest.mark.parametrize("wrong", [COUNTING.fields[1:], (*COUNTING.fields, Field("more", "double", "of it"))])
def test_a_library_of_other_arguments_is_an_error_that_names_both_sizes(counting, cache, compiler, wrong):
    kernel = compiled.Kernel(counting, "counting", Fields("", *wrong))
    with pytest.raises(RuntimeError, match=f"seven.cpp: got .* arguments have 40 bytes, needed {8 * len(wrong)}"):
        kernel.why_not_built(torch.float32)


def test_a_kernel_that_is_not_built_says_so_once(source, cache, compiler, caplog):
    source.write_text("this is no C++\n")
    kernel = compiled.Kernel(source, "counting", COUNTING)
    for dtype in (torch.float32, torch.float64, torch.float32):
        assert "failed" in kernel.why_not_built(dtype)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "counting takes several times longer on the CPU" in caplog.text
