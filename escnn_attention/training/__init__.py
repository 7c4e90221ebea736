"""Training: data, networks, the Lightning modules, and the command line ``escnn-attention`` (extra ``train``).

The public names are imported when they are asked for, so that the command line answers ``--help`` at once.
"""

from __future__ import annotations

import importlib
from typing import Any

_PLACES = {
    "CIFAR10": "data.images.cifar10",
    "ChargedParticles": "data.clouds.charged_particles",
    "Classifier": "modules.classifier",
    "Clouds": "data.clouds.base",
    "Constellations": "data.clouds.constellations",
    "DigitCanvas": "data.images.canvas",
    "Digits": "data.images.digits",
    "FieldData": "data.fields",
    "FieldModule": "modules.fields",
    "MNIST": "data.images.mnist",
    "ModelNet40": "data.clouds.modelnet40",
    "PatchCamelyon": "data.images.patch_camelyon",
    "PoissonOnTorus": "data.fields",
    "PointClassifier": "modules.points",
    "PointDynamics": "modules.points",
    "PointForecast": "modules.points",
    "PointRegression": "modules.points",
    "QM9": "data.clouds.qm9",
    "RotMNIST": "data.images.mnist",
    "SegmentationModule": "modules.classifier",
    "Springs": "data.clouds.springs",
    "load_network": "experiment",
    "recipe": "experiment.configuration",
}

__all__ = sorted(_PLACES)


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
