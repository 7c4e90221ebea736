"""Flows on a torus: the data, the configurations, and what is measured and drawn."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from escnn_attention.training.data.fields import grid_elements, turned
from escnn_attention.training.experiment import run_experiment
from examples.flows import data, figures, measure, networks

HERE = Path(measure.__file__).parent
NAMES = sorted(path.stem for path in HERE.glob("*.yaml"))
QUIET = [f"--trainer.{name}=false" for name in ("enable_progress_bar", "enable_model_summary", "logger")]


def waves(count, size, seed=0):
    """Smooth vorticities without a mean ``(count, 2 * size, 2 * size)``, of waves that the grid of ``size`` tells."""
    modes = np.fft.rfft2(np.random.default_rng(seed).standard_normal((count, 2 * size, 2 * size)))
    down, along = np.meshgrid(np.fft.fftfreq(2 * size, 0.5 / size), np.arange(size + 1), indexing="ij")
    return np.fft.irfft2(modes * ((down**2 + along**2 < size**2 / 5) & (down**2 + along**2 > 0)), s=2 * (2 * size,))


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    monkeypatch.setattr(measure, "LONG", 2)


def test_velocities_are_those_of_the_vorticity_and_turn_with_it():
    vorticity = waves(3, 8)
    found = torch.from_numpy(data.velocities(vorticity, 8))
    # exponax has its axes in another order, so that its vorticity has the opposite sign.
    torch.testing.assert_close(figures.vorticity(found), -torch.from_numpy(vorticity[:, ::2, ::2]))
    divergence = figures.vorticity(torch.stack((-found[:, 1], found[:, 0]), dim=1))
    assert divergence.abs().max() < 1e-12
    for g in grid_elements(2, "all"):
        moved = turned(figures.vorticity(found)[:, None], g, {"scalar": 1})[:, 0] * np.linalg.det(g)
        torch.testing.assert_close(figures.vorticity(turned(found, g, {"vector": 1})), moved)


@pytest.mark.parametrize("kind", data.CHANNELS)
def test_the_velocities_carry_the_vorticity_and_a_tracer(kind):
    pytest.importorskip("exponax")
    state, dt = waves(2 if kind == "tracer" else 1, 16), 1e-3
    force = waves(1, 16, seed=1) if kind == "forced" else 0 * state
    step = data.stepper(kind, 32, dt)
    change = (np.asarray(step(state, force), dtype=float) - state) / dt
    along, up = data.velocities(state[0], 32)
    k = np.fft.fftfreq(32, 1 / 32)
    factors = (1j * k, -1j * k[:, None], -data.VISCOSITY * (k**2 + k[:, None] ** 2))
    right, above, others = (np.fft.ifft2(factor * np.fft.fft2(state)).real for factor in factors)
    others += force - (data.DRAG * state if kind == "forced" else 0)
    kept = (np.abs(k) < 9) & (np.abs(k[:, None]) < 9)  # exponax cuts the shortest waves of the product
    carried, found = (
        np.fft.ifft2(kept * np.fft.fft2(field)).real for field in (-(along * right + up * above), change - others)
    )
    for channel in range(len(state)):
        largest = np.abs(carried[channel]).max()
        assert np.abs(found - carried)[channel].max() < 0.01 * largest
        assert np.abs(found + carried)[channel].max() > largest  # the control: the other direction


def test_data_are_written_to_a_new_file_only(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(data, "trajectories", lambda number, *_: np.full((number, 3, 2, 8, 8), number, np.float32))
    file = tmp_path / "runs" / "flows.npz"
    data.main([str(file), "--number", "2"])
    with pytest.raises(SystemExit):
        data.main([str(file), "--number", "3"])
    assert "file: " in capsys.readouterr().err
    assert np.load(file)["trajectories"].shape == (2, 3, 2, 8, 8)


@pytest.mark.parametrize("kind", data.CHANNELS)
def test_trajectories_decay_or_are_driven_and_more_of_them_change_no_other(kind):
    pytest.importorskip("exponax")
    made = data.trajectories(3, 3, 16, seed=1, kind=kind)
    assert made.shape == (3, 3, data.CHANNELS[kind], 16, 16)
    np.testing.assert_array_equal(data.trajectories(2, 3, 16, seed=1, kind=kind), made[:2])
    squares = (made.astype(float) ** 2).mean((3, 4))
    if kind == "forced":
        np.testing.assert_array_equal(made[:, 0, 2:], made[:, 2, 2:])
        np.testing.assert_allclose(squares[:, :, 2:].sum(-1), data.FORCE**2, rtol=1e-6)
    else:
        assert (np.diff(squares[:, :, :2].sum(-1), axis=1) < 0).all()
        assert (np.diff(squares[:, :, 2:], axis=1) < 0).all()


def test_increments_without_divergence():
    torch.manual_seed(0)
    flow = torch.from_numpy(data.velocities(waves(2, 8), 8))
    any_field = torch.randn(2, 2, 8, 8, dtype=flow.dtype)
    torch.testing.assert_close(networks.without_divergence(flow), flow)
    found = networks.without_divergence(any_field)
    torch.testing.assert_close(networks.without_divergence(found), found)
    divergence = figures.vorticity(torch.stack((-found[:, 1], found[:, 0]), dim=1))
    assert divergence.abs().max() < 1e-12
    for g in grid_elements(2, "all"):
        moved = networks.without_divergence(turned(any_field, g, {"vector": 1}))
        torch.testing.assert_close(moved, turned(found, g, {"vector": 1}))
    # Of a torus twice as long along one side: the flow twice, and not its gradient part.
    twice = networks.without_divergence(torch.cat((any_field, any_field), dim=3))
    torch.testing.assert_close(twice, torch.cat((found, found), dim=3))
    upright = networks.without_divergence(torch.cat((any_field, any_field), dim=2))
    torch.testing.assert_close(upright, torch.cat((found, found), dim=2))
    # Waves of two positions have no direction on any grid.
    alternating = torch.ones(22)
    alternating[1::2] = -1
    for across in (9, 26):
        ripples = torch.stack((alternating[:, None].expand(22, across), torch.zeros(22, across)))[None]
        for field in (ripples, ripples.mT):
            assert networks.without_divergence(field).abs().max() < 1e-6
    step = networks.Increment(torch.nn.Identity(), incompressible=True)
    frame = torch.cat((any_field, any_field[:, :1]), dim=1)
    torch.testing.assert_close(step(frame), frame + torch.cat((found, frame[:, 2:]), dim=1))


def test_channels_without_an_increment_do_not_change():
    frame = torch.randn(2, 4, 8, 8)
    halves = networks.Increment(torch.nn.Conv2d(4, 2, 1))(frame)
    assert halves.shape == frame.shape
    assert torch.equal(halves[:, 2:], frame[:, 2:])
    assert (halves[:, :2] != frame[:, :2]).all()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow
def test_equal_parameters_and_an_exact_symmetry(name):
    torch.manual_seed(0)
    if needed := {"fno": "neuralop", "revit": "revit"}.get(name):
        pytest.importorskip(needed, exc_type=ImportError)
    network, kinds = measure.configured(HERE / f"{name}.yaml")
    network.eval()
    assert measure.parameters(network) == pytest.approx(21000, rel=0.025)
    if not needed:
        found = measure.symmetry(network, torch.randn(2, 2, 16, 16), kinds)
        assert (found["turned"] < 1e-12) == (name != "unet")
        assert (found["mirrored"] < 1e-12) == name.startswith("d4")
        assert (found["turned_stored"] == 0) == (name != "unet")
        assert (found["mirrored_stored"] == 0) == name.startswith("d4")
        assert found["rolled_4"] < 1e-12 < found["rolled_1"]


@pytest.mark.sampled(4, of="commands of the examples")
@pytest.mark.parametrize(("name", "kinds"), [("d4_attention", {"vector": 1, "scalar": 1}), ("unet", {"vector": 1})])
def test_train_measure_and_draw(name, kinds, tmp_path, capsys):
    file, folder = tmp_path / "flows.npz", tmp_path / f"{name}-0"
    vorticity = waves(6 * 21, 16)
    flows = np.concatenate((data.velocities(vorticity, 16), vorticity[:, None, ::2, ::2]), axis=1)
    np.savez(file, trajectories=flows[:, : 1 + len(kinds)].reshape(6, 21, -1, 16, 16))
    few = [f"--data.init_args.num_{part}={count}" for part, count in (("train", 2), ("valid", 2), ("test", 2))]
    options = [f"--data.init_args.path={file}", "--trainer.max_epochs=1", "--data.init_args.batch_size=8", *few]
    if "scalar" in kinds:
        network = "--model.network.init_args.network.init_args."
        options += [f"{name}={json.dumps(kinds)}" for name in (f"{network}in_type", f"{network}out_type")]
        options += [f"--data.init_args.inputs={json.dumps(kinds)}", "--model.fields=[2,1]"]
    run_experiment(["fit", "--config", str(HERE / f"{name}.yaml"), "--folder", str(folder), *options, *QUIET])
    measure.main([str(folder), "--data", str(file), "--number", "2"])
    assert f"`{name}` | 1 |" in capsys.readouterr().out
    result = json.loads((folder / "measured.json").read_text())
    assert len(result["errors"]) == measure.STEPS
    assert result["rollout"] == pytest.approx(np.mean(result["errors"]))
    assert ("scalars" in result) == ("scalar" in kinds)
    figures.main([str(folder), "--data", str(file), "--number", "2", "--out", str(tmp_path)])
    assert len(list(tmp_path.glob("flows_*.png"))) == 3
    with Image.open(tmp_path / "flows_film.gif") as film:
        assert film.n_frames == measure.STEPS + 1


def test_trajectories_are_long_enough(tmp_path):
    np.savez(tmp_path / "flows.npz", trajectories=np.zeros((3, 6, 2, 8, 8), dtype=np.float32))
    with pytest.raises(ValueError, match="data: got trajectories of 6 frames"):
        measure.held_out(tmp_path / "flows.npz", {"vector": 1}, 1)
