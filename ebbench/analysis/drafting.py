"""Drafted and accepted tokens of a run with speculative decoding, and what follows from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FACT = "speculative"
"""Name of the counts among the facts of a run."""


@dataclass(frozen=True)
class Drafted:
    """``steps``: decode steps that verified drafts, counted per sequence. ``drafted`` and ``accepted``: tokens per
    position, as vLLM counts them."""

    steps: int
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]

    @staticmethod
    def of(facts: Mapping[str, Any]) -> Drafted | None:
        """From the facts of a run; None without speculative decoding, or where no draft was verified."""
        counts = facts.get(FACT)
        if not counts or not counts["steps"]:
            return None
        return Drafted(counts["steps"], tuple(counts["drafted"]), tuple(counts["accepted"]))

    @property
    def facts(self) -> dict[str, Any]:
        """What :meth:`of` reads."""
        return {FACT: {"steps": self.steps, "drafted": list(self.drafted), "accepted": list(self.accepted)}}

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per step and sequence: the accepted ones and one more. vLLM's name and definition."""
        return 1.0 + sum(self.accepted) / self.steps

    @property
    def acceptance(self) -> tuple[float, ...]:
        """Share of the drafts that were accepted at least up to each position."""
        return tuple(accepted / self.steps for accepted in self.accepted)

    def figures(self) -> dict[str, Any]:
        """Figures by name, for JSON and tables."""
        return {
            "mean_acceptance_length": self.mean_acceptance_length,
            "acceptance": [round(rate, 6) for rate in self.acceptance],
            "drafted_tokens": sum(self.drafted),
            "accepted_tokens": sum(self.accepted),
        }


def mean_acceptance(rates: Sequence[Sequence[float]]) -> list[float]:
    """The mean per position over several runs; positions that a run does not have are left out."""
    return [sum(position) / len(position) for position in zip(*rates, strict=False)]
