"""With drafts every estimator still counts tokens: against answers of known distributions, under every policy."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

import vllm_eb.controller
import vllm_eb.policies.marginal
from ebbench.devices.base import Device
from ebbench.devices.loader import load_device
from ebbench.engines.base import EngineResult
from ebbench.engines.sim import SimEngine
from ebbench.records.plan import Plan
from ebbench.spec.server import EngineOptions, parse_speculative
from ebbench.workloads import build_plan
from vllm_eb.policy import parse_policy, policy_types
from vllm_eb.service import AnswerLength
from vllm_eb.strategy import Lengths
from vllm_eb.theory import Drafts, crossover, optimal_threshold

MEAN_TOKENS = 40
REQUESTS, SEQS = 800, 24
DISTRIBUTIONS: dict[str, Callable[[random.Random], float]] = {
    "geometric": lambda dice: 1 + math.floor(math.log(1.0 - dice.random()) / math.log1p(-1.0 / MEAN_TOKENS)),
    "fixed": lambda dice: MEAN_TOKENS,
    "lognormal": lambda dice: dice.lognormvariate(math.log(MEAN_TOKENS) - 0.18, 0.6),
}
DRAFTS = ("", "0.7,0.5,0.3", "1,1,1,1,1")
NEEDED = {
    "deferred": "k=4", "cadence": "every=4", "batchwait": "iters=4,ratio=0.5", "slochunk": "tpot=0.05",
    "eb": "update_every=50", "ebplus": "update_every=50", "marginal": "update_every=50,tpot=0.1",
}  # fmt: skip


def answers(kind: str, seed: int = 1) -> list[int]:
    """Output tokens of all requests."""
    dice = random.Random(seed)
    return [max(1, round(DISTRIBUTIONS[kind](dice))) for _ in range(REQUESTS)]


def setting(rates: str, method: str = "eagle3") -> str | None:
    return f"method={method},acceptance={rates}" if rates else None


def device(rates: str) -> Device:
    drafts = setting(rates)
    return load_device("h200", "qwen3-8b", speculative=None if drafts is None else parse_speculative(drafts))


def plan_of(kind: str) -> Plan:
    """A closed loop whose answers have this distribution."""
    plan = build_plan("balanced", num_prompts=REQUESTS, max_concurrency=SEQS, input_len=64, output_len=8)
    column = pa.array(answers(kind), pa.int32())
    return replace(
        plan, table=plan.table.set_column(plan.table.column_names.index("output_tokens"), "output_tokens", column)
    )


def run(kind: str, policy: str, rates: str, method: str = "eagle3") -> EngineResult:
    options = EngineOptions(max_num_seqs=SEQS, speculative=setting(rates, method))
    return SimEngine().run(plan_of(kind), parse_policy(policy), device(rates), options)


class SeenLengths(Lengths):
    """Keeps the tokens of every answer."""

    made: list[SeenLengths]

    def __init__(self, update_every: int, drafts: Drafts) -> None:
        super().__init__(update_every, drafts)
        self.answers: list[int] = []
        self.made.append(self)

    def on_finish(self, output_tokens: int) -> None:
        super().on_finish(output_tokens)
        self.answers.append(output_tokens)


class SeenAnswers(AnswerLength):
    """Keeps the estimate after every update."""

    made: list[SeenAnswers]

    def __init__(self, prior_tokens: float, window: int, *, product_limit: bool) -> None:
        super().__init__(prior_tokens, window, product_limit=product_limit)
        self.means: list[float] = []
        self.made.append(self)

    def update(self, running_ages: Callable[[], Sequence[int]]) -> None:
        super().update(running_ages)
        self.means.append(self.mean)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> tuple[list[SeenLengths], list[SeenAnswers]]:
    """The estimators of the runs of this test, in their order."""
    monkeypatch.setattr(SeenLengths, "made", [], raising=False)
    monkeypatch.setattr(SeenAnswers, "made", [], raising=False)
    monkeypatch.setattr(vllm_eb.controller, "Lengths", SeenLengths)
    monkeypatch.setattr(vllm_eb.policies.marginal, "AnswerLength", SeenAnswers)
    return SeenLengths.made, SeenAnswers.made


def settled(values: Sequence[float]) -> float:
    """Mean without the first updates, which see the short answers of a start, and the last, which see those left."""
    return float(np.mean(values[4:-2]))


@pytest.mark.parametrize("rates", DRAFTS[1:])
@pytest.mark.parametrize("policy", [name for name in policy_types() if name != "v1"])
def test_every_policy_learns_the_lengths_and_the_acceptance(
    policy: str, rates: str, seen: tuple[list[SeenLengths], list[SeenAnswers]]
) -> None:
    """Of every answer its whole length in tokens, and of drafts the share accepted at each position."""
    run("lognormal", f"{policy}:{NEEDED[policy]}" if policy in NEEDED else policy, rates)
    (lengths,) = seen[0]
    assert sorted(lengths.answers) == sorted(answers("lognormal"))
    drafts = parse_speculative(setting(rates) or "").theory
    assert lengths.drafts.acceptance == pytest.approx(drafts.acceptance, abs=0.02)


@pytest.mark.parametrize("kind", DISTRIBUTIONS)
@pytest.mark.parametrize("targets", ["", ",tpot=0.1", ",ttft=2"])
def test_marginals_mean_answer_is_that_without_drafts(
    targets: str, kind: str, seen: tuple[list[SeenLengths], list[SeenAnswers]]
) -> None:
    """By both of its estimates; drafts accepted beyond an answer's end, and steps in vain, are no tokens of it."""
    for rates in DRAFTS:
        run(kind, f"marginal:update_every=50{targets}", rates)
    plain, *drafted = (settled(one.means) for one in seen[1])
    assert drafted == pytest.approx([plain] * len(drafted), rel=0.06)


@pytest.mark.parametrize("kind", DISTRIBUTIONS)
@pytest.mark.parametrize("estimator", ["published", "censored"])
def test_hazard_and_threshold_are_those_of_the_tokens(kind: str, estimator: str) -> None:
    """The hazard per token does not depend on drafts, the threshold is theorem 3.2's for the true acceptance."""
    hazards = {}
    for rates in DRAFTS:
        result = run(kind, f"eb:estimator={estimator},update_every=50,correction=off", rates)
        updates = [row for row in result.decisions.to_pylist() if row["kind"] == "update"][4:-2]
        hazards[rates] = float(np.mean([row["p0"] for row in updates]))
        drafts = parse_speculative(setting(rates)).theory if rates else Drafts()
        costs = device(rates).calibration
        expected = [optimal_threshold(row["p0"], costs.alpha_p, costs.alpha_d, drafts=drafts).theta0 for row in updates]
        assert np.mean([row["theta0"] for row in updates]) == pytest.approx(np.mean(expected), rel=0.02)
    assert list(hazards.values()) == pytest.approx([hazards[""]] * len(hazards), rel=0.08)


@pytest.mark.parametrize("kind", DISTRIBUTIONS)
def test_the_crossover_is_that_of_the_lengths_and_the_true_acceptance(kind: str) -> None:
    for rates in DRAFTS:
        result = run(kind, "ebplus:update_every=50,correction=off", rates)
        rows = [row for row in result.decisions.to_pylist() if row["lhs"] is not None][4:-2]
        drafts, costs = parse_speculative(setting(rates)).theory if rates else Drafts(), device(rates).calibration
        for side in ("lhs", "rhs"):
            true = [
                getattr(
                    crossover(
                        costs, mu_l=row["mu_l"], mu_o=row["mu_o"], n_obs=row["n_obs"], theta0=row["theta0"],
                        drafts=drafts,
                    ),
                    side,
                )
                for row in rows
            ]  # fmt: skip
            assert np.mean([row[side] for row in rows]) == pytest.approx(np.mean(true), rel=0.03)


@pytest.mark.parametrize("kind", DISTRIBUTIONS)
@pytest.mark.parametrize("rates", DRAFTS[1:])
def test_steps_per_answer_are_those_that_are_made(kind: str, rates: str) -> None:
    """Decode steps of answers, of which the first token comes with the prompt."""
    drafts, dice = parse_speculative(setting(rates) or "").theory, random.Random(3)
    lengths = answers(kind) * 4
    steps = 0
    for tokens in lengths:
        left = tokens - 1
        while left > 0:
            luck = dice.random()
            left -= 1 + sum(luck < rate for rate in drafts.acceptance)
            steps += 1
    assert drafts.steps(float(np.mean(lengths))) == pytest.approx(steps / len(lengths), rel=0.05)
