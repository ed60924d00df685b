"""EB+'s choice between mixed and exclusive batches."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import brentq

from vllm_eb.calibration import Calibration, MixedCost
from vllm_eb.controller import Controller
from vllm_eb.policies.ebplus import ModeSelector
from vllm_eb.policy import parse_policy
from vllm_eb.strategy import View
from vllm_eb.theory import crossover

MEANS: dict[str, Any] = {"mu_l": 512.0, "mu_o": 256.0, "theta0": 0.2}
SEQS = 512
STICKY, COOLDOWN = 3.0, 3


def calibrated(mixed_s: float) -> Calibration:
    """Mixed batches cost ``mixed_s`` per token at every share."""
    return Calibration(0.004, 5e-5, 0.01, 1e-4, MixedCost(mixed_s, 0.0, 0.0))


def selector(mixed_s: float, margin: float, sticky: float = STICKY) -> ModeSelector:
    """A selector with SEQS active sequences and our additions to eq. 8."""
    return ModeSelector(calibrated(mixed_s), margin, SEQS, sticky=sticky, cooldown=COOLDOWN)


@given(
    mixed_s=st.floats(0.0, 5e-4), margin=st.floats(-3e-4, 3e-4), active=st.lists(st.integers(1, SEQS), min_size=1),
)  # fmt: skip
def test_by_default_eq_8_alone_decides_at_every_load(mixed_s: float, margin: float, active: list[int]) -> None:
    """Exclusive where the advantage is above the margin, mixed otherwise, whatever the mode was before."""
    chosen = ModeSelector(calibrated(mixed_s), margin, SEQS)
    for seqs in active:
        for _ in range(100):
            chosen.observe(seqs)
        evaluation = chosen.evaluate(**MEANS)
        sides = crossover(calibrated(mixed_s), **MEANS, n_obs=chosen.n_obs)
        assert (evaluation.mode == "eb") == (sides.advantage > margin)


def test_light_traffic_means_mixed_batches() -> None:
    """Exclusive under a full batch; mixed at once with eight sequences, where fixed costs weigh most."""
    chosen = ModeSelector(calibrated(2e-4), 1e-5, SEQS)
    assert chosen.evaluate(**MEANS).mode == "eb"
    for _ in range(200):
        chosen.observe(8)
    assert chosen.evaluate(**MEANS).mode == "mb"


@given(mixed_s=st.floats(0.0, 5e-4), margin=st.floats(-3e-4, 3e-4))
def test_under_steady_traffic_it_switches_at_most_once(mixed_s: float, margin: float) -> None:
    """For margins of either sign: the condition to enter exclusive batches excludes the condition to leave them."""
    chosen = selector(mixed_s, margin)
    evaluations = [chosen.evaluate(**MEANS) for _ in range(30)]
    assert sum(e.switched for e in evaluations) <= 1
    first = evaluations[0].crossover
    assert first is not None
    assert (chosen.mode == "eb") == (first.advantage > margin)


@given(margin=st.floats(1e-6, 5e-5), favours_exclusive=st.booleans())
def test_leaves_exclusive_batches_only_at_three_margins(margin: float, favours_exclusive: bool) -> None:
    """Entered with a clear lead, it stays for a lag just under three margins and leaves for one just over."""
    mixed = 3e-4
    for share, left in ((0.99, False), (1.01, True)):
        chosen = selector(mixed, -margin if favours_exclusive else margin)
        assert chosen.evaluate(**MEANS).switched
        for _ in range(COOLDOWN):
            assert not chosen.evaluate(**MEANS).switched
        lagging = MEANS | {"theta0": _threshold_that_lags(mixed, share * STICKY * margin)}
        assert chosen.evaluate(**lagging).switched == left


def _threshold_that_lags(mixed_s: float, lag_s: float) -> float:
    """The theta0 at which exclusive batches fall ``lag_s`` per token behind: a low one pays alpha_p often."""
    calibration = calibrated(mixed_s)
    lengths: dict[str, Any] = {name: MEANS[name] for name in ("mu_l", "mu_o")}

    def lead(log_theta: float) -> float:
        return crossover(calibration, **lengths, n_obs=SEQS, theta0=math.exp(log_theta)).advantage + lag_s

    return math.exp(brentq(lead, math.log(1e-9), math.log(0.5), xtol=1e-14))


@given(mixed_s=st.floats(0.0, 5e-4))
def test_a_stickiness_below_nothing_makes_it_change_at_every_chance(mixed_s: float) -> None:
    """With negative margins it switches at every chance; the tests of switching use this."""
    chosen = selector(mixed_s, margin=-1.0, sticky=-1.0)
    switched = [chosen.evaluate(**MEANS).switched for _ in range(3 * (COOLDOWN + 1))]
    assert switched == ([True] + [False] * COOLDOWN) * 3


@given(least=st.integers(2, SEQS), active=st.integers(1, SEQS))
def test_min_active_bounds_the_sequences_at_which_it_decides(least: int, active: int) -> None:
    chosen = ModeSelector(calibrated(1.0), 1e-5, SEQS, min_active=least)
    for _ in range(500):
        chosen.observe(active)
    assert chosen.evaluate(**MEANS).switched == (chosen.n_obs >= least)
    assert (chosen.n_obs >= least) == (active >= least)


@pytest.mark.parametrize(("least", "mode"), [(8, "eb"), (40, "mb")])
def test_the_policy_passes_its_bound_on(least: int, mode: str) -> None:
    spec = parse_policy(f"ebplus:min_active={least},update_every=10,min_samples=5,margin=-1")
    controller = Controller(
        spec, calibrated(1e-3), max_num_seqs=32, block_size=16, num_blocks=10_000, max_num_batched_tokens=8192
    )
    for step in range(1, 21):
        controller.on_prompt(100)
        controller.on_finish(20)
        controller.decide(
            View(now_s=float(step), step_id=step, decoding=32, prefilling=0, waiting=4, free_blocks=9_000)
        )
    assert controller.mode == mode


def test_too_many_active_sequences_asked_for_is_said_before_the_run() -> None:
    spec = parse_policy("ebplus:min_active=300")
    assert spec.load_doubt(256, 1024) == ("never-active-enough", {"active": 256, "min_active": 300})
    assert spec.load_doubt(512, 1024) is None
    assert spec.load_doubt(0, 1024) is None  # an open loop: as many as there are slots
