"""``ebbench calibrate``: measures step times on an engine, fits the cost model, writes a profile and checks it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ebbench.config.declare import DEFAULT_MODEL
from ebbench.config.options import completing, grouped, refuse_unused
from ebbench.spec.commands import GridCommand, VllmOptions

_OF_STEPS = ("model", "device", "output_dir", "json")
"""Options that are read beside --steps; all others say how to measure."""


@grouped
def calibrate(
    *,
    model: Annotated[
        str,
        typer.Option(
            "--model", "-m", help="A model name, a folder or a config.json.", autocompletion=completing("models")
        ),
    ] = DEFAULT_MODEL,
    engine: Annotated[str, typer.Option(help="What to measure: sim, emulated or vllm.")] = "vllm",
    device: Annotated[
        str | None, typer.Option(help="sim, emulated: the device. vllm: a name for this machine.")
    ] = None,
    sizes: GridCommand,
    repeats: Annotated[int, typer.Option(min=2, max=10_000, help="Rounds; each measures every point once.")] = 8,
    max_time: Annotated[
        float | None, typer.Option(help="vllm: most seconds of rounds after its start; at least one is measured.")
    ] = None,
    steps: Annotated[
        Path | None, typer.Option(help="Fit step times that `borrowed.py steps` measured, in place of measuring.")
    ] = None,
    check: Annotated[int, typer.Option(min=0, help="Requests of the out-of-sample check; 0: no check.")] = 64,
    output_dir: Annotated[Path, typer.Option(help="Directory for profile and calibration.")] = Path("calibration"),
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
    vllm_options: VllmOptions = None,
    context: typer.Context,
) -> None:
    """Measure alpha, beta and the mixed cost of this machine (or an emulated one) and write them as a device.

    Afterwards: ebbench run ... --engine sim --device OUTPUT_DIR/profile.toml --model MODEL, or on the machine itself
    ebbench run ... --engine vllm --calibration OUTPUT_DIR/calibration.json --model MODEL
    """
    from ebbench.calibration import command
    from ebbench.calibration.measure import parse_grid
    from ebbench.render.documents import Console

    command.refuse_existing(output_dir / "profile.toml")
    if steps is not None:
        refuse_unused(context, context.params.keys() - {"steps"}, _OF_STEPS, "--steps")
        done = command.of_steps(steps, model, device)
    else:
        grid = replace(parse_grid(engine, sizes), repeats=repeats)
        messages = Console(stderr=True, highlight=False)
        options = tuple(vllm_options or ())
        done = command.measure_engine(
            engine, device, model, grid, check=check, vllm_options=options, most_s=max_time, messages=messages
        )
    profile = command.write_profile(done.measured, done.device, model, output_dir)
    if as_json:
        typer.echo(json.dumps(command.as_dict(done, profile)))
        return
    for line in command.lines(done, profile):
        typer.echo(line)
    for line in command.doubts(done.measured):
        typer.echo(line, err=True)
