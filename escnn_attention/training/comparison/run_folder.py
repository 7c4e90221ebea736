"""The folder of a run: one configuration, one process at a time, nothing ever deleted."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from escnn_attention.training.comparison.results import RESULT
from escnn_attention.training.comparison.settings import NETWORK_NAMES
from escnn_attention.training.errors import UserError, told
from escnn_attention.training.files import LOCK, locked_folder, remove_temporaries, write_json

CONFIGURATION = "configuration.json"
FIGURES = "figures"


@contextlib.contextmanager
def open_run(folder: Path, configuration: Mapping[str, Any], *, restart: bool) -> Iterator[Path | None]:
    """Hold ``folder`` for a run with ``configuration``, new or to be gone on with.

    Args:
        folder: created if it does not exist.
        configuration: plain values; what the results depend on.
        restart: move a run that is there aside.

    Yields:
        Where an earlier run was moved, or ``None``.

    Raises:
        UserError: the folder holds something else or a run with another configuration, another process uses it, or it
            cannot be written.
    """
    with told():
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{folder} is not a folder: choose another --output")
        folder.mkdir(parents=True, exist_ok=True)
        with locked_folder(folder, "choose another --output"):
            stored = _read(folder)
            moved = None
            for part in (folder, folder / FIGURES):
                remove_temporaries(part)
            for name in NETWORK_NAMES:
                remove_temporaries(folder / name, RESULT)  # the rest there is of the experiment
            if stored is not None and restart:
                moved = _move_aside(folder)
            elif stored is not None:
                _check_same(folder, stored, configuration)
            elif any(not path.name.startswith(".") for path in folder.iterdir()):
                raise UserError(f"{folder} holds files that are no comparison: choose another --output")
            write_json(folder / CONFIGURATION, dict(configuration))
            yield moved


def _read(folder: Path) -> dict[str, Any] | None:
    path = folder / CONFIGURATION
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}): choose another --output, or move {folder} away") from error
    if not isinstance(stored, dict):
        raise UserError(f"{path} is no configuration of a run: choose another --output, or move {folder} away")
    return stored


def _check_same(folder: Path, stored: Mapping[str, Any], configuration: Mapping[str, Any]) -> None:
    differences = []
    for name in [*configuration, *(name for name in stored if name not in configuration)]:
        old, new = stored.get(name), configuration.get(name)
        if old == new:
            continue
        if name == "images":
            # Another data set, or fewer images of it, has other images as a matter of course.
            if all(stored.get(n) == configuration.get(n) for n in ("data", "limit-train", "limit-test")):
                differences.append("the images themselves")
            continue
        there, now = ("none" if value is None else value for value in (old, new))
        differences.append(f"--{name} ({there} there, {now} now)")
    if differences:
        raise UserError(
            f"{folder} holds a run with other options: {', '.join(differences)}. Choose another --output, or give"
            " --restart, which moves that run aside"
        )


def _move_aside(folder: Path) -> Path:
    """Move everything but the lock into a new folder beside ``folder``."""
    number = 1
    while (aside := folder.with_name(f"{folder.name}.old-{number}")).exists():
        number += 1
    aside.mkdir()
    # The configuration goes last: if the process is killed in between, the rest is still known to belong to a run.
    for path in sorted(folder.iterdir(), key=lambda path: path.name == CONFIGURATION):
        if path.name != LOCK:
            path.rename(aside / path.name)
    return aside
