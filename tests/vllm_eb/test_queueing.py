"""The order of a queue with a target for the first token: fewest late requests, none lost, none that waits for ever."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_eb.queueing import ORDER_EVERY, PATIENCE, TURN_EVERY, PunctualQueue, Waited, Work, given_up

TENTHS = st.integers(0, 100).map(lambda tenths: tenths / 10)
JOBS = st.lists(st.tuples(TENTHS, st.integers(1, 40).map(lambda tenths: tenths / 10)), min_size=1, max_size=9)
WORK = Work(prompt_token_s=1e-3, answer_s=0.1, lead_s=0.0)


def feasible(jobs: list[tuple[float, float]], answer_s: float) -> bool:
    """Whether all meet their deadlines, served one after the other in the order of these."""
    ends_s = 0.0
    for slack_s, prompt_s in jobs:
        if ends_s + prompt_s > slack_s + 1e-9:
            return False
        ends_s += prompt_s + answer_s
    return True


@given(JOBS, st.sampled_from([0.0, 0.5]))
@settings(max_examples=200)
def test_the_chosen_order_has_the_fewest_late_requests(jobs: list[tuple[float, float]], answer_s: float) -> None:
    jobs = sorted(jobs)
    in_time = [job for job in jobs if job[1] <= job[0]]
    dropped = given_up([prompt_s - 1e-12 for _, prompt_s in in_time], [slack_s for slack_s, _ in in_time], answer_s)
    chosen = [job for number, job in enumerate(in_time) if number not in dropped]
    assert feasible(chosen, answer_s)
    more = combinations(jobs, len(chosen) + 1)
    assert not any(feasible([(slack - 1e-6, prompt) for slack, prompt in picked], answer_s) for picked in more)


def ordered(ages_s: list[float], tokens: list[int], ttft_s: float = 10.0, now_s: float = 100.0) -> list[int]:
    return PunctualQueue(ttft_s).order(now_s, [now_s - age for age in ages_s], tokens, WORK).in_order()


@given(st.lists(st.tuples(st.floats(0.0, 30.0), st.integers(1, 20_000)), max_size=60))
@settings(max_examples=100)
def test_every_place_is_kept_once_and_late_ones_come_last(requests: list[tuple[float, int]]) -> None:
    ages_s, tokens = [age for age, _ in requests], [count for _, count in requests]
    places = ordered(ages_s, tokens)
    assert sorted(places) == list(range(len(requests)))
    late_s = [tokens[p] * WORK.prompt_token_s - (10.0 - ages_s[p]) for p in places]
    late = [one_s > 0.0 for one_s in late_s if abs(one_s) > 1e-6]  # sums of other roundings differ by less
    assert late == sorted(late)


@given(st.lists(st.tuples(st.floats(0.0, 30.0), st.integers(1, 20_000)), max_size=60), st.integers(0, 9), st.booleans())
@settings(max_examples=100)
def test_overdue_requests_that_are_left_out_change_no_order(
    requests: list[tuple[float, int]], passed_s: int, admissions: bool
) -> None:
    """The next ordering, of the whole queue and of all but those that the first one found overdue."""
    seen_s, tokens = [100.0 - age for age, _ in requests], [count for _, count in requests]
    whole, partial = PunctualQueue(1.0), PunctualQueue(1.0)
    for queue in (whole, partial):
        queue.admitted(10**6)
        places = queue.order(100.0, seen_s, tokens, WORK)
        if admissions:
            queue.admitted(10**6)
    seen_s, tokens = [seen_s[p] for p in places.in_order()], [tokens[p] for p in places.in_order()]
    turn, first, overdue = int(places.oldest_first), len(places.first), len(places.overdue)
    left_out = [*range(turn), *range(turn + first, first + overdue)]
    others = [p for p in range(len(requests)) if p not in left_out]
    oldest = Waited(seen_s[left_out[0]], tokens[left_out[0]]) if left_out else None
    now_s = 100.0 + passed_s / 10
    all_places = whole.order(now_s, seen_s, tokens, WORK)
    some = partial.order(now_s, [seen_s[p] for p in others], [tokens[p] for p in others], WORK, oldest)
    assert [others[p] for p in some.first] == list(all_places.first)
    assert left_out + [others[p] for p in some.overdue] == list(all_places.overdue)
    assert [others[p] for p in some.rest] == list(all_places.rest)
    assert some.oldest_first == all_places.oldest_first
    assert whole.oldest_wait_s(now_s) == partial.oldest_wait_s(now_s)


def test_requests_that_can_all_be_in_time_keep_their_order() -> None:
    assert ordered([0.5, 3.0, 1.0], [900, 100, 500]) == [1, 2, 0]


def test_the_longest_prompt_is_given_up_first_and_served_before_late_ones() -> None:
    # Four seconds each, and nine for the first: with it, one of them is in time; without it, two are.
    assert ordered([1.0, 1.0, 1.0, 12.0], [9_000, 4_000, 4_000, 100]) == [1, 2, 0, 3]


def test_the_wait_of_the_oldest_punctual_request_is_reported() -> None:
    queue = PunctualQueue(10.0)
    assert queue.due(0.0)
    queue.order(100.0, [70.0, 96.0, 98.0], [100, 100, 100], WORK)
    assert queue.oldest_wait_s(100.1) == pytest.approx(4.1)
    assert not queue.due(100.0 + 0.9 * ORDER_EVERY * 10.0, admits=True)
    assert queue.due(100.0 + 1.1 * ORDER_EVERY * 10.0, admits=True)
    queue.admitted(100)
    assert queue.oldest_wait_s(100.1) == pytest.approx(2.1)
    queue.order(101.0, [70.0], [100], WORK)
    assert queue.oldest_wait_s(101.0) == 0.0


def test_a_dropped_request_keeps_the_queue_due() -> None:
    """It may return: only the next ordering tells whether the oldest that can be in time has waited too long."""
    queue = PunctualQueue(10.0, urgent_s=6.0)
    places = queue.order(100.0, [95.0, 96.0, 96.0], [4_900, 2_000, 2_000], WORK)
    assert places.first == [1, 2, 0]
    assert (queue.oldest_wait_s(101.5), queue.due(101.5)) == (5.5, True)


@given(st.integers(1, 30), st.integers(100, 900), st.integers(900, 9_000))
@settings(max_examples=30)
def test_under_endless_overload_every_request_is_admitted_eventually(old: int, short: int, long: int) -> None:
    """As many punctual requests arrive as are admitted: old ones are admitted only by turns, one per share of work."""
    queue, ttft_s, step_s = PunctualQueue(1.0), 1.0, 0.05
    waiting = [(0.0, long)] * old
    needed = old * (TURN_EVERY * long / short + 3) + PATIENCE * ttft_s / step_s
    for step in range(math.ceil(needed)):
        now_s = step * step_s
        waiting.append((now_s, short))
        places = queue.order(now_s, [seen for seen, _ in waiting], [tokens for _, tokens in waiting], WORK)
        waiting = [waiting[place] for place in places.in_order()]
        queue.admitted(waiting.pop(0)[1])
    assert not any(tokens == long and seen == 0.0 for seen, tokens in waiting)


def test_late_requests_are_served_only_after_their_patience() -> None:
    queue = PunctualQueue(1.0)
    queue.admitted(10**9)
    assert queue.order(PATIENCE - 0.1, [0.0, PATIENCE - 0.2], [100, 100], WORK).in_order() == [1, 0]
    assert queue.order(PATIENCE + 0.1, [0.0, PATIENCE], [100, 100], WORK).in_order() == [0, 1]


@given(
    st.lists(st.tuples(st.floats(0, 12), st.integers(1, 5000)), min_size=1, max_size=12),
    st.floats(0, 0.3),
    st.floats(0, 2),
)
def test_an_order_that_stands_is_the_order_made_anew(
    requests: list[tuple[float, int]], answer_s: float, lead_s: float
) -> None:
    """Requests in the order of their arrival: if they need no other order, the long way finds the same."""
    now_s, work = 100.0, Work(1e-3, answer_s, lead_s)
    seen_s = sorted(now_s - age_s for age_s, _ in requests)
    tokens = [count for _, count in requests]
    asked, ordered = PunctualQueue(10.0), PunctualQueue(10.0)
    ordered._stands = lambda *_: False  # type: ignore[method-assign]
    for queue in (asked, ordered):
        queue.order(90.0, [], [], work)
    places = ordered.order(now_s, seen_s, tokens, work)
    assert asked.order(now_s, seen_s, tokens, work).in_order() == places.in_order()
    for later_s in (100.01, 100.3):
        assert (asked.oldest_wait_s(later_s), asked.due(later_s)) == (
            ordered.oldest_wait_s(later_s),
            ordered.due(later_s),
        )


def test_requests_that_all_have_time_need_no_other_order() -> None:
    """Three prompts of 1 s, two answers of 1 s in between: 5 s, so the oldest may have waited for 10 - 0.5 - 5 s."""
    work = Work(1e-3, 1.0, 0.5)
    for waited_s, stands in ((4.4, True), (4.6, False)):
        first = PunctualQueue(10.0).order(100.0, [100.0 - waited_s] * 3, [1000] * 3, work).first
        assert (list(first), first == range(3)) == ([0, 1, 2], stands)


def test_a_queue_is_ordered_before_admissions_and_when_one_waited_long() -> None:
    """Urgent from 6 s on: the oldest has waited 1 s, then there is none older than the last ordering."""
    queue = PunctualQueue(10.0, urgent_s=6.0)
    queue.order(100.0, [99.0], [100], Work(1e-3, 0.0, 0.0))
    assert [(queue.due(now_s), queue.due(now_s, admits=True)) for now_s in (100.1, 100.3, 104.9, 105.1)] == [
        (False, False),
        (False, True),
        (False, True),
        (True, True),
    ]
    queue.order(105.1, [], [], Work(1e-3, 0.0, 0.0))
    assert [queue.due(now_s) for now_s in (111.0, 111.2)] == [False, True]


@pytest.mark.parametrize(("admitted", "order"), [(TURN_EVERY * 100 - 1, [1, 0]), (TURN_EVERY * 100, [0, 1])])
def test_a_late_request_is_served_after_a_number_of_admitted_tokens(admitted: int, order: list[int]) -> None:
    queue = PunctualQueue(1.0)
    queue.admitted(admitted)
    assert queue.order(PATIENCE + 0.1, [0.0, PATIENCE], [100, 100], WORK).in_order() == order
