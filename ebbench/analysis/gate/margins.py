"""Figures and margins as a user writes them: ``ttft-p99``; ``3`` for every figure, ``ttft:10`` for one; percent."""

from __future__ import annotations

from collections.abc import Iterable

from ebbench.analysis.gate.units import NAMES
from ebbench.errors import UnknownNameError, UsageError

DEFAULT_PERCENT = 3.0


def parse_figures(names: Iterable[str]) -> tuple[str, ...]:
    """The columns of the figures named, in that order. Raises UnknownNameError."""
    found: dict[str, None] = {}
    for name in (part for text in names for part in text.replace(",", " ").split()):
        if name not in NAMES:
            raise UnknownNameError("figure", name, NAMES)
        found[NAMES[name]] = None
    return tuple(found)


def parse_margins(texts: Iterable[str]) -> tuple[float, dict[str, float]]:
    """Default margin and those of single figures, as shares. Raises UsageError."""
    default, single = DEFAULT_PERCENT, {}
    for part in (part for text in texts for part in text.replace(",", " ").split()):
        name, colon, value = part.rpartition(":")
        if not colon:
            default = _percent(part, value)
        elif name not in NAMES:
            raise UnknownNameError("figure", name, NAMES)
        else:
            single[NAMES[name]] = _percent(part, value) / 100
    return default / 100, single


def _percent(part: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 100:
        raise UsageError(f"--margin {part!r}: write a percentage between 0 and 100, e.g. 3 or ttft:10")
    return value
