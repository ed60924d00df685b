"""The ``profile`` source: draws requests from length distributions, without a data set."""

from __future__ import annotations

import numpy as np

from ebbench.traffic.substreams import substream
from ebbench.workloads.requests import Int64s, Requests, single_turn, with_history
from ebbench.workloads.spec import Profile, Turns


def draw_requests(profile: Profile, sessions: int, seed: int, part: str = "") -> Requests:
    """Draw ``sessions`` sessions. ``part``: name of a scenario phase, which gets its own random substream."""
    turns = substream(seed, f"content/turns{part}")
    rounds = np.ones(sessions, np.int64) if profile.turns is None else draw_rounds(profile.turns, turns, sessions)
    n = int(rounds.sum())
    inputs = profile.input.draw(substream(seed, f"content/input{part}"), n)
    outputs = profile.output.draw(substream(seed, f"content/output{part}"), n)
    if profile.turns is None:
        return single_turn(inputs, outputs)
    return with_history(rounds, inputs, outputs)


def draw_rounds(turns: Turns, rng: np.random.Generator, sessions: int) -> Int64s:
    """Rounds per session: ``min`` plus a geometric number, capped at ``max``; shape (sessions,)."""
    if turns.min == turns.max:
        return np.full(sessions, turns.min)
    go_on = continuation(turns)
    if go_on == 0.0:
        return np.full(sessions, turns.min)
    more = rng.geometric(1.0 - go_on, size=sessions) - 1 if go_on < 1.0 else turns.max
    return np.minimum(turns.min + more, turns.max).astype(np.int64) * np.ones(sessions, np.int64)


def continuation(turns: Turns) -> float:
    """Probability of one more round such that the mean after the cap is ``turns.mean``.

    The mean of ``min(min + G, max)`` is ``min + q + q^2 + ... + q^(max-min)``, which increases with q: solved by
    bisection.
    """
    powers = np.arange(1, turns.max - turns.min + 1)
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if turns.min + float((middle**powers).sum()) < turns.mean:
            low = middle
        else:
            high = middle
    return (low + high) / 2
