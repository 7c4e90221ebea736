"""Networks as checkpoints describe them, built without running anything that a checkpoint brings along."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from escnn import gspaces

from escnn_attention.training.errors import UserError

_PACKAGE = "escnn_attention"
_SPACES = "escnn.gspaces"
_ARGUMENTS = ("init_args", "dict_kwargs")
_KEYS = {"class_path", *_ARGUMENTS}


def build_described(description: Any) -> torch.nn.Module:
    """The network of a description: ``class_path`` and ``init_args``, which may hold descriptions in turn.

    A description can come from anywhere, so that of all the things that Python could import only two kinds are: the
    modules of this package, by ``escnn_attention.…``, and the gspaces of escnn, by ``escnn.gspaces.…``. All of it is
    looked through before the first of them is built, and everything else in it is handed on as the plain value that it
    is.

    Raises:
        UserError: it names anything else, is no description, or its arguments are not those of the class.
    """
    if not (isinstance(description, Mapping) and "class_path" in description):
        raise UserError("it does not say of which class its network is")
    _check(description)
    if not inspect.isclass(_named(description["class_path"])):
        raise UserError(f"it names {description['class_path']!r}, which is no network")
    try:
        network: torch.nn.Module = _built(description)
    except (AssertionError, AttributeError, TypeError, ValueError) as error:
        raise UserError(f"this version cannot build the network {description['class_path']}: {error}") from error
    return network


def _check(value: Any) -> None:
    """Everything that would be imported may be."""
    if isinstance(value, Mapping):
        if "class_path" in value:
            _named(value["class_path"])
            if not all(isinstance(value.get(key, {}), Mapping) for key in _ARGUMENTS) or value.keys() - _KEYS:
                raise UserError(f"{value['class_path']!r} comes with {', '.join(map(str, value))}, needed init_args")
        for part in value.values():
            _check(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            _check(part)


def _built(value: Any) -> Any:
    if isinstance(value, Mapping):
        if "class_path" in value:
            arguments = {**value.get("init_args", {}), **value.get("dict_kwargs", {})}
            return _named(value["class_path"])(**{name: _built(part) for name, part in arguments.items()})
        return {name: _built(part) for name, part in value.items()}
    return [_built(part) for part in value] if isinstance(value, (list, tuple)) else value


def _named(path: Any) -> Callable[..., Any]:
    """A module of this package, or a function of escnn that makes a gspace."""
    folder, _, name = path.rpartition(".") if isinstance(path, str) else ("", "", "")
    if folder == _SPACES or folder.startswith(f"{_SPACES}."):
        # By its name alone: nothing is imported.
        space = getattr(gspaces, name) if name in gspaces.__all__ else None
        if inspect.isfunction(space):
            return space
    elif (folder == _PACKAGE or folder.startswith(f"{_PACKAGE}.")) and path.replace(".", "_").isidentifier():
        try:
            found = getattr(importlib.import_module(folder), name)
        except (ImportError, AttributeError) as error:
            raise UserError(f"this version has no {path}") from error
        ours = inspect.isclass(found) and issubclass(found, torch.nn.Module)
        if ours and found.__module__.partition(".")[0] == _PACKAGE:
            return found  # type: ignore[no-any-return]
    raise UserError(
        f"it names {path!r}, and of what a checkpoint names only networks of {_PACKAGE} and gspaces of {_SPACES} are"
        " built: build this one yourself, and give it as `network`"
    )
