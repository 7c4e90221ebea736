"""The experiments on point clouds: what they train, and that they run."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
import torch

pytest.importorskip("jsonargparse")
pytest.importorskip("matplotlib")

from typer.testing import CliRunner

from escnn_attention.models import HamiltonianNetwork
from escnn_attention.training import Springs
from escnn_attention.training.data.clouds import qm9
from escnn_attention.training.data.files import ENVIRONMENT
from examples.experiments.runs import DATA, NETWORK
from examples.point_clouds import cli, figures, measure, report, tables
from examples.point_clouds.tables import experiments, parameters
from tests import samples
from tests.training.modules.test_points import KnownSprings

_LEAPFROG = {"model.network.init_args.integrator": "leapfrog"}  # faster
_SPACE = {"class_path": "escnn.gspaces.dihedralOnR3", "init_args": {"n": 2}}  # sooner built than the octahedral one
_NARROW = {f"{NETWORK}.fields": 2, f"{NETWORK}.num_blocks": 1, f"{NETWORK}.num_heads": 1}


def again(*_, **__):
    raise AssertionError("it was run again")


def _call(*options):
    return CliRunner().invoke(cli.app, [*options, "--accelerator", "cpu"])


@pytest.fixture
def data_dir(tmp_path, monkeypatch):
    """A folder that only --data-dir names; where data is looked for without it, there is none, and no network."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "data").mkdir()
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "elsewhere"))

    def download_if_missing(path, *_, **__):
        assert path.exists(), "it was looked for elsewhere"

    monkeypatch.setattr(qm9, "make_from_downloads", download_if_missing)
    yield tmp_path / "data"
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.fixture
def molecules(data_dir, monkeypatch):
    """A small stand-in for QM9, and for the networks of its polarizability."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(3, 6, 24).astype(np.uint8)
    atoms = int(sizes.sum())
    np.savez(
        data_dir / qm9.FILE,
        num_atoms=sizes,
        charges=rng.choice([*qm9.ELEMENTS.values()], atoms).astype(np.uint8),
        positions=rng.standard_normal((atoms, 3)).astype(np.float32),
        targets=rng.standard_normal((24, 15)),
        target_names=np.array(qm9.NAMES),
        index=np.arange(1, 25, dtype=np.int32),
        polarizability=rng.standard_normal((24, 6)).astype(np.float32),
        polarizability_names=np.array(qm9.ENTRIES),
    )
    monkeypatch.setattr(qm9, "_NUM_TRAIN", 12)
    monkeypatch.setattr(qm9, "_NUM_VALID", 4)
    tiny = {**tables._POLARIZABILITY.small, **samples.QUIET, **_NARROW, f"{DATA}.batch_size": 4}
    tiny[f"{NETWORK}.encoding"] = {"class_path": "escnn_attention.PairKernel", "init_args": {"hidden": 2}}
    changes = {**tables._POLARIZABILITY.changes, f"{NETWORK}.gspace": _SPACE}
    experiment = dataclasses.replace(tables._POLARIZABILITY, small=tiny, changes=changes)
    monkeypatch.setattr(report, "experiments", lambda name, small: [experiment])
    return data_dir


@pytest.fixture
def as_wide(monkeypatch):
    """Twins that are as wide as the equivariant networks: those of as many parameters take long to find."""

    def fields(run):
        network = run.configuration()["model"]["network"]["init_args"]
        fields = network.get("potential", {"init_args": network})["init_args"]["fields"]
        return fields if isinstance(fields, int) else sum(fields.values())

    monkeypatch.setattr(tables, "parameters", fields)


@pytest.mark.sampled(1)
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


@pytest.mark.usefixtures("as_wide")
def test_twins_are_trained_alike():
    for experiment, small in itertools.product(experiments("qm9", True), (True, False)):
        equivariant, twin = (run.configuration() for run in experiment.runs(small))
        assert {**equivariant["model"], "network": None} == {**twin["model"], "network": None}
        assert equivariant["data"] == twin["data"]


def test_full_versions_have_the_published_sizes():
    (springs,) = experiments("springs", False)
    config = tables.Run("", tables._CONFIGURATIONS / f"{springs.base}.yaml").configuration()
    assert config["trainer"]["max_epochs"] == 200
    assert config["data"]["init_args"] == {"solver": "rk4", "batch_size": 100}
    assert springs.small[f"{DATA}.solver"] == Springs().solver == "exact"
    molecules = experiments("qm9", False)
    assert [e.name for e in molecules] == ["qm9-mu", "qm9-alpha", "qm9-homo", "qm9-polarizability"]
    for experiment in molecules:
        config = tables.Run("", tables._CONFIGURATIONS / f"{experiment.base}.yaml", experiment.changes).configuration()
        assert config["trainer"]["max_epochs"] == 500
        assert config["data"]["init_args"]["batch_size"] == 100
        assert f"mae_{config['data']['init_args']['targets'][0]}" in experiment.measures
    assert list(experiments("qm9", True)[0].measures) == ["mae_mu", "mae_alpha", "mae_homo"]


@pytest.mark.usefixtures("as_wide")
def test_a_table_of_several_seeds(tmp_path, monkeypatch):
    def trained(run, folder, more, seed):
        assert folder == tmp_path / "full"
        found = 0.9 + 0.01 * seed
        hardware = {"processor": "some", "threads": 1, "cores": 2}
        return {
            "seed": seed,
            "accuracy": found,
            "rotated": {"accuracy": found - 0.5},
            "parameters": 1234,
            "curve": [{"seconds": 2.0 + seed, "memory": 50.0 + seed}],
            "weights_sha256": "",
            "trained": {"versions": {"torch": "2", "escnn": "1"}, "hardware": hardware},
            "tested": {"configuration": {"data": {"init_args": {"batch_size": 32}}}},
        }

    monkeypatch.setattr(report, "execute_and_rotate", trained)
    options = ["constellations", "--seed", "1", "--seeds", "3", "--out", str(tmp_path)]
    assert CliRunner().invoke(cli.app, options, catch_exceptions=False).exit_code == 0
    rows = json.loads((tmp_path / "constellations-seeds1-3.json").read_text(encoding="utf-8"))
    assert [(row["label"], row["seed"]) for row in rows] == [
        (label, seed) for label in ("C4 attention", "twin") for seed in (1, 2, 3)
    ]
    page = (tmp_path / "constellations-seeds1-3.md").read_text(encoding="utf-8")
    # 91, 92 and 93: a standard deviation of 1, and a standard error of 1/sqrt(3).
    assert "| C4 attention | 92.0 ± 0.6 | 42.0 ± 0.6 | 1,234 | 1 | 4.0 | 53 |" in page
    assert "batches of 32; means ± standard errors of 3 seeds, 1, 2, 3; some, 1 of 2 cores;" in page


@pytest.mark.sampled(4, of="commands of the examples")
@pytest.mark.usefixtures("as_wide")
def test_a_command_writes_its_table_and_figure(tmp_path, monkeypatch):
    few = {f"{DATA}.num_train": 10, f"{DATA}.num_valid": 2, f"{DATA}.num_test": 2}
    few |= {tables._POTENTIAL + ".fields": 4, tables._POTENTIAL + ".encoding.init_args.hidden": 4}
    tiny = dataclasses.replace(
        tables._SPRINGS, small={**tables._SPRINGS.small, **samples.QUIET, **_LEAPFROG, **few}, variants={}
    )
    monkeypatch.setattr(tables, "_SPRINGS", tiny)
    options = ["springs", "--small", "--epochs", "1", "--accelerator", "cpu", "--out", str(tmp_path)]
    options += ["--solver", "rk4"]
    result = CliRunner().invoke(cli.app, options, catch_exceptions=False)
    assert result.exit_code == 0
    rows = json.loads((tmp_path / "springs-small.json").read_text(encoding="utf-8"))
    assert [row["label"] for row in rows] == ["C4 attention", "twin"]
    for row in rows:
        assert row["tested"]["configuration"]["data"]["init_args"]["solver"] == "rk4"
        assert row["rotated"]["error"] > 0
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
    monkeypatch.setattr("examples.experiments.runs.run_experiment", again)
    monkeypatch.setattr(measure, "run_experiment", again)
    monkeypatch.setattr(report, "rollout_errors", again)
    monkeypatch.setattr(figures, "draw_rollouts", lambda *_: None)
    assert CliRunner().invoke(cli.app, options, catch_exceptions=False).exit_code == 0


@pytest.mark.sampled(4, of="commands of the examples")
def test_tensors_of_so_many_molecules(molecules, tmp_path, monkeypatch):
    """Those of the test at most, and no more than float64 is done with soon; on the device of the training."""
    asked = []
    monkeypatch.setattr(measure, "_MOLECULES", 5)
    monkeypatch.setattr(measure, "device_of", lambda accelerator: asked.append(accelerator) or torch.device("cpu"))
    (experiment,) = report.experiments("", True)
    network = experiment.runs(True)[0].configuration()["model"]["network"]
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--network", type=torch.nn.Module)
    built = parser.instantiate_classes(parser.parse_object({"network": network})).network
    monkeypatch.setattr(measure, "load_network", lambda folder: built)
    space = built.gspace
    for limit, count in ((None, 5), (8, 5), (3, 3)):
        init_args = {"targets": ["polarizability"], "batch_size": 2, "limit_test": limit}
        data = {"class_path": "escnn_attention.training.QM9", "init_args": init_args}
        result = {"tested": {"configuration": {"data": data}}}
        found = measure.tensor_equivariance(tmp_path, result, space, data_dir=molecules, accelerator="gpu")
        assert found["molecules"] == count
    assert asked == 3 * ["gpu"]


def test_what_lightning_trains_on():
    assert measure.device_of("cpu") == torch.device("cpu")
    assert (measure.device_of("auto").type != "cpu") == (torch.cuda.is_available() or torch.mps.is_available())


@pytest.mark.sampled(4, of="commands of the examples")
@pytest.mark.usefixtures("as_wide")
def test_a_measurement_that_fails_loses_no_training(molecules, tmp_path, monkeypatch):
    """And the folder of the data, which is the only one with tensors, reaches the measurements."""
    options = ["qm9", "--small", "--epochs", "1", "--data-dir", str(molecules), "--out", str(tmp_path / "out")]
    right = report.tensor_equivariance

    def wrong(*_, **__):
        raise MemoryError("too little of it")

    monkeypatch.setattr(report, "tensor_equivariance", wrong)
    result = _call(*options)
    assert result.exit_code == 2
    assert "too little of it" in result.output
    assert "octahedral attention, polarizability: twin: trained and tested" in result.output
    table = tmp_path / "out" / "qm9-polarizability-small.json"
    rows = json.loads(table.read_text(encoding="utf-8"))
    assert [("rotating" in row, row["rotated"]["error"] > 0) for row in rows] == 2 * [(False, True)]
    lines = table.with_suffix(".md").read_text(encoding="utf-8").splitlines()
    assert len({line.count("|") for line in lines[:4]}) == 1

    # Started again, the command measures what is missing, and trains and tests nothing.
    monkeypatch.setattr("examples.experiments.runs.run_experiment", again)
    monkeypatch.setattr(measure, "run_experiment", again)
    monkeypatch.setattr(report, "tensor_equivariance", right)
    result = _call(*options)
    assert result.exit_code == 0, result.output
    assert "tensors of rotated molecules" in result.output
    rows = json.loads(table.read_text(encoding="utf-8"))
    equivariant, twin = (row["rotating"] for row in rows)
    assert equivariant["molecules"] == twin["molecules"] == 8
    assert equivariant["group"] < 1e-12 < equivariant["random"]
    assert twin["group"] > 1e-6
    assert str(molecules) not in json.dumps(rows)


def test_rollouts_of_the_true_potential(monkeypatch, tmp_path):
    """Errors of the integrator are left, and the energy stays; without springs the errors are large."""
    sizes = {"num_train": 4, "num_valid": 4, "num_test": 8, "batch_size": 8}
    data = {"class_path": "escnn_attention.training.Springs", "init_args": sizes}
    found, wrong = {}, {}
    for factor, errors in ((1.0, found), (0.0, wrong)):
        network = HamiltonianNetwork(KnownSprings(factor))
        monkeypatch.setattr(measure, "load_network", lambda folder, network=network: network)
        errors |= measure.rollout_errors(tmp_path, {"tested": {"configuration": {"data": data}}})
    assert 0 < found["error"][-1] < 1e-2
    assert found["drift"][-1] < 1e-2
    assert wrong["error"][-1] > 1.0
