"""The base class of errors in settings that the user gave, and the hint that they give about a mistyped name."""

from __future__ import annotations

from collections.abc import Iterable


class GivenValueError(ValueError):
    """A policy, setting, calibration or coefficient that cannot be; the message says what to give instead."""


def name_hint(name: str, known: Iterable[str]) -> str:
    """What to write instead of an unknown name: the nearest known one, or all of them."""
    import difflib

    choices = sorted(known)
    near = difflib.get_close_matches(name, choices, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(choices)}"
