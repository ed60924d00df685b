"""SIGTERM and SIGHUP do what Ctrl-C does: what was started ends, what was measured is kept, exit code 130."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_TERMINALS = (0, 1, 2)


def as_ctrl_c() -> None:
    """Have SIGTERM and SIGHUP do what SIGINT does at that moment. For the main thread of a command.

    A signal that this process was started to ignore stays ignored (``nohup``).
    """
    terminals = [number for number in _TERMINALS if _is_terminal(number)]

    def turn(_number: int, frame: FrameType | None) -> None:
        for descriptor in terminals:
            if not _is_terminal(descriptor):  # hung up; writing to it would fail, in the middle of storing a run
                _silence(descriptor)
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler):
            # Called, not raised as a signal: uvloop would count a signal raised inside a handler twice, and twice means
            # to give up running requests.
            handler(signal.SIGINT, frame)
        else:  # started in the background by a shell, which has it ignore SIGINT
            raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, turn)


@contextlib.contextmanager
def signals_kept() -> Iterator[None]:
    """Undo what a library does to the handlers of SIGTERM and SIGHUP while the context is entered."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():  # no other may set handlers
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
