"""Searches the candidates: bounds first, then sizes in order of least possible cost, then stress tests of the best."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ebbench.capacity.deployments import Bound, Candidate, Deployment, Stress, Task, bound, size, stress
from ebbench.runs.pool import Pool, values

WITHIN = 1.5
"""Deployments that cost at most this many times the cheapest are sized and shown; others are left out."""
STRESSED = 3
_CHUNK = 4
"""Candidates sized before the cheapest cost is compared again."""


@dataclass(frozen=True)
class Costed:
    """A deployment with its cost per hour (GPUs, without prices). ``stress``: only of the best ones."""

    deployment: Deployment
    cost: float
    stress: Stress | None = None
    frontier: bool = False


@dataclass(frozen=True)
class Choice:
    """Deployments, cheapest first; ``refused``: candidates that cannot run or meet the limits, with the reason.

    ``pruned``: candidates left out because they cost at least ``WITHIN`` times the cheapest deployment.
    """

    found: tuple[Costed, ...]
    refused: tuple[tuple[Candidate, str], ...] = ()
    pruned: tuple[Candidate, ...] = ()


@dataclass
class _State:
    cheapest: float = float("inf")
    found: list[Costed] = field(default_factory=list)
    refused: list[tuple[Candidate, str]] = field(default_factory=list)
    pruned: list[Candidate] = field(default_factory=list)


def choose(
    tasks: Sequence[Task],
    prices: Mapping[str, float],
    pool: Pool,
    advance: Callable[[str], None] = lambda _text: None,
) -> Choice:
    """Search the deployments. ``advance`` is called with a line of progress."""
    state = _State()
    by_candidate = {task.candidate: task for task in tasks}
    bounds: list[Bound] = []
    for each in values(pool, bound, tasks):
        bounds.append(each)
        advance(f"saturated rate of {len(bounds)} of {len(tasks)}")
    rate = tasks[0].rate
    state.refused += [(each.candidate, each.refused) for each in bounds if each.refused]
    waiting = [each for each in bounds if not each.refused and each.saturated_per_s > 0]
    waiting.sort(key=lambda each: (_least(each, rate, prices), each.candidate.tp))
    while waiting:
        chunk, waiting = waiting[:_CHUNK], waiting[_CHUNK:]
        jobs = []
        for each in chunk:
            most = int(WITHIN * state.cheapest / _unit(each.candidate, prices)) if state.found else 1 << 20
            if each.fewest(rate) > most:
                state.pruned.append(each.candidate)
            else:
                jobs.append((by_candidate[each.candidate], each.first(rate), most))
        for deployment in values(pool, _size, jobs):
            _take(state, deployment, prices)
            advance(f"sized {len(state.found) + len(state.refused)}, left out {len(state.pruned)} of {len(tasks)}")
    kept = sorted(_kept(state), key=_rank)
    stressed = sorted(_stressed(kept, by_candidate, prices, pool), key=_rank)
    found = tuple(replace(each, frontier=_on_frontier(each, stressed)) for each in stressed)
    return Choice(found, tuple(state.refused), tuple(state.pruned))


def _rank(each: Costed) -> tuple[float, int, float]:
    return each.cost, each.deployment.gpus, _tpot(each)


def _size(job: tuple[Task, int, int]) -> Deployment:
    return size(*job)


def _stress(job: tuple[Task, int]) -> tuple[Candidate, int, Stress]:
    return job[0].candidate, *stress(*job)


def _take(state: _State, deployment: Deployment, prices: Mapping[str, float]) -> None:
    if not deployment.replicas:
        state.refused.append((deployment.candidate, deployment.refused))
        return
    cost = deployment.replicas * _unit(deployment.candidate, prices)
    state.found.append(Costed(deployment, cost))
    state.cheapest = min(state.cheapest, cost)


def _kept(state: _State) -> list[Costed]:
    kept = [each for each in state.found if each.cost <= WITHIN * state.cheapest]
    state.pruned += [each.deployment.candidate for each in state.found if each not in kept]
    return kept


def _on_frontier(each: Costed, others: Iterable[Costed]) -> bool:
    """Whether no other deployment is better in cost or time per token without being worse in the other."""
    own = (each.cost, _tpot(each))
    pairs = [(other.cost, _tpot(other)) for other in others]
    return not any(cost <= own[0] and tpot <= own[1] and (cost, tpot) != own for cost, tpot in pairs)


def _stressed(
    ordered: list[Costed], tasks: Mapping[Candidate, Task], prices: Mapping[str, float], pool: Pool
) -> list[Costed]:
    """The deployments, with the cheapest ones simulated completely."""
    jobs = [(tasks[each.deployment.candidate], each.deployment.replicas) for each in ordered[:STRESSED]]
    results = {candidate: (replicas, found) for candidate, replicas, found in values(pool, _stress, jobs)}
    stressed = []
    for each in ordered:
        candidate = each.deployment.candidate
        if candidate in results:
            replicas, found = results[candidate]
            deployment = replace(each.deployment, replicas=replicas)
            stressed.append(Costed(deployment, replicas * _unit(candidate, prices), found))
        else:
            stressed.append(each)
    return stressed


def _tpot(each: Costed) -> float:
    reading = each.deployment.reading
    return float("inf") if reading is None or reading.tpot_ms is None else reading.tpot_ms


def _unit(candidate: Candidate, prices: Mapping[str, float]) -> float:
    """Cost of one replica per hour; without prices its number of GPUs."""
    return candidate.tp * prices.get(candidate.device, 1.0)


def _least(each: Bound, rate: float, prices: Mapping[str, float]) -> float:
    return each.fewest(rate) * _unit(each.candidate, prices)
