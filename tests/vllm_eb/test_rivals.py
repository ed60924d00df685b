"""Schedulers of other servers as policies: what each step may hold, rule by rule."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbench.engines.base import check_options
from ebbench.errors import UsageError
from ebbench.records.warnings import warning
from ebbench.spec.server import EngineOptions
from vllm_eb.calibration import Calibration
from vllm_eb.controller import Controller
from vllm_eb.policies.cadence import Cadence
from vllm_eb.policies.delayer import ATTEMPTS, LargestPrefill
from vllm_eb.policy import PolicyError, least_tokens, parse_policy
from vllm_eb.queueing import SHORTEST_EVERY_S, ShortestFirst
from vllm_eb.strategy import View
from vllm_eb.theory import NO_DRAFTS, Drafts

CALIBRATION = Calibration(alpha_p=5e-3, beta_p=5e-5, alpha_d=1e-2, beta_d=1e-5)
VIEW = View(now_s=0.0, step_id=0, decoding=40, prefilling=0, waiting=0, free_blocks=900)
BUDGET, SEQS = 8192, 100


def controller(policy: str, drafts: Drafts = NO_DRAFTS) -> Controller:
    return Controller(
        parse_policy(policy), CALIBRATION, max_num_seqs=SEQS, block_size=16, num_blocks=1000,
        max_num_batched_tokens=BUDGET, drafts=drafts,
    )  # fmt: skip


def admit(made: Controller, requests: int) -> None:
    for _ in range(requests):
        made.on_prompt(100)


# v1 with a budget


def test_v1_is_vllm_itself_only_without_settings() -> None:
    assert parse_policy("v1").native
    assert not parse_policy("v1:budget=2048").native
    assert not parse_policy("v1:order=shortest").native


def test_v1_gives_every_step_its_budget() -> None:
    made = controller("v1:budget=2048")
    for view in (VIEW, VIEW._replace(waiting=9), VIEW._replace(decoding=0, waiting=3)):
        decision = made.decide(view)
        assert (decision.phase, decision.token_budget, decision.running_limit) == ("mixed", 2048, SEQS)


def test_a_budget_below_the_sequences_is_warned_of() -> None:
    spec = parse_policy("v1:budget=64")
    found = spec.load_doubt(500, 256)
    assert found == ("budget-below-seqs", {"budget": 64, "seqs": 256, "max_num_seqs": 256})
    assert "Use budget=256 or more" in str(warning(found[0], **found[1]))
    assert spec.load_doubt(64, 256) is None
    assert parse_policy("v1").load_doubt(500, 256) is None


def test_a_default_cap_above_the_engines_budget_is_no_mistake() -> None:
    assert least_tokens(parse_policy("ppas")) == 1
    assert least_tokens(parse_policy("ppas:cap=4096")) == 4096


def test_a_budget_above_that_of_the_engine_is_refused() -> None:
    check_options(EngineOptions(max_num_batched_tokens=8192), [parse_policy("v1:budget=8192")])
    with pytest.raises(UsageError, match="budget exceeds --max-num-batched-tokens 8192"):
        check_options(EngineOptions(max_num_batched_tokens=8192), [parse_policy("v1:budget=8193")])


# P-PAS


@given(decoding=st.integers(0, SEQS), prefilling=st.integers(0, 3), waiting=st.integers(0, 9), cap=st.integers(1, 4096))
def test_ppas_caps_prompts_while_two_of_them_are_computed_beside_decodes(
    decoding: int, prefilling: int, waiting: int, cap: int
) -> None:
    view = VIEW._replace(decoding=decoding, prefilling=prefilling, waiting=waiting)
    decision = controller(f"ppas:cap={cap}").decide(view)
    free = SEQS - decoding - prefilling
    several = prefilling + min(waiting, max(free, 0)) >= 2
    assert decision.phase == "mixed"
    assert decision.token_budget == (decoding + cap if several and decoding else None)


# SGLang's delayer


def test_the_delayer_waits_for_as_many_slots_as_recent_prefills_filled() -> None:
    made = controller("delayer:passes=0")
    assert made.decide(VIEW._replace(decoding=0, waiting=60)).phase == "prefill"
    admit(made, 60)
    full = VIEW._replace(decoding=60, waiting=80, step_id=1)
    assert made.decide(full._replace(waiting=0)).phase == "decode"
    assert made.decide(full).phase == "prefill", "the first time it would wait, it does not"
    admit(made, 40)
    assert made.decide(full._replace(decoding=100, waiting=40, step_id=2)).phase == "decode"
    assert made.decide(full._replace(decoding=70, waiting=40, step_id=3)).phase == "decode"
    assert made.decide(full._replace(decoding=39, waiting=40, step_id=4)).phase == "prefill"


def test_a_prefill_waits_for_a_bounded_number_of_steps() -> None:
    made = controller("delayer:passes=5,watermark=lifetime")
    made.decide(VIEW._replace(decoding=0, waiting=100))
    admit(made, 100)
    made.decide(VIEW._replace(decoding=100, step_id=1))
    assert made.decide(VIEW._replace(decoding=90, waiting=10, step_id=2)).phase == "prefill"  # the first is let through
    admit(made, 10)
    made.decide(VIEW._replace(decoding=100, step_id=3))
    phases = [made.decide(VIEW._replace(decoding=90, waiting=10, step_id=4 + n)).phase for n in range(5)]
    assert phases == ["decode"] * 4 + ["prefill"]


def test_sglangs_first_watermark_starves_requests_and_the_default_not() -> None:
    """After one large batch the first form holds back every smaller prefill for as long as something runs."""
    longest = {}
    for form in ("lifetime", "window"):
        made = controller(f"delayer:passes=0,watermark={form}")
        made.decide(VIEW._replace(decoding=0, waiting=100))
        admit(made, 100)
        made.decide(VIEW._replace(decoding=100, waiting=0, step_id=1))
        made.decide(VIEW._replace(decoding=90, waiting=5, step_id=1))
        admit(made, 5)
        made.decide(VIEW._replace(decoding=95, waiting=0, step_id=2))
        held = 0
        while held < 500 and made.decide(VIEW._replace(decoding=90, waiting=5, step_id=3 + held)).phase == "decode":
            held += 1
        longest[form] = held
    assert longest["lifetime"] == 500
    assert longest["window"] <= ATTEMPTS


def test_little_memory_in_use_lets_a_prefill_through() -> None:
    for used, phase in ((0.3, "decode"), (0.1, "prefill")):
        made = controller("delayer:passes=0,usage=0.2")
        made.decide(VIEW._replace(decoding=0, waiting=60, free_blocks=100))
        admit(made, 60)
        made.decide(VIEW._replace(decoding=60, waiting=0, step_id=1, free_blocks=100))
        made.decide(VIEW._replace(decoding=60, waiting=10, step_id=2, free_blocks=100))  # the first is let through
        admit(made, 10)
        made.decide(VIEW._replace(decoding=70, waiting=0, step_id=3, free_blocks=100))
        free = round(1000 * (1 - used))
        assert made.decide(VIEW._replace(decoding=70, waiting=10, step_id=4, free_blocks=free)).phase == phase


def test_the_queue_condition_ends_after_the_longest_wait() -> None:
    made = controller("delayer:passes=0,ratio=0.5,wait=2")
    made.decide(VIEW._replace(decoding=0, waiting=30))
    admit(made, 30)
    made.decide(VIEW._replace(decoding=30, step_id=1))
    few = VIEW._replace(decoding=30, waiting=3)
    assert made.decide(few._replace(step_id=2)).phase == "prefill"  # the first is let through
    admit(made, 3)
    made.decide(few._replace(decoding=33, waiting=0, step_id=3))
    assert made.decide(few._replace(step_id=4, now_s=10.0)).phase == "decode"
    assert made.decide(few._replace(step_id=5, now_s=11.9)).phase == "decode"
    assert made.decide(few._replace(step_id=6, now_s=12.0)).phase == "prefill"


@given(st.lists(st.integers(1, 50), max_size=60))
def test_the_largest_prefill_forgets_in_the_present_form_only(requests: list[int]) -> None:
    window, ever = LargestPrefill("window"), LargestPrefill("lifetime")
    for count in requests:
        window.attempt(count)
        ever.attempt(count)
    assert window.requests == max(requests[-ATTEMPTS:], default=0)
    assert ever.requests == max(requests, default=0)


# TensorRT-LLM's batch wait


def test_prompts_wait_for_a_fuller_step_but_only_so_long() -> None:
    made = controller("batchwait:iters=3,ratio=0.5")
    assert made.prompt_tokens_wanted == BUDGET // 2
    few = VIEW._replace(waiting=1, prompt_tokens=1000)
    assert [made.decide(few._replace(step_id=n)).phase for n in range(5)] == [*["decode"] * 3, "mixed", "decode"]


def test_enough_tokens_or_nothing_to_decode_end_the_wait() -> None:
    half = BUDGET // 2
    for view in (
        VIEW._replace(waiting=4, prompt_tokens=half - VIEW.decoding),
        VIEW._replace(decoding=0, waiting=1, prompt_tokens=10),
        VIEW._replace(last_tokens_out=True, waiting=1, prompt_tokens=10),
    ):
        assert controller("batchwait:iters=9,ratio=0.5").decide(view).phase == "mixed"
    below = VIEW._replace(waiting=4, prompt_tokens=half - VIEW.decoding - 1)
    assert controller("batchwait:iters=9,ratio=0.5").decide(below).phase == "decode"


# Chunks by a TPOT target


@given(decoding=st.integers(1, 90), tpot_ms=st.integers(5, 400), least=st.integers(1, 500))
def test_a_chunk_is_the_largest_that_fits_the_target(decoding: int, tpot_ms: int, least: int) -> None:
    made = controller(f"slochunk:tpot={tpot_ms / 1e3},least={least}")
    decision = made.decide(VIEW._replace(decoding=decoding, waiting=3))
    assert decision.token_budget is not None
    chunk = decision.token_budget - decoding
    costs = CALIBRATION.costs
    assert chunk >= least
    if chunk > least:
        assert costs.mixed_s(chunk, decoding, 0) <= tpot_ms / 1e3
    if decision.token_budget < BUDGET:
        assert costs.mixed_s(chunk + 1, decoding, 0) > tpot_ms / 1e3


def test_without_prompts_or_decodes_the_whole_budget_is_left() -> None:
    made = controller("slochunk:tpot=0.02")
    assert made.decide(VIEW).token_budget is None
    assert made.decide(VIEW._replace(decoding=0, waiting=9)).token_budget is None


# Speculative decoding: a decode takes the tokens of its drafts, too.

DRAFTS = Drafts((0.0,) * 5)


@pytest.mark.parametrize("policy", ["ppas:cap=128", "slochunk:tpot=0.001,least=128"])
def test_drafts_leave_prompts_their_tokens_of_a_step(policy: str) -> None:
    view = VIEW._replace(waiting=9)
    assert controller(policy).decide(view).token_budget == view.decoding + 128
    assert controller(policy, DRAFTS).decide(view).token_budget == 6 * view.decoding + 128


def test_drafts_fill_the_step_that_prompts_wait_for() -> None:
    few = VIEW._replace(waiting=4, prompt_tokens=BUDGET // 2 - 6 * VIEW.decoding)
    policy = "batchwait:iters=9,ratio=0.5"
    assert controller(policy).decide(few).phase == "decode"
    assert controller(policy, DRAFTS).decide(few).phase == "mixed"
    assert controller(policy, DRAFTS).decide(few._replace(prompt_tokens=few.prompt_tokens - 1)).phase == "decode"


def test_a_tpot_target_with_drafts_is_of_tokens_not_of_steps() -> None:
    view = VIEW._replace(waiting=9)
    drafted = controller("slochunk:tpot=0.02,least=1", replace(DRAFTS, acceptance=(0.5, 0.5)))
    budget, longer = drafted.decide(view).token_budget, controller("slochunk:tpot=0.04,least=1").decide(view)
    assert budget is not None
    assert longer.token_budget is not None
    assert budget - 3 * view.decoding == longer.token_budget - view.decoding


# Cadence without the escape


def test_without_the_escape_prompts_wait_however_many_queue_up() -> None:
    for escape, held in ((True, False), (False, True)):
        cadence = Cadence(8, escape=escape)
        assert not cadence.hold(View(0.0, 0, 4, 0, 50, 1000))
        cadence.on_prompt(100, 0)
        assert cadence.hold(View(0.0, 1, 5, 0, 49, 1000)) is held


# Shortest prompt first


@given(st.lists(st.integers(1, 20), max_size=30))
def test_shortest_first_is_a_stable_sort(tokens: list[int]) -> None:
    places = ShortestFirst().order(0.0, tokens).in_order()
    assert places == sorted(range(len(tokens)), key=tokens.__getitem__)


def test_the_queue_is_ordered_now_and_then_before_admissions() -> None:
    queue = ShortestFirst()
    assert queue.due(0.0, admits=True)
    queue.order(0.0, [3, 1])
    assert not queue.due(SHORTEST_EVERY_S / 2, admits=True)
    assert queue.due(SHORTEST_EVERY_S, admits=True)
    assert not queue.due(9.0)


@pytest.mark.parametrize("policy", ["v1", "v0", "eb:k=3", "ebplus", "marginal", "delayer", "ppas"])
def test_any_policy_takes_the_order(policy: str) -> None:
    made = controller(f"{policy}{',' if ':' in policy else ':'}order=shortest")
    assert made.orders_queue
    assert made.queue_order(0.0, [0.0, 1.0, 2.0], [30, 10, 20]).in_order() == [1, 2, 0]
    assert not controller(policy).orders_queue


def test_a_target_beside_another_order_is_refused() -> None:
    with pytest.raises(PolicyError, match="orders the queue itself"):
        parse_policy("marginal:ttft=5,order=shortest")
