"""Messages for the person at the command line: errors of one line, and no irrelevant warnings of Lightning."""

from __future__ import annotations

import argparse
import contextlib
import logging
import re
import warnings
from collections.abc import Iterator

from escnn_attention._checks import reason_of

_OR_NONE = re.compile(
    r"Does not validate against any of the Union subtypes Subtypes: .*? Errors: - (?!Expected)(.*) - Expected a <class "
    r"'NoneType'> Given value type: .*"
)


def message_of(error: BaseException) -> str:
    """The message of an error of the command line; of an option that may be None, what is wrong with its value."""
    return _OR_NONE.sub(r"\1", reason_of(error))


class UserError(Exception):
    """An error that the person who gave the command can correct.

    The message says what is wrong and what to do. The command line prints it as one line and ends with exit code 2.
    """


@contextlib.contextmanager
def as_user_error(*kinds: type[Exception]) -> Iterator[None]:
    """Turn errors, by default :class:`OSError`, into a :class:`UserError` of one line that names their file."""
    kinds = kinds or (OSError,)
    try:
        yield
    except kinds as error:
        known = isinstance(error, OSError) and error.filename is not None and error.strerror is not None
        text = f"{error.filename}: {error.strerror}" if known else reason_of(error)  # type: ignore[attr-defined]
        raise UserError(text) from error


@contextlib.contextmanager
def as_misuse(command: str) -> Iterator[None]:
    """Turn options that cannot be parsed into a :class:`UserError` of one line that names the help of the command."""
    try:
        yield
    except argparse.ArgumentError as error:
        raise UserError(f"{message_of(error).rstrip('.')} (see escnn-attention {command} --help)") from error


_BESIDE_THE_POINT = (
    # The images are in memory; a worker process would only slow the loading down.
    ".*does not have many workers.*",
    ".*Checkpoint directory .* exists.*",
    # escnn shares the bases of its convolutions, which have no modes, between this network and tested ones.
    ".*in eval mode at the start of training.*",
    # Between Lightning and torch, and between Lightning and jsonargparse.
    ".*LeafSpec.*",
    ".*jsonargparse.*|.*JsonargparseDeprecationWarning.*|.*deprecated in v4.*",
    # The command line is typer's, which hands its words on.
    ".*LightningCLI's args parameter.*",
    # What tests and predicts needs the weights only.
    ".*Be aware that when using `ckpt_path`.*",
    # Where all images train, none validate.
    ".*Total length of `list` across ranks is zero.*",
    # Steps are logged by epoch.
    ".*number of training batches .* smaller than the logging interval.*",
)


@contextlib.contextmanager
def quiet_lightning() -> Iterator[None]:
    """Suppress advice, advertisement and irrelevant warnings of Lightning."""
    levels = {name: logging.getLogger(name).level for name in ("lightning.pytorch", "lightning.fabric")}
    try:
        with warnings.catch_warnings():
            for name in levels:
                logging.getLogger(name).setLevel(logging.ERROR)
            for message in _BESIDE_THE_POINT:
                warnings.filterwarnings("ignore", message=f"(?s){message}")
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
