"""The folder that data is looked for in, and downloaded into."""

from __future__ import annotations

import os
from pathlib import Path

from escnn_attention.training.errors import UserError

ENVIRONMENT = "ESCNN_ATTENTION_DATA"
"""The environment variable that names the folder."""


def default_folder() -> Path:
    """``$ESCNN_ATTENTION_DATA``, or a folder in the user's cache."""
    if chosen := os.environ.get(ENVIRONMENT):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "escnn-attention"


def data_folder(folder: Path | None, holds: str, option: str) -> Path:
    """The folder to use. Only the one in the user's cache is made if it does not exist.

    Args:
        folder: an existing folder, or ``None`` for :func:`default_folder`.
        holds: the files that it should hold, for the error message.
        option: how the person who gave the folder gives it, for the error message.

    Raises:
        UserError: the folder does not exist, or the one in the cache cannot be made.
    """
    if folder is None:
        folder = default_folder()
        if not os.environ.get(ENVIRONMENT):
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UserError(
                    f"cannot make the data folder {folder}: {error.strerror or error}. Choose one with {option} or the"
                    f" environment variable {ENVIRONMENT}"
                ) from error
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise UserError(
            f"the data folder {folder} does not exist: give one that holds {holds} with {option} (or the environment"
            f" variable {ENVIRONMENT}), or create it, and the data is downloaded into it"
        )
    return folder
