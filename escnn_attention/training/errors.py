"""Errors for the person at the command line."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator

from escnn_attention._checks import reason_of


class UserError(Exception):
    """An error that the person who gave the command can correct.

    The message says what is wrong and what to do. The command line prints it as one line and ends with exit code 2.
    """


@contextlib.contextmanager
def as_user_error(*kinds: type[Exception]) -> Iterator[None]:
    """Turn errors into a :class:`UserError` of one line; it names a file that cannot be read or written.

    Args:
        *kinds: the errors, by default :class:`OSError`.

    Raises:
        UserError: in place of one of these.
    """
    kinds = kinds or (OSError,)
    try:
        yield
    except kinds as error:
        known = isinstance(error, OSError) and error.filename is not None and error.strerror is not None
        text = f"{error.filename}: {error.strerror}" if known else reason_of(error)  # type: ignore[attr-defined]
        raise UserError(text) from error


@contextlib.contextmanager
def as_misuse(command: str) -> Iterator[None]:
    """Turn options that cannot be parsed into one line that names the help of the command.

    Raises:
        UserError: in place of an :class:`argparse.ArgumentError`.
    """
    try:
        yield
    except argparse.ArgumentError as error:
        raise UserError(f"{reason_of(error).rstrip('.')} (see escnn-attention {command} --help)") from error
