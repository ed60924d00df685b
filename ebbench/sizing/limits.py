"""Limits of a capacity search: ``ttft:2000`` for a share of the requests, ``ttft:p99:2000`` for a percentile.

With limits of classes (``chat:ttft:500``) the share is one of each class's requests, so that no class is served at the
cost of another.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from ebbench.analysis.columns import Mask, RequestColumns
from ebbench.analysis.metrics import METRICS, Slo, pairs_by_class, parse_slo, slo_from_limits
from ebbench.config.declare import Setting, named_settings, value_of
from ebbench.errors import UsageError
from ebbench.sizing.estimate import Requirement
from ebbench.spec.commands import LimitedCommand
from ebbench.workloads.mixture import brought_limits

OTHERS = ""
"""Class of a requirement that is of the requests of all classes without limits of their own."""
PERCENTILE = Setting("share of the requests", unit="percent", at_least=1, at_most=99.9, example=99)


def _named(metric: str, of_class: str | None) -> str:
    return f"{of_class}:{metric}" if of_class else metric


@dataclass(frozen=True)
class LatencyLimits:
    """``slo``: limits that ``attainment`` of the requests must meet jointly; ``tails``: further percentile limits."""

    slo: Slo
    attainment: float
    tails: tuple[Requirement, ...] = ()

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes that have joint limits of their own."""
        return tuple(name for name, _ in self.slo.classes)

    @property
    def named(self) -> list[str]:
        """The classes that any limit names."""
        return [*dict.fromkeys([*self.classes, *(tail.of_class for tail in self.tails if tail.of_class)])]

    def requirements(self) -> tuple[Requirement, ...]:
        """The requirements of the search: joint ones of the other requests and per class, then percentiles."""
        joint = {OTHERS if self.classes else None: replace(self.slo, classes=())}
        joint |= {name: self.slo.of_class(name) for name in self.classes}
        return (
            *(
                Requirement(" ".join(_named(metric, of) for metric in slo.limits()), self.attainment, of, slo)
                for of, slo in joint.items()
                if slo
            ),
            *self.tails,
        )

    def masks(self, columns: RequestColumns) -> list[Mask]:
        """Per requirement, a mask of the requests that it applies to."""
        all_requests = np.ones(len(columns.status), np.bool_)
        some: dict[str | None, Mask] = {name: columns.request_class == name for name in self.named}
        some |= {None: all_requests, OTHERS: ~np.isin(columns.request_class, self.classes)}
        return [some[requirement.of_class] for requirement in self.requirements()]

    def __str__(self) -> str:
        of = "each class's" if self.classes else "the"
        joint = f"{self.slo} for {100 * self.attainment:g} % of {of} requests" if self.slo else ""
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
    tails: list[Requirement] = []
    for name, part in pairs_by_class(texts):
        if part.count(":") == 2:
            tails.append(_tail(part, name))
        else:
            joint.append(f"{name}:{part}" if name else part)
    slo = parse_slo(joint)
    if not slo and not tails:
        raise UsageError("latency limits are missing: give --goodput, for example --goodput ttft:2000 tpot:50")
    limits = LatencyLimits(slo, attainment, tuple(tails))
    _refuse_implied(limits)
    return limits


def limits_of(asked: LimitedCommand, workload: str) -> LatencyLimits:
    """The limits that a command is given, with those that the workload's file brings. Raises UsageError."""
    goodput = [asked.goodput] if asked.goodput else []
    return parse_limits([*brought_limits(workload, goodput), *goodput], asked.attainment)


def _refuse_implied(limits: LatencyLimits) -> None:
    """Raise UsageError for a limit that another one of the same latency implies, which decides nothing."""
    given = [(name, limits.attainment, limit, f"{name}:{limit:g}") for name, limit in limits.slo.limits().items()]
    given += [(tail.name, tail.share, min(tail.slo.limits().values()), str(tail)) for tail in limits.tails]
    for place, (name, share, limit_ms, text) in enumerate(given):
        for other_name, other_share, other_ms, stricter in given[:place] + given[place + 1 :]:
            if text == stricter:
                raise UsageError(f"--goodput: {text} is given twice; give it once")
            if other_name == name and other_share >= share and other_ms <= limit_ms:
                raise UsageError(f"--goodput: where {stricter} is met, {text} is met too; leave one of them out")


def _tail(text: str, of_class: str) -> Requirement:
    metric, percentile, limit = text.split(":")
    (limit_ms,) = named_settings(f"{metric}:{limit}", METRICS, "--goodput", noun="metric", equals=":").values()
    if not percentile.startswith("p"):
        raise UsageError(f"--goodput: {text!r} needs a percentile, e.g. {metric}:p99:{limit}")
    percent = value_of("p", percentile.removeprefix("p"), PERCENTILE, f"--goodput: percentile of {text}", equals="")
    slo = slo_from_limits({metric: limit_ms})
    return Requirement(_named(metric, of_class), percent / 100, of_class or None, slo)
