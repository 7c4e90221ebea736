"""The script that draws the pictures of the site runs, and the site has them all."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")

ROOT = Path(__file__).parents[2]


def test_pictures(tmp_path, monkeypatch):
    path = ROOT / "examples" / "pictures.py"
    spec = importlib.util.spec_from_file_location("pictures", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    monkeypatch.setattr(sys, "argv", [str(path), "--out", str(tmp_path / "new"), "--dpi", "30", "--quick"])
    example.main()
    drawn = {file.name for file in (tmp_path / "new").iterdir()}
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "pictures").glob("*.md"))
    assert drawn == {"attention.png", "equivariance.png"} | set(re.findall(r"\{figure\} \.\./_static/(\S+)", pages))
    for name in drawn:
        assert (ROOT / "docs" / "_static" / name).stat().st_size < 1_500_000
