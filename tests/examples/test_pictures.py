"""The script that draws the pictures of the site runs, and the site has them all."""

import inspect
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")

from examples import pictures

ROOT = Path(__file__).parents[2]
STATIC = ROOT / "docs" / "_static"


@pytest.mark.sampled(4, of="commands of the examples")
@pytest.mark.parametrize("kind", pictures.PICTURES)
def test_pictures_are_drawn(tmp_path, monkeypatch, kind):
    arguments = ["--out", str(tmp_path / "new"), "--dpi", "30", "--quick", "--only", kind]
    monkeypatch.setattr(sys, "argv", ["pictures.py", *arguments])
    pictures.main()
    drawn = {file.name for file in (tmp_path / "new").iterdir()}
    assert drawn
    assert all((STATIC / name).is_file() for name in drawn)


def test_the_site_has_them_all():
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "pictures").glob("*.md"))
    names = set(re.findall(r'save\(\s*"(\S+)"', inspect.getsource(pictures)))
    elsewhere = {"attention.png", "equivariance.png", "points_cutoff.png", "token_attention.png", "torus_roll.png"}
    assert names == elsewhere | set(re.findall(r"\{figure\} \.\./_static/(\S+)", pages))
    for name in names:
        assert (STATIC / name).stat().st_size < 1_500_000
