"""Runs of a table: a configuration file and changes of it."""

from __future__ import annotations

import copy
import importlib
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from escnn_attention.training import recipe
from escnn_attention.training.experiment import TEST, run_experiment
from escnn_attention.training.files import atomic_file

NETWORK = "model.network.init_args"
DATA = "data.init_args"


@dataclass(frozen=True)
class Run:
    """A network to train and test.

    Attributes:
        label: the name in tables and figures.
        base: a configuration file, whose name starts with that of the data set and an underscore; or the name of
            weights, which ends in that of the data set, for their recipe.
        changes: new values by their dotted names; a whole network under ``model.network``.
        group: the paper's name of the group.
        published: the accuracy in the paper in percent, if any.
        kind: such as ``"attention"`` or ``"convolution"``.
        shared: the label whose files it uses, if another table has the same run by that label.
        variant: marks the folder of the same run with other options, such as another learning rate.
    """

    label: str
    base: Path | str
    changes: Mapping[str, Any] = field(default_factory=dict)
    group: str = ""
    published: float | None = None
    kind: str = "attention"
    shared: str | None = None
    variant: str = ""

    @property
    def name(self) -> str:
        """The name of its folder: the data set, the label and the variant."""
        base = self.base
        data = base.rpartition("-")[2] if isinstance(base, str) else base.stem.partition("_")[0]
        name = f"{data}_{(self.shared or self.label).replace('×', 'x')}_{self.variant}"
        return "".join(c if c.isalnum() else "_" for c in name).strip("_").lower()

    def configuration(self, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The configuration file with the changes of the run and ``more``.

        If ``more`` changes the epochs, the warm-up changes in proportion.
        """
        base = self.base
        config = recipe(base) if isinstance(base, str) else yaml.safe_load(base.read_text(encoding="utf-8"))
        for name, value in self.changes.items():
            set_value(config, name, copy.deepcopy(value))
        planned, warm_up = config["trainer"].get("max_epochs"), config["model"].get("warm_up")
        for name, value in (more or {}).items():
            set_value(config, name, copy.deepcopy(value))
        epochs = config["trainer"].get("max_epochs")
        if warm_up and planned and epochs != planned and "model.warm_up" not in (more or {}):
            config["model"]["warm_up"] = warm_up * epochs / planned
        return config


def set_value(config: dict[str, Any], path: str, value: Any) -> None:
    """Set one value of a configuration by its dotted name."""
    *parents, last = path.split(".")
    for key in parents:
        config = config.setdefault(key, {})
    config[last] = value


def named(path: str) -> Any:
    """The object of a path in a configuration such as ``escnn.gspaces.rot2dOnR2``."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def execute(run: Run, folder: Path, more: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Train and test, or read an earlier result.

    A killed run resumes after its last epoch; other options raise an error.

    Args:
        run: what to train.
        folder: of all runs.
        more: changes of all runs.
        seed: of the weights, the order of the images and the dropout.

    Returns:
        the content of ``test.json`` of ``escnn-attention test``.
    """
    own = folder / f"{run.name}-{seed}"
    own.mkdir(parents=True, exist_ok=True)
    file = own / "requested.yaml"
    config = yaml.safe_dump({**run.configuration(more), "seed_everything": seed}, sort_keys=False)
    if (own / TEST).exists() and file.exists() and file.read_text(encoding="utf-8") == config:
        return json.loads((own / TEST).read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as temporary:
        request = Path(temporary) / "requested.yaml"
        request.write_text(config, encoding="utf-8")
        common = ["--config", str(request), "--folder", str(own)]
        run_experiment(["fit", *common])
        # From here on the result may be another: it counts as that of a request only once that is written beside it.
        file.unlink(missing_ok=True)
        run_experiment(["test", *common])  # the network with the highest validation accuracy
    with atomic_file(file, "w") as kept:
        kept.write(config)
    return json.loads((own / TEST).read_text(encoding="utf-8"))
