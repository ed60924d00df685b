"""With speculative decoding ``sim`` and the real vLLM core agree row by row, to the nanosecond, under every policy."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from ebbench.records.plan import Plan
from ebbench.spec.server import EngineOptions
from tests.vllm.drawn_policies import draw_policy
from tests.vllm.emulation import (
    DEVICE,
    Traffic,
    differences,
    drafting_device,
    make_plan,
    random_case,
    run_emulated,
    run_sim,
    seeds,
)
from vllm_eb.policy import least_seqs, parse_policy, policy_types

pytestmark = pytest.mark.vllm


def random_drafts(seed: int) -> tuple[Plan, str, EngineOptions]:
    """A random case with drafts of one to seven tokens, from none accepted to all."""
    plan, policy, options = random_case(seed)
    if least_seqs(parse_policy(policy)) > options.running_limit:
        policy = "v0"
    rng = random.Random(~seed)
    tokens = rng.choice([1, 1, 2, 3, 7])
    rates = sorted((rng.choice([0.0, 1.0, rng.random()]) for _ in range(tokens)), reverse=True)
    speculative = f"method={rng.choice(['eagle', 'mtp', 'ngram'])},acceptance={','.join(map(str, rates))}"
    threshold = options.long_prefill_token_threshold
    longest = rng.choice([40960, max_tokens(plan), max_tokens(plan) + tokens])
    return (
        plan,
        policy,
        replace(
            options,
            speculative=speculative,
            long_prefill_token_threshold=threshold if tokens < threshold <= longest else 0,
            num_kv_blocks=(options.num_kv_blocks or 0) + -(-2 * tokens // options.block_size),
            max_model_len=longest,
        ),
    )


@pytest.mark.parametrize("kind", policy_types())
@pytest.mark.parametrize("seed", seeds(500, 510))
def test_equal_with_drafts_under_every_policy(kind: str, seed: int) -> None:
    plan, _, options = random_drafts(seed)
    policy = draw_policy(kind, seed, options.running_limit, options.max_num_batched_tokens)
    sim, emulated = run_sim(plan, policy, DEVICE, options), run_emulated(plan, policy, DEVICE, options)
    assert differences(sim, emulated) == []
    assert sim.requests["output_tokens"].to_pylist() == plan.table["output_tokens"].to_pylist()


def adaptive(seed: int, options: EngineOptions) -> str:
    """``marginal`` with draft lengths that adapt, in every other case with further settings drawn at random."""
    if seed % 2:
        return f"marginal:draft=adaptive,update_every={1 + seed % 9}"
    drawn = draw_policy("marginal", seed, options.running_limit, options.max_num_batched_tokens)
    return f"{drawn}{',' if ':' in drawn else ':'}draft=adaptive"


@pytest.mark.parametrize("seed", seeds(600, 640))
def test_equal_with_drafts_whose_length_adapts(seed: int) -> None:
    plan, _, options = random_drafts(seed)
    assert options.drafts is not None
    device, policy = drafting_device(options.drafts.tokens), adaptive(seed, options)
    sim, emulated = run_sim(plan, policy, device, options), run_emulated(plan, policy, device, options)
    assert differences(sim, emulated) == []
    assert sim.facts["speculative"] == emulated.facts["speculative"]
    assert sim.requests["output_tokens"].to_pylist() == plan.table["output_tokens"].to_pylist()


def test_drafts_adapt_where_the_engines_are_compared() -> None:
    """Full at first, shorter afterwards: else the test above would compare nothing that varies."""
    shorter = 0
    for seed in range(600, 640):
        plan, _, options = random_drafts(seed)
        assert options.drafts is not None
        device, policy = drafting_device(options.drafts.tokens), adaptive(seed, options)
        drafted = run_sim(plan, policy, device, options).facts["speculative"]["drafted"]
        whole = run_sim(plan, "marginal", device, options).facts["speculative"]["drafted"]
        shorter += drafted[-1] < whole[-1]
        if shorter > 10:
            return
    pytest.fail(f"in {shorter} of 40 cases only")


def max_tokens(plan: Plan) -> int:
    """The longest prompt and output of a plan together."""
    rows = plan.table.select(["input_tokens", "output_tokens"]).to_pylist()
    return max(row["input_tokens"] + row["output_tokens"] for row in rows)


@pytest.mark.parametrize("seed", seeds(300, 400))
def test_equal_with_drafts_under_random_settings(seed: int) -> None:
    plan, policy, options = random_drafts(seed)
    sim, emulated = run_sim(plan, policy, DEVICE, options), run_emulated(plan, policy, DEVICE, options)
    assert differences(sim, emulated) == []
    assert sim.requests["output_tokens"].to_pylist() == plan.table["output_tokens"].to_pylist()


def test_decodes_without_a_draft_lower_the_acceptance_of_n_grams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second request never has a draft, the others have each accepted: half of the decodes get a second token."""
    from ebbench.engines import emulated_core
    from ebbench.engines.emulated import EmulatedEngine

    made = emulated_core.DraftReader.take_drafts
    cores: list[Any] = []

    class Kept(EmulatedEngine):
        def prepare(self, core: Any) -> None:
            cores.append(core)

    def some(reader: emulated_core.DraftReader) -> Any:
        drafts = made(reader)
        found = [
            tokens if int(name[1:]) % 2 else []
            for name, tokens in zip(drafts.req_ids, drafts.draft_token_ids, strict=True)
        ]
        return type(drafts)(drafts.req_ids, found)

    monkeypatch.setattr(emulated_core.DraftReader, "take_drafts", some)
    plan = make_plan(Traffic(sessions=60, concurrency=16))
    options = EngineOptions(max_num_seqs=16, speculative="method=ngram,tokens=1,acceptance=1", num_kv_blocks=4000)
    Kept().run(plan, parse_policy("eb:update_every=5"), DEVICE, options)
    (rate,) = cores[0].scheduler.controller._lengths.drafts.acceptance
    assert 0.25 < rate < 0.45  # requests without drafts take twice as many steps: two of three decodes
