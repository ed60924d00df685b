"""``ebbench scenarios list|show``: traffic patterns, that is when requests arrive."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ebbench.cli import completion
from ebbench.cli.options import Command
from ebbench.cli.run_settings import setting
from ebbench.errors import UsageError

if TYPE_CHECKING:
    from ebbench.traffic.spec import Load, Phase, ScenarioSpec

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Traffic patterns: when requests arrive. Bundled ones and your own TOML files.",
)

_JSON = typer.Option("--json", help="One JSON document on stdout, nothing else.")


@app.command("list", cls=Command)
def list_all(as_json: Annotated[bool, _JSON] = False) -> None:
    """List the scenarios."""
    from ebbench.workloads import list_scenarios, load_scenario

    specs = [load_scenario(name) for name in list_scenarios()]
    if as_json:
        rows = [{"name": spec.name, "loop": spec.loop, "description": spec.description} for spec in specs]
        typer.echo(json.dumps(rows))
        return
    from rich.table import Table

    from ebbench.render.documents import Console

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("scenario", no_wrap=True)
    table.add_column("when requests arrive")
    for spec in specs:
        table.add_row(spec.name, spec.description)
    table.add_row("PATH.toml", "a file like those in scenarios/")
    Console(highlight=False).print(table)


@app.command("show", cls=Command)
def show(
    name: Annotated[
        str, typer.Argument(help="A scenario or the path of a TOML file.", autocompletion=completion.scenarios)
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

    from ebbench.traffic.spec import Load
    from ebbench.workloads import load_scenario

    spec, arrivals = load_scenario(name), None
    given = Load(request_rate=request_rate, saturation_rate=saturation_rate)
    if given != Load() or num_prompts is not None:
        spec, arrivals = _laid_out(name, spec, given, num_prompts, seed)
    if as_json:
        found: dict[str, Any] = msgspec.to_builtins(spec)
        typer.echo(json.dumps(found | ({"arrivals": arrivals} if arrivals else {})))
        return
    _print(spec, arrivals)


def _laid_out(
    name: str, spec: ScenarioSpec, given: Load, num_prompts: int | None, seed: int
) -> tuple[ScenarioSpec, dict[str, float] | None]:
    """The scenario as a run would use it, and the arrivals of an open loop. Raises what a run would raise."""
    from ebbench.traffic.spec import under
    from ebbench.workloads import build_plan
    from ebbench.workloads.planner import describe

    if spec.loop == "trace":
        raise UsageError(f"scenario {spec.name!r} replays recorded times; see `ebbench workloads show log:FILE`")
    plan = build_plan(
        "balanced", name, request_rate=given.request_rate, saturation_rate=given.saturation_rate,
        num_prompts=num_prompts, seed=seed,
    )  # fmt: skip
    return under(spec, given, num_prompts, seed), describe(plan).get("arrivals")


def _print(spec: ScenarioSpec, arrivals: dict[str, float] | None) -> None:
    from rich.table import Table

    from ebbench.render.documents import Console

    console = Console(highlight=False)
    console.print(f"{spec.name}: {spec.description}", markup=False)
    if spec.replay is not None:
        part = "all" if spec.replay.duration_s is None else f"{spec.replay.duration_s:g} s"
        console.print(
            f"replays {part} from {spec.replay.start_s:g} s, {spec.replay.repeat} time(s), speed {spec.replay.speed:g}"
        )
    if spec.phases:
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
        for column in ("phase", "size", "load", "lengths"):
            table.add_column(column, no_wrap=column == "phase")
        for phase in spec.phases:
            table.add_row(phase.name, _size(phase), _load(phase), _lengths(phase))
        console.print(table)
    if arrivals is not None:
        from ebbench.cli.workloads import arrival_line

        console.print(arrival_line(arrivals))


def _size(phase: Phase) -> str:
    if phase.duration_s is not None:
        return f"{phase.duration_s:g} s"
    return f"{phase.requests:,} sessions" if phase.requests else "all sessions"


def _load(phase: Phase) -> str:
    if phase.max_concurrency is not None:
        return f"{phase.max_concurrency} at a time"
    words = [str(phase.process)]
    if phase.process == "gamma":
        words.append(f"(burstiness {phase.burstiness:g})")
    words.append(_rate(phase))
    if phase.curve is not None:
        period = f"every {phase.curve.period_s:g} s" if phase.curve.period_s else "over the phase"
        low, high = min(phase.curve.levels), max(phase.curve.levels)
        words.append(f"along {phase.curve.shape} between {low:g} and {high:g} {period}")
    return " ".join(words)


def _rate(phase: Phase) -> str:
    if phase.rate is not None:
        return f"at {phase.rate:g} sessions/s"
    scaled = "" if phase.level == 1.0 else f"{phase.level:g} x "
    shared = f", or {phase.share:.0%} of saturation" if phase.share is not None else ""
    return f"at {scaled}--request-rate{shared}"


def _lengths(phase: Phase) -> str:
    if phase.input is None or phase.output is None:
        return "the workload's"
    return f"in {phase.input.text}, out {phase.output.text}"
