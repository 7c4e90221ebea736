"""What is trained for a table: a configuration file, and what is changed in it."""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from escnn_attention.training.experiment import TEST, run_experiment
from escnn_attention.training.files import atomic_file

NETWORK = "model.network.init_args"
DATA = "data.init_args"


@dataclass(frozen=True)
class Run:
    """A network to train and test.

    Attributes:
        label: its name in tables and figures.
        base: a configuration file; its name starts with that of the data set and an underscore.
        changes: new values by their dotted names; a whole network under ``model.network``.
        group: the paper's name of the group.
        published: the accuracy in the paper in percent, where there is one.
        kind: what it is, such as ``"attention"`` or ``"convolution"``.
        shared: the label whose files it uses, where another table has the same run by that label.
    """

    label: str
    base: Path
    changes: Mapping[str, Any] = field(default_factory=dict)
    group: str = ""
    published: float | None = None
    kind: str = "attention"
    shared: str | None = None

    @property
    def name(self) -> str:
        """For its folder: the data set and the label."""
        name = f"{self.base.stem.partition('_')[0]}_{(self.shared or self.label).replace('×', 'x')}"
        return "".join(c if c.isalnum() else "_" for c in name).strip("_").lower()

    def configuration(self, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The configuration file with the changes in it, and ``more`` of them."""
        config = yaml.safe_load(self.base.read_text(encoding="utf-8"))
        for name, value in {**self.changes, **(more or {})}.items():
            _set(config, name.split("."), copy.deepcopy(value))
        return config


def _set(config: dict[str, Any], path: list[str], value: Any) -> None:
    *parents, last = path
    for key in parents:
        config = config.setdefault(key, {})
    config[last] = value


def execute(run: Run, folder: Path, more: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Train and test, or read the result if that was done before.

    A run that was killed goes on from its last epoch; one whose options are others is an error.

    Args:
        run: what to train.
        folder: of all runs.
        more: changes that hold for all of them.
        seed: of the weights, the order of the images and the dropout.

    Returns:
        what ``escnn-attention test`` writes.
    """
    own = folder / f"{run.name}-{seed}"
    own.mkdir(parents=True, exist_ok=True)
    file = own / "requested.yaml"
    config = yaml.safe_dump({**run.configuration(more), "seed_everything": seed}, sort_keys=False)
    if (own / TEST).exists() and file.exists() and file.read_text(encoding="utf-8") == config:
        return json.loads((own / TEST).read_text(encoding="utf-8"))
    # A result counts as that of a request only once it is there.
    (own / TEST).unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        request = Path(temporary) / "requested.yaml"
        request.write_text(config, encoding="utf-8")
        common = ["--config", str(request), "--folder", str(own)]
        run_experiment(["fit", *common])
        run_experiment(["test", *common])  # the network with the highest validation accuracy
    with atomic_file(file, "w") as kept:
        kept.write(config)
    return json.loads((own / TEST).read_text(encoding="utf-8"))
