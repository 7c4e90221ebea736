"""Checkpoints that survive a kill at any moment, and their provenance."""

from __future__ import annotations

import contextlib
import io
import pickle
import zipfile
from pathlib import Path
from typing import IO, Any, cast

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from escnn_attention.training.errors import UserError
from escnn_attention.training.files import atomic_file

PROVENANCE = "_Provenance"
"""The name of the state with the configuration, versions and hardware of a checkpoint."""

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
    facts = state_of(checkpoint, PROVENANCE)
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
