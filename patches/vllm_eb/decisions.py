"""Data types of the controller: its view of a step, its decision, its records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Mode = Literal["eb", "mb"]
Phase = Literal["prefill", "decode", "mixed"]
RecordKind = Literal["phase", "update", "mode"]


class View(NamedTuple):
    """State of the scheduler at the start of a step.

    ``decoding``: running sequences whose prompt is computed, including those whose last token is in flight.
    ``prefilling``: running sequences with prompt tokens left. ``waiting``: queued requests, including preempted ones.
    ``free_blocks``: free KV blocks, including cached ones that no request uses. ``oldest_wait_s``: that of
    ``Controller.queue``; needed only if ``Controller.orders_queue``. ``preempted``: requests preempted since the last
    view. ``idle_sessions``: streaming sessions between two turns, which keep their slots. ``last_tokens_out``: the last
    token of every decoding sequence is in flight (asynchronous scheduling), so that none of them needs another step.
    ``prompt_tokens``: prompt tokens that the next step could compute, of partly computed prompts, then of waiting ones
    in order, as long as slots and KV blocks suffice; without deducting cached prefixes; counted only up to
    ``Controller.prompt_tokens_wanted``. ``pass_number``: of the pass that data-parallel ranks in lockstep make
    together, equal on all of them modulo ``EngineFacts.pass_interval``; 0 without other ranks.
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
    ``decode``: decoding sequences only, no admissions. ``mixed``: vLLM's own rules, limit unchanged.
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
    """One row of decisions.parquet; names as in the schema, None if a value does not apply."""

    time_s: float
    step_id: int
    kind: RecordKind
    reason: str
    mode: Mode
    phase: Phase
    values: dict[str, float | int | None]
