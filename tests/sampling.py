"""Draws of some combinations of each sweep, the same for the same commit."""

import random
import subprocess
import zlib
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest


def seed_of_the_commit(folder: Path) -> int:
    """A number that depends on the commit in a folder or, without git, on the version of the package."""
    try:
        command = ["git", "rev-parse", "HEAD"]
        name = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        name = metadata.version("escnn-attention")
    return zlib.crc32(name.encode())


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

    Each is named after its seed: ``--seed`` with this number draws the same first.

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
    Tests to which it gives a name in common, ``of``, are one sweep: so many of all are drawn, first one of each test.
    """
    sweeps: dict[str, list[pytest.Item]] = {}
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark and not item.get_closest_marker("exhaustive"):
            sweeps.setdefault(mark.kwargs.get("of", _name(item)), []).append(item)
    for name, combinations in sweeps.items():
        mark, *others = (item.get_closest_marker("sampled") for item in combinations)
        assert all(other.args == mark.args for other in others), f"{name}: sampled with several numbers"
        most = next(iter(mark.args), None)
        if not draw:
            drawn = []
        elif "of" in mark.kwargs:
            drawn = take_turns(list(map(_name, combinations)), (seed, name), most)
        else:
            drawn = cover(list(map(_rows, combinations)), (seed, name), most)
        for i in set(range(len(combinations))).difference(drawn):
            combinations[i].add_marker(pytest.mark.exhaustive)


def one_in(number: int, items: Sequence[pytest.Item], seed: int) -> set[int]:
    """The places of one in so many tests of each file, drawn with as many cases of each test as of any other."""
    files: dict[str, list[int]] = {}
    for i, item in enumerate(items):
        files.setdefault(item.nodeid.split("::")[0], []).append(i)
    return {
        places[i]
        for file, places in files.items()
        for i in take_turns([_name(items[j]) for j in places], (seed, file), -(-len(places) // number))
    }


def take_turns(names: Sequence[str], seed: object, most: int) -> list[int]:
    """So many drawn at random, as many of each name as of any other while there are.

    Args:
        names: which may repeat.
        seed: the draw; the same seed draws the same.
        most: how many.

    Returns:
        the places of those that are drawn, in order.
    """
    draws = random.Random(str(seed))
    order = draws.sample(range(len(names)), len(names))
    places = {name: draws.random() for name in sorted({*names})}
    counts: Counter[str] = Counter()
    turns = {}
    for i in order:
        turns[i] = counts[names[i]], places[names[i]]
        counts[names[i]] += 1
    return sorted(sorted(order, key=turns.__getitem__)[:most])


def _name(item: pytest.Item) -> str:
    """Of the test, whatever its parameters."""
    return item.nodeid.split("[")[0]


def _rows(item: pytest.Item) -> set[Hashable]:
    """The rows that a combination has of each ``parametrize``, known by their objects: these may be unhashable."""
    rows = set()
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        rows.add(tuple((name.strip(), id(item.callspec.params[name.strip()])) for name in names))
    return rows
