"""The cells of the policy matrix: settings, policies, and the figures of their simulated runs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ebbench.devices.base import Device
from ebbench.devices.loader import load_device
from ebbench.engines.sim import SimEngine
from ebbench.errors import UsageError
from ebbench.papers.protocols import VLLM
from ebbench.papers.staggered import deployed
from ebbench.records.plan import Plan
from ebbench.spec.server import EngineOptions
from ebbench.workloads import build_plan
from vllm_eb.policy import parse_policy

TTFT_S, TPOT_S = 10.0, 0.1
MARGINAL, SHORTEST = "marginal", "marginal:order=shortest"
SLO = f"marginal:ttft={TTFT_S:g},tpot={TPOT_S:g}"
BUDGETS = ("v1:budget=2048", "v1:budget=4096")
BATCHWAIT, SLOCHUNK = "batchwait:iters=32,ratio=0.5", f"slochunk:tpot={TPOT_S:g}"
POLICIES = (
    "v1", *BUDGETS, "v1:order=shortest", "eb", "eb:order=shortest", "ebplus",
    "cadence:every=32,escape=off", "ppas", "delayer", BATCHWAIT, f"{BATCHWAIT},order=shortest", SLOCHUNK,
    f"{SLOCHUNK},order=shortest", MARGINAL, SHORTEST, SLO,
)  # fmt: skip
OWN = (MARGINAL, SHORTEST, SLO)
"""This project's policies; all others are their rivals."""
POOLS = ("1p3d", "2p2d", "3p1d")
"""Topologies with prefill and decode apart, on as many GPUs; their instances schedule by vLLM's own rules."""

TARGETS = (
    ("rtx-pro-6000", "qwen3-8b"),
    ("h200", "qwen3-8b"),
    ("l40s", "qwen3-8b"),
    ("rtx-pro-6000", "qwen3-30b-a3b"),
    ("h200", "qwen3-30b-a3b"),
)
FOUR_GPU_TARGETS = TARGETS[:2]
MIDDLE = EngineOptions(max_num_seqs=1024, max_num_batched_tokens=14336)
LARGE = EngineOptions(max_num_seqs=2048, max_num_batched_tokens=18432)
LONG = EngineOptions(max_num_seqs=256, max_num_batched_tokens=16384)
LENGTHS: dict[str, Any] = {"workload": "balanced", "input_len": 512, "output_len": 256}
LONG_LENGTHS: dict[str, Any] = {
    "workload": "balanced", "input_len": 25_000, "output_len": 64, "length_distribution": "fixed"
}  # fmt: skip
LONG_SCENARIO = Path(__file__).with_name("long-prompts.toml")
COLUMNS = ("intended_ns", "first_token_ns", "last_token_ns", "input_tokens", "output_tokens")


@dataclass(frozen=True)
class Setting:
    """One setting of the matrix.

    ``probe``: lengths and number of requests of the run that measures v1's saturation rate, for open loops whose load
    is a share of it. ``topology``: of four GPUs; ``seeded`` False: every seed gives the same plan.
    """

    name: str
    plan: Mapping[str, Any]
    options: EngineOptions = MIDDLE
    probe: Mapping[str, Any] | None = None
    topology: str | None = None
    seeded: bool = True


def settings(traces: Path | None) -> list[Setting]:
    """The settings of one GPU; those with traces only if the files are there."""
    made = [
        Setting("c=32", {**LENGTHS, "num_prompts": 2000, "max_concurrency": 32}),
        Setting("c=512", {**LENGTHS, "num_prompts": 4000, "max_concurrency": 512}),
        Setting("c=2048", {**LENGTHS, "num_prompts": 4000, "max_concurrency": 2048}),
    ]
    # A concurrency of 2,048 is only reached with more requests than that.
    counts = {"sharegpt": 4000, "longbench": 4000, "numinamath": 4000, "wildchat": 2100}
    for name, count in counts.items():
        made.append(
            Setting(name, {"workload": name, "source": "profile", "num_prompts": count, "max_concurrency": 2048})
        )
    for name in ("distribution-shift", "concurrency-shift"):
        made.append(Setting(name, {"workload": "balanced", "scenario": name}, LARGE))
    probe = {**LENGTHS, "num_prompts": 1500, "max_concurrency": 2048}
    for name in ("ramp", "bursts-gamma", "bursts-on-off"):
        made.append(Setting(name, {**LENGTHS, "scenario": name, "num_prompts": 2000}, probe=probe))
    long_probe = {**LONG_LENGTHS, "num_prompts": 150, "max_concurrency": 32}
    made.append(Setting("long-prompts", {**LONG_LENGTHS, "scenario": str(LONG_SCENARIO)}, LONG, probe=long_probe))
    for name, count in (("AzureLLMInferenceTrace_conv.csv", 2000), ("mooncake_conversation_trace.jsonl", 500)):
        if traces is not None and (traces / name).is_file():
            plan = {"workload": f"trace:{traces / name}", "num_prompts": count, "drop_too_long": True}
            made.append(Setting(name.split("_")[0].removesuffix("Trace"), plan, seeded=False))
    return made


def four_gpu_settings() -> list[Setting]:
    """The settings of the EB paper's table 20."""
    return [
        Setting(f"{mix} c={c}", {"workload": mix, "num_prompts": 2000, "max_concurrency": c}, topology="dp=4")
        for mix in ("prefill-heavy", "balanced", "decode-heavy")
        for c in (128, 256, 512)
    ]


@dataclass(frozen=True)
class Job:
    """A setting on a device with a seed, and the policies to run on the same plan."""

    device: str
    model: str
    setting: Setting
    seed: int = 0
    policies: Sequence[str] = POLICIES

    @property
    def cell(self) -> str:
        """The cell's name, without the seed."""
        where = f"{self.device} {self.model}"
        return f"4 x {where} {self.setting.name}" if self.setting.topology else f"{where} {self.setting.name}"


@dataclass(frozen=True)
class Outcome:
    """Throughput in tokens/s (input and output), mean latencies, share of requests within both targets.

    ``simulated_per_s``: requests simulated per CPU second.
    """

    tokens_per_s: float
    ttft_s: float
    tpot_ms: float
    attained: float
    simulated_per_s: float


def device_of(job: Job) -> Device | None:
    """The device; None where the model does not fit."""
    try:
        return load_device(job.device, job.model, vllm_version=VLLM)
    except UsageError:
        return None


def plan_of(job: Job, device: Device) -> Plan:
    """The plan of a job; measures v1's saturation rate first if the load is a share of it."""
    arguments = dict(job.setting.plan)
    if arguments.get("drop_too_long"):
        arguments["max_model_len"] = min(job.setting.options.max_model_len, device.kv_capacity_tokens)
    if job.setting.probe is not None:
        probe = build_plan(**job.setting.probe, seed=1)
        requests = SimEngine(figures_only=True).run(probe, parse_policy("v1"), device, job.setting.options).requests
        arguments["saturation_rate"] = len(probe) / (float(np.max(requests["end_ns"])) / 1e9)
    return build_plan(seed=job.seed, **arguments)


def run_job(job: Job) -> dict[str, Outcome] | None:
    """The outcomes of all policies on one plan; None where the model does not fit."""
    device = device_of(job)
    if device is None:
        return None
    plan = plan_of(job, device)
    pools = POOLS if job.setting.topology is not None and not job.seed else ()
    made = [(name, job.setting.topology, name) for name in job.policies]
    made += [(pool, pool, "v1") for pool in pools]
    found = {}
    for name, topology, policy in made:
        engine = SimEngine(topology=None if topology is None else deployed(topology), figures_only=True)
        begun_s = time.process_time()
        result = engine.run(plan, parse_policy(policy), device, job.setting.options)
        seconds = time.process_time() - begun_s
        if not result.invalid:
            columns = {column: np.asarray(result.requests[column]) for column in COLUMNS}
            found[name] = outcome(columns, len(plan) / seconds)
    return found


def outcome(columns: Mapping[str, np.ndarray], simulated_per_s: float) -> Outcome:
    """Figures of one run, in which every request completed."""
    first, last, intended = (columns[c] for c in ("first_token_ns", "last_token_ns", "intended_ns"))
    outputs = columns["output_tokens"]
    duration_s = (last.max() - intended.min()) / 1e9
    ttft_s = (first - intended) / 1e9
    tpot_s = (last - first) / 1e9 / np.maximum(outputs - 1, 1)
    within = (ttft_s <= TTFT_S) & ((tpot_s <= TPOT_S) | (outputs < 2))
    tokens = columns["input_tokens"] + outputs
    return Outcome(
        float(tokens.sum()) / duration_s,
        float(ttft_s.mean()),
        float(tpot_s.mean() * 1e3),
        float(within.mean()),
        simulated_per_s,
    )


def all_jobs(traces: Path | None) -> list[Job]:
    """Every cell of the matrix with the first seed."""
    jobs = [Job(device, model, setting) for device, model in TARGETS for setting in settings(traces)]
    return jobs + [Job(device, model, setting) for device, model in FOUR_GPU_TARGETS for setting in four_gpu_settings()]
