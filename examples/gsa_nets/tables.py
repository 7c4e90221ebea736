"""The tables of the paper as lists of runs."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from examples.gsa_nets.runs import NETWORK, Run

# Table 1. Windows of 28×28 are global attention.
_NEIGHBOURHOODS = {3: 96.56, 5: 97.49, 7: 97.33, 9: 97.42, 11: 97.17, 15: 96.89, 19: 96.86, 23: 97.05, None: 96.81}
_FEWER = (3, 5)

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


def table_1(small: bool) -> list[Run]:
    """Accuracy against the size of the neighbourhood (R4, rotated MNIST); Figure 3 is their curves."""
    return [
        Run(
            f"R4 SA {size or 28}×{size or 28}" + (" (global)" if size is None else ""),
            "rotmnist_r4",
            {f"{NETWORK}.kernel_size": size},
            "R4",
            published,
        )
        for size, published in _NEIGHBOURHOODS.items()
        if not small or size in _FEWER
    ]


def table_2(data: str, small: bool) -> list[Run]:
    """Classification: every discretisation of the paper, convolutional twins, and hybrids.

    The twins have as many parameters as the attention network, or a little fewer.
    """
    published = _PUBLISHED[data]
    runs = [Run(f"{group} SA", f"{data}_{group.lower()}", {}, group, value) for group, value in published.items()]
    if small:
        runs = [run for run in runs if run.group not in ("R8", "R12", "R16")]
    budget = parameters(runs[0], small)
    for kind, label in (("convolution", "CNN"), ("hybrid", "hybrid")):
        for run in [run for run in runs if run.kind == "attention"]:
            if small and run.group not in ("R4", "Z2M"):
                continue
            network = _twin(data, kind, run.group, budget)
            changes = {"model.network": network, "model.optimizer": _ADAM, "data.init_args.batch_size": 64}
            runs.append(Run(f"{run.group} {label}", run.base, changes, run.group, None, kind))
    return runs


def parameters(run: Run, small: bool) -> int:
    """The number of parameters of a run's network."""
    return _count(_build(run.configuration(SMALL if small else {})["model"]["network"]))


def _twin(data: str, kind: str, group: str, budget: int) -> dict[str, Any]:
    """A HybridNet with at most ``budget`` parameters, as a configuration."""
    outline = dict(_TWINS[data][kind])
    proportions = outline.pop("widths")
    channels, classes = _IMAGES[data]

    def configuration(widths: Sequence[int]) -> dict[str, Any]:
        return {
            "class_path": "escnn_attention.models.HybridNet",
            "init_args": {
                "gspace": _GSPACES[group],
                "in_channels": channels,
                "num_classes": classes,
                "widths": list(widths),
                **{name: list(value) if isinstance(value, tuple) else value for name, value in outline.items()},
            },
        }

    def fits(widths: Sequence[int]) -> bool:
        return _count(_build(configuration(widths))) <= budget

    width = _largest(lambda w: fits([w * part for part in proportions]))
    widths = [width * part for part in proportions]
    # The last stage, whose fields cost least, takes what is left.
    more = _largest(lambda n: fits([*widths[:-1], widths[-1] + n]), least=0)
    return configuration([*widths[:-1], widths[-1] + more])


def _largest(fits: Callable[[int], bool], least: int = 1) -> int:
    """The largest number that fits, where all smaller ones do too; ``least`` is taken to fit."""
    low, high = least, least + 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _build(network: dict[str, Any]) -> torch.nn.Module:
    arguments = dict(network["init_args"])
    gspace = arguments.pop("gspace")
    space = _named(gspace["class_path"])(**gspace.get("init_args", {}))
    with torch.random.fork_rng(devices=[]):
        return _named(network["class_path"])(space, **arguments)


def _named(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _count(network: torch.nn.Module) -> int:
    return sum(p.numel() for p in network.parameters() if p.requires_grad)


SMALL: dict[str, Any] = {
    f"{NETWORK}.channels": 12,
    f"{NETWORK}.num_heads": 1,
    f"{NETWORK}.query": "own",
}
"""What makes the attention networks of the small version cheap; the rest is in the options of the command line."""
