"""Limits of a capacity search: ``ttft:2000`` for a share of the requests, ``ttft:p99:2000`` for a percentile."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ebbench.analysis.metrics import METRICS, Slo, parse_slo, slo_from_limits
from ebbench.config.setting_strings import Setting, named_settings, pairs_of, value_of
from ebbench.errors import UsageError
from ebbench.sizing.estimate import Requirement

PERCENTILE = Setting("share of the requests", unit="percent", at_least=1, at_most=99.9, example=99)


@dataclass(frozen=True)
class Tail:
    """``share`` of the requests must have ``metric`` at or below ``limit_ms``."""

    metric: str
    share: float
    limit_ms: float

    @property
    def slo(self) -> Slo:
        """This limit alone."""
        return slo_from_limits({self.metric: self.limit_ms})

    def __str__(self) -> str:
        return f"{self.metric}:p{100 * self.share:g}:{self.limit_ms:g}"


@dataclass(frozen=True)
class LatencyLimits:
    """``slo``: limits that ``attainment`` of the requests must meet jointly; ``tails``: further percentile limits."""

    slo: Slo
    attainment: float
    tails: tuple[Tail, ...] = ()

    def requirements(self) -> tuple[Requirement, ...]:
        """The requirements of the search, in the order of :meth:`slos`."""
        joint = (Requirement(" ".join(self.slo.limits()), self.attainment),) if self.slo else ()
        return joint + tuple(Requirement(tail.metric, tail.share) for tail in self.tails)

    def slos(self) -> tuple[Slo, ...]:
        """One set of limits per requirement."""
        return ((self.slo,) if self.slo else ()) + tuple(tail.slo for tail in self.tails)

    def __str__(self) -> str:
        joint = f"{self.slo} for {100 * self.attainment:g} % of the requests" if self.slo else ""
        return ", ".join(part for part in (joint, *map(str, self.tails)) if part)


def parse_limits(texts: Iterable[str], attainment: float) -> LatencyLimits:
    """Parse ``metric:MS`` and ``metric:pNN:MS``, several per text if separated by spaces or commas.

    Raises UsageError for an unknown metric, a percentile outside 1 to 99.9, no limit, a limit that another one implies,
    or an attainment that is not between 0 and 1 (exclusive): a share of 1 would depend on the single slowest request at
    any load.
    """
    if not 0 < attainment < 1:
        raise UsageError(f"--attainment is a share between 0 and 1, such as 0.95, not {attainment:g}")
    joint: list[str] = []
    tails: list[Tail] = []
    for part in pairs_of(texts):
        if part.count(":") == 2:
            tails.append(_tail(part))
        else:
            joint.append(part)
    slo = parse_slo(joint)
    if not slo and not tails:
        raise UsageError("latency limits are missing: give --goodput, for example --goodput ttft:2000 tpot:50")
    limits = LatencyLimits(slo, attainment, tuple(tails))
    _refuse_implied(limits)
    return limits


def _refuse_implied(limits: LatencyLimits) -> None:
    """Raise UsageError for a limit that another one of the same latency implies, which decides nothing."""
    joint = [Tail(name, limits.attainment, limit) for name, limit in limits.slo.limits().items()]
    given = [(tail, f"{tail.metric}:{tail.limit_ms:g}") for tail in joint]
    given += [(tail, str(tail)) for tail in limits.tails]
    for place, (tail, text) in enumerate(given):
        for other, stricter in given[:place] + given[place + 1 :]:
            if text == stricter:
                raise UsageError(f"--goodput: {text} is given twice; give it once")
            if other.metric == tail.metric and other.share >= tail.share and other.limit_ms <= tail.limit_ms:
                raise UsageError(f"--goodput: where {stricter} is met, {text} is met too; leave one of them out")


def _tail(text: str) -> Tail:
    metric, percentile, limit = text.split(":")
    (limit_ms,) = named_settings(f"{metric}:{limit}", METRICS, "--goodput", noun="metric", equals=":").values()
    if not percentile.startswith("p"):
        raise UsageError(f"--goodput: {text!r} needs a percentile, e.g. {metric}:p99:{limit}")
    percent = value_of("p", percentile.removeprefix("p"), PERCENTILE, f"--goodput: percentile of {text}", equals="")
    return Tail(metric, percent / 100, limit_ms)
