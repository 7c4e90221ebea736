"""Every public name is on a page of the API and has an example that runs; Sphinx checks that pages name what exists."""

import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType

import escnn_attention

PUBLIC = ("", "encodings", "equivariance", "functional", "models", "plotting", "training")
"""Packages whose ``__all__`` is public."""


def public() -> dict[str, object]:
    """Public classes and functions of the package, without constants and names for types from elsewhere."""
    packages = [importlib.import_module(f"escnn_attention.{name}".rstrip(".")) for name in PUBLIC]
    values = {name: getattr(package, name) for package in packages for name in package.__all__}
    return {
        name: value
        for name, value in values.items()
        if (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__.startswith("escnn_attention")
    }


def members_of(module: ModuleType) -> set[str]:
    """What Sphinx describes of a module: its ``__all__``, or what is made in it."""
    made_here = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    return {*getattr(module, "__all__", made_here)}


def names_on(pages: str) -> set[str]:
    """What the pages describe: single names, members of modules, and all of a module's ``:members:`` without names."""
    found = set(re.findall(r"auto(?:class|function)::\s+(?:[\w.]*\.)?(\w+)$", pages, re.MULTILINE))
    for module, members in re.findall(r"automodule:: (\S+)\n   :members:(.*)", pages):
        found |= {*members.replace(",", " ").split()} or members_of(importlib.import_module(module))
    return found


def without_example(values: dict[str, object]) -> list[str]:
    return [name for name, value in values.items() if ">>> " not in (value.__doc__ or "")]


def test_every_public_name_has_an_example():
    assert len(public()) > 100
    assert not without_example(public())


def test_every_public_name_is_on_a_page():
    folder = Path(__file__).parents[1] / "docs" / "api"
    pages = [page.read_text(encoding="utf-8") for page in folder.glob("*.rst") if page.stem != "internals"]
    assert not sorted({*public()} - names_on("".join(pages)))


def test_what_is_missing_is_noticed():
    page = ".. autoclass:: SiLU\n   :members: forward\n\n.. automodule:: escnn_attention.geometry.cache\n   :members:\n"
    assert names_on(page) == {"SiLU", *members_of(importlib.import_module("escnn_attention.geometry.cache"))}
    assert {"kept", "cached"} < names_on(page)
    assert "Tensor" not in names_on(page)
    assert without_example({"f": lambda: None, "g": escnn_attention.GroupSelfAttention}) == ["f"]
