"""What no tool checks: sizes of files, tests beside what they test, and imports without escnn."""

import pkgutil
from pathlib import Path

import pytest

import escnn_attention

ROOT = Path(__file__).parents[1]
LONGEST_FILE = 600


def long_files(folder: Path) -> list[Path]:
    sources = [path for path in folder.rglob("*") if path.suffix in (".py", ".cpp", ".h")]
    return [path for path in sources if len(path.read_text(encoding="utf-8").splitlines()) > LONGEST_FILE]


def unmatched_tests(tests: Path, package: Path) -> list[Path]:
    """Test files in a folder of the package's name that are named after no module there."""
    found = [path.relative_to(tests) for path in tests.glob("*/**/test_*.py")]
    return [
        path
        for path in found
        if (package / path.parts[0]).is_dir()
        and not any(
            (package / path.parent / f"{prefix}{path.name.removeprefix('test_')}").is_file() for prefix in ("", "_")
        )
    ]


def test_files_are_short():
    assert not long_files(ROOT / "escnn_attention")


def test_tests_lie_beside_what_they_test():
    assert not unmatched_tests(ROOT / "tests", ROOT / "escnn_attention")


@pytest.mark.parametrize(("lines", "test", "good"), [(600, "test_a.py", True), (601, "test_b.py", False)])
def test_long_files_and_unmatched_tests_are_noticed(tmp_path, lines, test, good):
    for folder in ("package", "tests"):
        (tmp_path / folder / "nn").mkdir(parents=True)
    (tmp_path / "package" / "nn" / "_a.py").write_text(lines * "x = 0\n")
    (tmp_path / "tests" / "nn" / test).touch()
    assert (not long_files(tmp_path / "package")) == good
    assert (not unmatched_tests(tmp_path / "tests", tmp_path / "package")) == good


IMPORT = """
import importlib
sys.modules["escnn"] = None
for name in {}:
    try:
        importlib.import_module(name)
    except ImportError:
        print(name)
"""


def test_exported_networks_need_no_escnn(run_python):
    """Nor do random transformations of samples; layers themselves do."""
    rooms = [f"escnn_attention.{name}" for name in ("geometry", "functional", "encodings", "plain")]
    modules = [module.name for module in pkgutil.walk_packages(escnn_attention.__path__, "escnn_attention.")]
    names = [name for name in modules if name.startswith(tuple(rooms)) and "_kernels" not in name]
    names += ["escnn_attention.groups.random_transformation", "escnn_attention.nn.pointwise"]
    assert len(names) > 30
    assert run_python(IMPORT.format(names)).split() == ["escnn_attention.nn.pointwise"]
