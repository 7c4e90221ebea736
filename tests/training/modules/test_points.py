from __future__ import annotations

import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import yaml
from escnn import gspaces

from escnn_attention import CudaGraphs
from escnn_attention.models import HamiltonianNetwork, PointTransformer
from escnn_attention.training import (
    Clouds,
    Constellations,
    PointClassifier,
    PointDynamics,
    PointForecast,
    PointRegression,
    Springs,
    load_network,
    recipe,
)
from escnn_attention.training.data.clouds.springs import energy
from escnn_attention.training.errors import UserError
from escnn_attention.training.experiment.network import check_fit
from tests.training.experiment.runs import call, of, quiet_trainer, rows, write_task

POINTS = "escnn_attention.models.PointTransformer"
SMALL = {"fields": 2, "num_blocks": 1, "num_heads": 1, "attention": {"normalization": "count"}}
SMALL |= {"encoding": of("escnn_attention.PairKernel", hidden=4)}
PLANE, SPACE = of("escnn.gspaces.rot2dOnR2", N=3), of("escnn.gspaces.rot2dOnR3", n=2)
SIZES = {"num_train": 8, "num_valid": 4, "num_test": 6, "batch_size": 4}
SPRINGS = of("escnn_attention.training.Springs", **SIZES, frames=3)
CHARGED = of("escnn_attention.training.ChargedParticles", **SIZES, start_frame=0, end_frame=1)
CONSTELLATIONS = of("escnn_attention.training.Constellations", **SIZES)
INVARIANT = of(POINTS, gspace=PLANE, in_type=2, out_type=1, **SMALL)
DYNAMICS = of("escnn_attention.models.HamiltonianNetwork", potential=INVARIANT, integrator="leapfrog")
FORECAST = of(POINTS, gspace=SPACE, in_type={"scalar": 1, "vector": 1}, out_type="vector", pool=None, **SMALL)
CLASSES = of(POINTS, gspace=PLANE, in_type=1, out_type=12, **SMALL)
TASKS = {
    "point-regression": ({"network": INVARIANT, "loss": "mse", "schedule": "cosine"}, SPRINGS),
    "point-dynamics": ({"network": DYNAMICS}, SPRINGS),
    "point-forecast": ({"network": FORECAST}, CHARGED),
    "point-classification": ({"network": CLASSES, "num_classes": 3, "num_targets": 4}, CONSTELLATIONS),
}
MEASURES = {
    "point-regression": {"error", "mae_target0", "loss"},
    "point-dynamics": {"error", "drift", "loss"},
    "point-forecast": {"error", "loss"},
    "point-classification": {"accuracy", "exact", "loss"},
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("task", list(TASKS))
@pytest.mark.slow
def test_fit_test_and_predict(task, tmp_path):
    file, folder = write_task(tmp_path, task, *TASKS[task]), tmp_path / "run"
    call("fit", file, folder)
    call("test", file, folder)
    result = json.loads((folder / "test.json").read_text(encoding="utf-8"))
    assert MEASURES[task] <= result.keys()
    assert all(result[name] is not None for name in MEASURES[task])
    assert result["trained"]["configuration"]["task"] == task
    monitor = "valid_accuracy" if task == "point-classification" else "valid_error"
    assert [set(row) >= {monitor, "seconds", "memory"} for row in result["curve"]] == [True, True]
    values = [row[monitor] for row in result["curve"]]
    assert result["epoch"] == 1 + values.index(max(values) if monitor == "valid_accuracy" else min(values))
    # Turned test clouds, in a folder of their own.
    turned = tmp_path / "turned"
    call("test", file, turned, "--ckpt_path", folder / "best.ckpt", "--data.init_args.rotate_test", "true")
    other = json.loads((turned / "test.json").read_text(encoding="utf-8"))
    assert other["weights_sha256"] == result["weights_sha256"]
    assert other["tested"]["configuration"]["data"]["init_args"]["rotate_test"] is True
    assert other["loss"] != result["loss"]

    network = load_network(folder)
    with pytest.raises(UserError, match=r"--images: .*to go by"):
        call("predict", file, folder, "--images", "mine")
    assert isinstance(network, HamiltonianNetwork if task == "point-dynamics" else PointTransformer)
    if task == "point-dynamics":
        with pytest.raises(UserError, match=r"PointDynamics .*nothing to write"):
            call("predict", file, folder)
        return
    call("predict", file, folder)
    predicted = rows(folder, "predictions.csv")
    if task == "point-forecast":
        assert [int(row["body"]) for row in predicted] == list(range(30))
        assert predicted[0].keys() == {"body", "x0", "x1", "x2", "true_x0", "true_x1", "true_x2"}
        squares = [(float(row[f"x{j}"]) - float(row[f"true_x{j}"])) ** 2 for row in predicted for j in range(3)]
        assert sum(squares) / len(squares) == pytest.approx(result["error"], rel=1e-4)
        return
    assert [int(row["cloud"]) for row in predicted] == list(range(6))
    if task == "point-regression":
        errors = [abs(float(row["target0"]) - float(row["true_target0"])) for row in predicted]
        assert sum(errors) / len(errors) == pytest.approx(result["error"], rel=1e-4)
    else:
        assert predicted[0].keys() >= {"3_class", "3_label", "3_p2"}
        right = [row[f"{t}_class"] == row[f"{t}_label"] for row in predicted for t in range(4)]
        assert sum(right) / len(right) == pytest.approx(result["accuracy"])


def test_a_task_decides_what_options_there_are(tmp_path):
    file = write_task(tmp_path, "point-regression", *TASKS["point-regression"])
    for task, message in (("point-dynamics", "loss"), ("sorting", "sorting")):
        with pytest.raises(UserError, match=message):
            call("fit", file, tmp_path / "run", "--task", task)


def batch(targets, points=None, dim=2):
    generator = torch.Generator().manual_seed(0)
    coords = torch.randn(7, dim, generator=generator)
    index = torch.tensor([0, 0, 0, 1, 1, 2, 2])
    return Clouds(coords, torch.rand(7, 2, generator=generator) + 0.5, index, targets, points)


def measured(module, *batches):
    """What a module logs of test batches, as Lightning takes the mean."""
    (found,) = quiet_trainer().test(module, torch.utils.data.DataLoader(list(batches), batch_size=None), verbose=False)
    return found


class Given(torch.nn.Module):
    """A network that says the same of every cloud."""

    def __init__(self, value):
        super().__init__()
        self.value = torch.nn.Parameter(value)

    def forward(self, features, coords, batch):
        return self.value.expand(int(batch.max()) + 1, *self.value.shape)


def test_regression_measures_in_units():
    said, targets = torch.tensor([1.0, 2.0]), torch.tensor([[0.0, 0.0], [2.0, 2.0], [1.0, 4.0]])
    module = PointRegression(Given(said))
    found = measured(module, batch(targets))
    assert found["test_mae_target0"] == pytest.approx(2 / 3)
    assert found["test_mae_target1"] == pytest.approx(4 / 3)
    assert found["test_error"] == pytest.approx(1.0)
    assert found["test_loss"] == pytest.approx(1.0)
    assert measured(PointRegression(Given(said), loss="mse"), batch(targets))["test_loss"] == pytest.approx(10 / 6)
    # Standardised targets: errors are in the units of the data, the loss is not.
    data = SimpleNamespace(original=lambda y: 10 * y + 3, targets=("mu", "homo"))
    module.told_by_data = lambda name, default=None: getattr(data, name, default)
    found = measured(module, batch(targets))
    assert found["test_mae_mu"] == pytest.approx(20 / 3)
    assert found["test_mae_homo"] == pytest.approx(40 / 3)
    assert found["test_loss"] == pytest.approx(1.0)
    assert module.predict_step(batch(targets), 0)[0].tolist() == [13.0, 23.0]
    assert module.describe(torch.tensor([[13.0, 23.0]])) == [{"cloud": 0, "mu": 13.0, "homo": 23.0}]
    with pytest.raises(ValueError, match="network: got an output"):
        measured(module, batch(targets[:, :1]))
    # Matrices: one error, over all entries.
    tensor = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    found = measured(PointRegression(Given(tensor)), batch(torch.zeros(3, 2, 2)))
    assert found["test_mae_target0"] == found["test_error"] == pytest.approx(0.5)
    entries = {f"target0_{entry}" for entry in ("00", "01", "10", "11")}
    assert PointRegression(Given(tensor)).describe(tensor[None])[0].keys() == {"cloud"} | entries


def test_classification_counts():
    logits = torch.zeros(2, 3)
    logits[0, 1] = logits[1, 2] = 1.0
    module = PointClassifier(Given(logits.flatten()), num_classes=3, num_targets=2)
    found = measured(module, batch(torch.tensor([[1, 2], [1, 0], [0, 1]])))
    assert found["test_accuracy"] == pytest.approx(0.5)
    assert found["test_exact"] == pytest.approx(1 / 3)
    single = PointClassifier(Given(logits[0]), num_classes=3)
    found = measured(single, batch(torch.tensor([1, 1, 0])))
    assert found["test_accuracy"] == pytest.approx(2 / 3)
    assert "test_exact" not in found
    with pytest.raises(ValueError, match="num_targets: got 1"):
        measured(single, batch(torch.zeros(3, 2, dtype=torch.long)))
    with pytest.raises(ValueError, match="network: got an output"):
        measured(PointClassifier(Given(logits[0]), num_classes=4), batch(torch.tensor([1, 1, 0])))


class KnownSprings(torch.nn.Module):
    """The true potential, times a factor."""

    def __init__(self, factor=1.0):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(factor))

    def forward(self, features, coords, batch):
        from escnn_attention.training.data.clouds.springs import potential

        sizes = batch.bincount().tolist()
        parts = zip(coords.split(sizes), features[:, 1].split(sizes), strict=True)
        return self.factor * torch.stack([potential(q, k) for q, k in parts])[:, None]


@pytest.mark.slow
def test_dynamics_of_known_springs():
    """The true potential has the error of the integrator; a wrong one, a large one. Its own energy is conserved."""
    data = Springs(num_train=4, num_valid=4, num_test=20, batch_size=20, frames=5)
    data.setup("test")
    (clouds,) = data.test_dataloader()
    q, p = clouds.point_targets[:, 0].unbind(1)
    split = (t.view(20, 6, *t.shape[1:]) for t in (q, p, clouds.features[:, 0], clouds.features[:, 1]))
    torch.testing.assert_close(energy(*split), clouds.targets)
    errors = {}
    for factor in (1.0, 0.5):
        module = PointDynamics(HamiltonianNetwork(KnownSprings(factor)), step=data.step, substeps=4)
        errors[factor] = measured(module, clouds)
    assert errors[1.0]["test_error"] < 1e-6
    assert errors[0.5]["test_error"] > 1e-4
    assert all(found["test_drift"] < 1e-4 for found in errors.values())
    # One long step loses energy.
    coarse = PointDynamics(HamiltonianNetwork(KnownSprings()), step=20 * data.step)
    assert measured(coarse, clouds)["test_drift"] > 1e-3
    module = PointDynamics(HamiltonianNetwork(KnownSprings(0.5)), step=data.step)
    output = module(clouds)
    torch.testing.assert_close(module._loss(output, clouds) * 4 / 5, (output - clouds.point_targets).square().mean())
    module._loss(output, clouds).backward()
    assert module.network.potential.factor.grad < 0  # it has to become larger


def test_the_configuration_of_charged_particles(tmp_path):
    content = recipe("point-transformer-charged-particles")
    moved = {"rotate_train": True, "reflect_train": True, "conjugate_train": True, "reverse_train": True}
    assert content["data"]["init_args"] == {"batch_size": 100, **moved}
    content["model"]["network"]["init_args"] |= {"fields": 2, "num_blocks": 1, "num_heads": 1}
    content["model"]["network"]["init_args"]["gspace"] = SPACE
    content["model"]["warm_up"] = 0
    content["data"] = {**CHARGED, "init_args": {**CHARGED["init_args"], **moved}}
    content["trainer"] |= {"fast_dev_run": True, "accelerator": "cpu", "enable_progress_bar": False}
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    call("fit", tmp_path / "small.yaml", tmp_path / "run")


@pytest.mark.parametrize("kind", [PointRegression, PointDynamics])
def test_cuda_graphs_run_networks_on_clouds(kind, monkeypatch):
    runs, forward = [], CudaGraphs.forward
    monkeypatch.setattr(CudaGraphs, "forward", lambda self, *x, **y: runs.append(1) or forward(self, *x, **y))
    network = PointTransformer(gspaces.rot2dOnR2(4), 2, 1, fields=4, num_blocks=1, pool="sum")
    network = HamiltonianNetwork(network) if kind is PointDynamics else network
    frames = torch.randn(6, 3, 2, 2)
    batch = Clouds(frames[:, 0, 0], torch.rand(6, 2) + 1, torch.zeros(6).long(), torch.ones(1), frames)
    options = {"step": 0.1} if kind is PointDynamics else {}
    plain, graphed = (kind(network, cuda_graphs=graphs, **options) for graphs in (False, True))
    assert torch.equal(plain(batch), graphed(batch))
    assert runs == [1]


def test_a_forecast_begins_with_uniform_motion():
    frames = torch.randn(7, 3, 2, 2, generator=torch.Generator().manual_seed(1))
    clouds = batch(torch.ones(3), frames)

    class Still(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.miss = torch.nn.Parameter(torch.tensor(0.0))

        def forward(self, features, coords, batch):
            assert torch.equal(features, torch.cat([clouds.features, frames[:, 0, 1]], dim=1))
            return self.miss.expand_as(coords)

    module = PointForecast(Still(), step=0.25)
    expected = clouds.coords + 0.5 * frames[:, 0, 1]
    torch.testing.assert_close(module(clouds), expected)
    found = measured(module, clouds)
    assert (
        found["test_error"] == found["test_loss"] == pytest.approx((expected - frames[:, 2, 0]).square().mean().item())
    )
    assert module.describe(torch.tensor([[1.0, 2.0]])) == [{"body": 0, "x0": 1.0, "x1": 2.0}]
    module.network.forward = lambda features, coords, batch: coords[:3]
    with pytest.raises(ValueError, match=r"network: .*\(7, 2\)"):
        module(clouds)


def test_a_forecast_turns_and_moves_with_its_input():
    g = gspaces.rot2dOnR2(4)
    network = PointTransformer(
        g, {"scalar": 2, "vector": 1}, "vector", fields=2, num_blocks=1, num_heads=1, pool=None, positions=True
    ).double()
    module = PointForecast(network, step=1.0)
    frames = torch.randn(7, 2, 2, 2, generator=torch.Generator().manual_seed(1)).double()
    clouds = batch(torch.zeros(3), frames)
    clouds = clouds._replace(coords=frames[:, 0, 0], features=clouds.features.double())
    turn, move = torch.tensor([[0.0, -1.0], [1.0, 0.0]]).double(), torch.tensor([2.0, -1.0]).double()
    turned = frames @ turn.T + torch.stack([move, 0 * move])
    other = clouds._replace(coords=turned[:, 0, 0], point_targets=turned)
    expected = module(clouds) @ turn.T + move
    torch.testing.assert_close(module(other), expected, rtol=0, atol=1e-10)
    # The control: velocities that stay as they were.
    still = torch.stack([turned[:, :, 0], frames[:, :, 1]], dim=2)
    assert (module(other._replace(point_targets=still)) - expected).abs().max() > 0.1


def test_networks_get_the_features_of_pairs():
    """Two particles whose charges change their signs move alike if only the product is known, and not otherwise."""
    g = gspaces.rot2dOnR2(4)
    sizes = {"fields": 2, "num_blocks": 1, "num_heads": 1}
    edges = sizes | {"attention": {"edge_dim": 1}}
    network = PointTransformer(g, {"scalar": 2, "vector": 1}, "vector", pool=None, **edges)
    module = PointForecast(network, step=1.0)
    frames = torch.randn(7, 2, 2, 2, generator=torch.Generator().manual_seed(1))
    clouds = batch(torch.zeros(3), frames)
    tables = torch.randn(3, 4, 4, 1, generator=torch.Generator().manual_seed(2))
    found = module(clouds._replace(edge_attr=tables))
    velocities = frames[:, 0, 1]
    features = torch.cat([clouds.features, velocities], dim=1)
    expected = network(features, clouds.coords, batch=clouds.batch, edge_attr=tables)
    torch.testing.assert_close(found, clouds.coords + velocities + expected)
    assert (module(clouds._replace(edge_attr=-tables)) - found).abs().max() > 1e-3
    with pytest.raises(ValueError, match="edge_attr: got None"):
        module(clouds)
    invariants = PointTransformer(g, 2, 1, **edges)
    regression = PointRegression(invariants)
    expected = invariants(clouds.features, clouds.coords, batch=clouds.batch, edge_attr=tables)
    assert torch.equal(regression(clouds._replace(edge_attr=tables)), expected)
    dynamics = PointDynamics(HamiltonianNetwork(PointTransformer(g, 2, 1, **sizes)), step=0.1)
    with pytest.raises(ValueError, match=r"edge_attr: .*of pairs"):
        dynamics(clouds._replace(edge_attr=tables))


@pytest.mark.parametrize(
    ("sizes", "channels", "why"),
    [
        ((3, 4), 1, None),
        ((2, 4), 1, "for 2 classes, but Constellations has 3"),
        ((3, 2), 1, "for 2 targets, but Constellations has 4"),
        ((3, 4), 2, "for 2 channels, but Constellations has 1"),
    ],
)
def test_classes_are_those_of_the_data(sizes, channels, why):
    network = PointTransformer(gspaces.rot2dOnR2(4), channels, sizes[0] * sizes[1], fields=1, num_blocks=1, num_heads=1)
    model, data = PointClassifier(network, *sizes), Constellations(num_train=1)
    with nullcontext() if why is None else pytest.raises(UserError, match=why):
        check_fit(model, data, "network")
    check_fit(PointRegression(network), data, "network")
    foreign = torch.nn.Linear(3, 12)
    foreign.in_channels = 3  # with the coordinates
    check_fit(PointClassifier(foreign, 3, 4), data, "network")


def test_bad_arguments():
    network = PointTransformer(gspaces.rot2dOnR2(3), 2, 1, fields=2, num_blocks=1, num_heads=1)
    dynamics, forecast = PointDynamics(HamiltonianNetwork(network)), PointForecast(network, step=1.0)
    sizes = {"fields": 2, "num_blocks": 1, "num_heads": 1, "pool": None}
    vector_first = PointTransformer(gspaces.rot2dOnR2(3), {"vector": 1, "scalar": 1}, "vector", **sizes)
    for make, error, message in (
        (lambda: PointRegression(network, loss="l3"), ValueError, "loss: got 'l3'"),
        (lambda: PointRegression(network, schedule="linear"), ValueError, "schedule"),
        (lambda: PointDynamics(network), TypeError, "network: .*HamiltonianNetwork"),
        (lambda: PointDynamics(dynamics.network, step=-1), ValueError, "step: got -1"),
        (lambda: PointForecast(network, step=-1), ValueError, "step: got -1"),
        (lambda: PointForecast(vector_first), ValueError, "network: .*scalars behind .*the velocity last"),
        (lambda: dynamics(batch(torch.ones(3), torch.randn(7, 3, 2, 2))), ValueError, "step: got None"),
        (lambda: dynamics(batch(torch.ones(3))), ValueError, "point_targets: got None"),
        (lambda: forecast(batch(torch.ones(3))), ValueError, "point_targets: got None"),
    ):
        with pytest.raises(error, match=message):
            make()
