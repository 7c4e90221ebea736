"""Libraries that are built where they are needed."""

import ctypes
import importlib
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Annotated, NamedTuple

import pytest
import torch
from torch import Tensor

from escnn_attention.functional.native import build as compiled
from escnn_attention.functional.native.arguments import Array, Kernel, Structure
from escnn_attention.geometry.windows import Window
from tests.functional.cases import assert_same, case, outputs_and_gradients


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "seven.cpp"
    path.write_text('extern "C" int number() { return NUMBER; }\n')
    return path


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ESCNN_ATTENTION_CACHE", str(tmp_path / "cache"))
    compiled.library.cache_clear()
    compiled.archive.cache_clear()
    compiled._warn_once.cache_clear()
    return tmp_path / "cache"


def test_builds_once_and_again_where_the_source_or_a_macro_is_another(source, cache, compiler, monkeypatch):
    assert compiled.library(source, "NUMBER=7").number() == 7
    assert compiled.library(source, "NUMBER=8").number() == 8
    assert len(list(cache.iterdir())) == 2
    compiled.library.cache_clear()
    monkeypatch.setattr(compiled.LibraryFolder, "_keep", lambda *_: pytest.fail("built again"))
    assert compiled.library(source, "NUMBER=7").number() == 7
    monkeypatch.undo()
    os.environ["ESCNN_ATTENTION_CACHE"] = str(cache)
    try:
        source.write_text('extern "C" int number() { return 2 * NUMBER; }\n')
        compiled.library.cache_clear()
        assert compiled.library(source, "NUMBER=7").number() == 14
    finally:
        del os.environ["ESCNN_ATTENTION_CACHE"]


def test_a_static_library_is_built_once_and_can_be_linked(source, cache, compiler, tmp_path, monkeypatch):
    (tmp_path / "headers").mkdir()
    (tmp_path / "headers" / "one.h").write_text("#define ONE 1\n")
    source.write_text('#include <one.h>\nextern "C" int number() { return NUMBER + ONE; }\n')
    content = compiled.archive(source, "NUMBER=7", include=(str(tmp_path / "headers"),))
    (tmp_path / "libseven.a").write_bytes(content)
    (tmp_path / "user.cpp").write_text('extern "C" int number();\nextern "C" int user() { return number(); }\n')
    command = [*compiler, "-shared", "-fPIC", str(tmp_path / "user.cpp"), "-o", str(tmp_path / "user.so")]
    subprocess.run([*command, "-lseven", f"-L{tmp_path}"], check=True)
    assert ctypes.CDLL(str(tmp_path / "user.so")).user() == 8
    compiled.archive.cache_clear()
    monkeypatch.setattr(compiled.LibraryFolder, "_keep", lambda *_: pytest.fail("built again"))
    assert compiled.archive(source, "NUMBER=7", include=(str(tmp_path / "headers"),)) == content


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


def a_file(folder: Path) -> None:
    folder.write_text("a file where the folder would be")


def open_to_all(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)


def linked_to_one_that_is_open_to_all(folder: Path) -> None:
    open_to_all(folder.with_name("elsewhere"))
    folder.symlink_to("elsewhere")


@pytest.mark.parametrize("other", [a_file, open_to_all, linked_to_one_that_is_open_to_all])
def test_a_folder_that_libraries_are_not_kept_in(source, cache, compiler, caplog, other):
    """They are built all the same, for this process, and a warning says so once."""
    other(cache)
    assert compiled.library(source, "NUMBER=9").number() == 9
    assert compiled.library(source, "NUMBER=8").number() == 8
    assert not cache.is_dir() or not list(cache.iterdir())
    (warning,) = (record for record in caplog.records if "compiling" not in record.getMessage())
    assert "libraries are built for this process only" in warning.getMessage()
    assert str(cache) in warning.getMessage()


def test_a_compilation_is_said_where_one_waits_for_it(source, cache, compiler, caplog):
    compiled.library(source, "NUMBER=7")
    compiled.library.cache_clear()
    compiled.library(source, "NUMBER=7")  # is kept
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"compiling {source.name} with " in record.getMessage()


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


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    return str(path)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ("'g++", r"CXX: got \"'g\+\+\", needed a command"),
        ("''", "does not run"),
        ("/", "/ does not run"),
        ("/nonexistent", "/nonexistent does not run"),
        ("\udce9", "does not run"),  # a byte that is no UTF-8
        ("true", "seven.cpp could not be built"),  # and makes nothing
        ("false", "false failed"),
    ],
)
def test_strange_compilers(source, cache, monkeypatch, given, complaint):
    monkeypatch.setenv("CXX", given)
    with pytest.raises(compiled.NotBuilt, match=complaint):
        compiled.library(source, "NUMBER=7")
    assert not cache.exists() or not list(cache.iterdir())


@pytest.mark.parametrize("given", ["", "  "])
def test_no_compiler_is_chosen(compiler, monkeypatch, given):
    monkeypatch.delenv("CXX", raising=False)
    expected = compiled.find_compiler()
    monkeypatch.setenv("CXX", given)
    assert compiled.find_compiler() == expected


def test_what_is_said_in_other_encodings(source, cache, compiler, tmp_path, monkeypatch):
    """Of a compiler with options that is not in English, and has files of its own where it was told to."""
    works = script(tmp_path / "cöm piler", f"printf 'gr\\374n\\n'; : > $TMPDIR/left; exec {' '.join(compiler)} \"$@\"")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("CXX", f"'{works}' -O0")
    assert compiled.library(source, "NUMBER=7").number() == 7
    fails = script(tmp_path / "fails", "printf 'ung\\374ltig' >&2; exit 1")
    monkeypatch.setenv("CXX", fails)
    with pytest.raises(compiled.NotBuilt, match="failed: ung\N{REPLACEMENT CHARACTER}ltig"):
        compiled.library(source, "NUMBER=8")
    assert [path.suffix for path in cache.iterdir()] == [".so"]


def test_a_compiler_that_hangs_is_given_up_on_with_all_that_it_started(source, cache, tmp_path, monkeypatch):
    # It knows what it is, and hangs when it is to compile, with a pipe open at the other end.
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    end = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    hangs = script(tmp_path / "hangs", f'case "$*" in *-dM*) exit;; esac; exec 9> {pipe}; sleep 60 & wait')
    monkeypatch.setenv("CXX", hangs)
    monkeypatch.setattr(compiled, "_PATIENCE_S", 0.5)
    with pytest.raises(compiled.NotBuilt, match=r"hangs was given up on after 0.5 s"):
        compiled.library(source, "NUMBER=7")
    assert not list(cache.iterdir())
    for left in range(100, -1, -1):
        try:
            assert os.read(end, 1) == b""  # nobody has it open
            break
        except BlockingIOError:
            assert left
            time.sleep(0.05)
    os.close(end)


def test_a_compiler_that_hangs_at_once_is_asked_once(source, cache, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", script(tmp_path / "hangs", f"echo >> {tmp_path}/asked; exec sleep 60"))
    monkeypatch.setattr(compiled, "_PATIENCE_S", 0.5)
    with pytest.raises(compiled.NotBuilt, match="given up on"):
        compiled.library(source)
    assert (tmp_path / "asked").read_text() == "\n"


def test_a_compiler_that_is_killed(source, cache, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", script(tmp_path / "killed", 'case "$*" in *-dM*) exit;; esac; kill -9 $$'))
    with pytest.raises(compiled.NotBuilt, match=f"killed was killed by signal {int(signal.SIGKILL)}"):
        compiled.library(source)
    assert not list(cache.iterdir())


@pytest.mark.parametrize("header", ["more.h", "folder/more.h"])
def test_headers_beside_the_source_count(source, cache, compiler, header):
    source.write_text(f'#include "{header}"\nextern "C" int number() {{ return MORE; }}\n')
    path = source.parent / header
    path.parent.mkdir(exist_ok=True)
    for more in (3, 4):
        path.write_text(f"#define MORE {more}\n")
        compiled.library.cache_clear()
        assert compiled.library(source).number() == more


class Counting(NamedTuple):
    """Arguments of a loop that counts."""

    x: Annotated[Tensor | None, Array("n")]
    n: Annotated[int, "how many"]
    fails: Annotated[int, "what is given back"]
    times: Annotated[float, "a factor"]


class Counted(NamedTuple):
    """Its results."""

    y: Annotated[Tensor, Array("n")]


class More(NamedTuple):
    """One more member."""

    y: Annotated[Tensor, Array("n")]
    z: Annotated[Tensor, Array("n")]


class Fewer(NamedTuple):
    """One member less."""


@pytest.fixture
def counting(source):
    """A loop whose arguments are those fields."""
    source.with_name("arguments.h").write_text(Structure(Counting, Counted).header())
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
    kernel = Kernel(counting, "counting", Counting, Counted)
    for dtype in (torch.float32, torch.float64):
        assert kernel.why_not_built(dtype) is None
        x, y = torch.randn(5, dtype=dtype), torch.zeros(5, dtype=dtype)
        kernel.run(dtype, Counting(x, 4, 0, 2.0), Counted(y))
        assert torch.equal(y, torch.cat([2 * x[:4], torch.zeros(1, dtype=dtype)]))
        kernel.run(dtype, Counting(None, 5, 0, 3.0), Counted(y))
        assert torch.equal(y, torch.full_like(y, 3))
        with pytest.raises(RuntimeError, match="can't allocate memory for counting"):
            kernel.run(dtype, Counting(x, 0, 1, 0.0), Counted(y))


@pytest.mark.parametrize(("wrong", "needed"), [(Fewer, 40), (More, 56)])
def test_a_library_of_other_arguments_is_an_error_that_names_both_sizes(counting, cache, compiler, wrong, needed):
    kernel = Kernel(counting, "counting", Counting, wrong)
    with pytest.raises(RuntimeError, match=rf"seven.cpp: .*48 bytes, needed {needed}"):
        kernel.why_not_built(torch.float32)


def test_a_kernel_that_is_not_built_says_so_once(source, cache, compiler, caplog):
    source.write_text("this is no C++\n")
    kernel = Kernel(source, "counting", Counting, Counted)
    for dtype in (torch.float32, torch.float64, torch.float32):
        assert "failed" in kernel.why_not_built(dtype)
    others = [record for record in caplog.records if "compiling" not in record.getMessage()]
    assert [record.levelname for record in others] == ["WARNING"]
    assert "counting takes several times longer on the CPU" in caplog.text


def _same(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)


def grids(tests):
    for query in ("own", "all"):
        for window, kind in ((Window(5), "spatial"), (Window(), "waves")):
            arguments = (*case(5, 5, 5, (6, 11), window, {kind, "pose"}, channels=7), query)
            assert_same(*(outputs_and_gradients(backend, *arguments) for backend in ("native", "reference")))


def points(tests):
    for sum_query_poses in (False, True):
        call = tests.case((17, 5), (2, 3), sum_query_poses=sum_query_poses, channels=7, functions=6)
        _same(tests.outcomes(tests.attend, call), tests.outcomes(tests.written_out, call))


def pairs(tests):
    tensors = tests.draw(first=9, second=7)
    _same(*(tests.outcomes(f, tensors) for f in (tests.natively, tests.written_out)))


def maps(tests):
    case = tests.Case(images=2, number=70, fields=7, groups=2, copies=(2, 9, 4))
    _same(case.natively(), case.written_out())


@pytest.mark.sampled(1, of="loops that are compiled anew")  # each takes ten seconds
@pytest.mark.parametrize("instructions", ["-mno-avx512f", "-mno-avx"])
@pytest.mark.parametrize(
    ("module", "check"),
    [("grid.native", grids), ("points.native", points), ("points.pair_mlp", pairs), ("irreps", maps)],
)
def test_narrower_vectors(monkeypatch, tmp_path, compiler, module, check, instructions):
    """What a processor without them gets."""
    if not {"avx2", "avx512f"} <= set(re.findall(r"\w+", _cpu_flags())):
        pytest.skip("this processor has no wider ones")
    loop = importlib.import_module(f"escnn_attention.functional.{module}")
    *folders, name = module.split(".")
    tests = importlib.import_module(".".join(["tests.functional", *folders, f"test_{name}"]))
    monkeypatch.setenv("CXX", f"{' '.join(compiler)} {instructions}")
    monkeypatch.setenv("ESCNN_ATTENTION_CACHE", str(tmp_path))
    library = compiled.library.__wrapped__(loop.KERNEL.source, "NUMBER=double")
    monkeypatch.setattr(loop.KERNEL, "_found", {torch.float64: library.escnn_attention})
    check(tests)


def _cpu_flags() -> str:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return ""
