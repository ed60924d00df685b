"""``--repeats``: their number, a note before the first run about what they can show, and when ``auto`` stops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ebbench.errors import UsageError

if TYPE_CHECKING:
    from ebbench.analysis.summary import Summary

AUTO = "auto"
FEWEST, MOST = 2, 10_000
"""Least number of repeats before a decision, and the most that are run: beyond some hundred, nothing changes."""


def parse_repeats(text: str, most: int, *, policies: int) -> tuple[int, bool]:
    """Most repeats, and whether to stop when it is clear which policy is better. Raises UsageError."""
    if text.strip() == AUTO:
        if policies < 2:
            raise UsageError("--repeats auto stops when it is clear which policy is better; give two --policy or more")
        if not FEWEST <= most <= MOST:
            raise UsageError(f"--max-repeats must be at least {FEWEST} and at most {MOST:,}, not {most:,}")
        return most, True
    try:
        count = int(text)
    except ValueError:
        raise UsageError(f"--repeats takes a number or {AUTO}, not {text!r}") from None
    if not 1 <= count <= MOST:
        raise UsageError(f"--repeats must be at least 1 and at most {MOST:,}, not {count:,}")
    return count, False


def beforehand(facts: Mapping[str, Any], repeats: int, *, policies: int, until_clear: bool, virtual: bool) -> str:
    """A note before the first run about what this many repeats can show; empty if there is nothing to note.

    ``facts``: those of the plan. ``virtual``: simulated time, in which equal plans give equal figures.
    """
    from ebbench.analysis.compare.certainty import TESTED, pairs_needed

    if repeats < 2 or policies < 2:
        return ""
    if virtual and facts.get("loop") == "trace":
        return "A replayed trace in virtual time: every repeat gives the same figures, so one is enough."
    needed = pairs_needed(len(TESTED) * (policies - 1))
    if until_clear:
        return (
            f"Repeating until it is clear which policy is better: {needed} repeats are the fewest that can show a "
            f"difference, {repeats} the most (--max-repeats)."
        )
    if repeats < needed:
        return (
            f"{repeats} repeats cannot show a difference between {policies} policies; {needed} are the fewest that can."
        )
    return ""


def why_stop(summaries: Sequence[Summary]) -> str:
    """Why more repeats would not help; empty if they may. All policies have run each plan so far."""
    from ebbench.analysis.compare.certainty import stop_reason
    from ebbench.analysis.compare.policies import group_by_policy

    if any(not summary.valid for summary in summaries):
        return "Stopped: a run is INVALID, and more repeats do not change that."
    if all(summary.virtual and summary.load.replayed for summary in summaries):
        return "Stopped after one repeat: a replayed trace in virtual time gives the same figures every time."
    groups = group_by_policy(summaries)
    count = len(groups[0].summaries)
    if count < FEWEST:
        return ""
    return {
        "": "",
        "shown": f"Stopped after {count} repeats: it is clear.",
        "equal": f"Stopped after {count} repeats: the policies are equal to within 0.5 %.",
        "copies": f"Stopped after {count} repeats: they give the same figures, so no randomness is left.",
    }[stop_reason(groups)]
