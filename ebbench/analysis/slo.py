"""Service-level objectives: limits on request latencies, as in ``--goodput ttft:500 tpot:50 e2el:5000``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

from ebbench.config.setting_strings import named_settings, setting, settings_of


@dataclass(frozen=True)
class Slo:
    """Upper limits in ms; None is no limit. Without any limit, goodput is not computed."""

    ttft: float | None = setting(None, "time to first token", unit="ms", above=0, example=500)
    tpot: float | None = setting(None, "mean time per output token after the first", unit="ms", above=0, example=50)
    e2el: float | None = setting(None, "from sending to the last token", unit="ms", above=0, example=5000)
    ttfat: float | None = setting(None, "time to first answer token, after thinking", unit="ms", above=0, example=5000)

    def limits(self) -> dict[str, float]:
        """The given limits, by metric."""
        given = ((f.name, getattr(self, f.name)) for f in fields(self))
        return {name: value for name, value in given if value is not None}

    def __bool__(self) -> bool:
        return bool(self.limits())

    def __str__(self) -> str:
        return " ".join(f"{name}:{value:g}" for name, value in self.limits().items())


METRICS = settings_of(Slo)


def parse_slo(texts: Iterable[str]) -> Slo:
    """Parse ``metric:milliseconds`` pairs, several per text if separated by spaces or commas.

    Raises UsageError for an unknown or repeated metric and for a limit that is not a positive number.
    """
    return slo_from_limits(named_settings(" ".join(texts), METRICS, "--goodput", noun="metric", equals=":"))


def slo_from_limits(limits: Mapping[str, float]) -> Slo:
    """The inverse of :meth:`Slo.limits`."""
    return Slo(**limits)
