"""Prepares a run (plan, device, engine), or a series of them under several policies and seeds."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from ebbench.analysis.metrics import PRICE, parse_slo, refuse_unknown_classes
from ebbench.config.declare import DEFAULT_DEVICE, DEFAULT_MODEL
from ebbench.config.topology import TopologySpec
from ebbench.devices.base import SINGLE, Device, DeviceRequest, quantised, start_up
from ebbench.engines.base import (
    Engine,
    check_counts,
    check_fits,
    check_front_end,
    check_options,
    refuse_priorities,
    refuse_queue_limits,
    refuse_server_settings,
    refuse_simulated,
)
from ebbench.engines.setup import (
    chosen_engine,
    client_options,
    make_engine,
    policy_label,
    resolve_topology,
    select_engine,
    unknown_device,
    with_ramp,
)
from ebbench.errors import UnknownNameError, UsageError
from ebbench.process.interpreter import is_process_of_ebbench
from ebbench.records.plan import Plan
from ebbench.records.schema import with_columns
from ebbench.runs.file import starts_a_server, with_batch_limits
from ebbench.spec.commands import DEFAULTS
from ebbench.spec.run import RunSpec, known_settings, make_spec
from ebbench.spec.server import VIRTUAL_TIME, is_server, parse_speculative, with_acceptance
from ebbench.workloads import planner
from ebbench.workloads.options import PlanOptions, fitted_acceptance, is_mixture
from ebbench.workloads.planner import make_plan
from vllm_eb.policy import PolicySpec, UnknownPolicyError, descriptions, parse_policy, settings_of

T = TypeVar("T")


@dataclass(frozen=True)
class Prepared:
    """A run that can start. ``policy_stated``: the user named the policy, and did not leave it at its default."""

    spec: RunSpec
    policy: PolicySpec
    plan: Plan
    device: Device
    engine: Engine
    policy_stated: bool = True


def prepare(spec: RunSpec, engine: Engine | None = None) -> Prepared:
    """Plan, device and engine of a run; ``engine``: one that was started for several runs.

    Raises UsageError for settings that contradict each other, and what planner and devices raise.
    """
    policy = parse_policy(spec.policy)
    check_options(spec.server, [policy])
    plan, device = plan_of(spec), device_of(spec)
    engine = engine or make_engine(spec)[0]
    check_plan(spec, plan, device)
    return prepared(spec, policy, plan, device, engine)


def check_plan(spec: RunSpec, plan: Plan, device: Device) -> None:
    """Raise UsageError for a request that does not fit; the engine checks several GPUs, which hold more."""
    if not is_server(spec.engine) and spec.cluster.topology is None:
        check_fits(plan, device, spec.server)


def prepared(
    spec: RunSpec, policy: PolicySpec, plan: Plan, device: Device, engine: Engine, *, policy_stated: bool = True
) -> Prepared:
    """A prepared run from its parts. Raises UsageError for a ramp that the engine does not support."""
    plan, engine = with_ramp(plan, engine, spec.ramp_up_s)
    return Prepared(spec, policy, plan, device, engine, policy_stated)


def plan_of(spec: RunSpec) -> Plan:
    """The plan of a spec. Raises what the planner raises."""
    return _plan(spec.plan, spec.shuffle)


@lru_cache(maxsize=4)
def _plan(options: PlanOptions, shuffle: bool) -> Plan:
    plan = make_plan(options)
    return _frozen(shuffled(plan, options.seed) if shuffle else plan)


def shuffled(plan: Plan, seed: int) -> Plan:
    """The same requests in another order: lengths and contents move, arrival times stay."""
    order = pa.array(np.random.default_rng(seed).permutation(plan.table.num_rows))
    moved = {name: plan.table[name].take(order) for name in ("input_tokens", "output_tokens", "content")}
    return replace(plan, table=with_columns(plan.table, moved))


_loaded: dict[DeviceRequest, Device] = {}
KEPT_DEVICES = 8  # about 15 MB each


def device_of(spec: RunSpec, policies: Sequence[PolicySpec] = ()) -> Device:
    """The run's device with a KV cache sized for the scheduler's options; a placeholder for an external server.

    For vLLM it is this machine, with the costs that ``policies`` need (empty: the run's own policy). For a topology it
    is one unit of its first pool: the model may need several GPUs. Memory, batch size, budget and
    ``num_kv_blocks`` affect only the KV cache size, so kernel tables are loaded once. Raises UsageError.
    """
    if is_server(spec.engine):
        return unknown_device(spec.device, spec.model)
    name, model = spec.device or DEFAULT_DEVICE, spec.model or DEFAULT_MODEL
    if spec.real_time and select_engine(spec.engine)[0].name == "vllm":
        from ebbench.engines.costs import local_hardware

        policies = policies or [parse_policy(spec.policy)]
        calibration = None if spec.calibration is None else Path(spec.calibration)
        return local_hardware(
            policies, spec.server, model=model, device=spec.device, calibration=calibration,
            vllm_options=spec.vllm_options,
        )  # fmt: skip
    if spec.calibration is not None:
        raise UsageError(
            "--calibration is for vLLM on this machine (--engine vllm); a simulated device is given with --device"
        )
    from ebbench.devices.loader import load, parallel_shape, resized
    from ebbench.devices.profiles import as_decoder

    topology = resolve_topology(spec.cluster.topology, spec.plan.scenario, spec.cluster.link)
    options = spec.server
    request = DeviceRequest(
        name,
        as_decoder(model) if spec.assume_decoder else model,
        spec.cost,
        options.gpu_memory_utilization,
        options.max_num_seqs,
        options.max_num_batched_tokens,
        options.async_scheduling,
        options.enforce_eager,
        spec.host,
        SINGLE if topology is None else parallel_shape(topology),
        quantization=options.quantization,
        kv_cache_dtype=options.kv_cache_dtype,
        kv_tokens=None if options.num_kv_blocks is None else options.num_kv_blocks * options.block_size,
        vllm_version=options.vllm_version,
        speculative=options.drafts,
        assume_kernels=options.assume_kernels,
        prefix_caching=options.enable_prefix_caching,
        moe_backend=options.moe_backend,
    )
    key = replace(
        request, gpu_memory_utilization=None, max_num_seqs=None, max_num_batched_tokens=None, kv_tokens=None,
        prefix_caching=True,
    )  # fmt: skip
    if (kept := _loaded.get(key)) is not None:
        return kept if kept.profile is None else resized(kept, request)
    while len(_loaded) >= KEPT_DEVICES:
        del _loaded[next(iter(_loaded))]
    _loaded[key] = _frozen(load(request))
    return _loaded[key]


def _frozen(kept: T) -> T:
    """``kept``, excluded from garbage collections, which would otherwise visit it after every spec."""
    if is_process_of_ebbench():  # a program's own objects would be excluded, too
        gc.freeze()
    return kept


# A series: one load under several policies and seeds, of which all runs share an engine.


@dataclass(frozen=True)
class Series:
    """``spec``: the run of the first policy and seed; the others differ from it in these two only."""

    spec: RunSpec
    policies: tuple[PolicySpec, ...]
    repeats: int = 1
    until_clear: bool = False
    """Stop before ``repeats`` if more would not help."""
    policies_stated: bool = True
    """The user named the policies, and did not leave them at their default."""
    price_per_hour: float | None = None

    @property
    def runs(self) -> int:
        """Number of runs, at most."""
        return self.repeats * len(self.policies)

    def check(self) -> None:
        """Raise UsageError for settings that contradict each other."""
        check_counts(price_per_hour=self.price_per_hour)
        if classes := [name for name, _ in parse_slo([self.spec.goodput]).classes]:
            from ebbench.workloads.mixture import class_names

            refuse_unknown_classes(classes, class_names(self.spec.plan))
        check_options(self.spec.server, self.policies)
        if self.spec.cluster.topology is not None:
            refuse_queue_limits(self.spec.server, str(self.spec.cluster.topology))
        if is_server(self.spec.engine) and len(self.policies) > 1:
            raise UsageError(
                "a server runs the one policy it was started with; give one --policy, as a label, and one run per "
                "server"
            )

    def check_prompts(self, engine: Engine) -> None:
        """Raise UsageError for options of prompts that the engine, or its cache, makes no use of."""
        plan = self.spec.plan
        if plan.keep_text and engine.name in VIRTUAL_TIME:
            raise UsageError(f"--keep-text sends a log's prompts to a server; {engine.name} reads none, leave it out")
        if not is_server(self.spec.engine):
            refuse_priorities(_has_priorities(plan), self.spec.server)
        if plan.cache_hit_rate is not None and not self.spec.server.enable_prefix_caching:
            raise UsageError("--cache-hit-rate needs the prefix cache; leave out --no-prefix-caching")

    def labelled(self, engine: Engine) -> Series:
        """The series with the policy that a server reports, if none was given.

        Raises UsageError if it reports another one than was given, RunError if it is not ready.
        """
        if not is_server(self.spec.engine):
            return self
        label = policy_label(engine, self.policies[0], stated=self.policies_stated)
        return replace(self, policies=(label.policy,), spec=replace(self.spec, policy=label.policy.name))

    def plan(self, seed: int, device: Device) -> Plan:
        """The plan of one seed. Raises UsageError for a request that does not fit."""
        plan = planner.make_plan(replace(self.spec.plan, seed=seed))
        facts = {PRICE: self.price_per_hour} if self.price_per_hour is not None else {}
        facts |= {"until_clear": True} if self.until_clear else {}
        plan = replace(plan, facts={**plan.facts, **facts}) if facts else plan
        check_plan(self.spec, plan, device)
        return plan

    def prepared(self, policy: PolicySpec, plan: Plan, device: Device, engine: Engine) -> Prepared:
        """The run of ``policy`` on ``plan``, prepared."""
        spec = replace(self.spec, policy=policy.name)
        return prepared(spec, policy, plan, device, engine, policy_stated=self.policies_stated)


def without_load(spec: RunSpec) -> RunSpec:
    """The run without the settings of arrivals, which a closed loop has not."""
    return spec.changed(**dict.fromkeys(_OF_LOAD))


_OF_LOAD = ("request_rate", "burstiness", "speed", "time_unit", "duration_s", "saturation_rate", "rate_scale")


def needs_saturation(plan: PlanOptions) -> bool:
    """Whether the scenario's rates are shares of a saturated rate that was not given."""
    from ebbench.traffic.spec import load_scenario

    if plan.scenario is None or plan.request_rate is not None or plan.saturation_rate is not None:
        return False
    phases = load_scenario(plan.scenario).phases
    return any(phase.share is not None and phase.rate is None for phase in phases)


# A series from settings by name, as the command line, a file and keywords of Python give them.


def parse_series(settings: Mapping[str, Any]) -> Series:
    """The series of runs that settings describe, those of a command. Raises UsageError.

    ``settings``: the given ones by name; with a list of policies, ``goodput`` as text, and ``vllm_options`` as words.
    """
    settings = {**DEFAULTS, **settings}
    engine = settings["engine"]
    policies = settings.get("policy")
    if policies is not None:
        refuse_empty("policy", policies)
    settings = {name: value for name, value in settings.items() if name != "policy"} | {
        "vllm_options": tuple(settings.get("vllm_options") or ()),
    }
    _refuse_for_server(engine, settings)
    known = known_settings()
    if given := [name for name in settings if known[name].part == "client"]:  # refused without requests to send
        client_options(select_engine(engine)[0], given)
    limited = with_batch_limits({**settings, "engine": chosen_engine(engine)})
    spec = make_spec({**limited, "engine": engine}, with_text=True)
    topology = resolve_topology(spec.cluster.topology, spec.plan.scenario, None)
    chosen = parse_policies(policies or default_policies(engine, topology))
    return Series(
        replace(spec, policy=chosen[0].name),
        tuple(chosen),
        policies_stated=bool(policies),
    )


def default_policies(engine: str, topology: TopologySpec | None = None) -> tuple[str, ...]:
    """Policies to run by default; v1 alone on a server, which has its own, and for separate pools, with nothing to
    decide."""
    alone = is_server(engine) or (topology is not None and topology.disaggregated)
    return ("v1",) if alone else ("v1", "ebplus")


def parse_policies(names: Sequence[str]) -> list[PolicySpec]:
    """Policies in the order given. Raises UsageError for a repeated one, UnknownNameError for an unknown kind."""
    specs: list[PolicySpec] = []
    for name in names:
        kind = name.strip().partition(":")[0]
        if "," in kind:
            raise UsageError(f"policy {kind!r}: give each policy its own --policy")
        try:
            spec = parse_policy(name)
        except UnknownPolicyError:
            raise UnknownNameError("policy", kind, descriptions()) from None
        _check_seconds(spec)
        if spec in specs:
            raise UsageError(f"policy {spec.name} is given twice; give each policy once")
        specs.append(spec)
    return specs


def _check_seconds(spec: PolicySpec) -> None:
    """A policy's targets are in s, --goodput's limits in ms: raise UsageError for a value probably in the other
    unit."""
    for key, about in settings_of(type(spec)).items():
        given, most = getattr(spec, key), about.doubtful_from
        if about.unit == "s" and given is not None and most is not None and given >= most:
            raise UsageError(
                f"policy {spec.name}: {key}={given:g} is in seconds, and {most:,g} s or more is not a valid target; "
                f"for {given:g} ms write {key}={given / 1000:g}"
            )


def refuse_empty(name: str, values: Sequence[object]) -> None:
    """Raise UsageError for an empty list of alternatives: taken as left out, it would be the defaults."""
    if not values:
        raise UsageError(f"{name} is an empty list; give it a value or leave it out")


def each_once(option: str, values: Sequence[Any]) -> None:
    """Raise UsageError for a value that an option of alternatives lists twice: its results would stand there twice."""
    for place, value in enumerate(values):
        if value in values[:place]:
            raise UsageError(f"{option} {value} is given twice; give it once")


def checked_server(settings: Mapping[str, Any]) -> str:
    """The model of these settings as a simulation takes it.

    Raises UsageError for settings of OF_A_SERVER that it cannot have, before anything is simulated.
    """
    from ebbench.devices.loader import check_backend, check_drafts
    from ebbench.devices.profiles import as_decoder, find_model

    model = settings.get("model") or DEFAULT_MODEL
    name = as_decoder(model) if settings.get("assume_decoder") else model
    geometry = find_model(name)
    served = quantised(geometry, settings.get("quantization"), settings.get("kv_cache_dtype", "auto"))
    check_backend(settings.get("moe_backend", "auto"), served)
    if (drafts := settings.get("speculative")) is not None:
        known = fitted_acceptance(settings.get("workload", ""))
        check_drafts(parse_speculative(with_acceptance(drafts, known)), geometry)
    check_front_end(settings)
    if (version := settings.get("vllm_version")) is not None:
        start_up(version)
    return name


def _refuse_for_server(engine: str, settings: Mapping[str, Any]) -> None:
    """Raise UsageError for settings that a real server, or one which already runs, would not take."""
    if is_server(engine):
        known = known_settings()
        refuse_server_settings(engine, [known[name].option_names[0] for name in settings if starts_a_server(name)])
    if (name := "endpoint" if is_server(engine) else chosen_engine(engine)) not in VIRTUAL_TIME:
        refuse_simulated(settings, name)


def _has_priorities(options: PlanOptions) -> bool:
    """Whether classes have priorities, from the options or from a mixture's file."""
    if options.priorities is not None or not is_mixture(options.workload):
        return options.priorities is not None
    from ebbench.workloads.mixture import read_mixture

    mixture = read_mixture(options.workload)
    return mixture is not None and any(request_class.priority is not None for request_class in mixture.classes)
