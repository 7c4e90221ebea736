"""The error that is meant for the person at the command line."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator

from escnn_attention._checks import reason_of


class UserError(Exception):
    """Something that the person who gave the command can put right.

    The message says what is wrong and what to do. The command line prints it as one line and ends with exit code 2;
    code that calls the library sees an ordinary exception.
    """


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Files that cannot be read or written end as a line that names the file, and says what is wrong with it.

    Raises:
        UserError: in place of an :class:`OSError`.
    """
    try:
        yield
    except OSError as error:
        known = error.filename is not None and error.strerror is not None
        raise UserError(f"{error.filename}: {error.strerror}" if known else str(error)) from error


@contextlib.contextmanager
def as_misuse(command: str) -> Iterator[None]:
    """Options that cannot be parsed end as a line that says where to read of them.

    Raises:
        UserError: in place of an :class:`argparse.ArgumentError`.
    """
    try:
        yield
    except argparse.ArgumentError as error:
        raise UserError(f"{reason_of(error).rstrip('.')} (see escnn-attention {command} --help)") from error
