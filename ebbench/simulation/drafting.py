"""vLLM v1's scheduler with speculative decoding (0.32).

A decode step computes the last token of a sequence and the tokens drafted after it. It yields the accepted ones and one
more, and takes the rejected ones back: what was counted as computed when the step was scheduled decreases when it ends.
With asynchronous scheduling the next step is scheduled before that, as if all had been accepted (``placeholders`` in
vLLM), and a sequence that ends within an accepted run has been scheduled once more in vain.

How many drafts are accepted is drawn once per output position of the plan (:func:`accepted_drafts`), so that every
policy and engine meets the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ebbench.devices.base import StepShape
from ebbench.simulation.kv import KvBlocks
from ebbench.simulation.scheduler import Scheduler
from ebbench.simulation.state import Ints, RequestState, token_slots
from ebbench.simulation.step import NO_ROWS, Step, Verified
from ebbench.spec.server import EngineOptions, Speculative

_STREAM = 0xD4AF  # of random numbers, apart from those of plans


def accepted_drafts(speculative: Speculative, state: RequestState, seed: int) -> npt.NDArray[np.int8]:
    """Per token slot of ``state``: drafts accepted by a step whose first token fills that slot."""
    drawn = np.random.default_rng((_STREAM, seed)).random(int(state.max_output.sum()))
    accepted = np.zeros(len(drawn), np.int8)
    for rate in speculative.acceptance:
        accepted += drawn < rate
    return accepted


class DraftCounts:
    """Drafted and accepted tokens by position, of all steps that verified drafts."""

    def __init__(self, tokens: int) -> None:
        self._positions = np.arange(tokens)
        self.forget()

    def forget(self) -> None:
        """Begin again, at the end of a warm-up."""
        self._steps = 0
        self._drafted, self._accepted = np.zeros_like(self._positions), np.zeros_like(self._positions)

    def count(self, drafts: Ints, accepted: Ints) -> None:
        """Count one step; one entry per sequence."""
        self._steps += int(np.count_nonzero(drafts))
        self._drafted += (drafts[:, None] > self._positions).sum(axis=0)
        self._accepted += (accepted[:, None] > self._positions).sum(axis=0)

    @property
    def facts(self) -> dict[str, Any]:
        """Steps, drafted and accepted tokens as a fact ``speculative`` of the run."""
        counts = {"steps": self._steps, "drafted": self._drafted.tolist(), "accepted": self._accepted.tolist()}
        return {"speculative": counts}


@dataclass(frozen=True)
class Drafting:
    """Settings of speculative decoding as the scheduler needs them. ``accepted``: see :func:`accepted_drafts`.

    ``counts``: of the drafts that all schedulers with these settings have verified. ``seldom``: a server finds drafts
    for some decodes only; here all have them.
    """

    tokens: int
    lookahead: int
    recomputes_block: bool
    accepted: npt.NDArray[np.int8]
    max_model_len: int
    counts: DraftCounts
    seldom: bool

    @staticmethod
    def of(speculative: Speculative, state: RequestState, seed: int, max_model_len: int) -> Drafting:
        """The drafts of a server, for the requests of ``state``."""
        return Drafting(
            speculative.tokens,
            speculative.lookahead_tokens,
            speculative.rules.own_kv,
            accepted_drafts(speculative, state, seed),
            max_model_len,
            DraftCounts(speculative.tokens),
            seldom=not speculative.rules.own_kv,
        )


class DraftingScheduler(Scheduler):
    """A Scheduler whose decodes carry drafts.

    ``on_verified`` is called with how many drafts of a step were 1, 2, ... tokens long or more, and how many were
    accepted that far.
    ``state.target`` includes pending drafts. ``known``: tokens that exist, or are certain or hoped for after the steps
    in flight. ``generated``: output tokens that the steps scheduled so far do yield.
    """

    def __init__(
        self, state: RequestState, limits: EngineOptions, kv: KvBlocks, drafting: Drafting,
        *, keep_finished: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(state, limits, kv, keep_finished=keep_finished)
        self._drafting = drafting
        self.lookahead_tokens, self.longest_tokens = drafting.lookahead, drafting.max_model_len
        self._known: Ints = state.prompt.copy()
        self._generated: Ints = np.zeros(state.count, np.int64)
        self._burst: Ints = np.zeros(state.count, np.int64)  # tokens of the last step, without asynchronous scheduling
        self.recomputes_block = drafting.recomputes_block

    @property
    def only_decodes(self) -> bool:
        """False: the next steps of a sequence depend on what is accepted."""
        return False

    @property
    def generates(self) -> bool:
        """See Scheduler."""
        rows = self.running
        return bool((self._continues(rows) & ~self.state.partial[rows]).any())

    def hits(self, row: int, known_tokens: int) -> list[int]:
        """See Scheduler. The drafter needs hidden states of the last block of a cached prefix."""
        cached = list(self.kv.lookup(row, known_tokens))
        return cached[:-1] if self.recomputes_block and self.states is None else cached

    def padding(self, running: Ints) -> int:
        """See Scheduler: as many tokens as a decode with drafts has, unless a prompt is being computed."""
        if self.draft_lengths() is not None:  # vLLM leaves it out where lengths differ
            return 0
        return 0 if self.state.partial[running].any() else self._drafting.tokens

    def published_tokens(self, row: int) -> int:
        """See Scheduler."""
        if self.limits.async_scheduling:
            return super().published_tokens(row)
        return self.delivered_tokens(row) - int(self._burst[row])

    def finished_tokens(self, row: int) -> int:
        """See Scheduler."""
        return super().finished_tokens(row) if self.limits.async_scheduling else self.published_tokens(row)

    def _continues(self, rows: Ints) -> npt.NDArray[np.bool_]:
        """Whether the tokens that are certain after the steps in flight leave some to generate."""
        state = self.state
        if not self.limits.async_scheduling:
            return np.less(state.computed.take(rows), state.target.take(rows))
        placeholders = self._known.take(rows) - np.add(self.state.prompt.take(rows), self.state.outputs(rows))
        certain = state.computed.take(rows) - placeholders + 1
        unfinished: npt.NDArray[np.bool_] = (placeholders == 0) | (certain < state.last.take(rows))
        return unfinished

    def _schedule_running(self, step: Step, candidates: Ints, threshold: int, budget: int) -> tuple[Ints, Ints, int]:
        if not len(candidates):
            return NO_ROWS, NO_ROWS, budget
        state = self.state
        computed = state.computed.take(candidates)
        tokens = np.minimum(state.target.take(candidates) - computed, self.longest_tokens - computed - 1)
        tokens[~self._continues(candidates)] = 0
        if threshold:
            np.minimum(tokens, threshold, out=tokens)
        candidates, tokens = self._allot(step, candidates, tokens, budget)
        candidates, tokens = candidates[tokens > 0], tokens[tokens > 0]
        for row, count in zip(candidates.tolist(), tokens.tolist(), strict=True):
            if state.partial[row]:
                self.kv.publish(row, min(int(state.computed[row]) + count, int(self._known[row])))
        return candidates, tokens, budget - int(np.add.reduce(tokens))

    def _slots(self, tokens: Ints) -> Ints:
        return np.minimum(tokens + self.lookahead_tokens, self.longest_tokens)

    def _blocks_needed(self, rows: Ints, tokens: Ints) -> Ints:
        """See Scheduler. Blocks that rejected drafts needed are not given back."""
        computed = self.state.computed.take(rows)
        slots = self._slots(computed + tokens)
        if self.layout is None:
            held: Ints = -(-slots // self.limits.block_size)
        else:
            held = self.layout.held(slots, self._processed(rows, computed, self.in_flight))
        need: Ints = np.maximum(held - self.state.held_blocks.take(rows), 0)
        need[tokens == 0] = 0
        return need

    def _preempt(self, step: Step, row: int, scheduled_tokens: int = 0) -> None:
        super()._preempt(step, row, scheduled_tokens)
        self._known[row], self._burst[row] = self.state.target[row], 0

    def advance(self, step: Step) -> StepShape:
        """See Scheduler. Drafts of decodes are further tokens of the step; the context of a sequence ends with them."""
        state, rows, drafting = self.state, step.rows, self._drafting
        self.steps += 1
        self.in_flight.append(step)
        before, partial = state.computed.take(rows), state.partial.take(rows)
        after = before + step.tokens
        state.computed[rows] = after
        drafts = np.maximum(after - self._known.take(rows), 0)
        complete = after >= self._known.take(rows)
        decodes, prompts = ~partial, partial.nonzero()[0]
        generated = self._generated.take(rows)
        step.sampled = rows[complete]
        slots = state.first_slot.take(rows) + np.minimum(generated, state.max_output.take(rows) - 1)
        accepted = np.minimum(drafting.accepted.take(slots), np.where(partial, 0, drafts))[complete]
        left = (state.max_output.take(rows) - generated)[complete]
        step.verified = Verified(drafts[complete], accepted, np.minimum(accepted + 1, left))
        self._generated[step.sampled] += step.verified.tokens
        lengths = self.draft_lengths()
        step.next_drafts = drafting.tokens if lengths is None else lengths[len(rows)]
        if self.limits.async_scheduling:
            self._known[step.sampled] += 1 + step.verified.drafts
            state.target[step.sampled] = self._known[step.sampled] + step.next_drafts
        else:
            state.target[step.sampled] = self._known[step.sampled]
        chunks = tuple(zip(step.tokens[prompts].tolist(), before[prompts].tolist(), strict=True))
        step.prefill_tokens = int(np.add.reduce(step.tokens[prompts]))
        step.decode_seqs = len(rows) - len(prompts)
        context = (state.prompt.take(rows) + generated + drafts)[decodes]
        state.partial[rows[prompts]] = ~complete[prompts]
        self.prefilling -= int(np.count_nonzero(complete[prompts]))
        return StepShape(
            chunks,
            step.decode_seqs,
            int(np.add.reduce(context)),
            len(step.sampled),
            int(np.add.reduce(drafts[decodes])),
            step.next_drafts,
        )

    def deliver(self) -> list[int]:
        """See Scheduler: the tokens that the oldest step yields; those rejected count as not computed."""
        self._drop_hung_up()
        step = self.in_flight.popleft()
        state, drafting = self.state, self._drafting
        stale = [row for row in self.stale if row in step.rows]
        for row in stale:
            self.stale.pop(row)
        assert step.verified is not None
        still_open = ~state.done.take(step.sampled)
        rows = step.sampled[still_open]
        drafts, accepted, yields = (counts[still_open] for counts in step.verified)
        drafting.counts.count(drafts, accepted)
        every = drafting.seldom and self.draft_lengths() is None  # the plugin counts decodes without a draft, too
        if self.on_verified is not None and (np.count_nonzero(drafts) or (every and step.decode_seqs)):
            positions = np.arange(drafting.tokens)
            drafted, fits = ((counts[drafts > 0][:, None] > positions).sum(axis=0) for counts in (drafts, accepted))
            if every:
                drafted[:] = step.decode_seqs - step.drafts_gone
            self.on_verified(drafted.tolist(), fits.tolist())
        firsts = state.next_slot.take(rows)
        state.token_ns[token_slots(firsts, yields)] = step.end_ns
        if self.front_end is not None:
            self.front_end.stream(step.end_ns, rows, firsts, yields)
        state.next_slot[rows] = firsts + yields
        rejected = drafts - accepted
        if stale:
            kept = ~np.isin(rows, stale)
            fresh, rejected = rows[kept], rejected[kept]
            late = rows[~kept]
            self._known[late] = state.target[late] = np.add(self.state.prompt.take(late), self.state.outputs(late))
        else:
            fresh = rows
        state.computed[fresh] -= rejected
        if self.limits.async_scheduling:
            self._known[fresh] -= rejected
            state.target[fresh] -= rejected
        else:
            self._burst[rows] = yields
            self._known[fresh] = np.add(self.state.prompt.take(fresh), self.state.outputs(fresh))
            state.target[fresh] = self._known[fresh] + step.next_drafts
        finished = state.next_slot.take(rows) == state.end_slot.take(rows)
        return self._finish(rows[finished].tolist(), step.end_ns) if np.count_nonzero(finished) else []
