"""Simulates candidates on the same plans by successive halving, and combines the results with the theory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from ebbench.advice.candidates import candidate, candidates, engine_count, expected_load, figure
from ebbench.advice.choice import (
    BASELINE,
    Advice,
    AdviceQuestion,
    BudgetedPolicy,
    DroppedPolicy,
    ExpectedLoad,
    GainCurve,
    PolicyScore,
    Tuning,
    choose,
    predict,
    relative_gain,
    sign_changes,
)
from ebbench.analysis.environment import time_note
from ebbench.analysis.summary import summarise
from ebbench.analysis.validity import by_policy, told_once
from ebbench.engines.base import check_options
from ebbench.errors import UsageError
from ebbench.runs.prepare import device_of, plan_of
from ebbench.runs.store import RunStore, with_progress
from ebbench.spec.run import RunSpec
from ebbench.traffic.spec import load_scenario
from ebbench.workloads.options import PlanOptions
from vllm_eb.policy import least_seqs, parse_policy
from vllm_eb.theory import NO_DRAFTS

# Searches policies and token budgets together within a bounded number of runs: successive halving.
#
# Every pair of a policy and a budget runs on the first seed. The better third goes on to three seeds, the better
# third of those to nine, and so on up to the number of seeds asked for (Karnin, Koren and Somekh, "Almost optimal
# exploration in multi-armed bandits", 2013, with a third instead of a half, as in Hyperband, Li et al. 2018). With P
# pairs and S seeds that is at most about P (1 + log3 S) runs where a full grid takes P S.
#
# Halving suits this problem because all pairs run on the same plans. The variance between seeds, which is common to
# all, does not enter the comparison, so one seed ranks them nearly as all seeds do, and the seeds go to those pairs
# that are close to the best. A model-based search (Bayesian optimisation) would need a distance between policies,
# which have none. Runs of one round do not depend on one another, so all cores are busy.
#
# These pairs are never dropped: the reference, with which all gains are compared; the best budget of vLLM's own
# scheduling, so that the gain of a tuned budget alone is known as precisely as that of the best policy; and, among
# few policies, the best budget of each, since users want to see the policies that they named.

FACTOR = 3
"""Ratio of seeds between rounds, and of the pairs before a round to those after it."""
FEWEST = 8
"""So many pairs reach the last round; of so many policies or fewer, each keeps its best budget."""

Make = Callable[[str, Sequence[RunSpec]], None]
"""Carries out the runs of a round, named by a text."""


@dataclass(frozen=True)
class SearchResult:
    """Pairs that ran on all seeds, and those that were dropped before, best first."""

    finalists: tuple[BudgetedPolicy, ...]
    dropped: tuple[DroppedPolicy, ...]


def budgeted_policies(question: AdviceQuestion) -> list[BudgetedPolicy]:
    """All pairs that a server can run; the reference budget with every policy comes first."""
    pairs = [BudgetedPolicy(policy, question.budget) for policy in question.policies]
    tried = (BudgetedPolicy(*pair[::-1]) for pair in product(question.budgets, question.policies))
    return list(dict.fromkeys([*pairs, *(pair for pair in tried if _valid(question, *pair))]))


def _valid(question: AdviceQuestion, policy: str, budget: int) -> bool:
    try:
        check_options(candidate(question, policy, 0, budget).server, [parse_policy(policy)])
    except UsageError:
        return False
    return True


def seeds_per_round(seeds: int) -> list[int]:
    """Seeds on which the pairs of each round have run at its end: 1, 3, 9, ... and the number asked for."""
    seeds_by_round = [1]
    while seeds_by_round[-1] < seeds:
        seeds_by_round.append(min(seeds, FACTOR * seeds_by_round[-1]))
    return seeds_by_round


def search(question: AdviceQuestion, make: Make, objective: Callable[[RunSpec], float]) -> SearchResult:
    """Carry out the rounds. ``objective``: the figure of a finished run that decides, larger is better."""
    left, dropped = budgeted_policies(question), []
    rounds = seeds_per_round(question.seeds)
    for index, seeds in enumerate(rounds):
        cells = {pair: candidates(question, pair, seeds) for pair in left}
        name = f"candidates, round {index + 1} of {len(rounds)}" if len(rounds) > 1 else "candidates"
        make(name, [cell for seed in range(seeds) for pair in left if (cell := cells[pair][seed])])
        values = {pair: sum(map(objective, cells[pair])) / seeds for pair in left}
        if seeds == question.seeds:
            break
        best = max(values.values())
        kept = _next_round(question, values)
        dropped += [
            DroppedPolicy(*pair, seeds, values[pair] / best - 1 if best > 0 else 0.0)
            for pair in left
            if pair not in kept
        ]
        left = [pair for pair in left if pair in kept]
    return SearchResult(tuple(left), tuple(sorted(dropped, key=lambda policy: (-policy.seeds, -policy.behind_best))))


def _next_round(question: AdviceQuestion, values: Mapping[BudgetedPolicy, float]) -> set[BudgetedPolicy]:
    """The pairs that go on to the next round."""
    ranked = sorted(values, key=lambda pair: -values[pair])  # stable: the reference budget first among equals
    kept = set(ranked[: max(-(-len(ranked) // FACTOR), FEWEST)])
    of_reference = BASELINE if BASELINE in question.policies else question.policies[0]
    always = [pair for pair in ranked if pair == (of_reference, question.budget)]
    best = {pair.policy: pair for pair in reversed(ranked)}
    shown = question.policies if len(question.policies) <= FEWEST else (BASELINE,)
    return kept.union(always, (best[policy] for policy in shown if policy in best))


CONCURRENCIES = (16, 32, 64, 128, 256, 512, 1024, 2048)
SHARES = (0.1, 0.25, 0.5, 0.75, 0.9)
PROBE_PROMPTS, PROBE_TURNS = 1200, 8
"""Fewest requests of a point, and per open one. Filling and draining count against EB: at 256 open (ShareGPT, RTX PRO
6000) it gains 3 % with three requests per open one, 9 with eight and 16 with forty."""


def concurrency_cells(question: AdviceQuestion, load: ExpectedLoad) -> dict[float, tuple[RunSpec, RunSpec]]:
    """v1 and EB at each concurrency, closed loop, with the workload's lengths (or a scenario's mean lengths)."""
    lengths: dict[str, int] = {}
    if question.spec.plan.scenario is not None and load_scenario(question.spec.plan.scenario).own_lengths:
        lengths = _lengths(load.mu_l, load.mu_o)
    most = max(2 * question.spec.server.max_num_seqs, CONCURRENCIES[1])  # at least two points
    return {c: _pair(question, c, lengths) for c in CONCURRENCIES if c <= most}


def mix_cells(question: AdviceQuestion, load: ExpectedLoad) -> dict[float, tuple[RunSpec, RunSpec]]:
    """v1 and EB at each decode share, with unchanged tokens per request, uniform lengths and the load's concurrency."""
    total, concurrency = load.mu_l + load.mu_o, min(load.concurrency, 2048)
    return {r: _pair(question, concurrency, _lengths((1 - r) * total, r * total)) for r in SHARES}


def _lengths(mu_l: float, mu_o: float) -> dict[str, int]:
    return {"input_len": max(1, round(mu_l)), "output_len": max(1, round(mu_o))}


def _pair(question: AdviceQuestion, concurrency: int, lengths: dict[str, int]) -> tuple[RunSpec, RunSpec]:
    spec, kept = question.spec, _LIMIT_KEYS if lengths else (*_LIMIT_KEYS, *_LENGTH_KEYS)
    own = {name: getattr(spec.plan, name) for name in kept}
    workload = {"workload": "balanced", "source": "profile"} if lengths else {"workload": spec.plan.workload}
    plan = PlanOptions(
        scenario="saturated", num_prompts=max(PROBE_PROMPTS, PROBE_TURNS * concurrency), with_text=False,
        max_concurrency=concurrency, **{**workload, **own, **lengths},
    )  # fmt: skip
    v1, eb = (replace(spec, plan=plan, policy=policy, weight=1.0) for policy in (BASELINE, "eb"))
    return v1, eb


_LENGTH_KEYS = ("source", "input_len", "output_len", "length_distribution", "tokenizer", "columns", "redraw")
_LIMIT_KEYS = ("max_model_len", "drop_too_long")

BUDGETS = (4096, 8192, 16384)
BATCHES = (256, 512, 1024, 2048)


def tuning_cells(question: AdviceQuestion, policy: str, budget: int | None = None) -> list[RunSpec]:
    """The chosen policy at other valid budgets and batch sizes, first seed; its chosen budget comes first."""
    own = candidate(question, policy, 0, budget)
    least = least_seqs(parse_policy(policy))
    pairs = [(b, n) for b in BUDGETS for n in BATCHES if n >= least]
    return [own, *(own.changed(max_num_batched_tokens=b, max_num_seqs=n) for b, n in pairs)]


def tune(question: AdviceQuestion, policy: str, store: RunStore, budget: int | None = None) -> Tuning:
    """The best of the tuning cells, which must have been run. Raises UsageError."""
    cells = list(dict.fromkeys(tuning_cells(question, policy, budget)))
    values = [objective(question, store, cell) for cell in cells]
    best = max(range(len(cells)), key=values.__getitem__)
    gain = values[best] / values[0] - 1 if values[0] else 0.0
    return Tuning(len(cells), cells[best].server.max_num_batched_tokens, cells[best].server.max_num_seqs, gain)


def probe(pairs: Mapping[float, tuple[RunSpec, RunSpec]], store: RunStore, *, log: bool) -> GainCurve:
    """EB's gain in total tokens/s over a sweep. Raises UsageError if a run is missing."""
    x, gains = [], []
    for at, (v1, eb) in sorted(pairs.items()):
        rates = [figure(store, cell, "total_token_throughput") for cell in (v1, eb)]
        x.append(float(at))
        gains.append(rates[1] / rates[0] - 1)
    scale = [math.log(value) for value in x] if log else x
    crossings = tuple(math.exp(value) if log else value for value in sign_changes(scale, gains))
    return GainCurve(tuple(x), tuple(gains), crossings)


@dataclass(frozen=True)
class Effort:
    """How the runs of an advice are made."""

    crossover: bool = True
    tune: bool = False
    workers: int | None = None
    quiet: bool = False


def find_advice(question: AdviceQuestion, store: RunStore, effort: Effort) -> Advice:
    """Search, probe the crossovers and tune, as far as that is asked for. Raises UsageError, RunError."""
    carry_out = partial(with_progress, store=store, workers=effort.workers, quiet=effort.quiet)
    make = partial(carry_out, whole=bool(question.slo))
    searched = search(question, make, lambda cell: objective(question, store, cell))
    if effort.crossover:
        load = expected_load(question, store)
        pairs = [*concurrency_cells(question, load).values(), *mix_cells(question, load).values()]
        carry_out("crossovers", [cell for pair in pairs for cell in pair], whole=False)
    advice = advise(question, store, searched, with_crossover=effort.crossover)
    if not effort.tune:
        return advice
    policy, budget = advice.chosen.policy, advice.chosen.max_num_batched_tokens
    carry_out("settings", tuning_cells(question, policy, budget), whole=bool(question.slo))
    return replace(advice, tuning=tune(question, policy, store, budget))


def advise(question: AdviceQuestion, store: RunStore, searched: SearchResult, *, with_crossover: bool) -> Advice:
    """Combine stored runs and theory; the runs must exist. Raises UsageError, TheoryError."""
    first = candidate(question, BASELINE, 0)
    load, plan, device = expected_load(question, store), plan_of(first), device_of(first)
    engines = engine_count(question)
    of_one = replace(load, concurrency=math.ceil(load.concurrency / engines))
    drafts = NO_DRAFTS if first.server.drafts is None else first.server.drafts.theory
    theory = predict(of_one, device.calibration, device.kv_capacity_tokens, question.spec.server.max_num_seqs, drafts)
    scores = score(question, store, searched.finalists)
    chosen, reason = choose(scores)
    return Advice(
        question, load, theory, scores, chosen, reason,
        probe(concurrency_cells(question, load), store, log=True) if with_crossover else None,
        probe(mix_cells(question, load), store, log=False) if with_crossover else None,
        notes=(
            *map(str, plan.warnings), *_caveats(question, store, searched.finalists),
            *filter(None, [time_note(plan.facts)]),
        ),
        dropped=searched.dropped, engines=engines,
    )  # fmt: skip


def _caveats(question: AdviceQuestion, store: RunStore, finalists: Sequence[BudgetedPolicy]) -> list[str]:
    """What is estimated in the runs and matters to them, and what a full KV cache cost, each once."""
    cells = [cell for pair in finalists for cell in candidates(question, pair)]
    made = [(cell.policy, result.caveats) for cell in cells if (result := store.get(cell)) is not None]
    return told_once([caveats for _, caveats in made], by_policy([policy for policy, _ in made]))


def score(question: AdviceQuestion, store: RunStore, finalists: Sequence[BudgetedPolicy]) -> tuple[PolicyScore, ...]:
    """Scores of the candidates, best objective first."""
    values = {pair: [objective(question, store, cell) for cell in candidates(question, pair)] for pair in finalists}
    best = max(values, key=lambda pair: sum(values[pair]))
    scores = [_score(question, store, pair, values, best) for pair in finalists]
    return tuple(sorted(scores, key=lambda scored: -scored.objective))


def objective(question: AdviceQuestion, store: RunStore, cell: RunSpec) -> float:
    """The figure of a finished run that decides: tokens/s, or requests/s within the targets. Raises UsageError."""
    if not question.slo:
        return figure(store, cell, "total_token_throughput")
    measured = store.get(cell)
    assert measured is not None  # the caller made the runs
    return summarise(measured.run, question.slo).metrics.request_goodput or 0.0


def _score(
    question: AdviceQuestion, store: RunStore, pair: BudgetedPolicy, values: Mapping[BudgetedPolicy, list[float]],
    best: BudgetedPolicy,
) -> PolicyScore:  # fmt: skip
    own, budget, cells = values[pair], pair.max_num_batched_tokens, candidates(question, pair)
    reference = BudgetedPolicy(BASELINE, question.budget)

    def mean(key: str) -> float:
        return sum(figure(store, cell, key) for cell in cells) / len(cells)

    attainment = None
    if question.slo:
        shares = [summarise(measured.run, question.slo).metrics.slo_attainment or 0.0
                  for cell in cells if (measured := store.get(cell)) is not None]  # fmt: skip
        attainment = sum(shares) / len(shares)
    return PolicyScore(
        pair.policy, sum(own) / len(own), tuple(own), relative_gain(own, values.get(reference)),
        relative_gain(own, values[best]), attainment, mean("median_ttft_ms"), mean("median_tpot_ms"),
        mean("total_token_throughput"), budget, budget == question.budget,
    )  # fmt: skip
