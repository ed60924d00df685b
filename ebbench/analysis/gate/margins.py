"""Parses figures and margins in percent: ``ttft-p99``; ``3`` for all figures, ``ttft:10`` for one."""

from __future__ import annotations

from collections.abc import Iterable

from ebbench.analysis.gate.units import NAMES
from ebbench.config.setting_strings import Setting, pairs_of, value_of
from ebbench.errors import UnknownNameError, UsageError

DEFAULT_PERCENT = 3.0
MARGIN = Setting("loss that still passes", unit="percent", above=0, below=100, example=10)


def parse_figures(names: Iterable[str]) -> tuple[str, ...]:
    """The columns of the named figures, in that order. Raises UnknownNameError."""
    found: dict[str, None] = {}
    for name in pairs_of(names):
        if name not in NAMES:
            raise UnknownNameError("figure", name, NAMES)
        found[NAMES[name]] = None
    return tuple(found)


def parse_margins(texts: Iterable[str]) -> tuple[float, dict[str, float]]:
    """The default margin and the margins of single figures, as shares. Raises UsageError, also for one given twice."""
    shares: dict[str, float] = {}
    for pair in pairs_of(texts):
        name, colon, text = pair.rpartition(":")
        if colon and name not in NAMES:
            raise UnknownNameError("figure", name, NAMES)
        figure = NAMES[name] if colon else ""
        if figure in shares:
            raise UsageError(f"--margin: {name or 'the margin of all figures'} is given twice; give it once")
        shares[figure] = value_of(name, text, MARGIN, "--margin", equals=colon) / 100
    return shares.pop("", DEFAULT_PERCENT / 100), shares
