"""Data types of the policy core: its view of a step, its decision, its records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vllm_eb.modes import Mode

Phase = Literal["prefill", "decode", "mixed"]
RecordKind = Literal["phase", "update", "mode"]


@dataclass(frozen=True, slots=True)
class View:
    """What the scheduler sees at the start of a step.

    ``decoding``: running sequences whose prompt is computed, those whose last token is in flight included;
    ``prefilling``: running sequences with prompt tokens left; ``waiting``: queued ones, preempted ones included.
    Blocks are KV blocks; ``free_blocks`` counts cached but unreferenced ones as free. ``oldest_wait_s``: what
    ``Controller.queue`` says of it; asked for only where ``Controller.orders_queue``.
    ``preempted``: requests preempted since the last view. ``idle_sessions``: streaming sessions between two turns; they
    keep their slots. ``last_tokens_out``: every decoding sequence has its last token in flight (with asynchronous
    scheduling), so none of them needs another step.
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

    @property
    def decodes(self) -> bool:
        """Whether a decode step would hold anything."""
        return self.decoding > 0 and not self.last_tokens_out


@dataclass(frozen=True, slots=True)
class Decision:
    """What the next step may contain.

    ``prefill``: prefilling and newly admitted sequences only, at most ``running_limit`` running in all; ``decode``:
    decoding sequences only, nothing admitted; ``mixed``: vLLM's own rules, limit untouched.
    """

    phase: Phase
    mode: Mode
    running_limit: int
    k: int | None
    n_limit: int


@dataclass(frozen=True)
class Record:
    """One row of decisions.parquet; names as in the schema, None where a value does not apply."""

    time_s: float
    step_id: int
    kind: RecordKind
    reason: str
    mode: Mode
    phase: Phase
    values: dict[str, float | int | None]
