"""The steps of ``ebbench calibrate``: measure on an engine, or read what was measured, and say what came of it."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import ceil
from pathlib import Path

import pyarrow.compute as pc

from ebbench.analysis.columns import RequestColumns
from ebbench.analysis.metrics import measure
from ebbench.calibration.measure import MeasuredCosts, ProbeGrid, calibrate, cost_grid, costs_of_steps, fit, read_steps
from ebbench.calibration.rounds import SteppedVllm, measure_steps, run_closed_loop, start
from ebbench.config.declare import DEFAULT_DEVICE, DEFAULT_VLLM
from ebbench.devices.base import SINGLE, Device, start_up
from ebbench.devices.capacity import kv_capacity_tokens, layout_with, reserve_bytes
from ebbench.devices.costs import LEAST_FIXED_S
from ebbench.devices.geometry import ModelGeometry
from ebbench.devices.gridcost import GridCost
from ebbench.devices.loader import load_device
from ebbench.devices.profiles import FORMAT, DeviceProfile, find_model, measured_name
from ebbench.engines.base import Engine, EngineResult
from ebbench.engines.machine import machine_name
from ebbench.engines.setup import select_engine, unknown_device
from ebbench.engines.sim import SimEngine
from ebbench.engines.vllm_command import check_positions, check_servable, check_vllm_options
from ebbench.errors import DataError, UnknownNameError, UsageError
from ebbench.records import files
from ebbench.records.plan import Plan
from ebbench.render.documents import Console
from ebbench.render.live import Work, shown
from ebbench.spec.server import MOST_TOKENS, EngineOptions, refuse_without_drafts, served_drafts
from ebbench.workloads import build_plan
from vllm_eb.calibration import calibration_to_json
from vllm_eb.policy import parse_policy

STEADY = 1.1
"""Largest ratio of round times at which the machine's speed counts as constant."""


@dataclass(frozen=True)
class Calibrated:
    """Step times of a device, and their check against other requests; None without one."""

    measured: MeasuredCosts
    device: Device
    check: Check | None = None


def measure_engine(
    engine: str, device: str | None, model: str, grid: ProbeGrid, *, check: int, vllm_options: Sequence[str],
    most_s: float | None, messages: Console,
) -> Calibrated:  # fmt: skip
    """Measure an engine, real or in virtual time; ``check``: requests of the check; ``most_s``: limit of a real one's
    steps. Raises UsageError, RunError."""
    if most_s is not None and not most_s > 0:
        raise UsageError(f"--max-time must be positive, not {most_s:g}")
    if engine == "vllm":
        most_s = math.inf if most_s is None else most_s
        return _measure_vllm(device, model, grid, check, vllm_options, most_s, messages)
    if most_s is not None:
        raise UsageError(f"--max-time is for vLLM; engine {engine} measures in virtual time")
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
    if engine not in ("sim", "emulated"):
        raise UnknownNameError("engine to calibrate", engine, ("sim", "emulated", "vllm"))
    n, b = grid.options.max_num_seqs, grid.options.max_num_batched_tokens
    target = load_device(device or DEFAULT_DEVICE, model, max_num_seqs=n, max_num_batched_tokens=b)
    grid = _fitting(grid, target.kv_capacity_tokens, messages)
    chosen = select_engine(engine)[0]
    messages.say(f"measuring {model} on {target.name}, engine {engine} ...")
    with shown(messages, Work("calibrate")):
        measured = calibrate(chosen, target, grid, _source(model, target.name, engine))
        return Calibrated(measured, target, check_prediction(chosen, target, measured, grid, check) if check else None)


def _measure_vllm(
    device: str | None, model: str, grid: ProbeGrid, check: int, vllm_options: Sequence[str], most_s: float,
    messages: Console,
) -> Calibrated:  # fmt: skip
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
    runs = SteppedRuns(vllm, check_plan(grid, check), every=grid.probes) if check else None
    with shown(messages, Work("calibrate", unit="probes")) as work:
        probed = measure_steps(vllm, grid, runs.pause if runs else None, work.reached, most_s)
    if probed.rounds < grid.repeats:
        messages.say(f"{probed.rounds} of {grid.repeats} rounds of steps: more do not fit into {most_s:.0f} s")
    points = replace(grid, repeats=probed.rounds).points
    measured = fit(
        cost_grid(grid, probed.seconds),
        _source(model, target.name, "vllm with --enforce-eager" if vllm.eager else "vllm"),
        points if probed.undrafted is None else 2 * points,
        drafts=grid.drafts,
        undrafted=None if probed.undrafted is None else cost_grid(grid, probed.undrafted),
    )
    measured = replace(measured, request_s=probed.request_s, drift=probed.drift, start_s=start_s)
    return Calibrated(measured, target, runs.check(target, measured, grid) if runs else None)


def _drafts_of(vllm_options: Sequence[str]) -> int:
    """Tokens that a server with these arguments drafts per decode. Raises UsageError for an unknown number."""
    refuse_without_drafts(vllm_options)
    config = served_drafts(vllm_options)
    tokens = config.get("num_speculative_tokens", 0)
    if not isinstance(tokens, int) or (config and not 1 <= tokens <= MOST_TOKENS):
        raise UsageError(f'--speculative-config: give "num_speculative_tokens", from 1 to {MOST_TOKENS}, to calibrate')
    return tokens


def as_dict(done: Calibrated, profile: Path) -> dict[str, object]:
    """One JSON object."""
    measured, check = done.measured, done.check
    return {
        **asdict(measured),
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


# Writes the profile of a calibration and checks its prediction on a run that was not used for the fit.

_SEQS, _TOKENS = 256, 2048
"""The limits that a written profile names as usual: those of `vllm serve` on small GPUs."""


@dataclass(frozen=True)
class Check:
    """Throughput of the same requests in tokens/s, measured on the engine and predicted from the measured step times.

    ``measured_range``: the slowest and the fastest of several runs.
    """

    requests: int
    measured_tokens_per_s: float
    predicted_tokens_per_s: float
    measured_range: tuple[float, float] | None = None

    @property
    def error(self) -> float:
        """Relative error of the prediction (0.05 is 5 %)."""
        return self.predicted_tokens_per_s / self.measured_tokens_per_s - 1.0


def check_prediction(engine: Engine, device: Device, measured: MeasuredCosts, grid: ProbeGrid, requests: int) -> Check:
    """Run requests of other lengths on the engine, and on the simulator with the measured device."""
    plan = check_plan(grid, requests)
    real = engine.run(plan, parse_policy("v1"), device, grid.options, None).uninterrupted()
    blocks = int(real.steps["kv_blocks_total"][0].as_py())
    options = replace(grid.options, num_kv_blocks=blocks)
    return Check(requests, _tokens_per_s(real), predict(plan, device, measured, options))


@dataclass
class SteppedRuns:
    """Runs one plan repeatedly on a vLLM engine stepped in this process, in the pauses between calibration probes.

    Machine drift then affects probes and runs equally. No probe has these lengths or this concurrency, and the fit does
    not use these runs. ``every``: number of pauses per run.
    """

    vllm: SteppedVllm
    plan: Plan
    every: int = 1
    seconds: list[float] = field(default_factory=list)
    _pauses: int = 0

    def pause(self) -> None:
        """Count a pause; called after each probe."""
        self._pauses += 1
        if self._pauses % self.every == 0:
            self.run()

    def run(self) -> None:
        """Run the plan once and record its throughput."""
        lengths = self.plan.table.select(["input_tokens", "output_tokens"]).to_pydict().values()
        concurrency = self.plan.phases[0].max_concurrency
        self.seconds.append(run_closed_loop(self.vllm, list(zip(*lengths, strict=True)), concurrency))

    def check(self, device: Device, measured: MeasuredCosts, grid: ProbeGrid) -> Check:
        """Measured throughput over all runs, and the simulator's prediction."""
        tokens = sum(pc.sum(self.plan.table[name]).as_py() for name in ("input_tokens", "output_tokens"))
        options = replace(grid.options, num_kv_blocks=self.vllm.kv_tokens // 16, async_scheduling=False)
        if grid.drafts:  # which are all rejected here
            options = replace(options, speculative=f"method=ngram,tokens={grid.drafts},acceptance=0")
        return Check(
            len(self.plan),
            tokens * len(self.seconds) / sum(self.seconds),
            predict(self.plan, device, measured, options),
            (tokens / max(self.seconds), tokens / min(self.seconds)),
        )


def predict(plan: Plan, device: Device, measured: MeasuredCosts, options: EngineOptions) -> float:
    """Tokens/s of the plan on the simulator with the measured step times."""
    if measured.calibration.grid is None:
        raise DataError("the calibration holds no grid to predict from")
    cost = GridCost.of(measured.calibration, measured.request_s)
    kv_tokens = (options.num_kv_blocks or 0) * options.block_size
    twin = replace(device, cost=cost, kv_capacity_tokens=kv_tokens, calibration=measured.calibration)
    return _tokens_per_s(SimEngine().run(plan, parse_policy("v1"), twin, options, None).uninterrupted())


def check_plan(grid: ProbeGrid, requests: int) -> Plan:
    """Lengths in the middle of the measured range, at half the largest batch size."""
    return build_plan(
        "balanced", num_prompts=requests, seed=11, source="profile", max_concurrency=max(grid.seqs[-1] // 2, 2),
        input_len=max(grid.tokens[-1] // 4, 4), output_len=max(grid.contexts[-1] // 4, 8),
    )  # fmt: skip


def _tokens_per_s(result: EngineResult) -> float:
    rate = measure(RequestColumns.of(result.requests)).total_token_throughput
    if rate is None:
        raise DataError("no request of the check completed")
    return rate


def known_machine(name: str, memory_bytes: int, model: ModelGeometry) -> Device:
    """A machine whose step times are known, with the KV cache that vLLM would make of its memory."""
    profile = DeviceProfile(name, name, memory_bytes, 1.0, 1.0, "measured")
    layout = layout_with(model, SINGLE, _TOKENS, DEFAULT_VLLM)
    tokens = kv_capacity_tokens(
        profile, model, start_up(), max_num_seqs=_SEQS, max_num_batched_tokens=_TOKENS, layout=layout
    )
    return replace(unknown_device(name, model.name), kv_capacity_tokens=tokens)


def refuse_existing(path: Path) -> None:
    """Raise UsageError for a profile that exists."""
    if path.exists():
        raise UsageError(f"{path} exists; choose another --output-dir or remove it")


def write_profile(measured: MeasuredCosts, device: Device, model: str, folder: Path) -> Path:
    """Write calibration.json and profile.toml, which refers to it. Raises UsageError if the profile exists."""
    path = folder / "profile.toml"
    refuse_existing(path)
    files.write_text(calibration_to_json(measured.calibration), folder / "calibration.json")
    files.write_text(_profile_text(measured, device, model), path)
    return path


def _profile_text(measured: MeasuredCosts, device: Device, model: str) -> str:
    """A profile whose rates follow from the measured steps; they are used only for models that were not measured."""
    geometry, cal = find_model(model), measured.calibration
    text = _PROFILE.format(
        format=FORMAT, name=_quoted(device.name), memory=_memory_bytes(device, geometry),
        bandwidth=geometry.weight_bytes / max(cal.alpha_d, 1e-6), flops=2.0 * geometry.params / max(cal.beta_p, 1e-9),
        seqs=_SEQS, tokens=_TOKENS, source=_quoted(cal.source), model=_quoted(measured_name(model)),
    )  # fmt: skip
    host = _HOST.format(model=_quoted(geometry.name), request_s=measured.request_s)
    return text + (host if measured.request_s else "")


_PROFILE = """# Written by `ebbench calibrate`. Rates are what the measured steps imply, not a data sheet's.
format = {format}
name = {name}
gpu = {name}
memory_bytes = {memory}
bandwidth_bytes_per_s = {bandwidth:.4g}
bf16_flops_per_s = {flops:.4g}
max_num_seqs = {seqs}
max_num_batched_tokens = {tokens}
provenance = {source}

[measured]
{model} = "calibration.json"
"""
_HOST = """
[host.{model}]
step_s = 0  # what the host does in a step is in the measured steps
sequence_s = 0
request_s = {request_s:.4g}
source = "measured: taking a request in and forgetting it, beside its steps"
"""


def _memory_bytes(device: Device, geometry: ModelGeometry) -> int:
    """Memory in bytes of which vLLM would have made this KV cache; the machine's where its size is unknown."""
    if device.kv_capacity_tokens:
        start = start_up()
        used = geometry.weight_bytes + device.kv_capacity_tokens * geometry.kv_bytes_per_token
        used += DeviceProfile.context_bytes + reserve_bytes(geometry, start, _SEQS, _TOKENS)
        return ceil(used / start.gpu_memory_utilization)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "/").replace('"', "'") + '"'
