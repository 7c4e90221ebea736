"""The command ``test --pretrained``: measure a network that ships with the package or lies in a folder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import lightning.pytorch as pl
from jsonargparse import ArgumentParser

from escnn_attention import models
from escnn_attention.models.cloud_network import CloudNetwork
from escnn_attention.models.registry import recipe_file
from escnn_attention.training.errors import UserError, as_misuse, as_user_error, quiet_lightning
from escnn_attention.training.experiment.configuration import known_options, recipe
from escnn_attention.training.experiment.network import check_fit
from escnn_attention.training.modules import TASKS, Task

_OPTION = "--pretrained"
_KINDS = {"classification": "images", "segmentation": "fields", "fields": "fields"}


class Measured(NamedTuple):
    """A measurement: the network, the data, their number, and the measures by name."""

    network: str
    data: str
    size: int
    things: str
    numbers: dict[str, float]

    def __str__(self) -> str:
        numbers = (
            f"{name} {100 * value:.2f} %" if name == "accuracy" else f"{name} {value:.4f}"
            for name, value in self.numbers.items()
        )
        return f"{self.network} on the test part of {self.data}: {', '.join(numbers)}, {self.size} {self.things}"


def is_asked_for(arguments: Sequence[str]) -> bool:
    """Whether the options of a command have ``--pretrained``."""
    return any(argument.partition("=")[0] == _OPTION for argument in arguments)


def run_pretrained(arguments: Sequence[str]) -> Measured:
    """Measure a trained network on the test part of its data.

    The ``arguments`` of ``escnn-attention test`` are ``--pretrained`` with a name of
    :func:`escnn_attention.models.list_models`, a folder or a repository, and ``--task``, ``--data``, ``--trainer`` as
    in trainings. Task and data of a name are known, those of a folder are not.
    """
    about = "Measure a network that is trained already."
    parser = ArgumentParser(prog="escnn-attention test", description=about, exit_on_error=False)
    parser.add_argument(_OPTION, required=True, help="A name of models.list_models(pretrained=True), or a folder.")
    parser.add_argument("--task", type=Task, default="classification", help="What it was trained for.")
    parser.add_subclass_arguments(pl.LightningDataModule, "data", required=False, help="By default those of the name.")
    parser.add_argument("--trainer.accelerator", type=str, default="auto", help="Where to compute: cpu, cuda or mps.")
    parser.add_argument("--trainer.precision", type=str, default="32-true", help="Of the computation.")
    parser.add_argument("--trainer.enable_progress_bar", type=bool, default=True, help="Whether to show one.")
    name: str | None = known_options(arguments).pretrained
    if not name:
        raise UserError(f"{_OPTION}: needed a name or a folder")
    if recipe_file(name).is_file():
        known = recipe(name)
        parser.set_defaults({"data": known["data"], "task": known.get("task", "classification")})
    with as_misuse(f"test {_OPTION} {name}"):
        config = parser.parse_args(list(arguments))
    with quiet_lightning(), as_user_error(OSError, ImportError, TypeError, ValueError):
        network = models.from_pretrained(name)
        if config.get("data") is None:
            example = "escnn_attention.training.RotMNIST"
            raise UserError(f"--data: {name} does not say on which data; give a class such as {example}")
        chosen = parser.instantiate_classes(config)
        return _measure(name, network, config.task, chosen.data, config.trainer.as_dict())


def _measure(name: str, network: Any, task: str, data: pl.LightningDataModule, options: dict[str, Any]) -> Measured:
    of_points = isinstance(network, (CloudNetwork, models.HamiltonianNetwork))
    images = isinstance(getattr(network, "num_classes", None), int)
    kind = "points" if of_points else "images" if images else "fields"
    if kind != _KINDS.get(task, "points"):
        raise UserError(f"--task: {name} is a {type(network).__name__}, a network of {kind}, got {task}")
    trainer = pl.Trainer(**options, devices=1, logger=False, enable_checkpointing=False, enable_model_summary=False)
    make: Any = TASKS[task]
    counts = ("num_classes", "num_targets") if task == "point-classification" else ()  # which the network does not tell
    told_by_data = {count: getattr(data, count) for count in counts if hasattr(data, count)}
    model = make(network=network, **told_by_data)
    check_fit(model, data, f"{_OPTION} {name}")
    (found,) = trainer.test(model, data, verbose=False)
    # The data modules of this package have a sampler that knows how many of the data it is for.
    loaders: Any = trainer.test_dataloaders
    loaders = loaders if isinstance(loaders, list) else [loaders]
    size = sum(getattr(loader.sampler, "length", len(loader.dataset)) for loader in loaders)
    numbers = {key.removeprefix("test_"): value for key, value in found.items()}
    best_first = dict(sorted(numbers.items(), key=lambda item: item[0] == "loss"))
    return Measured(name, type(data).__name__, size, getattr(data, "things", "images"), best_first)
