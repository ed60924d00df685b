"""What speaks against a run: reasons that make it INVALID, and the caveats of several runs, each said once.

An INVALID run is written and shown, but not gated or compared.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ebbench.analysis.columns import MISSING, STATUSES, RequestColumns
from ebbench.analysis.metrics import Metrics
from ebbench.records.files import EARLIER_TURN_FAILED
from ebbench.records.warnings import KV_CACHE, OTHER_MODEL, WARM_CACHE, RunWarning
from ebbench.spec.client import LAG_REMEDY, lag_limit_ms
from ebbench.spec.server import VIRTUAL_TIME

Owner = Callable[[Collection[int]], str]
"""What stands before a caveat of the runs at these places; "" if it holds for all runs."""

_NUMBER = re.compile(r"(?<![\w.-])\d+(?:,\d{3})*(?:\.\d+)?(?!\w|[.,]\d)")
"""A number, but not one in a name: h100 and h200 are not the ends of a range."""


def of_device(engine: str, warnings: Iterable[RunWarning]) -> tuple[str, ...]:
    """The warnings of a run that are about its device: what it estimates, simplifies or leaves out.

    All warnings of a simulated engine count as its device's (units of another pool, images, a server that would not
    start). Of a real engine those about the server count, such as answers of another model and cached prompts, and not
    those about its client and this one run. What a full KV cache cost counts on both.
    """
    codes = {"device", "engine"} if engine in VIRTUAL_TIME else {"device", WARM_CACHE, OTHER_MODEL}
    return tuple(str(warning) for warning in warnings if (warning.about or warning.code) in codes | {KV_CACHE})


def told_once(said: Sequence[Iterable[str]], owner: Owner) -> list[str]:
    """The caveats of runs, each once, preceded by ``owner``'s name for the runs that have it.

    Caveats that differ only in numbers are merged, with the range of each number.
    """
    alike: dict[str, list[tuple[str, int]]] = {}
    for place, texts in enumerate(said):
        for text in texts:
            alike.setdefault(_NUMBER.sub("#", text), []).append((text, place))
    return [owner({place for _, place in told}) + _ranged([text for text, _ in told]) for told in alike.values()]


def by_policy(runs: Sequence[str]) -> Owner:
    """Names the policies of the runs that have a caveat, unless all have; ``runs``: the policy of each run."""

    def owner(places: Collection[int]) -> str:
        names = dict.fromkeys(runs[place] for place in sorted(places))
        return "" if len(names) == len(set(runs)) else f"{', '.join(names)}: "

    return owner


def by_settings(runs: Sequence[Mapping[str, str]], words: Callable[[str, str], str], of: str) -> Owner:
    """Names the settings that the runs with a caveat have and others lack; ``runs``: the settings of each run, by name.

    No more settings are named than it takes, the first ones first. ``words``: a setting's name and values in words.
    ``of``: what is counted where no choice of values has exactly these runs, such as ``cells``.
    """

    def owner(places: Collection[int]) -> str:
        if len(places) == len(runs):
            return ""
        chosen: dict[str, list[str]] = {}
        for name in runs[0]:
            if values := _apart(name, places, runs):
                chosen[name] = values
            having = {place for place, run in enumerate(runs) if all(run[own] in chosen[own] for own in chosen)}
            if having == set(places):
                return f"{', '.join(words(own, ' or '.join(values)) for own, values in chosen.items())}: "
        return f"{len(places)} of {len(runs)} {of}: "

    return owner


def _apart(name: str, places: Collection[int], runs: Sequence[Mapping[str, str]]) -> list[str]:
    """The values of a setting at ``places``, if other runs have others; else none."""
    values = list(dict.fromkeys(runs[place][name] for place in sorted(places)))
    return values if len(values) < len({run[name] for run in runs}) else []


def _ranged(texts: Sequence[str]) -> str:
    """One text for several that differ only in numbers: "44 to 49" for 44, 47 and 49."""
    columns = zip(*(_NUMBER.findall(text) for text in texts), strict=True)
    ends = [sorted(set(column), key=lambda number: float(number.replace(",", ""))) for column in columns]
    numbers = iter(found[0] if len(found) == 1 else f"{found[0]} to {found[-1]}" for found in ends)
    return _NUMBER.sub(lambda _: next(numbers), texts[0])


FAILURE_LIMIT = 0.01
"""Share of the planned requests from which on failures make a run INVALID."""


@dataclass(frozen=True)
class Conditions:
    """Conditions of the validity check besides the measurements.

    ``paced_sends``: requests are sent at scheduled times, so that lateness is the client's; False in virtual time and
    with a concurrency cap, which makes requests wait. ``failure_limit``: share of planned requests that may fail.
    ``lag_limit_ms``: allowed p99 lateness; None: the value of :func:`lag_limit_ms` for these requests.
    """

    interrupted: bool = False
    paced_sends: bool = True
    failure_limit: float = FAILURE_LIMIT
    lag_limit_ms: float | None = None


def invalid_reasons(
    requests: pa.Table, plan: pa.Table, columns: RequestColumns, metrics: Metrics, conditions: Conditions
) -> tuple[str, ...]:
    """All reasons why the run is INVALID; empty for a valid run."""
    reasons = [
        *_accounting(requests, plan, columns),
        *_failures(requests, metrics, conditions.failure_limit),
        *(_lateness(requests, columns, conditions.lag_limit_ms) if conditions.paced_sends else []),
    ]
    if conditions.interrupted:
        reasons.append("interrupted before the plan was complete")
    return tuple(reasons)


def _accounting(requests: pa.Table, plan: pa.Table, columns: RequestColumns) -> list[str]:
    reasons = []
    planned, recorded = plan.column("request_id"), requests.column("request_id")
    if requests.num_rows != plan.num_rows:
        reasons.append(f"{plan.num_rows} requests planned but {requests.num_rows} accounted for")
    repeated = requests.num_rows - pc.count_distinct(recorded).as_py()
    if repeated:
        reasons.append(f"{repeated} request ids accounted for more than once")
    unplanned = pc.sum(pc.invert(pc.is_in(recorded, value_set=planned.combine_chunks()))).as_py() or 0
    if unplanned:
        reasons.append(f"{unplanned} requests accounted for that were never planned")
    unknown = sorted(set(columns.status.tolist()) - set(STATUSES))
    if unknown:
        reasons.append(f"unknown request status {', '.join(unknown)}")
    return reasons + _inconsistent(columns)


def _inconsistent(columns: RequestColumns) -> list[str]:
    claimed, ok = columns.status == "ok", columns.ok
    reasons = []
    untimed = int((claimed & ~ok).sum())
    if untimed:
        reasons.append(f"{untimed} completed requests lack a start, first-token or last-token time")
    silent = int((ok & (columns.output_tokens < 1)).sum())
    if silent:
        reasons.append(f"{silent} completed requests have no output token")
    ordered = (columns.intended <= columns.first_token) & (columns.first_token <= columns.last_token)
    backwards = int((ok & ~ordered).sum())
    if backwards:
        reasons.append(f"{backwards} completed requests have times that run backwards")
    return reasons


def _failures(requests: pa.Table, metrics: Metrics, limit: float) -> list[str]:
    if not metrics.planned:
        return ["no request was planned"]
    followers = pc.sum(pc.equal(requests.column("error_class"), EARLIER_TURN_FAILED)).as_py() or 0
    failed = metrics.counts["failed"] + metrics.counts["timed_out"] + followers
    if failed == metrics.planned:
        return ["every request failed"]
    if failed > limit * metrics.planned:
        ways = "failed, timed out or came after a turn that did" if followers else "failed or timed out"
        return [f"{failed} of {metrics.planned} requests {ways}, more than {limit:.0%}"]
    return []


def _lateness(requests: pa.Table, columns: RequestColumns, asked_ms: float | None) -> list[str]:
    """The client did not keep its schedule: its p99 lag is above the limit."""
    sent = (columns.sent != MISSING) & (columns.intended != MISSING)
    if not sent.any() or not columns.ok.any():
        return []
    p99_ms = float(np.percentile((columns.sent - columns.intended)[sent], 99)) / 1e6
    limit_ms = lag_limit_ms(requests, asked_ms)
    if p99_ms <= limit_ms:
        return []
    return [f"the client fell behind its schedule: p99 lag {p99_ms:.1f} ms, limit {limit_ms:.4g} ms; {LAG_REMEDY}"]
