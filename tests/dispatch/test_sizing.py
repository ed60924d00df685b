"""The length of the next pass: which requests are sent, to which unit, and that none is lost."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbench.dispatch import DispatchRequest
from ebbench.dispatch.algorithms import PassModel, candidates, choose_pass
from ebbench.dispatch.staggered import FIRST_GUESS, LEAST_PASSES, PassTimeModel

MS = 1_000_000
MODEL = PassModel(chunk_tokens=1000, overhead_tokens=100)


def waiting(lengths: list[int], patience: float | None = None, now_ns: int = 0, token_worth: float = 0.0):  # type: ignore[no-untyped-def]
    requests = [(DispatchRequest(i, tokens, tokens), 0) for i, tokens in enumerate(lengths)]
    return candidates(requests, now_ns, 100 * MS, token_worth, patience)


def keys(chosen: list[tuple[DispatchRequest, int]]) -> set[int]:
    return {request.key for request, _ in chosen}


def test_short_prompts_go_without_the_long_one_that_would_hold_them_up() -> None:
    # Three of 100 tokens in a pass of 200 are worth 3/200; with the long one it is 4/1100.
    assert keys(choose_pass(waiting([1000, 100, 100, 100]), {0: 0, 1: 0, 2: 0}, MODEL)) == {1, 2, 3}


def test_prompts_of_a_kind_share_a_pass() -> None:
    chosen = choose_pass(waiting([900, 910, 920, 930]), dict.fromkeys(range(4), 0), MODEL)
    assert sorted(unit for _, unit in chosen) == [0, 1, 2, 3]


def test_a_pass_is_filled_up_to_the_longest_backlog() -> None:
    """Unit 0 has 800 tokens left to compute: other units can take as many without a longer pass."""
    assert [(request.key, unit) for request, unit in choose_pass(waiting([900, 800]), {0: 800, 1: 0}, MODEL)] == [
        (1, 1)
    ]
    assert choose_pass(waiting([800]), {0: 1000}, MODEL) == []


def test_gaps_are_closed_by_a_longer_one_of_the_same_worth() -> None:
    # A pass as long as the prompt in hand: 600 leaves a gap that 400, not 300, closes.
    chosen = choose_pass(waiting([300, 400], token_worth=1.0), {0: 600}, MODEL)
    assert keys(chosen) == {1}


def test_a_request_that_has_waited_too_long_is_sent_first() -> None:
    lengths = [1000] + [100] * 8
    units = {0: 0, 1: 0}
    late = 5 * 100 * MS
    assert 0 not in keys(choose_pass(waiting(lengths), units, MODEL))
    assert 0 not in keys(choose_pass(waiting(lengths, patience=5, now_ns=late), units, MODEL))
    assert 0 in keys(choose_pass(waiting(lengths, patience=5, now_ns=late + 1), units, MODEL))


@given(
    st.lists(st.integers(1, 5000), max_size=30),
    st.lists(st.integers(0, 3000), min_size=1, max_size=5),
    st.floats(0, 1),
    st.booleans(),
)
def test_no_request_is_sent_twice_and_only_long_prompts_exceed_a_pass(
    lengths: list[int], backlog: list[int], token_worth: float, late: bool
) -> None:
    before = dict(enumerate(backlog))
    now_ns = 10**12 if late else 0
    chosen = choose_pass(waiting(lengths, 16, now_ns, token_worth), before, MODEL._replace(token_worth=token_worth))
    assert len(keys(chosen)) == len(chosen)
    for request, _ in chosen:
        assert request.tokens == lengths[request.key]
    for unit, tokens in before.items():
        sent = [request.tokens for request, place in chosen if place == unit]
        if sent:
            assert tokens + sum(sent) <= MODEL.chunk_tokens or (tokens == 0 and len(sent) == 1)
    if lengths and not any(backlog):
        assert chosen  # an idle instance is given something


@given(st.integers(0, 500), st.integers(1, 200))
def test_overhead_is_read_off_the_measured_passes(intercept: int, slope: int) -> None:
    cost = PassTimeModel(1000, window=100)
    for tokens in range(100, 1100, 100):
        cost.planned(0, tokens)
        cost.ended(0, 1000 * (intercept + slope * tokens))
    assert math.isclose(cost.overhead_tokens, min(1000, max(20, intercept / slope)), rel_tol=1e-6)


@pytest.mark.parametrize("passes", [LEAST_PASSES - 1, 2 * LEAST_PASSES])
def test_overhead_is_guessed_where_passes_tell_nothing(passes: int) -> None:
    cost = PassTimeModel(1000, window=100)
    for _ in range(passes):
        cost.planned(0, 500)
        cost.ended(0, 7)
        cost.ended(0, 10**9)  # of a pass that was not planned
    assert cost.overhead_tokens == FIRST_GUESS * 1000
