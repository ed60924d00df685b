"""How the requests of a log become longer and shorter in its course.

Requests drawn one by one have the log's lengths, but not its stretches of longer or shorter prompts. In the Azure code
trace the prompts of successive requests are nearly uncorrelated, and yet the means of 128 successive prompts vary 1.8
times as much as in random order; a burst of long prompts is a queue. So the mean of each stretch is learned, and
drawn requests are put into an order that has it (:mod:`ebbench.traffic.stretches`). The lengths stay as drawn. Of
outputs, whose largest often makes the mean of a stretch, the mean square root is learned, too.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from ebbench.traffic.stretches import roots_of
from ebbench.workloads.requests import Int64s

_SESSIONS_PER_LEVEL, _MOST_LEVELS = 8, 1200
"""Fewest sessions behind a level, and most levels."""


class Drift(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Mean lengths of each ``sessions_per_level`` successive sessions, in the mean of all; they repeat after the last.

    ``prompts``: prompt tokens; of a session those of all turns. Not learned of logs whose prompts repeat earlier ones.
    ``outputs``: output tokens; empty if the log has sessions of several turns. ``output_roots``: mean
    square roots of the outputs in the mean of all; empty in files of earlier versions.
    """

    sessions_per_level: float
    prompts: tuple[float, ...]
    outputs: tuple[float, ...] = ()
    output_roots: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.sessions_per_level <= 0 or not self.prompts or min(self.prompts + self.outputs) < 0:
            raise ValueError("a drift needs sessions_per_level above 0 and at least one level, none below 0")
        if {len(one) for one in (self.outputs, self.output_roots)} - {0, len(self.prompts)}:
            raise ValueError("a drift needs as many levels of outputs and of output_roots as of prompts")
        if self.output_roots and not self.outputs:
            raise ValueError("output_roots need outputs")

    def level_of(self, sessions: int, rate_scale: float) -> Int64s:
        """Index of the level of each session. At twice the rate twice as many sessions have a level."""
        place = np.arange(sessions) / (self.sessions_per_level * rate_scale)
        found: Int64s = place.astype(np.int64) % len(self.prompts)
        return found


def drift_of(prompts: Any, outputs: Any | None = None) -> Drift | None:
    """The drift of sessions with these tokens, in the order of their starts; None of too few sessions."""
    count = min(_MOST_LEVELS, len(prompts) // _SESSIONS_PER_LEVEL)
    if count < 2:
        return None
    drift = Drift(sessions_per_level=round(len(prompts) / count, 6), prompts=(1.0,) * count)
    level = drift.level_of(len(prompts), 1.0)
    found = {"prompts": _levels(level, count, prompts)}
    if outputs is not None:
        found |= {"outputs": _levels(level, count, outputs), "output_roots": _means(level, count, roots_of(outputs))}
    return msgspec.structs.replace(drift, **found)


def _levels(level: Int64s, count: int, tokens: Any) -> tuple[float, ...]:
    return _means(level, count, tokens / max(float(np.mean(tokens)), 1e-9))


def _means(level: Int64s, count: int, values: Any) -> tuple[float, ...]:
    means = np.bincount(level, values, count) / np.maximum(np.bincount(level, minlength=count), 1)
    return tuple(round(float(one), 4) for one in means)
