"""The base class of policies' decisions, which the controller calls; with defaults for everything.

The controller (:mod:`vllm_eb.controller`) keeps the phases, the KV gate and the records; it tells a strategy of
admissions and completions and asks it for bounds and thresholds. Two ways to decide:

- say when a refill is due (:meth:`Strategy.refill_due`): the controller alternates between prefill and decode phases;
- say what every step is (:meth:`Strategy.choose`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from vllm_eb.calibration import Calibration
from vllm_eb.decisions import Phase, RecordKind, View
from vllm_eb.lengths import Lengths
from vllm_eb.modes import Mode
from vllm_eb.queueing import Places, PunctualQueue

Values = Mapping[str, float | int | None]


@dataclass(frozen=True)
class EngineFacts:
    """The engine instance that a strategy decides for; KV memory in blocks of ``block_size`` tokens."""

    calibration: Calibration
    max_num_seqs: int
    block_size: int
    num_blocks: int

    @property
    def capacity_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return self.block_size * self.num_blocks


@dataclass(frozen=True)
class StepChoice:
    """What the next step should be. ``refill``: how many requests a prefill begun now may admit."""

    phase: Phase
    mode: Mode
    reason: str = ""
    refill: int = 0
    values: Values = field(default_factory=dict)


@dataclass(frozen=True)
class Change:
    """An update of parameters, or an evaluation of modes, to be recorded; ``mode``: the new one, after a switch."""

    kind: RecordKind
    reason: str
    values: Values
    mode: Mode | None = None


class PhaseState(Protocol):
    """What a strategy may ask of the phases."""

    @property
    def phase(self) -> Phase:
        """The phase in force."""
        ...

    def refilling(self, view: View) -> bool:
        """Whether the prefill phase in force has more to admit or to compute."""
        ...

    def refill(self, view: View) -> int:
        """How many waiting requests there are idle slots for."""
        ...

    def take_blocked(self) -> bool:
        """Whether the last prefill found no KV blocks; the answer is given once."""
        ...


class Strategy:
    """Exclusive batches of at most ``max_num_seqs`` sequences, refilled as soon as a slot is free."""

    mode: Mode = "eb"
    """At the start: exclusive phases or mixed batches."""
    gated: bool = False
    """Whether refills wait while little KV memory is free."""
    bounds_mixed: bool = False
    """Whether the batch limit holds in mixed steps, too."""
    queue: PunctualQueue | None = None
    """The order of waiting requests, where the policy has one of its own."""

    def __init__(self, engine: EngineFacts, lengths: Lengths) -> None:
        self.engine, self.lengths = engine, lengths

    # What it is told.

    def on_prompt(self, input_tokens: int, cached_tokens: int) -> None:
        """A request was admitted for the first time: tokens of its prompt, and how many of them need no computing."""

    def on_resume(self) -> None:
        """A preempted request was admitted again."""

    def on_finish(self, output_tokens: int) -> None:
        """A request left its slot after that many output tokens."""

    def observe(self, view: View) -> None:
        """A step is about to be decided on."""

    def update(self, view: View, running_ages: Callable[[], Sequence[int]]) -> Sequence[Change]:
        """M completions have passed since the last update, and the mean lengths are new."""
        return ()

    # What it is asked.

    @property
    def seqs_allowed(self) -> int:
        """The batch limit N in sequences."""
        return self.engine.max_num_seqs

    @property
    def slots(self) -> int | None:
        """The threshold k in idle slots; None where there is none."""
        return None

    @property
    def theta(self) -> float | None:
        """The threshold as a share of N."""
        slots = self.slots
        return None if slots is None else slots / self.seqs_allowed

    @property
    def facts(self) -> Values:
        """Further values for every record: ``theta0`` (online base threshold), ``n_obs`` (smoothed batch)."""
        return {}

    def prompts_that_fit(self, view: View) -> float:
        """Mean prompts that there is KV memory for, as far as the policy bounds them."""
        return math.inf

    def refill_due(self, view: View, refill: int, idle: int) -> bool:
        """Whether to leave decode for prefill, where ``refill`` requests could join in ``idle`` slots."""
        return True

    def choose(self, view: View, phases: PhaseState) -> StepChoice | None:
        """What the next step is. None: the controller alternates phases, and asks :meth:`refill_due`."""
        return None

    def queue_order(self, now_s: float, seen_s: Sequence[float], prompt_tokens: Sequence[int]) -> Places:
        """The places of never-started requests in their new order; asked only where there is a ``queue``."""
        raise NotImplementedError
