"""Work that is done side by side, each part by one of a few processes, which tell a reporter of this one."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from escnn_attention.training.comparison.progress import Advance, Reporter
from escnn_attention.training.errors import UserError
from escnn_attention.training.stopping import stoppable

Work = Callable[[str, Reporter], None]
"""Does what has a name, and tells a reporter of it. It is sent to other processes: a function of a module, or a
:class:`functools.partial` of one."""

_DONE = "done"


def side_by_side(work: Work, names: Sequence[str], processes: int, report: Reporter) -> None:
    """Do ``work`` for every name, in new processes, each with as many threads as this one.

    Args:
        work: leaves what it finds in files.
        names: in the order in which they are begun.
        processes: how many at a time.
        report: told what happens in any of them, one bar of each at a time.

    Raises:
        UserError: what ``work`` raised, or that a process ended before its work, which after any other error has said
            so itself. The other processes are killed then, as they are by a Ctrl-C.
    """
    context = multiprocessing.get_context("spawn")
    waiting = list(names)
    with contextlib.ExitStack() as stack:
        busy: dict[Connection, _Worker] = {}
        for _ in range(min(processes, len(waiting))):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, work, torch.get_num_threads()))
            with _uninterrupted():
                process.start()
            theirs.close()
            stack.callback(process.join)
            stack.callback(process.kill)
            busy[ours] = worker = _Worker(ours, process, report)
            stack.callback(worker.bar.close)
            worker.begin(waiting.pop(0))
        while busy:
            for connection in wait(list(busy)):
                worker = busy[connection]  # type: ignore[index]
                if worker.listen():
                    if waiting:
                        worker.begin(waiting.pop(0))
                    else:
                        del busy[worker.connection]


class _Worker:
    """A process that does one thing at a time, as this one sees it."""

    def __init__(self, connection: Connection, process: Any, report: Reporter) -> None:
        self.connection = connection
        self.process = process
        self.report = report
        self.name = ""
        self.bar = contextlib.ExitStack()
        self.advance: Advance | None = None

    def begin(self, name: str) -> None:
        self.name = name
        self.connection.send(name)

    def listen(self) -> bool:
        """Take one message, and say whether it was that all is done."""
        try:
            kind, content = self.connection.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            raise UserError(
                f"the process of {self.name} ended with status {self.process.exitcode}: the same command goes on"
            ) from None
        if kind == "say":
            self.report.say(content)
        elif kind == "bar":
            title, total, size = content
            self.advance = self.bar.enter_context(self.report.bar(title, total, size=size))
        elif kind == "advance":
            assert self.advance is not None
            self.advance(*content)
        elif kind == "end of bar":
            self.bar.close()
        elif content is not None:
            raise content
        return bool(kind == _DONE)


class _Relay(Reporter):
    """Sends on what it is told. Where nobody listens any more, the sending fails, and ends what would go on alone."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def say(self, message: str) -> None:
        self.connection.send(("say", message))

    @contextlib.contextmanager
    def bar(self, title: str, total: int | None = None, *, size: bool = False) -> Iterator[Advance]:
        self.connection.send(("bar", (title, total, size)))
        yield lambda completed, total=None, note="": self.connection.send(("advance", (completed, total, note)))
        self.connection.send(("end of bar", None))


def _serve(connection: Connection, work: Work, threads: int) -> None:
    """What a process does: one name after the other, until there is nobody left to send one."""
    torch.set_num_threads(threads)
    # A scheduler may send its signal to every process: the one that began this work says so.
    with contextlib.suppress(EOFError, ConnectionError), stoppable(lambda _: None):
        while True:
            name = connection.recv()
            failed = None
            try:
                work(name, _Relay(connection))
            except UserError as error:
                failed = error
            connection.send((_DONE, failed))


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Processes that are started here leave a Ctrl-C, which goes to all of them, to this one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
