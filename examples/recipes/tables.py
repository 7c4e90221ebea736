"""The runs, from the configuration files beside this one."""

from __future__ import annotations

from typing import Any

from examples.experiments.runs import DATA, NETWORK, Run

_STEERABLE, _HYBRID = "steerable-rotmnist", "hybrid-rotmnist"
_GSA_NET, _GSA_NET_R8 = "gsa-net-rotmnist", "gsa-net-r8-rotmnist"


def rotmnist(*, full_train: bool = False) -> list[Run]:
    """Rotated MNIST: steerable convolutions, a hybrid with as many parameters, and attention alone, for two groups.

    Args:
        full_train: train on the validation images as well; the last epoch counts.
    """
    changes: dict[str, Any] = {"changes": {f"{DATA}.full_train": True}, "variant": "full_train"} if full_train else {}
    return [
        Run("steerable CNN", _STEERABLE, group="C8", kind="convolution", **changes),
        Run("hybrid", _HYBRID, group="C8", kind="hybrid", **changes),
        Run("GSA-Net", _GSA_NET, group="C4", published=97.46, **changes),
        Run("GSA-Net, R8", _GSA_NET_R8, group="C8", published=97.90, **changes),
    ]


def short() -> list[Run]:
    """Rotated MNIST in a third of the epochs, with half of the parameters."""
    options: dict[str, Any] = {"trainer.max_epochs": 5}
    token = {"num_heads": 4, "head_fields": 4}
    return [
        Run(
            "steerable CNN",
            _STEERABLE,
            options | {f"{NETWORK}.widths": [6, 8, 11]},
            group="C8",
            kind="convolution",
            variant="short",
        ),
        Run(
            "hybrid",
            _HYBRID,
            options | {f"{NETWORK}.widths": [6, 8, 10], f"{NETWORK}.class_token": token},
            group="C8",
            kind="hybrid",
            variant="short",
        ),
    ]
