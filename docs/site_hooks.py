"""What the site changes in the pages: a fence's second word, which tests read, becomes its title or goes."""

from __future__ import annotations

import re
from typing import Any

_FENCE = re.compile(r"^```(\w+) +(\S+)$", re.MULTILINE)
_LANGUAGES = {"jsonl": "json"}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """mkdocs calls it with every page's text."""
    return _FENCE.sub(_plain, markdown)


def _plain(fence: re.Match[str]) -> str:
    language = _LANGUAGES.get(fence[1], fence[1])
    key, _, name = fence[2].partition("=")
    return f'```{language} title="{name}"' if key == "file" else f"```{language}"
