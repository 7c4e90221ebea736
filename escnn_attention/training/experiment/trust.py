"""The classes that the configuration in a folder may name: a configuration is code, and may come from anybody."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import yaml

from escnn_attention._checks import reason_of
from escnn_attention.models.description import DescriptionError, named
from escnn_attention.training.errors import UserError
from escnn_attention.training.files import content_of
from escnn_attention.training.modules.scheduled import adam

_LONGEST = 1 << 20  # bytes
_PARTS = ("seed_everything", "task", "trainer", "model", "data", "weights_only")

# Classes of these kinds in these packages are known, in addition to those that checkpoints may name.
_KINDS: tuple[tuple[type, str], ...] = (
    (torch.nn.Module, "torch.nn."),
    (torch.nn.Module, "escnn.nn."),
    (torch.optim.Optimizer, "torch.optim."),
    (pl.LightningDataModule, "escnn_attention.training.data."),
)

# Words and numbers: the parser may take any other text for YAML, for the name of a file of YAML, or for a function.
_WORDS = re.compile(r"([\w+.-]+([ :][\w+.-]+)*)?", re.ASCII)

# What data modules read, as arrays; the parser takes these for paths whatever they say.
_READ = ("data.init_args.folder", "data.init_args.path")


def check_kept(path: Path) -> None:
    """Refuse a folder's configuration that could run anything but networks, data and optimisers that are known.

    Known are the classes of networks, encodings, relations, samples and data of this package, the modules of
    ``torch.nn`` and ``escnn.nn``, the optimisers of ``torch.optim``, and the gspaces of escnn. Anything else
    (callbacks, loggers, functions, somebody's network) is a :class:`UserError`. Nothing is imported but modules of this
    package, and nothing has been parsed before.
    """
    try:
        if path.stat().st_size > _LONGEST:
            raise _UnknownError(f"it is longer than {_LONGEST} bytes")
        content = content_of(path.read_text(encoding="utf-8"))
        if not isinstance(content, Mapping):
            raise _UnknownError(f"it holds a {type(content).__name__}, not a configuration")
        if foreign := [part for part in content if part not in _PARTS]:
            raise _UnknownError(f"it has a part {foreign[0]!r}")
        _check(content, "", path.parent, set())
    except _UnknownError as error:
        raise UserError(f"{path}: {error}. {_WAY_OUT}") from error
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"{path}: it is not YAML: {reason_of(error)}") from error


def check_parsed(configuration: Mapping[str, Any], options: Sequence[str], source: Path) -> None:
    """Refuse classes that the parser found by their last names alone, before they are built.

    Those among the ``options`` of the command line may be any, all others those of :func:`check_kept`.
    """
    for name, path in _class_paths(configuration, ""):
        if not _is_known(path) and not any(path.rpartition(".")[2] in option for option in options):
            raise UserError(f"{source}: {name} is {path}. {_WAY_OUT}")


_WAY_OUT = (
    "A folder's own configuration may name networks, data and optimisers of escnn_attention, escnn and torch only: read"
    " it, and give --trust if it may run what it names"
)


class _UnknownError(Exception):
    """A configuration that names something it may not; the message says what."""


def _check(value: Any, name: str, folder: Path, seen: set[int]) -> None:
    if isinstance(value, (Mapping, list)):
        if id(value) in seen:  # by references a short file can hold an endless one
            raise _UnknownError(f"{name} refers to another part")
        seen.add(id(value))
    if isinstance(value, Mapping):
        for key, part in value.items():
            inner = f"{name}.{key}".lstrip(".")
            if key == "class_path" and not (isinstance(part, str) and _is_known(part)):
                raise _UnknownError(f"{name} is {part!r}")
            if inner not in _READ or not isinstance(part, str):
                _check(part, inner, folder, seen)
    elif isinstance(value, list):
        for part in value:
            _check(part, name, folder, seen)
    elif isinstance(value, str):
        dotted = "." in value and value.replace(".", "_").isidentifier()
        if not _WORDS.fullmatch(value) or (dotted and not _is_known(value)):
            raise _UnknownError(f"{name} is {value!r}")
        if value and any((place / value).is_file() for place in (folder, Path())):
            raise _UnknownError(f"{name} is {value!r}, the name of a file")
    elif not isinstance(value, (int, float, type(None))):
        raise _UnknownError(f"{name} is a {type(value).__name__}")


def _is_known(path: str) -> bool:
    """Whether a dotted path is that of a class of a known kind, which has been imported before."""
    try:
        named(path)
    except DescriptionError:
        module, _, name = path.rpartition(".")
        found = getattr(sys.modules.get(module), name, None)
        return path == f"{adam.__module__}.{adam.__qualname__}" or (
            isinstance(found, type)
            and any(issubclass(found, kind) and f"{found.__module__}.".startswith(place) for kind, place in _KINDS)
        )
    return True


def _class_paths(value: Any, name: str) -> Iterator[tuple[str, str]]:
    """All classes of a configuration, with their places in it."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            if key == "class_path":
                yield name, str(part)
            else:
                yield from _class_paths(part, f"{name}.{key}".lstrip("."))
    elif isinstance(value, list):
        for part in value:
            yield from _class_paths(part, name)
