"""Flows on a torus: the data, the configurations, and what is measured and drawn."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from escnn_attention.training.data.fields import grid_elements, turned
from escnn_attention.training.experiment import run_experiment
from examples.flows import data, figures, measure

NAMES = sorted(path.stem for path in Path(measure.HERE).glob("*.yaml"))
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


def test_the_velocities_carry_the_vorticity():
    exponax = pytest.importorskip("exponax")
    vorticity, dt = waves(1, 16)[0], 1e-3
    step = exponax.stepper.NavierStokesVorticity(2, 2 * np.pi, 32, dt, diffusivity=data.VISCOSITY, order=4)
    change = (np.asarray(step(vorticity[None]), dtype=float)[0] - vorticity) / dt
    along, up = data.velocities(vorticity, 32)
    k = np.fft.fftfreq(32, 1 / 32)
    modes = np.fft.fft2(vorticity)
    factors = (1j * k, -1j * k[:, None], -data.VISCOSITY * (k**2 + k[:, None] ** 2))
    right, above, diffused = (np.fft.ifft2(factor * modes).real for factor in factors)
    carried = -(along * right + up * above)
    # exponax cuts the shortest waves of the product.
    assert np.abs(change - diffused - carried).max() < 0.1 * np.abs(carried).max()
    assert np.abs(change - diffused + carried).max() > np.abs(carried).max()  # the control: the other direction


def test_trajectories_decay_and_more_of_them_change_no_other():
    pytest.importorskip("exponax")
    made = data.trajectories(3, 3, 16, seed=1)
    assert made.shape == (3, 3, 2, 16, 16)
    energies = (made.astype(float) ** 2).sum((2, 3, 4))
    assert (np.diff(energies, axis=1) < 0).all()
    np.testing.assert_array_equal(data.trajectories(2, 3, 16, seed=1), made[:2])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", NAMES)
def test_equal_parameters_and_an_exact_symmetry(name):
    torch.manual_seed(0)
    if needed := {"fno": "neuralop", "revit": "revit"}.get(name):
        pytest.importorskip(needed, exc_type=ImportError)
    network = measure.configured(name).eval()
    assert measure.parameters(network) == pytest.approx(21000, rel=0.025)
    if not needed:
        found = measure.symmetry(network, torch.randn(2, 2, 16, 16))
        assert (found["turned"] < 1e-12) == (name != "unet")
        assert (found["mirrored"] < 1e-12) == name.startswith("d4")
        assert found["rolled_4"] < 1e-12 < found["rolled_1"]


@pytest.mark.sampled(4, of="commands of the examples")
@pytest.mark.parametrize("name", ["d4_attention", "unet"])
def test_train_measure_and_draw(name, tmp_path, capsys):
    file, folder = tmp_path / "flows.npz", tmp_path / f"{name}-0"
    flows = data.velocities(waves(6 * 21, 16), 16).reshape(6, 21, 2, 16, 16)
    np.savez(file, trajectories=flows)
    few = [f"--data.init_args.num_{part}={count}" for part, count in (("train", 2), ("valid", 2), ("test", 2))]
    options = [f"--data.init_args.path={file}", "--trainer.max_epochs=1", "--data.init_args.batch_size=8", *few]
    run_experiment(["fit", "--config", str(measure.HERE / f"{name}.yaml"), "--folder", str(folder), *options, *QUIET])
    measure.main([str(folder), "--data", str(file), "--number", "2"])
    assert f"`{name}` | 1 |" in capsys.readouterr().out
    result = json.loads((folder / "measured.json").read_text())
    assert len(result["errors"]) == measure.STEPS
    assert result["rollout"] == pytest.approx(np.mean(result["errors"]))
    figures.main([str(folder), "--data", str(file), "--number", "2", "--out", str(tmp_path)])
    assert len(list(tmp_path.glob("flows_*.png"))) == 3


def test_trajectories_are_long_enough(tmp_path):
    np.savez(tmp_path / "flows.npz", trajectories=np.zeros((3, 6, 2, 8, 8), dtype=np.float32))
    with pytest.raises(ValueError, match="data: got trajectories of 6 frames"):
        measure.held_out(tmp_path / "flows.npz", 1)
