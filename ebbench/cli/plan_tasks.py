"""Converts the options of ``ebbench plan`` to candidates to simulate, and checks all names before the first run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from ebbench.capacity.deployments import Candidate, PlanTask
from ebbench.capacity.limits import parse_limits
from ebbench.cli.preflight import check_counts, each_once, parse_policies
from ebbench.config.setting_strings import option_name
from ebbench.config.topology import parse_topology
from ebbench.devices.apiserver import chosen_api_server
from ebbench.devices.profiles import as_decoder, find_model, find_profile, list_devices
from ebbench.devices.request import quantised
from ebbench.devices.startup import start_up
from ebbench.errors import UsageError
from ebbench.spec.run import spec_of
from ebbench.spec.server import DEFAULT_CLASS, first_choice
from ebbench.workloads.options import is_recorded
from ebbench.workloads.own_arrivals import poisson_instead

if TYPE_CHECKING:
    from ebbench.cli.plan import CandidateFlags, TargetFlags

DEFAULT_TP = (1, 2, 4, 8)
DEFAULT_POLICIES = ("v1", "ebplus", "marginal")
_SESSIONS = 2000
MOST_HEADROOM = 10.0
"""More is a percentage by mistake."""


def tasks_of(workload: str, target: TargetFlags, requests: Mapping[str, Any], choice: CandidateFlags) -> list[PlanTask]:
    """One task per candidate. Raises UsageError for unknown names and invalid numbers or limits."""
    check_counts(request_rate=target.request_rate)
    if math.isinf(target.request_rate):
        raise UsageError("--request-rate inf: give the sessions/s to serve, a finite rate")
    for option, values in vars(choice).items():
        if isinstance(values, list) and option not in ("policy", "price"):
            each_once(option_name(option), values)
    if not 0 <= target.headroom <= MOST_HEADROOM:
        raise UsageError(f"--headroom is a share of the rate, such as 0.2 for 120 % of it, not {target.headroom:g}")
    if target.spare < 0:
        raise UsageError(f"--spare must be 0 or more replicas, not {target.spare}")
    limits = parse_limits(target.goodput or (), target.attainment)
    model = as_decoder(choice.model) if choice.assume_decoder else choice.model
    quantised(find_model(model), choice.quantization, choice.kv_cache_dtype)
    api_server = first_choice(choice.api_server, choice.api_server_count)
    chosen_api_server(api_server, choice.api_server_count)
    if choice.vllm_version is not None:
        start_up(choice.vllm_version)
    policies = [spec.name for spec in parse_policies(choice.policy or DEFAULT_POLICIES)]
    shapes = _shapes(choice)
    devices = choice.device or list_devices()
    for device in devices:
        find_profile(device)
    settings = dict(requests) | ({"source": "auto"} if is_recorded(workload) else {})
    spec = spec_of(
        settings
        | {"workload": workload, "scenario": target.scenario or "poisson", "model": model, "api_server": api_server}
        | {name: value for name in _OF_ALL if (value := getattr(choice, name)) is not None}
    ).changed(redraw=True)
    budgets, seqs = choice.max_num_batched_tokens or (8192,), choice.max_num_seqs or (1024,)
    task = PlanTask(spec, limits, target.request_rate, _SESSIONS, target.headroom, target.spare)
    return [
        task.on(Candidate(device, tp, policy, budget, most, dp, ep))
        for device, (tp, dp, ep), policy, budget, most in product(devices, shapes, policies, budgets, seqs)
    ]


_OF_ALL = (
    "max_model_len", "api_server_count", "gpu_memory_utilization", "vllm_version", "quantization", "kv_cache_dtype",
)  # fmt: skip
"""Settings that all candidates have."""


def arrivals_note(workload: str, target: TargetFlags, requests: Mapping[str, Any]) -> list[str]:
    """That arrivals are Poisson instead of the workload's own, where nobody asked for others."""
    note = "" if target.scenario else poisson_instead(workload, requests)
    return [note] if note else []


def _shapes(choice: CandidateFlags) -> list[tuple[int, int, int]]:
    """(tp, dp, ep) of each kind of instance. Raises UsageError for one that is not a single instance."""
    for size in choice.tp or ():
        if size < 1:
            raise UsageError(f"--tp must be at least 1, not {size}")
    sizes = choice.tp or (() if choice.instance else DEFAULT_TP)
    shared = [_shape(text) for text in choice.instance or ()]
    return list(dict.fromkeys([*((size, 1, 1) for size in sizes), *shared]))


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


def with_api_server(tasks: Sequence[PlanTask]) -> list[PlanTask]:
    """The same candidates with vLLM's API server simulated."""
    return [task.changed(api_server=DEFAULT_CLASS) for task in tasks]
