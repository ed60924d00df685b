"""Searches the candidates: bounds first, then sizes in order of least possible cost, then stress tests of the best."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ebbench.records.warnings import Fact, fact
from ebbench.runs.pool import Pool, values
from ebbench.sizing.deployments import (
    MOST_REPLICAS,
    TOO_MANY,
    WITHIN,
    Bound,
    Candidate,
    Deployment,
    PlanTask,
    Stress,
    bound,
    must_hold,
    size,
    stress,
)

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
        return _known(self.stress.ttft_ms if self.stress else self._reading_of("ttft_ms"), math.inf)

    @property
    def tpot_ms(self) -> float:
        """Median TPOT at the rate; infinite where it is unknown."""
        return _known(self.stress.tpot_ms if self.stress else self._reading_of("tpot_ms"), math.inf)

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

    def _reading_of(self, name: str) -> float | None:
        value: float | None = getattr(self.deployment.reading, name, None)
        return value


@dataclass(frozen=True)
class DeploymentChoice:
    """Deployments, cheapest first; ``refused``: candidates that cannot run or meet the limits, with the reason.

    ``pruned``: candidates left out because they cost at least ``WITHIN`` times the cheapest deployment. ``unbounded``:
    candidates whose saturated rate is unknown.
    """

    found: tuple[Costed, ...]
    refused: tuple[tuple[Candidate, Fact], ...] = ()
    pruned: tuple[Candidate, ...] = ()
    unbounded: tuple[Candidate, ...] = ()


@dataclass
class _State:
    cheapest: float = float("inf")
    found: list[Costed] = field(default_factory=list)
    refused: list[tuple[Candidate, Fact]] = field(default_factory=list)
    pruned: list[Candidate] = field(default_factory=list)


def choose(
    tasks: Sequence[PlanTask],
    prices: Mapping[str, float],
    pool: Pool,
    advance: Callable[[str, int, int], None] = lambda _what, _done, _total: None,
) -> DeploymentChoice:
    """Search the deployments. ``advance`` is called with what is being done, how often it is done, and how often in
    all."""
    state = _State()
    by_candidate = {task.candidate: task for task in tasks}
    bounds: list[Bound] = []
    for each in values(pool, bound, tasks):
        bounds.append(each)
        advance("saturated rates", len(bounds), len(tasks))
    task = tasks[0]  # all have one load
    state.refused += [(each.candidate, each.refused) for each in bounds if each.refused]
    waiting = [each for each in bounds if not each.refused]
    waiting.sort(key=lambda each: (_least(each, task, prices), each.candidate.gpus))
    while waiting:
        chunk, waiting = waiting[:_CHUNK], waiting[_CHUNK:]
        jobs = []
        for each in chunk:
            most = int(WITHIN * state.cheapest / _unit(each.candidate, prices)) if state.found else MOST_REPLICAS
            if each.fewest(task) > MOST_REPLICAS:
                state.refused.append((each.candidate, TOO_MANY))
            elif each.fewest(task) > most:
                state.pruned.append(each.candidate)
            else:
                jobs.append((by_candidate[each.candidate], each.first(task), most))
        for deployment in values(pool, _size, jobs):
            _take(state, deployment, prices)
            decided = len(state.found) + len(state.refused) + len(state.pruned)
            advance("numbers of replicas", decided, len(tasks))
    advance("complete simulations of the cheapest", 0, 0)
    kept = sorted(_kept(state), key=_rank)
    stressed, missed = _stressed(kept, by_candidate, prices, pool)
    state.refused += missed
    found = tuple(on_frontiers(stressed))
    unbounded = tuple(each.candidate for each in bounds if math.isinf(each.saturated_per_s))
    return DeploymentChoice(found, tuple(state.refused), tuple(state.pruned), unbounded)


def _rank(each: Costed) -> tuple[float, int, float]:
    return each.cost, each.deployment.gpus, each.tpot_ms


def _size(job: tuple[PlanTask, int, int]) -> Deployment:
    return size(*job)


def _stress(job: tuple[PlanTask, int, int]) -> tuple[Candidate, int, Stress]:
    return job[0].candidate, *stress(*job)


def _take(state: _State, deployment: Deployment, prices: Mapping[str, float]) -> None:
    if deployment.refused is not None:
        state.refused.append((deployment.candidate, deployment.refused))
        return
    cost = deployment.replicas * _unit(deployment.candidate, prices)
    state.found.append(Costed(deployment, cost))
    state.cheapest = min(state.cheapest, cost)


def _kept(state: _State) -> list[Costed]:
    kept = [each for each in state.found if each.cost <= WITHIN * state.cheapest]
    state.pruned += [each.deployment.candidate for each in state.found if each not in kept]
    return kept


def on_frontiers(found: Sequence[Costed]) -> list[Costed]:
    """The deployments, each marked where no other one beats it: in cost and latency, and in speed per user and GPU."""
    return [
        replace(each, frontier=not _dominated(each, found, _costs), efficient=not _dominated(each, found, _speeds))
        for each in found
    ]


def _dominated(each: Costed, others: Iterable[Costed], of: Callable[[Costed], tuple[float, ...]]) -> bool:
    """Whether another deployment is as good in everything and better in something; less is better."""
    own = of(each)
    return any(figures != own and all(a <= b for a, b in zip(figures, own, strict=True)) for figures in map(of, others))


def _costs(each: Costed) -> tuple[float, ...]:
    return each.cost, each.ttft_ms, each.tpot_ms


def _speeds(each: Costed) -> tuple[float, ...]:
    return -each.tokens_per_s_per_user, -each.tokens_per_s_per_gpu


def _stressed(
    ordered: list[Costed], tasks: Mapping[Candidate, PlanTask], prices: Mapping[str, float], pool: Pool
) -> tuple[list[Costed], list[tuple[Candidate, Fact]]]:
    """The deployments, cheapest first, and those that miss the limits when they are simulated completely.

    Simulated completely are those that are, or could be, the cheapest ones.
    """
    done: list[Costed] = []
    missed: list[tuple[Candidate, Fact]] = []
    due, left = ordered[:STRESSED], ordered[STRESSED:]
    while due:
        jobs = [(tasks[each.deployment.candidate], each.deployment.replicas, each.deployment.fewest) for each in due]
        by_candidate = {each.deployment.candidate: each for each in due}
        for candidate, replicas, found in values(pool, _stress, jobs):
            if all(level is not None and level.met for level in must_hold(tasks[candidate], found)):
                done.append(_resized(by_candidate[candidate], replicas, found, prices))
            else:
                missed.append((candidate, fact("missed_dispatched", replicas=replicas)))
        cheapest = min((each.cost for each in done), default=math.inf)
        due = [each for each in left if _least_cost(each, prices) < cheapest][:STRESSED]
        left = [each for each in left if each not in due]
    return sorted([*done, *left], key=_rank), missed


def _least_cost(each: Costed, prices: Mapping[str, float]) -> float:
    return each.deployment.fewest * _unit(each.deployment.candidate, prices)


def _resized(each: Costed, replicas: int, found: Stress, prices: Mapping[str, float]) -> Costed:
    """The deployment with the number of replicas that its complete simulation has found."""
    before = each.deployment
    reading = before.reading and replace(
        before.reading, output_tokens_per_s=before.reading.output_tokens_per_s * before.replicas / replicas
    )
    deployment = replace(before, replicas=replicas, reading=reading)
    return Costed(deployment, replicas * _unit(before.candidate, prices), found)


def _known(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value


def _unit(candidate: Candidate, prices: Mapping[str, float]) -> float:
    """Cost of one replica per hour; without prices its number of GPUs."""
    return candidate.gpus * prices.get(candidate.device, 1.0)


def _least(each: Bound, task: PlanTask, prices: Mapping[str, float]) -> float:
    return each.fewest(task) * _unit(each.candidate, prices)
