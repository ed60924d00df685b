from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbench.advice.choice import SIMPLEST_FIRST
from ebbench.render.palette import POLICIES
from vllm_eb.calibration import Calibration
from vllm_eb.controller import Controller
from vllm_eb.policy import (
    PolicyError,
    PolicySpec,
    descriptions,
    example,
    parse_policy,
    policy_from_mapping,
    policy_types,
    settings_in_effect,
    settings_of,
)  # fmt: skip
from vllm_eb.settings import name_hint
from vllm_eb.strategy import View


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("v1", "v1"),
        (" v0 ", "v0"),
        ("deferred:k=32", "deferred:k=32"),
        ("eb:theta=0.5", "eb:theta=0.5"),
        ("eb:k=64", "eb:k=64"),
        ("ebplus:window=500", "ebplus"),
        ("ebplus:estimator=censored, kv_gate=off", "ebplus:estimator=censored,kv_gate=false"),
    ],
)
def test_names_are_canonical_and_round_trip(text: str, name: str) -> None:
    spec = parse_policy(text)
    assert spec.name == name
    assert parse_policy(spec.name) == spec


@given(st.floats(min_value=1e-6, max_value=0.999), st.integers(1, 10_000), st.floats(-1e-2, 1e-2))
def test_any_settings_round_trip(theta: float, window: int, margin: float) -> None:
    fixed: Any
    switching: Any
    fixed, switching = parse_policy(f"eb:theta={theta}"), parse_policy(f"ebplus:margin={margin},window={window}")
    assert (fixed.theta, switching.window, switching.margin) == (theta, window, margin)
    assert parse_policy(fixed.name) == fixed
    assert parse_policy(switching.name) == switching


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("v2", "unknown policy 'v2'"),
        ("deferred", "deferred:k=32"),
        ("deferred:k=0", "at least 1"),
        ("eb:theta=1", "strictly between 0 and 1"),
        ("eb:theta=0", "strictly between 0 and 1"),
        ("eb:theta=x", "not valid"),
        ("eb:k=3,theta=0.2", "not both"),
        ("eb:theta=0.3,min_samples=1", "min_samples= with theta=0.3; it then uses theta, update_every, kv_gate"),
        ("eb:k=8,initial_theta=0.9", "initial_theta= with k=8; it then uses k, update_every, kv_gate"),
        ("eb:epsilon=0.5,memory_safe=off", "epsilon= with memory_safe=false; it then uses k, theta, estimator"),
        ("v1:k=3", "v1 has no setting k=, which belongs to deferred, eb; it takes budget, order"),
        ("ebplus:theta=0.4", "ebplus has no setting theta=, which belongs to eb; it takes margin"),
        ("deferred:k=3,theta=0.4", "deferred has no setting theta=, which belongs to eb; it takes k"),
        ("cadence", "write cadence:every=8"),
        ("cadence:every=0", "at least 1 .steps., e.g. every=8"),
        ("cadence:every=2.5", "'every=2.5' is not valid; write a whole number"),
        ("cadence:every=4,k=2", "k=, which belongs to deferred, eb; it takes every"),
        ("eb:every=4", "every=, which belongs to cadence"),
        ("eb:thta=0.2", "setting of policy eb 'thta'; did you mean 'theta'"),
        ("eb:k=3,k=4", "k is given twice"),
        ("v1:thta=0.2", "known: budget, order"),
        ("v0:window=3", "v0 has no setting window=, which belongs to eb, ebplus, marginal; it takes order"),
        ("eb:margin=1e-5", "margin=, which belongs to ebplus; it takes k, theta"),
        ("ebplus:ttft=3", "ttft=, which belongs to marginal"),
        ("eb:kv_gate=maybe", "on or off"),
        ("eb:estimator=best", "one of published, censored"),
        ("eb:window=0", "at least 1"),
        ("eb:theta_min=0.9", "at most 0.8"),
        ("ebplus:margin=nan", "write a number"),
        ("ebplus:sticky=inf", "write a number"),
        ("v1:max_num_batched_tokens=2048", "'max_num_batched_tokens'; here it is budget="),
        ("batchwait:batch_wait_timeout_iters=32,ratio=0.5", "'batch_wait_timeout_iters'; here it is iters="),
        ("batchwait:iters=32,batch-wait-max-tokens-ratio=0.5", "'batch-wait-max-tokens-ratio'; here it is ratio="),
        ("delayer:prefill_delayer_max_delay_passes=30", "here it is passes="),
        ("cadence:prefill_schedule_interval=8", "here it is every="),
        ("delayer:usage=1.5", "'usage=1.5' is not valid; write a number of at least 0 and at most 1 .share"),
        ("delayer:wait=3", "wait= limits the delay by ratio=; give that too, e.g. ratio=0.5"),
    ],
)
def test_wrong_policy_settings_are_refused_with_the_remedy(text: str, says: str) -> None:
    with pytest.raises(PolicyError, match=says):
        parse_policy(text)


def test_a_mapping_means_the_same_as_the_text() -> None:
    assert policy_from_mapping({"kind": "eb", "k": 3, "kv_gate": False}) == parse_policy("eb:k=3,kv_gate=false")


def test_every_kind_is_described() -> None:
    assert set(descriptions()) >= {"v0", "v1", "cadence", "deferred", "eb", "ebplus", "marginal"}
    for kind, made in policy_types().items():
        assert made.kind == kind
        assert set(settings_in_effect(parse_policy(example(kind)))) == set(settings_of(made))
        assert all(about.help and about.values for about in settings_of(made).values())


def test_policies_differ_in_description_colour_and_rank() -> None:
    kinds = policy_types().keys()
    assert len(set(descriptions().values())) == len(kinds)
    assert len(set(POLICIES.values())) == len(POLICIES)
    assert kinds >= POLICIES.keys() == set(SIMPLEST_FIRST)


CHANGED = {
    "theta": 0.6, "estimator": "censored", "window": 20, "update_every": 7, "min_samples": 200, "initial_theta": 0.4,
    "theta_min": 0.5, "epsilon": 0.4, "kv_gate": False, "memory_safe": False, "memory_form": "paper",
}  # fmt: skip


def told(spec: PolicySpec) -> list[object]:
    """Decisions and records of a controller over a fixed sequence of events."""
    made = Controller(
        spec,
        Calibration(0.005, 1e-5, 0.02, 1e-5),
        max_num_seqs=50,
        block_size=16,
        num_blocks=400,
        max_num_batched_tokens=8192,
        keep_records=True,
    )
    made.follow_ages(lambda: [500] * 20)
    found: list[object] = []
    for step in range(600):
        made.on_prompt(100)
        made.on_finish(40 + 7 * step % 90)
        found.append(made.decide(View(step, step, step % 50, 0, waiting=9, free_blocks=37 * step % 399)))
    return found + made.drain_records()


def unchecked(spec: PolicySpec, key: str, value: object) -> PolicySpec:
    """A copy with another value, without validation."""
    made = copy.copy(spec)
    object.__setattr__(made, key, value)
    return made


@pytest.mark.parametrize("policy", ["eb", "eb:theta=0.3", "eb:memory_safe=false"])
def test_the_settings_in_effect_are_those_that_change_the_policy(policy: str) -> None:
    spec = parse_policy(policy)
    heeded = {key for key, value in CHANGED.items() if told(unchecked(spec, key, value)) != told(spec)}
    idle = {key for key, value in CHANGED.items() if getattr(spec, key) == value}
    assert heeded == (set(settings_in_effect(spec)) & set(CHANGED)) - idle


def test_an_unknown_name_among_none_says_so() -> None:
    assert name_hint("mine", []) == "there is none"
    assert name_hint("mine", ["other"]) == "known: other"
