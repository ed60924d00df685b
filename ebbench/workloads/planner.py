"""From a wish (what the command line says) to a Plan: the table of contents of this package."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from ebbench.config.strict_toml import not_positive
from ebbench.errors import UsageError
from ebbench.records.plan import Plan
from ebbench.traffic.schedule import Load, Schedule, make_schedule
from ebbench.traffic.spec import Replay, ScenarioSpec, load_scenario
from ebbench.workloads.build import Limits, assemble, phase_requests
from ebbench.workloads.lengths import length_spec
from ebbench.workloads.requests import Requests
from ebbench.workloads.sources import Ask, gather
from ebbench.workloads.spec import Profile, WorkloadSpec, load_workload
from ebbench.workloads.trace import read_trace, replayed

_TRACE = "trace:"


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
    burstiness: float | None = None
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
            if problem := not_positive(key.replace("_", " "), getattr(self, key)):
                raise UsageError(problem)
        if self.seed < 0:
            raise UsageError(f"seed must be 0 or more, not {self.seed}")

    @property
    def lengths_set(self) -> bool:
        """Whether the caller set lengths."""
        return not (self.input_len is None and self.output_len is None and self.length_distribution is None)

    @property
    def load(self) -> Load:
        """The part that sets the load."""
        return Load(self.max_concurrency, self.request_rate, self.saturation_rate, self.burstiness)


_POSITIVE = (
    "num_prompts", "max_concurrency", "request_rate", "saturation_rate", "burstiness", "input_len", "output_len",
    "speed", "max_model_len",
)  # fmt: skip


def make_plan(wish: Wish) -> Plan:
    """Build the plan. Raises UsageError, InputFileError, RunError."""
    trace = wish.workload.startswith(_TRACE)
    scenario = load_scenario(wish.scenario or ("trace" if trace else "saturated"))
    workload = None if trace else load_workload(wish.workload)
    _check(wish, scenario, workload)
    requests, schedule = _from_trace(wish, scenario) if workload is None else _from_workload(wish, scenario, workload)
    cap = wish.max_concurrency or scenario.max_concurrency
    limits = Limits(wish.max_model_len, wish.drop_too_long)
    facts = _facts(wish, scenario, requests)
    return assemble(requests, schedule, limits, cap=cap, seed=wish.seed, facts=facts)


def _check(wish: Wish, scenario: ScenarioSpec, workload: WorkloadSpec | None) -> None:
    """Refuse what would otherwise be ignored without a word. ``workload`` None: a trace."""
    _check_times(wish, scenario, trace=workload is None)
    _check_requests(wish, scenario, workload)


def _check_times(wish: Wish, scenario: ScenarioSpec, *, trace: bool) -> None:
    if scenario.loop == "trace" and not trace:
        raise UsageError(f"scenario {scenario.name!r} replays recorded times; it needs a workload trace:FILE")
    if scenario.loop == "trace" and wish.request_rate is not None:
        raise UsageError("a replayed trace has its own rate; use --speed, or --scenario poisson with its lengths")
    if scenario.loop != "open" and wish.burstiness is not None:
        raise UsageError(f"burstiness shapes the gaps of gamma arrivals; scenario {scenario.name!r} has none")
    if scenario.loop != "trace" and wish.speed not in (None, 1.0):
        raise UsageError(f"speed scales recorded times; scenario {scenario.name!r} has none")
    if wish.saturation_rate is not None and wish.request_rate is not None:
        raise UsageError("--request-rate and --saturation-rate both set the rate; leave one of them out")
    if wish.saturation_rate is not None and all(phase.share is None for phase in scenario.phases):
        raise UsageError(f"scenario {scenario.name!r} has no share of saturation; leave out --saturation-rate")


def _check_requests(wish: Wish, scenario: ScenarioSpec, workload: WorkloadSpec | None) -> None:
    trace = workload is None
    if wish.lengths_set and (trace or scenario.own_lengths):
        owner = "a trace" if trace else f"scenario {scenario.name!r}"
        raise UsageError(f"{owner} brings its own lengths; leave out --input-len, --output-len and the distribution")
    if trace and wish.source not in ("auto", f"file:{wish.workload.removeprefix(_TRACE)}"):
        raise UsageError(f"a trace is its own source; leave out --source {wish.source}")
    if not trace and scenario.own_lengths and wish.source not in ("auto", "profile"):
        raise UsageError(f"scenario {scenario.name!r} brings its own lengths; leave out --source {wish.source}")
    if wish.tokenizer is not None and (textless := _textless(wish, scenario, workload)):
        raise UsageError(f"--tokenizer counts the tokens of texts; {textless} has none, leave it out")


def _textless(wish: Wish, scenario: ScenarioSpec, workload: WorkloadSpec | None) -> str:
    """What gives the requests, where that has no texts; empty where texts are read."""
    if scenario.own_lengths:
        return f"scenario {scenario.name!r}"
    if workload is None:
        return "a trace"
    if workload.records is None:
        return f"workload {workload.name!r}"
    if wish.source == "profile":
        return "--source profile"
    return "a plan with lengths set by options" if wish.lengths_set else ""


def _from_workload(wish: Wish, scenario: ScenarioSpec, workload: WorkloadSpec) -> tuple[Requests, Schedule]:
    default = workload.num_prompts
    schedule = make_schedule(scenario, wish.load, wish.num_prompts, default, wish.seed)
    if scenario.own_lengths:
        return phase_requests(scenario, schedule.sizes, wish.seed), schedule
    ask = Ask(schedule.sessions, wish.seed, wish.lengths_set, wish.tokenizer, wish.with_text)
    requests = gather(workload, _profile(wish, workload), wish.source, ask)
    if requests.sessions < schedule.sessions:
        schedule = make_schedule(scenario, wish.load, requests.sessions, default, wish.seed)
    return requests, schedule


def _from_trace(wish: Wish, scenario: ScenarioSpec) -> tuple[Requests, Schedule]:
    if wish.workload == _TRACE:
        raise UsageError("trace: names no file; write trace:FILE")
    requests = read_trace(Path(wish.workload.removeprefix(_TRACE)).expanduser())
    if scenario.loop == "trace":
        return _replay(wish, scenario, requests)
    if scenario.own_lengths:
        schedule = make_schedule(scenario, wish.load, wish.num_prompts, requests.sessions, wish.seed)
        return phase_requests(scenario, schedule.sizes, wish.seed), schedule
    # The recorded lengths in their order, at the scenario's times.
    schedule = make_schedule(scenario, wish.load, wish.num_prompts, requests.sessions, wish.seed)
    if requests.sessions < schedule.sessions:
        have = requests.sessions
        note = f"the trace has {have} requests to give, {schedule.sessions} were asked for"
        requests = replace(requests, warnings=(*requests.warnings, note))
        schedule = make_schedule(scenario, wish.load, have, have, wish.seed)
    return _first(requests, schedule.sessions), schedule


def _replay(wish: Wish, scenario: ScenarioSpec, requests: Requests) -> tuple[Requests, Schedule]:
    replay = scenario.replay or Replay()
    if wish.speed is not None:
        replay = msgspec.structs.replace(replay, speed=wish.speed)
    requests = replayed(requests, replay)
    if wish.num_prompts is not None and wish.num_prompts > requests.sessions:
        note = f"the trace has {requests.sessions} requests to give, {wish.num_prompts} were asked for"
        requests = replace(requests, warnings=(*requests.warnings, note))
    requests = _first(requests, wish.num_prompts or requests.sessions)
    return requests, Schedule((scenario.name,), (requests.sessions,), arrival_s=requests.arrival_s)


def _first(requests: Requests, sessions: int) -> Requests:
    return requests.keep(requests.session < sessions) if sessions < requests.sessions else requests


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
    """What the manifest should say beside the counts; only plain values."""
    own = {"source": "scenario", "source_reason": f"{scenario.name} brings its own lengths"}
    return {
        "workload": wish.workload,
        "scenario": scenario.name,
        "loop": scenario.loop,
        "seed": wish.seed,
        **({"request_rate": wish.request_rate} if wish.request_rate else {}),
        **({"saturation_rate": wish.saturation_rate} if wish.saturation_rate else {}),
        **(own if scenario.own_lengths else requests.facts),
    }
