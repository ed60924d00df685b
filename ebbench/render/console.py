"""The terminal that every command prints on, or the function of a program that is told instead."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment

from ebbench.engines.base import Progress
from ebbench.untrusted import visible


@dataclass(frozen=True)
class ProgressEvent:
    """What a command tells while it works. ``text``: the line that a terminal would show.

    ``done`` of ``total`` requests, runs or candidates; a ``total`` of 0 is not known. ``snapshot``: of a running
    measurement.
    """

    text: str
    done: int = 0
    total: int = 0
    snapshot: Progress | None = None

    def __str__(self) -> str:
        return self.text


class Console(rich.console.Console):
    """rich's console, on which the control characters of what is printed are visible.

    rich writes its own control sequences separately, so any in the text came from outside. ``follow``: called with
    every event in place of printing.
    """

    follow: Callable[[ProgressEvent], None] | None = None

    @classmethod
    def followed_by(cls, follow: Callable[[ProgressEvent], None]) -> Console:
        """A console that prints nothing."""
        console = cls(file=io.StringIO())
        console.follow = follow
        return console

    def print(self, *objects: Any, soft_wrap: bool | None = None, **how: Any) -> None:
        """Print; ``soft_wrap`` leaves a line whole for files and pipes. A terminal would cut it within words."""
        super().print(*objects, soft_wrap=soft_wrap and not self.is_terminal, **how)

    def say(self, text: str, *, quiet: bool = False) -> None:
        """Print a line as it is, without markup; nothing if ``quiet``."""
        if not quiet and self.follow is not None:
            self.follow(ProgressEvent(text))
        elif not quiet:
            self.print(text, markup=False, soft_wrap=True)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The segments of a renderable."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text, lines=True))
