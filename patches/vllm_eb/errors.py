"""Base class of errors in the user's settings, and the hint for a mistyped name."""

from __future__ import annotations

from collections.abc import Iterable


class GivenValueError(ValueError):
    """An invalid policy, setting, calibration or coefficient; the message says what to give instead."""


def name_hint(name: str, known: Iterable[str]) -> str:
    """What to write instead of an unknown name: the nearest known one, or all of them."""
    import difflib

    choices = sorted(known)
    by_small_letters = {choice.lower(): choice for choice in reversed(choices)}
    near = difflib.get_close_matches(name.lower(), by_small_letters, n=1, cutoff=0.5)
    return f"did you mean {by_small_letters[near[0]]!r}?" if near else f"known: {', '.join(choices)}"
