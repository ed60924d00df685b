"""Service-level objectives: limits on request latencies, as in ``--goodput ttft:500 tpot:50 e2el:5000``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

from ebbench.config.setting_strings import named_settings, pairs_of, setting, settings_of
from ebbench.errors import UsageError


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

    Raises UsageError for an unknown or repeated metric, for a percentile (:mod:`ebbench.capacity.limits` has them) and
    for a limit that is not a positive number.
    """
    pairs = pairs_of(texts)
    for pair in pairs:
        if pair.count(":") > 1:
            raise UsageError(
                f"--goodput: {pair} limits a percentile, which only capacity and plan do; here the requests within a "
                "limit are counted, e.g. ttft:500"
            )
    return slo_from_limits(named_settings(" ".join(pairs), METRICS, "--goodput", noun="metric", equals=":"))


def slo_from_limits(limits: Mapping[str, float]) -> Slo:
    """The inverse of :meth:`Slo.limits`."""
    return Slo(**limits)
