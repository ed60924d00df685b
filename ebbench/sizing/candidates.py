"""The candidates of a plan: kinds of instance, and the simulations that size all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product

import msgspec

from ebbench.config.declare import DEFAULT_VLLM
from ebbench.config.topology import parse_topology
from ebbench.devices.capacity import batch_limits
from ebbench.devices.profiles import find_profile
from ebbench.errors import UsageError
from ebbench.render.documents import Console
from ebbench.render.live import Work, shown
from ebbench.runs.conclude import ApiServerBusyError, again_if_busy
from ebbench.runs.pool import Pool
from ebbench.sizing.choose import DeploymentChoice, choose
from ebbench.sizing.deployments import Candidate, PlanTask
from ebbench.sizing.plan_sentences import api_servers_left_out
from ebbench.spec.server import DEFAULT_CLASS

DEFAULT_TP = (1, 2, 4, 8)


def with_candidates(
    task: PlanTask, devices: Sequence[str], shapes: Sequence[tuple[int, int, int]], policies: Sequence[str],
    budgets: Sequence[int], seqs: Sequence[int],
) -> list[PlanTask]:  # fmt: skip
    """The task on every combination; ``shapes``: (tp, dp, ep). Without ``budgets`` or ``seqs``: vLLM's on each device.

    Raises UnknownNameError for an unknown device.
    """
    version = task.spec.server.vllm_version or DEFAULT_VLLM
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
        task.on(Candidate(device, tp, policy, budget, most, dp, ep))
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


def sized(
    tasks: Sequence[PlanTask], prices: Mapping[str, float], pool: Pool, *, api_server_if_busy: bool, quiet: bool
) -> tuple[DeploymentChoice, Sequence[PlanTask]]:
    """The deployments, and the tasks that they were simulated with: again with vLLM's API server where that is busy."""
    messages = Console(stderr=True, highlight=False)
    with shown(messages, Work("plan", unit="candidates"), quiet=quiet) as work:

        def attempt(served: bool) -> tuple[DeploymentChoice, Sequence[PlanTask]]:
            chosen = [task.changed(api_server=DEFAULT_CLASS) for task in tasks] if served else tasks
            deployments = choose(chosen, prices, pool, work.reached)
            busy = api_servers_left_out(deployments, tasks[0])
            if busy is not None and api_server_if_busy and not served:
                raise ApiServerBusyError(msgspec.structs.replace(busy, message=f"Per replica: {busy.sentence}"))
            return deployments, chosen

        return again_if_busy(attempt, partial(messages.say, quiet=quiet))
