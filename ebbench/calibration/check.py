"""Writes the profile of a calibration and checks its prediction on a run that was not used for the fit."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path

import pyarrow.compute as pc

from ebbench.analysis.columns import RequestColumns
from ebbench.analysis.metrics import measure
from ebbench.calibration.measure import MeasuredCosts, ProbeGrid
from ebbench.calibration.rounds import SteppedVllm, run_closed_loop
from ebbench.config.declare import DEFAULT_VLLM
from ebbench.devices.base import SINGLE, Device, start_up
from ebbench.devices.capacity import kv_capacity_tokens, layout_with, reserve_bytes
from ebbench.devices.geometry import ModelGeometry
from ebbench.devices.gridcost import GridCost
from ebbench.devices.profiles import FORMAT, DeviceProfile, find_model, measured_name
from ebbench.engines.base import Engine, EngineResult
from ebbench.engines.setup import unknown_device
from ebbench.engines.sim import SimEngine
from ebbench.errors import DataError, UsageError
from ebbench.records import files
from ebbench.records.plan import Plan
from ebbench.spec.server import EngineOptions
from ebbench.workloads import build_plan
from vllm_eb.calibration import calibration_to_json
from vllm_eb.policy import parse_policy

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
    plan = _check_plan(grid, requests)
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

    @classmethod
    def beside(cls, grid: ProbeGrid, vllm: SteppedVllm, requests: int) -> SteppedRuns:
        """Requests of lengths within the grid, at a concurrency between its batch sizes; one run per round."""
        return cls(vllm, _check_plan(grid, requests), every=grid.probes)

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


def _check_plan(grid: ProbeGrid, requests: int) -> Plan:
    """Lengths in the middle of the measured range, at half the largest batch size."""
    return build_plan(
        "balanced",
        num_prompts=requests,
        seed=11,
        source="profile",
        max_concurrency=max(grid.seqs[-1] // 2, 2),
        input_len=max(grid.tokens[-1] // 4, 4),
        output_len=max(grid.contexts[-1] // 4, 8),
    )


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
    geometry = find_model(model)
    cal = measured.calibration
    flops = 2.0 * geometry.params / max(cal.beta_p, 1e-9)
    bandwidth = geometry.weight_bytes / max(cal.alpha_d, 1e-6)
    lines = [
        "# Written by `ebbench calibrate`. Rates are what the measured steps imply, not a data sheet's.",
        f"format = {FORMAT}",
        f"name = {_quoted(device.name)}",
        f"gpu = {_quoted(device.name)}",
        f"memory_bytes = {_memory_bytes(device, geometry)}",
        f"bandwidth_bytes_per_s = {bandwidth:.4g}",
        f"bf16_flops_per_s = {flops:.4g}",
        f"max_num_seqs = {_SEQS}",
        f"max_num_batched_tokens = {_TOKENS}",
        f"provenance = {_quoted(cal.source)}",
        "",
        "[measured]",
        f'{_quoted(measured_name(model))} = "calibration.json"',
        "",
    ]
    if measured.request_s:
        lines += [
            f"[host.{_quoted(geometry.name)}]",
            "step_s = 0  # what the host does in a step is in the measured steps",
            "sequence_s = 0",
            f"request_s = {measured.request_s:.4g}",
            'source = "measured: taking a request in and forgetting it, beside its steps"',
            "",
        ]
    return "\n".join(lines)


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
