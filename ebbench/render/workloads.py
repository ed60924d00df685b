"""Workloads and scenarios as `ebbench workloads` and `ebbench scenarios` show them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ebbench.analysis.environment import time_note
from ebbench.render.documents import Console
from ebbench.render.tables import plain_table
from ebbench.traffic.spec import Phase, ScenarioSpec


def print_workload(name: str, described: dict[str, Any], console: Console) -> None:
    """Print the lengths and arrivals of a sampled workload, and of a log what was recognised."""
    facts = described["facts"]
    conversations = f" in {described['sessions']:,} conversations"
    several = conversations if described["sessions"] != described["requests"] else ""
    console.print(f"{name}: {described['requests']:,} requests{several}", markup=False)
    console.print(f"source: {facts['source']} ({facts['source_reason']})", markup=False)
    lines = []
    if log := described.get("log"):
        named = ", ".join(f"{role} = {column}" for role, column in log["columns"].items())
        lines += [f"columns: {named}"] if named else []
        lines.append(f"rows: {log['rows']:,}, of which {log['requests']:,} are used")
        lines += [
            f"  {dropped['rows']:,} left out: {dropped['reason']} (first: line {dropped['first_line']:,})"
            for dropped in log["dropped"]
        ]
        keeps = log.get("failed_are_kept_with")
        lines += [f"  {keeps} keeps failed requests that have token counts"] if keeps else []
    lengths = ("input_lengths", "output_lengths", "token_counts")
    lines += [f"{key.replace('_', ' ')}: {facts[key]}" for key in lengths if key in facts]
    for line in lines:
        console.print(line, markup=False)
    columns = list(described["input_tokens"])
    table = plain_table("tokens", *columns)
    for title, key in (("prompt", "input_tokens"), ("answer", "output_tokens")):
        table.add_row(title, *(f"{described[key][column]:,.0f}" for column in columns))
    console.print(table)
    console.print(f"decode share r = mu_o/(mu_l+mu_o) = {described['decode_share']:.3f}")
    if note := time_note(facts):
        console.print(note, markup=False)
    if "log" in described:
        for line in _traffic(described["log"]):
            console.print(line, markup=False)
    elif "arrivals" in described:
        console.print(arrival_line(described["arrivals"]))
    for warning in described["warnings"]:
        console.print(f"note: {warning['text']}", markup=False)


def arrival_line(arrivals: dict[str, float]) -> str:
    """The arrivals in words."""
    return (
        f"arrivals: {arrivals['sessions_per_s']:,.2f} sessions/s over {arrivals['duration_s']:,.1f} s, "
        f"gaps with a coefficient of variation of {arrivals['gap_variation']:.2f} (Poisson: 1)"
    )


def _traffic(log: dict[str, Any]) -> Iterator[str]:
    """Gaps, burstiness, sessions, repeated prompts and the trend of the hazard."""
    if "arrivals" not in log:
        none = "none; replay it under another scenario (--scenario poisson --request-rate R)"
        yield f"times: {none}" + (f", or {log['time_hint']}" if log["time_hint"] else "")
    elif log["arrivals"]["requests_per_s"] is not None:
        arrivals = log["arrivals"]
        gaps = ", ".join(f"{name} {arrivals[f'gap_{name}_s']:.3g}" for name in ("mean", "p50", "p95", "p99", "max"))
        rate = f"{arrivals['requests_per_s']:,.3g} requests/s over {arrivals['span_s']:,.1f} s"
        yield f"arrivals: {rate}; gaps in s: {gaps}"
        bursts = f"gaps with a coefficient of variation of {arrivals['gap_variation']:.2f} (Poisson: 1)"
        if "dispersion_per_minute" in arrivals:
            per_minute = f"{arrivals['dispersion_per_minute']:,.1f} (Poisson: 1)"
            bursts += f"; counts per minute with a dispersion of {per_minute}"
        yield f"burstiness: {bursts}"
    if "sessions" in log:
        yield _sessions(log["sessions"])
    if "prefixes" in log:
        repeated, block = (log["prefixes"][name] for name in ("repeated_share", "block_tokens"))
        begun = f"{repeated:.1%} of their tokens repeat the beginning of an earlier prompt"
        yield f"prompts: {begun} (blocks of {block} tokens)"
    if "cached_share" in log:
        yield f"cache: {log['cached_share']:.1%} of the prompt tokens were cached when recorded"
    if "acceptance" in log:
        yield f"drafted tokens: accepted by position {', '.join(f'{rate:.2f}' for rate in log['acceptance'])}"
    yield f"completion hazard: {log['hazard'].get('verdict') or log['hazard']['untested']}"


def _sessions(known: dict[str, Any]) -> str:
    parts = [
        f"sessions: {known['sessions']:,}, {known['several_turns']:,} of them with several requests, "
        f"{known['turns_mean']:.1f} requests per session (most: {known['turns_max']:,})"
    ]
    if "turns_with_history" in known:
        parts.append(f"{known['turns_with_history']:.0%} of later prompts can hold the session so far")
    if "pause_median_s" in known:
        of_tools = f", {known['tool_pauses']:.0%} of tools" if "tool_pauses" in known else " (tools or users)"
        parts.append(f"pauses: median {known['pause_median_s']:.3g} s, mean {known['pause_mean_s']:.3g} s{of_tools}")
    if known["parallel_requests"]:
        parts.append(f"{known['parallel_requests']:,} requests do not wait just for the one before")
    return "; ".join(parts)


# Scenarios.


def print_scenario(spec: ScenarioSpec, arrivals: dict[str, float] | None, console: Console) -> None:
    """Print a scenario's phases, and its arrivals in an open loop."""
    console.print(f"{spec.name}: {spec.description}", markup=False)
    if spec.replay is not None:
        part = "all" if spec.replay.duration_s is None else f"{spec.replay.duration_s:g} s"
        console.print(
            f"replays {part} from {spec.replay.start_s:g} s, {spec.replay.repeat} time(s), speed {spec.replay.speed:g}"
        )
    if spec.phases:
        table = plain_table("phase", "size", "load", "lengths")
        for phase in spec.phases:
            size = f"{phase.requests:,} sessions" if phase.requests else "all sessions"
            table.add_row(
                phase.name,
                size if phase.duration_s is None else f"{phase.duration_s:g} s",
                _load(phase),
                f"in {phase.input.text}, out {phase.output.text}" if phase.input and phase.output else "the workload's",
            )
        console.print(table)
    if arrivals is not None:
        console.print(arrival_line(arrivals))


def _load(phase: Phase) -> str:
    if phase.max_concurrency is not None:
        return f"{phase.max_concurrency} at a time"
    words = [str(phase.process)]
    if phase.process == "gamma":
        words.append(f"(burstiness {phase.burstiness:g})")
    if phase.rate is not None:
        words.append(f"at {phase.rate:g} sessions/s")
    else:
        scaled = "" if phase.level == 1.0 else f"{phase.level:g} x "
        shared = f", or {phase.share:.0%} of saturation" if phase.share is not None else ""
        words.append(f"at {scaled}--request-rate{shared}")
    if phase.curve is not None:
        period = f"every {phase.curve.period_s:g} s" if phase.curve.period_s else "over the phase"
        low, high = min(phase.curve.levels), max(phase.curve.levels)
        words.append(f"along {phase.curve.shape} between {low:g} and {high:g} {period}")
    return " ".join(words)
