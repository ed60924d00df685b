"""The terminal that every command prints on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment

from ebbench.untrusted import visible


class Console(rich.console.Console):
    """rich's console, on which the control characters of what is printed are visible.

    rich writes its own control sequences separately, so any in the text came from outside.
    """

    def print(self, *objects: Any, soft_wrap: bool | None = None, **how: Any) -> None:
        """Print; ``soft_wrap`` leaves a line whole for files and pipes. A terminal would cut it within words."""
        super().print(*objects, soft_wrap=soft_wrap and not self.is_terminal, **how)

    def say(self, text: str, *, quiet: bool = False) -> None:
        """Print a line as it is, without markup; nothing if ``quiet``."""
        if not quiet:
            self.print(text, markup=False, soft_wrap=True)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The segments of a renderable."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text, lines=True))
