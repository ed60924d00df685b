"""How the requests of a log become longer and shorter in its course, and an order of drawn requests that does the same.

Requests drawn one by one have the log's lengths, but not its stretches of longer or shorter prompts. In the Azure code
trace the prompts of successive requests are nearly uncorrelated, and yet the means of 128 successive prompts vary 1.8
times as much as in random order; a burst of long prompts is a queue. So the means of each stretch are learned, and
drawn requests are put into an order that has these means. The lengths stay as drawn.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from ebbench.workloads.requests import Floats, Int64s

_SESSIONS_PER_LEVEL, _MOST_LEVELS = 8, 1200
"""Fewest sessions behind a level, and most levels."""
_ROUNDS, _FIRST_MOVE, _CLOSE = 40, 0.25, 0.002
"""Most corrections of the order; the first one, in standard deviations of the scores; error left, in the mean size."""


class Drift(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Mean lengths of each ``sessions_per_level`` successive sessions, in the mean of all; they repeat after the last.

    ``prompts``: prompt tokens; of a session those of all turns. Not learned of logs whose prompts repeat earlier ones.
    ``outputs``: output tokens; empty if the log has sessions of several turns.
    """

    sessions_per_level: float
    prompts: tuple[float, ...]
    outputs: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.sessions_per_level <= 0 or not self.prompts or min(self.prompts + self.outputs) < 0:
            raise ValueError("a drift needs sessions_per_level above 0 and at least one level, none below 0")
        if self.outputs and len(self.outputs) != len(self.prompts):
            raise ValueError("a drift needs as many levels of outputs as of prompts")

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
    levels = [() if tokens is None else _levels(level, count, tokens) for tokens in (prompts, outputs)]
    return msgspec.structs.replace(drift, prompts=levels[0], outputs=levels[1])


def _levels(level: Int64s, count: int, tokens: Any) -> tuple[float, ...]:
    means = np.bincount(level, tokens, count) / np.maximum(np.bincount(level, minlength=count), 1)
    return tuple(round(float(one), 4) for one in means / max(float(np.mean(tokens)), 1e-9))


def order_with(
    levels: tuple[float, ...], level: Int64s, sizes: Any, rng: np.random.Generator, group: Int64s | None = None
) -> Int64s:
    """An order (indices into ``sizes``) in which the places of each level have its mean, as far as the sizes allow.

    Each place gets a score: a standard normal number plus one number per level; the largest size goes to the place with
    the highest score, and so on (a Gaussian copula of size and place whose location depends on the level). The numbers
    per level are corrected in rounds until the means fit. Sizes of one level are in random order.

    ``level``: of each place. ``group``: sizes only change places within a group; None: all are one group.
    """
    n = len(sizes)
    groups = np.zeros(n, np.int64) if group is None else group
    values = np.asarray(sizes, np.float64)
    by_size = np.lexsort((rng.random(n), values, groups))  # equal sizes in random order
    ordered = values[by_size]
    counts = np.bincount(level, minlength=len(levels))
    held, unused = np.maximum(counts, 1), counts == 0
    wanted = _wanted(levels, level, ordered)
    noise, shift = rng.standard_normal(n), np.zeros(len(levels))
    move, before = np.full(len(levels), _FIRST_MOVE), np.zeros(len(levels))
    places, placed = np.lexsort((noise, groups)), np.empty(n)
    for _ in range(_ROUNDS):
        placed[places] = ordered
        off = wanted - np.bincount(level, placed, len(levels)) / held
        off[(np.abs(off) <= _CLOSE * wanted.mean()) | unused] = 0.0
        if not off.any():
            break
        # The move of a level grows while its mean is off on the same side, and halves when it changes sides.
        move *= np.where(off * before < 0, 0.5, np.where(off * before > 0, 1.5, 1.0))
        shift, before = shift + np.sign(off) * move, off
        places = np.lexsort((shift[level] + noise, groups))
    found = np.empty(n, np.int64)
    found[places] = by_size
    return found


def _wanted(levels: tuple[float, ...], level: Int64s, sizes: Floats) -> Floats:
    """Mean size per level, such that the mean over all places is that of ``sizes``."""
    relative = np.asarray(levels)
    mean = float(relative[level].mean()) if len(level) else 0.0
    found: Floats = relative * (float(sizes.mean()) / mean if mean > 0 else 0.0)
    return found
