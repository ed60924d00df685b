"""Policies with settings drawn at random from the ranges that their specifications state."""

from __future__ import annotations

import random

from vllm_eb.policy import PolicyError, parse_policy, policy_class
from vllm_eb.settings import Setting, settings_of, text_of

ATTEMPTS = 50  # some settings exclude each other
GIVEN = (0.15, 0.5)  # probability that a setting with a default is drawn
BEYOND = (0, 1, 2, 5, 30)  # a whole number is its lower bound and one of these
TIMES_S = (0.002, 0.02, 0.2, 2.0)  # an emulated step takes 3 ms and more


def draw_policy(kind: str, seed: int, seqs: int, budget: int) -> str:
    """A policy of this kind, the same for the same seed. Thresholds are at most ``seqs``, budgets ``budget`` tokens."""
    dice = random.Random(f"{kind} {seed}")
    known = dict(settings_of(policy_class(kind)))
    known.pop("draft", None)  # needs step times with and without drafts, which the devices of scenes do not have
    for _ in range(ATTEMPTS):
        given = dice.choice(GIVEN)
        pairs = [
            f"{name}={text_of(_value(about, dice, seqs, budget))}"
            for name, about in known.items()
            if about.required or dice.random() < given
        ]
        try:
            return parse_policy(f"{kind}:{','.join(pairs)}").name
        except PolicyError:
            continue
    raise AssertionError(f"no settings of {kind} go together in {ATTEMPTS} attempts")


def _value(about: Setting, dice: random.Random, seqs: int, budget: int) -> object:
    """A value in the range of a setting; one out of range makes another attempt."""
    if about.kind is bool:
        return dice.random() < 0.5
    if isinstance(about.kind, tuple):
        return dice.choice(about.kind)
    if about.unit == "slots":
        return dice.randint(1, seqs)
    if about.unit == "tokens per step":
        return dice.randint(seqs, budget)
    if about.kind is int:
        return int(about.at_least or 0) + dice.choice(BEYOND)
    if about.unit == "s":
        return dice.choice(TIMES_S)
    if about.unit == "share":
        return round(dice.uniform(0.01, 0.99), 3)
    return round(dice.uniform(-2.0, 2.0), 3)
