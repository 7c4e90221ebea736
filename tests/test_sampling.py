"""The draw from sweeps: nothing is left out for good, and what is drawn can be drawn again."""

import itertools
import subprocess
from collections import Counter
from types import SimpleNamespace

import pytest

from tests.sampling import cover, mark_undrawn, one_in, seed_of_the_commit, take_turns

SAMPLED = pytest.mark.sampled.mark
CASES = [set(zip("abc", values, strict=True)) for values in itertools.product(range(5), range(3), range(2))]


def values_of(drawn):
    return set().union(*(CASES[i] for i in drawn))


def test_every_value_is_drawn_with_few_cases():
    for seed in range(20):
        drawn = cover(CASES, seed)
        assert values_of(drawn) == values_of(range(len(CASES)))
        assert len(drawn) == 5  # as many as the longest parameter has values
        assert values_of(drawn[1:]) != values_of(range(len(CASES)))


def test_a_seed_draws_the_same_again_and_others_draw_all_in_the_end():
    assert cover(CASES, 3) == cover(CASES, 3)
    assert cover(CASES, 3) != cover(CASES, 4)
    assert set().union(*(cover(CASES, seed) for seed in range(100))) == set(range(len(CASES)))


def test_nothing_to_draw_from():
    assert cover([], 0) == []
    assert cover([set()], 0) == []


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
    drawn, whole, others = sweep("test_a", SAMPLED), sweep("test_a", SAMPLED), sweep("test_b")
    mark_undrawn([*drawn, *others], seed, draw=True)
    assert not left_out(others)
    kept = [item.callspec.params for item in drawn if item not in left_out(drawn)]
    assert sorted(params["size"] for params in kept) == [3, 4, 5, 6]
    assert {*"xyz"} == set().union(*(params["b"] for params in kept))
    mark_undrawn(whole, seed, draw=False)
    assert len(left_out(whole)) == 12


def test_two_tests_have_draws_of_their_own():
    one, other = sweep("test_a", SAMPLED), sweep("test_b", SAMPLED)
    mark_undrawn([*one, *other], 1, draw=True)
    assert len(left_out(one)) == len(left_out(other)) == 8
    assert [i for i, x in enumerate(one) if x in left_out(one)] != [
        i for i, x in enumerate(other) if x in left_out(other)
    ]


def test_a_rotating_one():
    left = set()
    for seed in range(200):
        items = sweep("test_a", pytest.mark.sampled(1).mark)
        mark_undrawn(items, seed, draw=True)
        (drawn,) = (i for i, item in enumerate(items) if item not in left_out(items))
        left.add(drawn)
    assert len(left) == 12


def test_several_tests_as_one_sweep():
    left, tests = set(), Counter()
    for seed in range(300):
        mark = pytest.mark.sampled(1, of="what is slow").mark
        items = [*sweep("test_a", mark), Combination("test_b", {}, mark), *sweep("test_c")]
        mark_undrawn(items, seed, draw=True)
        drawn, *others = [i for i, item in enumerate(items) if item not in left_out(items)]
        assert others == [*range(13, 25)]
        left.add(drawn)
        tests[drawn == 12] += 1
    assert left == set(range(13))
    assert tests[True] == pytest.approx(150, abs=40)  # as likely as the one of twelve combinations


def test_each_of_several_tests_has_its_turn():
    names = [*"aaaaa", *"bb", "c"]
    for seed in range(20):
        for most in range(9):
            drawn = take_turns(names, seed, most)
            assert len(drawn) == most
            assert drawn == sorted({*drawn}) == take_turns(names, seed, most)
            counts = Counter(names[i] for i in drawn)
            assert max(counts.values(), default=0) - min(counts["b"], counts["a"]) <= 1 or counts["b"] == 2
            assert counts["c"] == 1 or most < 3


def test_what_is_exhaustive_already_is_not_drawn():
    items = sweep("test_a", SAMPLED, pytest.mark.exhaustive.mark)
    mark_undrawn(items, 0, draw=True)
    assert len(left_out(items)) == 12


def test_the_same_commit_draws_the_same_and_the_next_one_anew(tmp_path):
    def commit():
        names = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *names, "commit", "-q", "--allow-empty", "-m", "Add"], cwd=tmp_path, check=True)
        return seed_of_the_commit(tmp_path)

    without = seed_of_the_commit(tmp_path)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    first = commit()
    assert seed_of_the_commit(tmp_path) == first
    assert len({without, first, commit()}) == 3


def test_one_in_so_many_of_each_file():
    items = [Combination(f"tests/{file}.py::test_{test}", i) for file in "ab" for test in "xyz" for i in range(8)]
    for number, count in {1: 24, 4: 6, 5: 5, 1000: 1}.items():
        drawn = Counter(items[i].nodeid.split("[")[0] for i in one_in(number, items, 0))
        for file in "ab":
            of_file = [drawn[f"tests/{file}.py::test_{test}"] for test in "xyz"]
            assert sum(of_file) == count
            assert max(of_file) - min(of_file) <= 1
    assert set().union(*(one_in(12, items, seed) for seed in range(100))) == {*range(48)}
