"""``ebbench serve``: a vLLM server under a scheduling policy, and the plain line that does the same."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from ebbench.cli import completion
from ebbench.errors import RunError, UsageError

GRACE_S = 30.0  # for vLLM to end when interrupted
_COSTS, _EMULATION = "Costs (for eb and ebplus)", "Emulation"


def serve(
    model: Annotated[str, typer.Argument(help="What to serve: a Hugging Face name or a folder.")],
    vllm_options: Annotated[
        list[str] | None, typer.Argument(help="After --: options for vLLM itself.", show_default=False)
    ] = None,
    policy: Annotated[
        str, typer.Option("--policy", "-p", help="See `ebbench policies list`.", autocompletion=completion.policies)
    ] = "ebplus",
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            help="The GPU, see `ebbench devices list`; default: this machine's.",
            rich_help_panel=_COSTS,
            autocompletion=completion.devices,
        ),
    ] = None,
    device_model: Annotated[
        str | None,
        typer.Option("--device-model", help="The model's name there; default: MODEL.", rich_help_panel=_COSTS),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option("--calibration", help="Measured costs, JSON (`ebbench calibrate`).", rich_help_panel=_COSTS),
    ] = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Port to listen on.")] = 8000,
    record: Annotated[Path | None, typer.Option("--record", help="Folder for step and decision records.")] = None,
    emulate: Annotated[
        str | None,
        typer.Option("--emulate", help="Stand in for this GPU: no weights, no GPU.", rich_help_panel=_EMULATION),
    ] = None,
    slow_motion: Annotated[
        float,
        typer.Option("--slow-motion", help="Every step takes that many times as long.", rich_help_panel=_EMULATION),
    ] = 1.0,
    print_only: Annotated[bool, typer.Option("--print", help="Print the plain vllm line and stop.")] = False,
) -> None:
    """Serve MODEL with vLLM, scheduled by POLICY. Everything after `--` goes to vLLM as it is.

    Prints the equivalent `vllm serve` line first. That line stands alone: its costs are in it, and where vLLM runs it
    needs the plugin and nothing else of ebbench (see docs/deployment.md).
    """
    from ebbench.child import run_supervised
    from ebbench.engines.costs import serving_costs
    from ebbench.engines.vllm_command import Emulation, Serving, executable_line, hub_name, plain_line
    from vllm_eb.policy import parse_policy

    spec = parse_policy(policy)
    serving = Serving(
        model=model if Path(model).exists() else hub_name(model),
        policy=spec,
        calibration=serving_costs(
            [spec], calibration=calibration, device=device or emulate, model=device_model or model
        ),
        host=host,
        port=port,
        record=record,
        emulation=Emulation(emulate, device_model or model, slow_motion) if emulate else None,
        extra=tuple(vllm_options or ()),
    )
    if slow_motion != 1.0 and emulate is None:
        raise UsageError("--slow-motion slows an emulated device; give --emulate GPU")
    typer.echo(plain_line(serving), err=not print_only)
    if print_only:
        return
    status, _ = run_supervised(executable_line(serving), GRACE_S, env={**os.environ, "PYTHONPATH": _python_path()})
    if status:
        raise RunError(f"the server ended with exit status {status}; its own words are above")


def _python_path() -> str:
    """Where the server finds the plugin, also when ebbench runs from a checkout."""
    from ebbench.engines.vllm_command import plugin_roots

    inherited = os.environ.get("PYTHONPATH")
    return os.pathsep.join([*plugin_roots(), *([inherited] if inherited else [])])
