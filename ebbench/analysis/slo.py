"""Service-level objectives: limits on a request's latencies, as ``--goodput ttft:500 tpot:50 e2el:5000``."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

from ebbench.errors import UsageError


@dataclass(frozen=True)
class Slo:
    """Upper limits in milliseconds; None means no limit. No limit at all means: goodput is not asked for."""

    ttft: float | None = None
    tpot: float | None = None
    e2el: float | None = None

    def limits(self) -> dict[str, float]:
        """The limits given, by metric."""
        given = ((f.name, getattr(self, f.name)) for f in fields(self))
        return {name: value for name, value in given if value is not None}

    def __bool__(self) -> bool:
        return bool(self.limits())

    def __str__(self) -> str:
        return " ".join(f"{name}:{value:g}" for name, value in self.limits().items())


METRICS = tuple(f.name for f in fields(Slo))


def parse_slo(texts: Iterable[str]) -> Slo:
    """Parse ``metric:milliseconds`` pairs, several to a text if separated by spaces or commas.

    Raises UsageError for an unknown or repeated metric and for a limit that is not a positive number.
    """
    limits: dict[str, float] = {}
    for pair in (part for text in texts for part in text.replace(",", " ").split()):
        name, value = _parse_pair(pair)
        if name in limits:
            raise UsageError(f"--goodput: {name} is given twice; give each metric one limit")
        limits[name] = value
    return slo_from_limits(limits)


def slo_from_limits(limits: Mapping[str, float]) -> Slo:
    """The inverse of :meth:`Slo.limits`."""
    return Slo(**limits)


def _parse_pair(pair: str) -> tuple[str, float]:
    name, colon, text = pair.partition(":")
    if name not in METRICS:
        near = difflib.get_close_matches(name, METRICS, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}?" if near else f"write one of {', '.join(METRICS)}"
        raise UsageError(f"--goodput: unknown metric {name!r}; {hint}")
    try:
        value = float(text) if colon else math.nan
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise UsageError(f"--goodput: {pair!r} needs a limit in milliseconds, e.g. {name}:500")
    return name, value
