"""The tables of the paper as lists of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from examples.experiments.runs import DATA, NETWORK, Run
from examples.experiments.twins import parameters, widest

_CONFIGURATIONS = Path(__file__).parent / "configurations"

# Table 1. Windows of 28×28 are global attention.
_NEIGHBOURHOODS = {3: 96.56, 5: 97.49, 7: 97.33, 9: 97.42, 11: 97.17, 15: 96.89, 19: 96.86, 23: 97.05, None: 96.81}
_FEWER = (3, 5, 7)

_GSPACES: dict[str, dict[str, Any]] = {
    "Z2": {"class_path": "escnn.gspaces.trivialOnR2"},
    "Z2M": {"class_path": "escnn.gspaces.flip2dOnR2"},
    **{f"R{n}": {"class_path": "escnn.gspaces.rot2dOnR2", "init_args": {"N": n}} for n in (4, 8, 12, 16)},
    "R4M": {"class_path": "escnn.gspaces.flipRot2dOnR2", "init_args": {"N": 4}},
}

# The convolutional twin of each attention network, and a hybrid: stages of HybridNet with the proportions of their
# widths.
_TWINS: dict[str, dict[str, dict[str, Any]]] = {
    "rotmnist": {
        "convolution": {"widths": (1, 1), "convolutions": (3, 3), "attention": (0, 0)},
        "hybrid": {"widths": (1, 1), "convolutions": (3, 0), "attention": (0, 2), "kernel_size": 7},
    },
    "cifar10": {
        "convolution": {"widths": (1, 2, 2), "convolutions": (2, 2, 2), "attention": (0, 0, 0)},
        "hybrid": {"widths": (1, 2, 2), "convolutions": (2, 2, 0), "attention": (0, 0, 2), "kernel_size": 7},
    },
    "pcam": {
        "convolution": {"widths": (1, 2, 4, 4), "convolutions": (1, 1, 2, 1), "attention": (0, 0, 0, 0)},
        "hybrid": {"widths": (1, 2, 4, 4), "convolutions": (1, 1, 1, 0), "attention": (0, 0, 0, 1), "kernel_size": 7},
    },
}
_IMAGES = {"rotmnist": (1, 10), "cifar10": (3, 10), "pcam": (3, 2)}  # channels, classes
_ADAM = {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.001, "weight_decay": 0.0001}}

_PUBLISHED = {
    "rotmnist": {"Z2": 96.37, "R4": 97.46, "R8": 97.90, "R12": 97.97, "R16": 97.66},
    "cifar10": {"Z2": 82.3, "Z2M": 83.72},
    "pcam": {"Z2": 83.04, "R4": 83.44, "R8": 83.58, "R4M": 84.76},
}


SMALL = (
    "few images, of half the width and height, few epochs, and attention networks with 2 blocks after a pooling, of "
    "20 fields, 2 heads and own queries, without dropout: not the paper's networks"
)
"""What the small version is."""

_SMALL_TRAINING = {
    f"{DATA}.limit_train": 3000,
    f"{DATA}.limit_valid": 500,
    f"{DATA}.limit_test": 2000,
    f"{DATA}.batch_size": 16,
    f"{DATA}.eval_batch_size": 100,
    # Few steps want a high learning rate and a schedule.
    "trainer.max_epochs": 10,
    "trainer.precision": "32-true",
    "model.optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.01}},
    "model.schedule": "one-cycle",
    "model.warm_up": 1,
}
_SMALL_ATTENTION = {
    f"{NETWORK}.channels": 20,
    f"{NETWORK}.blocks": [0, 2],
    f"{NETWORK}.expansion": None,
    f"{NETWORK}.crops": None,
    f"{NETWORK}.pool": [True, False],
    f"{NETWORK}.num_heads": 2,
    f"{NETWORK}.query": "own",
    **{f"{NETWORK}.{part}_dropout": 0.0 for part in ("attention", "value", "input", "pool")},
}


def table_1(small: bool) -> list[Run]:
    """Accuracy against the size of the neighbourhood (R4, rotated MNIST); Figure 3 is their curves."""
    return [
        Run(
            f"R4 SA {size or 28}×{size or 28}" + (" (global)" if size is None else ""),
            _base("rotmnist", "R4"),
            {f"{NETWORK}.kernel_size": size, **(_small("rotmnist") | _SMALL_ATTENTION if small else {})},
            "R4",
            published,
            shared="R4 SA" if size == 5 else None,
        )
        for size, published in _NEIGHBOURHOODS.items()
        if not small or size in _FEWER
    ]


def table_2(data: str, small: bool) -> list[Run]:
    """Classification: every discretisation of the paper, convolutional twins, and hybrids.

    The twins have as many parameters as the attention network, or a little fewer.
    """
    runs = [
        Run(f"{group} SA", _base(data, group), _small(data) | _SMALL_ATTENTION if small else {}, group, published)
        for group, published in _PUBLISHED[data].items()
        if not small or group not in ("R8", "R12", "R16")
    ]
    budget = parameters(runs[0])
    groups = [run.group for run in runs if not small or run.group in ("R4", "Z2M")]
    common = {"model.optimizer": _ADAM, f"{DATA}.batch_size": 64, **(_small(data) if small else {})}
    twins = [
        Run(
            f"{group} {label}",
            _base(data, group),
            {"model.network": _twin(data, kind, group, budget), **common},
            group,
            None,
            kind,
        )
        for kind, label in (("convolution", "CNN"), ("hybrid", "hybrid"))
        for group in groups
    ]
    return runs + twins


def _small(data: str) -> dict[str, Any]:
    """What small runs have in common."""
    name = {"rotmnist": "HalfRotMNIST", "cifar10": "HalfCIFAR10", "pcam": "HalfPatchCamelyon"}[data]
    return {"data.class_path": f"examples.experiments.half_size.{name}", **_SMALL_TRAINING}


def _base(data: str, group: str) -> Path:
    return _CONFIGURATIONS / f"{data}_{group.lower()}.yaml"


def _twin(data: str, kind: str, group: str, budget: int) -> dict[str, Any]:
    """A HybridNet with at most ``budget`` parameters, as a configuration."""
    outline = dict(_TWINS[data][kind])
    proportions = outline.pop("widths")
    channels, classes = _IMAGES[data]

    def network(widths: list[int]) -> dict[str, Any]:
        return {
            "class_path": "escnn_attention.models.HybridNet",
            "init_args": {
                "gspace": _GSPACES[group],
                "in_channels": channels,
                "num_classes": classes,
                "widths": widths,
                **{name: list(value) if isinstance(value, tuple) else value for name, value in outline.items()},
            },
        }

    return widest(network, proportions, budget)
