"""The folder of ``fit``: checkpoints that survive a kill at any moment, locks, and checks of what a run may replace."""

from __future__ import annotations

import contextlib
import io
import pickle
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, cast

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from escnn_attention.training.errors import UserError
from escnn_attention.training.experiment.configuration import differences, training_facts
from escnn_attention.training.files import LOCK, atomic_file, locked_folder

BEST, LAST = "best.ckpt", "last.ckpt"
CONFIGURATION = "config.yaml"
EPOCHS = "epochs.csv"
TEST = "test.json"
PREDICTIONS = "predictions.csv"

WRITTEN = "# Written by escnn-attention fit."
"""The first line of the configuration that a folder keeps."""

_KINDS = {"state_dict": dict, "epoch": int, "callbacks": dict, "loops": dict}
_KINDS |= {"optimizer_states": list, "lr_schedulers": list, "pytorch-lightning_version": str}


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint next to its place and renames it.

    Lightning's own writer goes through the system's folder for temporary files; where that is another file system, the
    final move is a copy, and a kill in the middle of it destroys the only checkpoint.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        # In memory first: torch's error for a full disk does not say that the disk is full.
        with io.BytesIO() as buffer:
            torch.save(checkpoint, buffer)
            with atomic_file(Path(path)) as file:
                file.write(buffer.getbuffer())

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """The content of a local file. Only tensors and plain values are unpickled, for any ``weights_only``."""
        return read_checkpoint(Path(path))


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The content of a checkpoint, on the CPU. Only tensors and plain values are unpickled.

    A file that fails the checksums of its zip format, which PyTorch does not verify, is refused.
    """
    try:
        if path.exists() and not path.is_file():  # a pipe or a device may never end
            raise _DamagedError("it is not a file")
        with path.open("rb") as file:
            if _is_damaged(file):
                raise _DamagedError("it is damaged: its checksums do not match")
            file.seek(0)
            checkpoint: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
        if not isinstance(checkpoint, dict):
            raise _DamagedError(f"it holds a {type(checkpoint).__name__}, not a checkpoint")
        _check_parts(checkpoint)
    except MemoryError:
        raise
    # A damaged file can lead the reader anywhere.
    except Exception as error:
        raise UserError(
            f"cannot read the checkpoint {path}: {_reason(error)}. Move it away, or choose another folder"
        ) from error
    return checkpoint


def _is_damaged(file: IO[bytes]) -> bool:
    """Whether a zip file is incomplete or fails its checksums; files of another kind have none."""
    try:
        with zipfile.ZipFile(file) as archive:
            # PyTorch takes uninitialised memory for an entry that is marked as a folder.
            return archive.testzip() is not None or any(entry.external_attr for entry in archive.infolist())
    except zipfile.BadZipFile:
        file.seek(0)
        return file.read(4) == b"PK\x03\x04"


def _check_parts(checkpoint: dict[str, Any]) -> None:
    """Check that the parts of a checkpoint have the types that Lightning expects."""
    for name, kind in _KINDS.items():
        if name in checkpoint and not isinstance(checkpoint[name], kind):
            raise _DamagedError(f"its {name} is a {type(checkpoint[name]).__name__}, needed a {kind.__name__}")
    for name in ("optimizer_states", "lr_schedulers"):
        if not all(isinstance(state, dict) for state in checkpoint.get(name, ())):
            raise _DamagedError(f"its {name} are not all dictionaries")
    if "loops" in checkpoint and not isinstance(checkpoint["loops"].get("fit_loop"), dict):
        raise _DamagedError("its loops have no fit_loop")
    for name, value in checkpoint.get("state_dict", {}).items():
        if not isinstance(name, str):
            raise _DamagedError(f"its state_dict has the key {name!r}, needed names")
        if not isinstance(value, torch.Tensor) and not name.endswith(torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX):
            raise _DamagedError(f"its state_dict has a {type(value).__name__} as {name}, needed a tensor")


def state_of(checkpoint: dict[str, Any], callback: str) -> dict[str, Any] | None:
    """The state of a callback, by the name of its class, in a checkpoint."""
    states = checkpoint.get("callbacks", {})
    if not isinstance(states, dict):
        return None
    return next((state for name, state in states.items() if callback in str(name)), None)


def provenance_of(checkpoint: dict[str, Any]) -> dict[str, Any] | None:
    """The ``configuration``, ``versions`` and ``hardware`` of a checkpoint's training; None where it has none."""
    facts = state_of(checkpoint, "_Provenance")
    with contextlib.suppress(TypeError, LookupError):
        configuration = cast(dict[str, Any], facts)["configuration"]
        if isinstance(configuration["model"]["network"], dict) and isinstance(configuration["trainer"], dict):
            return facts
    return None


class _DamagedError(Exception):
    """A file that is not a valid checkpoint; the message says why."""


def _reason(error: Exception) -> str:
    if isinstance(error, _DamagedError):
        return str(error)
    if isinstance(error, pickle.UnpicklingError):
        return "it holds something else than tensors and plain values, or it is damaged"
    if isinstance(error, OSError):  # without a file it is of a place that a damaged file points to
        return "it is damaged, or not a checkpoint" if error.filename is None else error.strerror or str(error)
    first, *_ = str(error).splitlines() or [""]
    return f"it is damaged, or not a checkpoint ({type(error).__name__}: {first})"


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
