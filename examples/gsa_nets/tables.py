"""The tables of the paper as lists of runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from examples.experiments.recipe import SMALL_RECIPE
from examples.experiments.runs import DATA, NETWORK, Run

_CONFIGURATIONS = Path(__file__).parent / "configurations"

# Table 1. Windows of 28×28 are global attention.
_NEIGHBOURHOODS = {3: 96.56, 5: 97.49, 7: 97.33, 9: 97.42, 11: 97.17, 15: 96.89, 19: 96.86, 23: 97.05, None: 96.81}
_FEWER = (3, 5, 7, None)

_GSPACES: dict[str, dict[str, Any]] = {
    "Z2": {"class_path": "escnn.gspaces.trivialOnR2"},
    "Z2M": {"class_path": "escnn.gspaces.flip2dOnR2"},
    **{f"R{n}": {"class_path": "escnn.gspaces.rot2dOnR2", "init_args": {"N": n}} for n in (4, 8, 12, 16)},
    "R4M": {"class_path": "escnn.gspaces.flipRot2dOnR2", "init_args": {"N": 4}},
}

# The convolutional twin of each attention network, and a hybrid: stages of HybridNet.
_TWINS: dict[str, dict[str, dict[str, Any]]] = {
    "rotmnist": {
        "convolution": {"convolutions": [3, 3], "attention": [0, 0]},
        "hybrid": {"convolutions": [3, 0], "attention": [0, 2], "kernel_size": 7},
    },
    "cifar10": {
        "convolution": {"convolutions": [2, 2, 2], "attention": [0, 0, 0]},
        "hybrid": {"convolutions": [2, 2, 0], "attention": [0, 0, 2], "kernel_size": 7},
    },
    "pcam": {
        "convolution": {"convolutions": [1, 1, 2, 1], "attention": [0, 0, 0, 0]},
        "hybrid": {"convolutions": [1, 1, 1, 0], "attention": [0, 0, 0, 1], "kernel_size": 7},
    },
}
# Their widths, in the proportions 1:1, 1:2:2 and 1:2:4:4 but for the last: the largest with at most as many parameters
# as the attention network without rotations. Finding them takes minutes for large networks, so they are listed.
_WIDTHS: dict[tuple[str, str], dict[str, list[int]]] = {
    ("rotmnist", "convolution"): {
        "Z2": [37, 38],
        "R4": [18, 19],
        "R8": [13, 13],
        "R12": [10, 11],
        "R16": [9, 9],
    },
    ("rotmnist", "hybrid"): {"Z2": [37, 37], "R4": [19, 19], "R8": [13, 13], "R12": [11, 11], "R16": [9, 9]},
    ("pcam", "convolution"): {
        "Z2": [28, 56, 112, 121],
        "R4": [14, 28, 56, 61],
        "R8": [10, 20, 40, 41],
        "R4M": [10, 20, 40, 41],
    },
    ("pcam", "hybrid"): {
        "Z2": [32, 64, 128, 128],
        "R4": [16, 32, 64, 64],
        "R8": [11, 22, 44, 44],
        "R4M": [11, 22, 44, 44],
    },
    ("cifar10", "convolution"): {"Z2": [182, 364, 364], "Z2M": [128, 256, 260]},
    ("cifar10", "hybrid"): {"Z2": [163, 326, 328], "Z2M": [118, 236, 236]},
}
# A larger pair than the paper's networks: a steerable CNN, and a hybrid of the same size.
_LARGE: dict[str, dict[str, Any]] = {
    "convolution": {"convolutions": [2, 2, 2], "attention": [0, 0, 0]},
    "hybrid": {"convolutions": [2, 2, 0], "attention": [0, 0, 2], "kernel_size": 7, "num_heads": 4},
}
_LARGE_WIDTHS = {"convolution": [20, 40, 80], "hybrid": [16, 32, 64]}
_LARGE_TRAINING = {
    "trainer.max_epochs": 100,
    "trainer.precision": "32-true",
    "model.optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.002, "weight_decay": 0.0001}},
    "model.schedule": "cosine",
    "model.warm_up": 5,
    f"{DATA}.batch_size": 64,
}
_KINDS = {"convolution": "CNN", "hybrid": "hybrid"}
_IMAGES = {"rotmnist": (1, 10), "cifar10": (3, 10), "pcam": (3, 2)}  # channels, classes
_ADAM = {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.001, "weight_decay": 0.0001}}

_PUBLISHED = {
    "rotmnist": {"Z2": 96.37, "R4": 97.46, "R8": 97.90, "R12": 97.97, "R16": 97.66},
    "cifar10": {"Z2": 82.3, "Z2M": 83.72},
    "pcam": {"Z2": 83.04, "R4": 83.44, "R8": 83.58, "R4M": 84.76},
}


# Those of the small version.
_SMALL_GROUPS = {"rotmnist": ("Z2", "R4", "R8"), "cifar10": ("Z2", "Z2M"), "pcam": ("Z2", "R4", "R4M")}

SMALL = (
    "few images of half the width and height, few epochs, and networks of two stages with about 9,600 parameters, "
    "trained by the recipe of examples/recipes: not the paper's networks"
)
"""The description of the small version."""

_SMALL_TRAINING: dict[str, Any] = {
    **SMALL_RECIPE,
    f"{DATA}.limit_train": 3000,
    f"{DATA}.limit_valid": 2000,
    "trainer.max_epochs": 10,
    "trainer.precision": "32-true",
}
_SMALL_BLOCKS: dict[str, Any] = {
    "num_heads": 8,
    "kernel_size": 5,
    "block": {
        "encoding": "convolutional",
        "head_fields": 2,
        "keys": "own",
        "projection": "group",
        "norm_scope": "sample",
    },
    "last_norm": False,
}
_SMALL_OUTLINES: dict[str, dict[str, Any]] = {
    "attention": {
        "convolutions": [1, 0],
        "attention": [0, 2],
        "stem": {"num_heads": 9, "kernel_size": 5},
        **_SMALL_BLOCKS,
    },
    "convolution": {"convolutions": [3, 3], "attention": [0, 0]},
    "hybrid": {"convolutions": [3, 2], "attention": [0, 1], **_SMALL_BLOCKS},
}
_SMALL_GLOBAL = {
    "kernel_size": None,
    "block": {
        **_SMALL_BLOCKS["block"],
        # Heads begin with places of a window of 5×5 on 7×7 positions.
        "encoding": {"class_path": "escnn_attention.ConvolutionalEncoding", "init_args": {"width": 5, "reach": 1 / 3}},
    },
}
# Fields of both stages: networks of all groups and kinds have about as many parameters.
_SMALL_WIDTHS: dict[str, dict[str, list[int]]] = {
    "attention": {"Z2": [25, 25], "Z2M": [16, 16], "R4": [10, 10], "R8": [6, 6], "R4M": [6, 6]},
    "convolution": {"Z2": [17, 18], "Z2M": [12, 12], "R4": [9, 9], "R8": [4, 8], "R4M": [4, 8]},
    "hybrid": {"Z2": [16, 17], "Z2M": [12, 11], "R4": [8, 8], "R8": [6, 5], "R4M": [6, 5]},
}


def table_1(small: bool) -> list[Run]:
    """Accuracy against the size of the neighbourhood (R4, rotated MNIST), beside the R4 twins of Table 2.

    Figure 3 shows their curves.
    """
    attention = [
        Run(
            f"R4 SA {size or 28}×{size or 28}" + (" (global)" if size is None else ""),
            _base("rotmnist", "R4"),
            _small("rotmnist", "R4", "attention", size) if small else {f"{NETWORK}.kernel_size": size},
            "R4",
            published,
            shared="R4 SA" if size == 5 else None,
        )
        for size, published in _NEIGHBOURHOODS.items()
        if not small or size in _FEWER
    ]
    return attention + _twins("rotmnist", small, ["R4"])


def table_2(data: str, small: bool, stand_in: bool = False) -> list[Run]:
    """Classification: every discretisation of the paper, convolutional twins, and hybrids.

    The twins have about as many parameters as the attention network. The full version has a larger pair on rotated
    MNIST.

    Args:
        data: the data set.
        small: the small version.
        stand_in: use two classes of CIFAR-10 in the small version of PatchCamelyon; the paper has no numbers for them.
    """
    runs = [
        Run(f"{group} SA", _base(data, group), _small(data, group, "attention") if small else {}, group, published)
        for group, published in _PUBLISHED[data].items()
        if not small or group in _SMALL_GROUPS[data]
    ]
    large = _large() if data == "rotmnist" and not small else []
    runs += _twins(data, small, _SMALL_GROUPS[data] if small else list(_WIDTHS[data, "convolution"])) + large
    if not stand_in:
        return runs
    of_two_classes = {"data.class_path": "examples.experiments.half_size.HalfAirplanesAndCars"}
    return [replace(r, changes={**r.changes, **of_two_classes}, published=None, variant="stand in") for r in runs]


def _twins(data: str, small: bool, groups: Sequence[str]) -> list[Run]:
    def changes(group: str, kind: str) -> dict[str, Any]:
        if small:
            return _small(data, group, kind)
        # They converge within the epochs of the attention networks, and better where the learning rate falls.
        training = {"model.optimizer": _ADAM, "model.schedule": "cosine", f"{DATA}.batch_size": 64}
        return {"model.network": _hybrid(data, group, _TWINS[data][kind], _WIDTHS[data, kind][group]), **training}

    return [
        Run(f"{group} {label}", _base(data, group), changes(group, kind), group, None, kind)
        for kind, label in _KINDS.items()
        for group in groups
    ]


def _large() -> list[Run]:
    """A steerable CNN and a hybrid with about ten times as many parameters."""
    return [
        Run(
            f"R8 {label}, large",
            _base("rotmnist", "R8"),
            {"model.network": _hybrid("rotmnist", "R8", _LARGE[kind], _LARGE_WIDTHS[kind]), **_LARGE_TRAINING},
            "R8",
            None,
            kind,
        )
        for kind, label in _KINDS.items()
    ]


def _small(data: str, group: str, kind: str, window: int | None = 5) -> dict[str, Any]:
    """A small run with a given window, or with global attention in its blocks."""
    name = {"rotmnist": "HalfRotMNIST", "cifar10": "HalfCIFAR10", "pcam": "HalfPatchCamelyon"}[data]
    # Rotated digits may be rotated again; photographs are upright.
    more = {f"{DATA}.rotate_train": 360.0, "trainer.max_epochs": 15} if data == "rotmnist" else {}
    stem = {"num_heads": 9, "kernel_size": window or 5}
    windows = {"stem": stem, **({"kernel_size": window} if window else _SMALL_GLOBAL)}
    outline = _SMALL_OUTLINES[kind] | (windows if kind == "attention" else {})
    return {
        "data.class_path": f"examples.experiments.half_size.{name}",
        "model.network": _hybrid(data, group, outline, _SMALL_WIDTHS[kind][group]),
        **_SMALL_TRAINING,
        **more,
    }


def _base(data: str, group: str) -> Path:
    return _CONFIGURATIONS / f"{data}_{group.lower()}.yaml"


def _hybrid(data: str, group: str, outline: Mapping[str, Any], widths: Sequence[int]) -> dict[str, Any]:
    """A HybridNet as a configuration."""
    channels, classes = _IMAGES[data]
    return {
        "class_path": "escnn_attention.models.HybridNet",
        "init_args": {
            "gspace": _GSPACES[group],
            "in_channels": channels,
            "num_classes": classes,
            "widths": list(widths),
            **outline,
        },
    }
