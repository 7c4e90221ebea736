"""The notebook runs from beginning to end, and shows what it shows."""

import re
from pathlib import Path

import pytest

nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
pytest.importorskip("sklearn")

NOTEBOOK = Path(__file__).parents[2] / "examples" / "tutorial.ipynb"


def printed(notebook):
    """What all cells print."""
    outputs = (output for cell in notebook.cells for output in cell.get("outputs", ()))
    return "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")


def accuracies(text):
    return [float(number) for number in re.findall(r"rotated by +\d+°: ([\d.]+) %", text)]


def test_it_runs_and_shows_what_it_shows(monkeypatch, quick_path):
    monkeypatch.setenv("PYTHONPATH", quick_path)
    shown = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(shown)
    run = nbclient.NotebookClient(nbformat.read(NOTEBOOK, as_version=4), timeout=120, kernel_name="python3").execute()
    texts = printed(shown), printed(run)
    for text in texts:
        upright, *rotated = accuracies(text)
        assert rotated == 3 * [upright]
        assert upright > 50
    tables = [text[: text.index("element ")] for text in texts]
    assert tables[0] == tables[1]  # of the summary
    assert "equivariant: relative error" in texts[1]
    assert not [
        o for cell in run.cells for o in cell.get("outputs", ()) if o.get("name") == "stderr" and "Trace" in o.text
    ]
