"""What speaks against a run: reasons that make it INVALID, failed requests by cause with a remedy, and caveats.

An INVALID run is written and shown, but not gated or compared. Caveats of several runs are said once.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ebbench.analysis.columns import MISSING, STATUSES, RequestColumns
from ebbench.analysis.metrics import Metrics
from ebbench.foreign.documents import load_toml
from ebbench.grouping import by_key
from ebbench.records.schema import ABANDONED, EARLIER_TURN_ABANDONED, EARLIER_TURN_FAILED
from ebbench.records.warnings import ABOUT_SERVER, KV_CACHE, RunWarning, in_ranges, warning, warning_shape
from ebbench.spec.client import lag_limit_ms
from ebbench.spec.server import VIRTUAL_TIME

FAILURE_COLUMNS = ("status", "phase", "error_class", "error_body")
"""Columns of the requests table that :func:`failures_by_cause` reads."""

LONGEST_EXAMPLE = 200  # characters
_ADVICE = re.compile(r"\((Retry-After|Location|Content-Type): [^)]*\) ")
"""What the client puts before the body of a refusal: the headers that say what to do."""


@dataclass(frozen=True)
class Failure:
    """Requests with the same cause of failure. ``example``: the most frequent message, shortened; empty without one.

    ``remedy``: options or steps that may help; empty if none is known.
    """

    error_class: str
    count: int
    example: str
    remedy: str

    def __str__(self) -> str:
        """``60 x error_frame: Token id 29783 is out of vocabulary -> give --vocab-size ...``."""
        message = f"{self.count:,} x {self.error_class}" + (f": {self.example}" if self.example else "")
        return f"{message} -> {self.remedy}" if self.remedy else message


class _Causes(msgspec.Struct, forbid_unknown_fields=True):
    causes: list[tuple[str, str, str]]


@cache
def _causes() -> list[tuple[str, str, str]]:
    return load_toml(Path(__file__).with_name("validity.toml"), _Causes).causes


def _remedy(error_class: str, message: str) -> str:
    """What helps against the first known cause that fits; empty without one."""
    for of_class, of_message, remedy in _causes():
        if re.fullmatch(of_class, error_class) and re.search(of_message, message, re.IGNORECASE):
            return remedy
    return ""


def failures_by_cause(requests: pa.Table, phase: str = "") -> tuple[Failure, ...]:
    """Requests that did not complete, grouped by error class and cause, the most frequent first.

    ``requests`` has FAILURE_COLUMNS; ``phase``: only this phase, empty: all. Every request that is not ``ok`` is in
    exactly one group; requests without an error class are grouped by status. Requests whose clients hung up, and those
    that were not sent because of that, did what the plan says and are no failures.
    """
    chosen = pc.invert(pc.is_in(requests["status"].cast(pa.string()), value_set=pa.array(["ok", ABANDONED])))
    planned = pc.equal(pc.fill_null(requests["error_class"].cast(pa.string()), ""), EARLIER_TURN_ABANDONED)
    chosen = pc.and_(chosen, pc.invert(planned))
    if phase:
        chosen = pc.and_(chosen, pc.equal(requests["phase"], phase))
    failed = requests.select(list(FAILURE_COLUMNS)).filter(chosen)
    groups = by_key(((kind, _remedy(kind, message)), (message, count)) for kind, message, count in _distinct(failed))
    failures = [
        Failure(error_class, sum(count for _, count in messages), _example(messages), remedy)
        for (error_class, remedy), messages in groups.items()
    ]
    return _ordered(failures)


def merge_failures(several: Iterable[Sequence[Failure]]) -> tuple[Failure, ...]:
    """The failures of several runs merged; a merged failure keeps the first example."""
    merged: dict[tuple[str, str], Failure] = {}
    for failure in (failure for failures in several for failure in failures):
        key = (failure.error_class, failure.remedy)
        before = merged.get(key, replace(failure, count=0, example=""))
        merged[key] = replace(before, count=before.count + failure.count, example=before.example or failure.example)
    return _ordered(merged.values())


def _ordered(failures: Iterable[Failure]) -> tuple[Failure, ...]:
    """The most frequent first; last those that only follow from other failures."""

    def place(failure: Failure) -> tuple[bool, int, str]:
        return failure.error_class == EARLIER_TURN_FAILED, -failure.count, failure.error_class

    return tuple(sorted(failures, key=place))


def _distinct(failed: pa.Table) -> Iterator[tuple[str, str, int]]:
    classes = pc.coalesce(failed["error_class"].cast(pa.string()), failed["status"].cast(pa.string()))
    # Arrow's group_by would load its engine for data sets, which costs more than the rest of the analysis.
    counted = Counter(zip(classes.to_pylist(), failed["error_body"].to_pylist(), strict=True))
    for (error_class, body), count in counted.items():
        # OpenAI's ``error.message``, FastAPI's ``detail``, or the text itself.
        text = (body or "").strip()
        advice = mark[0] if (mark := _ADVICE.match(text)) else ""
        text = text[len(advice) :]
        if text.startswith("{"):
            with suppress(msgspec.DecodeError, RecursionError):  # not JSON, or cut at the maximum length
                text = _message_in(msgspec.json.decode(text)) or text
        yield error_class, " ".join(f"{advice}{text}".split()), count


def _example(messages: Sequence[tuple[str, int]]) -> str:
    counts: dict[str, int] = {}
    for message, count in messages:
        counts[message] = counts.get(message, 0) + count
    example = max(counts, key=lambda message: (bool(message), counts[message]))
    return example if len(example) <= LONGEST_EXAMPLE else f"{example[:LONGEST_EXAMPLE].rstrip()}…"


def _message_in(value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list):  # FastAPI: one entry per field
        return "; ".join(filter(None, map(_message_in, value)))
    if not isinstance(value, dict):
        return ""
    message = next(
        (inner for key in ("error", "message", "detail", "msg") if (inner := _message_in(value.get(key)))), ""
    )
    field = value.get("param") or value.get("loc")
    name = field[-1] if isinstance(field, list) and field else field
    return f"{message} ({name})" if message and isinstance(name, str) and name not in message else message


Owner = Callable[[Collection[int]], str]
"""What stands before a caveat of the runs at these places; "" if it holds for all runs."""


def of_device(engine: str, warnings: Iterable[RunWarning]) -> tuple[RunWarning, ...]:
    """The warnings of a run that are about its device: what it estimates, simplifies or leaves out.

    All warnings of a simulated engine count as its device's (units of another pool, images, a server that would not
    start). Of a real engine those about the server count, such as answers of another model and cached prompts, and not
    those about its client and this one run. What a full KV cache cost counts on both.
    """
    codes = {"device", "engine", KV_CACHE} if engine in VIRTUAL_TIME else {"device", KV_CACHE, *ABOUT_SERVER}
    return tuple(said for said in warnings if {said.about, said.code} & codes)


def told_once(
    told_by_run: Sequence[Iterable[RunWarning]], owner: Owner, worded: Callable[[RunWarning], str] = str
) -> list[str]:
    """The caveats of runs, each once, preceded by ``owner``'s name for the runs that have it.

    Caveats that differ only in numbers are merged, with the range of each number.
    """
    alike = by_key(
        ((said.code, said.message, warning_shape(said.values)), (said, place))
        for place, warnings in enumerate(told_by_run)
        for said in warnings
    )
    return [
        owner({place for _, place in told}) + worded(in_ranges([said for said, _ in told])) for told in alike.values()
    ]


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
            values = list(dict.fromkeys(runs[place][name] for place in sorted(places)))
            if len(values) < len({run[name] for run in runs}):  # other runs have other values
                chosen[name] = values
            having = {place for place, run in enumerate(runs) if all(run[own] in chosen[own] for own in chosen)}
            if having == set(places):
                return f"{', '.join(words(own, ' or '.join(values)) for own, values in chosen.items())}: "
        return f"{len(places)} of {len(runs)} {of}: "

    return owner


FAILURE_LIMIT = 0.01
"""Share of the planned requests from which on failures make a run INVALID."""


def invalid_reasons(
    requests: pa.Table,
    plan: pa.Table,
    columns: RequestColumns,
    metrics: Metrics,
    *,
    interrupted: bool = False,
    paced_sends: bool = True,
    failure_limit: float = FAILURE_LIMIT,
    lag_limit_ms: float | None = None,
) -> tuple[RunWarning, ...]:
    """All reasons why the run is INVALID; empty for a valid run.

    ``paced_sends``: requests are sent at scheduled times, so that lateness is the client's; False in virtual time and
    with a concurrency cap, which makes requests wait. ``failure_limit``: share of planned requests that may fail.
    ``lag_limit_ms``: allowed p99 lateness; None: the value of :func:`lag_limit_ms` for these requests.
    """
    return (
        *_accounting(requests, plan, columns),
        *_failures(requests, metrics, failure_limit),
        *(_lateness(requests, columns, lag_limit_ms) if paced_sends else []),
        *([warning("interrupted")] if interrupted else []),
    )


def _accounting(requests: pa.Table, plan: pa.Table, columns: RequestColumns) -> list[RunWarning]:
    reasons = []
    planned, recorded = plan.column("request_id"), requests.column("request_id")
    if requests.num_rows != plan.num_rows:
        reasons.append(warning("requests-missing", planned=plan.num_rows, recorded=requests.num_rows))
    unknown = sorted(set(columns.status.tolist()) - set(STATUSES))
    if unknown:
        reasons.append(warning("status-unknown", statuses=unknown))
    claimed, ok = columns.status == "ok", columns.ok
    ordered = (columns.intended <= columns.first_token) & (columns.first_token <= columns.last_token)
    wrong = {
        "requests-repeated": requests.num_rows - pc.count_distinct(recorded).as_py(),
        "requests-unplanned": pc.sum(pc.invert(pc.is_in(recorded, value_set=planned.combine_chunks()))).as_py() or 0,
        "times-missing": int((claimed & ~ok).sum()),
        # null: an answer that has no tokens (embeddings, rerank)
        "tokens-missing": int((ok & pc.fill_null(pc.less(requests["output_tokens"], 1), False).to_numpy()).sum()),
        "times-backwards": int((ok & ~ordered).sum()),
    }
    return reasons + [warning(code, requests=count) for code, count in wrong.items() if count]


def _failures(requests: pa.Table, metrics: Metrics, limit: float) -> list[RunWarning]:
    if not metrics.planned:
        return [warning("nothing-planned")]
    followers = pc.sum(pc.equal(requests.column("error_class"), EARLIER_TURN_FAILED)).as_py() or 0
    failed = metrics.counts["failed"] + metrics.counts["timed_out"] + followers
    if failed == metrics.planned:
        return [warning("all-failed", planned=metrics.planned)]
    if failed > limit * metrics.planned:
        counts = {"failed": failed, "planned": metrics.planned, "after_failed_turns": followers}
        return [warning("many-failed", **counts, limit=limit)]
    return []


def _lateness(requests: pa.Table, columns: RequestColumns, asked_ms: float | None) -> list[RunWarning]:
    """The client did not keep its schedule: its p99 lag is above the limit."""
    sent = (columns.sent != MISSING) & (columns.intended != MISSING)
    if not sent.any() or not columns.ok.any():
        return []
    p99_ms = float(np.percentile((columns.sent - columns.intended)[sent], 99)) / 1e6
    limit_ms = lag_limit_ms(requests, asked_ms)
    return [warning("client-late", p99_lag_ms=p99_ms, limit_ms=limit_ms)] if p99_ms > limit_ms else []
