"""Base class of errors in the user's settings, and the hint for a mistyped name."""

from __future__ import annotations

from collections.abc import Iterable


class GivenValueError(ValueError):
    """An invalid policy, setting, calibration or coefficient; the message says what to give instead."""


def name_hint(name: str, known: Iterable[str]) -> str:
    """What to write instead of an unknown name: the nearest known one, or all of them."""
    import difflib

    choices = sorted(known)
    near = difflib.get_close_matches(name, choices, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(choices)}"
