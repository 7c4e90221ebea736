"""Measure what each part of a recipe for training attention is worth, on handwritten digits.

    python examples/ablations.py --out runs/ablations

The hybrid and the GSA-Net of `escnn-attention compare` are trained with one part of their recipe changed at a time,
with several seeds, on upright digits. Accuracies are of the test digits as they are, and rotated by any angle; nothing
was chosen by them, the validation part was looked at for that. A run that is stopped goes on where it was. It takes
about 20 minutes on one core with the default options. Needs the extra "train".
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import escnn_attention  # noqa: F401  # isort: skip  # before escnn
import torch
from rich.console import Console

from escnn_attention.training.comparison.groups import gspace_by_name
from escnn_attention.training.comparison.images import load_images
from escnn_attention.training.comparison.measure import ANY_ANGLE, UPRIGHT, measure_accuracies, orient
from escnn_attention.training.comparison.networks import count_parameters, describe_network
from escnn_attention.training.comparison.progress import Reporter
from escnn_attention.training.comparison.settings import Settings
from escnn_attention.training.comparison.training import train
from escnn_attention.training.files import atomic_file

RECIPE = "the recipe"
_NORMS = {"projection": "group", "norm_scope": "position"}
_POINTWISE = {"projection": "pointwise", "norm_scope": "sample"}

VARIANTS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "steerable": {RECIPE: {}},
    "hybrid": {
        RECIPE: {},
        "encoding by an MLP, not as a convolution": {"encoding": "mlp"},
        "layer norms of each position": {"block": _NORMS},
        "a last layer norm": {"last_norm": True},
        "keys of all poses": {"keys": "all"},
        "pointwise projections": {"block": _POINTWISE},
        "LayerScale of 0.1": {"block": {"projection": "group", "norm_scope": "sample", "layer_scale": 0.1}},
        "two convolutions, two blocks": {"convolutions": [1, 1], "attention": [0, 2]},
    },
    "gsa-net": {
        RECIPE: {},
        "encoding by an MLP, not as a convolution": {"encoding": "mlp"},
        "layer norms of each position": {"block": _NORMS},
        "blocks of GSA-Nets": {"norm": "gsa"},
    },
}
"""What is changed of a network, by its name and that of the change: arguments of :class:`HybridNet`."""


def run(name: str, changes: Mapping[str, Any], settings: Settings) -> dict[str, float]:
    """Train one network, in the folder of ``settings``, unless it is there, and measure it."""
    finished = settings.folder / "result.json"
    if finished.exists():
        found: dict[str, float] = json.loads(finished.read_text(encoding="utf-8"))
        return found
    data = load_images("digits").limited(settings.limit_train, settings.limit_test)
    described = copy.deepcopy(describe_network(name, settings.group, data.size, data.num_classes, settings.parameters))
    described["init_args"].update(changes)
    training = train(name, described, data, settings, Reporter())
    images = orient(data.test.images, gspace_by_name(settings.group))
    wanted = {orientation: images[orientation] for orientation in (UPRIGHT, ANY_ANGLE)}
    result = measure_accuracies(training.network, wanted, data, torch.device("cpu"), 4 * settings.batch_size)
    result |= {"parameters": count_parameters(training.network), "seconds": training.seconds_per_epoch}
    with atomic_file(finished) as file:
        file.write(json.dumps(result).encode())
    return result


def table(results: Mapping[str, Mapping[str, list[dict[str, float]]]]) -> str:
    """Means over the seeds and standard errors, as Markdown."""
    lines = [
        "| network | changed | upright (%) | any angle (%) | parameters | s an epoch |",
        "|---|---|---|---|---|---|",
    ]
    for name, variants in results.items():
        for change, runs in variants.items():
            cells = [_mean([100 * found[orientation] for found in runs]) for orientation in (UPRIGHT, ANY_ANGLE)]
            seconds = statistics.median(found["seconds"] for found in runs)
            lines.append(f"| {name} | {change} | {' | '.join(cells)} | {runs[0]['parameters']:,} | {seconds:.1f} |")
    return "\n".join(lines) + "\n"


def _mean(values: list[float]) -> str:
    mean = f"{statistics.mean(values):.1f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values) / len(values) ** 0.5:.1f}"


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs and the table")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each network")
    parser.add_argument("--networks", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--group", default="c8", help="cN or dN")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--limit-train", type=int, help="train on the first so many images")
    parser.add_argument("--limit-test", type=int, help="test on the first so many images")
    given = parser.parse_args(arguments)
    console = Console()
    results: dict[str, dict[str, list[dict[str, float]]]] = {}
    for name in given.networks:
        for number, (change, options) in enumerate(VARIANTS[name].items()):
            runs = results.setdefault(name, {}).setdefault(change, [])
            for seed in range(given.seeds):
                settings = Settings(
                    group=given.group,
                    epochs=given.epochs,
                    seed=seed,
                    limit_train=given.limit_train,
                    limit_test=given.limit_test,
                    output=given.out / f"{name}-{number}-{seed}",
                    accelerator="cpu",
                )
                runs.append(run(name, options, settings))
                console.print(f"{name}, {change}, seed {seed}: {runs[-1]}", highlight=False)
    text = table(results)
    with atomic_file(given.out / "ablations.md") as file:
        file.write(text.encode())
    console.print(text, highlight=False, markup=False)


if __name__ == "__main__":
    main()
