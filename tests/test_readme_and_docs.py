"""The README and the site: their code runs, in order, and prints what they say it prints; their commands exist."""

import ast
import contextlib
import importlib.util
import io
import json
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.packages import NEEDS_LOOPS

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [path.relative_to(ROOT).as_posix() for path in PAGES]

FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<body>.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
ERROR = re.compile(r"\d\.\d+e[-+]\d\d")  # as reports print them
SCRIPT = re.compile(r"# (\w+\.py)\n")  # begins code that is a file


def fences(path: Path) -> list[tuple[str, str, int, bool]]:
    """Language, body and line of each fence, and whether only blank lines are between it and the one before."""
    text = path.read_text(encoding="utf-8")
    found, end = [], 0
    for match in FENCE.finditer(text):
        line = text.count("\n", 0, match.start("body")) + 1
        found.append((match["info"].strip(), match["body"], line, not text[end : match.start()].strip()))
        end = match.end()
    assert text.count("```") == 2 * len(found), f"{path.name}: a fence that is not closed, or not at the line's start"
    return found


def programs(path: Path) -> list[tuple[str, int, str]]:
    """The Python of a page, in order: code, line, and the output that is shown right below it."""
    found: list[tuple[str, int, str]] = []
    for language, body, line, follows in fences(path):
        if language == "python":
            found.append((body, line, ""))
        elif language == "text" and follows and found:
            found[-1] = (*found[-1][:2], body)
    return found


def same_output(shown: str, printed: str) -> bool:
    """Whether both are the same but for rounding errors, of which only the size is compared."""
    pairs = list(zip(map(float, ERROR.findall(shown)), map(float, ERROR.findall(printed)), strict=False))
    similar = all(max(a, b) < 1e-6 or a / 2 < b < 2 * a for a, b in pairs)
    lines = [[line.split() for line in ERROR.sub("#", text).splitlines()] for text in (shown, printed)]
    return similar and lines[0] == lines[1]


def runs(name: str) -> Any:
    """A page as a parameter: of those that take seconds some run."""
    marks = []
    if "/pictures/" in name:
        marks.append(pytest.mark.sampled(1, of="pages with pictures"))
    if name.endswith("exporting.md"):
        marks += [pytest.mark.sampled(1, of="exported files"), NEEDS_LOOPS]
    return pytest.param(name, marks=marks)


@pytest.mark.parametrize("name", [runs(name) for name, path in zip(NAMES, PAGES, strict=True) if programs(path)])
def test_code_runs_and_prints_what_is_shown(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    namespace = {"__name__": "__documentation__"}
    for code, line, shown in programs(ROOT / name):
        if SCRIPT.match(code):
            continue
        # Lines as in the page, so that a traceback points there.
        compiled = compile("\n" * (line - 1) + code, str(ROOT / name), "exec")
        with contextlib.redirect_stdout(io.StringIO()) as stdout:
            exec(compiled, namespace)
        printed = stdout.getvalue()
        assert same_output(shown, printed), f"{name}:{line} prints\n{printed}\nand shows\n{shown}"


def run_script(code: str, strategy: str, output: Path) -> None:
    namespace: dict[str, Any] = {"__name__": "train"}
    with output.open("w", encoding="utf-8") as file, contextlib.redirect_stdout(file):
        exec(code, namespace)
        namespace["main"](strategy)


@pytest.mark.sampled(1, of="trainings in two processes")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_script_in_two_processes_ends_at_the_weights_of_one(strategy, tmp_path, fork):
    (code,) = [code for code, *_ in programs(ROOT / "docs" / "scaling.md") if SCRIPT.match(code)]
    (words,) = [words for words in shell_commands("docs/scaling.md") if words[-1] == strategy]
    assert words[0] == "torchrun"
    assert words[-2] == SCRIPT.match(code)[1]
    norms = []
    for size, how in ((1, "ddp"), (2, strategy)):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        outputs = [tmp_path / f"{size}-{rank}" for rank in range(size)]
        ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]
        processes = [
            fork(run_script, code, how, output, **shared, **rank) for output, rank in zip(outputs, ranks, strict=True)
        ]
        for process in processes:
            process.join()
        assert [process.exitcode for process in processes] == size * [0]
        norms.append(float("".join(path.read_text(encoding="utf-8") for path in outputs).rpartition(":")[2]))
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


IMPORT = re.compile(r"^(?: *(?:>>>|\.\.\.) )? *(?:from|import) (escnn(?:_attention)?)\b", re.MULTILINE)
EXAMPLES = [path for path in sorted((ROOT / "examples").rglob("*.py")) if "escnn" in IMPORT.findall(path.read_text())]


def docstring_examples() -> dict[str, str]:
    """Those of the package that import both, by where they are."""
    found = {}
    for path in sorted((ROOT / "escnn_attention").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
            docstring = ast.get_docstring(node) if documented else None
            code = "\n".join(line for line in (docstring or "").splitlines() if ">>>" in line)
            if len(set(IMPORT.findall(code))) == 2:
                found[f"{path.name}:{getattr(node, 'name', '')}"] = code
    return found


def notebook_cells(path: Path) -> list[str]:
    """The code of a notebook, cell by cell."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


@pytest.mark.slow
def test_escnn_is_imported_second():
    """Before it the package, without which escnn cannot be imported where lie_learn cannot."""
    pages = {name: "\n".join(code for code, *_ in programs(ROOT / name)) for name in NAMES}
    notebook = {"tutorial.ipynb": "\n".join(notebook_cells(ROOT / "examples" / "tutorial.ipynb"))}
    files = {path.name: path.read_text(encoding="utf-8") for path in EXAMPLES}
    codes = pages | docstring_examples() | notebook | files
    assert len(codes) > len(pages) + len(EXAMPLES) + 1
    assert set(IMPORT.findall(notebook["tutorial.ipynb"])) == {"escnn", "escnn_attention"}
    assert not [where for where, code in codes.items() if IMPORT.findall(code)[:1] == ["escnn"]]


def test_outputs_that_differ_are_told_apart():
    assert same_output("error 1.0e-15 at 9×9\n", "error 3.2e-16 at  9×9\n")
    assert not same_output("error 1.0e-15\n", "error 1.0e-03\n")
    assert not same_output("exact at 8×8\n", "exact at 9×9\n")
    assert not same_output("", "printed, but not shown\n")


def shell_commands(name: str) -> list[list[str]]:
    bodies = [body.replace("\\\n", " ") for language, body, *_ in fences(ROOT / name) if language == "sh"]
    lines = [line for body in bodies for line in body.splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def loaded(name: str) -> Any:
    """A Python file of the repository that belongs to no package."""
    spec = importlib.util.spec_from_file_location(Path(name).stem, ROOT / name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def known_options(command: str) -> set[str]:
    """Options of ``escnn-attention COMMAND`` up to their first dot, those of Lightning included."""
    typer = pytest.importorskip("typer")
    from escnn_attention.training.cli import app

    options = {option for p in typer.main.get_command(app).commands[command].params for option in p.opts}
    if command in ("fit", "validate", "test", "predict"):
        options |= {
            f"--{name}"
            for name in ("config", "data", "folder", "images", "model", "pretrained", "recipe", "trainer", "trust")
        }
    return options


def unknown(words: list[str]) -> list[str]:
    """The words of a command line that name no file, task, option or extra of this repository."""
    wrong = [word for word in words if word.startswith(("examples/", "tests/", "docs/")) and not (ROOT / word).exists()]
    if words[1:2] == ["bootstrap.py"]:
        wrong += {words[2]} - set(loaded("bootstrap.py").EXTRAS)
        words = ["escnn-attention", *words[2:]] if words[2] == "compare" else words[:1]
    if words[0] == "escnn-attention":
        wrong += {word.split(".")[0] for word in words if word.startswith("--")} - known_options(words[1])
    if words[:2] == ["pip", "install"]:
        table = (ROOT / "pyproject.toml").read_text(encoding="utf-8").split("[project.optional-dependencies]")[1]
        extras = re.findall(r"^(\w+) = \[", table.split("\n[")[0], re.MULTILINE)
        wrong += {name for found in re.findall(r"\[([\w,]+)\]", " ".join(words)) for name in found.split(",")} - {
            *extras
        }
    return wrong


@pytest.mark.parametrize("name", [name for name in NAMES if shell_commands(name)])
def test_commands_exist(name):
    assert not [found for words in shell_commands(name) if (found := unknown(words))]


WRONG = ["python examples/a.py", "python3 bootstrap.py brew", "escnn-attention compare --aim 1", "pip install 'x[tea]'"]


@pytest.mark.parametrize("line", WRONG)
def test_commands_that_do_not_exist_are_noticed(line):
    assert len(unknown(shlex.split(line))) == 1


def missing_files(text: str) -> list[str]:
    """Files of the package that a page names as ``folder/file.py`` in backticks and that are not there."""
    names = re.findall(r"`((?:[\w.]+/)+\w+\.(?:py|cpp|h))`", text)
    return [name for name in names if not any((root / name).exists() for root in (ROOT, ROOT / "escnn_attention"))]


@pytest.mark.parametrize("name", NAMES)
def test_files_that_pages_name_exist(name):
    assert not missing_files((ROOT / name).read_text(encoding="utf-8"))


def test_missing_files_are_noticed():
    assert missing_files("`nn/module.py`, `geometry/cellar.py`") == ["geometry/cellar.py"]


def test_links_of_the_readme_lead_somewhere():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'src="([^"]+)"', text)
    local = [target.split("#")[0] for target in targets if not target.startswith("http")]
    assert local
    for target in local:
        assert (ROOT / target).exists(), target


@pytest.fixture
def links():
    return loaded(".github/absolute_links.py")


def test_links_of_the_readme_hold_on_an_index(links):
    text = links.absolute((ROOT / "README.md").read_text(encoding="utf-8"), "https://host/us/it", "v1")
    targets = [*re.findall(r"\]\(([^)]+)\)", text), *re.findall(r'(?:src|href)="([^"]+)"', text)]
    assert all(target.startswith(("https://", "#")) for target in targets)
    ours = [target for target in targets if target.startswith("https://host/")]
    assert len(ours) > 20
    for target in ours:
        kind, place = re.fullmatch(r"https://host/us/it/(blob|raw)/v1/([^#]+)(?:#.*)?", target).groups()
        assert (ROOT / place).is_file()
        assert (kind == "raw") == (place.endswith(".png"))


def test_projects_of_an_index_link_their_repository(links):
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    changed = links.with_urls(text, "https://host/us/it", "v1")
    urls = changed.split("[project.urls]\n")[1].split("\n[")[0]
    assert 'Issues = "https://host/us/it/issues"\n' in urls
    assert set(text.splitlines()) < set(changed.splitlines())
    with pytest.raises(SystemExit, match=r"needs one table \[project.urls\]"):
        links.with_urls(changed.replace("[project.urls]", "[urls]"), "https://host/us/it", "v1")


UNSORTED = """import os
import numpy
from escnn import gspaces
from escnn_attention import GroupSelfAttention
"""


@pytest.mark.parametrize(("tool", "command"), [("ruff", ["check", "--fix", "--select=I"]), ("isort", [])])
def test_tools_that_sort_imports_keep_escnn_second(tool, command, tmp_path):
    """With the settings of the page; without them they put escnn first."""
    pytest.importorskip(tool)
    page = [body for language, body, *_ in fences(ROOT / "docs" / "installing.md") if language == "toml"]
    (settings,) = [body for body in page if f"[tool.{tool}" in body]
    for text, first in ((settings, "escnn_attention"), ("", "escnn")):
        (tmp_path / "pyproject.toml").write_text(text)
        (tmp_path / "program.py").write_text(UNSORTED)
        subprocess.run([sys.executable, "-m", tool, *command, "program.py"], cwd=tmp_path, check=True)
        assert IMPORT.findall((tmp_path / "program.py").read_text())[0] == first
