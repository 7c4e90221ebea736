"""Libraries that came with the package, and which of them a processor takes."""

import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Annotated, NamedTuple

import pytest
import torch
from torch import Tensor

from escnn_attention.functional.native import build as compiled
from escnn_attention.functional.native import shipped
from escnn_attention.functional.native.arguments import Array, Kernel, Structure

ROOT = Path(__file__).parents[3]
CMAKE = (ROOT / "CMakeLists.txt").read_text(encoding="utf-8")


@pytest.fixture
def make(compiler, tmp_path, monkeypatch):
    """Puts libraries where those of a wheel are; each says which it is."""
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)

    def make(*capabilities, source='extern "C" int which() { return WHICH; }'):
        for capability in capabilities:
            which = f"-DWHICH={shipped.CAPABILITIES.index(capability)}"
            out = tmp_path / f"seven-float-{capability}.so"
            command = [*compiler, "-shared", "-fPIC", which, "-x", "c++", "-", "-o", str(out)]
            subprocess.run(command, input=source, text=True, check=True)

    return make


def has(monkeypatch, capability):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)


def taken():
    library = shipped.shipped_library("seven-float")
    return library and shipped.CAPABILITIES[library.which()]


def test_the_best_that_the_processor_has_is_taken(make, monkeypatch):
    make(*shipped.CAPABILITIES)
    for capability in shipped.CAPABILITIES:
        has(monkeypatch, capability)
        assert taken() == capability
    has(monkeypatch, "SVE256")  # of another kind
    assert taken() == "DEFAULT"


def test_none_is_taken_that_the_processor_lacks(make, monkeypatch):
    make("AVX2")
    has(monkeypatch, "AVX512")
    assert taken() == "AVX2"
    has(monkeypatch, "DEFAULT")
    assert taken() is None
    assert shipped.shipped_library("eight-float") is None


def test_one_that_cannot_be_loaded_is_passed_over(make, monkeypatch, tmp_path, caplog):
    make("DEFAULT")
    (tmp_path / "seven-float-AVX2.so").write_text("no library")
    has(monkeypatch, "AVX512")
    with caplog.at_level("INFO"):
        assert taken() == "DEFAULT"
    assert "seven-float-AVX2.so came with the package and cannot be loaded" in caplog.text


class Nothing(NamedTuple):
    """No arguments."""


class One(NamedTuple):
    """One result."""

    y: Annotated[Tensor, Array("1")]


LOOP = (
    Structure(Nothing, One).header()
    + 'extern "C" int escnn_attention(const Arguments* a) { *(float*)a->y = 7 + WHICH; return 0; }'
)


def test_a_loop_that_came_with_the_package_needs_no_compiler(make, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "/nonexistent")
    monkeypatch.setenv("ESCNN_ATTENTION_CACHE", str(tmp_path / "cache"))
    has(monkeypatch, "AVX2")
    kernel = Kernel(tmp_path / "seven.cpp", "counting", Nothing, One)
    assert "No such file" in kernel.why_not_built(torch.float32) or "does not run" in kernel.why_not_built(
        torch.float32
    )
    make("DEFAULT", "AVX2", source=LOOP)
    kernel = Kernel(tmp_path / "seven.cpp", "counting", Nothing, One)
    assert kernel.why_not_built(torch.float32) is None
    y = torch.zeros(1)
    kernel.run(torch.float32, Nothing(), One(y))
    assert y.item() == 8
    assert not (tmp_path / "cache").exists()


def test_wheels_have_all_loops_compiled_as_on_first_use():
    options = re.search(r"set\(OPTIONS (.*)\)", CMAKE)[1].split()
    # The rest of them CMake has its own words for. What is linked into packages is compiled with these.
    assert {*options, "-std=c++17", "-fPIC", "-pthread"} == set(compiled._OPTIONS)
    sources = re.search(r"foreach\(source (.*)\)", CMAKE)[1].split()
    assert sorted(sources) == sorted(path.stem for path in compiled.FOLDER.glob("*.cpp"))
    assert set(re.findall(r"set\(INSTRUCTIONS_(\w+)", CMAKE)) == set(shipped.CAPABILITIES)


def test_what_wheels_are_checked_by_runs_here(compiler, monkeypatch):
    """But for its first assertion, as a checkout compiles its loops where they are needed."""
    driver = runpy.run_path(str(Path(__file__).parent / "drivers" / "wheel.py"))["CHECK"]
    came, rest = re.split(r"^assert shipped.*\n", driver, maxsplit=1, flags=re.M)
    monkeypatch.setattr(sys, "argv", ["check", torch.backends.cpu.get_cpu_capability()])
    exec(came + rest, {})
