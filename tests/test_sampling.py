"""The draw from sweeps: nothing is left out for good, and what is drawn can be drawn again."""

import itertools
import subprocess
from collections import Counter
from types import SimpleNamespace

import pytest

from tests.sampling import _STRIDE as STRIDE
from tests.sampling import CASES as FEW
from tests.sampling import SLOW, in_turn, long_first, mark_undrawn, one_in, seed_of_the_commit, spread

SAMPLED, SLOW_MARK = pytest.mark.sampled.mark, pytest.mark.slow.mark
CASES = [set(zip("abc", values, strict=True)) for values in itertools.product(range(5), range(3), range(2))]


def values_of(drawn):
    return set().union(*(CASES[i] for i in drawn))


def test_every_value_is_drawn_with_few_cases():
    for seed in range(20):
        drawn = in_turn(CASES, seed, "name")
        assert values_of(drawn) == values_of(range(len(CASES)))
        assert 5 <= len(drawn) <= 8  # the longest parameter has five values
    assert any(values_of(drawn[1:]) != values_of(range(len(CASES))) for drawn in (in_turn(CASES, 0, n) for n in "abcd"))


@pytest.mark.parametrize("most", [1, 2, 3, 7, 29, 30, 100, None])
def test_every_case_has_its_turn(most):
    parts = -(-len(CASES) // (most or 5))
    for name in "ab":
        for first in (0, 3, 10**9):
            drawn = [in_turn(CASES, first + i, name, most) for i in range(parts)]
            assert set().union(*drawn) == {*range(len(CASES))}
            assert in_turn(CASES, first + parts, name, most) == drawn[0]
            if most is not None:
                assert all(len({*some}) == len(some) == min(most, len(CASES)) for some in drawn)
                assert most > 29 or set().union(*drawn[1:]) != {*range(len(CASES))}
    assert parts == 1 or in_turn(CASES, 0, "a", most) != in_turn(CASES, 0, "b", most)


def test_a_few_cases_differ():
    for name in range(20):
        order = spread(CASES, name)
        assert sorted(order) == [*range(len(CASES))]
        a, b, c = (CASES[i] for i in order[:3])
        assert len(a | b) == 6  # nothing in common
        assert len(a | b | c) == 8


def test_nothing_to_draw_from():
    assert in_turn([], 3, "name") == in_turn([], 3, "name", 2) == []
    assert [in_turn([set(), set()], seed, "name", most) for most in (1, None) for seed in (0, 1)] in (
        2 * [[0], [1]],
        2 * [[1], [0]],
    )


class Combination:
    """What is read of a collected test."""

    def __init__(self, name, params, *marks):
        self.nodeid, self.marks = f"{name}[{params}]", [*marks]
        self.callspec = SimpleNamespace(params=params)

    def iter_markers(self, name):
        return (mark for mark in self.marks if mark.name == name)

    def get_closest_marker(self, name):
        return next(self.iter_markers(name), None)

    def add_marker(self, mark):
        self.marks.append(mark.mark)


def sweep(name, *marks):
    rows, sizes = [(0, {"x"}), (1, {"y"}), (1, {"z"})], [3, 4, 5, 6]
    marks = [pytest.mark.parametrize(("a", "b"), rows).mark, pytest.mark.parametrize("size", sizes).mark, *marks]
    return [Combination(name, {"a": a, "b": b, "size": n}, *marks) for a, b in rows for n in sizes]


def left_out(items):
    return [item for item in items if item.get_closest_marker("exhaustive")]


@pytest.mark.parametrize("seed", range(5))
def test_an_ordinary_run_has_every_row_and_an_exhaustive_one_all(seed):
    drawn, all_of_it = sweep("test_a", SAMPLED), sweep("test_a", SAMPLED)
    mark_undrawn(drawn, seed, draw=True, whole=seed == 0)
    kept = [item.callspec.params for item in drawn if item not in left_out(drawn)]
    assert {params["size"] for params in kept} == {3, 4, 5, 6}
    assert {*"xyz"} == set().union(*(params["b"] for params in kept))
    assert len(kept) <= 6
    mark_undrawn(all_of_it, seed, draw=False, whole=False)
    assert len(left_out(all_of_it)) == 12


@pytest.mark.parametrize("seed", range(5))
def test_a_few_cases_of_a_test_without_a_mark(seed):
    items, few = sweep("test_a"), [Combination("test_b", i) for i in range(FEW)]
    mark_undrawn([*items, *few], seed, draw=True, whole=True)
    assert not left_out([*items, *few])
    mark_undrawn([*items, *few], seed, draw=True, whole=False)
    assert not left_out(few)
    kept = [item.callspec.params for item in items if item not in left_out(items)]
    assert len(kept) == FEW
    assert {*"xyz"} == set().union(*(params["b"] for params in kept))
    items = sweep("test_a")
    mark_undrawn(items, seed, draw=False, whole=False)
    assert len(left_out(items)) == 12


def test_slow_tests_take_turns():
    runs = []
    for seed in range(SLOW):
        items = [Combination(f"test_{i}", j, SLOW_MARK) for i in range(30) for j in range(2)] + sweep("test_a")[:1]
        mark_undrawn(items, seed, draw=True, whole=True)
        assert not left_out(items)
        mark_undrawn(items, seed, draw=True, whole=False)
        runs.append({i for i, item in enumerate(items) if item not in left_out(items)})
        assert 60 in runs[-1]  # which is not slow
        assert len(runs[-1]) == pytest.approx(21, abs=8)
        mark_undrawn(items, seed, draw=False, whole=False)
        assert len(left_out(items)) == 60
    assert set().union(*runs) == {*range(61)}
    assert runs[0] & runs[1] == {60}


@pytest.mark.parametrize("parts", [2, 3, 4, 6])
def test_slow_tests_have_a_turn_with_each_of_their_cases(parts):
    first, step = 5 * STRIDE, STRIDE
    drawn = set()
    for seed in range(first, first + SLOW * parts * step, step):
        items = [Combination(name, i, SLOW_MARK) for name in ("test_a", "test_b", "test_c") for i in range(FEW * parts)]
        mark_undrawn(items, seed, draw=True, whole=False)
        drawn |= {item.nodeid for item in items} - {item.nodeid for item in left_out(items)}
    assert len(drawn) == 3 * FEW * parts


def test_several_tests_as_one_sweep():
    left = []
    for seed in range(13):
        mark = pytest.mark.sampled(1, of="what is long").mark
        items = [
            *sweep("test_a", mark),
            Combination("test_b", {}, mark),
            *sweep("test_c", pytest.mark.sampled(99).mark),
        ]
        mark_undrawn(items, seed, draw=True, whole=False)
        drawn, *rest = [i for i, item in enumerate(items) if item not in left_out(items)]
        assert rest == [*range(13, 25)]
        left.append(drawn)
    assert sorted(left) == [*range(13)]
    assert 12 in left[:2]  # each test first


def test_long_tests_are_first():
    marks = {"a": [SAMPLED], "b": [pytest.mark.sampled(1, of="files").mark], "c": [SLOW_MARK], "d": [], "e": []}
    items = [Combination(f"test_{name}", {}, *some) for name, some in (marks | {"e": marks["b"]}).items()]
    long_first(items)
    assert [item.nodeid[5] for item in items] == [*"beacd"]


def test_what_is_exhaustive_already_is_not_drawn():
    items = sweep("test_a", SAMPLED, pytest.mark.exhaustive.mark)
    mark_undrawn(items, 0, draw=True, whole=False)
    assert len(left_out(items)) == 12


def test_successive_commits_draw_part_by_part(tmp_path):
    def git(*words):
        subprocess.run(["git", *words], cwd=tmp_path, check=True, capture_output=True)

    def commit():
        git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "Add")
        return seed_of_the_commit(tmp_path)

    without = seed_of_the_commit(tmp_path)
    git("init", "-q")
    assert seed_of_the_commit(tmp_path) == without  # no commit
    found = [commit() for _ in range(10)]
    assert seed_of_the_commit(tmp_path) == found[-1]
    assert len({without, *found}) == 11
    for most in (3, 7, 15):  # in ten parts or fewer
        parts = found[: -(-len(CASES) // most)]
        assert set().union(*(in_turn(CASES, seed, "name", most) for seed in parts)) == {*range(len(CASES))}
    git("clone", "-q", "--depth", "1", f"file://{tmp_path}", "shallow")
    shallow = seed_of_the_commit(tmp_path / "shallow")
    git("-C", "shallow", "pull", "-q", "--depth", "1")
    assert seed_of_the_commit(tmp_path / "shallow") == shallow
    commit()
    git("-C", "shallow", "fetch", "-q", "--depth", "1")
    git("-C", "shallow", "reset", "-q", "--hard", "origin/HEAD")
    assert seed_of_the_commit(tmp_path / "shallow") not in {shallow, found[0]}  # it does not count commits


def test_one_in_so_many_of_each_file():
    items = [Combination(f"tests/{file}.py::test_{test}", i) for file in "ab" for test in "xyz" for i in range(8)]
    for number, count in {1: 24, 4: 6, 5: 5, 1000: 1}.items():
        drawn = Counter(items[i].nodeid.split("[")[0] for i in one_in(number, items, 0))
        for file in "ab":
            of_file = [drawn[f"tests/{file}.py::test_{test}"] for test in "xyz"]
            assert sum(of_file) == count
            assert max(of_file) - min(of_file) <= 1
    assert set().union(*(one_in(12, items, seed) for seed in range(12))) == {*range(48)}
