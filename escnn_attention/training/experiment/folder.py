"""The folder of ``fit``: names of files, locks, and checks of what a run may replace."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from escnn_attention.training.errors import UserError
from escnn_attention.training.experiment.checkpoints import provenance_of, read_checkpoint
from escnn_attention.training.experiment.configuration import differences, training_facts
from escnn_attention.training.files import LOCK, locked_folder

BEST, LAST = "best.ckpt", "last.ckpt"
CONFIGURATION = "config.yaml"
EPOCHS = "epochs.csv"
TEST = "test.json"
PREDICTIONS = "predictions.csv"

WRITTEN = "# Written by escnn-attention fit."
"""The first line of the configuration that a folder keeps."""


def check_folder(folder: Path, checkpoint: Path | None, configuration: Mapping[str, Any]) -> None:
    """Check that a training replaces nothing but the training that it resumes from ``checkpoint``, if there is one."""
    path = folder / CONFIGURATION
    if path.exists() and not path.read_text(encoding="utf-8", errors="replace").startswith(WRITTEN):
        raise UserError(
            f"--folder: {path} is not a file that fit has written, and would be replaced by one: give it another"
            " name, or choose another --folder"
        )
    if checkpoint is not None and checkpoint.resolve().parent == folder.resolve():
        return
    found = [name for name in (LAST, EPOCHS, TEST, PREDICTIONS) if (folder / name).exists()]
    # A training that is killed in its first epoch may leave its best checkpoint only, and makes the same again.
    if not found and (folder / BEST).exists() and not _is_first_epoch(folder / BEST, configuration):
        found = [BEST]
    if not found:
        return
    if checkpoint is not None:
        raise UserError(f"--folder: {folder} holds a training ({found[0]}): choose another for one from {checkpoint}")
    missing = f"but no {LAST} to go on from: choose another folder, or move these files away"
    raise UserError(f"--folder: {folder} holds {', '.join(found)} of a training, {missing}")


@contextlib.contextmanager
def made_for_training(folder: Path, patience: float) -> Iterator[None]:
    """Make a folder, and keep other processes from training in it, waiting ``patience`` seconds for them to end.

    A training that is refused before it has finished an epoch removes its files, and the folders that it made.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    lock = folder / LOCK
    before = {lock} if lock.exists() else set()
    with locked_folder(folder, "choose another --folder", patience):
        before |= set(folder.iterdir()) - {lock}
        try:
            yield
        except UserError:
            after = set(folder.iterdir())
            if not after & {folder / LAST, folder / BEST}:
                for path in after - before:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
                with contextlib.suppress(OSError):  # there are other files in it
                    for path in made:
                        path.rmdir()
            raise


def stamp(path: Path) -> tuple[int, int] | None:
    """A value that changes when a file is written again; None where there is no file."""
    with contextlib.suppress(FileNotFoundError):
        status = path.stat()
        return status.st_ino, status.st_mtime_ns
    return None


def _is_first_epoch(path: Path, configuration: Mapping[str, Any]) -> bool:
    """Whether a checkpoint is of the first epoch of this very training."""
    content = read_checkpoint(path)
    trained = provenance_of(content) if content.get("epoch") == 0 else None
    return trained is not None and not differences(trained["configuration"], configuration, training_facts)
