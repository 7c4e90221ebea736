"""Some of the combinations of a sweep in every run, others in the next."""

import random
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import pytest


def cover(cases: Sequence[set[Hashable]], seed: object, most: int | None = None) -> list[int]:
    """Cases drawn at random that together have every value which any case has, as few as the draw allows.

    Args:
        cases: the values that each case has.
        seed: the draw; the same seed draws the same.
        most: no more than so many, whether or not these have every value.

    Returns:
        the places of the drawn cases, in order.
    """
    order = random.Random(str(seed)).sample(range(len(cases)), len(cases))
    missing, drawn = set().union(*cases), []
    while missing and len(drawn) != most:
        best = max(order, key=lambda i: len(cases[i] & missing))  # of several the first of the random order
        missing -= cases[best]
        drawn.append(best)
    return sorted(drawn)


def seeds(config: pytest.Config, counts: Mapping[str, int], few: int) -> list[Any]:
    """The parameters ``(kind, seed)`` of tests that draw by themselves, ``few`` of each kind for ordinary runs.

    Each is named after its seed: ``--hypothesis-seed`` with this number draws the same first.

    Args:
        config: of the run.
        counts: how many there are of each kind.
        few: how many of them are not marked ``exhaustive``.
    """
    first = int(config.option.hypothesis_seed)
    return [
        pytest.param(kind, first + i, id=f"{kind}-{first + i}", marks=() if i < few else pytest.mark.exhaustive)
        for kind, count in counts.items()
        for i in range(count)
    ]


def mark_undrawn(items: Iterable[pytest.Item], seed: int, *, draw: bool) -> None:
    """Mark as ``exhaustive`` what an ordinary run leaves out of the tests marked ``sampled``: all, if there is no draw.

    Of each ``parametrize`` every row is in the sample at least once; where ``sampled`` has a number, so many at most.
    """
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("exhaustive"):
            tests.setdefault(item.nodeid.split("[")[0], []).append(item)
    for name, combinations in tests.items():
        most = next(iter(combinations[0].get_closest_marker("sampled").args), None)
        drawn = cover([_rows(item) for item in combinations], (seed, name), most) if draw else []
        for i in set(range(len(combinations))).difference(drawn):
            combinations[i].add_marker(pytest.mark.exhaustive)


def _rows(item: pytest.Item) -> set[Hashable]:
    """The rows that a combination has of each ``parametrize``, known by their objects: these may be unhashable."""
    rows = set()
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        rows.add(tuple((name.strip(), id(item.callspec.params[name.strip()])) for name in names))
    return rows
