"""Targets of the marginal policy: allowed sequences, pauses, mean answer length, and answers behind their target."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_eb.calibration import LinearCosts
from vllm_eb.service import DEBT_FORGOTTEN, PAUSE_SHARE, TPOT_SHARE, AnswerLength, ServiceLevel, TokenDebt

LINEAR = LinearCosts(alpha_p=5e-3, beta_p=5e-5, alpha_d=1e-2, beta_d=1e-4, alpha_mb=5e-3)


def test_a_tpot_target_bounds_the_batch_just_enough() -> None:
    level = ServiceLevel(tpot_s=0.05)
    found = level.seqs_allowed(LINEAR, 5e-5, mu_l=100, mu_new=100, mu_o=200, at_most=1000)

    def time_s(seqs: int) -> float:
        return LINEAR.decode_s(seqs, 200) + seqs * 100 * 5e-5 / 200

    assert time_s(found) <= TPOT_SHARE * 0.05 < time_s(found + 1)
    assert (
        ServiceLevel(tpot_s=1e-3).seqs_allowed(LINEAR, 5e-5, mu_l=100, mu_new=100, mu_o=200, at_most=1000) == 0
    )  # out of reach
    assert ServiceLevel().seqs_allowed(LINEAR, 5e-5, mu_l=100, mu_new=100, mu_o=200, at_most=1000) == 1000


@given(
    seqs=st.integers(1, 2000), target_s=st.floats(1e-3, 1.0), mu_l=st.floats(1, 10_000), mu_o=st.floats(1, 10_000),
    cached=st.floats(0, 1),
)  # fmt: skip
def test_tokens_and_longest_pause_take_their_share_of_the_target(
    seqs: int, target_s: float, mu_l: float, mu_o: float, cached: float
) -> None:
    lengths = {"mu_l": mu_l, "mu_new": max(mu_l * cached, 1.0), "mu_o": mu_o}
    paused = seqs * ServiceLevel(10.0, target_s).may_pause(LINEAR, LINEAR.beta_p, seqs, **lengths)
    token_s = LINEAR.decode_s(seqs, mu_l + mu_o / 2) + seqs * lengths["mu_new"] * LINEAR.beta_p / mu_o
    answer_s = mu_o * token_s
    pause_s = paused * (mu_l + mu_o / 2) / (seqs * mu_l) * answer_s
    assert answer_s + pause_s == pytest.approx(max(PAUSE_SHARE * target_s * mu_o, answer_s))


def test_long_answers_are_recognised_before_the_first_has_ended() -> None:
    length = AnswerLength(prior_tokens=100, window=500, product_limit=False)
    for _ in range(50):
        length.decoded(500)
    assert length.mean > 50 * 500 / 10  # 25,000 tokens and none has ended


@pytest.mark.parametrize(("prior_tokens", "steps", "expected"), [(100, 10, 400), (100, 50, 400), (20, 50, 100)])
def test_a_full_start_does_not_make_the_mean_answer_too_long(prior_tokens: float, steps: int, expected: float) -> None:
    """A thousand begin at once: at most four times the assumed mean, or twice the oldest answer."""
    length = AnswerLength(prior_tokens, window=500, product_limit=True)
    for _ in range(steps):
        length.decoded(1000)
    assert length.mean == expected
    length.ended(steps)
    assert length.mean == expected


def test_few_long_answers_are_not_limited_by_what_was_assumed() -> None:
    length = AnswerLength(prior_tokens=100, window=500, product_limit=True)
    for _ in range(4000):
        length.decoded(1)
    assert length.mean == 100 + 4000 / 4


def test_the_limit_ends_with_the_first_unbiased_estimate() -> None:
    """Answers become 30 times as long as assumed: then no limit holds the estimate down."""
    length = AnswerLength(prior_tokens=10, window=500, product_limit=True)
    for _ in range(50):
        length.decoded(1)
        length.ended(1)
    length.update(list)
    for _ in range(10):
        length.decoded(10_000)
    assert length.mean > 300


def test_the_mean_answer_converges_and_follows_a_change() -> None:
    length = AnswerLength(prior_tokens=100, window=100, product_limit=False)
    for expected in (30, 400, 30):
        for _ in range(1200):
            length.decoded(expected)
            length.ended(expected)
        assert abs(length.mean / expected - 1) < 0.1


def test_after_a_shift_to_longer_answers_the_short_memory_counts() -> None:
    length = AnswerLength(prior_tokens=100, window=500, product_limit=False)
    for _ in range(2000):
        length.decoded(30)
        length.ended(30)
    assert length.mean == pytest.approx(30, rel=0.1)
    for _ in range(400):
        length.decoded(300)  # 400 tokens each, and none of them has ended
    assert length.mean > 400


@pytest.mark.parametrize("product_limit", [False, True])
@pytest.mark.parametrize("rates", [(0.3,), (0.9, 0.8, 0.7), (1.0,) * 5])
def test_with_drafts_the_mean_answer_counts_tokens_not_steps(product_limit: bool, rates: tuple[float, ...]) -> None:
    """A step gives each of 200 sequences a token and the drafts that are accepted; answers have 90 to 110 tokens."""
    length = AnswerLength(prior_tokens=100, window=500, product_limit=product_limit)
    dice, ended = random.Random(2), 0
    left = [dice.randint(1, 100) for _ in range(200)]
    whole = list(left)
    while ended < 4000:
        luck = [dice.random() for _ in left]
        length.decoded(len(left))
        length.accepted([sum(one < rate for one in luck) for rate in rates])
        for slot, one in enumerate(luck):
            left[slot] -= 1 + sum(one < rate for rate in rates)
            if left[slot] <= 0:
                length.ended(whole[slot])
                left[slot] = whole[slot] = dice.randint(90, 110)
                ended += 1
                if ended % 100 == 0:
                    length.update(lambda: [max(all_ - rest, 0) for all_, rest in zip(whole, left, strict=True)])
    # Drafts that are accepted beyond an answer's end are counted: at most a step's tokens per answer.
    assert 97.0 < length.mean < 103.0 + len(rates)


def closed_loop(length: AnswerLength, seqs: int, steps: int, *, update_every: int = 100) -> list[float]:
    """Means after each update of a loop that starts full; answers uniform from 1 to 511 tokens, 256 on average."""
    rng = random.Random(1)
    left = [rng.randint(1, 511) for _ in range(seqs)]
    total, ended, means = list(left), 0, []
    for _ in range(steps):
        length.decoded(seqs)
        left = [tokens - 1 for tokens in left]
        for slot, tokens in enumerate(left):
            if tokens == 0:
                length.ended(total[slot])
                left[slot] = total[slot] = rng.randint(1, 511)
                ended += 1
                if ended % update_every == 0:
                    ages = [whole - rest for whole, rest in zip(total, left, strict=True) if whole > rest]
                    length.update(partial(list, ages))
                    means.append(length.mean)
    return means


def test_tokens_of_running_answers_are_read_again_at_every_update() -> None:
    length = AnswerLength(prior_tokens=100, window=500, product_limit=True)
    for _ in range(30):
        length.decoded(4)
    length.ended(30)
    assert length.running_tokens == 90
    length.update(lambda: [30, 30])  # the fourth was preempted
    assert length.running_tokens == 60
    length.ended(70)  # read at 60 with one token in flight, then counted
    assert length.running_tokens == 0


def test_the_product_limit_mean_is_sooner_near_the_true_mean() -> None:
    """Tokens per ended answer counts all tokens of the start, when hardly an answer has ended."""
    cautious = closed_loop(AnswerLength(100, 500, product_limit=False), 1000, 600)[7:]
    unbiased = closed_loop(AnswerLength(100, 500, product_limit=True), 1000, 600)[7:]
    assert sum(unbiased) / len(unbiased) - 256 < 0.5 * (sum(cautious) / len(cautious) - 256)
    assert min(unbiased) > 0.9 * 256


def test_the_mean_answer_is_the_product_limit_mean_in_the_end() -> None:
    means = closed_loop(AnswerLength(100, 500, product_limit=True), 200, 2000)
    assert all(0.9 * 256 < mean < 1.35 * 256 for mean in means[10:])


def debt_after(steps: Sequence[tuple[float, float]], *, reachable: bool = True, decoding: int = 10) -> TokenDebt:
    """Steps of so many seconds, that give so many tokens, with a target of 0.1 s and answers of 200 tokens."""
    debt, now_s = TokenDebt(0.1), 0.0
    debt.observe(now_s, decoding=0, stepped=False, answer_tokens=200, reachable=reachable)
    for length_s, stepped in steps:
        now_s += length_s
        debt.observe(now_s, decoding=decoding, stepped=stepped, answer_tokens=200, reachable=reachable)
    return debt


def test_prompts_wait_while_answers_are_behind_their_target() -> None:
    behind = [(1.0, False)]
    assert debt_after(behind).exceeded
    assert debt_after([*behind, *[(0.05, True)] * 5]).exceeded
    assert not debt_after([*behind, *[(0.05, True)] * 20]).exceeded
    assert not debt_after([(0.05, True)] * 1000 + [(0.4, False)]).exceeded
    # Time saved before the target was missed does not count.
    assert debt_after([(0.05, True)] * 1000 + behind).exceeded


def test_every_token_of_a_step_with_drafts_pays_for_its_time() -> None:
    assert debt_after([(0.25, 1)] * 20).exceeded
    assert not debt_after([(0.25, 3)] * 20).exceeded
    assert debt_after([(0.25, 2.5)] * 60).exceeded


def test_prompts_do_not_wait_for_unreachable_or_long_missed_targets() -> None:
    assert not debt_after([(1.0, False)] * 9, reachable=False).exceeded
    assert not debt_after([(1.0, False)] * 9, decoding=0).exceeded
    most_s = DEBT_FORGOTTEN * 200 * 0.1
    assert not debt_after([(1000.0, False), *[(0.045, True)] * math.ceil(most_s / 0.05)]).exceeded
