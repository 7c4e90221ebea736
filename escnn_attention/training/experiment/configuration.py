"""Configurations of experiments as plain values: recipes, options, and the parts that a training depends on."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch.cli import LightningArgumentParser

from escnn_attention.models import list_models
from escnn_attention.models.registry import description_of, recipe_file
from escnn_attention.training.errors import UserError
from escnn_attention.training.experiment.trust import check_kept
from escnn_attention.training.files import content_of

# Options of the data that may change when a training resumes.
_OF_DATA = ("folder", "num_workers", "download", "eval_batch_size", "limit_valid", "limit_test")
_INCIDENTAL = tuple(f"data.init_args.{name}" for name in _OF_DATA)
# Options of the trainer that are part of the training.
_TRAINING: tuple[str, ...] = ("precision", "gradient_clip_val", "gradient_clip_algorithm", "accumulate_grad_batches")
_TRAINING += ("limit_train_batches", "overfit_batches", "max_steps")


def recipe(name: str) -> dict[str, Any]:
    """The configuration of the training that made the weights of a network of this ``name``.

    Raises:
        UserError: it is none of ``models.list_models(pretrained=True)``.

    Example:
        >>> from escnn_attention.training import recipe
        >>> recipe("hybrid-rotmnist")["data"]["init_args"]
        {'batch_size': 32, 'rotate_train': 45}
    """
    known = [name for name in list_models(pretrained=True) if recipe_file(name).is_file()]
    if name not in known:
        raise UserError(f"--recipe: got {name}, needed one of {', '.join(known)}")
    return _merged({"model": {"network": description_of(name)}}, _training_of(name))


def _training_of(name: str) -> dict[str, Any]:
    """The recipe of a network without the network; ``like`` in its file names the recipe that it changes."""
    own: dict[str, Any] = yaml.safe_load(recipe_file(name).read_text(encoding="utf-8"))
    like = own.pop("like", None)
    return own if like is None else _merged(_training_of(like), own)


def _merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    inner = {
        name: _merged(base[name], value)
        for name, value in changes.items()
        if isinstance(value, dict) and isinstance(base.get(name), dict)
    }
    return {**base, **changes, **inner}


def known_options(arguments: Sequence[str]) -> argparse.Namespace:
    """The values of a few options, which have to be known before all are parsed."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-c", "--config", action="append", default=[])
    parser.add_argument("--trust", action="store_true")
    for name in ("--folder", "--pretrained", "--recipe", "--task"):
        parser.add_argument(name, nargs="?")
    return parser.parse_known_args(list(arguments))[0]


def find_task(arguments: Sequence[str]) -> str:
    """The task that the options or the configuration files name; the other options depend on it."""
    known, task = known_options(arguments), "classification"
    for path in known.config:
        try:
            content = content_of(path if path.startswith("{") else Path(path).read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise UserError(f"--config: {path} is not a text file") from error
        except yaml.YAMLError as error:
            raise UserError(f"--config: {path} is not YAML: {' '.join(str(error).split())}") from error
        except (OSError, ValueError):
            continue  # a file that cannot be opened is reported once the options are known
        if isinstance(content, dict) and "task" in content:
            task = str(content["task"])
    return task if known.task is None else str(known.task)


def with_configuration(arguments: Sequence[str], name: str) -> list[str]:
    """The options of a command, with the configuration ``name`` that its folder keeps where none is given.

    There must be one, and that of the folder may name nothing that needs ``--trust``.
    """
    command, *options = arguments or [""]
    known = known_options(options)
    if command == "fit" or known.config:
        return list(arguments)
    if known.folder and (kept := Path(known.folder) / name).is_file():
        if not known.trust:
            check_kept(kept)
        return [command, "--config", str(kept), *options]
    if any(option.startswith(("-h", "--help", "--print_config", "--model", "--data")) for option in options):
        return list(arguments)
    if known.folder:
        raise UserError(
            f"--folder: {known.folder} holds no {name}: run 'escnn-attention fit' with this --folder first, or give"
            " --config"
        )
    if command in ("validate", "test", "predict"):
        raise UserError(f"--folder: got none, needed that of the training to {command}")
    return list(arguments)


def plain(parser: LightningArgumentParser, config: Any, subcommand: str | None) -> dict[str, Any]:
    """The configuration of a command as plain values."""
    # With nulls: one that is given in place of another default is part of the configuration. What was parsed is valid.
    dumped = json.loads(parser.dump(config, format="json", skip_unset=False, skip_validation=True))
    return dumped if subcommand is None else dumped[subcommand]


def essential(configuration: dict[str, Any]) -> dict[str, Any]:
    """The parts of a configuration that a result depends on, without paths."""
    kept = {name: configuration[name] for name in ("task", "seed_everything", "trainer", "model", "data")}
    incidental, arguments = ("folder", "num_workers", "download"), kept["data"].get("init_args", {})
    arguments = {name: value for name, value in arguments.items() if name not in incidental}
    return {**kept, "data": {**kept["data"], "init_args": arguments}}


def training_facts(configuration: Mapping[str, Any]) -> dict[str, str]:
    """Everything that a training depends on except its length, by dotted names."""
    names = ("task", "seed_everything", "model", "data")
    parts = {name: configuration[name] for name in names if name in configuration}
    parts["trainer"] = {name: configuration["trainer"].get(name) for name in _TRAINING}
    return {name: value for name, value in _flat("", parts) if name not in _INCIDENTAL}


def scheduled_epochs(configuration: Mapping[str, Any]) -> int | None:
    """The number of epochs of a schedule; None for schedules that do not depend on it."""
    depends = configuration["model"].get("schedule") in ("cosine", "one-cycle")
    return configuration["trainer"].get("max_epochs") if depends else None


def network_facts(configuration: Mapping[str, Any]) -> dict[str, str]:
    """The parts of the network that weights depend on, by dotted names: all but the backend."""
    return dict(_flat("model.network", _without_backend(configuration["model"]["network"])))


def _without_backend(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {name: _without_backend(inner) for name, inner in value.items() if name != "backend"}


def differences(
    trained: Mapping[str, Any], now: Mapping[str, Any], facts: Callable[[Mapping[str, Any]], dict[str, str]]
) -> str:
    """The options in which the ``facts`` of two configurations differ, for people; empty where they agree."""
    old, new = facts(trained), facts(now)
    return ", ".join(
        f"{name} ({old.get(name, 'null')} there, {new.get(name, 'null')} now)"
        for name in {**old, **new}
        if old.get(name) != new.get(name) and _is_decided(name, old) and _is_decided(name, new)
    )


def _is_decided(name: str, facts: Mapping[str, str]) -> bool:
    """Whether facts tell of an option: they have it, or leave it out where all are named, as in ``block``.

    An argument that a checkpoint does not have has its default: it is of a version without it.
    """
    if name in facts:
        return True
    if any(other.startswith(f"{name}.") for other in facts):
        return False  # its parts tell
    parent = name.rpartition(".")[0]
    while parent and parent not in facts and not any(other.startswith(f"{parent}.") for other in facts):
        parent = parent.rpartition(".")[0]
    if parent in facts:
        return True
    arguments = parent in ("", "model", "data", "trainer") or parent.endswith(".init_args")
    return not arguments and f"{parent}.class_path" not in facts


def _flat(name: str, value: Any) -> list[tuple[str, str]]:
    if value == {} and not name.endswith("init_args"):
        value = None
    counts = {"scalar", "vector"}  # of fields, whose order is that of the channels
    if isinstance(value, dict) and not (value and value.keys() <= counts):
        return [pair for key, inner in value.items() for pair in _flat(f"{name}.{key}".lstrip("."), inner)]
    if name.rpartition(".")[2] == "class_path":
        value = _definition(value)
    return [(name, json.dumps(value, default=repr))]


def _definition(path: Any) -> Any:
    """The path at which a class is defined, for any path that it can be imported by.

    Nothing that a checkpoint names is imported: a class that this command uses has been imported before.
    """
    module, _, name = str(path).rpartition(".")
    try:
        found = getattr(sys.modules[module], name)
        return f"{found.__module__}.{found.__qualname__}"
    except (KeyError, AttributeError):
        return path
