"""The controller: its decisions for given counts, and the reasons in its records."""

from __future__ import annotations

import re
from dataclasses import replace

import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbench.render.sentences import REASONS
from ebbench.spec.server import EngineOptions
from tests.simulation.worlds import World, plan
from vllm_eb.calibration import Calibration, MixedCost
from vllm_eb.controller import Controller
from vllm_eb.policy import parse_policy
from vllm_eb.strategy import View
from vllm_eb.theory import crossover

CALIBRATION = Calibration(
    alpha_p=5e-3, beta_p=5e-5, alpha_d=1e-2, beta_d=1e-4, mixed=MixedCost(6e-5, 2e-4, 1e-5), margin=1e-6
)
VIEW = View(now_s=0.0, step_id=0, decoding=0, prefilling=0, waiting=0, free_blocks=1000)


def controller(policy: str, *, max_num_seqs: int = 100, num_blocks: int = 1000) -> Controller:
    return Controller(
        parse_policy(policy),
        CALIBRATION,
        max_num_seqs=max_num_seqs,
        block_size=16,
        num_blocks=num_blocks,
        max_num_batched_tokens=8192,
        keep_records=True,
    )


def feed(made: Controller, count: int, *, prompt: int = 100, output: int = 200) -> None:
    for _ in range(count):
        made.on_prompt(prompt)
        made.on_finish(output)


def phase(made: Controller, **counts: float) -> str:
    return made.decide(VIEW._replace(**counts)).phase  # type: ignore[arg-type]


def test_records_are_kept_only_where_they_are_read() -> None:
    """With the KV cache full every step would leave two; a server that records nothing must not gather them."""
    for keep in (False, True):
        made = Controller(
            parse_policy("v0"),
            CALIBRATION,
            max_num_seqs=100,
            block_size=16,
            num_blocks=1000,
            max_num_batched_tokens=8192,
            keep_records=keep,
        )
        view = VIEW._replace(decoding=10, waiting=90)
        for _ in range(50):
            if made.decide(view).phase == "prefill":
                made.prefill_blocked(view)
        assert len(made.drain_records()) == (50 if keep else 0)
    made = controller("v0")
    made.decide(VIEW._replace(decoding=10, waiting=90))
    assert made.drain_records()[-1].values["idle"] == 90
    assert made.drain_records() == []


@pytest.mark.parametrize("running", [100, 103])
def test_full_slots_are_recorded_as_none_idle(running: int) -> None:
    made = controller("v0")
    made.decide(VIEW._replace(decoding=10, waiting=90))
    made.decide(VIEW._replace(decoding=running, waiting=0))
    assert made.drain_records()[-1].values["idle"] == 0


@pytest.mark.parametrize("policy", ["v0", "deferred:k=30", "eb:theta=0.6", "eb", "marginal", "cadence:every=9"])
def test_answers_whose_last_token_is_in_flight_hold_no_prompt_back(policy: str) -> None:
    made = controller(policy, num_blocks=10_000)
    made.decide(VIEW._replace(waiting=20, free_blocks=9_000))
    for _ in range(20):
        made.on_prompt(10)
    out = VIEW._replace(decoding=20, waiting=50, free_blocks=9_000, step_id=1, last_tokens_out=True)
    decision = made.decide(out)
    assert decision.phase in ("prefill", "mixed")
    assert decision.running_limit == 70 if decision.phase == "prefill" else decision.running_limit > 20
    full = out._replace(decoding=100)
    assert controller(policy).decide(full).phase in ("decode", "mixed"), "there is no slot for a prompt"


def test_v0_refills_for_one_free_slot() -> None:
    made = controller("v0")
    assert phase(made, decoding=100, waiting=5) == "decode"
    assert phase(made, decoding=99, waiting=5) == "prefill"


def test_deferred_waits_for_k_departures_whatever_the_queue() -> None:
    made = controller("deferred:k=10")
    assert phase(made, decoding=91, waiting=500) == "decode"
    assert phase(made, decoding=90, waiting=1) == "prefill"


@pytest.mark.parametrize(("decoding", "waiting", "expected"), [(51, 500, "decode"), (50, 500, "prefill")])
def test_eb_refills_when_k_slots_are_idle(decoding: int, waiting: int, expected: str) -> None:
    assert phase(controller("eb:theta=0.5"), decoding=decoding, waiting=waiting) == expected


@pytest.mark.parametrize(("decoding", "waiting", "expected"), [(20, 19, "decode"), (20, 20, "prefill")])
def test_eb_with_a_short_queue_acts_as_if_k_slots_were_idle(decoding: int, waiting: int, expected: str) -> None:
    assert phase(controller("eb:theta=0.5"), decoding=decoding, waiting=waiting) == expected


def test_a_refill_admits_its_quota_and_ends() -> None:
    made = controller("eb:theta=0.5")
    first = made.decide(VIEW._replace(decoding=40, waiting=70))
    assert (first.phase, first.running_limit) == ("prefill", 100)
    for _ in range(60):
        made.on_prompt(10)
    half = made.decide(VIEW._replace(decoding=90, prefilling=10, waiting=10))
    assert (half.phase, half.running_limit) == ("prefill", 100)
    assert phase(made, decoding=100, waiting=10) == "decode"


def test_the_gate_holds_the_refill_back_while_memory_is_short() -> None:
    made = controller("eb:theta=0.5", num_blocks=1000)
    # N mu_o margin / capacity = 100 * 100 * 0.5 / 16000 = 0.3125 before anything was seen.
    assert phase(made, decoding=10, waiting=90, free_blocks=312) == "decode"
    assert phase(made, decoding=10, waiting=90, free_blocks=313) == "prefill"
    assert phase(controller("eb:theta=0.5,kv_gate=off"), decoding=10, waiting=90, free_blocks=1) == "prefill"


def test_with_nothing_decoding_it_prefills_whatever_the_gate_says() -> None:
    made = controller("eb:theta=0.5")
    assert phase(made, decoding=0, waiting=1, free_blocks=0) == "prefill"


def test_a_blocked_prefill_is_followed_by_a_decode() -> None:
    made = controller("eb:theta=0.5,kv_gate=off")
    view = VIEW._replace(decoding=10, waiting=90)
    assert made.decide(view).phase == "prefill"
    made.prefill_blocked(view)
    assert made.decide(view).phase == "decode"
    assert made.decide(view).phase == "prefill"


def test_algorithm_1_sets_k_and_n_from_what_finished() -> None:
    made = controller("eb", max_num_seqs=100)
    feed(made, 99)
    made.decide(VIEW._replace(decoding=50))
    assert not [r for r in made.drain_records() if r.kind == "update"]
    feed(made, 1)
    decision = made.decide(VIEW._replace(decoding=50, now_s=1.0))
    (record,) = [r for r in made.drain_records() if r.kind == "update"]
    assert record.values["mu_l"] == pytest.approx(100.0)
    assert record.values["mu_o"] == pytest.approx(200.0)
    assert record.values["samples"] == 100
    # 16,000 tokens of KV hold about 16000 / (100 + 200) sequences; the memory-safe batch is below that.
    assert 1 <= decision.n_limit < 16_000 // 200
    assert decision.k == max(1, int(record.values["theta"] * decision.n_limit))  # type: ignore[operator]


def test_a_floor_raises_the_threshold_and_leaves_n_to_algorithm_1() -> None:
    free, floored = controller("eb"), controller("eb:theta_min=0.6")
    for made in (free, floored):
        feed(made, 100)
    below, above = (made.decide(VIEW._replace(decoding=50, now_s=1.0)) for made in (free, floored))
    assert below.k is not None
    assert above.k is not None
    assert below.k < int(0.6 * below.n_limit)
    assert above.k == int(0.6 * above.n_limit)
    assert above.n_limit < 100


def test_n_changes_at_most_every_two_seconds() -> None:
    made = controller("eb")
    feed(made, 100)
    first = made.decide(VIEW._replace(decoding=50, now_s=1.0)).n_limit
    feed(made, 100, prompt=1000)
    assert made.decide(VIEW._replace(decoding=50, now_s=2.9)).n_limit == first
    feed(made, 100, prompt=1000)
    assert made.decide(VIEW._replace(decoding=50, now_s=3.0)).n_limit != first


def test_a_fixed_threshold_stays() -> None:
    made = controller("eb:k=7")
    feed(made, 500)
    decision = made.decide(VIEW._replace(decoding=50))
    assert (decision.k, decision.n_limit) == (7, 100)


def test_ebplus_starts_mixed_and_switches_where_mixing_is_dear() -> None:
    made = controller("ebplus")
    assert made.decide(VIEW._replace(decoding=100)).mode == "mb"
    feed(made, 100)
    decision = made.decide(VIEW._replace(decoding=100))
    assert (decision.mode, decision.phase) == ("eb", "decode")
    (record,) = [r for r in made.drain_records() if r.kind == "mode"]
    assert record.values["lhs"] > record.values["rhs"] + record.values["margin"]  # type: ignore[operator]
    assert record.values["r"] == pytest.approx(200 / 300)


@pytest.mark.parametrize(("setting", "theta"), [("base", "theta0"), ("used", "theta")])
def test_ebplus_compares_with_the_threshold_that_is_asked_for(setting: str, theta: str) -> None:
    """``theta_min`` raises the threshold in use, not the base threshold."""
    made = controller(f"ebplus:crossover_theta={setting},theta_min=0.8")
    made.decide(VIEW._replace(decoding=100))
    feed(made, 100)
    made.decide(VIEW._replace(decoding=100))
    records = {record.kind: record.values for record in made.drain_records()}
    chosen = records["update"][theta]
    assert chosen is not None
    sides = crossover(CALIBRATION, mu_l=100, mu_o=200, n_obs=100, theta0=chosen)
    assert records["mode"]["rhs"] == pytest.approx(sides.rhs)


def test_ebplus_finishes_half_computed_prompts_before_it_decodes() -> None:
    made = controller("ebplus")
    feed(made, 100)
    assert phase(made, decoding=90, prefilling=3) == "prefill"
    assert phase(made, decoding=93) == "decode"


@pytest.mark.parametrize(("decoding", "mode"), [(100, "eb"), (2, "mb")])
def test_ebplus_decides_at_every_load_by_eq_8(decoding: int, mode: str) -> None:
    made = controller("ebplus", max_num_seqs=100)
    feed(made, 100)
    for _ in range(200):
        made.decide(VIEW._replace(decoding=decoding))
    feed(made, 100)
    made.decide(VIEW._replace(decoding=decoding))
    records = [r for r in made.drain_records() if r.kind == "mode"]
    lhs, rhs, margin = (records[-1].values[name] or 0.0 for name in ("lhs", "rhs", "margin"))
    assert made.mode == mode
    assert (made.mode == "eb") == (lhs > rhs + margin)


def test_without_a_measured_mixed_cost_the_left_side_is_zero() -> None:
    bare = replace(CALIBRATION, mixed=None)
    made = Controller(
        parse_policy("ebplus"),
        bare,
        max_num_seqs=100,
        block_size=16,
        num_blocks=1000,
        max_num_batched_tokens=8192,
        keep_records=True,
    )
    feed(made, 100)
    made.decide(VIEW._replace(decoding=100))
    (record,) = [r for r in made.drain_records() if r.kind == "mode"]
    assert record.values["lhs"] == 0.0


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 3), st.integers(0, 50), st.integers(0, 100)), max_size=60))
@settings(max_examples=100, deadline=None)
def test_decisions_stay_within_the_limits_for_any_view(counts: list[tuple[int, int, int, int]]) -> None:
    made = controller(
        "ebplus:update_every=2,min_samples=2,margin=-1,sticky=-1",
        max_num_seqs=50,
        num_blocks=100,
    )
    for index, (decoding, prefilling, waiting, free) in enumerate(counts):
        feed(made, 1, prompt=1 + waiting, output=1 + decoding)
        decision = made.decide(View(float(index), index, decoding, prefilling, waiting, free))
        assert decision.k is not None
        assert decision.n_limit is not None
        assert 1 <= decision.k <= decision.n_limit <= 50
        assert decision.running_limit >= (decoding + prefilling if decision.phase == "prefill" else 1)
        assert decision.phase == "mixed" if decision.mode == "mb" else decision.phase in ("prefill", "decode")
        if decision.mode == "eb" and decoding == 0 and waiting + prefilling > 0:
            assert decision.phase == "prefill"


def test_a_refill_follows_at_once_when_nothing_is_left_to_decode() -> None:
    made = controller("eb:k=1")
    first = made.decide(VIEW._replace(decoding=0, prefilling=0, waiting=3))
    assert first.phase == "prefill"
    for _ in range(3):
        made.on_prompt(10)  # all three were admitted, and ended with their first token
    assert made.decide(VIEW._replace(decoding=0, prefilling=0, waiting=2)).phase == "prefill"
    made.on_prompt(10)
    made.on_prompt(10)
    assert made.decide(VIEW._replace(decoding=2, prefilling=0, waiting=5)).phase == "decode"


def test_reasons_are_codes_so_that_decisions_can_be_grouped() -> None:
    lengths = [(20, 3 + row % 9) for row in range(80)]
    options = EngineOptions(max_num_seqs=8, max_num_batched_tokens=200, num_kv_blocks=40, async_scheduling=False)
    policies = ("eb:update_every=5,min_samples=5", "ebplus:update_every=5,min_samples=5", "cadence:every=4", "marginal")
    for policy in policies:
        decisions = World(plan(lengths, concurrency=16), policy, options).run().decisions
        codes = set(decisions["reason"].to_pylist())
        assert codes
        assert all(re.fullmatch("[a-z][a-z_0-9]+", code) for code in codes), codes
        evaluations = decisions.filter(pc.equal(decisions["kind"], "mode"))["reason"].to_pylist()
        assert set(evaluations) <= REASONS.keys()
