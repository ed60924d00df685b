"""Progress on stderr with the time left: redrawn in place on a terminal, a line every 10 s elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

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

    def counts(self) -> tuple[int, int]:
        """What is done, and all; 0: not known."""
        return self.done, self.total

    def describe(self) -> str:
        """``table 3: 12 of 40 runs, 47 s to go, 20 s so far``."""
        elapsed_s = time.monotonic() - self.began_s
        most = "at most " if self.at_most else ""
        before = f" ({count(self.kept)} from before)" if self.kept else ""
        left_s = time_left_s(elapsed_s, self.done - self.kept, self.total - self.kept)
        parts = [
            f"{count(self.done)} of {most}{count(self.total)} {self.unit}{before}" if self.total else "",
            "" if left_s is None else f"{most}{in_words(left_s)} to go",  # in front: a narrow terminal cuts the end
            self.doing,
            f"{in_words(elapsed_s)} so far",
        ]
        return f"{self.label}: {', '.join(filter(None, parts))}"


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
    work.follow = None if quiet else console.follow
    with _display(console, work, quiet=quiet):
        yield work


def _display(
    console: Console, work: Work | Snapshots, *, quiet: bool, transient: bool = True
) -> AbstractContextManager[None]:
    """A bar on a terminal, lines elsewhere; nothing where the caller follows the events."""
    if quiet or console.follow is not None:
        return nullcontext()
    return _bars(console, work, transient=transient) if console.is_terminal else _in_lines(console, work.describe)


class _Lines:
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
def _in_lines(console: Console, describe: Callable[[], str]) -> Iterator[None]:
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
def _bars(console: Console, work: Work | Snapshots, *, transient: bool) -> Iterator[None]:
    """A bar and a text, computed at every refresh so that the time advances between completions."""
    from rich import progress
    from rich.table import Column
    from rich.text import Text

    class Bar(progress.BarColumn):
        def render(self, task: Any) -> Any:
            task.completed, total = work.counts()
            task.total = total or None
            return super().render(task)

    class Described(progress.ProgressColumn):
        def render(self, task: Any) -> Text:
            return Text(work.describe())

    shown_bar = Bar(bar_width=16)
    # A narrow terminal cuts the end of the text, which matters least, instead of breaking the line.
    text = Described(Column(no_wrap=True, overflow="ellipsis"))
    bars = progress.Progress(shown_bar, text, console=console, transient=transient, refresh_per_second=8)
    bars.add_task("", total=None)
    with _showing(), bars:
        yield


@contextmanager
def reporter(
    console: Console, label: str, planned: int, *, quiet: bool = False, brief: bool = False, known: bool = True
) -> Iterator[Snapshots]:
    """A live bar on a terminal, lines elsewhere, no output with ``quiet``.

    ``brief``: for one of many runs; it leaves no bar on the screen, and elsewhere it prints only what takes 10 s.
    ``known``: ``planned`` requests will run, so that the time left can be told.
    """
    snapshots = Snapshots(label, planned, known, None if quiet else console.follow)
    in_lines = not (quiet or brief or console.is_terminal or console.follow)
    if in_lines:
        say(console, f"{label}: {count(planned)} requests")
    try:
        with _display(console, snapshots, quiet=quiet, transient=brief):
            yield snapshots
    finally:
        if in_lines and snapshots.last is not None:
            say(console, snapshots.describe())


@dataclass
class Snapshots:
    """An engine observer: keeps the last snapshot of a run, to show it while the run lasts."""

    label: str
    planned: int
    known: bool
    follow: Callable[[ProgressEvent], object] | None
    last: Progress | None = None
    began_s: float = field(default_factory=time.monotonic)

    def update(self, progress: Progress) -> None:
        """Keep the snapshot. The time left counts from the first one that does not wait for a server."""
        if self.last is None or self.last.waiting_for:
            self.began_s = time.monotonic()
        self.last = progress
        if self.follow is not None:
            self.follow(ProgressEvent(self.describe(), progress.completed, progress.planned, progress))

    def describe(self) -> str:
        """What the snapshot tells, with the time left where it is known."""
        elapsed_s = time.monotonic() - self.began_s
        if self.last is None:
            return f"{self.label}: {in_words(elapsed_s)} so far"
        done = self.last.completed + sum(self.last.failures.values())
        left_s = None if self.last.waiting_for or not self.known else time_left_s(elapsed_s, done, self.last.planned)
        return f"{self.label}: {describe(self.last, left_s)}"

    def counts(self) -> tuple[int, int]:
        """Completed and planned requests."""
        return (0, self.planned) if self.last is None else (self.last.completed, self.last.planned)


def describe(progress: Progress, left_s: float | None = None) -> str:
    """A snapshot in words: ``1,204/4,000  72 s to go  9,512 tok/s  exclusive  at 31.2 s``."""
    if progress.waiting_for:
        return f"waiting for {progress.waiting_for} ({progress.time_s:.0f} s)"
    without_tokens = progress.completed and not progress.output_tokens  # embeddings and the like
    done, unit = (progress.completed, "req/s") if without_tokens else (progress.output_tokens, "tok/s")
    parts = [
        f"{count(progress.completed)}/{count(progress.planned)}",
        "" if left_s is None else f"{in_words(left_s)} to go",
        f"{rate(done / progress.time_s if progress.time_s > 0 else None)} {unit}",
        MODES.get(progress.mode, progress.mode),
        f"at {duration_ms(1000 * progress.time_s)}",
        "" if progress.ttft_ms is None else f"TTFT {duration_ms(progress.ttft_ms)}",
        "" if progress.tpot_ms is None else f"TPOT {duration_ms(progress.tpot_ms)}",
        *(f"{name} {count(failures)}" for name, failures in progress.failures.items()),
    ]
    return "  ".join(part for part in parts if part)
