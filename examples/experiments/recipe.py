"""How the small versions of tables are trained: by the recipe of the documentation's page on training attention."""

from __future__ import annotations

from typing import Any

from examples.experiments.runs import DATA

RECIPE: dict[str, Any] = {
    f"{DATA}.limit_test": 2000,
    f"{DATA}.batch_size": 16,
    f"{DATA}.eval_batch_size": 100,
    "model.optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.005, "weight_decay": 0.01}},
    "model.decay": "weights",
    "model.schedule": "one-cycle",
    "model.warm_up": 0,
    "model.label_smoothing": 0.05,
}
"""Changes of a configuration. How many images and epochs there are is up to the table."""
