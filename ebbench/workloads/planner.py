"""From a wish (what the command line says) to a Plan: the table of contents of this package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from ebbench.errors import UsageError
from ebbench.records.plan import Plan
from ebbench.traffic.schedule import Load, make_schedule
from ebbench.traffic.spec import ScenarioSpec, load_scenario
from ebbench.workloads.build import Limits, assemble, phase_requests
from ebbench.workloads.lengths import length_spec
from ebbench.workloads.profile import draw_requests
from ebbench.workloads.requests import Requests
from ebbench.workloads.spec import Profile, WorkloadSpec, load_workload


@dataclass(frozen=True)
class Wish:
    """The arguments of :func:`ebbench.workloads.build_plan`, checked."""

    workload: str
    scenario: str | None = None
    num_prompts: int | None = None
    seed: int = 0
    source: str = "auto"
    max_concurrency: int | None = None
    request_rate: float | None = None
    saturation_rate: float | None = None
    input_len: int | None = None
    output_len: int | None = None
    length_distribution: str | None = None
    speed: float | None = None
    max_model_len: int | None = None
    drop_too_long: bool = False
    tokenizer: str | None = None
    with_text: bool = True

    def __post_init__(self) -> None:
        for key in _POSITIVE:
            value = getattr(self, key)
            if value is not None and not value > 0:
                raise UsageError(f"{key.replace('_', ' ')} must be positive, not {value:g}")
        if self.seed < 0:
            raise UsageError(f"seed must be 0 or more, not {self.seed}")

    @property
    def own_lengths(self) -> bool:
        """Whether the caller set lengths."""
        return not (self.input_len is None and self.output_len is None and self.length_distribution is None)

    @property
    def load(self) -> Load:
        """The part that sets the load."""
        return Load(self.max_concurrency, self.request_rate, self.saturation_rate)


_POSITIVE = (
    "num_prompts", "max_concurrency", "request_rate", "saturation_rate", "input_len", "output_len", "speed",
    "max_model_len",
)  # fmt: skip


def make_plan(wish: Wish) -> Plan:
    """Build the plan. Raises UsageError, InputFileError, RunError."""
    scenario = load_scenario(wish.scenario or "saturated")
    workload = load_workload(wish.workload)
    schedule = make_schedule(scenario, wish.load, wish.num_prompts, workload.num_prompts, wish.seed)
    requests = _requests(wish, scenario, workload, schedule.sizes)
    cap = wish.max_concurrency or scenario.max_concurrency
    limits = Limits(wish.max_model_len, wish.drop_too_long)
    return assemble(requests, schedule, limits, cap=cap, seed=wish.seed, facts=_facts(wish, scenario, requests))


def _requests(wish: Wish, scenario: ScenarioSpec, workload: WorkloadSpec, sizes: tuple[int, ...]) -> Requests:
    if scenario.own_lengths:
        return phase_requests(scenario, sizes, wish.seed)
    return draw_requests(_profile(wish, workload), sum(sizes), wish.seed)


def _profile(wish: Wish, workload: WorkloadSpec) -> Profile:
    """The workload's profile with the lengths the caller set."""
    profile = workload.profile
    if wish.input_len is not None or wish.length_distribution is not None:
        spec = length_spec(wish.input_len or profile.input.mean, wish.length_distribution)
        profile = msgspec.structs.replace(profile, input=spec)
    if wish.output_len is not None or wish.length_distribution is not None:
        spec = length_spec(wish.output_len or profile.output.mean, wish.length_distribution)
        profile = msgspec.structs.replace(profile, output=spec)
    return profile


def _facts(wish: Wish, scenario: ScenarioSpec, requests: Requests) -> dict[str, Any]:
    return {
        "workload": wish.workload,
        "scenario": scenario.name,
        "seed": wish.seed,
        "source": "scenario" if scenario.own_lengths else "profile",
        "source_reason": "",
        **requests.facts,
    }
