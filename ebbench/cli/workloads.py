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
    from ebbench.render.console import Console

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
    from ebbench.cli.workloads_log import log_facts
    from ebbench.workloads import build_plan
    from ebbench.workloads.statistics import describe

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
    from ebbench.cli.workloads_log import print_recognised, print_traffic
    from ebbench.render.console import Console
    from ebbench.workloads.trace import time_note

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
