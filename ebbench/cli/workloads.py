"""``ebbench workloads list|show``: workloads, that is which requests are sent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ebbench.config.options import completing
from ebbench.process.command_line import Command, Group
from ebbench.spec.commands import setting

app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    add_completion=False,
    help="Workloads: which requests are sent. Bundled ones, traces and your own TOML files.",
)

_JSON = typer.Option("--json", help="One JSON document on stdout, nothing else.")


@app.command("list", cls=Command)
def list_all(as_json: Annotated[bool, _JSON] = False) -> None:
    """List the workloads."""
    from ebbench.workloads.spec import list_workloads, load_workload

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
    from ebbench.render.tables import plain_table

    table = plain_table("workload", "kind", "sessions", "description")
    for row in rows:
        table.add_row(str(row["name"]), str(row["kind"]), f"{row['sessions']:,}", str(row["description"]))
    table.add_row("log:FILE", "recorded", "all", "your log or a published trace, with the recorded times")
    table.add_row("PATH.toml", "yours", "", "a file like those in workloads/")
    Console(highlight=False).print(table)


@app.command("show", cls=Command)
def show(
    name: Annotated[
        str,
        typer.Argument(help="A workload, log:FILE or the path of a TOML file.", autocompletion=completing("workloads")),
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
    from ebbench.hazard import log_facts
    from ebbench.render.documents import Console
    from ebbench.render.workloads import print_workload
    from ebbench.workloads import build_plan
    from ebbench.workloads.planner import describe

    logged = log_facts(name, columns, tokenizer, time_unit)
    # A closed loop for a log without times, so that its lengths are shown all the same.
    scenario = "saturated" if logged is not None and "arrivals" not in logged else None
    plan = build_plan(
        name, scenario, columns=columns, num_prompts=num_prompts, seed=seed, source=source, input_len=input_len,
        output_len=output_len, length_distribution=length_distribution, tokenizer=tokenizer,
        time_unit=None if scenario else time_unit, with_text=False,
    )  # fmt: skip
    warnings = [said.to_dict(str(said)) for said in plan.warnings]
    described = {**describe(plan), "facts": dict(plan.facts), "warnings": warnings}
    if logged is not None:
        described["log"] = logged
    if as_json:
        typer.echo(json.dumps(described))
    else:
        print_workload(name, described, Console(highlight=False))


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
    if output.exists():  # it may have been edited since
        raise UsageError(f"{output} exists; give another file, or remove it")
    trace = read_trace(path, columns, tokenizer)
    workload = fit_workload(trace, output.stem, time_unit)
    files.write_text(as_toml(workload, f"log:{path.name}"), output)
    typer.echo(f"{output}: {workload.description}; ebbench run {output}")
