"""Training and testing a run, on test clouds as they are and turned at random, and what is measured beyond that."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from escnn.gspaces import GSpace
from torch import Tensor

from escnn_attention.models import HamiltonianNetwork, PointTransformer
from escnn_attention.training import load_network
from escnn_attention.training.data.points import Clouds, random_rotations
from escnn_attention.training.data.springs import energy
from escnn_attention.training.experiment import BEST, TEST, run_experiment
from escnn_attention.training.files import atomic_file
from examples.experiments.runs import DATA, Run, execute

TURNED = "turned"
_FRAMES = 100


def execute_and_turn(run: Run, folder: Path, more: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Train and test; test again on turned clouds.

    Returns:
        what ``escnn-attention test`` writes, with the same of the turned clouds under ``"turned"``.
    """
    result = execute(run, folder, more, seed)
    own = folder / f"{run.name}-{seed}"
    file = own / TURNED / TEST
    if not file.exists() or json.loads(file.read_text(encoding="utf-8"))["weights_sha256"] != result["weights_sha256"]:
        run_experiment(
            [
                *("test", "--config", str(own / "requested.yaml"), "--folder", str(own / TURNED)),
                *("--ckpt_path", str(own / BEST), f"--{DATA}.rotate_test", "true"),
            ]
        )
    turned = json.loads(file.read_text(encoding="utf-8"))
    kept = {name: value for name, value in turned.items() if isinstance(value, float)}
    return {**result, TURNED: kept}


def once(file: Path, weights: str, measure: Any) -> Any:
    """What ``measure()`` found for a network with these weights, kept in a file."""
    if file.exists():
        kept = json.loads(file.read_text(encoding="utf-8"))
        if kept["weights_sha256"] == weights:
            return kept["found"]
    found = measure()
    with atomic_file(file, "w") as kept_file:
        json.dump({"weights_sha256": weights, "found": found}, kept_file)
    return found


def test_data(result: Mapping[str, Any], **changes: Any) -> Any:
    """The data module of a result, set up to test."""
    described = result["tested"]["configuration"]["data"]
    module, _, name = described["class_path"].rpartition(".")
    arguments = {**described["init_args"], **changes}
    data = getattr(importlib.import_module(module), name)(**arguments)
    data.prepare_data()
    data.setup("test")
    return data


def rollout_errors(folder: Path, result: Mapping[str, Any]) -> dict[str, list[float]]:
    """Of trajectories of 100 frames: by frame, the mean square error, and how far the true energy is from the first.

    The energy is that of the true potential, at the positions and momenta that the network predicts, relative to that
    of the first frame: the median over systems of the absolute value, as a few with little energy decide a mean.
    """
    network = load_network(folder)
    assert isinstance(network, HamiltonianNetwork)
    data = test_data(result, test_frames=_FRAMES)
    errors, drifts = [], []
    for clouds in data.test_dataloader():
        truth = clouds.point_targets
        assert truth is not None
        with torch.no_grad():
            found = network(
                truth[:, 0, 0], truth[:, 0, 1], clouds.features, clouds.batch, num_frames=_FRAMES, step=data.step
            )
        by_system = (found - truth).square().mean((2, 3)).view(len(clouds.targets), -1, _FRAMES)
        errors.append(by_system.mean(1))
        parts = found.double().view(len(clouds.targets), -1, *found.shape[1:]).movedim(2, 1)  # B, T, n, 2, d
        masses, stiffness = clouds.features.double().view(len(clouds.targets), 1, -1, 2).unbind(-1)
        energies = energy(parts[..., 0, :], parts[..., 1, :], masses, stiffness)
        drifts.append((energies / energies[:, :1] - 1).abs())
    return {"error": torch.cat(errors).mean(0).tolist(), "drift": torch.cat(drifts).median(0).values.tolist()}


def tensor_equivariance(folder: Path, result: Mapping[str, Any], gspace: GSpace) -> dict[str, float]:
    """How far a tensor is from turning with its molecule: |T(Rx) − R T(x) Rᵀ| / |T(x)|, the mean over molecules.

    Under ``"group"`` for elements of the fiber group of ``gspace``, under ``"random"`` for uniform rotations; in
    float64, in the units of the data.
    """
    network = load_network(folder).double()
    assert isinstance(network, PointTransformer)
    data = test_data(result)
    generator = np.random.default_rng(0)
    elements = np.stack([np.asarray(gspace.basespace_action(h)) for h in gspace.fibergroup.elements])
    errors: dict[str, list[Tensor]] = {"group": [], "random": []}
    for clouds in data.test_dataloader():
        clouds = clouds._replace(coords=clouds.coords.double(), features=clouds.features.double())
        count = len(clouds.targets)
        for name, turns in (
            ("group", elements[generator.integers(len(elements), size=count)]),
            ("random", random_rotations(count, 3, True, generator)),
        ):
            errors[name].append(_turning_error(network, clouds, torch.as_tensor(turns), data))
    return {name: float(torch.cat(values).mean()) for name, values in errors.items()}


@torch.no_grad()
def _turning_error(network: PointTransformer, clouds: Clouds, turns: Tensor, data: Any) -> Tensor:
    def tensors(coords: Tensor) -> Tensor:
        return data.original(network(clouds.features, coords, batch=clouds.batch))

    before = tensors(clouds.coords)
    after = tensors(torch.einsum("nij,nj->ni", turns[clouds.batch], clouds.coords))
    return (after - turns @ before @ turns.mT).norm(dim=(1, 2)) / before.norm(dim=(1, 2))
