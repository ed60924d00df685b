"""Progress on stderr, one line per policy; plain text if stderr is not a terminal."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol

from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as Bars

from ebbench.engines.base import Progress
from ebbench.render.console import Console
from ebbench.render.numbers import count, duration_ms, rate

STILL_WAITING_S = 60.0
MODES = {"eb": "exclusive", "mb": "mixed"}


class Reporter(Protocol):
    """An engine observer with a start and an end."""

    def update(self, progress: Progress) -> None:
        """Process a snapshot."""
        ...

    def __enter__(self) -> Reporter: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def reporter(console: Console, label: str, planned: int, *, quiet: bool = False) -> Reporter:
    """A live bar on a terminal, two lines elsewhere, no output with ``quiet``."""
    if quiet:
        return Silent()
    return Live(console, label, planned) if console.is_terminal else Plain(console, label, planned)


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


class Plain:
    """Prints a line at the start and at the end, and one per minute while the engine is not ready."""

    def __init__(self, console: Console, label: str, planned: int) -> None:
        self._console, self._label, self._planned = console, label, planned
        self._last: Progress | None = None
        self._said_s = 0.0

    def update(self, progress: Progress) -> None:
        """Keep the snapshot for the last line."""
        if not progress.waiting_for:
            self._last = progress
        elif progress.time_s >= self._said_s + STILL_WAITING_S:
            self._said_s = progress.time_s
            self._say(f"{self._label}: {describe(progress)}")

    def __enter__(self) -> Plain:
        self._say(f"{self._label}: {count(self._planned)} requests")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._last is not None:
            self._say(f"{self._label}: {describe(self._last)}")

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class Live:
    """A bar with throughput and mode, redrawn in place, which stays on screen at the end."""

    def __init__(self, console: Console, label: str, planned: int) -> None:
        self._bars = Bars(
            TextColumn("{task.fields[label]}", markup=False),
            BarColumn(bar_width=16),
            TextColumn("{task.fields[state]}", markup=False),
            console=console,
            refresh_per_second=8,
        )
        self._task: TaskID = self._bars.add_task("", total=planned, label=label, state="starting")

    def update(self, progress: Progress) -> None:
        """Redraw with the snapshot."""
        self._bars.update(self._task, completed=progress.completed, state=describe(progress))

    def __enter__(self) -> Live:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()


def describe(progress: Progress) -> str:
    """A snapshot in words: ``1,204/4,000  9,512 tok/s  exclusive  at 31.2 s``."""
    if progress.waiting_for:
        return f"waiting for {progress.waiting_for} ({progress.time_s:.0f} s)"
    speed = progress.output_tokens / progress.time_s if progress.time_s > 0 else None
    parts = [
        f"{count(progress.completed)}/{count(progress.planned)}",
        f"{rate(speed)} tok/s",
        MODES.get(progress.mode, progress.mode),
        f"at {duration_ms(1000 * progress.time_s)}",
        "" if progress.ttft_ms is None else f"TTFT {duration_ms(progress.ttft_ms)}",
        "" if progress.tpot_ms is None else f"TPOT {duration_ms(progress.tpot_ms)}",
        *(f"{name} {count(failures)}" for name, failures in progress.failures.items()),
    ]
    return "  ".join(part for part in parts if part)
