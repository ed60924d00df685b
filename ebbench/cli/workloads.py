"""``ebbench workloads list|show``: workloads, that is which requests are sent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ebbench.cli import completion
from ebbench.cli.options import Command
from ebbench.cli.run_settings import setting

if TYPE_CHECKING:
    from rich.table import Table

    from ebbench.render.documents import Console


# The part of `ebbench workloads show log:FILE` that is about the log itself.


def log_facts(name: str, columns: str | None, tokenizer: str | None, time_unit: str | None) -> dict[str, Any] | None:
    """What is known of ``log:FILE``; None for another workload. Raises UsageError, InputFileError."""
    from ebbench.hazard import analyse_lengths
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


app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Workloads: which requests are sent. Bundled ones, traces and your own TOML files.",
)

_JSON = typer.Option("--json", help="One JSON document on stdout, nothing else.")


@app.command("list", cls=Command)
def list_all(as_json: Annotated[bool, _JSON] = False) -> None:
    """List the workloads."""
    from ebbench.workloads import list_workloads, load_workload

    specs = [load_workload(name) for name in list_workloads()]
    rows = [
        {"name": s.name, "kind": "synthetic" if s.synthetic else "data set", "sessions": s.num_prompts,
         "data_set": s.hub.dataset if s.hub else None, "description": s.description}
        for s in specs
    ]  # fmt: skip
    if as_json:
        typer.echo(json.dumps(rows))
        return
    from ebbench.render.documents import Console

    table = _table("workload", "kind", "sessions", "description")
    for row in rows:
        table.add_row(str(row["name"]), str(row["kind"]), f"{row['sessions']:,}", str(row["description"]))
    table.add_row("log:FILE", "recorded", "all", "your log or a published trace, with the recorded times")
    table.add_row("PATH.toml", "yours", "", "a file like those in workloads/")
    Console(highlight=False).print(table)


@app.command("show", cls=Command)
def show(
    name: Annotated[
        str,
        typer.Argument(help="A workload, log:FILE or the path of a TOML file.", autocompletion=completion.workloads),
    ],
    source: Annotated[str, setting("source")] = "auto",
    num_prompts: Annotated[int | None, typer.Option("--num-prompts", "-n", help="Sessions to sample.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the sample.")] = 0,
    input_len: Annotated[int | None, setting("input_len")] = None,
    output_len: Annotated[int | None, setting("output_len")] = None,
    length_distribution: Annotated[str | None, setting("length_distribution")] = None,
    tokenizer: Annotated[str | None, setting("tokenizer")] = None,
    time_unit: Annotated[str | None, setting("time_unit")] = None,
    columns: Annotated[str | None, setting("columns")] = None,
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """Sample a workload and show its lengths, its decode share r and their source.

    Of a log also: what was recognised, rows left out and why, gaps, burstiness, sessions and the trend of the hazard.
    """
    from ebbench.workloads import build_plan
    from ebbench.workloads.planner import describe

    logged = log_facts(name, columns, tokenizer, time_unit)
    # A closed loop for a log without times, so that its lengths are shown all the same.
    scenario = "saturated" if logged is not None and "arrivals" not in logged else None
    plan = build_plan(
        name, scenario, columns=columns, num_prompts=num_prompts, seed=seed, source=source, input_len=input_len,
        output_len=output_len,
        length_distribution=length_distribution, tokenizer=tokenizer,
        time_unit=None if scenario else time_unit, with_text=False,
    )  # fmt: skip
    found = {**describe(plan), "facts": dict(plan.facts), "warnings": list(plan.warnings)}
    if logged is not None:
        found["log"] = logged
    if as_json:
        typer.echo(json.dumps(found))
        return
    _print(name, found)


@app.command("fit", cls=Command)
def fit(
    log: Annotated[str, typer.Argument(help="log:FILE, the log to fit a workload to.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The workload's TOML file to write.")],
    columns: Annotated[str | None, setting("columns")] = None,
    tokenizer: Annotated[str | None, setting("tokenizer")] = None,
    time_unit: Annotated[str | None, setting("time_unit")] = None,
) -> None:
    """Fit a workload to a log: arrivals, lengths, turns, pauses and shared prefixes, without any record of it.

    The file is a workload like any other: ebbench run FILE.toml, longer with -n, at another rate with --rate-scale.
    """
    from ebbench.errors import UsageError
    from ebbench.records import files
    from ebbench.workloads.fit_log import as_toml, fit_workload
    from ebbench.workloads.options import recorded_file
    from ebbench.workloads.trace import read_trace

    path = recorded_file(log)
    if path is None:
        raise UsageError(f"fit takes log:FILE, not {log!r}")
    if output.suffix != ".toml":
        raise UsageError(f"--output must end in .toml, as workload files do, not {output.name!r}")
    trace = read_trace(path, columns, tokenizer)
    workload = fit_workload(trace, output.stem, time_unit)
    files.write_text(as_toml(workload, f"log:{path.name}"), output)
    typer.echo(f"{output}: {workload.description}; ebbench run {output}")


def _print(name: str, found: dict[str, Any]) -> None:
    from ebbench.analysis.environment import time_note
    from ebbench.render.documents import Console

    facts = found["facts"]
    console = Console(highlight=False)
    console.print(f"{name}: {_counted(found)}", markup=False)
    console.print(f"source: {facts['source']} ({facts['source_reason']})", markup=False)
    if "log" in found:
        print_recognised(console, found["log"])
    for key in ("input_lengths", "output_lengths", "token_counts"):
        if key in facts:
            console.print(f"{key.replace('_', ' ')}: {facts[key]}", markup=False)
    columns = list(found["input_tokens"])
    table = _table("tokens", *columns)
    for title, key in (("prompt", "input_tokens"), ("answer", "output_tokens")):
        table.add_row(title, *(f"{found[key][column]:,.0f}" for column in columns))
    console.print(table)
    console.print(f"decode share r = mu_o/(mu_l+mu_o) = {found['decode_share']:.3f}")
    if note := time_note(facts):
        console.print(note, markup=False)
    if "log" in found:
        print_traffic(console, found["log"])
    elif "arrivals" in found:
        console.print(arrival_line(found["arrivals"]))
    for warning in found["warnings"]:
        console.print(f"note: {warning}", markup=False)


def arrival_line(arrivals: dict[str, float]) -> str:
    """The arrivals in words."""
    return (
        f"arrivals: {arrivals['sessions_per_s']:,.2f} sessions/s over {arrivals['duration_s']:,.1f} s, "
        f"gaps with a coefficient of variation of {arrivals['gap_variation']:.2f} (Poisson: 1)"
    )


def _counted(found: dict[str, Any]) -> str:
    if found["sessions"] == found["requests"]:
        return f"{found['requests']:,} requests"
    return f"{found['requests']:,} requests in {found['sessions']:,} conversations"


def _table(*columns: str) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, no_wrap=index == 0)
    return table
