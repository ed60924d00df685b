"""SIGTERM and SIGHUP act like Ctrl-C: child processes end, measurements are kept, exit code 130."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_TERMINALS = (0, 1, 2)


def as_ctrl_c() -> None:
    """Make SIGTERM and SIGHUP act like SIGINT. For the main thread of a command.

    A signal that was ignored when this process started stays ignored (``nohup``).
    """
    terminals = [number for number in _TERMINALS if _is_terminal(number)]

    def turn(_number: int, frame: FrameType | None) -> None:
        for descriptor in terminals:
            if not _is_terminal(descriptor):  # hung up; writing to it would fail in the middle of storing a run
                _silence(descriptor)
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler):
            # Called, not raised as a signal: uvloop would count a signal raised inside a handler twice, and the second
            # one aborts running requests.
            handler(signal.SIGINT, frame)
        else:  # started in the background by a shell, which makes it ignore SIGINT
            raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, turn)


@contextlib.contextmanager
def signals_kept() -> Iterator[None]:
    """Restore the handlers of SIGTERM and SIGHUP on exit, in case a library changes them inside the context."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():  # other threads may not set handlers
            for number, handler in handlers.items():
                signal.signal(number, handler)


def _is_terminal(descriptor: int) -> bool:
    try:
        return os.isatty(descriptor)
    except OSError:
        return False


def _silence(descriptor: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, descriptor)
    os.close(null)
