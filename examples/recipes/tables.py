"""What is trained: the configuration files beside this one."""

from __future__ import annotations

from pathlib import Path

from examples.experiments.runs import Run

_CONFIGURATIONS = Path(__file__).parent / "configurations"


def rotmnist() -> list[Run]:
    """Rotated MNIST: steerable convolutions, a hybrid of as many parameters, and attention alone."""
    return [
        Run("steerable CNN", _CONFIGURATIONS / "rotmnist_steerable.yaml", group="C8", kind="convolution"),
        Run("hybrid", _CONFIGURATIONS / "rotmnist_hybrid.yaml", group="C8", kind="hybrid"),
        Run("GSA-Net", _CONFIGURATIONS / "rotmnist_gsa_net.yaml", group="C4", published=97.46),
    ]
