"""The rules of the house, read off the sources: how long files and functions are, and what may import what."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# From the lowest to the highest: a room imports from itself and from those before it.
ROOMS = ("_checks", "_export", "_precision", "_escnn", "geometry", "groups", "functional", "encodings", "plain")
ROOMS += ("equivariance", "nn", "models", "plotting", "training")

LINES_OF_A_FILE = 400
LINES_OF_A_FUNCTION = 60
ARGUMENTS = 10
LOOSE_MODULES = 4


@dataclass(frozen=True)
class House:
    """A package and the folder of its tests."""

    package: Path
    tests: Path

    @cached_property
    def trees(self) -> dict[str, ast.Module]:
        """Every module by its path within the package."""
        return {self.name(path): ast.parse(path.read_text()) for path in sorted(self.package.rglob("*.py"))}

    def name(self, path: Path) -> str:
        return path.relative_to(self.package).as_posix()

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        """What each module imports, wherever in it, as paths within the package."""
        return {
            name: {path for dotted in _imported(tree) if (path := self.path_of(dotted)) and path != name}
            for name, tree in self.trees.items()
        }

    def path_of(self, dotted: str) -> str | None:
        """The module of a dotted name, which may go on with what is inside; None outside the package."""
        first, *parts = dotted.split(".")
        if first != self.package.name:
            return None
        for stop in range(len(parts), -1, -1):
            stem = "/".join(parts[:stop])
            for path in (f"{stem}.py", f"{stem}/__init__.py".lstrip("/")):
                if path in self.trees:
                    return path
        return None


def _imported(tree: ast.Module) -> Iterator[str]:
    """The dotted names of all imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room_of(path: str) -> str:
    """The folder of a module in the package; of a loose one its own name, and of the package itself none."""
    first, *rest = path.split("/")
    return first if rest else first.removesuffix(".py").replace("__init__", "")


def short_files(house: House) -> Iterator[str]:
    """No file is longer than 400 lines, Python and C++ alike."""
    for path in sorted(house.package.rglob("*")):
        if path.suffix in (".py", ".cpp", ".h") and len(path.read_text().splitlines()) > LINES_OF_A_FILE:
            yield house.name(path)


def short_functions(house: House) -> Iterator[str]:
    """No function is longer than 60 lines, its docstring and decorators left out."""
    for path, name, function in _functions(house):
        lines = function.end_lineno - function.lineno + 1
        first = function.body[0]
        if ast.get_docstring(function, clean=False) is not None:
            lines -= first.end_lineno - first.lineno + 1
        if lines > LINES_OF_A_FUNCTION:
            yield f"{path} {name}"


def few_arguments(house: House) -> Iterator[str]:
    """Only constructors of public classes and Triton kernels take more than ten arguments besides ``self``, ``cls``."""
    for path, name, function in _functions(house):
        given = function.args
        names = [a.arg for a in (*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs, given.kwarg) if a]
        number = len(names) - (names[:1] in (["self"], ["cls"]))
        kernel = any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)
        constructor = function.name == "__init__" and not name.split(".")[-2].startswith("_")
        if number > ARGUMENTS and not constructor and not kernel:
            yield f"{path} {name}"


def _functions(house: House) -> Iterator[tuple[str, str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """All functions and methods with the path of their module and their qualified name."""

    def walk(node: ast.AST, within: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
        for child in ast.iter_child_nodes(node):
            named = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
            name = f"{within}{child.name}" if named else within
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield name, child
            yield from walk(child, f"{name}." if named else within)

    for path, tree in house.trees.items():
        yield from ((path, name, function) for name, function in walk(tree, ""))


def downward_imports(house: House) -> Iterator[str]:
    """A room imports from itself and from lower ones only."""
    for path, imported in house.imports.items():
        room = room_of(path)
        for other in sorted(imported):
            if room_of(other) != room and _height(room_of(other)) >= _height(room):
                yield f"{path} -> {other}"


def _height(room: str) -> float:
    """The place of a room in the order. The package itself gathers what the rooms up to ``nn`` have for its users."""
    if not room:
        return ROOMS.index("nn") + 0.5
    return ROOMS.index(room) if room in ROOMS else len(ROOMS)


_POINTING = "The same|Same|And|Or|But|As above|Of|Its|Their|Those|These|That|This|It|They|With|Without|Likewise|So|Such"
_POINTING_WORDS = re.compile(rf"({_POINTING}|Here|By|See)\b")
_MARKUP = re.compile(r":\w+:`[^`]*`|``.*?``|[^\w\s]")
_WORDS_OF_A_DOCSTRING = 2


def standing_docstrings(house: House) -> Iterator[str]:
    """A docstring names its subject: it points at no other for it, and is more than a shape."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path, tree in house.trees.items():
        for node in ast.walk(tree):
            docstring = ast.get_docstring(node) if isinstance(node, documented) else None
            if docstring is None:
                continue
            summary = docstring.split("\n\n")[0]
            few = len(_MARKUP.sub(" ", summary).split()) < _WORDS_OF_A_DOCSTRING and not isinstance(node, ast.Module)
            if _POINTING_WORDS.match(summary) or few:
                yield f"{path} {getattr(node, 'name', 'itself')}"


def known_rooms(house: House) -> Iterator[str]:
    """Every room has its place in the order."""
    yield from sorted({room_of(path) for path in house.trees} - {"", *ROOMS})


def no_cycles(house: House) -> Iterator[str]:
    """No module imports itself by way of others."""
    for start in house.imports:
        seen, waiting = set(), [start]
        while waiting:
            for path in house.imports[waiting.pop()] - seen:
                seen.add(path)
                waiting.append(path)
        if start in seen:
            yield start


def private_modules(house: House) -> Iterator[str]:
    """A module with a leading underscore is imported in its own folder only; those at the top are for all."""
    for path, imported in house.imports.items():
        for other in sorted(imported):
            *folder, name = other.split("/")
            if name.startswith("_") and name != "__init__.py" and folder and path.split("/")[:-1] != folder:
                yield f"{path} -> {other}"


def escnn_modules(house: House) -> Iterator[str]:
    """Nothing below ``nn`` imports ``escnn.nn``, but for ``_escnn`` and ``equivariance``."""
    for path, tree in house.trees.items():
        below = room_of(path) in ROOMS[: ROOMS.index("nn")] and room_of(path) not in ("_escnn", "equivariance")
        if below and any(name == "escnn.nn" or name.startswith("escnn.nn.") for name in _imported(tree)):
            yield path


def mirrored_tests(house: House) -> Iterator[str]:
    """A test file in the folder of a room is named after a file there."""
    of_files = {f"{'/'.join([*folder, 'test_'])}{name.lstrip('_')}" for *folder, name in map(_parts, house.trees)}
    for path in sorted(house.tests.rglob("test_*.py")):
        name = path.relative_to(house.tests).as_posix()
        if "/" in name and name.split("/")[0] in ROOMS and name not in of_files:
            yield name


def _parts(path: str) -> list[str]:
    return path.split("/")


def few_loose_modules(house: House) -> Iterator[str]:
    """At the top of the package lie at most four modules besides ``__init__``."""
    loose = sorted(path for path in house.trees if "/" not in path and path != "__init__.py")
    if len(loose) > LOOSE_MODULES:
        yield " ".join(loose)


RULES: dict[str, Callable[[House], Iterator[str]]] = {
    rule.__name__: rule
    for rule in (
        short_files,
        short_functions,
        few_arguments,
        standing_docstrings,
        known_rooms,
        downward_imports,
        no_cycles,
        private_modules,
        escnn_modules,
        mirrored_tests,
        few_loose_modules,
    )
}


# Exported networks need these, and no escnn.
WITHOUT_ESCNN = ("_checks", "_export", "_precision", "geometry", "functional", "encodings", "plain")

IMPORT_ALL = """
import importlib
for name in {}:
    try:
        importlib.import_module(name)
    except ImportError as error:
        print(name, error)
"""


@pytest.fixture(scope="module")
def house() -> House:
    return House(ROOT / "escnn_attention", ROOT / "tests")


@pytest.mark.parametrize("rule", RULES)
def test_the_package_keeps(house, rule):
    broken = sorted(f"{rule}: {what}" for what in RULES[rule](house))
    assert not broken, "\n".join([RULES[rule].__doc__, *broken])


def test_what_exported_networks_need_imports_no_escnn(house, without_escnn):
    """Whole rooms, and random transformations of samples; layers themselves do need it."""
    paths = [path for path in house.trees if room_of(path) in WITHOUT_ESCNN and "triton_kernels" not in path]
    paths += ["groups/__init__.py", "groups/random_transformation.py", "nn/activations.py"]
    names = [
        f"escnn_attention/{path}".removesuffix("/__init__.py").removesuffix(".py").replace("/", ".") for path in paths
    ]
    failed = [line.split()[0] for line in without_escnn.run(IMPORT_ALL.format(names)).splitlines()]
    assert failed == ["escnn_attention.nn.activations"]


def function(lines: int, docstring: str = "") -> str:
    return "def f(x):\n" + docstring + (lines - 1) * "    x += 1\n"


def method(name: str, arguments: int, decorator: str = "@cached") -> str:
    names = ", ".join(f"a{i}" for i in range(arguments))
    return f"class A:\n    {decorator}\n    def {name}(self, {names}):\n        pass\n"


def imports(*names: str) -> str:
    return "".join(f"from escnn_attention.{name} import x\n" for name in names)


# A rule, the files of a package that breaks it, and those of one that just does not.
CONTROLS = [
    ("short_files", {"nn/a.py": 401 * "x = 0\n"}, {"nn/a.py": 400 * "x = 0\n"}),
    ("short_files", {"nn/a.cpp": 401 * ";\n"}, {"nn/a.cpp": 400 * ";\n"}),
    ("short_files", {"nn/a.h": 401 * ";\n"}, {"nn/a.txt": 401 * ";\n"}),
    ("short_functions", {"nn/a.py": function(61)}, {"nn/a.py": function(60, '    """One.\n\n    Two."""\n')}),
    ("short_functions", {"nn/a.py": "class A:\n    async " + function(61).replace("\n", "\n    ")}, {}),
    ("few_arguments", {"nn/a.py": method("f", 11)}, {"nn/a.py": method("f", 10)}),
    ("few_arguments", {"nn/a.py": method("f", 11)}, {"nn/a.py": method("f", 11, "@triton.jit")}),
    ("few_arguments", {"nn/a.py": method("__call__", 11)}, {"nn/a.py": method("__init__", 11)}),
    ("few_arguments", {"nn/a.py": method("__init__", 11).replace("A", "_A")}, {}),
    ("few_arguments", {"nn/a.py": "def f(a, b, c, d, e, f, g, h, i, *j, **k): ...\n"}, {}),
    (
        "standing_docstrings",
        {"nn/a.py": function(1, '    """The same for points."""\n')},
        {"nn/a.py": function(1, '    """The output for points."""\n')},
    ),
    (
        "standing_docstrings",
        {"nn/a.py": function(1, '    """``(B, C)``."""\n')},
        {"nn/a.py": function(1, '    """The output, ``(B, C)``."""\n')},
    ),
    ("standing_docstrings", {"nn/a.py": 'class A:\n    """See :func:`f`."""\n'}, {"nn/a.py": '"""Digits."""\n'}),
    ("known_rooms", {"cellar/a.py": ""}, {"nn/a.py": "", "__init__.py": ""}),
    (
        "downward_imports",
        {"plain/a.py": imports("nn.b"), "nn/b.py": ""},
        {"plain/a.py": "", "nn/b.py": imports("plain.a")},
    ),
    ("downward_imports", {"nn/a.py": imports("b"), "b.py": ""}, {"nn/a.py": imports("_checks"), "_checks.py": ""}),
    (
        "downward_imports",
        {"nn/a.py": "import escnn_attention", "__init__.py": ""},
        {"models/a.py": "import escnn_attention", "__init__.py": imports("nn.a"), "nn/a.py": ""},
    ),
    ("downward_imports", {"__init__.py": imports("models.a"), "models/a.py": ""}, {}),
    (
        "downward_imports",
        {"plain/a.py": "def f():\n    from escnn_attention import nn\n", "nn/__init__.py": "", "__init__.py": ""},
        {"nn/a.py": "def f():\n    from escnn_attention import plain\n", "plain/__init__.py": "", "__init__.py": ""},
    ),
    (
        "no_cycles",
        {"nn/a.py": imports("nn.b"), "nn/b.py": imports("nn.c"), "nn/c.py": imports("nn.a")},
        {"nn/a.py": imports("nn.b", "nn.c"), "nn/b.py": imports("nn.c"), "nn/c.py": ""},
    ),
    (
        "private_modules",
        {"models/a.py": imports("nn._b"), "nn/_b.py": ""},
        {"nn/a.py": imports("nn._b", "_checks", "_escnn.c"), "nn/_b.py": "", "_checks.py": "", "_escnn/c.py": ""},
    ),
    ("private_modules", {"nn/a.py": imports("nn.deep._b"), "nn/deep/_b.py": ""}, {}),
    ("escnn_modules", {"plain/a.py": "from escnn import nn"}, {"nn/a.py": "from escnn import nn"}),
    ("escnn_modules", {"groups/a.py": "from escnn.nn import X"}, {"groups/a.py": "from escnn.group import X"}),
    ("escnn_modules", {"groups/a.py": "import escnn.nn.modules"}, {"_escnn/types.py": "import escnn.nn"}),
    ("mirrored_tests", {"../tests/nn/test_a.py": "", "nn/b.py": ""}, {"../tests/nn/test_a.py": "", "nn/_a.py": ""}),
    ("few_loose_modules", {f"{x}.py": "" for x in "abcde"}, {f"{x}.py": "" for x in ("__init__", *"abcd")}),
]


def built(folder: Path, files: dict[str, str]) -> House:
    made = House(folder / "escnn_attention", folder / "tests")
    for name, text in files.items():
        path = made.package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return made


@pytest.mark.parametrize(("rule", "broken", "kept"), CONTROLS)
def test_a_house_that_breaks_a_rule_is_caught(tmp_path, rule, broken, kept):
    assert list(RULES[rule](built(tmp_path / "broken", {"nn/__init__.py": "", **broken})))
    assert not list(RULES[rule](built(tmp_path / "kept", {"nn/__init__.py": "", **kept})))


def test_every_rule_has_a_control():
    assert {rule for rule, _, _ in CONTROLS} == set(RULES)
