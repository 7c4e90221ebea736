"""Train and test a run, on test clouds as they are and rotated, and further measurements."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import escnn_attention  # noqa: F401  # isort: skip  # before escnn
import lightning.pytorch as pl
import numpy as np
import torch
from escnn.gspaces import GSpace
from rich.progress import track
from torch import Tensor

from escnn_attention.models import HamiltonianNetwork, PointTransformer
from escnn_attention.training import load_network
from escnn_attention.training.data.clouds.base import Clouds, random_rotations
from escnn_attention.training.data.clouds.springs import energy
from escnn_attention.training.errors import quiet_lightning
from escnn_attention.training.experiment import BEST, TEST, run_experiment
from escnn_attention.training.files import atomic_file
from examples.experiments.runs import DATA, Run, execute, named

ROTATED = "rotated"
_FRAMES = 100
_MOLECULES = 1000  # enough for the mean to a few percent; all take hours in float64, which is slow on many GPUs


def execute_and_rotate(run: Run, folder: Path, more: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Train and test; test again on rotated clouds.

    Returns:
        the content of ``test.json``, with that of the rotated clouds under ``"rotated"``.
    """
    result = execute(run, folder, more, seed)
    own = folder / f"{run.name}-{seed}"
    file = own / ROTATED / TEST
    if not file.exists() or json.loads(file.read_text(encoding="utf-8"))["weights_sha256"] != result["weights_sha256"]:
        run_experiment(
            [
                *("test", "--config", str(own / "requested.yaml"), "--folder", str(own / ROTATED)),
                *("--ckpt_path", str(own / BEST), f"--{DATA}.rotate_test", "true"),
            ]
        )
    rotated = json.loads(file.read_text(encoding="utf-8"))
    kept = {name: value for name, value in rotated.items() if isinstance(value, float)}
    return {**result, ROTATED: kept}


def once(file: Path, weights: str, measure: Any) -> Any:
    """The result of ``measure()`` for a network with these weights, cached in a file."""
    if file.exists():
        kept = json.loads(file.read_text(encoding="utf-8"))
        if kept["weights_sha256"] == weights:
            return kept["found"]
    found = measure()
    with atomic_file(file, "w") as kept_file:
        json.dump({"weights_sha256": weights, "found": found}, kept_file)
    return found


def data_of(result: Mapping[str, Any], data_dir: Path | None = None, **changes: Any) -> Any:
    """The data module of a result, set up to test.

    Args:
        result: the content of ``test.json``, which omits the folders of a machine.
        data_dir: the folder of the data set; by default what the environment says.
        **changes: other arguments than those of the result.
    """
    described = result["tested"]["configuration"]["data"]
    arguments = {**described["init_args"], **changes}
    if data_dir is not None:
        arguments["folder"] = data_dir
    data = named(described["class_path"])(**arguments)
    data.prepare_data()
    data.setup("test")
    return data


def device_of(accelerator: str) -> torch.device:
    """The device of a Lightning accelerator."""
    with quiet_lightning():
        trainer = pl.Trainer(accelerator=accelerator, devices=1, logger=False, enable_checkpointing=False)
    return trainer.strategy.root_device


def on_device(clouds: Clouds, device: torch.device) -> Clouds:
    """The clouds, on a device."""
    return Clouds(*(None if values is None else values.to(device) for values in clouds))


def rollout_errors(
    folder: Path, result: Mapping[str, Any], *, data_dir: Path | None = None, accelerator: str = "cpu"
) -> dict[str, list[float]]:
    """The mean square error and the change of the true energy by frame, of trajectories of 100 frames.

    The energy is that of the true potential at the predicted positions and momenta, relative to that of the first
    frame: the median over systems of the absolute value, because a few systems with little energy would dominate a
    mean.

    Args:
        folder: of the network.
        result: of its test.
        data_dir: the folder of the data set; by default what the environment says.
        accelerator: as Lightning's.
    """
    device = device_of(accelerator)
    network = load_network(folder).to(device)
    assert isinstance(network, HamiltonianNetwork)
    data = data_of(result, data_dir, test_frames=_FRAMES)
    errors, drifts = [], []
    for clouds in track(data.test_dataloader(), description=f"roll-outs of {_FRAMES} frames"):
        truth = clouds.point_targets
        assert truth is not None
        there = on_device(clouds, device)
        start = there.point_targets[:, 0].unbind(1)
        with torch.no_grad():
            found = network(*start, there.features, there.batch, num_frames=_FRAMES, step=data.step).cpu()
        by_system = (found - truth).square().mean((2, 3)).view(len(clouds.targets), -1, _FRAMES)
        errors.append(by_system.mean(1))
        parts = found.double().view(len(clouds.targets), -1, *found.shape[1:]).movedim(2, 1)  # B, T, n, 2, d
        masses, stiffness = clouds.features.double().view(len(clouds.targets), 1, -1, 2).unbind(-1)
        energies = energy(parts[..., 0, :], parts[..., 1, :], masses, stiffness)
        drifts.append((energies / energies[:, :1] - 1).abs())
    return {"error": torch.cat(errors).mean(0).tolist(), "drift": torch.cat(drifts).median(0).values.tolist()}


def tensor_equivariance(
    folder: Path,
    result: Mapping[str, Any],
    gspace: GSpace,
    *,
    data_dir: Path | None = None,
    accelerator: str = "cpu",
) -> dict[str, float]:
    """The equivariance error of tensors: |T(Rx) − R T(x) Rᵀ| / |T(x)|, the mean over molecules.

    Measured on at most 1,000 test molecules, whose number is under ``"molecules"``, in float64 and in the units of the
    data. ``"group"`` is for elements of the fiber group of ``gspace``, ``"random"`` for uniform rotations.

    Args:
        folder: of the network.
        result: of its test.
        gspace: of the group.
        data_dir: the folder of the data set; by default what the environment says.
        accelerator: as Lightning's.
    """
    device = device_of(accelerator)
    if device.type == "mps":
        device = torch.device("cpu")  # MPS has no float64
    network = load_network(folder).double().to(device)
    assert isinstance(network, PointTransformer)
    limit = result["tested"]["configuration"]["data"]["init_args"].get("limit_test")
    data = data_of(result, data_dir, limit_test=_MOLECULES if limit is None else min(limit, _MOLECULES))
    generator = np.random.default_rng(0)
    elements = np.stack([np.asarray(gspace.basespace_action(h)) for h in gspace.fibergroup.elements])
    errors: dict[str, list[Tensor]] = {"group": [], "random": []}
    for clouds in track(data.test_dataloader(), description="tensors of rotated molecules"):
        clouds = clouds._replace(coords=clouds.coords.double(), features=clouds.features.double())
        clouds, count = on_device(clouds, device), len(clouds.targets)
        before = _tensors(network, clouds, data)
        for name, rotations in (
            ("group", elements[generator.integers(len(elements), size=count)]),
            ("random", random_rotations(count, 3, True, generator)),
        ):
            matrices = torch.as_tensor(rotations, device=device)
            coords = torch.einsum("nij,nj->ni", matrices[clouds.batch], clouds.coords)
            after = _tensors(network, clouds._replace(coords=coords), data)
            difference = after - matrices @ before @ matrices.mT
            errors[name].append((difference.norm(dim=(1, 2)) / before.norm(dim=(1, 2))).cpu())
    means = {name: torch.cat(values).mean().item() for name, values in errors.items()}
    return {**means, "molecules": sum(map(len, errors["group"]))}


@torch.no_grad()
def _tensors(network: PointTransformer, clouds: Clouds, data: Any) -> Tensor:
    """The tensors of the clouds (B, 3, 3), in the units of the data."""
    found: Tensor = data.original(network(clouds.features, clouds.coords, batch=clouds.batch))
    return found
