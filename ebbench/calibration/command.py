"""The steps of ``ebbench calibrate``: measure on an engine, or read what was measured, and say what came of it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ebbench.calibration.check import Check, SteppedRuns, check_prediction, known_machine
from ebbench.calibration.measure import (
    MeasuredCosts,
    ProbeGrid,
    calibrate,
    cost_grid,
    costs_of_steps,
    fit,
    read_steps,
)
from ebbench.calibration.rounds import measure_steps, start
from ebbench.config.declare import DEFAULT_DEVICE
from ebbench.devices.base import Device
from ebbench.devices.costs import LEAST_FIXED_S
from ebbench.devices.loader import load_device
from ebbench.devices.profiles import find_model
from ebbench.engines.machine import machine_name
from ebbench.engines.setup import select_engine, unknown_device
from ebbench.engines.vllm_command import check_positions, check_servable, check_vllm_options
from ebbench.errors import UnknownNameError, UsageError
from ebbench.render.documents import Console
from ebbench.render.live import Work, shown
from ebbench.spec.server import MOST_TOKENS, served_drafts

STEADY = 1.1
"""Largest ratio of round times at which the machine's speed counts as constant."""


@dataclass(frozen=True)
class Calibrated:
    """Step times of a device, and their check against other requests; None without one."""

    measured: MeasuredCosts
    device: Device
    check: Check | None = None


def measure_engine(
    engine: str,
    device: str | None,
    model: str,
    grid: ProbeGrid,
    *,
    check: int,
    vllm_options: Sequence[str],
    messages: Console,
) -> Calibrated:
    """Measure an engine, real or in virtual time; ``check``: requests of the check. Raises UsageError, RunError."""
    if engine == "vllm":
        return _measure_vllm(device, model, grid, check, vllm_options, messages)
    if vllm_options:
        raise UsageError(f"what follows -- is for vLLM, which engine {engine} does not start: {' '.join(vllm_options)}")
    return _measure_virtual(engine, device, model, grid, check, messages)


def of_steps(path: Path, model: str, device: str | None) -> Calibrated:
    """What torch alone has measured, of a machine with the memory of that one."""
    steps, geometry = read_steps(path), find_model(model)
    measured = costs_of_steps(steps, geometry)
    return Calibrated(measured, known_machine(device or steps.manifest.gpu, steps.manifest.memory_bytes, geometry))


def _fitting(grid: ProbeGrid, capacity_tokens: int, messages: Console) -> ProbeGrid:
    """The grid without the points that exceed the KV cache, and a message that names them."""
    fitting = grid.fitting(capacity_tokens)
    left_out = [str(n) for n in grid.seqs if n not in fitting.seqs]
    if left_out:
        messages.say(
            f"left out: {', '.join(left_out)} sequences of {grid.contexts[-1]} tokens do not fit the KV cache "
            f"({capacity_tokens:,} tokens)"
        )
    return fitting


def _source(model: str, name: str, engine: str) -> str:
    return f"ebbench calibrate, {model} on {name}, engine {engine}"


def _measure_virtual(
    engine: str, device: str | None, model: str, grid: ProbeGrid, check: int, messages: Console
) -> Calibrated:
    """Calibrate an engine in virtual time on an emulated device."""
    if engine not in ("sim", "emulated"):
        raise UnknownNameError("engine to calibrate", engine, ("sim", "emulated", "vllm"))
    options = grid.options
    target = load_device(
        device or DEFAULT_DEVICE,
        model,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
    )
    grid = _fitting(grid, target.kv_capacity_tokens, messages)
    chosen = select_engine(engine)[0]
    messages.say(f"measuring {model} on {target.name}, engine {engine} ...")
    with shown(messages, Work("calibrate")):
        measured = calibrate(chosen, target, grid, _source(model, target.name, engine))
        return Calibrated(measured, target, check_prediction(chosen, target, measured, grid, check) if check else None)


def _measure_vllm(
    device: str | None, model: str, grid: ProbeGrid, check: int, vllm_options: Sequence[str], messages: Console
) -> Calibrated:
    """Calibrate a real vLLM on this machine."""
    check_vllm_options(vllm_options)
    grid = replace(grid, drafts=_drafts_of(vllm_options))
    find_model(model)  # refused before minutes of measuring: the profile says what the model is
    check_servable(model, vllm_options)
    check_positions(model, grid.options.max_model_len)
    target = unknown_device(device or machine_name(), model)
    fetched = "" if Path(model).exists() else ", fetched from the hub where it is not in the cache"
    messages.say(f"loading {model} into vLLM on {target.name}{fetched} ...")
    began = time.monotonic()
    with shown(messages, Work(f"loading {model}")):
        vllm = start(model, grid, vllm_options)
    start_s = time.monotonic() - began
    target = replace(target, kv_capacity_tokens=vllm.kv_tokens)
    grid = _fitting(grid, vllm.kv_tokens, messages)
    runs = SteppedRuns.beside(grid, vllm, check) if check else None
    with shown(messages, Work("calibrate", unit="probes")) as work:
        probed = measure_steps(vllm, grid, runs.pause if runs else None, work.reached)
    measured = fit(
        cost_grid(grid, probed.seconds),
        _source(model, target.name, "vllm with --enforce-eager" if vllm.eager else "vllm"),
        grid.points if probed.undrafted is None else 2 * grid.points,
        request_s=probed.request_s,
        drift=probed.drift,
        start_s=start_s,
        drafts=grid.drafts,
        undrafted=None if probed.undrafted is None else cost_grid(grid, probed.undrafted),
    )
    return Calibrated(measured, target, runs.check(target, measured, grid) if runs else None)


def _drafts_of(vllm_options: Sequence[str]) -> int:
    """Tokens that a server with these arguments drafts per decode. Raises UsageError for an unknown number."""
    config = served_drafts(vllm_options)
    tokens = config.get("num_speculative_tokens", 0)
    if not isinstance(tokens, int) or (config and not 1 <= tokens <= MOST_TOKENS):
        raise UsageError(f'--speculative-config: give "num_speculative_tokens", from 1 to {MOST_TOKENS}, to calibrate')
    return tokens


def as_dict(done: Calibrated, profile: Path) -> dict[str, object]:
    """One JSON object."""
    measured, check = done.measured, done.check
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
        "kv_capacity_tokens": done.device.kv_capacity_tokens,
        "profile": str(profile),
        "check": None if check is None else asdict(check),
    }


def lines(done: Calibrated, profile: Path) -> Iterator[str]:
    """The fitted costs, the check, and where they were written."""
    measured, check, cal = done.measured, done.check, done.measured.calibration
    yield f"{measured.steps} steps measured"
    yield f"prefill  {cal.alpha_p * 1e3:.3f} ms + {cal.beta_p * 1e6:.2f} µs per token   R2 {measured.prefill_r2:.4f}"
    counted = f"computed token, {cal.drafts} drafted per sequence" if cal.drafts else "sequence"
    yield f"decode   {cal.alpha_d * 1e3:.3f} ms + {cal.beta_d * 1e6:.2f} µs per {counted}   R2 {measured.decode_r2:.4f}"
    if cal.mixed is None:
        yield "mixed    no polynomial with positive costs fits; policies use the measured grid"
    else:
        a, b, c = (v * 1e6 for v in (cal.mixed.a, cal.mixed.b, cal.mixed.c))
        alpha_ms = (cal.alpha_p if cal.alpha_mb is None else cal.alpha_mb) * 1e3
        yield (
            f"mixed    {alpha_ms:.3f} ms + {a:.2f} + {b:.2f} r + {c:.2f} r^2 µs per token   R2 {measured.mixed_r2:.4f}"
        )
    if measured.request_s:
        yield f"request  {measured.request_s * 1e3:.3f} ms outside its steps"
    if check is not None:
        ends = " ({:.0f} to {:.0f})".format(*check.measured_range) if check.measured_range is not None else ""
        yield (
            f"check    {check.requests} other requests: {check.measured_tokens_per_s:.0f} tokens/s measured{ends}, "
            f"{check.predicted_tokens_per_s:.0f} predicted ({check.error:+.1%})"
        )
    if cal.drafts and cal.undrafted is None:
        yield (
            "steps without drafts were not measured, which draft=adaptive needs: add "
            f'"num_speculative_tokens_per_batch_size": [[1, 1, {cal.drafts}]] to --speculative-config'
        )
    costs = profile.with_name("calibration.json")
    yield f"wrote {profile}: simulate this machine with --device {profile}, serve on it with --calibration {costs}"


def doubts(measured: MeasuredCosts) -> Iterator[str]:
    """Why the costs may not be what later runs take."""
    if measured.calibration.alpha_d <= LEAST_FIXED_S:
        yield (
            "decode   the fixed cost is below the noise: thresholds computed from this profile are unreliable; "
            "measure again with more --repeats or a wider range of --seqs"
        )
    if measured.drift > STEADY:
        yield (
            f"drift    the slowest round took {measured.drift:.2f} times the fastest: the machine's "
            "speed varies, and a later run may differ by as much"
        )
