"""Lightning modules: losses and measures of the tasks that networks are trained for."""

from __future__ import annotations

from typing import Any, Literal

from escnn_attention.training.modules.classifier import Classifier, SegmentationModule
from escnn_attention.training.modules.fields import FieldModule
from escnn_attention.training.modules.points import PointClassifier, PointDynamics, PointForecast, PointRegression
from escnn_attention.training.modules.scheduled import Scheduled

__all__ = ["TASKS", "Task"]

TASKS: dict[str, type[Scheduled]] = {
    "classification": Classifier,
    "segmentation": SegmentationModule,
    "fields": FieldModule,
    "point-classification": PointClassifier,
    "point-regression": PointRegression,
    "point-dynamics": PointDynamics,
    "point-forecast": PointForecast,
}
"""The Lightning module of each task."""

Task: Any = Literal[tuple(TASKS)]
