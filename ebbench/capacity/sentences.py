"""The result of a capacity search as a table, as sentences and as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rich.table import Table

from ebbench.capacity.drive import Outcome
from ebbench.capacity.limits import Limits
from ebbench.capacity.probe import Reading
from ebbench.capacity.search import Estimate
from ebbench.render import numbers
from ebbench.render.tables import framed

_LIMITED = {
    "memory": "the KV cache is full for most of the time: more memory would carry more",
    "queue": "limits are kept up to the load at which the queue grows without bound",
    "errors": "requests fail, or the run is INVALID, at higher loads",
}
"""What ``limited_by`` means where the name alone does not say it."""


def announce(limits: Limits, by_concurrency: bool) -> str:
    """What is searched for."""
    load = "number of open sessions" if by_concurrency else "rate of sessions"
    return f"searching for the highest {load} that keeps {limits}"


def progress(policy: str, reading: Reading, estimate: Estimate, by_concurrency: bool) -> str:
    """One line per probe."""
    if reading.short:
        verdict = "too short to decide, again with more sessions"
    elif reading.invalid:
        verdict = f"INVALID, decides nothing: {reading.invalid}"
    elif reading.probe.failed:
        verdict = f"requests failed: {reading.probe.failed}"
    elif reading.probe.runaway:
        verdict = "the queue grows for as long as requests come"
    else:
        verdict = f"{numbers.percent(reading.attainment)} meet the limits"
    return f"{policy}: {_load(reading.probe.load, by_concurrency)}: {verdict}; so far {_interval(estimate)}"


def table(found: Mapping[str, Outcome], by_concurrency: bool) -> Table:
    """One row per policy."""
    shown = framed()
    shown.add_column("policy", overflow="fold", min_width=6)
    for header in (f"highest\n{_unit(by_concurrency)}", "95 %\ninterval"):
        shown.add_column(header, justify="right", no_wrap=True)
    shown.add_column("limited\nby", no_wrap=True)
    for header in ("limits\nmet", "TTFT\nmedian", "TPOT\nmedian", "goodput\nreq/s", "\ntok/s"):
        shown.add_column(header, justify="right", no_wrap=True)
    best = max((o.estimate.capacity or 0.0 for o in found.values()), default=0.0)
    for policy, outcome in found.items():
        estimate, near = outcome.estimate, outcome.nearest
        shown.add_row(
            policy,
            _number(estimate.capacity, by_concurrency),
            _range(estimate, by_concurrency),
            outcome.limited_by,
            numbers.percent(near.attainment),
            numbers.duration_ms(near.ttft_ms),
            numbers.duration_ms(near.tpot_ms),
            numbers.rate(near.goodput_requests_per_s),
            numbers.rate(near.goodput_tokens_per_s),
            style="bold" if len(found) > 1 and estimate.capacity == best else None,
        )
    return shown


def remarks(found: Mapping[str, Outcome], limits: Limits, by_concurrency: bool) -> list[str]:
    """What the table does not say: the curve, why a search stopped, which figures belong to which policy."""
    lines = [f"Latencies and goodput are those of the probe nearest to capacity. Limits: {limits}."]
    for policy, outcome in found.items():
        loads, bars = curve(outcome)
        if not loads:
            continue
        low, high = _load(loads[0], by_concurrency), _load(loads[-1], by_concurrency)
        probes = len(outcome.readings)
        lines.append(f"{policy}: share of requests within the limits, {low} to {high}, {probes} probes: {bars}")
        if outcome.limited_by in _LIMITED:
            lines.append(f"{policy}: limited by {outcome.limited_by}: {_LIMITED[outcome.limited_by]}.")
        if outcome.stopped:
            lines.append(f"{policy}: stopped by {outcome.stopped} before the interval was as narrow as asked.")
        if outcome.estimate.capacity is not None and not math.isfinite(outcome.estimate.high):
            lines.append(f"{policy}: no higher load was tried, so this is a lower bound.")
    return lines


def curve(outcome: Outcome) -> tuple[list[float], str]:
    """Loads in rising order, and the share of requests within the limits at each as a row of bars.

    Without probes whose queue ran away: their share falls with the length of the run.
    """
    by_load: dict[float, list[float]] = {}
    for reading in outcome.readings:
        if reading.decides and not reading.probe.runaway:
            by_load.setdefault(reading.probe.load, []).append(reading.attainment)
    loads = sorted(by_load)
    return loads, numbers.spark(tuple(sum(by_load[load]) / len(by_load[load]) for load in loads))


def as_dict(policy: str, outcome: Outcome, by_concurrency: bool, limits: Limits) -> dict[str, Any]:
    """One object of ``--json``. ``high`` is null where no probed load was too high.

    Rates are in requests/s: the searched rate of sessions, times the requests of a session.
    """
    estimate, near = outcome.estimate, outcome.nearest
    name = "capacity_concurrency" if by_concurrency else "capacity_requests_per_s"
    factor = 1.0 if by_concurrency else near.requests_per_session
    return {
        "policy": policy,
        name: None if estimate.capacity is None else factor * estimate.capacity,
        "low": factor * estimate.low,
        "high": factor * estimate.high if math.isfinite(estimate.high) else None,
        "requests_per_session": near.requests_per_session,
        "attainment": near.attainment,
        "limits": str(limits),
        "limited_by": outcome.limited_by,
        "goodput_requests_per_s": near.goodput_requests_per_s,
        "goodput_tokens_per_s": near.goodput_tokens_per_s,
        "output_tokens_per_s": near.output_tokens_per_s,
        "median_ttft_ms": near.ttft_ms,
        "median_tpot_ms": near.tpot_ms,
        "fitted": estimate.fitted,
        "stopped": outcome.stopped or None,
        "probes": len(outcome.readings),
        "curve": [
            {"load": r.probe.load, "attainment": r.attainment, "runaway": r.probe.runaway, "run_dir": r.run_dir}
            for r in sorted(outcome.readings, key=lambda r: r.probe.load)
        ],
        "run_dirs": [reading.run_dir for reading in outcome.readings],
    }


def _unit(by_concurrency: bool) -> str:
    return "sessions" if by_concurrency else "sess/s"


def _load(load: float, by_concurrency: bool) -> str:
    return f"{load:,.0f} open" if by_concurrency else f"{load:.3g}/s"


def _number(value: float | None, by_concurrency: bool) -> str:
    return numbers.DASH if value is None else f"{value:,.0f}" if by_concurrency else f"{value:.3g}"


def _range(estimate: Estimate, by_concurrency: bool) -> str:
    high = _number(estimate.high, by_concurrency) if math.isfinite(estimate.high) else "?"
    return f"{_number(estimate.low, by_concurrency)}–{high}"


def _interval(estimate: Estimate) -> str:
    if estimate.capacity is None:
        return f"below {estimate.high:.3g}" if math.isfinite(estimate.high) else "nothing known"
    if not math.isfinite(estimate.high):
        return f"at least {estimate.low:.3g}"
    return f"{estimate.capacity:.3g} ({estimate.low:.3g} to {estimate.high:.3g})"
