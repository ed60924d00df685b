"""The part of ``ebbench workloads show log:FILE`` that is about the log itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ebbench.render.console import Console


def log_facts(name: str, columns: str | None, tokenizer: str | None, time_unit: str | None) -> dict[str, Any] | None:
    """What is known of ``log:FILE``; None for another workload. Raises UsageError, InputFileError."""
    from ebbench.hazard.trend import analyse_lengths
    from ebbench.workloads.log_report import describe_log
    from ebbench.workloads.options import recorded_file
    from ebbench.workloads.trace import read_trace

    path = recorded_file(name)
    if path is None:
        return None
    trace = read_trace(path, columns, tokenizer)
    hazard = analyse_lengths(trace.requests.output_tokens)
    tests = hazard.tests
    trend = {"untested": hazard.untested} if tests is None else {"rising": tests.rising, "verdict": tests.verdict}
    return describe_log(trace, time_unit) | {"hazard": trend}


def print_recognised(console: Console, log: dict[str, Any]) -> None:
    """Which column holds what, and which rows were left out."""
    if log["columns"]:
        named = ", ".join(f"{role} = {column}" for role, column in log["columns"].items())
        console.print(f"columns: {named}", markup=False)
    console.print(f"rows: {log['rows']:,}, of which {log['requests']:,} are used", markup=False)
    for dropped in log["dropped"]:
        line = f"  {dropped['rows']:,} left out: {dropped['reason']} (first: line {dropped['first_line']:,})"
        console.print(line, markup=False)
    if keeps := log.get("failed_are_kept_with"):
        console.print(f"  {keeps} keeps failed requests that have token counts", markup=False)


def print_traffic(console: Console, log: dict[str, Any]) -> None:
    """Gaps, burstiness, sessions, repeated prompts and the trend of the hazard."""
    if "arrivals" not in log:
        found = "none; replay it under another scenario (--scenario poisson --request-rate R)"
        console.print(f"times: {found}" + (f", or {log['time_hint']}" if log["time_hint"] else ""), markup=False)
    elif log["arrivals"]["requests_per_s"] is not None:
        for line in _arrival_lines(log["arrivals"]):
            console.print(line)
    if "sessions" in log:
        console.print(_session_line(log["sessions"]))
    if "prefixes" in log:
        found = log["prefixes"]
        console.print(
            f"prompts: {found['repeated_share']:.1%} of their tokens repeat the beginning of an earlier prompt "
            f"(blocks of {found['block_tokens']} tokens)"
        )
    if "cached_share" in log:
        console.print(f"cache: {log['cached_share']:.1%} of the prompt tokens were cached when recorded")
    hazard = log["hazard"]
    console.print(f"completion hazard: {hazard.get('verdict') or hazard['untested']}", markup=False)


def _arrival_lines(arrivals: dict[str, Any]) -> list[str]:
    gaps = ", ".join(f"{name} {arrivals[f'gap_{name}_s']:.3g}" for name in ("mean", "p50", "p95", "p99", "max"))
    lines = [
        f"arrivals: {arrivals['requests_per_s']:,.3g} requests/s over {arrivals['span_s']:,.1f} s; gaps in s: {gaps}",
        f"burstiness: gaps with a coefficient of variation of {arrivals['gap_variation']:.2f} (Poisson: 1)",
    ]
    if "dispersion_per_minute" in arrivals:
        lines[1] += f"; counts per minute with a dispersion of {arrivals['dispersion_per_minute']:,.1f} (Poisson: 1)"
    return lines


def _session_line(found: dict[str, Any]) -> str:
    parts = [
        f"sessions: {found['sessions']:,}, {found['several_turns']:,} of them with several requests, "
        f"{found['turns_mean']:.1f} requests per session (most: {found['turns_max']:,})"
    ]
    if "turns_with_history" in found:
        parts.append(f"{found['turns_with_history']:.0%} of later prompts can hold the session so far")
    if "pause_median_s" in found:
        parts.append(f"pauses: median {found['pause_median_s']:.3g} s, mean {found['pause_mean_s']:.3g} s")
    if found["parallel_requests"]:
        parts.append(f"{found['parallel_requests']:,} requests do not wait just for the one before")
    return "; ".join(parts)
