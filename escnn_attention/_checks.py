"""Checks of arguments, which need neither escnn nor torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from typing import Any


def check_grid(space: Sequence[int]) -> None:
    """A grid, of the shape ``space`` of features, has at least one position along each axis."""
    if 0 in space:
        shape = "×".join(map(str, space))
        raise ValueError(f"input: a grid of {shape} has no positions, needed at least one along each axis")


def check_int(name: str, value: Any, *, least: int = 1) -> int:
    """``value``, if it is an integer of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int):
        other = not isinstance(value, bool) and isinstance(value, Integral)  # as of NumPy
        raise TypeError(f"{name}: got {value!r}, needed {f'int({value})' if other else 'an integer'}")
    if value < least:
        raise ValueError(f"{name}: got {value}, needed at least {least}")
    return value


def check_ints(name: str, value: Any, count: int, what: str, *, least: int = 1) -> tuple[int, ...]:
    """``value`` as a tuple, if it is a sequence of ``count`` integers of at least ``least``; ``what`` says of what."""
    check_sequence(name, value, what)
    if len(value) != count:
        raise ValueError(f"{name}: got {len(value)} values, needed {count}, {what}")
    return tuple(check_int(name, number, least=least) for number in value)


def check_sequence(name: str, value: Any, what: str) -> Sequence[Any]:
    """``value``, if it is a list or a tuple; ``what`` says of what."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError(f"{name}: got {value!r}, needed a list or a tuple, {what}")
    return value


def check_bool(name: str, value: Any) -> bool:
    """``value``, if it is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: got {value!r}, needed True or False")
    return value


def check_unused(name: str, value: Any, default: Any, why: str) -> None:
    """An option that nothing here uses was left alone."""
    if value != default:
        raise ValueError(f"{name}: got {value!r}, but {why}; leave it at {default!r}")


def check_option(name: str, value: Any, options: Iterable[str]) -> Any:
    """``value``, if it is one of the options."""
    options = tuple(options)
    if value not in options:
        raise ValueError(f"{name}: got {value!r}, needed one of {', '.join(map(repr, options))}")
    return value


def check_probability(name: str, value: Any) -> float:
    """``value``, if it is a probability below 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise ValueError(f"{name}: got {value!r}, needed a probability in [0, 1)")
    return float(value)


def check_length(name: str, value: Any, what: str = "length", most: float = math.inf) -> float:
    """``value`` as a float, if it is a positive number of at most ``most``."""
    number = float(value) if not isinstance(value, bool) and isinstance(value, Real) else math.nan
    if not 0 < number < math.inf:
        raise ValueError(f"{name}: got {value!r}, needed a positive {what}")
    if number > most:
        raise ValueError(f"{name}: got {value!r}, needed at most {most:g}")
    return number


def reason_of(error: BaseException) -> str:
    """The message of an error in one line, or its type if it has none."""
    return " ".join(str(error).split()) or type(error).__name__
