"""Progress on stderr with the time left: redrawn in place on a terminal, a line every 10 s elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol

from ebbench.records.plan import Progress
from ebbench.render.documents import Console, ProgressEvent
from ebbench.render.numbers import count, duration_ms, rate

LINES_EVERY_S = 10.0
_LOOK_S = 0.5
_SETTLED_S = 2.0  # before that the time left is a guess
MODES = {"eb": "exclusive", "mb": "mixed"}


@dataclass
class Work:
    """What a command does, for its progress line. ``total`` of 0: not known; ``at_most``: fewer may do.

    ``kept``: done by an earlier call, part of ``done``; it says nothing about the time left. ``doing``: what is under
    way.
    """

    label: str
    total: int = 0
    unit: str = "runs"
    at_most: bool = False
    done: int = 0
    kept: int = 0
    doing: str = ""
    began_s: float = field(default_factory=time.monotonic)
    follow: Callable[[ProgressEvent], object] | None = None

    def reached(self, doing: str, done: int = 0, total: int = 0) -> None:
        """State of a part of the work; each part's time and time left are told by themselves."""
        if doing != self.doing:
            self.began_s = time.monotonic()
        self.doing, self.done, self.total = doing, done, total
        if self.follow is not None:
            self.follow(ProgressEvent(self.describe(), done, total))

    def describe(self) -> str:
        """``table 3: 12 of 40 runs, 20 s so far, 47 s to go``."""
        elapsed_s = time.monotonic() - self.began_s
        most = "at most " if self.at_most else ""
        before = f" ({count(self.kept)} from before)" if self.kept else ""
        parts = [f"{count(self.done)} of {most}{count(self.total)} {self.unit}{before}"] if self.total else []
        parts += [self.doing] if self.doing else []
        parts.append(f"{in_words(elapsed_s)} so far")
        left_s = time_left_s(elapsed_s, self.done - self.kept, self.total - self.kept)
        parts += [] if left_s is None else [f"{most}{in_words(left_s)} to go"]
        return f"{self.label}: {', '.join(parts)}"


def time_left_s(elapsed_s: float, done: float, total: float) -> float | None:
    """Seconds to the end at the speed so far; None while it cannot be told, and at the end."""
    if elapsed_s < _SETTLED_S or not 0 < done < total:
        return None
    return elapsed_s * (total - done) / done


def in_words(seconds: float) -> str:
    """``13 s``, ``4 min``, ``2.5 h``."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5970 else f"{seconds / 3600:.1f} h"


@contextmanager
def shown(console: Console, work: Work, *, quiet: bool = False) -> Iterator[Work]:
    """Show the work while the block does it. Elsewhere than on a terminal, work of less than 10 s has no line."""
    if quiet or console.follow is not None:
        work.follow = None if quiet else console.follow
        yield work
    elif console.is_terminal:
        with _bars(console, work.describe, lambda: (work.done, work.total), transient=True):
            yield work
    else:
        with in_lines(console, work.describe):
            yield work


class _Lines:
    """When the last line of progress was written, when the last display ended, and how many there are now."""

    last_s = ended_s = time.monotonic()
    showing = 0


@contextmanager
def _showing() -> Iterator[None]:
    if not _Lines.showing and time.monotonic() - _Lines.ended_s > LINES_EVERY_S:
        _Lines.last_s = time.monotonic()  # other work lay between
    _Lines.showing += 1
    try:
        yield
    finally:
        _Lines.showing -= 1
        _Lines.ended_s = time.monotonic()


@contextmanager
def in_lines(console: Console, describe: Callable[[], str]) -> Iterator[None]:
    """Say a line while the block runs, in a thread of its own: the block may compute or wait.

    A line is due LINES_EVERY_S after the one before it, whichever part of the command that was of: many short runs in a
    row are told of, too.
    """
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(max(0.0, _Lines.last_s + LINES_EVERY_S - time.monotonic())):
            say(console, describe())

    thread = threading.Thread(target=repeat, name="progress", daemon=True)
    with _showing():
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def tell_elapsed(command: str, began_s: float, ended: threading.Event) -> None:
    """Until a command has ended, say how long it has worked, at intervals in which nothing else shows its progress."""
    console = Console(stderr=True)
    while not ended.wait(_LOOK_S):
        told_s = max(_Lines.last_s, _Lines.ended_s)
        if not _Lines.showing and time.monotonic() - told_s >= LINES_EVERY_S:
            say(console, f"{command}: {in_words(time.monotonic() - began_s)} so far")


def say(console: Console, line: str) -> None:
    """Print a line as it is, without wrapping."""
    _Lines.last_s = time.monotonic()
    console.print(line, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def _bars(
    console: Console, describe: Callable[[], str], counts: Callable[[], tuple[int, int]], *, transient: bool
) -> Iterator[None]:
    """A bar and a text, computed at every refresh so that the time advances between completions.

    The bar is that of ``counts``, done and total; a total of 0 is not known.
    """
    from rich import progress
    from rich.text import Text

    class Bar(progress.BarColumn):
        def render(self, task: Any) -> Any:
            task.completed, total = counts()
            task.total = total or None
            return super().render(task)

    class Described(progress.ProgressColumn):
        def render(self, task: Any) -> Text:
            return Text(describe())

    shown_bar = Bar(bar_width=16)
    bars = progress.Progress(shown_bar, Described(), console=console, transient=transient, refresh_per_second=8)
    bars.add_task("", total=None)
    with _showing(), bars:
        yield


class Reporter(Protocol):
    """An engine observer with a start and an end."""

    def update(self, progress: Progress) -> None:
        """Process a snapshot."""
        ...

    def __enter__(self) -> Reporter: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def reporter(
    console: Console, label: str, planned: int, *, quiet: bool = False, brief: bool = False, known: bool = True
) -> Reporter:
    """A live bar on a terminal, lines elsewhere, no output with ``quiet``.

    ``brief``: for one of many runs; it leaves no bar on the screen, and elsewhere it prints only what takes 10 s.
    ``known``: ``planned`` requests will run, so that the time left can be told.
    """
    return Silent() if quiet else _Shown(console, label, planned, brief=brief, known=known)


class Silent:
    """A reporter without output."""

    def update(self, progress: Progress) -> None:
        """Do nothing."""

    def __enter__(self) -> Silent:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class _Shown:
    """Keeps the last snapshot of a run and shows it while the run lasts."""

    def __init__(self, console: Console, label: str, planned: int, *, brief: bool, known: bool) -> None:
        self._console, self._label, self._planned, self._brief, self._known = console, label, planned, brief, known
        self._last: Progress | None = None
        self._began_s = time.monotonic()
        self._show: AbstractContextManager[None]
        if console.follow is not None:
            self._show = nullcontext()
        elif console.is_terminal:
            self._show = _bars(console, self._line, self._counts, transient=brief)
        else:
            self._show = in_lines(console, self._line)

    def update(self, progress: Progress) -> None:
        """Keep the snapshot. The time left counts from the first one that does not wait for a server."""
        if self._last is None or self._last.waiting_for:
            self._began_s = time.monotonic()
        self._last = progress
        if self._console.follow is not None:
            self._console.follow(ProgressEvent(self._line(), progress.completed, progress.planned, progress))

    def __enter__(self) -> _Shown:
        if self._in_lines:
            say(self._console, f"{self._label}: {count(self._planned)} requests")
        self._show.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._show.__exit__(kind, error, trace)
        if self._last is not None and self._in_lines:
            say(self._console, self._line())

    @property
    def _in_lines(self) -> bool:
        return not self._brief and not self._console.is_terminal and self._console.follow is None

    def _line(self) -> str:
        elapsed_s = time.monotonic() - self._began_s
        if self._last is None:
            return f"{self._label}: {in_words(elapsed_s)} so far"
        line = f"{self._label}: {describe(self._last)}"
        done = self._last.completed + sum(self._last.failures.values())
        left_s = None if self._last.waiting_for or not self._known else time_left_s(elapsed_s, done, self._last.planned)
        return line if left_s is None else f"{line}  {in_words(left_s)} to go"

    def _counts(self) -> tuple[int, int]:
        return (0, self._planned) if self._last is None else (self._last.completed, self._last.planned)


def describe(progress: Progress) -> str:
    """A snapshot in words: ``1,204/4,000  9,512 tok/s  exclusive  at 31.2 s``."""
    if progress.waiting_for:
        return f"waiting for {progress.waiting_for} ({progress.time_s:.0f} s)"
    without_tokens = progress.completed and not progress.output_tokens  # embeddings and the like
    done, unit = (progress.completed, "req/s") if without_tokens else (progress.output_tokens, "tok/s")
    parts = [
        f"{count(progress.completed)}/{count(progress.planned)}",
        f"{rate(done / progress.time_s if progress.time_s > 0 else None)} {unit}",
        MODES.get(progress.mode, progress.mode),
        f"at {duration_ms(1000 * progress.time_s)}",
        "" if progress.ttft_ms is None else f"TTFT {duration_ms(progress.ttft_ms)}",
        "" if progress.tpot_ms is None else f"TPOT {duration_ms(progress.tpot_ms)}",
        *(f"{name} {count(failures)}" for name, failures in progress.failures.items()),
    ]
    return "  ".join(part for part in parts if part)
