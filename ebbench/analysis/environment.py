"""The environment of a run: hardware, software and settings. Runs are compared only if their environments agree."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ebbench.config.declare import declared_in
from ebbench.errors import check_known
from ebbench.records.manifest import Manifest
from ebbench.records.plan import ClosedPhase
from ebbench.records.warnings import ESTIMATED
from ebbench.spec.server import AUTO, OFF, EngineOptions
from vllm_eb.policy import PolicyError, parse_policy, settings_in_effect

# The load of a run (number and rate of sessions) and its machine (GPUs and scheduler limits).

_ONE_DEVICE = frozenset({"sim", "emulated"})
"""Engines that run on one GPU unless the manifest says otherwise."""


@dataclass(frozen=True)
class LoadFacts:
    """Number and rate of sessions. Rates in sessions/s; None if not applicable or not recorded.

    ``phases``: steps of a closed loop. ``max_concurrency``: its only level, or the cap of an open loop. ``rates``:
    rates of an open loop's phases by name, if the scenario sets them. ``lengths``: prompt and output lengths as the
    workload describes them. ``replayed``: times and lengths come from a trace, independent of the seed.
    ``sessions_by_seed``: the number of sessions depends on the seed. ``duration_s``: time during which sessions were
    released. ``trace``: how a trace's times were read, with rate and duration, in words. ``trace_rate``: its requests/s
    at the replayed speed. ``single_requests``: every session is one request.
    """

    sessions: int
    request_rate: float | None = None
    saturation_rate: float | None = None
    burstiness: float | None = None
    speed: float | None = None
    ramp_up_s: float | None = None
    max_concurrency: int | None = None
    phases: tuple[ClosedPhase, ...] = ()
    rates: tuple[tuple[str, float], ...] = ()
    lengths: str = ""
    replayed: bool = False
    sessions_by_seed: bool = False
    duration_s: float | None = None
    trace: str = ""
    trace_rate: float | None = None
    single_requests: bool = False
    begun_before: str = ""
    priorities: Mapping[str, int] = field(default_factory=dict)  # by class, the lowest first; empty: all alike

    @property
    def open_loop(self) -> bool:
        """Whether requests arrive at fixed times, independent of the completion of earlier ones."""
        return not self.phases

    def parts(self) -> dict[str, str]:
        """The load in words, by part; parts that do not apply are left out."""
        sessions = f"{self.sessions:,} {'request' if self.single_requests else 'session'}{'s' * (self.sessions != 1)}"
        parts = {"sessions": sessions}
        if self.duration_s is not None:
            if self.phases:
                parts["sessions"] = f"at most {sessions}"
            parts["duration"] = f"released for {self.duration_s:g} s"
        if len(self.phases) > 1:
            steps = " then ".join(f"{phase.sessions:,} at {phase.max_concurrency:,}" for phase in self.phases)
            parts["concurrency"] = f"concurrency by phase: {steps}"
        elif self.max_concurrency is not None:
            what = "concurrency" if self.phases else "concurrency cap"
            parts["concurrency"] = f"{what} {self.max_concurrency:,}"
        if self.request_rate is not None:
            parts["rate"] = f"rate {self.request_rate:g}/s"
        elif self.rates:
            parts["rate"] = f"rate {' then '.join(f'{rate:g}/s' for _, rate in self.rates)}"
        named = {
            "saturation rate": self.saturation_rate,
            "burstiness": self.burstiness,
            "speed": None if self.speed == 1 else self.speed,
        }
        parts |= {name: f"{name} {value:g}" for name, value in named.items() if value is not None}
        if self.ramp_up_s:
            parts["ramp-up"] = f"ramp-up {self.ramp_up_s:g} s"
        if self.begun_before:
            parts["session start"] = self.begun_before
        if self.priorities:
            parts["priorities"] = "priorities " + " ".join(f"{name}={value}" for name, value in self.priorities.items())
        return parts

    def conditions(self) -> dict[str, str]:
        """The parts in which runs must agree to be averaged, and the lengths."""
        parts = self.parts()
        if self.sessions_by_seed:
            del parts["sessions"]
        return parts | {"lengths": self.lengths}

    def __str__(self) -> str:
        return ", ".join(self.parts().values())


def load_of_run(manifest: Manifest) -> LoadFacts:
    """The load recorded in a manifest."""
    facts = manifest.facts
    levels = {phase.max_concurrency for phase in manifest.phases}
    rates: Mapping[str, Any] = facts.get("phase_rates") or {}
    ways = {"input_lengths": "in", "output_lengths": "out"}
    trace_rate = _number(facts.get("trace_requests_per_s"))
    named = ("request_rate", "saturation_rate", "burstiness", "speed", "ramp_up_s", "duration_s")
    numbers = {name: _number(facts.get(name)) for name in named}
    begun_before = ""
    if facts.get("begun_before"):
        where = f"in {facts['session_start']} of their course, {facts['primed_tokens']:,} tokens cached"
        begun_before = f"{facts['begun_before']:,} sessions begun before ({where})"
    return LoadFacts(
        sessions=sum(phase.sessions for phase in manifest.phases)
        or int(facts.get("sessions") or manifest.rows.get("plan", 0)),
        **numbers,
        max_concurrency=next(iter(levels)) if len(levels) == 1 else manifest.max_concurrency,
        phases=manifest.phases,
        rates=tuple((name, float(rate)) for name, rate in rates.items()),
        lengths=", ".join(f"{facts[name]} {way}" for name, way in ways.items() if name in facts),
        replayed=facts.get("loop") == "trace",
        sessions_by_seed=bool(facts.get("sessions_by_seed")),
        trace=time_note(facts),
        trace_rate=None if trace_rate is None else trace_rate * (numbers["speed"] or 1.0),
        single_requests=facts.get("requests") == facts.get("sessions", 0),
        begun_before=begun_before,
        priorities=facts.get("priorities") or {},
    )


@dataclass(frozen=True)
class Machine:
    """Number of GPUs, how they are connected, and the scheduler's limits; None if not recorded.

    ``max_num_batched_tokens`` is B and ``max_num_seqs`` is N, per engine. ``link`` connects the GPUs of one engine.
    ``types``: data types of weights and KV cache that differ from the model's own.
    ``api_server``: class of the simulated API server; empty without. ``further``: other limits that were set, in words.
    ``reported``: what a server that ebbench did not start says of its settings, in words. ``policy_known``: False for
    such a server if it does not report its policy. ``cache_kept``: nothing emptied its prefix cache before the run.
    """

    gpus: int | None = None
    topology: str = ""
    dispatch: str = ""
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    link: str = ""
    types: str = ""
    api_server: str = ""
    further: str = ""
    reported: str = ""
    policy_known: bool = True
    cache_kept: bool = False

    def limits(self) -> str:
        """``B = 8,192 tokens per step, N = 1,024 sequences``; empty if neither was recorded."""
        limits = []
        if self.max_num_batched_tokens is not None:
            limits.append(f"B = {self.max_num_batched_tokens:,} tokens per step")
        if self.max_num_seqs is not None:
            limits.append(f"N = {self.max_num_seqs:,} sequences")
        if self.further:
            limits.append(self.further)
        return ", ".join(limits)

    def __str__(self) -> str:
        count = "" if self.gpus is None else f"{self.gpus:,} GPU{'' if self.gpus == 1 else 's'}"
        topology = f"{self.topology} over {self.link}" if self.link else self.topology
        return ", ".join(part for part in (count, topology, self.types, self.dispatch, self._api_server()) if part)

    def _api_server(self) -> str:
        return f"API server {self.api_server}" if self.api_server else ""


def flat_load(load: LoadFacts, machine: Machine, policy: str) -> dict[str, Any]:
    """Load, machine and the policy's settings as flat values for JSON and SQL; None if not recorded."""
    return {
        "load": str(load),
        "sessions": load.sessions,
        "request_rate": load.request_rate if load.request_rate is not None else load.trace_rate,
        "burstiness": load.burstiness,
        "max_concurrency": load.max_concurrency,
        "gpus": machine.gpus,
        "topology": machine.topology or None,
        "dispatch": machine.dispatch or None,
        "api_server": machine.api_server or None,
        "max_num_batched_tokens": machine.max_num_batched_tokens,
        "max_num_seqs": machine.max_num_seqs,
        "policy_settings": policy_settings(policy),
    }


def policy_settings(policy: str) -> dict[str, Any] | None:
    """The settings in force under a policy, with defaults; None for a name that is only a label."""
    try:
        spec = parse_policy(policy)
    except PolicyError:
        return None
    return {name: getattr(spec, name) for name in settings_in_effect(spec)}


def machine_of_run(manifest: Manifest) -> Machine:
    """The machine recorded in a manifest. A server that ebbench did not start has unknown limits."""
    facts, options = manifest.facts, manifest.options
    gpus = facts.get("gpus") or facts.get("replicas") or (1 if manifest.engine in _ONE_DEVICE else None)
    foreign = manifest.engine == "endpoint"
    reports = (facts.get("server_reports") or {}) if foreign else {}
    # Only what was asked for, and only what the server says.
    kv = options.get("kv_cache_dtype") or "auto"
    asked = {"weights": options.get("quantization"), "KV cache": None if kv == "auto" else kv}
    words = {
        "policy": "policy {}",
        "num_kv_blocks": "{:,} KV blocks",
        "kv_cache_tokens": "{:,} KV tokens",
        "block_size": "blocks of {:,} tokens",
        "kv_cache_dtype": "KV cache type {}",
        "gpu_memory_utilization": "{:.0%} of the GPU memory",
    }
    parts = [text.format(reports[name]) for name, text in words.items() if reports.get(name) is not None]
    if "enable_prefix_caching" in reports:
        parts.append(f"prefix caching {'on' if reports['enable_prefix_caching'] else 'off'}")
    return Machine(
        gpus=None if gpus is None else int(gpus),
        topology=str(facts.get("topology") or (f"dp={facts['replicas']}" if "replicas" in facts else "")),
        dispatch=str(facts.get("dispatch") or ""),
        max_num_batched_tokens=options.get("max_num_batched_tokens"),
        max_num_seqs=options.get("max_num_seqs"),
        link=str(facts.get("link") or ""),
        types=", ".join(f"{what} in {dtype}" for what, dtype in asked.items() if dtype),
        api_server=_simulated_server(manifest),
        further=_further_limits(_in_effect(manifest)),
        reported=", ".join(parts),
        policy_known=not foreign or bool(reports.get("policy")),
        cache_kept=facts.get("prefix_cache_reset") is False and reports.get("enable_prefix_caching") is not False,
    )


def _further_limits(options: Mapping[str, Any]) -> str:
    """``at most 64 running, refuses from 16,384 queued prompt tokens on``; only what is not the default."""
    declared = declared_in(EngineOptions)
    conditions = [declared[name].condition(value) for name, value in options.items() if name in declared.keys() - _MAIN]
    return ", ".join(filter(None, conditions))


_MAIN = {"max_num_batched_tokens", "max_num_seqs"}
"""Limits that are shown of every run."""


def _simulated_server(manifest: Manifest) -> str:
    """``datacenter x 2``: the class and, where given, how many processes; empty where it is off or not recorded."""
    asked, count = manifest.options.get(API_SERVER), manifest.options.get(f"{API_SERVER}_count")
    name = manifest.facts.get(API_SERVER) or asked  # runs of earlier versions have no such fact
    return "" if name in (None, OFF, AUTO) else f"{name} x {count}" if count else str(name)


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


ENVIRONMENT = (
    "engine", "device", "driver", "vllm", "model", "workload", "scenario", "source", "options", "host", "endpoint",
)  # fmt: skip
"""Names of conditions that must agree. ``options``: scheduler settings and, for several engines, their topology.
``host``: the machine of a server. ``endpoint``: its API, and whether its tokens are an estimate."""
LATER = frozenset({"host", "endpoint"})
"""Conditions that older runs and baselines do not know; where they are empty they are in no hash."""

_FIRST_OPTIONS = frozenset(
    {
        "max_num_seqs", "max_num_batched_tokens", "long_prefill_token_threshold", "max_model_len", "block_size",
        "num_kv_blocks", "enable_prefix_caching", "async_scheduling",
    }
)  # fmt: skip
"""Options that every run recorded."""


@cache
def later_options() -> Mapping[str, Any]:
    """Options that older runs did not record, with the values that they ran with: the defaults."""
    declared = declared_in(EngineOptions)
    return {name: option.default for name, option in declared.items() if name not in _FIRST_OPTIONS} | {API_SERVER: OFF}


@cache
def usual_options() -> Mapping[str, Any]:
    """Options that an environment leaves out, with the values that they then have."""
    return {**later_options(), API_SERVER: AUTO}


FRONT_END_MS, API_SERVER = "front_end_ms", "api_server"
"""Names of options, and of the facts that say what was in effect: the option's value, else the device's, and the class
that was simulated under ``auto``."""
JOINED = ("topology", "link", "replicas", "dispatch", "decode_dispatch", "vllm_options")
"""Facts that count as options if a run has them: topology of several engines, options passed to vLLM unchanged.

Runs of a single engine without such options do not have them, so their stored baselines keep their hash.
"""

UNKNOWN = ""
UNKNOWN_DEVICE = "unknown"
"""Device name stored for a server that ebbench did not start, if nobody stated it."""


def run_environment(manifest: Manifest) -> dict[str, str]:
    """Conditions as text; a condition that a run does not record is empty and agrees only with an empty one."""
    # What tells the device from others of its name: an own profile's numbers, or the machine of a server. Two servers
    # whose device nobody stated are not comparable across machines, however alike their addresses are.
    unstated = manifest.device == UNKNOWN_DEVICE and not manifest.facts.get("host_label")
    machine = manifest.facts.get("server_machine") if unstated else None
    facts = (machine or manifest.facts.get("device_profile"), manifest.facts.get("kernel_library"))
    known = ", ".join(filter(None, facts))
    in_effect = _in_effect(manifest).items()
    options = {name: value for name, value in in_effect if usual_options().get(name, UNKNOWN) != value}
    options |= {name: manifest.facts[name] for name in JOINED if name in manifest.facts}
    endpoint = str(manifest.facts.get("endpoint") or "")
    estimated = "estimated tokens" if manifest.facts.get(ESTIMATED) else ""
    return {
        "engine": manifest.engine,
        "device": f"{manifest.device} ({known})" if known else manifest.device,
        "driver": _recorded(manifest, "driver"),
        "vllm": _recorded(manifest, "vllm"),
        "model": _model(manifest),
        "workload": manifest.workload,
        "scenario": manifest.scenario,
        "source": manifest.source,
        "options": json.dumps(options, sort_keys=True),
        "host": run_host(manifest),
        "endpoint": ", ".join(filter(None, (endpoint if endpoint != "completions" else "", estimated))),
    }


def run_host(manifest: Manifest) -> str:
    """The machine of a server: as the user labelled it, else what is known of it where only its device was stated."""
    facts = manifest.facts
    label = facts.get("host_label")
    if not label and manifest.device != UNKNOWN_DEVICE:
        label = facts.get("server_machine")
    return str(label or UNKNOWN)


def _model(manifest: Manifest) -> str:
    """The model with what tells it from others of its name: an own shape, and the models that answered in its place."""
    others = manifest.facts.get("other_models")
    answers = f"answers of {', '.join(sorted(others))}" if others else ""
    known_facts = ", ".join(filter(None, [manifest.facts.get("model_shape"), answers]))
    return f"{manifest.model} ({known_facts})" if known_facts else manifest.model


def _in_effect(manifest: Manifest) -> dict[str, Any]:
    """The options, with what the device brought along in place of those that were left out.

    A run of a version whose devices brought less differs in them, although both left them out.
    """
    # Runs under auto are of one kind, with a simulated server or without: a warning says which. Earlier versions
    # recorded off for those without.
    asked = manifest.options.get(API_SERVER, AUTO)
    off = OFF if API_SERVER in manifest.facts else AUTO
    return manifest.options | {
        FRONT_END_MS: manifest.facts.get(FRONT_END_MS),
        API_SERVER: off if asked == OFF else asked,
    }


def unusual_options(options: Mapping[str, Any]) -> str:
    """The later options, except ``warmup``, that differ from the values of older runs, as text."""
    usual = {name: value for name, value in later_options().items() if name != "warmup"}
    given = {name: options.get(name, value) for name, value in usual.items()}
    return json.dumps({name: value for name, value in given.items() if value != usual[name]}, sort_keys=True)


def _recorded(manifest: Manifest, name: str) -> str:
    """A version that the engine recorded, among the versions or the facts."""
    version: Any = manifest.versions.get(name) or manifest.facts.get(name) or manifest.facts.get(f"{name}_version")
    return str(version) if version else UNKNOWN


def describe_load(manifest: Manifest) -> str:
    """The load in words: number and rate of sessions."""
    if manifest.phases:
        return ", ".join(
            f"{phase.sessions} sessions at concurrency {phase.max_concurrency}" for phase in manifest.phases
        )
    facts = manifest.facts
    given = {
        "rate": facts.get("request_rate"),
        "saturation rate": facts.get("saturation_rate"),
        "burstiness": facts.get("burstiness"),
        "speed": facts.get("speed"),
        "concurrency cap": manifest.max_concurrency,
    }
    shown = [f"{name} {value:g}" for name, value in given.items() if value is not None]
    return ", ".join([f"{facts.get('sessions') or manifest.rows.get('plan', 0)} sessions", *shown])


def comparison_conditions(environment: Mapping[str, str], load: LoadFacts) -> dict[str, str]:
    """Everything that the figures of a run depend on besides policy and seed: name and text, options one by one.

    Only runs that agree in all conditions are averaged and get gains.
    """
    conditions = {name: environment.get(name, UNKNOWN) for name in ENVIRONMENT if name != "options"}
    options = environment.get("options", UNKNOWN)
    named = {name: str(value) for name, value in (json.loads(options) if options else {}).items()}
    return conditions | load.conditions() | named


class Difference(NamedTuple):
    """What two environments differ in: a key of ENVIRONMENT, of ``options`` the option; both values as text."""

    key: str
    ours: str
    theirs: str
    option: str = ""

    def __str__(self) -> str:
        """``device: h200 against l40s``."""
        return f"{self.key}.{self.option}".rstrip(".") + f": {self.ours} against {self.theirs}"


def differences(first: Mapping[str, str], other: Mapping[str, str], allowed: Sequence[str] = ()) -> list[Difference]:
    """What two environments differ in, apart from ``allowed`` keys; options one by one."""
    unlike = []
    for name in ENVIRONMENT:
        ours, theirs = first.get(name, UNKNOWN), other.get(name, UNKNOWN)
        if ours == theirs or name in allowed:
            continue
        if name != "options":
            unlike.append(Difference(name, ours or _UNRECORDED, theirs or _UNRECORDED))
            continue
        sides = [json.loads(text) if text else {} for text in (ours, theirs)]
        for option in sorted({*sides[0], *sides[1]}):
            values = [side.get(option, usual_options().get(option)) for side in sides]
            if values[0] != values[1]:
                unlike.append(Difference(name, str(values[0]), str(values[1]), option))
    return unlike


_UNRECORDED = "not recorded"


def differing_names(environments: Sequence[Mapping[str, str]]) -> list[str]:
    """Names of conditions in which any environment differs from the first; options by their own names."""
    unlike = [difference for other in environments[1:] for difference in differences(environments[0], other)]
    return list(dict.fromkeys(difference.option or difference.key for difference in unlike))


def listed(unlike: Sequence[Difference]) -> str:
    """The differences in one line."""
    return "; ".join(map(str, unlike))


def remedy(unlike: Sequence[Difference]) -> str:
    """The options that allow these differences."""
    return " ".join(f"--allow {key}" for key in dict.fromkeys(difference.key for difference in unlike))


def check_allowed(names: Sequence[str]) -> tuple[str, ...]:
    """``names``, if all are in ENVIRONMENT. Raises UnknownNameError otherwise."""
    for name in names:
        check_known("environment key", name, ENVIRONMENT)
    return tuple(names)


def time_note(facts: Mapping[str, Any]) -> str:
    """How a replayed trace's times were read, with its rate and duration; empty without a replay."""
    unit = facts.get("time_unit")
    if unit is None:
        return ""
    from ebbench.workloads.recorded import NAMES, short_number

    rate = facts["trace_requests_per_s"]
    what = f"{facts['trace_requests']:,} requests over {short_number(facts['trace_span_s'])} s"
    rated = f", {short_number(rate)} per second" if rate is not None else ""
    speed = facts.get("speed", 1.0)
    scaled = "" if speed == 1.0 else f"; replayed {speed:.4g} times as fast"
    name = Path(str(facts["source"]).removeprefix("file:")).name
    named = ", ".join(f"{role} = {column}" for role, column in facts.get("columns", {}).items())
    columns = f"; columns: {named}" if named else ""
    reason = facts["time_unit_reason"]
    return f"trace {name}: {what}{rated}; its times are read as {NAMES[unit]} ({reason}){scaled}{columns}"
