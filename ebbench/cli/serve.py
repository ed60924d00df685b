"""``ebbench serve``: a vLLM server under a scheduling policy, and the equivalent ``vllm serve`` command."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ebbench.cli import completion
from ebbench.cli.options import grouped, opt
from ebbench.cli.run_settings import setting
from ebbench.errors import RunError, UsageError

if TYPE_CHECKING:
    from ebbench.engines.vllm_command import Serving

GRACE_S = 30.0  # time for vLLM to end after an interruption
_COSTS, _EMULATION = "Costs (for eb and ebplus)", "Emulation"


@dataclass(frozen=True)
class CostFlags:
    """Costs of the device, which eb, ebplus and marginal compute with."""

    device: Annotated[
        str | None,
        opt(
            "--device",
            help="The GPU, see `ebbench devices list`; default: this machine's.",
            panel=_COSTS,
            complete=completion.devices,
        ),
    ] = None
    device_model: Annotated[
        str | None, opt("--device-model", help="The model's name in the profile; default: MODEL.", panel=_COSTS)
    ] = None
    calibration: Annotated[
        Path | None, opt("--calibration", help="Measured costs, JSON (`ebbench calibrate`).", panel=_COSTS)
    ] = None
    assume_kernels: Annotated[bool, setting("assume_kernels", panel=_COSTS)] = False


@dataclass(frozen=True)
class EmulationFlags:
    """A server without a GPU."""

    emulate: Annotated[
        str | None, opt("--emulate", help="Emulate this GPU; needs no GPU and no weights.", panel=_EMULATION)
    ] = None
    slow_motion: Annotated[
        float, opt("--slow-motion", help="Factor by which every step is longer.", panel=_EMULATION)
    ] = 1.0


@grouped
def serve(
    model: Annotated[str, typer.Argument(help="What to serve: a Hugging Face name or a folder.")],
    costs: CostFlags,
    emulated: EmulationFlags,
    vllm_options: Annotated[
        list[str] | None, typer.Argument(help="After --: options for vLLM itself.", show_default=False)
    ] = None,
    policy: Annotated[
        str,
        typer.Option(
            "--policy", "-p", help="Scheduling policy; see `ebbench policies list`.", autocompletion=completion.policies
        ),
    ] = "ebplus",
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Port to listen on.")] = 8000,
    record: Annotated[Path | None, typer.Option("--record", help="Folder for step and decision records.")] = None,
    print_only: Annotated[bool, typer.Option("--print", help="Print the `vllm serve` command and exit.")] = False,
) -> None:
    """Serve MODEL with vLLM, scheduled by POLICY. Everything after `--` goes to vLLM unchanged.

    Prints the equivalent `vllm serve` command first. That command is self-contained: it includes the costs, and the
    machine that runs it needs only vLLM and the plugin (see docs/deployment.md).
    """
    from ebbench.engines.vllm_command import executable_line, import_path, plain_line
    from ebbench.engines.vllm_server import explain
    from ebbench.process.child import run_supervised

    if emulated.slow_motion != 1.0 and emulated.emulate is None:
        raise UsageError("--slow-motion slows an emulated device; give --emulate GPU")
    extra = tuple(vllm_options or ())
    serving = replace(_serving(model, policy, costs, emulated, extra), host=host, port=port, record=record)
    typer.echo(plain_line(serving), err=not print_only)
    if print_only:
        return
    environment = {**os.environ, "PYTHONPATH": import_path(serving.policy)}
    status, errors = run_supervised(executable_line(serving), GRACE_S, shows_errors=True, env=environment)
    if status:
        reason = explain(errors) or "see its output above"
        raise RunError(f"the server ended with exit status {status}; {reason}")


def _serving(model: str, policy: str, costs: CostFlags, emulated: EmulationFlags, extra: tuple[str, ...]) -> Serving:
    """What is served, and under which policy."""
    from ebbench.engines.costs import serving_costs
    from ebbench.engines.vllm_command import Emulation, Serving, hub_name, parse_parallel, parse_types
    from vllm_eb.policy import parse_policy

    if emulated.emulate is not None and not parse_parallel(extra).single:
        raise UsageError("--emulate emulates one GPU; leave out the options of several after --")
    if emulated.emulate is not None and parse_types(extra):
        raise UsageError(
            "--emulate emulates a model in the types of its config.json; leave out --quantization and --kv-cache-dtype "
            "after --, or give them to `ebbench run --engine emulated`"
        )
    spec, device_model = parse_policy(policy), costs.device_model or model
    emulation = Emulation(
        emulated.emulate or "", device_model, emulated.slow_motion, assume_kernels=costs.assume_kernels
    )
    return Serving(
        model=model if Path(model).exists() else hub_name(model),
        policy=spec,
        calibration=serving_costs(
            [spec],
            calibration=costs.calibration,
            device=costs.device or emulated.emulate,
            model=device_model,
            vllm_options=extra,
            assume_kernels=costs.assume_kernels,
        ),
        extra=extra,
        emulation=None if emulated.emulate is None else emulation,
    )
