"""Draws of some tests and of some cases of each: the same for the same commit, and in turn from commit to commit."""

import random
import subprocess
import zlib
from collections.abc import Hashable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

CASES = 3
"""So many cases of a test a run of folders has, where no mark says how many."""

SLOW = 3
"""One in so many of the tests marked ``slow`` is in a run of folders."""

_STRIDE = 10007  # prime, so that it steps through parts of any number; ``seeds`` of two commits do not overlap


def seed_of_the_commit(folder: Path) -> int:
    """A number that grows by the same from commit to commit in a folder, so that ``in_turn`` draws part by part.

    It is drawn from the name of the commit where git has no history, and from the version of the package without git.
    """

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()

    try:
        shallow, name = git("rev-parse", "--is-shallow-repository", "HEAD").split()
        if shallow == "false":
            return int(git("rev-list", "--count", "HEAD")) * _STRIDE
    except (OSError, subprocess.CalledProcessError):
        name = metadata.version("escnn-attention")
    return zlib.crc32(name.encode())


def spread(cases: Sequence[set[Hashable]], name: object, most: int | None = None) -> list[int]:
    """The places of all cases in an order that depends on a name only, in which successive cases differ.

    Args:
        cases: the values that each case has, such as the rows of each ``parametrize``.
        name: of the order.
        most: the number of cases of a part, in which they differ as much as they can.

    Returns:
        the places. Each case has the most values that its part lacks, of these the most that its round lacks; a round
        ends when it has all values that the cases left over have.
    """
    numbers: dict[Hashable, int] = {}
    masks = [sum(1 << numbers.setdefault(value, len(numbers)) for value in case) for case in cases]
    left = random.Random(str(name)).sample(range(len(cases)), len(cases))
    everything = (1 << len(numbers)) - 1
    in_part = in_round = 0
    order: list[int] = []
    while left:
        if most and len(order) % most == 0:
            in_part = everything
        if not any(masks[i] & in_round for i in left):
            in_round = everything
        gains = [((masks[i] & in_part).bit_count(), (masks[i] & in_round).bit_count()) for i in left]
        order.append(left.pop(gains.index(max(gains))))  # of several the first of the random order
        in_part &= ~masks[order[-1]]
        in_round &= ~masks[order[-1]]
    return order


def in_turn(cases: Sequence[set[Hashable]], seed: int, name: object, most: int | None = None) -> list[int]:
    """The part of the cases whose turn it is: within as many successive seeds as there are parts, every case is drawn.

    Args:
        cases: the values that each case has.
        seed: of the draw; seeds that differ by a multiple of ``_STRIDE`` are successive too.
        name: of the order of the cases.
        most: the number of cases of a part. If None, as many as have every value that any case has at the start of
            the order; cases with the values that a later part lacks are added to it.

    Returns:
        the places of the drawn cases, in order.
    """
    order, wanted = spread(cases, name, most), set()
    if most is None:
        wanted, most = set().union(*cases), min(1, len(cases))
        while wanted.difference(*(cases[i] for i in order[:most])):
            most += 1
    parts = -(-len(order) // max(most, 1))
    first = seed % max(parts, 1) * most
    drawn = (order + order)[first : first + min(most, len(order))]  # the last part is filled up from the start
    wanted.difference_update(*(cases[i] for i in drawn))
    for i in order:
        if cases[i] & wanted:
            wanted -= cases[i]
            drawn.append(i)
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


def mark_undrawn(items: Iterable[pytest.Item], seed: int, *, draw: bool, whole: bool) -> None:
    """Mark as ``exhaustive`` what an ordinary run leaves out.

    Of a test marked ``sampled`` every row of each ``parametrize`` is drawn at least once; where ``sampled`` has a
    number, so many cases. Tests to which it gives a name in common, ``of``, are one sweep: so many of all are drawn.
    Of other tests ``CASES`` cases are drawn, of those marked ``slow`` one test in ``SLOW``.

    Args:
        items: all tests.
        seed: of the draw.
        draw: if False, nothing is drawn: all that is ever left out is marked.
        whole: whether tests that have neither mark, and slow ones, are drawn with all their cases.
    """
    sweeps: dict[str, list[pytest.Item]] = {}
    for item in items:
        mark = item.get_closest_marker("sampled")
        if not item.get_closest_marker("exhaustive") and (mark or not whole):
            sweeps.setdefault(mark.kwargs.get("of", _name(item)) if mark else _name(item), []).append(item)
    for name, combinations in sweeps.items():
        mark, *others = (item.get_closest_marker("sampled") for item in combinations)
        assert all(getattr(other, "args", None) == getattr(mark, "args", None) for other in others), f"{name}: marks"
        most, slow = CASES if mark is None else next(iter(mark.args), None), not whole and _is_slow(combinations)
        if not draw or (slow and zlib.crc32(name.encode()) % SLOW != seed % SLOW):
            drawn = [] if slow or most is None or len(combinations) > most else [*range(len(combinations))]
        else:
            values = (lambda item: {_name(item)}) if mark and "of" in mark.kwargs else _rows
            # A slow test is drawn with every SLOW-th seed only, which would always draw the same parts of some tests.
            drawn = in_turn(list(map(values, combinations)), seed // SLOW if slow else seed, name, most)
        for i in set(range(len(combinations))).difference(drawn):
            combinations[i].add_marker(pytest.mark.exhaustive)


def _is_slow(items: Sequence[pytest.Item]) -> bool:
    return any(item.get_closest_marker("slow") for item in items)


def long_first(items: list[pytest.Item]) -> None:
    """Move the tests that have a name in common, ``of``, to the start, which take seconds each.

    At the end they would be all that one process still runs while the others have nothing left.
    """
    items.sort(key=lambda item: not any("of" in mark.kwargs for mark in item.iter_markers("sampled")))


def one_in(number: int, items: Sequence[pytest.Item], seed: int) -> set[int]:
    """The places of one in so many tests of each file, drawn with as many cases of each test as of any other."""
    files: dict[str, list[int]] = {}
    for i, item in enumerate(items):
        files.setdefault(item.nodeid.split("::")[0], []).append(i)
    return {
        places[i]
        for file, places in files.items()
        for i in in_turn([{_name(items[j])} for j in places], seed, file, -(-len(places) // number))
    }


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
