"""The candidates of a plan: kinds of instance, and the simulations that size all of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from ebbench.analysis.metrics import refuse_unknown_classes
from ebbench.config.declare import DEFAULT_VLLM, option_name
from ebbench.config.topology import parse_topology
from ebbench.devices.capacity import batch_limits
from ebbench.devices.costs import measured_devices
from ebbench.devices.profiles import find_profile
from ebbench.engines.base import check_counts
from ebbench.errors import UsageError
from ebbench.render.documents import Console
from ebbench.render.live import Work, shown
from ebbench.runs.pool import make_pool
from ebbench.runs.prepare import checked_server, each_once, parse_policies
from ebbench.sizing.choose import DeploymentPlan, choose
from ebbench.sizing.deployments import Candidate, Demand, candidate_of, plan_notes, run_of
from ebbench.sizing.limits import limits_of
from ebbench.sizing.plan_sentences import REFUSALS
from ebbench.sizing.prices import check_prices, sources
from ebbench.spec.commands import PlanCommand, asked_of
from ebbench.spec.run import RunSpec, make_spec
from ebbench.workloads.log_report import poisson_instead
from ebbench.workloads.mixture import class_names
from ebbench.workloads.options import is_recorded

DEFAULT_TP = (1, 2, 4, 8)
SESSIONS = 2000
"""Fewest per simulation."""
DEFAULT_POLICIES = ("v1", "ebplus", "marginal")
MOST_HEADROOM = 10.0
"""More is a percentage by mistake."""


def demanded(asked: PlanCommand, settings: Mapping[str, Any]) -> tuple[Demand, list[RunSpec]]:
    """The load to carry, and the run of each candidate.

    ``settings``: of the workload and of a simulated server, by name.
    Raises UsageError for unknown names and invalid numbers or limits.
    """
    _check_target(asked)
    for name in ("device", "tp", "instance", "max_num_batched_tokens", "max_num_seqs"):
        each_once(option_name(name), getattr(asked, name))
    limits = limits_of(asked, str(settings["workload"]))
    of_workload = {"scenario": asked.scenario or "poisson"}
    of_workload |= {"source": "auto"} if is_recorded(settings["workload"]) else {}
    spec = make_spec({**settings, **of_workload, "model": checked_server(settings)}).changed(redraw=True)
    if limits.named:
        refuse_unknown_classes(limits.named, class_names(spec.plan))
    demand = Demand(limits, asked.request_rate, SESSIONS, asked.headroom, asked.spare)
    return demand, with_candidates(
        spec,
        asked.device or measured_devices(),
        instance_shapes(asked.tp, asked.instance),
        [parsed.name for parsed in parse_policies(asked.policy or DEFAULT_POLICIES)],
        asked.max_num_batched_tokens,
        asked.max_num_seqs,
    )


def _check_target(asked: PlanCommand) -> None:
    check_counts(request_rate=asked.request_rate)
    if math.isinf(asked.request_rate):
        raise UsageError("--request-rate inf: give the sessions/s to serve, a finite rate")
    if not 0 <= asked.headroom <= MOST_HEADROOM:
        raise UsageError(f"--headroom is a share of the rate, such as 0.2 for 120 % of it, not {asked.headroom:g}")
    if asked.spare < 0:
        raise UsageError(f"--spare must be 0 or more replicas, not {asked.spare}")


def find_plan(given: Mapping[str, Any], messages: Console, *, workers: int | None, quiet: bool) -> DeploymentPlan:
    """Simulate the candidates. ``given``: settings of a run and of :class:`PlanCommand`, by name.

    Raises UsageError, also if no candidate meets the limits with one request at a time.
    """
    asked, settings = asked_of(PlanCommand, given)
    demand, specs = demanded(asked, settings)
    prices = check_prices(asked.price, dict.fromkeys(candidate_of(spec).device for spec in specs))
    plan_notes(demand, specs[0])  # raises what no plan can be built from, before anything is simulated
    with shown(messages, Work("plan", unit="candidates"), quiet=quiet) as work:
        deployments = choose(demand, specs, prices, make_pool(workers, len(specs)), work.reached)
    refused, carried = deployments.refused, deployments.carrying
    if refused and all(reason.code == "missed_alone" for _, reason in refused) and not carried:
        candidate, reason = refused[0]
        why = reason.worded(REFUSALS)
        raise UsageError(f"no candidate meets the limits: {candidate.device} {candidate.shape} {why}")
    notes = plan_notes(demand, specs[0], carried[0].deployment.replicas if carried else 1)
    # A workload with arrivals of its own is told that they were replaced, unless others were asked for.
    note = "" if asked.scenario is not None else poisson_instead(settings["workload"], settings)
    return DeploymentPlan(
        deployments, demand, specs[0], prices, sources(asked.price), (*filter(None, [note]), *map(str, notes))
    )


def with_candidates(
    spec: RunSpec, devices: Sequence[str], shapes: Sequence[tuple[int, int, int]], policies: Sequence[str],
    budgets: Sequence[int], seqs: Sequence[int],
) -> list[RunSpec]:  # fmt: skip
    """The run on every combination; ``shapes``: (tp, dp, ep). Without ``budgets`` or ``seqs``: vLLM's on each device.

    Raises UnknownNameError for an unknown device.
    """
    version = spec.server.vllm_version or DEFAULT_VLLM
    limits_per_device = []
    for device in devices:
        chosen = batch_limits(find_profile(device), version)
        # Where the number of sequences is left out, vLLM takes no more than the budget has tokens.
        sizes = [
            (device, budget, most)
            for budget in budgets or (chosen.max_num_batched_tokens,)
            for most in seqs or (min(chosen.max_num_seqs, max(budget, 1)),)
        ]
        limits_per_device.append(sizes)
    return [
        run_of(Candidate(device, tp, policy, budget, most, dp, ep), spec)
        for limits in limits_per_device
        for (tp, dp, ep), policy, (device, budget, most) in product(shapes, policies, limits)
    ]


def instance_shapes(sizes: Sequence[int], instances: Sequence[str]) -> list[tuple[int, int, int]]:
    """(tp, dp, ep) of each kind of instance. Raises UsageError for one that is not a single instance."""
    for size in sizes:
        if size < 1:
            raise UsageError(f"--tp must be at least 1, not {size}")
    alone = sizes or (() if instances else DEFAULT_TP)
    return list(dict.fromkeys([*((size, 1, 1) for size in alone), *map(_shape, instances)]))


def _shape(text: str) -> tuple[int, int, int]:
    """(tp, dp, ep) of an instance in the short form of a topology."""
    pool = parse_topology(text).replicas
    if pool is None or pool.instances > 1:
        raise UsageError(
            f"--instance {text}: one instance, whose GPUs share the model, such as tp=2, tp=8,ep=8 or dp=8,ep=8; "
            "the number of replicas is what plan finds"
        )
    if pool.lockstep:
        raise UsageError(f"--instance {text}: ranks of a dense model gain nothing by lockstep; they are replicas")
    return pool.tp, pool.dp, pool.ep
