"""The experiments on point clouds: what they train, and that they run."""

import dataclasses
import json

import pytest
import torch

pytest.importorskip("jsonargparse")
pytest.importorskip("matplotlib")

from typer.testing import CliRunner

from escnn_attention.models import HamiltonianNetwork
from escnn_attention.training.data.springs import energy
from examples.experiments.runs import DATA
from examples.point_clouds import cli, measure, report, tables
from examples.point_clouds.tables import experiments, parameters

_LEAPFROG = {"model.network.init_args.integrator": "leapfrog"}  # faster
_QUIET = {"trainer.enable_progress_bar": False, "trainer.enable_model_summary": False, "model.warm_up": 0}


@pytest.mark.parametrize("name", ["constellations", "springs"])
@pytest.mark.parametrize("small", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_twins_have_as_many_parameters_and_no_symmetry(name, small):
    (experiment,) = experiments(name, small)
    runs = experiment.runs(small)
    assert len({run.name for run in runs}) == len(runs)
    equivariant, *_, twin = runs
    assert twin.kind == "twin"
    assert 0.8 < parameters(twin) / parameters(equivariant) < 1.25
    rates = [run.configuration()["model"]["optimizer"]["init_args"]["lr"] for run in runs]
    assert len(set(rates)) == 1
    for run in runs:
        space = tables._at(run.configuration(), experiment.network)["gspace"]["class_path"]
        assert (space == "escnn.gspaces.trivialOnR2") == (run is twin)


def test_learning_rates_of_small_versions(monkeypatch):
    # Twins are not looked for: their sizes are those of the equivariant networks.
    monkeypatch.setattr(
        tables, "parameters", lambda run: run.configuration()["model"]["network"]["init_args"]["fields"]
    )
    for experiment in [*experiments("qm9", True), *experiments("shapes", True)]:
        equivariant, twin = experiment.runs(True)
        rates = [run.configuration()["model"]["optimizer"]["init_args"]["lr"] for run in (equivariant, twin)]
        assert rates[0] == experiment.rate < rates[1]
        same = [run.configuration()["model"]["optimizer"] for run in experiment.runs(False)]
        assert same[0] == same[1]


def test_full_versions_have_the_published_sizes():
    (springs,) = experiments("springs", False)
    config = tables.Run("", tables._CONFIGURATIONS / f"{springs.base}.yaml").configuration()
    assert config["trainer"]["max_epochs"] == 200
    assert config["data"]["init_args"] == {"solver": "rk4", "batch_size": 100}
    molecules = experiments("qm9", False)
    assert [e.name for e in molecules] == ["qm9-mu", "qm9-alpha", "qm9-homo", "qm9-polarizability"]
    for experiment in molecules:
        config = tables.Run("", tables._CONFIGURATIONS / f"{experiment.base}.yaml", experiment.changes).configuration()
        assert config["trainer"]["max_epochs"] == 500
        assert config["data"]["init_args"]["batch_size"] == 100
        assert f"mae_{config['data']['init_args']['targets'][0]}" in experiment.measures
    assert list(experiments("qm9", True)[0].measures) == ["mae_mu", "mae_alpha", "mae_homo"]


def test_a_command_writes_its_table_and_figure(tmp_path, monkeypatch):
    few = {f"{DATA}.num_train": 10, f"{DATA}.num_valid": 10, f"{DATA}.num_test": 10}
    tiny = dataclasses.replace(
        tables._SPRINGS, small={**tables._SPRINGS.small, **_QUIET, **_LEAPFROG, **few}, variants={}
    )
    monkeypatch.setattr(tables, "_SPRINGS", tiny)
    options = ["springs", "--small", "--epochs", "1", "--accelerator", "cpu", "--out", str(tmp_path)]
    result = CliRunner().invoke(cli.app, options, catch_exceptions=False)
    assert result.exit_code == 0
    rows = json.loads((tmp_path / "springs-small.json").read_text(encoding="utf-8"))
    assert [row["label"] for row in rows] == ["C4 attention", "twin"]
    for row in rows:
        assert row["turned"]["error"] > 0
        assert len(row["rollout"]["error"]) == len(row["rollout"]["drift"]) == 100
        assert row["rollout"]["error"][0] == row["rollout"]["drift"][0] == 0.0
        assert row["curve"][0]["memory"] >= 0
    assert str(tmp_path) not in json.dumps(rows)
    page = (tmp_path / "springs-small.md").read_text(encoding="utf-8")
    assert "| C4 attention |" in page
    assert tables.SMALL in page
    assert "Published: LieTransformer" in page
    assert (tmp_path / "springs-rollout-small.png").read_bytes().startswith(b"\x89PNG")

    # A second time nothing is trained or measured again.
    def again(*_, **__):
        raise AssertionError("it was run again")

    monkeypatch.setattr("examples.experiments.runs.run_experiment", again)
    monkeypatch.setattr(measure, "run_experiment", again)
    monkeypatch.setattr(report, "rollout_errors", again)
    assert CliRunner().invoke(cli.app, options, catch_exceptions=False).exit_code == 0


class _Known(torch.nn.Module):
    """The true potential of the springs."""

    def forward(self, features, coords, batch):
        count = int(batch.max()) + 1
        q, k = coords.view(count, -1, coords.shape[1]), features[:, 1].view(count, -1)
        return energy(q, torch.zeros_like(q), torch.ones_like(k), k)[:, None]


def test_rollouts_of_the_true_potential(monkeypatch, tmp_path):
    """Errors of the integrator are left, and the energy stays."""
    monkeypatch.setattr(measure, "load_network", lambda folder: HamiltonianNetwork(_Known()))
    data = {
        "class_path": "escnn_attention.training.Springs",
        "init_args": {"num_train": 4, "num_valid": 4, "num_test": 8, "batch_size": 8},
    }
    found = measure.rollout_errors(tmp_path, {"tested": {"configuration": {"data": data}}})
    assert 0 < found["error"][-1] < 1e-2
    assert found["drift"][-1] < 1e-2
    monkeypatch.setattr(
        _Known, "forward", lambda self, features, coords, batch: coords[:, :1].new_zeros(8, 1) * coords.sum()
    )
    wrong = measure.rollout_errors(tmp_path, {"tested": {"configuration": {"data": data}}})
    assert wrong["error"][-1] > 1.0


def test_help_says_what_there_is():
    result = CliRunner().invoke(cli.app, ["--help"])
    for command in ("constellations", "springs", "qm9", "shapes"):
        assert command in result.output
