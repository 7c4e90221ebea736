"""The recipe of docs/training_attention.md, for networks of other experiments."""

from __future__ import annotations

from typing import Any

from examples.experiments.runs import DATA

RECIPE: dict[str, Any] = {
    "model.optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.005, "weight_decay": 0.01}},
    "model.decay": "weights",
    "model.schedule": "one-cycle",
    "model.warm_up": 0,
    "model.label_smoothing": 0.05,
}
"""Changes of a configuration. How many images and epochs there are, and in which batches, is up to the table."""

SMALL_RECIPE: dict[str, Any] = {
    **RECIPE,
    f"{DATA}.limit_test": 2000,
    f"{DATA}.batch_size": 16,
    f"{DATA}.eval_batch_size": 100,
}
"""The same for the small versions."""
