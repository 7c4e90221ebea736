"""Checkpoints that survive a kill at any moment."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from escnn_attention.training.errors import UserError
from escnn_attention.training.files import atomic_file


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint next to its place and renames it.

    Lightning's own writer goes through the system's folder for temporary files; where that is another file system, the
    final move is a copy, and a kill in the middle of it destroys the only checkpoint.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as file:
            torch.save(checkpoint, file)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """The content of a local file. Whatever is asked for, nothing but tensors and plain values is unpickled."""
        return read_checkpoint(Path(path))


def read_checkpoint(path: Path, way_out: str = "Move it away, or choose another folder") -> dict[str, Any]:
    """The content of a checkpoint, on the CPU. Only tensors and plain values are unpickled.

    Args:
        path: the file.
        way_out: what to do where it cannot be read, for the message.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        return checkpoint
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"cannot read the checkpoint {path}: {reason}. {way_out}") from error
