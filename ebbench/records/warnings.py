"""Caveats of a measurement as data, and the only place that puts them in words.

A warning is stored as a code and the values it rests on, so that runs can be grouped by it; :func:`str` of it gives
the sentence that is shown. Runs stored by earlier versions have the sentence itself, which is shown as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

Text = str | Callable[..., str]


def warning(code: str, **values: Any) -> RunWarning:
    """The caveat of that code with its values."""
    return RunWarning(code, values=values)


class RunWarning(msgspec.Struct, frozen=True, omit_defaults=True):
    """One caveat of a measurement: a stable ``code`` and its ``values``; units are in their names.

    ``message`` and ``remedy``: what a stored run of an earlier version says instead.
    """

    code: str
    message: str = ""
    remedy: str = ""
    values: dict[str, Any] = {}

    def __str__(self) -> str:
        if self.message:
            return f"{self.message} {self.remedy}".strip()
        text = TEXTS.get(self.code, "")
        try:
            return text.format(**self.values) if isinstance(text, str) else text(**self.values)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):  # values of a damaged manifest
            return f"{self.code} {self.values}"

    def __hash__(self) -> int:
        return hash((self.code, str(self)))


def _budget_below_seqs(budget: int, seqs: int, max_num_seqs: int) -> str:
    return (
        f"At most {budget} of up to {seqs} sequences decode per step under budget={budget}; vLLM refuses a token "
        f"budget below --max-num-seqs. Use budget={max_num_seqs} or more, or lower --max-num-seqs to {budget}."
    )


def _k_always_met(open: int, max_num_seqs: int, k: int) -> str:
    return (
        f"At most {open:,} requests are open, so {max_num_seqs - open:,} of {max_num_seqs:,} slots are always idle and "
        f"k={k} never delays a refill: the policy behaves like v0. Give --max-num-seqs {open} to wait for {k} "
        "departures."
    )


TEXTS: Mapping[str, Text] = {
    "budget-below-seqs": _budget_below_seqs,
    "k-always-met": _k_always_met,
    "never-active-enough": (
        "At most {active:,} sequences are active, so with min_active={min_active} EB+ never chooses and stays in mixed "
        "batches, as v1. Use min_active={active} or less, or more open requests."
    ),
}
