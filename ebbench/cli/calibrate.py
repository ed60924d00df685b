"""``ebbench calibrate``: measures step times on an engine, fits the cost model, writes a profile and checks it."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ebbench.cli import completion
from ebbench.cli.options import opt
from ebbench.cli.run_settings import VllmOptions
from ebbench.config.declare import DEFAULT_DEVICE, DEFAULT_MODEL

if TYPE_CHECKING:
    from ebbench.calibration.check import Check
    from ebbench.calibration.measure import MeasuredCosts, ProbeGrid
    from ebbench.devices.base import Device

LARGE = ("256,1024,4096", "16,128,512", "128,1024")
SMALL = ("32,128,512", "1,8,32", "32,256")
_GRID = "Grid of step times"

Tokens = Annotated[str | None, opt("--tokens", help="Prompt tokens per step, e.g. 256,1024,4096.", panel=_GRID)]
Seqs = Annotated[str | None, opt("--seqs", help="Decoding sequences per step, e.g. 16,128,512.", panel=_GRID)]
Contexts = Annotated[str | None, opt("--contexts", help="KV tokens per decode, e.g. 128,1024.", panel=_GRID)]

STEADY = 1.1  # largest ratio of round times at which the machine's speed counts as constant


def calibrate(
    model: Annotated[
        str,
        typer.Option(
            "--model", "-m", help="A model name, a folder or a config.json.", autocompletion=completion.models
        ),
    ] = DEFAULT_MODEL,
    engine: Annotated[str, typer.Option(help="What to measure: sim, emulated or vllm.")] = "vllm",
    device: Annotated[
        str | None, typer.Option(help="sim, emulated: the device. vllm: a name for this machine.")
    ] = None,
    tokens: Tokens = None,
    seqs: Seqs = None,
    contexts: Contexts = None,
    repeats: Annotated[int, typer.Option(min=2, max=10_000, help="Rounds; each measures every point once.")] = 8,
    steps: Annotated[
        Path | None, typer.Option(help="Fit step times that `borrowed.py steps` measured, in place of measuring.")
    ] = None,
    check: Annotated[int, typer.Option(min=0, help="Requests of the out-of-sample check; 0: no check.")] = 64,
    output_dir: Annotated[Path, typer.Option(help="Directory for profile and calibration.")] = Path("calibration"),
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
    vllm_options: VllmOptions = None,
) -> None:
    """Measure alpha, beta and the mixed cost of this machine (or an emulated one) and write them as a device.

    Afterwards: ebbench run ... --engine sim --device OUTPUT_DIR/profile.toml --model MODEL, or on the machine itself
    ebbench run ... --engine vllm --calibration OUTPUT_DIR/calibration.json --model MODEL
    """
    from ebbench.calibration.check import write_profile

    grid = replace(grid_of(engine, tokens, seqs, contexts), repeats=repeats)
    _not_there(output_dir / "profile.toml")
    if steps is not None:
        measured, target, found = _of_steps(steps, model, device)
    elif engine == "vllm":
        measured, target, found = _measure_vllm(device, model, grid, check, tuple(vllm_options or ()))
    else:
        _refuse_vllm_options(engine, vllm_options or ())
        measured, target, found = _measure_virtual(engine, device, model, grid, check)
    profile = write_profile(measured, target, model, output_dir)
    if as_json:
        typer.echo(json.dumps(_document(measured, target, profile, found)))
    else:
        _print(measured, profile, found)


def _of_steps(path: Path, model: str, device: str | None) -> tuple[MeasuredCosts, Device, Check | None]:
    """What torch alone has measured, of a machine with the memory of that one."""
    from ebbench.calibration.check import machine_of
    from ebbench.calibration.measure import costs_of_steps, read_steps
    from ebbench.devices.profiles import find_model

    steps, geometry = read_steps(path), find_model(model)
    measured = costs_of_steps(steps, geometry)
    return measured, machine_of(device or steps.manifest.gpu, steps.manifest.memory_bytes, geometry), None


def grid_of(engine: str, tokens: str | None, seqs: str | None, contexts: str | None) -> ProbeGrid:
    """The grid of step times to measure. Defaults are few and small where vLLM runs on a CPU. Raises UsageError."""
    from ebbench.calibration.measure import ProbeGrid

    default = SMALL if engine == "vllm" and not _gpu_name() else LARGE
    return ProbeGrid(
        _sizes("--tokens", tokens or default[0]),
        _sizes("--seqs", seqs or default[1]),
        _sizes("--contexts", contexts or default[2]),
    )


def _sizes(option: str, text: str) -> tuple[int, ...]:
    """Whole numbers, separated by commas and increasing. Raises UsageError."""
    from ebbench.config.declare import Setting, values_of
    from ebbench.errors import UsageError

    found = values_of(option, text, Setting("", at_least=1, kind=int, example="32,128,512"))
    if len(found) < 2 or any(b <= a for a, b in pairwise(found)):
        raise UsageError(f"{option} {text}: at least two sizes, increasing")
    return found


def _not_there(path: Path) -> None:
    from ebbench.errors import UsageError

    if path.exists():
        raise UsageError(f"{path} exists; choose another --output-dir or remove it")


def _gpu_name() -> str | None:
    from ebbench.engines.setup import visible_gpus

    return next((gpu.name for gpu in visible_gpus()), None)


def _fitting(grid: ProbeGrid, capacity_tokens: int) -> ProbeGrid:
    """The grid without the points that exceed the KV cache, and a message that names them."""
    found = grid.fitting(capacity_tokens)
    left_out = [str(n) for n in grid.seqs if n not in found.seqs]
    if left_out:
        typer.echo(
            f"left out: {', '.join(left_out)} sequences of {grid.contexts[-1]} tokens do not fit the KV cache "
            f"({capacity_tokens:,} tokens)",
            err=True,
        )
    return found


def _source(model: str, name: str, engine: str) -> str:
    return f"ebbench calibrate, {model} on {name}, engine {engine}"


def _measure_virtual(
    engine: str, device: str | None, model: str, grid: ProbeGrid, check: int
) -> tuple[MeasuredCosts, Device, Check | None]:
    """Calibrate an engine in virtual time on an emulated device."""
    from ebbench.calibration.check import check_prediction
    from ebbench.calibration.measure import calibrate as measure
    from ebbench.devices.loader import load_device
    from ebbench.engines.setup import select_engine
    from ebbench.errors import UnknownNameError
    from ebbench.render.documents import Console
    from ebbench.render.live import Work, shown

    if engine not in ("sim", "emulated"):
        raise UnknownNameError("engine to calibrate", engine, ("sim", "emulated", "vllm"))
    options = grid.options
    target = load_device(
        device or DEFAULT_DEVICE,
        model,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
    )
    grid = _fitting(grid, target.kv_capacity_tokens)
    chosen = select_engine(engine)[0]
    typer.echo(f"measuring {model} on {target.name}, engine {engine} ...", err=True)
    with shown(Console(stderr=True), Work("calibrate")):
        measured = measure(chosen, target, grid, _source(model, target.name, engine))
        return measured, target, check_prediction(chosen, target, measured, grid, check) if check else None


def _refuse_vllm_options(engine: str, given: Sequence[str]) -> None:
    from ebbench.errors import UsageError

    if given:
        raise UsageError(f"what follows -- is for vLLM, which engine {engine} does not start: {' '.join(given)}")


def _measure_vllm(
    device: str | None, model: str, grid: ProbeGrid, check: int, vllm_options: tuple[str, ...]
) -> tuple[MeasuredCosts, Device, Check | None]:
    """Calibrate a real vLLM on this machine."""
    from ebbench.calibration.check import SteppedRuns
    from ebbench.calibration.measure import cost_grid, fit
    from ebbench.calibration.rounds import measure_steps, start
    from ebbench.devices.profiles import find_model
    from ebbench.engines.setup import machine_name, unknown_device
    from ebbench.engines.vllm_command import check_positions, check_servable, check_vllm_options
    from ebbench.render.documents import Console
    from ebbench.render.live import Work, shown

    check_vllm_options(vllm_options)
    find_model(model)  # refused before minutes of measuring: the profile says what the model is
    check_servable(model, vllm_options)
    check_positions(model, grid.options.max_model_len)
    target = unknown_device(device or machine_name(), model)
    fetched = "" if Path(model).exists() else ", fetched from the hub where it is not in the cache"
    typer.echo(f"loading {model} into vLLM on {target.name}{fetched} ...", err=True)
    began = time.monotonic()
    messages = Console(stderr=True)
    with shown(messages, Work(f"loading {model}")):
        vllm = start(model, grid, vllm_options)
    start_s = time.monotonic() - began
    target = replace(target, kv_capacity_tokens=vllm.kv_tokens)
    grid = _fitting(grid, vllm.kv_tokens)
    runs = SteppedRuns.beside(grid, vllm, check) if check else None
    with shown(messages, Work("calibrate", unit="probes")) as work:
        probed = measure_steps(vllm, grid, runs.pause if runs else None, work.reached)
    measured = fit(
        cost_grid(grid, probed.seconds),
        _source(model, target.name, "vllm with --enforce-eager" if vllm.eager else "vllm"),
        grid.points,
        request_s=probed.request_s,
        drift=probed.drift,
        start_s=start_s,
    )
    return measured, target, runs.check(target, measured, grid) if runs else None


def _document(measured: MeasuredCosts, target: Device, profile: Path, check: Check | None) -> dict[str, object]:
    from dataclasses import asdict

    return {
        "calibration": asdict(measured.calibration),
        "prefill_r2": measured.prefill_r2,
        "decode_r2": measured.decode_r2,
        "mixed_r2": measured.mixed_r2,
        "steps": measured.steps,
        "request_s": measured.request_s,
        "drift": measured.drift,
        "start_s": measured.start_s,
        "largest_batch_seqs": measured.calibration.grid.seqs[-1] if measured.calibration.grid else None,
        "kv_capacity_tokens": target.kv_capacity_tokens,
        "profile": str(profile),
        "check": None if check is None else asdict(check),
    }


def _print(measured: MeasuredCosts, profile: Path, check: Check | None) -> None:
    from ebbench.devices.linear import LEAST_FIXED_S

    cal = measured.calibration
    typer.echo(f"{measured.steps} steps measured")
    typer.echo(
        f"prefill  {cal.alpha_p * 1e3:.3f} ms + {cal.beta_p * 1e6:.2f} µs per token   R2 {measured.prefill_r2:.4f}"
    )
    typer.echo(
        f"decode   {cal.alpha_d * 1e3:.3f} ms + {cal.beta_d * 1e6:.2f} µs per sequence   R2 {measured.decode_r2:.4f}"
    )
    if cal.mixed is None:
        typer.echo("mixed    no polynomial with positive costs fits; policies use the measured grid")
    else:
        a, b, c = (v * 1e6 for v in (cal.mixed.a, cal.mixed.b, cal.mixed.c))
        alpha_ms = (cal.alpha_p if cal.alpha_mb is None else cal.alpha_mb) * 1e3
        typer.echo(
            f"mixed    {alpha_ms:.3f} ms + {a:.2f} + {b:.2f} r + {c:.2f} r^2 µs per token   R2 {measured.mixed_r2:.4f}"
        )
    if measured.request_s:
        typer.echo(f"request  {measured.request_s * 1e3:.3f} ms outside its steps")
    if cal.alpha_d <= LEAST_FIXED_S:
        typer.echo(
            "decode   the fixed cost is below the noise: thresholds computed from this profile are unreliable; "
            "measure again with more --repeats or a wider range of --seqs",
            err=True,
        )
    if measured.drift > STEADY:
        typer.echo(
            f"drift    the slowest round took {measured.drift:.2f} times the fastest: the machine's "
            "speed varies, and a later run may differ by as much",
            err=True,
        )
    if check is not None:
        found = ""
        if check.measured_range is not None:
            found = " ({:.0f} to {:.0f})".format(*check.measured_range)
        typer.echo(
            f"check    {check.requests} other requests: {check.measured_tokens_per_s:.0f} tokens/s measured{found}, "
            f"{check.predicted_tokens_per_s:.0f} predicted ({check.error:+.1%})"
        )
    costs = profile.with_name("calibration.json")
    typer.echo(
        f"wrote {profile}: simulate this machine with --device {profile}, serve on it with --calibration {costs}"
    )
