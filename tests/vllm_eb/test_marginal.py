"""The marginal policy: its rule against theory and brute force, its costs, its targets."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.vllm_eb.test_costs import FLAT_THEN_LINEAR, GRID, LINEAR
from vllm_eb.calibration import Calibration, CostGrid, LinearCosts, MixedCost
from vllm_eb.controller import Controller
from vllm_eb.policies.marginal import MarginalPolicy, MarginalSpec
from vllm_eb.policy import parse_policy
from vllm_eb.refills import PAYBACK_FACTOR, MarginalRefill, Refill, payback_tokens, prompts_that_stay
from vllm_eb.service import TPOT_SHARE
from vllm_eb.strategy import EngineFacts, Lengths, View
from vllm_eb.theory import base_threshold


@given(st.floats(2e-4, 5e-2), st.floats(1e-4, 0.3), st.booleans())
@settings(max_examples=60)
def test_under_a_constant_hazard_it_refills_where_prop_3_1_says(p0: float, alpha_p: float, queue: bool) -> None:
    """In the fluid limit, n(t) = N exp(-p0 t), the rule's moment is theta0 N idle slots, by either measure of waste."""
    batch, alpha_d = 10_000_000, 1e-2
    theta0 = base_threshold(p0, alpha_p, alpha_d)
    rule = MarginalRefill(replace(LINEAR, alpha_p=alpha_p), may_mix=False)
    active, step = batch, 0
    while way(rule, active, Refill(8, 512.0)) == "decode":
        rule.decoded(active, 0.0, batch - active if queue else 0)
        step += 1
        active = round(batch * math.exp(-p0 * step))
    # It acts on whole steps, so it may be late by about one step's departures.
    assert theta0 - p0 <= 1 - active / batch <= theta0 + 2 * p0 + 1e-4


@given(
    st.lists(st.integers(1, 50), min_size=3, max_size=40),
    st.floats(1e-3, 0.2),
    st.floats(0.0, 1e-3),
)
@settings(max_examples=100)
def test_for_any_decline_no_other_moment_pays_less_per_token(
    departures: list[int], alpha_p: float, beta_d: float
) -> None:
    """A refill that costs the same whenever it comes; decode steps that cost less the fewer sequences share them."""
    costs = replace(LINEAR, alpha_p=alpha_p, beta_d=beta_d)
    sizes = [sum(departures) + 1]
    for leaving in departures:
        sizes.append(sizes[-1] - leaving)
    rule = MarginalRefill(costs, may_mix=False)
    stopped = len(sizes)
    for index, active in enumerate(sizes):
        if way(rule, active, Refill(8, 512.0)) != "decode":
            stopped = index
            break
        rule.decoded(active, 0.0, 0)

    def paid_per_token(steps: int) -> float:
        return (alpha_p + sum(costs.decode_s(n, 0) for n in sizes[:steps])) / sum(sizes[:steps])

    best = min(paid_per_token(steps) for steps in range(1, len(sizes) + 1))
    assert paid_per_token(stopped) == pytest.approx(best, rel=1e-9)


@given(st.integers(1, 50), st.integers(20, 500))
@settings(max_examples=50)
def test_a_refill_is_due_once_waiting_costs_as_much_as_refilling(waiting: int, decoding: int) -> None:
    rule = MarginalRefill(LINEAR, may_mix=False)
    steps = 0
    while way(rule, decoding, Refill(waiting, 512.0)) == "decode":
        rule.decoded(decoding, 0.0, waiting)
        steps += 1
    wasted_a_step_s = LINEAR.alpha_d * waiting / decoding  # the share of the step that they would have carried
    assert (steps - 1) * wasted_a_step_s < LINEAR.alpha_p * (1 + 1e-9)
    assert steps * wasted_a_step_s >= LINEAR.alpha_p * (1 - 1e-9)


def test_prompts_below_the_fixed_cost_of_a_prefill_do_not_hasten_a_refill() -> None:
    """Up to 1,024 prompt tokens a prefill costs 20 ms whatever its number of tokens: all of that is its fixed cost."""
    for prompts in (1, 7):
        rule = MarginalRefill(FLAT_THEN_LINEAR, may_mix=False)
        steps = 0
        while way(rule, 100, Refill(prompts, 128.0), 100.0) == "decode":
            rule.decoded(100, 100.0, 10)
            steps += 1
        wasted_a_step_s = FLAT_THEN_LINEAR.decode_s(100, 100) * 1.1 - FLAT_THEN_LINEAR.decode_s(110, 100)
        assert (steps - 1) * wasted_a_step_s < 20e-3 * (1 + 1e-9)
        assert steps * wasted_a_step_s >= 20e-3 * (1 - 1e-9)


def test_marginal_mixes_where_a_mixed_step_is_cheap_and_waits_elsewhere() -> None:
    kind = replace(LINEAR, mixed_a=5e-5, mixed_b=0.0)
    dear = replace(LINEAR, mixed_a=6e-5, mixed_b=2e-4)
    for refill in (Refill(1, 512.0), Refill(1, 512.0, queued=True, hazard=0.01)):
        for costs, expected in ((kind, "mixed"), (dear, "decode")):
            rule = MarginalRefill(costs, may_mix=True)
            rule.decoded(500, 300.0, 1)
            assert way(rule, 500, refill, 300.0) == expected
    rule = MarginalRefill(kind, may_mix=False)
    assert rule.choose(decoding=500, context_tokens=300, refill=Refill(1, 512.0), must=True).way == "prefill"


def test_ways_are_compared_at_their_best_not_at_what_happens_to_be_idle() -> None:
    """One prompt is cheaper beside the decodes, thirty are cheaper alone: with a queue, the cost of thirty decides."""
    costs = replace(LINEAR, alpha_p=3e-2, alpha_d=3e-2, alpha_mb=3e-2, mixed_a=6e-5, mixed_b=4e-5)
    rule = MarginalRefill(costs, may_mix=True)
    now = rule.choose(decoding=500, context_tokens=300, refill=Refill(1, 512.0), must=True)
    assert now.way == "mixed"
    assert now.overhead_mixed_s is not None
    assert now.overhead_exclusive_s is not None
    assert now.overhead_mixed_s < now.overhead_exclusive_s
    queued = rule.choose(decoding=500, context_tokens=300, refill=Refill(1, 512.0, 0, True, 0.004), must=True)
    assert queued.way == "prefill"


def test_marginal_decodes_without_prompts_and_prefills_without_decodes() -> None:
    rule = MarginalRefill(LINEAR, may_mix=True)
    assert way(rule, 5, Refill(0, 100.0), 10.0) == "decode"
    assert way(rule, 0, Refill(1, 1.0)) == "prefill"


def test_steps_with_prompts_have_the_size_at_which_prompts_cost_least() -> None:
    grid = CostGrid(
        (1024, 4096, 8192), (1, 64), (128, 512), (0.05, 0.16, 0.4), ((0.01, 0.01), (0.02, 0.02)),
        (((0.06,) * 2,) * 2, ((0.17,) * 2,) * 2, ((0.41,) * 2,) * 2),
    )  # fmt: skip
    linear = Calibration(5e-3, 5e-5, 1e-2, 1e-4)
    calibration = replace(linear, grid=grid)
    facts = EngineFacts(calibration, max_num_seqs=64, block_size=16, num_blocks=9999, max_num_batched_tokens=8192)
    made = MarginalPolicy(MarginalSpec(), facts, Lengths(100))
    made.lengths.mu_new = 1000.0
    assert made._token_budget(view(decoding=30), "prefill", 7) == 3500  # 0.28 s in two even steps; 0.33 s in one
    assert made._refill_budget() is None  # the last step takes what is left
    assert made._refill_budget() == 4096  # prompts were longer than the mean says
    assert made._token_budget(view(decoding=30), "prefill", 4) is None  # one step
    assert made._token_budget(view(decoding=30), "mixed", 7) == 4126
    assert made._token_budget(view(decoding=30), "decode", 7) is None
    ranks = MarginalPolicy(MarginalSpec(), replace(facts, ranks=2), Lengths(100))
    assert ranks._token_budget(view(decoding=30), "prefill", 7) == 4096  # as their plan counts passes
    punctual = MarginalPolicy(MarginalSpec(tpot=0.1), facts, Lengths(100))
    assert punctual._token_budget(view(decoding=30), "prefill", 7) == 4096
    whole = MarginalPolicy(MarginalSpec(), replace(facts, calibration=linear), Lengths(100))
    assert whole._token_budget(view(decoding=30), "prefill", 30) is None


@pytest.mark.parametrize(
    ("ranks", "mix", "answer_tokens", "chosen"),
    [(2, True, 1.0, "mixed"), (2, True, 100.0, "prefill"), (2, False, 1.0, "prefill"), (1, True, 1.0, "prefill")],
)
def test_ranks_in_lockstep_fill_every_pass_where_answers_have_one_token(
    ranks: int, mix: bool, answer_tokens: float, chosen: str
) -> None:
    """Where nothing decodes, refills that end leave a last pass that is not full, as long as the fullest rank's."""
    facts = EngineFacts(
        Calibration(5e-3, 5e-5, 1e-2, 1e-4), max_num_seqs=64, block_size=16, num_blocks=9999,
        max_num_batched_tokens=8192, ranks=ranks,
    )  # fmt: skip
    made = MarginalPolicy(MarginalSpec(mix=mix), facts, Lengths(100))
    made.lengths.mu_o = answer_tokens
    assert made._cheapest_step(view(decoding=0), 3, blocked=False).way == chosen


def way(rule: MarginalRefill, decoding: int, refill: Refill, context_tokens: float = 0.0) -> str:
    return rule.choose(decoding=decoding, context_tokens=context_tokens, refill=refill, must=False).way


def test_figures_kept_for_one_view_change_no_answer() -> None:
    """Where answers are long, admissions depend on what one more sequence costs at the view's context, and on prompts:
    policies that keep figures of earlier views must answer as one that has seen only this view."""
    grid = replace(GRID, tokens=(4096, 8192), seqs=(1, 101), prefill=(0.2, 0.4), decode=((0.01, 0.04), (0.02, 0.08)))
    engine = EngineFacts(Calibration(5e-3, 5e-5, 1e-2, 1e-4, grid=grid), 4000, 16, 800, 8192)

    def made(prompts: list[int]) -> MarginalPolicy:
        lengths = Lengths(100)
        lengths.mu_o = 5000.0
        policy = MarginalPolicy(MarginalSpec(), engine, lengths)
        for prompt in prompts:
            lengths.on_prompt(prompt)
            policy.on_prompt(prompt, 0)
        return policy

    asked = made([])
    seen = []
    prompts = [400, 90, 90, 700]
    for number, prompt in enumerate(prompts):
        one = view(decoding=20, free_blocks=500)
        asked.prompts_that_fit(one)
        asked.lengths.on_prompt(prompt)
        asked.on_prompt(prompt, 0)
        for same in (one, one, view(decoding=20, free_blocks=400), view(decoding=30, free_blocks=400)):
            seen.append(asked.prompts_that_fit(same))
            assert seen[-1] == made(prompts[: number + 1]).prompts_that_fit(same)
    assert min(seen) > 0
    assert len(set(seen)) == 3 * len(prompts)


def controller(policy: str) -> Controller:
    calibration = Calibration(5e-3, 5e-5, 1e-2, 1e-4, mixed=MixedCost(6e-5, 2e-4, 1e-5))
    return Controller(
        parse_policy(policy), calibration, max_num_seqs=100, block_size=16, num_blocks=1000, max_num_batched_tokens=8192
    )


def view(**changes: float) -> View:
    return View(0.0, 0, 0, 0, 0, 500)._replace(**changes)  # type: ignore[arg-type]


def test_a_request_about_to_miss_its_target_makes_the_refill_due() -> None:
    made = controller("marginal:ttft=10,mix=off")
    assert made.decide(view(decoding=90, waiting=5, oldest_wait_s=1.0)).phase == "decode"
    assert made.decide(view(decoding=90, waiting=5, oldest_wait_s=7.0)).phase == "prefill"


def test_after_a_preemption_room_is_left_to_grow_and_less_again_with_time() -> None:
    made = controller("marginal:mix=off")
    for _ in range(100):
        made.on_prompt(100)
    half_answer_each(made, ended=48)
    full = view(decoding=80, waiting=50, free_blocks=200)
    before = made.decide(full).n_limit
    assert 80 < before <= 100
    for _ in range(8):
        made.on_prompt(100)
        after = made.decide(full._replace(preempted=1)).n_limit
    assert after < before
    half_answer_each(made, ended=1000)
    assert made.decide(full).n_limit > after


def half_answer_each(made: Controller, *, ended: int) -> None:
    """``ended`` answers of 100 tokens end, then 80 are made up to 60 tokens."""
    for _ in range(ended):
        made.on_finish(100)
    for _ in range(60):
        made.decide(view(decoding=80, waiting=0, free_blocks=200))


def test_one_wave_of_preemptions_counts_once() -> None:
    """Requests preempted while none was admitted had been admitted before the reserve was raised."""
    made, again = controller("marginal:mix=off"), controller("marginal:mix=off")
    for each in (made, again):
        each.on_prompt(100)
        each.decide(view(decoding=80, waiting=50, preempted=1))
    for _ in range(20):
        made.decide(view(decoding=80, waiting=50))
        again.decide(view(decoding=80, waiting=50, preempted=1))
    state = view(decoding=10, waiting=50, free_blocks=300)
    assert 10 < made.decide(state).n_limit < 100
    assert again.decide(state).n_limit == made.decide(state).n_limit


def test_tokens_of_running_answers_are_counted_not_guessed() -> None:
    """The shortest prompts first: the last ones admitted are the longest, and most running ones are shorter."""
    made, _ = young_batch("marginal:mix=off,order=shortest")
    for prompt in (*[10] * 30, *[400] * 10):
        made.on_prompt(prompt)
    for _ in range(200):  # half of 400 tokens: 30 * 10 + 10 * 400 + 40 * 200 of 16,000 tokens are used
        made.decide(view(decoding=40, waiting=0, free_blocks=230))
    # 3,680 tokens are free, and hardly any are lacking. By the mean of the last prompts, 166 tokens, 41 would fit.
    assert 46 <= made.decide(view(decoding=40, waiting=100, free_blocks=230)).n_limit <= 50


def young_batch(policy: str) -> tuple[Controller, View]:
    """50 of 100 sequences run, all just begun: 16 prompt tokens each and 400 to be made."""
    made = controller(policy)
    for _ in range(200):
        made.on_prompt(16)
    for _ in range(2000):
        made.on_finish(400)
        for _ in range(10):
            made.decide(view(decoding=40, waiting=0, free_blocks=100))
    return made, view(decoding=50, waiting=100, free_blocks=950)


def test_with_a_ttft_target_a_young_batch_leaves_memory_for_its_answers() -> None:
    # 16,000 tokens of KV hold 1,000 such prompts today, and 16000 / (16 + 400 / 2) = 74 of them half answered.
    made, young = young_batch("marginal:mix=off,ttft=1000")
    assert 70 <= made.decide(young).n_limit <= 78


def test_without_targets_a_young_batch_fills_all_slots() -> None:
    made, young = young_batch("marginal:mix=off")
    assert made.decide(young).n_limit == 100


@pytest.mark.parametrize(
    ("targets", "wait_s", "least", "most"),
    [
        ("ttft=10,tpot=1", 1.0, 70, 78),  # no request is nearly late
        ("ttft=10,tpot=1", 7.0, 100, 100),  # tokens take 20 ms of a second
        ("ttft=10,tpot=0.024", 7.0, 70, 78),  # answers cannot pause
        ("ttft=10", 7.0, 100, 100),
        ("tpot=1", 7.0, 70, 78),
    ],
)
def test_a_nearly_late_first_token_admits_what_answers_can_spare(
    targets: str, wait_s: float, least: int, most: int
) -> None:
    made, young = young_batch(f"marginal:mix=off,{targets}")
    assert least <= made.decide(young._replace(oldest_wait_s=wait_s)).n_limit <= most


@given(
    alpha_d=st.floats(0, 0.1), beta_d=st.floats(0, 1e-3), beta_p=st.floats(1e-6, 1e-3),
    active=st.integers(1, 2000), prompt=st.floats(1, 10_000), per_step=st.floats(1, 8),
)  # fmt: skip
def test_a_sequence_pays_for_its_second_prefill_with_cheaper_tokens(
    alpha_d: float, beta_d: float, beta_p: float, active: int, prompt: float, per_step: float
) -> None:
    """With linear costs one more sequence saves alpha_d / n per token of a step, whatever its own cost."""
    saved_s = alpha_d / per_step / active
    assume(abs(saved_s - beta_p) > 1e-6 * (saved_s + beta_d))  # else rounding decides
    costs = LinearCosts(1e-3, beta_p, alpha_d, beta_d, 1e-3)
    tokens = payback_tokens(costs, beta_p, active=active, context_tokens=100, prompt_tokens=prompt, per_step=per_step)
    if math.isfinite(tokens):
        assert tokens * saved_s == pytest.approx(beta_p * (prompt + tokens), rel=1e-3)
    else:
        assert saved_s <= beta_p


@given(
    tokens=st.one_of(st.just(math.inf), st.floats(0, 1e6)), active=st.integers(1, 2000),
    free=st.integers(0, 1_000_000), prompt=st.floats(1, 10_000),
)  # fmt: skip
def test_admitted_prompts_fit_until_they_have_paid_for_themselves(
    tokens: float, active: int, free: int, prompt: float
) -> None:
    more = prompts_that_stay(PAYBACK_FACTOR * tokens, active=active, free_tokens=free, prompt_tokens=prompt)
    assert more >= 0.0
    if more > 0.0:
        assert more * prompt + (active + more) * PAYBACK_FACTOR * tokens <= free * (1 + 1e-9)


def test_cached_prompt_tokens_are_not_counted_as_work() -> None:
    """With 900 of 1,000 tokens cached a refill is a tenth of the work; here that decides between now and later."""
    limits = {}
    engine = EngineFacts(
        Calibration(5e-3, 5e-5, 1e-2, 1e-4),
        max_num_seqs=100,
        block_size=16,
        num_blocks=1000,
        max_num_batched_tokens=8192,
    )
    for cached in (0, 9_000):
        lengths = Lengths(100)
        for _ in range(200):
            lengths.on_prompt(10_000, cached)
        made = MarginalPolicy(MarginalSpec(mix=False), engine, lengths)
        limits[cached] = made.possible_refill(view(decoding=50, waiting=10), 2).tokens
    assert limits[9_000] == pytest.approx(2_000, rel=0.01)
    assert limits[0] == pytest.approx(8192)


def test_a_refill_pauses_for_answers_that_fall_behind_and_goes_on() -> None:
    made = controller("marginal:tpot=0.1,mix=off")
    made.decide(view(decoding=0, waiting=90))
    phases = [made.decide(view(now_s=0.2 * step, decoding=20, waiting=70)).phase for step in range(1, 9)]
    assert phases[0] == "prefill"
    assert "decode" in phases
    later = [made.decide(view(now_s=2 + 0.02 * step, decoding=20, waiting=70)).phase for step in range(40)]
    assert "prefill" in later


def test_with_a_target_out_of_reach_the_batch_is_not_bounded_by_it() -> None:
    made = controller("marginal:tpot=0.001,mix=off")
    assert (
        made.decide(view(decoding=0, waiting=90)).n_limit
        == controller("marginal:mix=off").decide(view(decoding=0, waiting=90)).n_limit
    )


def test_a_burst_of_long_answers_is_admitted_where_targets_allow() -> None:
    calibration = Calibration(LINEAR.alpha_p, LINEAR.beta_p, LINEAR.alpha_d, LINEAR.beta_d)
    seqs, context = 300, 512 + 50
    target_s = 1.3 * calibration.costs.decode_s(seqs, context) / TPOT_SHARE
    made = Controller(
        parse_policy(f"marginal:tpot={target_s}"),
        calibration,
        max_num_seqs=seqs,
        block_size=16,
        num_blocks=100_000,
        max_num_batched_tokens=8192,
    )
    for _ in range(100):
        made.on_prompt(10)
    view = View(0.0, 0, 100, 0, 1000, 90_000)
    limits = [made.decide(view).n_limit for _ in range(200)]
    assert limits[0] < limits[-1]
    assert limits[-1] > 0.9 * seqs
