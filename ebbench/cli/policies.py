"""``ebbench policies list|show``: the scheduling policies and their settings."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ebbench.cli.options import Command
from vllm_eb.policy import PolicySpec, descriptions, example, parse_policy, takes

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="How it can be scheduled: policies and their settings."
)

_SETTINGS = {
    "k": "idle slots at which to refill; fixes the threshold",
    "theta": "share of N idle at which to refill; fixes the threshold",
    "every": "steps from one that computes prompts to the next",
    "margin": "EB+'s lead in s/token before it changes mode; the device's published value if not given",
    "sticky": "margins that exclusive batches must lag by before EB+ leaves them",
    "estimator": "of the completion hazard: published, or censored (also uses running requests)",
    "window": "completions that the estimator remembers",
    "update_every": "completions between updates",
    "min_samples": "completions before the first update",
    "initial_theta": "threshold until then",
    "theta_min": "lowest threshold the online controller may choose",
    "epsilon": "allowed probability that the KV cache overflows",
    "kv_gate": "stay in decode while free KV memory is low",
    "mix": "marginal may refill beside decodes where that costs less; off: exclusive batches only",
    "ttft": "marginal's target for the first token in seconds: requests that can still meet it are served first",
    "tpot": "marginal's target for the time per output token in seconds: bounds the batch",
    "memory_safe": "bound N by the memory-safe batch",
    "memory_form": "of that bound: code (published code) or paper",
}


@app.command("list", cls=Command)
def list_policies(as_json: Annotated[bool, typer.Option("--json", help="One JSON list on stdout.")] = False) -> None:
    """List the policies."""
    if as_json:
        typer.echo(json.dumps([{"name": name, "description": text} for name, text in descriptions().items()]))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("policy", no_wrap=True)
    table.add_column("what it does")
    for name, text in descriptions().items():
        table.add_row(name, text)
    console = Console(highlight=False)
    console.print(table)
    console.print("Settings follow the name: eb:theta=0.5, ebplus:margin=1e-5,estimator=censored", markup=False)


@app.command("show", cls=Command)
def show_policy(
    name: Annotated[str, typer.Argument(help="A policy, with settings or without: ebplus:margin=1e-5")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Show what a policy does and every setting it heeds."""
    spec = _named(name)
    settings = {name: getattr(spec, name) for name in takes(spec)}
    if as_json:
        typer.echo(json.dumps({"name": spec.name, "description": descriptions()[spec.kind], "settings": settings}))
        return
    typer.echo(f"{spec.name}: {descriptions()[spec.kind]}")
    for key, value in settings.items():
        shown = "not set" if value is None else str(value).lower() if isinstance(value, bool) else value
        typer.echo(f"  {key:14} {shown!s:10} {_SETTINGS.get(key, '')}".rstrip())


def _named(name: str) -> PolicySpec:
    """Parse a policy; the bare name of one that needs a number is enough to read about it."""
    return parse_policy(example(name))
