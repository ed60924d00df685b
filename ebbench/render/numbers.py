"""Formats numbers: three significant digits, a unit, a dash for undefined."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

DASH = "–"
_BARS = "▁▂▃▄▅▆▇█"


def count(value: float | None) -> str:
    """An integer with thousands separators."""
    return DASH if value is None else f"{value:,.0f}"


def finite(value: Any) -> Any:
    """``value`` with NaN and infinite numbers replaced by None, also in dictionaries and lists: JSON has none."""
    if isinstance(value, dict):
        return {name: finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def rate(value: float | None) -> str:
    """A rate: an integer from 100 on, else three significant digits."""
    if value is None:
        return DASH
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def up(value: float) -> str:
    """A positive value rounded up to two significant digits."""
    digits = 1 - math.floor(math.log10(value))
    return f"{math.ceil(value * 10**digits) / 10**digits:g}"


def duration_ms(value: float | None) -> str:
    """A duration given in ms as ``162 ms``, ``8.28 s`` or ``1,204 s``."""
    if value is None:
        return DASH
    if abs(value) < 999.5:
        return f"{value:.3g} ms"
    seconds = value / 1000
    return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:,.1f} s" if seconds < 99.95 else f"{seconds:,.0f} s"


def figure(name: str, value: float | None) -> str:
    """A latency (its name ends in ``_ms``) or a rate."""
    return duration_ms(value) if name.endswith("_ms") else rate(value)


def percent(value: float | None) -> str:
    """A share as ``97.3 %``."""
    return DASH if value is None else f"{100 * value:.1f} %"


def size(count_bytes: float) -> str:
    """Bytes as ``812 kB``, ``18.4 MB`` or ``1.20 GB``."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if count_bytes >= 0.9995 * scale:
            return f"{count_bytes / scale:.3g} {unit}"
    return f"{count_bytes / 1e3:.0f} kB"


def change(value: float | None) -> str:
    """A relative change with its sign, ``+36.4 %``."""
    return DASH if value is None else f"{100 * value:+.1f} %"


def listed(names: Sequence[str]) -> str:
    """``v1, eb and ebplus``."""
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]


def micros(seconds: float) -> str:
    """A duration given in s in microseconds, three significant digits: ``31.4 µs``."""
    value = seconds * 1e6
    return f"{value:,.0f} µs" if abs(value) >= 1000 else f"{value:.3g} µs"


def percentile(share: float) -> str:
    """A percentile's name: p95 for 0.95."""
    return f"p{100 * share:g}"


def spark(shares: tuple[float, ...]) -> str:
    """Shares in [0, 1] as a row of bars."""
    return "".join(_BARS[round(min(max(share, 0.0), 1.0) * (len(_BARS) - 1))] for share in shares)


def sentence(note: str) -> str:
    """A note as a sentence; a name that it begins with (``eb: ...``, ``h100 tp1``) keeps its letters."""
    note = note.removesuffix(".")
    first = note.partition(" ")[0]
    return f"{note[:1].upper()}{note[1:]}." if first.isalpha() else f"{note}."
