import functools
import multiprocessing
import os
import signal
import time
from contextlib import contextmanager

import pytest
import torch

from escnn_attention.training.comparison.processes import _Relay, _serve, side_by_side
from escnn_attention.training.comparison.progress import Reporter
from escnn_attention.training.errors import UserError


class Bars(Reporter):
    """Keeps what it is told, bars too."""

    def __init__(self):
        self.said, self.bars, self.open = [], {}, 0

    def say(self, message):
        self.said.append(message)

    @contextmanager
    def bar(self, title, total=None, *, size=False):
        self.open += 1
        steps = self.bars[title] = [(total, size)]
        try:
            yield lambda completed, total=None, note="": steps.append((completed, total, note))
        finally:
            self.open -= 1


def tell(folder, name, report):
    """Shows a bar, and leaves the process and its threads in a file."""
    report.say(f"{name} begins")
    with report.bar(f"bar of {name}", 2, size=True) as advance:
        advance(1)
        advance(2, 2, "done")
    (folder / name).write_text(f"{os.getpid()} {torch.get_num_threads()}")


def fail(folder, name, report):
    """One of the names fails, another waits for ever."""
    with report.bar(f"bar of {name}"):
        if name == "sleeping":
            (folder / name).write_text(str(os.getpid()))
            time.sleep(1000)
        while not (folder / "sleeping").exists():
            time.sleep(0.01)
        if name == "wrong":
            raise UserError("a wrong option")
        if name == "broken":
            raise ZeroDivisionError
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(autouse=True)
def _forks(monkeypatch):
    """New processes import for seconds: those of `compare` are tested with it."""
    if "fork" not in multiprocessing.get_all_start_methods():
        pytest.skip("needs fork")
    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr(multiprocessing, "get_context", {"spawn": fork}.__getitem__)


def test_every_part_is_done_by_one_of_a_few_processes(tmp_path):
    report, names = Bars(), ["one", "two", "three", "four"]
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        side_by_side(functools.partial(tell, tmp_path), names, 2, report)
    finally:
        torch.set_num_threads(threads)
    found = [(tmp_path / name).read_text().split() for name in names]
    assert len({process for process, _ in found} - {str(os.getpid())}) == 2
    assert {threads for _, threads in found} == {"3"}
    assert sorted(report.said) == sorted(f"{name} begins" for name in names)
    assert report.bars == {f"bar of {name}": [(2, True), (1, None, ""), (2, 2, "done")] for name in names}
    assert not report.open


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wrong", "^a wrong option$"),
        ("broken", "the process of broken ended with status 1: the same command goes on"),
        ("killed", "the process of killed ended with status -9"),
    ],
)
def test_what_fails_ends_the_others(tmp_path, name, message):
    report = Bars()
    with pytest.raises(UserError, match=message):
        side_by_side(functools.partial(fail, tmp_path), [name, "sleeping"], 2, report)
    assert not report.open
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "sleeping").read_text()), 0)


def test_a_process_ends_when_nobody_listens():
    ours, theirs = multiprocessing.Pipe()
    ours.send("one")
    ours.send("two")
    ours.close()
    begun = []

    def work(name, report):
        begun.append(name)
        report.say("somebody?")
        begun.append("went on")

    threads = torch.get_num_threads()
    _serve(theirs, work, threads)
    assert begun == ["one"]
    with pytest.raises(ConnectionError):
        _Relay(theirs).say("nobody")
