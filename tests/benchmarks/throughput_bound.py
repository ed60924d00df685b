"""A bound that no scheduler passes: the shortest time in which a device could carry out a plan.

Every schedule computes the same tokens, whatever its order. Four amounts describe the work of a plan:
output tokens, the KV tokens that their attention reads, prompt tokens before the last of each prompt, and the KV tokens
that their attention reads. A token that a prefill samples counts as an output token like one that a decode samples, so
a preemption, after which a prefill samples a token that a decode would have sampled, leaves the amounts unchanged or
adds to them.

Prices (seconds per unit of each amount) are *fair* if no step that the limits allow costs less than its own work at
these prices. Then a run lasts at least the plan's work at fair prices, since it consists of such steps. The bound uses
the fair prices that value the plan most: a linear program with one constraint per possible step. Steps are all
combinations of prompts and decodes within the token budget, the number of sequences, the concurrency of the plan and
the memory: the sequences of a step hold their KV at the same time. The program is solved for sampled steps; further
steps that would cost less than their work are searched for and added until none is found, and the prices are lowered by
what a last search finds.

Work that arrives at time t cannot start before t: in an open loop a run lasts at least until an arrival plus the work
of the requests from then on, and until an arrival plus one step per output token of that request. In closed loops whose
concurrency changes, the requests that start and end within a phase are priced with steps of the phase's concurrency.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ebbench.devices.base import CostModel, StepShape
from ebbench.records.plan import Plan
from ebbench.simulation.state import RequestState
from ebbench.spec.server import EngineOptions

Floats = npt.NDArray[np.float64]
DRAWS = 7  # numbers that choose a step
ROUNDS, SAMPLED, KEPT, VARIED = 60, 300, 40, 10
"""Rounds of the search, steps drawn at random in each, and how many of the dearest are varied how often."""
ENOUGH, CALM, MISSED = 1e-3, 3, 2e-3
"""Share by which steps may be underpriced at the end, in so many rounds in a row, and by which prices are lowered for
what the search missed."""


@dataclass(frozen=True)
class Limits:
    """What bounds a step: sequences, tokens, and KV tokens that fit (None: prompts share KV, so their sum is not
    bounded). ``prompts``, ``ends``: sorted lengths (tokens) of prompts, and of prompts with their outputs."""

    seqs: int
    tokens: int
    kv_tokens: int | None
    prompts: Floats
    ends: Floats


@dataclass(frozen=True)
class Bound:
    """``seconds`` that the run lasts at least; ``reason`` that decides: ``work``, ``arrivals`` or ``one request``."""

    seconds: float
    reason: str


def work_of(shape: StepShape, completing: Sequence[bool]) -> Floats:
    """The four amounts of a step. ``completing``: whether each chunk of a prompt is its last."""
    amounts = np.array([shape.decode_seqs, shape.decode_kv_tokens, 0.0, 0.0])
    for (tokens, context), last in zip(shape.prefill, completing, strict=True):
        before = tokens - last
        amounts += (last, last * (context + tokens), before, before * context + before * (before + 1) / 2)
    return amounts


def plan_work(plan: Plan, block_size: int) -> Floats:
    """The four amounts of each request, shape (requests, 4), without prompt tokens that may come from the prefix cache.

    A later turn may find all full blocks up to the end of the turn before it. Of a shared block of a trace only the
    first request that holds it, in order of arrival, counts its tokens.
    """
    state = RequestState(plan)
    prompt, output = state.prompt.astype(float), state.max_output.astype(float)
    start = _cached_by_turns(plan, block_size)
    before = prompt - 1 - start
    pairs = before * start + before * (before + 1) / 2
    if state.hash_ids is not None:
        for row, (tokens, their_pairs) in enumerate(_uncached_blocks(state, block_size)):
            before[row], pairs[row] = tokens, their_pairs
    return np.stack([output, output * prompt + output * (output - 1) / 2, before, pairs], axis=1)


def _cached_by_turns(plan: Plan, block_size: int) -> Floats:
    """Prompt tokens that the turn before may have left in the cache, of each request; the last token is computed."""
    prompt = np.asarray(plan.table["input_tokens"], dtype=float)
    ends = prompt + np.asarray(plan.table["output_tokens"])
    content, turn = np.asarray(plan.table["content"]), np.asarray(plan.table["turn"])
    known: dict[int, float] = {}
    cached = np.zeros(len(plan))
    for row in np.lexsort((turn, content)):
        most = min(known.get(int(content[row]), 0.0), prompt[row] - 1)
        cached[row] = most // block_size * block_size
        known[int(content[row])] = max(ends[row], known.get(int(content[row]), 0.0))
    return cached


def _uncached_blocks(state: RequestState, block_size: int) -> Iterator[tuple[float, float]]:
    """Prompt tokens before the last, and the KV tokens that they read, in blocks that no earlier request holds."""
    assert state.hash_ids is not None
    seen: set[tuple[int, int]] = set()
    size = state.hash_tokens
    for row in range(state.count):
        last = int(state.prompt[row]) - 1
        hashes = state.hash_ids[row] or []
        tokens = pairs = 0.0
        for place in range(-(-last // size)):
            low, high = place * size, min((place + 1) * size, last)
            if place < len(hashes):
                if (hashes[place], place) in seen:
                    low = max(low, last // block_size * block_size)
                seen.add((hashes[place], place))
            if low < high:
                tokens += high - low
                pairs += (high * (high + 1) - low * (low + 1)) / 2
        yield tokens, pairs


def _shares_kv(plan: Plan) -> bool:
    """Whether sequences that run at the same time may hold the same KV blocks."""
    return bool(plan.table["hash_ids"].null_count < len(plan))


def bound(plan: Plan, cost: CostModel, kv_capacity_tokens: int, options: EngineOptions, units: int = 1) -> Bound:
    """The shortest duration of a plan, from the first intended start to the last token.

    ``units``: equal instances that share the plan; ``cost`` and ``kv_capacity_tokens`` are those of one.
    """
    limits = _limits(plan, kv_capacity_tokens, options)
    work = plan_work(plan, options.block_size)
    prices = fair_prices(cost, limits, work.sum(axis=0))
    found = [Bound(_work_s(plan, cost, limits, work, prices) / units, "work")]
    if not plan.closed_loop:
        found += [_after_arrivals(plan, work @ prices / units), _one_request(plan, cost, work @ prices)]
    return max(found, key=lambda one: one.seconds)


def _limits(plan: Plan, kv_capacity_tokens: int, options: EngineOptions) -> Limits:
    open_at_most = max((phase.max_concurrency for phase in plan.phases), default=plan.max_concurrency)
    prompts = np.sort(np.asarray(plan.table["input_tokens"], dtype=float))
    ends = np.sort(np.asarray(plan.table["input_tokens"], dtype=float) + np.asarray(plan.table["output_tokens"]))
    seqs = min(options.running_limit, len(plan), open_at_most or len(plan))
    capacity = None if _shares_kv(plan) else kv_capacity_tokens
    return Limits(seqs, options.max_num_batched_tokens, capacity, prompts, ends)


def _work_s(plan: Plan, cost: CostModel, limits: Limits, work: Floats, prices: Floats) -> float:
    """The plan's work at fair prices, phase by phase where the concurrency changes."""
    total = float(work.sum(axis=0) @ prices)
    if len({phase.max_concurrency for phase in plan.phases}) < 2 or len(plan) != sum(p.sessions for p in plan.phases):
        return total
    extra, first, before = 0.0, 0, 0
    for phase in plan.phases:
        own = work[first : first + phase.sessions]
        first += phase.sessions
        seqs = min(max(phase.max_concurrency, before), limits.seqs)
        before = phase.max_concurrency
        # Which requests of the phase are still open at its end is for the scheduler to choose: the dearest.
        inside = own[np.argsort(own @ prices)[: max(len(own) - phase.max_concurrency, 0)]]
        if seqs == limits.seqs or not len(inside):
            continue
        amounts = inside.sum(axis=0)
        narrow = Limits(seqs, limits.tokens, limits.kv_tokens, limits.prompts, limits.ends)
        extra += float(amounts @ (fair_prices(cost, narrow, amounts, at_least=prices) - prices))
    return total + extra


def _after_arrivals(plan: Plan, seconds: Floats) -> Bound:
    """The last of: an arrival and all the work that comes from then on."""
    arrivals = np.asarray(plan.table["arrival_ns"].fill_null(0), dtype=float) / 1e9
    arrivals = arrivals - arrivals.min()
    order = np.argsort(arrivals, kind="stable")
    seconds = np.where(np.asarray(plan.table["turn"]) > 0, 0.0, seconds)  # later turns have no arrival of their own
    following = np.cumsum(seconds[order][::-1])[::-1]
    return Bound(float((arrivals[order] + following).max()), "arrivals")


def _one_request(plan: Plan, cost: CostModel, seconds: Floats) -> Bound:
    """The last end of a request that is alone on the device from its arrival on."""
    arrivals = np.asarray(plan.table["arrival_ns"].fill_null(0), dtype=float) / 1e9
    outputs = np.asarray(plan.table["output_tokens"], dtype=float)
    prompts = np.asarray(plan.table["input_tokens"])
    step_s = np.array([cost.step_s(StepShape((), 1, int(tokens) + 1, 1)) for tokens in prompts])
    return Bound(float((arrivals - arrivals.min() + (outputs - 1) * step_s).max()), "one request")


def fair_prices(cost: CostModel, limits: Limits, amounts: Floats, at_least: Floats | None = None) -> Floats:
    """The fair prices at which ``amounts`` are worth most, none below ``at_least``; shape (4,), in seconds."""
    rng = np.random.default_rng(0)
    low = np.zeros(4) if at_least is None else at_least
    draws = rng.random((SAMPLED, DRAWS))
    works, costs = _steps(cost, limits, draws)
    found, calm = low, 0
    for _ in range(ROUNDS):
        prices = _best_prices(works, costs, amounts, low)
        near = _near(draws[np.argsort(-(works @ prices / costs))[:KEPT]], rng)
        near = np.concatenate([near, rng.random((SAMPLED, DRAWS))])
        their_works, their_costs = _steps(cost, limits, near)
        ratios = their_works @ prices / their_costs
        fair = np.maximum(prices / (max(float(ratios.max()), 1.0) + MISSED), low)
        found = fair
        calm = calm + 1 if ratios.max() <= 1.0 + ENOUGH else 0
        if calm == CALM:
            break
        new = ratios > 1.0
        draws = np.concatenate([draws, near[new]])
        works, costs = np.concatenate([works, their_works[new]]), np.concatenate([costs, their_costs[new]])
    return np.asarray(found)


def _best_prices(works: Floats, costs: Floats, amounts: Floats, low: Floats) -> Floats:
    """Prices, fair for these steps, at which ``amounts`` are worth most."""
    from scipy.optimize import linprog

    scale = np.maximum(works.max(axis=0), 1.0)
    solved = linprog(
        -amounts / scale,
        A_ub=works / scale / costs[:, None],
        b_ub=np.ones(len(costs)),
        bounds=[(value, None) for value in low * scale],
    )
    return np.asarray(solved.x / scale) if solved.success else low


def _near(draws: Floats, rng: np.random.Generator) -> Floats:
    """Variations of draws, some of them close."""
    widths = rng.choice([0.1, 0.03, 0.01, 0.003], (VARIED * len(draws), 1))
    near = np.repeat(draws, VARIED, axis=0)
    near = near + rng.normal(0.0, 1.0, near.shape) * widths * (rng.random(near.shape) < 0.4)
    return np.asarray(np.clip(near, 0.0, 1.0 - 1e-9))


def _steps(cost: CostModel, limits: Limits, draws: Floats) -> tuple[Floats, Floats]:
    """Work (count, 4) and cost (s) of the steps that ``draws``, shape (count, DRAWS), stand for."""
    works: list[Floats] = []
    costs: list[float] = []
    for draw in draws.tolist():
        shape, completing = _step(limits, draw)
        works.append(work_of(shape, completing))
        costs.append(cost.step_s(shape))
    return np.array(works), np.array(costs)


def _step(limits: Limits, draw: Sequence[float]) -> tuple[StepShape, list[bool]]:
    """The possible step for a point of the unit cube: decodes, prompts or both, as its first coordinate says.

    The others: decodes, their KV, prompt tokens, chunks, tokens in the cache before each, and whether they complete.
    """
    kind, most_seqs = int(3 * draw[0]), min(limits.seqs, limits.tokens)
    seqs = 0 if kind == 1 else _spread(draw[1], 1, most_seqs)
    kv_tokens = _kv_tokens(limits, seqs, _ends(draw[2])) if seqs else 0
    left, most = limits.tokens - seqs, limits.seqs - seqs
    if not kind or left < 1 or most < 1:
        seqs = seqs or 1
        return StepShape((), seqs, kv_tokens or _kv_tokens(limits, seqs, _ends(draw[2])), seqs), []
    longest = int(limits.ends[-1])
    tokens = _spread(draw[3], 1, left)
    chunks = _spread(draw[4], 1, min(most, tokens))
    size = min(max(tokens // chunks, 1), longest)
    context = int(_ends(draw[5]) ** 2 * (longest - size))
    if limits.kv_tokens is not None:
        chunks = max(min(chunks, (limits.kv_tokens - kv_tokens) // (size + context)), 1)
    complete = size + context >= limits.prompts[0] and draw[6] < 0.8
    return StepShape(((size, context),) * chunks, seqs, kv_tokens, seqs + chunks * complete), [complete] * chunks


def _kv_tokens(limits: Limits, seqs: int, share: float) -> int:
    """KV tokens of so many decodes: between those of the shortest prompts and what fits."""
    count = min(seqs, len(limits.prompts))
    low, high = float(limits.prompts[:count].sum()) + count, float(limits.ends[-count:].sum())
    if limits.kv_tokens is not None:
        high = max(min(high, limits.kv_tokens), low)
    return round(low + (high - low) * share)


def _ends(draw: float) -> float:
    """``draw`` stretched, so that a tenth of all draws each are 0 and 1."""
    return min(max((draw - 0.1) / 0.8, 0.0), 1.0)


def _spread(draw: float, low: int, high: int) -> int:
    """A whole number between ``low`` and ``high``, evenly on a logarithmic scale."""
    return round(math.exp(math.log(low) + (math.log(high) - math.log(low)) * _ends(draw)))
