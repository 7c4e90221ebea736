"""The pages of the API have every public name and module, and every public name has an example that runs."""

import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest

import escnn_attention

ROOT = Path(__file__).parents[1]
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs" / "api").glob("*.rst"))}

PUBLIC = ("", "encodings", "equivariance", "functional", "models", "nn", "plotting", "training", "training.data")
"""Packages whose ``__all__`` is public."""

ROOMS = ("geometry", "groups", "functional", "encodings", "plain", "equivariance", "nn", "models")
"""Rooms of whose modules each is on some page."""

DIRECTIVE = re.compile(r"^\.\. (?P<kind>\w+):: (?P<name>\S+)\n(?P<options>(?:   :.*\n?)*)", re.MULTILINE)


def resolve(dotted: str) -> object:
    """A module, or what is inside one, by its name."""
    parts = dotted.split(".")
    for stop in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:stop]))
        except ModuleNotFoundError:
            continue
        for name in parts[stop:]:
            found = getattr(found, name)
        return found
    raise AssertionError(dotted)


def documented(page: str) -> list[object]:
    """The modules, classes, functions and constants of a page."""
    found, module = [], ""
    for directive in DIRECTIVE.finditer(page):
        kind, name, options = directive.group("kind", "name", "options")
        if kind in ("module", "currentmodule", "automodule"):
            module = name
        if kind == "automodule":
            inside = resolve(name)
            found.append(inside)
            members = re.search(r":members:(.*)", options)
            names = members[1].replace(",", " ").split() if members else []
            excluded = re.findall(r"\w+", (re.search(r":exclude-members:(.*)", options) or ["", ""])[1])
            if members and not names:
                names = [n for n in inside.__all__ if n not in excluded]
            found += [getattr(inside, n) for n in names]
        elif kind.startswith("auto"):
            found.append(resolve(name if "." in name else f"{module}.{name}"))
    return found


def is_described(value: object) -> bool:
    """Whether a value is a class or a function of the package, and no constant or name for a type from elsewhere."""
    described = inspect.isclass(value) or inspect.isfunction(value)
    return described and value.__module__.startswith("escnn_attention")


def has_example(value: object) -> bool:
    """Whether the docstring has code, which runs with the tests of docstrings."""
    return ">>> " in (value.__doc__ or "")


def name_of(value: object) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def public() -> dict[str, object]:
    packages = [importlib.import_module(f"escnn_attention.{name}".rstrip(".")) for name in PUBLIC]
    return {name_of(value): value for p in packages for n in p.__all__ if is_described(value := getattr(p, n))}


@pytest.fixture(scope="module")
def on_pages() -> dict[str, list[object]]:
    return {name: documented(page) for name, page in PAGES.items()}


def test_every_public_name_has_an_example():
    assert not sorted(name for name, value in public().items() if not has_example(value))


def test_everything_on_the_pages_but_the_last_has_an_example(on_pages):
    described = [v for name in set(on_pages) - {"internals"} for v in on_pages[name] if is_described(v)]
    assert len(described) > 100
    assert not sorted({name_of(value) for value in described if not has_example(value)})


def test_every_public_name_is_on_a_page(on_pages):
    there = {id(value) for values in on_pages.values() for value in values}
    assert not sorted(name for name, value in public().items() if id(value) not in there)


def modules() -> list[str]:
    """The modules of the rooms; without the kernels, which only Triton reads."""
    found = pkgutil.walk_packages(escnn_attention.__path__, "escnn_attention.")
    names = [module.name for module in found if not module.ispkg and module.name.split(".")[1] in ROOMS]
    return [name for name in names if ".triton_kernels" not in name]


def missing_modules(pages: dict[str, list[object]]) -> list[str]:
    """Modules of the rooms that no page has, neither themselves nor anything in them."""
    there = {getattr(v, "__module__", None) or getattr(v, "__name__", "") for values in pages.values() for v in values}
    return sorted(set(modules()) - there)


def test_every_module_is_on_a_page(on_pages):
    assert not missing_modules(on_pages)


def test_what_is_missing_is_noticed(on_pages):
    assert missing_modules({**on_pages, "internals": []})

    def without_example():
        """Nothing to see."""

    assert not has_example(without_example)
    assert is_described(escnn_attention.functional.attention)
    assert not is_described(escnn_attention.functional.QueryMode)
    assert has_example(escnn_attention.GroupSelfAttention)


def test_pages_are_read_as_sphinx_reads_them():
    page = """
.. currentmodule:: escnn_attention

.. autoclass:: SiLU
   :members: forward

.. automodule:: escnn_attention.geometry.relations
   :members: Offset

.. automodule:: escnn_attention.geometry.points
   :no-members:

.. automodule:: escnn_attention.geometry.cache
   :members:
   :exclude-members: cached, kept
"""
    geometry = escnn_attention.geometry
    expected = [escnn_attention.SiLU, geometry.relations, geometry.relations.Offset, geometry.points, geometry.cache]
    cache = geometry.cache
    expected += [cache.constant_result, cache.constant_tables, cache.shared_geometry]
    assert documented(page) == expected
