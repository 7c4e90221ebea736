"""The fields of compiled loops, and the headers that are made of them."""

from __future__ import annotations

import runpy
import shutil

import pytest

from escnn_attention.functional.native import fields
from escnn_attention.functional.native.build import FOLDER
from escnn_attention.functional.native.fields import FIELDS, Field, Fields


@pytest.mark.parametrize("folder", FIELDS)
def test_headers_are_those_of_the_fields(folder):
    assert (FOLDER / folder / "arguments.h").read_text(encoding="utf-8") == FIELDS[folder].header(), (
        f"run python {fields.__file__}"
    )


def test_every_header_of_arguments_has_its_fields():
    """And no structure is written by hand."""
    sources = [*FOLDER.rglob("*.h"), *FOLDER.rglob("*.cpp")]
    assert sources
    written = {path for path in sources if "struct Arguments {" in path.read_text(encoding="utf-8")}
    assert written == {FOLDER / folder / "arguments.h" for folder in FIELDS}


def test_the_script_writes_the_headers(tmp_path):
    """It needs nothing of the package, and mends what is out of date."""
    script = shutil.copy(fields.__file__, tmp_path)
    for folder in FIELDS:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "arguments.h").write_text("out of date")
    runpy.run_path(script, run_name="__main__")
    for folder, made in FIELDS.items():
        assert (tmp_path / folder / "arguments.h").read_text(encoding="utf-8") == made.header()


@pytest.mark.parametrize("folder", FIELDS)
def test_fields_are_named_once_and_have_a_type_and_a_meaning(folder):
    made = FIELDS[folder]
    assert len(made.names) == len(made.fields)
    for field in made.fields:
        assert field.type in ("const void*", "void*", "const int64_t*", "double*", "int64_t", "double")
        assert field.meaning
        assert field.type.endswith("*") or not field.optional
    assert all(len(line) <= 120 for line in made.header().splitlines())


def test_a_structure_and_its_header():
    made = Fields(
        "Sizes: n numbers.",
        Field("x", "const void*", "(n)", optional=True),
        Field("n", "int64_t", "how many"),
        Field("times", "double", "a factor"),
    )
    assert made.structure().unpack(made.structure().pack(7, -1, 0.5)) == (7, -1, 0.5)
    assert made.structure().format == "@Pqd"
    assert (made.names, made.optional) == ({"x", "n", "times"}, {"x"})
    assert (
        "// Sizes: n numbers.\n"
        'extern "C" struct Arguments {\n'
        "    const void* x;  // (n), or null\n"
        "    int64_t n;  // how many\n"
        "    double times;  // a factor\n"
        "};\n"
    ) in made.header()
