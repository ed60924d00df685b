"""``ebbench scenarios list|show``: traffic patterns, that is when requests arrive."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from ebbench.config.options import completing
from ebbench.process.command_line import Command, Group
from ebbench.spec.commands import setting

app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    add_completion=False,
    help="Traffic patterns: when requests arrive. Bundled ones and your own TOML files.",
)

_JSON = typer.Option("--json", help="One JSON document on stdout, nothing else.")


@app.command("list", cls=Command)
def list_all(as_json: Annotated[bool, _JSON] = False) -> None:
    """List the scenarios."""
    from ebbench.traffic.spec import list_scenarios, load_scenario

    specs = [load_scenario(name) for name in list_scenarios()]
    if as_json:
        rows = [{"name": spec.name, "loop": spec.loop, "description": spec.description} for spec in specs]
        typer.echo(json.dumps(rows))
        return
    from ebbench.render.documents import Console
    from ebbench.render.tables import plain_table

    table = plain_table("scenario", "when requests arrive")
    for spec in specs:
        table.add_row(spec.name, spec.description)
    table.add_row("PATH.toml", "a file like those in scenarios/")
    Console(highlight=False).print(table)


@app.command("show", cls=Command)
def show(
    name: Annotated[
        str, typer.Argument(help="A scenario or the path of a TOML file.", autocompletion=completing("scenarios"))
    ],
    request_rate: Annotated[
        float | None, typer.Option("--request-rate", help="Sessions/s; shows the arrivals of an open loop.")
    ] = None,
    saturation_rate: Annotated[float | None, setting("saturation_rate")] = None,
    num_prompts: Annotated[int | None, typer.Option("--num-prompts", "-n", help="Number of sessions.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the arrivals.")] = 0,
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """Show a scenario's phases, and its arrivals for a rate or a number of sessions."""
    import msgspec

    from ebbench.render.documents import Console
    from ebbench.render.workloads import print_scenario
    from ebbench.traffic.spec import Load, load_scenario
    from ebbench.workloads.planner import laid_out

    spec, arrivals = load_scenario(name), None
    given = Load(request_rate=request_rate, saturation_rate=saturation_rate)
    if given != Load() or num_prompts is not None:
        spec, arrivals = laid_out(name, spec, given, num_prompts, seed)
    if as_json:
        described: dict[str, Any] = msgspec.to_builtins(spec)
        typer.echo(json.dumps(described | ({"arrivals": arrivals} if arrivals else {})))
        return
    print_scenario(spec, arrivals, Console(highlight=False))
