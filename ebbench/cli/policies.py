"""``ebbench policies list|show``: scheduling policies and their settings."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ebbench.config.options import completing
from ebbench.process.command_line import Command, Group
from vllm_eb.policy import descriptions, example, parse_policy, settings_in_effect, settings_of
from vllm_eb.settings import text_of

app = typer.Typer(cls=Group, no_args_is_help=True, add_completion=False, help="Scheduling policies and their settings.")


@app.command("list", cls=Command)
def list_policies(as_json: Annotated[bool, typer.Option("--json", help="One JSON list on stdout.")] = False) -> None:
    """List the policies."""
    if as_json:
        typer.echo(json.dumps([{"name": name, "description": text} for name, text in descriptions().items()]))
        return
    from ebbench.render.documents import Console
    from ebbench.render.tables import plain_table

    table = plain_table("policy", "what it does")
    for name, text in descriptions().items():
        table.add_row(name, text)
    console = Console(highlight=False)
    console.print(table)
    console.print("Settings follow the name: eb:theta=0.5, ebplus:margin=1e-5,estimator=censored", markup=False)


@app.command("show", cls=Command)
def show_policy(
    name: Annotated[
        str,
        typer.Argument(
            help="A policy, with settings or without: ebplus:margin=1e-5", autocompletion=completing("policies")
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Show what a policy does and every setting that has an effect: value, unit and range."""
    spec = parse_policy(name if ":" in name else example(name))
    known, shown = settings_of(type(spec)), settings_in_effect(spec)
    if as_json:
        described = {
            "name": spec.name,
            "description": spec.description,
            "settings": {key: getattr(spec, key) for key in shown},
            "units": {key: known[key].unit for key in shown if known[key].unit},
            "ranges": {key: known[key].values for key in shown},
        }
        typer.echo(json.dumps(described))
        return
    from ebbench.render.documents import Console
    from ebbench.render.tables import plain_table

    console = Console(highlight=False)
    console.say(f"{spec.name}: {spec.description}")
    table = plain_table("setting", "value", "unit", "range", "what it does", whole=3)
    for key in shown:
        value, about = getattr(spec, key), known[key]
        table.add_row(key, "not set" if value is None else text_of(value), about.unit, about.values, about.help)
    if shown:
        console.print(table)
