"""The script that measures samples of continuous groups runs, and the errors that it draws fall."""

import re
import sys
from pathlib import Path

import pytest
from escnn import gspaces

from escnn_attention import PointAttentiveConv, PointSelfAttention

pytest.importorskip("matplotlib")

from examples import continuous_groups as example

ROOT = Path(__file__).parents[2]


@pytest.mark.sampled(4, of="commands of the examples")
def test_pictures(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(example, "PLANE", (4,))
    monkeypatch.setattr(example, "VOLUME", (4,))
    monkeypatch.setattr(example, "WITH_REFLECTIONS", {"O(2)": (4,), "O(3)": (4,)})
    monkeypatch.setattr(sys, "argv", ["", "--output", str(tmp_path), "--dpi", "30", "--draws", "1"])
    example.main()
    page = (ROOT / "docs" / "continuous.md").read_text(encoding="utf-8")
    assert {file.name for file in tmp_path.iterdir()} == set(re.findall(r"\{figure\} _static/(\S+)", page))
    printed = capsys.readouterr().out
    assert printed.count("on a grid") == 2
    assert printed.count("PointSelfAttention") == printed.count("PointAttentiveConv") == 4


@pytest.mark.parametrize("layer", [PointSelfAttention, PointAttentiveConv])
def test_errors_on_points_fall(layer):
    few, many = example.errors_on_points(layer, gspaces.rot2dOnR2(-1), [(1,), (2,)], (4, 32), "mlp", 1)
    assert many < 1e-2 < 0.1 < few


def test_errors_on_grids_fall():
    few, many = example.errors(gspaces.rot2dOnR2(-1), (4, 32), (3, 3), "mlp", 1)
    assert many < 1e-2 < 0.1 < few
