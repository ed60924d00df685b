"""``ebbench serve``: a vLLM server under a scheduling policy, and the equivalent ``vllm serve`` command."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ebbench.config.options import opt, under
from ebbench.errors import RunError
from ebbench.spec.commands import setting

GRACE_S = 30.0  # time for vLLM to end after an interruption
_COSTS = "Costs (for eb, ebplus, marginal and slochunk)"
cost, emulation = under(_COSTS), under("Emulation")


def serve(
    model: Annotated[str, typer.Argument(help="What to serve: a Hugging Face name or a folder.")],
    device: Annotated[
        str | None,
        cost(help="The GPU, see `ebbench devices list`; default: this machine's.", complete="devices"),
    ] = None,
    device_model: Annotated[str | None, cost(help="The model's name in the profile; default: MODEL.")] = None,
    calibration: Annotated[Path | None, cost(help="Measured costs, JSON (`ebbench calibrate`).")] = None,
    assume_kernels: Annotated[bool, setting("assume_kernels", panel=_COSTS)] = False,
    emulate: Annotated[str | None, emulation(help="Emulate this GPU; needs no GPU and no weights.")] = None,
    slow_motion: Annotated[float, emulation(help="Factor by which every step is longer.")] = 1.0,
    vllm_options: Annotated[
        list[str] | None, typer.Argument(help="After --: options for vLLM itself.", show_default=False)
    ] = None,
    policy: Annotated[
        str,
        opt("--policy", "-p", help="Scheduling policy; see `ebbench policies list`.", complete="policies"),
    ] = "ebplus",
    host: Annotated[str, opt("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, opt("--port", help="Port to listen on.")] = 8000,
    record: Annotated[Path | None, opt("--record", help="Folder for step and decision records.")] = None,
    print_only: Annotated[bool, opt("--print", help="Print the `vllm serve` command and exit.")] = False,
) -> None:
    """Serve MODEL with vLLM, scheduled by POLICY. Everything after `--` goes to vLLM unchanged.

    Prints the equivalent `vllm serve` command first. That command is self-contained: it includes the costs, and the
    machine that runs it needs only vLLM and the plugin (see docs/deployment.md).
    """
    from ebbench.engines.costs import serving_of
    from ebbench.engines.vllm_command import executable_line, import_path, plain_line
    from ebbench.engines.vllm_server import explain
    from ebbench.process.child import run_supervised

    serving = serving_of(
        model, policy, tuple(vllm_options or ()), device=device, device_model=device_model, calibration=calibration,
        assume_kernels=assume_kernels, emulate=emulate, slow_motion=slow_motion,
    )  # fmt: skip
    serving = replace(serving, host=host, port=port, record=record)
    typer.echo(plain_line(serving), err=not print_only)
    if print_only:
        return
    environment = {**os.environ, "PYTHONPATH": import_path(serving.policy)}
    status, errors = run_supervised(executable_line(serving), GRACE_S, shows_errors=True, env=environment)
    if status:
        reason = explain(errors) or "see its output above"
        raise RunError(f"the server ended with exit status {status}; {reason}")
