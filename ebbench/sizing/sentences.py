"""The result of a capacity search as a table, curves and sentences."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import convert, to_builtins

from ebbench.analysis.documents import Column, Section
from ebbench.analysis.validity import by_policy, told_once
from ebbench.errors import DataError
from ebbench.records import files
from ebbench.records.warnings import Fact, Texts
from ebbench.render import numbers
from ebbench.sizing.drive import SearchOutcome
from ebbench.sizing.estimate import Estimate
from ebbench.sizing.limits import LatencyLimits
from ebbench.sizing.probe import ProbeReading

# Results of `ebbench capacity` as JSON: one object per policy, for --json and stored with the probes.

FILE = "capacity-answers.json"


def outcome_rows(
    outcomes: Mapping[str, SearchOutcome], by_concurrency: bool, limits: LatencyLimits, notes: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """One object per policy. ``notes``: warnings that all policies share."""
    return [as_dict(name, outcome, by_concurrency, limits, notes) for name, outcome in outcomes.items()]


def store(rows: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Write the results into the directory of the search."""
    files.write_bytes(json.dumps(rows, indent=1, allow_nan=False).encode() + b"\n", folder / FILE)


def load(folder: Path) -> list[dict[str, Any]]:
    """The results stored in a search's directory; empty without a finished search.

    Raises DataError for a damaged file.
    """
    path = folder / FILE
    if not path.is_file():
        return []
    rows = files.read_stored_json(path)
    try:
        return [{**row, "policy": str(row["policy"]), "curve": list(row["curve"])} for row in rows]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is damaged: {error}") from error


def as_dict(
    policy: str, outcome: SearchOutcome, by_concurrency: bool, limits: LatencyLimits, notes: Sequence[str]
) -> dict[str, Any]:
    """One object of ``--json``. ``high`` is null if no probed load was too high.

    Rates are in requests/s: the searched session rate times the requests per session. ``curve`` has one entry per probe
    in order of load; its latencies are medians, and the percentiles at the required attainment, in ms. ``warnings``:
    the caveats of plan and device. ``attainment``, latencies and goodput are those of the requests sent in the steady
    ``window`` of the probe at ``nearest_load``; what a full KV cache cost is that of this whole probe.
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
        "limits_ms": limits.slo.limits(),
        "required_attainment": limits.attainment,
        "limited_by": outcome.limited_by,
        **_classes(outcome, name, factor),
        "goodput_requests_per_s": near.goodput_requests_per_s,
        "goodput_tokens_per_s": near.goodput_tokens_per_s,
        "output_tokens_per_s": near.output_tokens_per_s,
        "median_ttft_ms": near.ttft_ms,
        "median_tpot_ms": near.tpot_ms,
        "fitted": estimate.fitted,
        "stopped": to_builtins(outcome.stopped),
        "refused": to_builtins(outcome.refused),
        "probes": len(outcome.readings),
        **near.kv_figures,
        "warnings": [
            *notes,
            *map(str, near.kv_warnings),
            *told_once(outcome.caveats, lambda _: ""),
            *_busy_servers(outcome, by_concurrency),
        ],
        "nearest_run_dir": near.run_dir,
        "nearest_load": factor * near.probe.load,
        "window": "steady",
        "curve": [_point(probed, factor) for probed in sorted(outcome.readings, key=lambda probed: probed.probe.load)],
        "run_dirs": [reading.run_dir for reading in outcome.readings],
    }


def _classes(outcome: SearchOutcome, name: str, factor: float) -> dict[str, Any]:
    """Per class its share within its limits in the nearest probe, and the whole load up to which it keeps them."""
    by_class = {
        of_class: {
            "attainment": share,
            name: None if alone.capacity is None else factor * alone.capacity,
            "low": factor * alone.low,
            "high": factor * alone.high if math.isfinite(alone.high) else None,
            "limited_by": alone.limited_by,
        }
        for of_class, share, alone in _by_class(outcome)
    }
    return {"classes": by_class} if by_class else {}


def _by_class(outcome: SearchOutcome) -> list[tuple[str, float, Estimate]]:
    """Classes with limits, the share of their requests within them in the nearest probe, and their own capacity."""
    counts = outcome.nearest.probe.counts
    return [
        (requirement.of_class or "other classes", count.share, alone)
        for (requirement, alone), count in zip(outcome.requirements, counts, strict=False)
        if requirement.of_class is not None
    ]


def classes(outcomes: Mapping[str, SearchOutcome], by_concurrency: bool) -> Section | None:
    """One row per class of requests and policy; None without limits of classes."""
    rows = [
        (
            name, policy, numbers.percent(share), _at_least(alone, by_concurrency), _range(alone, by_concurrency),
            alone.limited_by,
        )
        for policy, outcome in outcomes.items()
        for name, share, alone in _by_class(outcome)
    ]  # fmt: skip
    columns = (
        Column("class", "label", fold=True), Column("policy", "label", fold=True), Column("steady", group="met,"),
        Column(_unit(by_concurrency), group="kept up to"), Column("interval", group="95 %"),
        Column("by", "label", group="limited"),
    )  # fmt: skip
    return Section("By class: the whole load up to which it keeps its limits", columns, tuple(rows)) if rows else None


def _at_least(estimate: Estimate, by_concurrency: bool) -> str:
    shown = load_number(estimate.capacity, by_concurrency)
    return f"≥ {shown}" if estimate.capacity is not None and math.isinf(estimate.high) else shown


def _point(reading: ProbeReading, factor: float) -> dict[str, Any]:
    return {
        "load": factor * reading.probe.load,
        "attainment": reading.attainment,
        "runaway": reading.probe.runaway,
        "failed": reading.probe.failed or None,
        "decides": reading.decides,
        "median_ttft_ms": reading.ttft_ms,
        "median_tpot_ms": reading.tpot_ms,
        "ttft_at_attainment_ms": reading.ttft_high_ms,
        "tpot_at_attainment_ms": reading.tpot_high_ms,
        "requests_per_s": reading.requests_per_session * reading.completed_sessions_per_s,
        "output_tokens_per_s": reading.output_tokens_per_s,
        **reading.kv_figures,
        "run_dir": reading.run_dir,
    }


def _too_short(load: float, by_concurrency: bool, sessions: int, of: str = "{} sessions") -> str:
    at = _load(load, by_concurrency)
    return f"a probe at {at} that is too short to decide with {of.format(f'{sessions:,}')}"


def _missed_alone(
    limits: str, met: float, required: float, least_ms: Mapping[str, float], without: Sequence[str]
) -> str:
    why = [f"too many answers have no {name}" for name in without]
    known = ", ".join(f"{name}:{numbers.up(value)}" for name, value in least_ms.items())
    why += [f"the least that can be had is about {known}"] if known else []
    share = f"{100 * met:.0f}" if round(met, 2) < required else f"{100 * met:.2f}"  # 94.6 is not shown as 95
    return f"one request at a time, {share} % meet {limits}, and {100 * required:g} % must; {'; '.join(why)}"


def _max_time(limit_s: float, next_run_s: float | None = None, option: str = "--max-time ") -> str:
    return f"{option}{limit_s:g}" + ("" if next_run_s is None else f" (the next run takes {next_run_s:.0f} s)")


ENDS: dict[str, str | Callable[..., str]] = {
    "limits_missed_alone": _missed_alone,
    "max_probes": "--max-probes {probes}",
    "max_time": _max_time,
    "invalid": "{probes} INVALID probes in a row ({last})",
    "too_short": _too_short,
    "all_too_short": partial(_too_short, of="all {} sessions that there are"),
}
"""Why a search did not take place, or ended early."""


def saturation_begins(scenario: str | None, longest_s: float, most: int | None, folder: Path) -> str:
    """What is measured before runs of a scenario with shares of the saturated rate."""
    loops = "4, 8, 16, ..." + ("" if most is None else f" {most:,}")
    return (
        f"scenario {scenario} has shares of the saturated rate, which is measured first, for at most {longest_s:.0f} "
        f"s: {loops} open sessions, until twice as many complete no more per second (runs in {folder}). "
        "--saturation-rate skips this"
    )


def _simulated(rate: float, policy: str, sessions: int, elsewhere: bool) -> str:
    where = " in the simulator, which makes the same steps," if elsewhere else ""
    loop = f"closed loop of {sessions:,} sessions"
    return f"saturation measured{where}: {rate:g} sessions/s under {policy} ({loop}); --saturation-rate sets another"


def _measured(
    rate: float, policy: str, sessions: float, runs: int, seconds: float, limited_by: str, stopped: Fact | None
) -> str:
    most = f"{sessions:.0f} open sessions"
    if limited_by == "queue":
        reached = f"{most} complete no more per second than {sessions / 2:.0f}"
    elif limited_by == "errors":
        reached = "more open sessions made requests fail"
    elif stopped is None:
        reached = f"{most}, twice what a batch holds"
    else:
        budget = ENDS | {"max_time": partial(_max_time, option="the budget of ")}
        reached = f"{most} at most: {stopped.worded(budget)}; the saturated rate may be higher"
    return (
        f"saturation measured: {rate:g} sessions/s under {policy} ({reached}; {runs} runs, {seconds:.0f} s). The same "
        f"plan again: --saturation-rate {rate:g}"
    )


SATURATION: Texts = {"simulated": _simulated, "measured": _measured}


def not_saturated(outcome: SearchOutcome) -> str:
    """The reason why no run was usable to measure the saturated rate."""
    failed = next((r.probe.failed for r in outcome.readings if r.probe.failed), "no run was long enough")
    why = failed if outcome.stopped is None else outcome.stopped.worded(ENDS)
    return f"saturation could not be measured ({why}); give --saturation-rate"


def end_sentence(stored: object) -> str:
    """Why a stored search ended; that of an earlier version is a sentence already."""
    return convert(stored, Fact).worded(ENDS) if isinstance(stored, dict) else str(stored)


def nothing_usable(stopped: Fact | None, *, probed: bool = True) -> str:
    """The error for a search without a usable probe, or without any, with the remedy."""
    why = "no probe was long enough" if stopped is None else stopped.worded(ENDS)
    if not probed:
        return f"the requests one at a time, with which a search begins, took all of {why}; give a larger budget"
    if stopped is not None and stopped.code == "invalid":
        return f"no probe was usable: {why}"  # which names the remedy
    exhausted = stopped is not None and stopped.code == "all_too_short"
    longer = "use a longer source, or --source profile" if exhausted else "give more --num-prompts or a larger budget"
    return f"no probe was usable ({why}); {longer}"


_LIMITED = {
    "memory": "the KV cache is full for most of the time: more memory would carry more",
    "queue": "limits are kept up to the load at which the queue grows without bound",
    "errors": "requests fail at higher loads",
}
"""Explanations of ``limited_by``."""
_WAITING = "twice the open sessions completed no more requests/s within the limits: additional ones only wait"
_SAME = 1.01
"""Loads within this ratio share a bar."""


def announce(limits: LatencyLimits, by_concurrency: bool) -> str:
    """The question of the search."""
    load = "number of open sessions" if by_concurrency else "rate of sessions"
    return f"searching for the highest {load} that keeps {limits}"


def progress(policy: str, reading: ProbeReading, estimate: Estimate, by_concurrency: bool) -> str:
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
        verdict = f"{numbers.percent(reading.attainment)} of its steady window meet the limits"
    return f"{policy}: {_load(reading.probe.load, by_concurrency)}: {verdict}; so far {_interval(estimate)}"


def table(outcomes: Mapping[str, SearchOutcome], by_concurrency: bool) -> Section:
    """One row per policy."""
    columns = (
        Column("policy", "label", fold=True),
        Column(_unit(by_concurrency), group="highest"),
        Column("interval", group="95 %"),
        Column("by", "label", group="limited"),
        Column("steady", group="met,"),
        Column("median", group="TTFT"),
        Column("median", group="TPOT"),
        *(Column(unit, group="goodput") for unit in ("req/s", "tok/s")),
    )
    capacities = [outcome.estimate.capacity or 0.0 for outcome in outcomes.values()]
    best = capacities.index(max(capacities)) if len(outcomes) > 1 and any(capacities) else None
    return Section("", columns, tuple(_row(*item, by_concurrency) for item in outcomes.items()), best)


def _row(policy: str, outcome: SearchOutcome, by_concurrency: bool) -> tuple[str, ...]:
    estimate, near = outcome.estimate, outcome.nearest
    if not outcome.readings:
        return policy, numbers.DASH, numbers.DASH, outcome.limited_by, *[numbers.DASH] * 5
    return (
        policy,
        load_number(estimate.capacity, by_concurrency),
        _range(estimate, by_concurrency),
        outcome.limited_by,
        numbers.percent(near.attainment),
        numbers.duration_ms(near.ttft_ms),
        numbers.duration_ms(near.tpot_ms),
        numbers.rate(near.goodput_requests_per_s),
        numbers.rate(near.goodput_tokens_per_s),
    )


def remarks(
    outcomes: Mapping[str, SearchOutcome],
    limits: LatencyLimits,
    by_concurrency: bool,
    *,
    bars: bool = True,
) -> list[str]:
    """Notes below the table: curves, why a search stopped, what the limit means.

    ``bars``: of characters, for the curves.
    """
    lines = []
    if any(outcome.readings for outcome in outcomes.values()):
        near = ", ".join(_shown_probes(outcomes, by_concurrency))
        lines.append(
            f"Met, latencies and goodput: of the requests sent in the steady window of the probe nearest to capacity "
            f"that kept the limits ({near}). Limits: {limits}."
        )
    for policy, outcome in outcomes.items():
        if outcome.refused is not None:
            lines.append(f"{policy}: {outcome.refused.worded(ENDS)}.")
            continue
        lines += [
            f"{policy}: {line}" if index == 0 else line
            for index, line in enumerate(curves(outcome, limits, by_concurrency) if bars else ())
        ]
        if outcome.limited_by in _LIMITED:
            meaning = _WAITING if by_concurrency and outcome.limited_by == "queue" else _LIMITED[outcome.limited_by]
            lines.append(f"{policy}: limited by {outcome.limited_by}: {meaning}.")
        if outcome.stopped is not None:
            why = outcome.stopped.worded(ENDS)
            lines.append(f"{policy}: stopped by {why} before the interval was as narrow as asked.")
        lines += _open_ends(policy, outcome, by_concurrency)
    return lines


def _shown_probes(outcomes: Mapping[str, SearchOutcome], by_concurrency: bool) -> dict[str, ProbeReading]:
    """The probes that the table shows, by their loads: ``30.8/s``, or with several policies ``v1 30.8/s``."""
    shown = {name: outcome.nearest for name, outcome in outcomes.items() if outcome.readings}
    loads = {
        name: "one request at a time" if near is outcomes[name].alone else _load(near.probe.load, by_concurrency)
        for name, near in shown.items()
    }
    return {f"{name} {load}" if len(loads) > 1 else load: shown[name] for name, load in loads.items()}


def caveats(outcomes: Mapping[str, SearchOutcome], by_concurrency: bool) -> list[str]:
    """The caveats of plan and device, each once, with the policies whose probes have it unless all do.

    First what a full KV cache cost in the probes that the table shows: in those far above capacity it is always full.
    """
    caveats_by_policy = [(name, caveats) for name, outcome in outcomes.items() for caveats in outcome.caveats]
    memory = [
        f"At {at}: {text}" for at, near in _shown_probes(outcomes, by_concurrency).items() for text in near.kv_warnings
    ]
    busy = [(name, line) for name, outcome in outcomes.items() for line in _busy_servers(outcome, by_concurrency)]
    return [
        *memory,
        *told_once([caveats for _, caveats in caveats_by_policy], by_policy([name for name, _ in caveats_by_policy])),
        *(f"{name}: {line}" if len(outcomes) > 1 else line for name, line in busy),
    ]


def _busy_servers(outcome: SearchOutcome, by_concurrency: bool) -> list[str]:
    """What is said of busy API servers, with the lowest load of a probe for which it is."""
    first: dict[str, str] = {}
    for reading in sorted(outcome.readings, key=lambda reading: reading.probe.load):
        for said in reading.server_warnings:
            first.setdefault(said.code, f"At {_load(reading.probe.load, by_concurrency)} and more: {said}")
    return list(first.values())


def _open_ends(policy: str, outcome: SearchOutcome, by_concurrency: bool) -> list[str]:
    estimate = outcome.estimate
    if estimate.capacity is None and math.isfinite(estimate.high):
        lowest = _load(estimate.high, by_concurrency)
        return [f"{policy}: every load tried was too high, down to {lowest}."]
    if estimate.capacity is not None and not math.isfinite(estimate.high) and outcome.limited_by != "queue":
        return [f"{policy}: no higher load was tried, so this is a lower bound."]
    return []


def curves(outcome: SearchOutcome, limits: LatencyLimits, by_concurrency: bool) -> list[str]:
    """Rows of bars over the load: share within the limits, and TTFT and TPOT at the required percentile.

    A mark below them shows the capacity. Probes with an unbounded queue are left out: their share falls, and their TTFT
    grows, with the length of the run. Loads less than 1 % apart share a bar.
    """
    columns = _columns([r for r in outcome.readings if r.decides and not r.probe.runaway])
    if not columns:
        return []
    low, high = _load(columns[0][0].probe.load, by_concurrency), _load(columns[-1][-1].probe.load, by_concurrency)
    lines = [f"{low} to {high} in {len(outcome.readings)} probes:"]
    shares = [_mean([reading.attainment for reading in column]) or 0.0 for column in columns]
    percentile = numbers.percentile(limits.attainment)
    lines.append(f"  within limits  {numbers.spark(tuple(shares))}")
    for name, values in (
        (f"TTFT {percentile}", [_mean([r.ttft_high_ms for r in column]) for column in columns]),
        (f"TPOT {percentile}", [_mean([r.tpot_high_ms for r in column]) for column in columns]),
    ):
        known = [value for value in values if value is not None]
        if not known:
            continue
        bars = numbers.spark(tuple((value or 0.0) / max(known) for value in values))
        lines.append(f"  {name:<13}  {bars}  {numbers.duration_ms(min(known))} to {numbers.duration_ms(max(known))}")
    capacity = outcome.estimate.capacity
    if capacity is not None:
        below = sum(column[0].probe.load <= capacity for column in columns)
        lines.append(f"  capacity       {' ' * max(0, below - 1)}▲")
    return lines


def _columns(readings: Sequence[ProbeReading]) -> list[list[ProbeReading]]:
    """Readings in order of load; those at nearly the same load are grouped."""
    columns: list[list[ProbeReading]] = []
    for reading in sorted(readings, key=lambda reading: reading.probe.load):
        if columns and reading.probe.load <= _SAME * columns[-1][0].probe.load:
            columns[-1].append(reading)
        else:
            columns.append([reading])
    return columns


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _unit(by_concurrency: bool) -> str:
    return "sessions" if by_concurrency else "sess/s"


def _load(load: float, by_concurrency: bool) -> str:
    return f"{load:,.0f} open" if by_concurrency else f"{load:.3g}/s"


def load_number(value: float | None, by_concurrency: bool) -> str:
    """Open sessions as a whole number, sessions/s with three significant digits."""
    return numbers.DASH if value is None else f"{value:,.0f}" if by_concurrency else f"{value:.3g}"


def _range(estimate: Estimate, by_concurrency: bool) -> str:
    high = load_number(estimate.high, by_concurrency) if math.isfinite(estimate.high) else "?"
    return f"{load_number(estimate.low, by_concurrency)}–{high}"


def _interval(estimate: Estimate) -> str:
    if estimate.capacity is None:
        return f"below {estimate.high:.3g}" if math.isfinite(estimate.high) else "nothing known"
    if not math.isfinite(estimate.high):
        return f"at least {estimate.low:.3g}"
    return f"{estimate.capacity:.3g} ({estimate.low:.3g} to {estimate.high:.3g})"
