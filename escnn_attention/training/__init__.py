"""Training: data, networks, the Lightning modules, and the command line ``escnn-attention`` (extra ``train``).

The public names are imported when they are asked for, so that the command line answers ``--help`` at once.
"""

from __future__ import annotations

import importlib
from typing import Any

_PLACES = {
    "CIFAR10": "data",
    "ChargedParticles": "data",
    "Classifier": "modules.classifier",
    "Clouds": "data",
    "Constellations": "data",
    "DigitCanvas": "data",
    "Digits": "data",
    "FieldData": "data",
    "FieldModule": "modules.fields",
    "MNIST": "data",
    "ModelNet40": "data",
    "PatchCamelyon": "data",
    "PoissonOnTorus": "data",
    "PointClassifier": "modules.points",
    "PointDynamics": "modules.points",
    "PointForecast": "modules.points",
    "PointRegression": "modules.points",
    "QM9": "data",
    "RotMNIST": "data",
    "SampledSolids": "data",
    "SegmentationModule": "modules.classifier",
    "Springs": "data",
    "load_network": "experiment",
    "recipe": "experiment.configuration",
}

__all__ = sorted(_PLACES)


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
