"""Commands that SIGTERM (of a scheduler) or SIGINT (Ctrl-C) stops."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_AT_ONCE = 1.0  # seconds: who stops a group of processes may send the signal to each of them twice


@contextlib.contextmanager
def stoppable(say: Callable[[str], None]) -> Iterator[None]:
    """Raise a :class:`KeyboardInterrupt` in the block at SIGTERM or SIGINT, and end the process once it has unwound.

    The exit status is 128 + the number of the signal, 143 or 130, as shells have it, whatever other error or exit the
    block makes of the interrupt. A signal that the process ignores stays ignored. Outside the main thread nothing
    changes. ``say`` is called with the name of the signal before the process ends.

    >>> try:
    ...     with stoppable(print):
    ...         signal.raise_signal(signal.SIGTERM)
    ... except SystemExit as ended:
    ...     print(ended.code)
    SIGTERM
    143
    """
    received: list[tuple[int, float]] = []

    def stop(number: int, frame: FrameType | None) -> None:
        again = bool(received) and time.monotonic() - received[-1][1] < _AT_ONCE
        received.append((number, time.monotonic()))
        if not again:
            raise KeyboardInterrupt

    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: handler for number, handler in handlers.items() if is_main and handler != signal.SIG_IGN}
    try:
        for number in before:
            signal.signal(number, stop)
        yield
    except BaseException as error:
        ended_well = isinstance(error, SystemExit) and not error.code
        if not received or ended_well:
            raise
        say(signal.Signals(received[0][0]).name)
        raise SystemExit(128 + received[0][0]) from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
