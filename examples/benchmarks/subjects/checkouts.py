"""Modules from checkouts of other people's code."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType


class CheckoutError(Exception):
    """A checkout that cannot be used, and why."""


def import_from(checkout: str, *names: str) -> tuple[ModuleType, ...]:
    """The modules of these names, from a checkout and from nowhere else.

    Raises:
        CheckoutError: the folder does not hold them, or what they import is not installed.
    """
    root = Path(checkout).resolve()
    package = names[0].split(".")[0]
    if not (root / package).is_dir():
        raise CheckoutError(f"{checkout} is no checkout of {package}: it has no folder {package}")
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    try:
        modules = tuple(importlib.import_module(name) for name in names)
    except ModuleNotFoundError as error:
        raise CheckoutError(f"{package} in {checkout} needs the module {error.name}, which is not installed") from error
    for module in modules:
        if not Path(module.__file__ or "").resolve().is_relative_to(root):
            raise CheckoutError(f"{module.__name__} was imported from {module.__file__}, not from {checkout}")
    return modules
