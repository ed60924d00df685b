"""SIGINT, SIGTERM and SIGHUP of a command. All three ask it to end: what was measured is kept, exit code 130.

The handler counts a signal and calls the current *reaction*; blocks of code choose it:

- outside every block, and in :func:`interruptible`, the first signal raises KeyboardInterrupt;
- in :func:`on_signal` each signal calls a function, which asks an event loop or a child process to stop;
- in :func:`held` a signal waits: nothing is raised while a run is measured and stored.

A signal that no reaction has taken up reaches the next one that can; at the latest it is raised when the outermost
block ends. A further signal asks for haste and undoes nothing: after one was taken up, none is raised for ``QUIET_S``,
in which a command stores and shows what it has.

Signals reach the main thread only. Another thread that calls :func:`stoppable_from` is stopped by its caller instead,
with the same reactions; all others are not stopped.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
QUIET_S = 5.0
"""How long after a signal no further one raises KeyboardInterrupt. Later ones do, in case code swallowed the first."""
_TERMINALS = (0, 1, 2)


class Signals:
    """The signals that a thread got. ``taken``: those that a reaction has taken up."""

    def __init__(self) -> None:
        self.received = self.taken = 0
        self.react: Callable[[], None] = self.interrupt
        self.quiet_until_s = 0.0

    @property
    def waiting(self) -> bool:
        """Whether a signal was received that has not been handled."""
        return self.received > self.taken

    def take(self) -> None:
        """Mark all signals so far as handled."""
        self.taken = self.received
        self.quiet_until_s = time.monotonic() + QUIET_S

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt, unless a signal was handled less than QUIET_S ago."""
        quiet = time.monotonic() < self.quiet_until_s
        self.taken = self.received
        if not quiet:
            self.take()
            raise KeyboardInterrupt

    def hold(self) -> None:
        """The reaction inside :func:`held`: only count the signal, for later."""

    def send(self) -> None:
        """Signal the thread from another one. Where its reaction is to raise, it does at :func:`raise_if_stopped`."""
        self.received += 1
        if not _raises(self.react):
            self.react()


_signals = Signals()
"""Those of the process, which come in the main thread."""
_others = threading.local()


def signals_here() -> Signals | None:
    """The signals that this thread reacts to; None if it gets none."""
    if threading.current_thread() is threading.main_thread():
        return _signals
    return getattr(_others, "signals", None)


@contextlib.contextmanager
def stoppable_from(signals: Signals | None) -> Iterator[None]:
    """Inside, this thread, which is not the main one, reacts to ``signals``: of its own, or of a thread that waits."""
    _others.signals = signals
    try:
        yield
    finally:
        _others.signals = None


def raise_if_stopped() -> None:
    """Raise KeyboardInterrupt if another thread has stopped this one, where its reaction is to raise."""
    signals = signals_here()
    if signals is not None and signals.waiting and _raises(signals.react):
        signals.react()


class Reaction:
    """Context manager: inside, ``react`` is called at every signal, and at once if one is waiting.

    ``raises``: it raises KeyboardInterrupt. In a thread that gets no signals it does nothing.
    ``received``: signals while it was entered, and those that were waiting before.
    """

    def __init__(self, react: Callable[[], None], *, raises: bool = False) -> None:
        self._react, self._raises = react, raises
        signals = signals_here()
        self._active, self._signals = signals is not None, signals or Signals()
        self._outer = self._signals.react
        self._handlers: dict[int, object] = {}
        self._inside = False
        self._before = self._after = 0

    @property
    def received(self) -> int:
        """Signals that this reaction got."""
        return (self._signals.received if self._inside else self._after) - self._before

    def __enter__(self) -> Reaction:
        if self._active:
            self._before = self._signals.taken
            self._outer = self._signals.react
            self._inside = True
            self._handle()
            self._signals.react = self._signalled
            if self._signals.waiting:
                self._signalled()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._inside:
            return
        self._signals.react = self._outer
        self._after, self._inside = self._signals.received, False
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
            self._signals.quiet_until_s = 0.0  # the script goes on, and its next call can be stopped
        if error is None and self._signals.waiting and _raises(self._outer):
            self._outer()

    def _signalled(self) -> None:
        try:
            self._react()
        except KeyboardInterrupt:
            self._signals.react = self._outer  # raised within __enter__ it would skip __exit__
            raise

    def _handle(self) -> None:
        """Handle SIGINT where the program is not ours and has not set handlers, as in a script."""
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._handlers[signal.SIGINT] = signal.default_int_handler
            signal.signal(signal.SIGINT, _handler)


def _raises(react: Callable[[], None]) -> bool:
    owner = getattr(react, "__self__", None)
    if isinstance(owner, Signals):
        return react == owner.interrupt
    return isinstance(owner, Reaction) and owner._raises


def held() -> Reaction:
    """Inside, signals stay pending, except in inner blocks that react to them."""
    return Reaction((signals_here() or _signals).hold)


def interruptible() -> Reaction:
    """Inside, a signal raises KeyboardInterrupt, also within :func:`held`."""
    return Reaction((signals_here() or _signals).interrupt, raises=True)


def on_signal(react: Callable[[], None]) -> Reaction:
    """Inside, every signal calls ``react``, which takes it up: the code around it must end the command."""

    signals = signals_here() or _signals

    def taken() -> None:
        signals.take()
        react()

    return Reaction(taken)


def hastened(react: Callable[[], None]) -> Reaction:
    """Inside, every signal calls ``react``, which shortens the current work; the signal itself stays pending."""
    return Reaction(react)


def received() -> int:
    """How many signals to end this process has got."""
    return _signals.received


def handle_signals() -> None:
    """Handle SIGINT, SIGTERM and SIGHUP from now on. For the main thread of a command.

    A signal that was ignored when this process started stays ignored (``nohup``, the background of a shell).
    """
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _handler)
    atexit.register(_ignore_signals)


def _ignore_signals() -> None:
    """At the end of the process, when Python gives signals their default action again, which is to kill it."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def finish() -> None:
    """The command has ended: signals change neither its exit code nor its output any more."""
    _signals.take()
    # Python ends by SIGINT, not with the exit code, if a KeyboardInterrupt has ever left an exec(), as dataclasses use,
    # handled since or not. The next exec() makes it forget that.
    exec("")
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()


def _handler(number: int, frame: FrameType | None) -> None:
    for descriptor in _terminals:
        if not _is_terminal(descriptor):  # hung up; writing to it would fail in the middle of storing a run
            _silence(descriptor)
    interrupt = signal.getsignal(signal.SIGINT)
    if number != signal.SIGINT and interrupt is not _handler and callable(interrupt):
        # A server that runs in this process (uvicorn) has set its own handler. Called, not raised as a signal: uvloop
        # would count a signal raised inside a handler twice.
        interrupt(signal.SIGINT, frame)
        return
    _signals.received += 1
    _signals.react()


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


_terminals = [number for number in _TERMINALS if _is_terminal(number)]
