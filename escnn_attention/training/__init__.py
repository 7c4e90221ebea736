"""Training: data, networks, the Lightning modules, and the command line ``escnn-attention`` (extra ``train``).

The public names are imported when they are asked for, so that the command line answers ``--help`` at once.
"""

from __future__ import annotations

import importlib
from typing import Any

_NAMES = {
    "data.clouds.base": "Clouds",
    "data.clouds.charged_particles": "ChargedParticles",
    "data.clouds.constellations": "Constellations",
    "data.clouds.modelnet40": "ModelNet40",
    "data.clouds.qm9": "QM9",
    "data.clouds.springs": "Springs",
    "data.fields": "FieldData PoissonOnTorus",
    "data.images.canvas": "DigitCanvas",
    "data.images.cifar10": "CIFAR10",
    "data.images.digits": "Digits",
    "data.images.mnist": "MNIST RotMNIST",
    "data.images.patch_camelyon": "PatchCamelyon",
    "experiment": "load_network",
    "experiment.configuration": "recipe",
    "modules.classifier": "Classifier SegmentationModule",
    "modules.fields": "FieldModule",
    "modules.points": "PointClassifier PointDynamics PointForecast PointRegression",
}
_PLACES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_PLACES)


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
