"""The notebook runs from beginning to end, and shows what it shows."""

import contextlib
import io
import re
from pathlib import Path

import pytest
import torch

nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
pytest.importorskip("sklearn")

NOTEBOOK = Path(__file__).parents[2] / "examples" / "tutorial.ipynb"


def printed(notebook):
    """What all cells print."""
    outputs = (output for cell in notebook.cells for output in cell.get("outputs", ()))
    return "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")


def accuracies(text):
    return [float(number) for number in re.findall(r"rotated by +\d+°: ([\d.]+) %", text)]


def here(notebook):
    """What all cells print in this process: they are Python, and end in no value to be shown."""
    threads, namespace = torch.get_num_threads(), {"__name__": "__main__"}
    try:
        with contextlib.redirect_stdout(io.StringIO()) as stdout:
            for cell in notebook.cells:
                if cell.cell_type == "code":
                    exec(compile(cell.source, NOTEBOOK.name, "exec"), namespace)
    finally:
        torch.set_num_threads(threads)
    return stdout.getvalue()


def in_jupyter(notebook):
    run = nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    outputs = [output for cell in run.cells for output in cell.get("outputs", ())]
    assert not [output for output in outputs if output.get("name") == "stderr" and "Trace" in output.text]
    return printed(run)


def test_it_shows_nothing_of_the_machine_that_ran_it():
    shown = nbformat.read(NOTEBOOK, as_version=4)
    outputs = [output for cell in shown.cells for output in cell.get("outputs", ())]
    assert outputs
    assert not [output for output in outputs if output.get("name") == "stderr"]  # where warnings name files


@pytest.mark.sampled(4, of="commands of the examples")
@pytest.mark.parametrize("run", [here, pytest.param(in_jupyter, marks=pytest.mark.exhaustive)])
def test_it_runs_and_shows_what_it_shows(run, monkeypatch, quick_path):
    monkeypatch.setenv("PYTHONPATH", quick_path)
    shown = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(shown)
    texts = printed(shown), run(nbformat.read(NOTEBOOK, as_version=4))
    for text in texts:
        upright, *rotated = accuracies(text)
        assert rotated == 3 * [upright]
        assert upright > 50
    tables = [text[: text.index("element ")] for text in texts]
    assert tables[0] == tables[1]  # of the summary
    assert "equivariant: relative error" in texts[1]
    # In Jupyter a cell would also show what it ends in.
    assert {output.output_type for cell in shown.cells for output in cell.get("outputs", ())} == {"stream"}
