"""The experiments of GSA-Nets: what they train, and that they run."""

import json

import numpy as np
import pytest
import yaml

pytest.importorskip("jsonargparse")
pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")

from typer.testing import CliRunner

from escnn_attention.training.errors import UserError
from examples.gsa_nets import cli, figures, tables
from examples.gsa_nets.runs import DATA, Run, execute
from tests import samples


@pytest.fixture
def small_rotmnist(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    np.savez(folder / "rotmnist.npz", **samples.rotmnist(train=32, valid=8, test=8))
    return folder


def test_table_1_is_that_of_the_paper():
    runs = tables.table_1(small=False)
    assert [run.published for run in runs] == [96.56, 97.49, 97.33, 97.42, 97.17, 96.89, 96.86, 97.05, 96.81]
    sizes = [run.configuration({})["model"]["network"]["init_args"]["kernel_size"] for run in runs]
    assert sizes == [3, 5, 7, 9, 11, 15, 19, 23, None]
    assert len({run.name for run in runs}) == len(runs)
    assert {run.label for run in tables.table_1(small=True)} < {run.label for run in runs}


@pytest.mark.parametrize("data", ["rotmnist", "cifar10", "pcam"])
def test_table_2_has_twins_of_as_many_parameters(data):
    runs = tables.table_2(data, small=True)
    budget = tables.parameters(runs[0], small=True)
    twins = [run for run in runs if run.kind != "attention"]
    assert {run.kind for run in twins} == {"convolution", "hybrid"}
    for run in twins:
        assert 0.4 * budget < tables.parameters(run, small=False) <= budget
        network = run.configuration({})["model"]["network"]["init_args"]
        assert any(network["attention"]) == (run.kind == "hybrid")


def test_changes_reach_the_configuration():
    run = Run("a run", "rotmnist_r8", {"model.network.init_args.kernel_size": 7}, "R8")
    config = run.configuration({"trainer.max_epochs": 2, f"{DATA}.limit_train": 5})
    assert config["model"]["network"]["init_args"]["kernel_size"] == 7
    assert config["model"]["network"]["init_args"]["gspace"]["init_args"] == {"N": 8}
    assert config["trainer"]["max_epochs"] == 2
    assert config["data"]["init_args"] == {"batch_size": 8, "limit_train": 5}
    assert run.name == "rotmnist_a_run"


def test_a_run_is_trained_once(small_rotmnist, tmp_path, monkeypatch):
    run = tables.table_1(small=True)[0]
    more = {
        **tables.SMALL,
        "model.network.init_args.channels": 6,
        "model.network.init_args.num_heads": 1,
        "trainer.max_epochs": 1,
        "trainer.precision": "32-true",
        "trainer.accelerator": "cpu",
        "trainer.enable_progress_bar": False,
        "trainer.enable_model_summary": False,
        f"{DATA}.folder": str(small_rotmnist),
        f"{DATA}.batch_size": 16,
    }
    result = execute(run, tmp_path, more, seed=1)
    assert 0 <= result["accuracy"] <= 1
    assert result["seed"] == 1
    assert len(result["curve"]) == 1
    requested = yaml.safe_load((tmp_path / "rotmnist_r4_sa_3x3-1" / "requested.yaml").read_text(encoding="utf-8"))
    assert requested["seed_everything"] == 1

    def again(*_):
        raise AssertionError("it was trained again")

    monkeypatch.setattr("examples.gsa_nets.runs.run_experiment", again)
    assert execute(run, tmp_path, more, seed=1) == result
    monkeypatch.undo()
    # What is there is never given for the result of another request, however often that is made.
    for _ in range(2):
        with pytest.raises(UserError, match="label_smoothing"):
            execute(run, tmp_path, {**more, "model.label_smoothing": 0.1}, seed=1)

    figures.draw_curves(tmp_path / "curves.png", [run], [result])
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    (row,) = cli._rows([run], [result])
    assert (row["published"], row["group"]) == (96.56, "R4")
    json.dumps(row)
    page = cli._markdown([run], [result])
    assert page.splitlines()[2].startswith(f"| R4 SA 3×3 | {100 * result['accuracy']:.2f} | 96.56 |")
    assert "Images: all to train, all to test; seed 1" in page


def test_steerability(monkeypatch):
    """Exact at quarter turns; elsewhere an encoding that is evaluated is closer than a kernel that is interpolated."""
    monkeypatch.setattr(figures, "_ANGLES", 24)
    monkeypatch.setattr(figures, "_SAMPLES", 8)
    angles, convolution, smooth, attention = figures.steerability_errors()
    assert angles == list(range(0, 181, 15))
    for errors in (convolution, smooth, attention):
        assert max(errors[0], errors[6], errors[12]) < 1e-10
    between = [i for i, angle in enumerate(angles) if angle % 90]
    assert max(attention[i] for i in between) < 0.5 * min(convolution[i] for i in between)


def test_help_says_what_there_is():
    result = CliRunner().invoke(cli.app, ["--help"])
    for command in ("table1", "table2", "figure1", "figure2"):
        assert command in result.output
