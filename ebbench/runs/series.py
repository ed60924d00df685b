"""A series: one load under several policies and seeds, of which all runs share an engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ebbench.analysis.metrics import PRICE
from ebbench.analysis.slo import parse_slo
from ebbench.devices.base import Device
from ebbench.engines.base import Engine
from ebbench.engines.checks import check_counts, check_options, refuse_queue_limits
from ebbench.engines.setup import policy_label
from ebbench.errors import UsageError
from ebbench.records.plan import Plan
from ebbench.runs.prepare import Prepared, check_plan, prepared
from ebbench.spec.run import RunSpec
from ebbench.spec.server import DEFAULT_CLASS, VIRTUAL_TIME, is_server
from ebbench.workloads import planner
from vllm_eb.policy import PolicySpec


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
    api_server_if_busy: bool = False
    """Simulate again with vLLM's API server if a run would keep it busy."""
    price_per_hour: float | None = None

    @property
    def runs(self) -> int:
        """Number of runs, at most."""
        return self.repeats * len(self.policies)

    def check(self) -> None:
        """Raise UsageError for settings that contradict each other."""
        check_counts(price_per_hour=self.price_per_hour)
        parse_slo([self.spec.goodput])
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
        if plan.cache_hit_rate is not None and not self.spec.server.enable_prefix_caching:
            raise UsageError("--cache-hit-rate needs the prefix cache; leave out --no-prefix-caching")

    def with_api_server(self) -> Series:
        """The same with vLLM's API server simulated."""
        return replace(self, spec=self.spec.changed(api_server=DEFAULT_CLASS), api_server_if_busy=False)

    def labelled(self, engine: Engine) -> Series:
        """The series with the policy that a server reports, if none was given.

        Raises UsageError if it reports another one than was given, RunError if it is not ready.
        """
        if not is_server(self.spec.engine):
            return self
        label = policy_label(engine, self.policies[0], stated=self.policies_stated)
        return replace(self, policies=(label.policy,), spec=replace(self.spec, policy=label.policy.name))

    def order(self, repeat: int) -> Iterator[PolicySpec]:
        """The policies of a repeat in alternating order (ABBA), so that machine drift affects all equally."""
        return iter(self.policies) if repeat % 2 == 0 else reversed(self.policies)

    def plan(self, seed: int, device: Device) -> Plan:
        """The plan of one seed. Raises UsageError for a request that does not fit."""
        plan = planner.make_plan(replace(self.spec.plan, seed=seed))
        facts = {PRICE: self.price_per_hour} if self.price_per_hour is not None else {}
        facts |= {"until_clear": True} if self.until_clear else {}
        plan = replace(plan, facts={**plan.facts, **facts}) if facts else plan
        check_plan(self.spec, plan, device)
        return plan

    def prepared(self, policy: PolicySpec, plan: Plan, device: Device, engine: Engine) -> Prepared:
        """One run of the series."""
        spec = replace(self.spec, policy=policy.name)
        return prepared(spec, policy, plan, device, engine, policy_stated=self.policies_stated)


def without_load(spec: RunSpec) -> RunSpec:
    """The run without the settings of arrivals, which a closed loop has not."""
    return spec.changed(**dict.fromkeys(_OF_LOAD))


_OF_LOAD = ("request_rate", "burstiness", "speed", "time_unit", "duration_s", "saturation_rate", "rate_scale")
