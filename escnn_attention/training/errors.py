"""The error that is meant for the person at the command line."""

from __future__ import annotations


class UserError(Exception):
    """Something that the person who gave the command can put right.

    The message says what is wrong and what to do. The command line prints it as one line and ends with exit code 2;
    code that calls the library sees an ordinary exception.
    """
