"""Ablations of a recipe for training attention, on handwritten digits.

The networks of `escnn-attention compare` are trained on upright digits with one part of their recipe changed at a time,
with several seeds. Accuracies are those of upright test digits and of digits rotated by any angle; nothing was chosen
on the test digits.
"""

from __future__ import annotations

import copy
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from escnn_attention.nn.summary import count_parameters
from escnn_attention.training.comparison import Settings
from escnn_attention.training.comparison.compare import (
    ANY_ANGLE,
    UPRIGHT,
    configure,
    gspace_by_name,
    load_images,
    measure_accuracies,
    orient,
    train,
)
from escnn_attention.training.errors import UserError
from escnn_attention.training.files import atomic_file
from examples.experiments.report import mean_and_error
from examples.experiments.runs import DATA, NETWORK, set_value

RECIPE = "the recipe"
_RATE, _WEIGHT_DECAY = "model.optimizer.init_args.lr", "model.optimizer.init_args.weight_decay"


def _network(**changes: Any) -> dict[str, Any]:
    """Other arguments of the network."""
    return {f"{NETWORK}.{name}": value for name, value in changes.items()}


def _block(**changes: Any) -> dict[str, Any]:
    """Other options of the network's blocks."""
    return {f"{NETWORK}.block.{name}": value for name, value in changes.items()}


_TOKEN = _network(class_token={"num_heads": 4, "head_fields": 4})
_TRAINING: Mapping[str, Mapping[str, Any]] = {
    "labels not smoothed": {"model.label_smoothing": 0.0},
    "no weight decay": {_WEIGHT_DECAY: 0.0},
    "a weight decay of 0.1": {_WEIGHT_DECAY: 0.1},
    "a weight decay of 0.1, none of norms, biases and encodings": {"model.decay": "weights", _WEIGHT_DECAY: 0.1},
    "half the learning rate": {_RATE: 0.003},
    "a constant learning rate": {"model.schedule": "constant", "model.warm_up": 0, _RATE: 0.002},
    "an average of the weights over 50 steps": {"model.ema": 0.98},
    "digits rotated by up to 45°, the complement of C8": {f"{DATA}.rotate_train": 45.0},
}

VARIANTS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "steerable": {RECIPE: {}, "logits read by a class token": _TOKEN, **_TRAINING},
    "hybrid": {
        RECIPE: {},
        "encoding by an MLP, not as a convolution": _block(encoding="mlp"),
        "the same, queries and keys of unit length": _block(encoding="mlp", qk_norm=True),
        "layer norms of each position": _block(norm_scope="position"),
        "batch norms in the block": _block(norm_scope=None, norm_kind="batch"),
        "a last layer norm": _network(last_norm=True),
        "keys of all poses": _block(keys="all"),
        "pointwise projections": _block(projection="pointwise"),
        "LayerScale of 0.1": _block(layer_scale=0.1),
        "stochastic depth of 0.1": _block(drop_path=0.1),
        "GELU": _block(activation="gelu"),
        "two convolutions, two blocks": _network(convolutions=[1, 1], attention=[0, 2]),
        "logits read by a class token": _TOKEN,
        **_TRAINING,
        "keys of all poses, encoding by an MLP": _block(keys="all", encoding="mlp"),
        "the same with two registers": _block(keys="all", encoding="mlp", registers=2),
    },
    "gsa-net": {
        RECIPE: {},
        "encoding by an MLP, not as a convolution": _block(encoding="mlp"),
        "the same, queries and keys of unit length": _block(encoding="mlp", qk_norm=True),
        "layer norms of each position": _block(norm_scope="position"),
        "blocks of GSA-Nets": _block(norm="gsa"),
        "stochastic depth of 0.1": _block(drop_path=0.1),
        "logits read by a class token": _TOKEN,
        **_TRAINING,
        "four heads in the lifting layer, not nine": {f"{NETWORK}.stem.num_heads": 4},
    },
}
"""Changes of a training, by the names of the network and of the change: new values of the configuration."""


def configuration(name: str, changes: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """The configuration of the comparison's training of a network, changed."""
    config = configure(name, settings)
    for path, value in changes.items():
        set_value(config, path, copy.deepcopy(value))
    return config


def run(name: str, changes: Mapping[str, Any], settings: Settings) -> dict[str, float]:
    """Train one network, in the folder of ``settings``, unless it is there, and measure it.

    Raises:
        UserError: the folder has the result of another network or training.
    """
    requested = json.loads(json.dumps(configuration(name, changes, settings)))
    finished = settings.folder / "result.json"
    if finished.exists():
        kept = json.loads(finished.read_text(encoding="utf-8"))
        if kept["requested"] != requested:
            raise UserError(f"--out: {finished} is of another network or training; choose another folder")
        found: dict[str, float] = kept["measured"]
        return found
    training = train(requested, settings.folder / name)
    network, data = training.model.network, load_images(settings)
    images = orient(data, gspace_by_name(settings.group))
    wanted = {orientation: images[orientation] for orientation in (UPRIGHT, ANY_ANGLE)}
    result = measure_accuracies(network, wanted, data, torch.device("cpu"))
    seconds = statistics.median(row["seconds"] for row in training.epochs)
    result |= {"parameters": count_parameters(network), "seconds": seconds}
    with atomic_file(finished) as file:
        file.write(json.dumps({"requested": requested, "measured": result}).encode())
    return result


def table(results: Mapping[str, Mapping[str, list[dict[str, float]]]]) -> str:
    """Means over the seeds and standard errors, as Markdown."""
    lines = [
        "| network | changed | upright (%) | any angle (%) | parameters | s an epoch |",
        "|---|---|---|---|---|---|",
    ]
    for name, variants in results.items():
        for change, runs in variants.items():
            cells = [
                mean_and_error([100 * found[orientation] for found in runs], 1) for orientation in (UPRIGHT, ANY_ANGLE)
            ]
            seconds = statistics.median(found["seconds"] for found in runs)
            lines.append(f"| {name} | {change} | {' | '.join(cells)} | {runs[0]['parameters']:,} | {seconds:.1f} |")
    return "\n".join(lines) + "\n"


def measure(
    out: Path,
    networks: Sequence[str],
    *,
    seeds: int = 3,
    group: str = "c8",
    epochs: int = 10,
    limit_train: int | None = None,
    limit_test: int | None = None,
) -> None:
    """Train all variants, or resume, and write their table.

    Args:
        out: the folder of the runs and of ``ablations.md``.
        networks: of :data:`VARIANTS`.
        seeds: how many times each is trained.
        group: of the networks, see ``escnn-attention compare``.
        epochs: of each training.
        limit_train: train on the first so many images.
        limit_test: test on the first so many images.
    """
    console = Console()
    results: dict[str, dict[str, list[dict[str, float]]]] = {}
    for name in networks:
        for number, (change, options) in enumerate(VARIANTS[name].items()):
            runs = results.setdefault(name, {}).setdefault(change, [])
            for seed in range(seeds):
                settings = Settings(
                    group=group,
                    epochs=epochs,
                    seed=seed,
                    limit_train=limit_train,
                    limit_test=limit_test,
                    output=out / f"{name}-{number}-{seed}",
                    accelerator="cpu",
                )
                runs.append(run(name, options, settings))
                console.print(f"{name}, {change}, seed {seed}: {runs[-1]}", highlight=False)
    text = table(results)
    with atomic_file(out / "ablations.md") as file:
        file.write(text.encode())
    console.print(text, highlight=False, markup=False)
