"""Searches the candidates: bounds first, then sizes in order of least possible cost, then stress tests of the best."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ebbench.records.warnings import Fact, fact
from ebbench.runs.pool import Pool, values
from ebbench.sizing.deployments import (
    MOST_REPLICAS,
    TOO_MANY,
    WITHIN,
    Bound,
    Candidate,
    Demand,
    Deployment,
    Stress,
    bound,
    candidate_of,
    must_hold,
    size,
    stress,
)
from ebbench.spec.run import RunSpec

STRESSED = 3
_CHUNK = 4
"""Candidates sized before the cheapest cost is compared again."""


@dataclass(frozen=True)
class Costed:
    """A deployment with its cost per hour (GPUs, without prices). ``stress``: only of the best ones.

    ``frontier``: no other one found costs no more and has no higher TTFT and TPOT. ``efficient``: no other one has as
    many output tokens/s per user and per GPU.
    """

    deployment: Deployment
    cost: float
    stress: Stress | None = None
    frontier: bool = False
    efficient: bool = False

    @property
    def ttft_ms(self) -> float:
        """Median TTFT at the rate; infinite where it is unknown."""
        return self._latency_ms("ttft_ms")

    @property
    def tpot_ms(self) -> float:
        """Median TPOT at the rate; infinite where it is unknown."""
        return self._latency_ms("tpot_ms")

    @property
    def tokens_per_s_per_user(self) -> float:
        """1 / median TPOT."""
        return 1000 / self.tpot_ms

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Output tokens/s over all GPUs, at the rate."""
        reading = self.deployment.reading
        total = self.deployment.replicas * reading.output_tokens_per_s if reading else 0.0
        return total / self.deployment.gpus if self.deployment.gpus else 0.0

    def _latency_ms(self, name: str) -> float:
        value: float | None = getattr(self.stress or self.deployment.reading, name, None)
        return math.inf if value is None else value


@dataclass(frozen=True)
class DeploymentChoice:
    """Deployments, cheapest first; ``refused``: candidates that cannot run or meet the limits, with the reason.

    ``pruned``: candidates left out because they cost at least ``WITHIN`` times the cheapest deployment. ``unbounded``:
    candidates whose saturated rate is unknown.
    """

    carrying: tuple[Costed, ...]
    refused: tuple[tuple[Candidate, Fact], ...] = ()
    pruned: tuple[Candidate, ...] = ()
    unbounded: tuple[Candidate, ...] = ()


@dataclass(frozen=True)
class DeploymentPlan:
    """The deployments that carry a load, with ``prices`` per GPU-hour and their currency and date.

    ``spec``: the run of one of the candidates. ``notes``: sentences on the load.
    """

    deployments: DeploymentChoice
    demand: Demand
    spec: RunSpec
    prices: Mapping[str, float]
    priced_in: str = ""
    notes: tuple[str, ...] = ()


def choose(
    demand: Demand,
    specs: Sequence[RunSpec],
    prices: Mapping[str, float],
    pool: Pool,
    advance: Callable[[str, int, int], None] = lambda _what, _done, _total: None,
) -> DeploymentChoice:
    """Search the deployments; ``specs``: the run of each candidate.

    ``advance`` is called with what is being done, how often it is done, and how often in all.
    """
    carrying: list[Costed] = []
    pruned: list[Candidate] = []
    by_candidate = {candidate_of(spec): spec for spec in specs}
    bounds: list[Bound] = []
    for bounded in values(pool, bound, specs):
        bounds.append(bounded)
        advance("saturated rates", len(bounds), len(specs))
    refused = [(bounded.candidate, bounded.refused) for bounded in bounds if bounded.refused]
    waiting = [bounded for bounded in bounds if not bounded.refused]
    waiting.sort(key=lambda bounded: (_least(bounded, demand, prices), bounded.candidate.gpus))
    while waiting:
        chunk, waiting = waiting[:_CHUNK], waiting[_CHUNK:]
        jobs = []
        cheapest = min((costed.cost for costed in carrying), default=math.inf)
        for bounded in chunk:
            most = int(WITHIN * cheapest / _unit(bounded.candidate, prices)) if carrying else MOST_REPLICAS
            if bounded.fewest(demand) > MOST_REPLICAS:
                refused.append((bounded.candidate, TOO_MANY))
            elif bounded.fewest(demand) > most:
                pruned.append(bounded.candidate)
            else:
                jobs.append((by_candidate[bounded.candidate], bounded.first(demand), most))
        for deployment in values(pool, partial(_size, demand), jobs):
            if deployment.refused is not None:
                refused.append((deployment.candidate, deployment.refused))
            else:
                carrying.append(Costed(deployment, deployment.replicas * _unit(deployment.candidate, prices)))
            decided = len(carrying) + len(refused) + len(pruned)
            advance("numbers of replicas", decided, len(specs))
    advance("complete simulations of the cheapest", 0, 0)
    cheapest = min((costed.cost for costed in carrying), default=math.inf)
    kept = sorted((costed for costed in carrying if costed.cost <= WITHIN * cheapest), key=_rank)
    pruned += [costed.deployment.candidate for costed in carrying if costed not in kept]
    stressed, missed = _stressed(demand, kept, by_candidate, prices, pool)
    refused += missed
    on_frontier = tuple(on_frontiers(stressed))
    unbounded = tuple(bounded.candidate for bounded in bounds if math.isinf(bounded.saturated_per_s))
    return DeploymentChoice(on_frontier, tuple(refused), tuple(pruned), unbounded)


def _size(demand: Demand, job: tuple[RunSpec, int, int]) -> Deployment:
    return size(demand, *job)


def _stress(demand: Demand, job: tuple[RunSpec, int, int]) -> tuple[Candidate, int, Stress]:
    return candidate_of(job[0]), *stress(demand, *job)


def _rank(costed: Costed) -> tuple[float, int, float]:
    return costed.cost, costed.deployment.gpus, costed.tpot_ms


def on_frontiers(costed: Sequence[Costed]) -> list[Costed]:
    """The deployments, each marked where no other one beats it: in cost and latency, and in speed per user and GPU."""
    costs = [(one.cost, one.ttft_ms, one.tpot_ms) for one in costed]
    slowness = [(-one.tokens_per_s_per_user, -one.tokens_per_s_per_gpu) for one in costed]
    return [
        replace(entry, frontier=not dominated(cost, costs), efficient=not dominated(slow, slowness))
        for entry, cost, slow in zip(costed, costs, slowness, strict=True)
    ]


def dominated(own: tuple[float, ...], others: Iterable[tuple[float, ...]]) -> bool:
    """Whether another deployment is as good in everything and better in something; less is better."""
    return any(figures != own and all(a <= b for a, b in zip(figures, own, strict=True)) for figures in others)


def _stressed(
    demand: Demand, ordered: list[Costed], specs: Mapping[Candidate, RunSpec], prices: Mapping[str, float], pool: Pool
) -> tuple[list[Costed], list[tuple[Candidate, Fact]]]:
    """The deployments, cheapest first, and those that miss the limits when they are simulated completely.

    Simulated completely are those that are, or could be, the cheapest ones.
    """
    done: list[Costed] = []
    missed: list[tuple[Candidate, Fact]] = []
    due, left = ordered[:STRESSED], ordered[STRESSED:]
    while due:
        jobs = [
            (specs[costed.deployment.candidate], costed.deployment.replicas, costed.deployment.fewest) for costed in due
        ]
        by_candidate = {costed.deployment.candidate: costed for costed in due}
        for candidate, replicas, simulated in values(pool, partial(_stress, demand), jobs):
            if all(level is not None and level.met for level in must_hold(demand, simulated)):
                done.append(_resized(by_candidate[candidate], replicas, simulated, prices))
            else:
                missed.append((candidate, fact("missed_dispatched", replicas=replicas)))
        cheapest = min((costed.cost for costed in done), default=math.inf)
        due = [costed for costed in left if _least_cost(costed, prices) < cheapest][:STRESSED]
        left = [costed for costed in left if costed not in due]
    return sorted([*done, *left], key=_rank), missed


def _least_cost(costed: Costed, prices: Mapping[str, float]) -> float:
    return costed.deployment.fewest * _unit(costed.deployment.candidate, prices)


def _resized(costed: Costed, replicas: int, simulated: Stress, prices: Mapping[str, float]) -> Costed:
    """The deployment with the number of replicas that its complete simulation has found."""
    before = costed.deployment
    reading = before.reading and replace(
        before.reading, output_tokens_per_s=before.reading.output_tokens_per_s * before.replicas / replicas
    )
    deployment = replace(before, replicas=replicas, reading=reading)
    return Costed(deployment, replicas * _unit(before.candidate, prices), simulated)


def _unit(candidate: Candidate, prices: Mapping[str, float]) -> float:
    """Cost of one replica per hour; without prices its number of GPUs."""
    return candidate.gpus * prices.get(candidate.device, 1.0)


def _least(bounded: Bound, demand: Demand, prices: Mapping[str, float]) -> float:
    return bounded.fewest(demand) * _unit(bounded.candidate, prices)
