"""Measure trained networks on the test flows: roll-outs, symmetry, spectra, and the time of a step.

    python -m examples.flows.measure runs/flows/* --data runs/flows.npz

Each folder of ``escnn-attention fit`` is named after its configuration and the seed, such as ``unet-0``. Its numbers go
to ``measured.json`` in it, where they are kept, and are printed as a table: means and standard errors over the seeds.
"""

import argparse
import importlib
import json
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import escnn_attention  # noqa: F401  # isort: skip  # before escnn
import numpy as np
import torch
import yaml
from torch import Tensor

from escnn_attention.training import FieldData, load_network
from escnn_attention.training.data.fields import turned
from examples.flows.networks import Increment

STEPS, LONG = 20, 100
MOTIONS = {"turned": np.array([[0, -1], [1, 0]]), "mirrored": np.array([[-1, 0], [0, 1]])}


def built(described: Any) -> Any:
    """The object that a part of a configuration describes."""
    if isinstance(described, list):
        return [built(part) for part in described]
    if not isinstance(described, dict):
        return described
    if "class_path" not in described:
        return {key: built(part) for key, part in described.items()}
    module, _, name = described["class_path"].rpartition(".")
    return getattr(importlib.import_module(module), name)(**built(described.get("init_args", {})))


def configured(file: Path) -> tuple[Increment, dict[str, int]]:
    """The untrained network of a configuration, and the kinds of fields in its frames."""
    configuration = yaml.safe_load(file.read_text())
    return built(configuration["model"]["network"]), configuration["data"]["init_args"]["inputs"]


def trained(folder: Path) -> tuple[Increment, dict[str, int]]:
    """The network of a folder of ``escnn-attention fit``, and the kinds of fields in its frames."""
    network, kinds = configured(folder / "config.yaml")
    load_network(folder, network)
    return network.eval(), kinds


def held_out(file: Path, kinds: dict[str, int], number: int = 32) -> Tensor:
    """The test trajectories ``(N, T, C, size, size)`` of a training with ``num_test=number``."""
    data = FieldData(file, kinds, num_test=number)
    data.setup("test")
    trajectories: Tensor = data.source("test").trajectories
    if trajectories.shape[1] <= STEPS:
        raise ValueError(f"data: got trajectories of {trajectories.shape[1]} frames, needed at least {STEPS + 1}")
    return trajectories


def parameters(network: Increment) -> int:
    """The real parameters of a network; a complex one counts as two."""
    return sum(p.numel() * (2 if p.is_complex() else 1) for p in network.parameters())


def relative(found: Tensor, wanted: Tensor) -> Tensor:
    """The relative errors of fields ``(..., C, size, size)``."""
    return (found - wanted).flatten(-3).norm(dim=-1) / wanted.flatten(-3).norm(dim=-1)


def spectrum(fields: Tensor) -> list[float]:
    """The mean energy of velocities ``(..., 2, n, n)`` in the shells of wave numbers 1, 2, ..., n / 2 - 1."""
    n = fields.shape[-1]
    power = np.abs(np.fft.fft2(fields.double().numpy()) / n**2) ** 2 / 2
    waves = np.hypot(*np.meshgrid(*2 * [np.fft.fftfreq(n, 1 / n)], indexing="ij"))
    total = power.sum(-3).reshape(-1, n, n).mean(0)
    return [float(total[np.round(waves) == k].sum()) for k in range(1, n // 2)]


def in_precision(network: Increment, dtype: torch.dtype) -> Increment:
    """The network with its weights in a precision, complex ones as well."""
    cast: Increment = network._apply(
        lambda t: t.to(dtype.to_complex()) if t.is_complex() else t.to(dtype) if t.is_floating_point() else t
    )
    return cast


@torch.no_grad()
def symmetry(network: Increment, frame: Tensor, kinds: dict[str, int]) -> dict[str, float]:
    """Relative changes, in double precision, where a flow turns by 90°, is mirrored or rolls before a step.

    Those of ``_after`` are after many steps: of an inexact network the flows have then nothing in common. For those of
    ``_stored`` each frame is rounded to single precision.
    """
    network, frame = in_precision(network, torch.float64), frame.double()
    paths, stored_paths = (network.rollout(frame, LONG, stored) for stored in (None, torch.float32))
    result = {}
    for name, g in MOTIONS.items():
        start = turned(frame, g, kinds)
        moved, stored = network.rollout(start, LONG), network.rollout(start, LONG, torch.float32)
        for key, got, path, step in (
            (name, moved, paths, 1),
            (f"{name}_after", moved, paths, LONG),
            (f"{name}_stored", stored, stored_paths, LONG),
        ):
            result[key] = float(relative(got[:, step], turned(path[:, step], g, kinds)).max())
    for shift in (1, 2, 4):
        rolled = network(frame.roll((shift, shift), (-2, -1)))
        result[f"rolled_{shift}"] = float(relative(rolled, paths[:, 1].roll((shift, shift), (-2, -1))).max())
    in_precision(network, torch.float32)
    return result


@torch.no_grad()
def measured(network: Increment, kinds: dict[str, int], flows: Tensor) -> dict[str, Any]:
    """All numbers of a network on trajectories ``(N, T, C, size, size)``: errors of the velocity and of scalars."""
    rollout = network.rollout(flows[:, 0], STEPS)
    velocity, wanted = rollout[:, :, :2], flows[:, : STEPS + 1, :2]
    errors = relative(velocity, wanted)[:, 1:]
    one_step = torch.cat([relative(network(flow[:-1])[:, :2], flow[1:, :2]) for flow in flows]).mean()
    scalars = 2 * kinds["vector"]
    carried = relative(rollout[:, 1:, scalars:], flows[:, 1 : STEPS + 1, scalars:])
    times = []
    for _ in range(7):
        start = time.process_time()
        network(flows[:16, 0])
        times.append((time.process_time() - start) / 16)
    return {
        "parameters": parameters(network),
        "one_step": float(one_step),
        "rollout": float(errors.mean()),
        "squared": float(errors.square().mean()),
        "errors": errors.mean(0).tolist(),
        "spectrum": spectrum(velocity[:, -1]),
        "seconds": min(times),
        **({"scalars": float(carried.mean())} if "scalar" in kinds else {}),
        **symmetry(network, flows[:1, 0], kinds),
    }


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """Rows of means over the seeds, with standard errors."""
    named = "seeds | parameters | one step | 20 steps, mean | squared, mean | last | scalars, mean | ms a step"
    rows = [f"| configuration | {named} |", "|---|" + 8 * "--:|"]
    for name, runs in results.items():

        def cell(values: list[float], digits: int = 4) -> str:
            error = np.std(values, ddof=1) / len(values) ** 0.5 if len(values) > 1 else float("nan")
            return f"{np.mean(values):.{digits}f}" + (f" ± {error:.{digits}f}" if len(values) > 1 else "")

        columns = [cell([run[key] for run in runs]) for key in ("one_step", "rollout", "squared")]
        columns.append(cell([run["errors"][-1] for run in runs]))
        columns.append(cell([run["scalars"] for run in runs]) if "scalars" in runs[0] else "")
        columns += [f"{1e3 * min(run['seconds'] for run in runs):.1f}"]
        rows.append(f"| `{name}` | {len(runs)} | {runs[0]['parameters']:,} | " + " | ".join(columns) + " |")
    rows.append("")
    rows.append("| configuration | turned | mirrored | 100 steps | mirrored | stored | mirrored | rolled, 1 | 2 | 4 |")
    rows.append("|---|" + 9 * "--:|")
    motions = [f"{name}{after}" for after in ("", "_after", "_stored") for name in MOTIONS]
    keys = (*motions, "rolled_1", "rolled_2", "rolled_4")
    for name, runs in results.items():
        rows.append(f"| `{name}` | " + " | ".join(f"{max(run[key] for run in runs):.1e}" for key in keys) + " |")
    return "\n".join(rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the folders that have not been measured, and print the table of all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--number", type=int, default=32, help="test trajectories")
    given = parser.parse_args(arguments)
    results = defaultdict(list)
    for folder in given.folders:
        name = folder.name.rpartition("-")[0]
        file = folder / "measured.json"
        if not file.exists():
            network, kinds = trained(folder)
            try:
                flows = held_out(given.data, kinds, given.number)
            except ValueError as error:
                parser.error(str(error))
            file.write_text(json.dumps(measured(network, kinds, flows)))
        results[name].append(json.loads(file.read_text()))
    print(table(results))


if __name__ == "__main__":
    main()
