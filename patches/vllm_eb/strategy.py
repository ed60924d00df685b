"""Base class of the policies' decisions, called by the controller; every method has a default.

The controller (:mod:`vllm_eb.controller`) keeps phases, KV gate and records. It reports admissions and completions to
the strategy and asks it for bounds and thresholds. A strategy decides in one of two ways:

- when a refill is due (:meth:`Strategy.refill_due`): the controller alternates between prefill and decode phases;
- what every step contains (:meth:`Strategy.choose`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol

from vllm_eb.calibration import Calibration
from vllm_eb.decisions import Phase, RecordKind, View
from vllm_eb.lengths import Lengths
from vllm_eb.modes import Mode
from vllm_eb.queueing import Places, QueueOrder, Waited

Values = Mapping[str, float | int | None]


@dataclass(frozen=True)
class EngineFacts:
    """The engine instance that a strategy decides for; KV memory in blocks of ``block_size`` tokens.

    ``ranks``: data-parallel ranks that make every pass together, this one included; 1: it waits for no other.
    ``pass_interval``: their ``View.pass_number`` agree modulo this number of passes.
    """

    calibration: Calibration
    max_num_seqs: int
    block_size: int
    num_blocks: int
    max_num_batched_tokens: int
    ranks: int = 1
    pass_interval: int = 1

    @property
    def capacity_tokens(self) -> int:
        """Capacity of the KV cache in tokens."""
        return self.block_size * self.num_blocks


class StepChoice(NamedTuple):
    """What the next step contains.

    ``refill``: how many requests a prefill that begins now may admit. ``token_budget``: the most tokens of this step,
    prompts and decodes together; None: max_num_batched_tokens of the engine.
    """

    phase: Phase
    mode: Mode
    reason: str = ""
    refill: int = 0
    values: Values = MappingProxyType({})
    token_budget: int | None = None


@dataclass(frozen=True)
class Change:
    """An update of parameters or an evaluation of modes, to be recorded; ``mode``: the new mode after a switch."""

    kind: RecordKind
    reason: str
    values: Values
    mode: Mode | None = None


class PhaseState(Protocol):
    """State of the phases that a strategy may read."""

    @property
    def phase(self) -> Phase:
        """The current phase."""
        ...

    def refilling(self, view: View) -> bool:
        """Whether the current prefill phase has requests left to admit or to compute."""
        ...

    def refill(self, view: View) -> int:
        """Number of waiting requests for which there are idle slots."""
        ...

    def pop_blocked(self) -> bool:
        """Whether the last prefill found no KV blocks; resets the flag."""
        ...


class Strategy:
    """Exclusive batches of at most ``max_num_seqs`` sequences, refilled as soon as a slot is free."""

    mode: Mode = "eb"
    """The mode at the start: exclusive phases or mixed batches."""
    gated: bool = False
    """Whether refills wait while little KV memory is free."""
    bounds_mixed: bool = False
    """Whether the batch limit also applies to mixed steps."""
    prompt_tokens_wanted: int = 0
    """Up to how many tokens ``View.prompt_tokens`` is counted; 0: not at all."""
    queue: QueueOrder | None = None
    """The order of waiting requests, if the policy has its own."""

    def __init__(self, engine: EngineFacts, lengths: Lengths) -> None:
        self.engine, self.lengths = engine, lengths

    # Events.

    def on_prompt(self, input_tokens: int, cached_tokens: int) -> None:
        """Called on the first admission of a request: tokens of its prompt, and how many of them are cached."""

    def on_resume(self) -> None:
        """Called when a preempted request is admitted again."""

    def on_finish(self, output_tokens: int) -> None:
        """Called when a request leaves its slot after ``output_tokens`` tokens."""

    def observe(self, view: View) -> None:
        """Called before each decision."""

    def update(self, view: View, running_ages: Callable[[], Sequence[int]]) -> Sequence[Change]:
        """Called after ``completions_per_update`` completions, with new mean lengths; returns changes to record."""
        return ()

    # Questions.

    @property
    def seqs_allowed(self) -> int:
        """The batch limit N in sequences."""
        return self.engine.max_num_seqs

    @property
    def slots(self) -> int | None:
        """The threshold k in idle slots; None if there is none."""
        return None

    @property
    def theta(self) -> float | None:
        """The threshold as a share of N; None if there is none."""
        slots = self.slots
        return None if slots is None else slots / self.seqs_allowed

    @property
    def facts(self) -> Values:
        """Further values for every record: ``theta0`` (online base threshold), ``n_obs`` (smoothed batch size)."""
        return {}

    def prompts_that_fit(self, view: View) -> float:
        """Number of mean prompts, at least 0, that the KV memory has room for; infinite if the policy sets no limit.

        Asked only while there are idle slots.
        """
        return math.inf

    def refill_due(self, view: View, refill: int, idle: int) -> bool:
        """Whether to change from decode to prefill if ``refill`` requests could join in ``idle`` slots."""
        return True

    def choose(self, view: View, phases: PhaseState) -> StepChoice | None:
        """The next step. None: the controller alternates phases by :meth:`refill_due`."""
        return None

    def order_stands(self, now_s: float, oldest_s: float, waiting: int, prompt_tokens: int) -> bool:
        """Cheap check that ``waiting`` never-started requests in arrival order need no reordering; False if unknown.

        ``oldest_s``: arrival of the first; ``prompt_tokens``: of all of them. If True, it counts as an ordering.
        """
        return False

    def queue_order(
        self, now_s: float, seen_s: Sequence[float], prompt_tokens: Sequence[int], oldest: Waited | None
    ) -> Places:
        """New order of never-started requests as indices; called only if there is a ``queue``.

        ``oldest``: of the overdue requests that are left out; None where an order never has any.
        """
        return Places(range(len(seen_s)))
