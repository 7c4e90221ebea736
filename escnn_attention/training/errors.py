"""Errors for the person at the command line."""

from __future__ import annotations

import argparse
import contextlib
import re
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
