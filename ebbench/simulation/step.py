"""A scheduling step: limits, contents, and the receiver of steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from ebbench.simulation.state import Ints

NO_ROWS: Ints = np.zeros(0, np.int64)
NS_PER_S = 1e9


@dataclass(frozen=True)
class SchedulerLimits:
    """vLLM's settings of the same names; ``max_num_seqs`` is what may run: ``max_num_active_seqs``, if that is set."""

    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    long_prefill_token_threshold: int
    async_scheduling: bool
    long_prefill_token_threshold_adaptive: bool = False
    scheduler_reserve_full_isl: bool = True


class Verified(NamedTuple):
    """What became of the drafts of a step, one entry per row that it samples: the drafts verified, those accepted, and
    the tokens that the request gets."""

    drafts: Ints
    accepted: Ints
    tokens: Ints


@dataclass(slots=True, eq=False)
class Step:
    """A scheduled step. ``rows`` and ``tokens`` are in scheduling order; ``sampled`` rows get a token at ``end_ns``.

    ``computed``: tokens of each row computed before it, where scheduling the decodes had to look them up, else None.
    ``pass_number``: of the pass that several units make together. ``verified``: None without speculative decoding.
    """

    scheduled_ns: int
    start_ns: int = 0
    end_ns: int = 0
    rows: Ints = field(default_factory=lambda: NO_ROWS)
    tokens: Ints = field(default_factory=lambda: NO_ROWS)
    sampled: Ints = field(default_factory=lambda: NO_ROWS)
    computed: Ints | None = None
    prefill_tokens: int = 0
    decode_seqs: int = 0
    preempted: list[int] = field(default_factory=list)
    mode: str = "mb"
    k: int | None = None
    n_limit: int | None = None
    kv_blocks_used: int = 0
    waiting: int = 0
    running: int = 0
    pass_number: int = 0
    verified: Verified | None = None

    def leave_out(self, row: int) -> None:
        """Drop the tokens of a request that is gone."""
        kept = self.sampled != row
        if np.count_nonzero(kept) < len(kept):
            self.sampled = self.sampled[kept]
            if self.verified is not None:
                self.verified = Verified(*(counts[kept] for counts in self.verified))

    @property
    def empty(self) -> bool:
        """Whether nothing was scheduled."""
        return not len(self.rows)


class StepSink(Protocol):
    """Receives every step that ran, in order."""

    def step(self, instance: int, step: Step) -> None:
        """Record a step; its fields do not change afterwards."""
        ...
