"""What a policy decides: the view of a step, the decision, and the base class of strategies.

The controller (:mod:`vllm_eb.controller`) keeps phases, KV gate and records. It reports admissions and completions to
the strategy and asks it for bounds and thresholds. A strategy decides in one of two ways:

- when a refill is due (:meth:`Strategy.refill_due`): the controller alternates between prefill and decode phases;
- what every step contains (:meth:`Strategy.choose`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import add
from types import MappingProxyType
from typing import Literal, NamedTuple, Protocol

from vllm_eb.calibration import Calibration
from vllm_eb.queueing import Places, QueueOrder, Waited
from vllm_eb.theory import NO_DRAFTS, Drafts

Mode = Literal["eb", "mb"]
Phase = Literal["prefill", "decode", "mixed"]
RecordKind = Literal["phase", "update", "mode"]


class View(NamedTuple):
    """State of the scheduler at the start of a step.

    ``decoding``: running sequences whose prompt is computed, including those whose last token is in flight.
    ``prefilling``: running sequences with prompt tokens left. ``waiting``: queued requests, including preempted
    ones. ``free_blocks``: free KV blocks, including cached ones that no request uses. ``oldest_wait_s``: that of
    ``Controller.queue``; 0 unless ``Controller.orders_queue`` and requests wait. ``preempted``: requests preempted
    since the last view. ``idle_sessions``: streaming sessions between two turns, which keep their slots.
    ``last_tokens_out``: the last token of every decoding sequence is in flight (asynchronous scheduling), so that
    none of them needs another step. ``prompt_tokens``: prompt tokens that the next step could compute, of partly
    computed prompts, then of waiting ones in order, as long as slots and KV blocks suffice; without deducting
    cached prefixes; counted only up to ``Controller.prompt_tokens_wanted``. ``pass_number``: of the pass that
    data-parallel ranks in lockstep make together, equal on all of them modulo ``EngineFacts.pass_interval``; 0
    without other ranks.
    """

    now_s: float
    step_id: int
    decoding: int
    prefilling: int
    waiting: int
    free_blocks: int
    oldest_wait_s: float = 0.0
    preempted: int = 0
    idle_sessions: int = 0
    last_tokens_out: bool = False
    prompt_tokens: int = 0
    pass_number: int = 0

    @property
    def decodes(self) -> bool:
        """Whether a decode step would have any sequence."""
        return self.decoding > 0 and not self.last_tokens_out


class Decision(NamedTuple):
    """What the next step may contain.

    ``prefill``: prefilling and newly admitted sequences only, with at most ``running_limit`` running in total.
    ``decode``: decoding sequences only, no admissions. ``mixed``: vLLM's own rules, limit unchanged. ``n_limit``: the
    batch limit; in a decode step of a policy that bounds memory, as it was when requests could last join.
    ``token_budget``: the most tokens of the step if fewer than max_num_batched_tokens; None: that of the engine.
    """

    phase: Phase
    mode: Mode
    running_limit: int
    k: int | None
    n_limit: int
    token_budget: int | None = None


@dataclass(frozen=True)
class Record:
    """One row of decisions.parquet; names as in the schema, None if a value does not apply.

    ``reason``: a code; together with the values it is all that a sentence about the decision needs.
    """

    time_s: float
    step_id: int
    kind: RecordKind
    reason: str
    mode: Mode
    phase: Phase
    values: dict[str, float | int | None]


# Weights as in the authors' code; in the paper mu_l is the mean of the prompts in the window (section 3.4).
MU_L_WEIGHT = 0.05  # per admitted prompt
MU_O_WEIGHT = 0.2  # per update, for the mean over the completions since the last update
DRAFTS_REMEMBERED = 50_000
"""Verified drafts from which on old ones count less: the standard error of a rate is below 0.3 % then."""
# Initial values, as in the authors' code.
INITIAL_MU_L, INITIAL_MU_O = 512.0, 100.0


class Lengths:
    """Smoothed means: prompt ``mu_l``, its part that is not in the prefix cache ``mu_new``, and output ``mu_o``.

    Prompts update one by one, outputs in groups of ``update_every``. ``drafts``: what is known of the tokens drafted,
    of which no more than the number is known at first.
    """

    def __init__(self, update_every: int, drafts: Drafts = NO_DRAFTS) -> None:
        self._update_every = update_every
        self.drafts = drafts
        self._drafted = self._accepted = [0] * len(drafts.acceptance)
        self.mu_l, self.mu_o = INITIAL_MU_L, INITIAL_MU_O
        self.mu_new = INITIAL_MU_L
        self._prompts = self._updates = 0
        self._answers = self._answer_tokens = 0  # since the last update
        self.update_due = False
        """Whether ``update_every`` completions have occurred since the last update."""

    def on_prompt(self, input_tokens: int, cached_tokens: int = 0) -> None:
        """Record the first admission of a prompt of ``input_tokens``, of which ``cached_tokens`` are cached."""
        weight = MU_L_WEIGHT if self._prompts else 1.0
        self.mu_l += weight * (input_tokens - self.mu_l)
        self.mu_new += weight * (input_tokens - cached_tokens - self.mu_new)
        self._prompts += 1

    def on_finish(self, output_tokens: int) -> None:
        """Record that a request left its slot after ``output_tokens``; aborted requests count, since they free a slot
        too."""
        self._answers += 1
        self._answer_tokens += output_tokens
        self.update_due = self._answers >= self._update_every

    def on_verified(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Record, by position, how many drafts of a step were as long, and how many were accepted that far."""
        self._drafted = list(map(add, self._drafted, drafted))
        self._accepted = list(map(add, self._accepted, accepted))

    def update(self) -> None:
        """Update ``mu_o`` with the outputs since the last update, and the acceptance with the drafts since then."""
        weight = MU_O_WEIGHT if self._updates else 1.0
        self.mu_o += weight * (self._answer_tokens / self._answers - self.mu_o)
        self._updates += 1
        self._answers = self._answer_tokens = 0
        self.update_due = False
        if any(self._drafted):
            self.drafts = replace(self.drafts, acceptance=tuple(self._rates()))
            if self._drafted[0] > DRAFTS_REMEMBERED:
                self._drafted = [count // 2 for count in self._drafted]
                self._accepted = [count // 2 for count in self._accepted]

    def _rates(self) -> list[float]:
        """The acceptance by position. Drafts that are longer than any so far are accepted as often, given those
        before, as the last token; a rate of fewer drafts than the one before cannot exceed it."""
        rates: list[float] = []
        for drafted, accepted in zip(self._drafted, self._accepted, strict=True):
            last, before = (rates[-1] if rates else 1.0), (rates[-2] if len(rates) > 1 else 1.0)
            rates.append(min(accepted / drafted, last) if drafted else last * (last / before if before else 0.0))
        return rates


Values = Mapping[str, float | int | None]
LONGEST_PERIOD = 64
"""Passes modulo which data-parallel ranks in lockstep agree on the number of a pass, at most."""


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
    draft_lengths: Sequence[int] | None = None
    """Tokens to draft per sequence after a step, by the number of its sequences; None: all that the server drafts."""

    def __init__(self, engine: EngineFacts, lengths: Lengths) -> None:
        self.engine, self.lengths = engine, lengths

    # Events.

    def on_prompt(self, input_tokens: int, cached_tokens: int) -> None:
        """Called on the first admission of a request: tokens of its prompt, and how many of them are cached."""

    def on_resume(self) -> None:
        """Called when a preempted request is admitted again."""

    def on_accepted(self, by_position: Sequence[int]) -> None:
        """Called after a step with drafts: how many sequences got one further token or more, two or more, ..."""

    def on_finish(self, output_tokens: int) -> None:
        """Called when a request leaves its slot after ``output_tokens`` tokens."""

    def observe(self, view: View) -> None:
        """Called before each decision."""

    def update(self, view: View, running_ages: Callable[[], Sequence[int]]) -> Sequence[Change]:
        """Called after ``completions_per_update`` completions, with new mean lengths; returns changes to record."""
        return ()

    # Questions.

    def decode_tokens(self, seqs: int) -> int:
        """Tokens of a step that the decodes of ``seqs`` sequences take: each has its drafts verified, too."""
        lengths = self.draft_lengths
        drafts = len(self.lengths.drafts.acceptance) if lengths is None else lengths[min(seqs, len(lengths) - 1)]
        return seqs * (1 + drafts)

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

    def queue_order(
        self, now_s: float, seen_s: Sequence[float], prompt_tokens: Sequence[int], oldest: Waited | None
    ) -> Places:
        """New order of never-started requests as indices; called only if there is a ``queue``.

        ``oldest``: of the overdue requests that are left out; None where an order never has any.
        """
        return Places(range(len(seen_s)))
