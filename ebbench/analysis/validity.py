"""Reasons that make a run INVALID, one sentence each.

An INVALID run is written and shown, but not gated or compared.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ebbench.analysis.columns import MISSING, STATUSES, RequestColumns
from ebbench.analysis.metrics import Metrics
from ebbench.records.schema import EARLIER_TURN_FAILED
from ebbench.spec.client import LAG_REMEDY, lag_limit_ms

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
    return reasons + _inconsistent(columns, requests)


def _inconsistent(columns: RequestColumns, requests: pa.Table) -> list[str]:
    claimed, ok = columns.status == "ok", columns.ok
    reasons = []
    untimed = int((claimed & ~ok).sum())
    if untimed:
        reasons.append(f"{untimed} completed requests lack a start, first-token or last-token time")
    # null: an answer that has no tokens (embeddings, rerank)
    silent = int((ok & pc.fill_null(pc.less(requests["output_tokens"], 1), False).to_numpy()).sum())
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
