"""Lists of arguments, and the C structures and headers that are made of them."""

from __future__ import annotations

import importlib
import runpy
import struct
from typing import Annotated, NamedTuple

import pytest
import torch
from torch import Tensor

from escnn_attention.functional.native.arguments import LOOPS, Array, Members, Structure
from escnn_attention.functional.native.build import FOLDER

KERNELS = {name: importlib.import_module(f"escnn_attention.functional.{name}").KERNEL for name in LOOPS}


@pytest.mark.parametrize("loop", LOOPS)
def test_headers_are_those_of_the_lists(loop):
    kernel = KERNELS[loop]
    assert kernel.header.read_text(encoding="utf-8") == kernel.structure.header(), (
        "run python -m escnn_attention.functional.native.arguments"
    )


def test_every_header_of_arguments_has_its_list():
    """And no structure is written by hand."""
    sources = [*FOLDER.rglob("*.h"), *FOLDER.rglob("*.cpp")]
    assert sources
    written = {path for path in sources if "struct Arguments {" in path.read_text(encoding="utf-8")}
    assert written == {kernel.header for kernel in KERNELS.values()}


def test_the_script_writes_the_headers(tmp_path, monkeypatch):
    """It mends what is out of date."""
    for loop, kernel in KERNELS.items():
        monkeypatch.setattr(kernel, "header", tmp_path / f"{loop}.h")
        kernel.header.write_text("out of date")
    with pytest.warns(RuntimeWarning, match="found in sys.modules"):
        runpy.run_module("escnn_attention.functional.native.arguments", run_name="__main__")
    for kernel in KERNELS.values():
        assert kernel.header.read_text(encoding="utf-8") == kernel.structure.header()


class Numbers(NamedTuple):
    """Arguments of a loop."""

    x: Annotated[Tensor | None, Array("rows, columns", "any", gradient="double")]
    y: Annotated[Tensor, Array("rows, 2 * more", gradient="void")]
    index: Annotated[Tensor | None, Array("more", element="int64_t")]
    more: Annotated[int, "how many"]
    on: Annotated[bool, "whether"]
    python: bool
    times: Annotated[float, "a factor"]


class Filled(NamedTuple):
    """Results of a loop."""

    out: Annotated[Tensor | None, Array("rows")] = None


def test_a_structure_and_its_header():
    made = Structure(Numbers, Filled)
    assert made.differentiable == ("x", "y")
    assert (
        'extern "C" struct Arguments {\n'
        "    const void* x;  // (rows, columns), any, or null\n"
        "    const void* y;  // (rows, 2 * more)\n"
        "    const int64_t* index;  // (more), or null\n"
        "    void* out;  // (rows), or null\n"
        "    double* grad_x;  // as x, or null\n"
        "    void* grad_y;  // as y, or null\n"
        "    int64_t more;  // how many\n"
        "    int64_t on;  // whether\n"
        "    int64_t rows;\n"
        "    int64_t columns;\n"
        "    int64_t threads;\n"
        "    double times;  // a factor\n"
        "};\n"
    ) in made.header()


def test_members_of_a_structure():
    """Sizes are those of the arrays that are there, and numbers lie as the compiler has them."""
    made = Structure(Numbers, Filled)
    x, y, out, threads = torch.zeros(3, 4), torch.zeros(3, 2), torch.zeros(3), torch.get_num_threads()
    forward = made.members(Numbers(x, y, None, 1, True, False, 0.5), Filled(out))
    assert forward == Members([x, y, None, out, None, None], [1, 1, 3, 4, threads], [0.5])
    backward = made.members(Numbers(None, y, None, 1, False, True, 0.5), Filled(), [None, y])
    assert backward == Members([None, y, None, None, None, y], [1, 0, 3, 0, threads], [0.5])
    numbers = (0, y.data_ptr(), 0, 0, 0, y.data_ptr(), *backward.integers, *backward.numbers)
    assert struct.unpack("@6P5qd", made.packed.pack(*numbers)) == numbers
    assert made.num_bytes == 12 * 8
