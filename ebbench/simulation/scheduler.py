"""vLLM v1's scheduler (0.32): requests and KV blocks of one unit, and the requests that a step holds.

It implements the rules of ``schedule()`` and ``update_from_output()``: order, chunking, token budget, preemption,
admission of waiting requests, and clients that hang up. :mod:`ebbench.simulation.engine` decides the phase of a step,
when steps are made and how long they take.

Tens of thousands of steps are made per second, so sums use plain functions (``np.count_nonzero``, ``np.add.reduce``):
the methods ``any``, ``all`` and ``sum`` cost several times as much. ``a.take(rows)`` costs half of ``a[rows]``.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import cycle, pairwise, repeat

import numpy as np
import numpy.typing as npt

from ebbench.devices.base import StepShape
from ebbench.devices.geometry import KvLayout
from ebbench.simulation.front_end import FrontEnd
from ebbench.simulation.kv import CountingKv, KvBlocks, LaidOutKv, StatesKv
from ebbench.simulation.state import UNSET, Ints, RequestState
from ebbench.simulation.step import NO_ROWS, Step
from ebbench.spec.server import EngineOptions


def chunk_limit(scheduler: Scheduler, candidates: int) -> int:
    """Most tokens of one request in a step with ``candidates`` running requests to choose from; 0: no limit.

    vLLM lifts ``long_prefill_token_threshold`` for a request alone. The adaptive form raises it to the budget divided
    by the number of running and waiting requests.
    """
    limits = scheduler.limits
    eligible = candidates + len(scheduler.waiting)
    if not limits.long_prefill_token_threshold or eligible <= 1:
        return 0
    if limits.long_prefill_token_threshold_adaptive:
        return max(limits.long_prefill_token_threshold, limits.max_num_batched_tokens // eligible)
    return limits.long_prefill_token_threshold


def admissible(scheduler: Scheduler, running_limit: int, taken: int = 0) -> bool:
    """Whether the first waiting request could be admitted now, if one token of the budget is left for it, after the
    running ones have taken so many KV blocks."""
    if not scheduler.waiting or len(scheduler.running) >= running_limit:
        return False
    if scheduler.states is not None:
        return True  # perhaps: it depends on where its first chunk ends
    row = scheduler.waiting[0]
    known = int(scheduler.state.target[row])
    hits = scheduler.hits(row, known)
    pinned = scheduler.kv.evictable(hits)
    # Cached on this instance, or received from another: no computation is needed for them.
    cached = max(len(hits) * scheduler.limits.block_size, scheduler.delivered.get(row, 0))
    tokens = known if scheduler.limits.scheduler_reserve_full_isl else cached + 1
    return _fits(scheduler, tokens, hits, pinned, taken)


def admit_waiting(
    scheduler: Scheduler, now_ns: int, budget: int, most: int, threshold: int, running_limit: int, running: Ints
) -> tuple[list[int], list[int]]:
    """Admit waiting requests in order while ``budget`` tokens, slots up to ``running_limit`` and KV blocks last.

    ``most``: tokens of the whole step. ``threshold``: most tokens of one request, 0 is no limit. ``running``: running
    requests in the step. Returns the rows and the tokens of each in this step.
    """
    state, kv, limits, waiting = scheduler.state, scheduler.kv, scheduler.limits, scheduler.waiting
    whole, block_size, delivered = limits.scheduler_reserve_full_isl, limits.block_size, scheduler.delivered
    states, state_block = scheduler.states, scheduler.state_block_tokens
    lookahead, longest, padding = scheduler.lookahead_tokens, scheduler.longest_tokens, scheduler.padding(running)
    rows, tokens, skipped = list[int](), list[int](), list[int]()
    room = running_limit - len(scheduler.running)
    while budget > 0 and waiting and len(rows) < room:
        row = waiting[0]
        if row in scheduler.stale:
            skipped.append(waiting.popleft())
            continue
        known = int(state.target[row])
        hits = scheduler.hits(row, known)
        cached, pinned = len(hits) * block_size, kv.evictable(hits) if hits else 0
        if delivered:
            cached = max(cached, delivered.get(row, 0))
        chunk = known - cached
        if chunk == 1 and padding and (cached or len(running)) and known + padding < longest:
            chunk += padding
            if chunk > budget:
                break
        chunk = min(chunk, threshold or chunk, budget)
        if state_block and not known <= chunk <= state_block:  # within a block no state is kept
            wanted, chunk = chunk, scheduler.up_to_state(row, cached, chunk, most)
            if not chunk:
                break
            chunk = 1 if known - cached < wanted > chunk else chunk  # what extends it would not be whole
        after = cached + chunk
        slots = min(after + lookahead, longest) if lookahead else after
        if states is not None:
            if not _fit_states(states, after, slots, known if whole else 0):
                break
        elif not _fits(scheduler, max(known, slots) if whole else slots, hits, pinned):
            break
        waiting.popleft()
        if states is not None:
            states.admit(row, after, slots, min(after, known))
        else:
            _allocate(scheduler, row, hits, cached, slots)
        state.computed[row] = cached
        _note_admission(scheduler, row, cached, now_ns)
        if scheduler.counted is None:
            kv.publish(row, min(after, known))
        state.partial[row] = True
        rows.append(row)
        tokens.append(chunk)
        budget -= chunk
    waiting.extendleft(reversed(skipped))
    if rows:
        scheduler.prefilling += len(rows)
        scheduler.running = np.concatenate([scheduler.running, np.array(rows, np.int64)])
    return rows, tokens


def _fits(scheduler: Scheduler, tokens: int, hits: Sequence[int], pinned: int, taken: int = 0) -> bool:
    """Whether blocks for ``tokens`` tokens are free, ``taken`` less; ``pinned`` of those that are hit count as free."""
    if scheduler.layout is not None:
        return scheduler.layout.first(tokens) <= scheduler.kv.free - taken
    return -(-tokens // scheduler.limits.block_size) - len(hits) + pinned <= scheduler.kv.free - taken


def _fit_states(states: StatesKv, after: int, slots: int, whole: int) -> bool:
    """Whether a first chunk, which ends ``after`` tokens, and a prompt of ``whole`` tokens fit."""
    if whole < slots and not states.fits(after, slots):
        return False
    return not whole or states.fits(whole, whole)


def _allocate(scheduler: Scheduler, row: int, hits: Sequence[int], cached: int, slots: int) -> None:
    """Give a request the blocks of its ``cached`` tokens and of its first chunk, ``slots`` KV slots together."""
    if scheduler.layout is None:
        need = -(-slots // scheduler.limits.block_size) - len(hits)
        held = len(hits) + need
    else:
        held = need = int(scheduler.layout.held(slots, cached))
    counted = scheduler.counted
    if hits or counted is None:
        scheduler.kv.adopt(row, hits)
    if counted is not None:
        counted.take(need)
    else:
        scheduler.kv.allocate((row,), (need,))
    scheduler.state.held_blocks[row] = held


def _note_admission(scheduler: Scheduler, row: int, cached_tokens: int, now_ns: int) -> None:
    first = bool(scheduler.state.scheduled_ns[row] == UNSET)
    if first:
        scheduler.state.scheduled_ns[row] = now_ns
        scheduler.state.cached_tokens[row] = cached_tokens
    for listener in scheduler.listeners:
        listener.admitted(row, cached_tokens, now_ns, first=first)


def prompt_tokens(scheduler: Scheduler, wanted: int) -> int:
    """Prompt tokens that the next step could compute, counted up to ``wanted``; see ``View.prompt_tokens``."""
    state, block_size = scheduler.state, scheduler.limits.block_size
    partial = scheduler.running[state.partial[scheduler.running]] if scheduler.prefilling else NO_ROWS
    tokens = int((state.target[partial] - state.computed[partial]).sum()) if len(partial) else 0
    slots, blocks = scheduler.limits.running_limit - len(scheduler.running), scheduler.kv.free
    for row in scheduler.waiting:
        if tokens >= wanted or slots <= 0:
            break
        known = int(state.target[row])
        slots -= 1
        blocks -= -(-known // block_size) if scheduler.layout is None else scheduler.layout.first(known)
        if blocks < 0:
            break
        tokens += known
    return tokens


class SchedulerListener:
    """Called when requests are admitted and when they finish."""

    def admitted(self, row: int, cached_tokens: int, now_ns: int, *, first: bool) -> None:
        """A request got a slot; ``first`` False: after a preemption. ``cached_tokens`` need no computation."""

    def finished(self, row: int) -> None:
        """All tokens of a request are generated."""

    def withdrawn(self, row: int, output_tokens: int) -> None:
        """The client of a request hung up after ``output_tokens`` tokens."""


class Scheduler:
    """Waiting and running requests of one unit.

    Requests enter by :meth:`add` and become visible at :meth:`take_arrivals`. A step has three parts: :meth:`fill`
    chooses its requests, :meth:`advance` counts their tokens as scheduled, :meth:`deliver` delivers the sampled tokens
    when the step has ended. ``in_flight``: steps between the last two, oldest first.

    ``delivered`` maps a request whose KV was computed on another instance to the number of tokens it covers; a
    preemption loses it. With ``keep_finished`` the blocks of a finished request stay allocated until
    :meth:`free_finished`.
    """

    def __init__(
        self, state: RequestState, limits: EngineOptions, kv: KvBlocks, *, keep_finished: bool = False
    ) -> None:
        self.state, self.limits, self.kv = state, limits, kv
        self.listeners: list[SchedulerListener] = []
        self.front_end: FrontEnd | None = None  # streams the tokens to the clients, if they wait there
        self.counted = kv if isinstance(kv, CountingKv) else None  # the same manager, if counting is sufficient
        self.states = kv if isinstance(kv, StatesKv) else None  # where layers keep states at the ends of blocks
        self.layout = (
            kv.layout if isinstance(kv, LaidOutKv | StatesKv) else None
        )  # where blocks are not by tokens alone
        if self.layout is not None:
            self.layout.by_length.reach(int(np.max(state.last, initial=0)) + 1)
        self.state_block_tokens = 0 if self.layout is None else self.layout.state_block_tokens
        self.recomputes_block = False  # the last one of a cached prefix, for a drafter
        self.on_verified: Callable[[list[int], list[int]], None] | None = None  # see DraftingScheduler
        self.draft_lengths: Callable[[], Sequence[int] | None] = lambda: None  # see Controller
        self.delivered: dict[int, int] = {}
        self.seen_ns: Ints = np.zeros(state.count, np.int64)  # when the scheduler first saw a request
        self.waiting: deque[int] = deque()
        self.running: Ints = NO_ROWS
        self.in_flight: deque[Step] = deque()
        self.all_decodes: Step | None = None  # the last step, if it decoded every running request with tokens left
        self._flying: Ints = np.zeros(state.count, np.int64)  # a scratch array
        self.prefilling = 0  # running requests with prompt tokens left; 0 in most steps
        self.steps = 0  # scheduled so far
        self.ones: Ints = np.ones(limits.running_limit, np.int64)
        self._arrived: deque[int] = deque()
        self._keep_finished = keep_finished
        self.lookahead_tokens = self.longest_tokens = (
            0  # KV slots ahead of a sequence, and its most tokens; see drafting
        )
        self._hung_up: list[int] = []  # rows whose clients hung up, not yet processed
        self.stale: dict[int, bool] = {}  # preempted with a step in flight: whether that step samples a token for it
        # By priority, then by arrival here: the lowest is admitted first, the highest preempted first. None: FCFS.
        self._rank: Ints | None = np.zeros(state.count, np.int64) if limits.by_priority else None
        self._received = 0

    # State.

    @property
    def has_requests(self) -> bool:
        """Whether a request is running or waiting; arrivals not yet taken do not count."""
        return bool(self.waiting) or len(self.running) > 0

    @property
    def only_decodes(self) -> bool:
        """Whether all requests are in decode: no prompt, no arrival, no pending preemption."""
        undisturbed = not self.prefilling and not self.stale and not self._arrived and not self._hung_up
        return undisturbed and len(self.running) > 0

    @property
    def kv_blocks_used(self) -> int:
        """KV blocks in use."""
        return self.kv.total - self.kv.free

    @property
    def generates(self) -> bool:
        """Whether a running request with a computed prompt has tokens left to schedule."""
        state, running = self.state, self.running
        if not len(running):
            return False
        first = running[0]  # the first request nearly always decides
        in_decode = not self.prefilling or not state.partial[first]
        if in_decode and state.computed[first] < state.last[first]:
            return True
        return bool(((state.computed[running] < state.last[running]) & ~state.partial[running]).any())

    def queued_tokens(self) -> int:
        """Prompt tokens received and not scheduled, without those whose KV was delivered."""
        state, delivered = self.state, self.delivered
        partial = self.running[state.partial[self.running]]
        queued = int((state.target[partial] - state.computed[partial]).sum()) if len(partial) else 0
        for rows in (self.waiting, self._arrived):
            if rows:
                queued += int(state.target[np.fromiter(rows, np.int64, len(rows))].sum())
                queued -= sum(delivered.get(row, 0) for row in rows) if delivered else 0
        return queued

    def hits(self, row: int, known_tokens: int) -> Sequence[int]:
        """The cached blocks that a request can use."""
        return self.kv.lookup(row, known_tokens)

    def padding(self, running: Ints) -> int:
        """Tokens by which a request with one token to compute is extended beside ``running``."""
        return 0

    def delivered_tokens(self, row: int) -> int:
        """Prompt and output tokens of a request that exist."""
        return int(self.state.prompt[row] + self.state.next_slot[row] - self.state.first_slot[row])

    def published_tokens(self, row: int) -> int:
        """Tokens up to which vLLM has published the blocks of a request: those known when it last scheduled it."""
        holding = [queued for queued in self.in_flight if row in queued.rows]
        return self.delivered_tokens(row) - bool(holding and self.got_token_since(row, holding[-1].scheduled_ns))

    def finished_tokens(self, row: int) -> int:
        """As :meth:`published_tokens`, of a request that has ended."""
        return int(self.state.last[row])

    def running_ages(self) -> Sequence[int]:
        """Output tokens so far of every running request."""
        ages: list[int] = self.state.outputs(self.running).tolist()
        return ages

    # Arrivals.

    def add(self, row: int) -> None:
        """Add a request that has arrived."""
        self._arrived.append(row)

    def hang_up(self, row: int) -> None:
        """The client of a request has hung up. vLLM notices it before it uses the output of the step in flight."""
        self._hung_up.append(row)

    def _forget(self, row: int) -> None:
        """Remove a request from all queues, and from the running ones."""
        for queue in (self._arrived, self.waiting):
            if row in queue:
                queue.remove(row)
        self.stale.pop(row, None)
        self.delivered.pop(row, None)
        self.prefilling -= int(self.state.partial[row])
        self.state.partial[row] = False
        self.running = self.running[self.running != row]

    def take_arrivals(self, now_ns: int) -> None:
        """Move arrivals into the waiting queue, and drop requests whose clients hung up."""
        self._drop_hung_up()
        if not self._arrived:
            return
        self.seen_ns[list(self._arrived)] = now_ns
        if self._rank is None:
            self.waiting.extend(self._arrived)
        else:
            self._enqueue_by_rank(self._rank)
        self._arrived.clear()

    def _enqueue_by_rank(self, ranks: Ints) -> None:
        priority = self.state.priority
        for row in self._arrived:
            self._received += 1
            # Priorities have 32 bits, and fewer requests than that come to an engine.
            ranks[row] = self._received + (0 if priority is None else int(priority[row]) << 31)
            insort(self.waiting, row, key=ranks.__getitem__)

    def _drop_hung_up(self) -> None:
        while self._hung_up:
            self._drop(self._hung_up.pop(0))

    def _drop(self, row: int) -> None:
        """Remove a request, as vLLM's ``finish_requests`` does: its blocks become free at once, and what was computed
        of it stays in the prefix cache."""
        state = self.state
        if state.done[row]:
            self.free_finished(row)  # a computed prompt, kept for a transfer that will not begin
            return
        published = self.published_tokens(row)
        for queued in self.in_flight:
            queued.leave_out(row)
        state.done[row] = True
        self._forget(row)
        if state.held_blocks[row]:
            self.kv.release(row, min(int(state.computed[row]), published))
            state.held_blocks[row] = 0
        output_tokens = int(state.next_slot[row] - state.first_slot[row])
        for listener in self.listeners:
            listener.withdrawn(row, output_tokens)

    # One step.

    def fill(
        self, step: Step, candidates: Ints, *, admit: bool, running_limit: int, token_budget: int | None = None
    ) -> None:
        """vLLM's ``schedule()`` with the running requests outside ``candidates`` set aside.

        ``token_budget``: of this step, where it is less than that of the limits.
        """
        limits = self.limits
        most = limits.max_num_batched_tokens
        if token_budget is not None and token_budget < most:
            most = token_budget
        threshold = chunk_limit(self, len(candidates)) if limits.long_prefill_token_threshold else 0
        if self.states is not None:
            self.states.step_begins()
        rows, tokens, budget = self._schedule_running(step, candidates, threshold, most)
        if admit and not step.preempted and self.waiting:
            new_rows, new_tokens = admit_waiting(self, step.scheduled_ns, budget, most, threshold, running_limit, rows)
            if new_rows:
                rows = np.concatenate([rows, np.array(new_rows, np.int64)])
                tokens = np.concatenate([tokens, np.array(new_tokens, np.int64)])
        step.rows, step.tokens = rows, tokens
        # When the next step is scheduled, those left out have had their last token; all others have one in flight.
        all_decodes = step.computed is not None and len(candidates) == len(self.running)
        self.all_decodes = step if all_decodes else None

    def _schedule_running(self, step: Step, candidates: Ints, threshold: int, budget: int) -> tuple[Ints, Ints, int]:
        if not len(candidates):
            return NO_ROWS, NO_ROWS, budget
        if not self.prefilling and (decodes := self._decode_all(step, candidates, budget)) is not None:
            rows, step.computed = decodes
            return rows, self.ones[: len(rows)], budget - len(rows)
        state = self.state
        computed = state.computed.take(candidates)
        tokens = state.target.take(candidates) - computed
        tokens[computed >= state.last.take(candidates)] = 0  # the last token is in flight: no further step is needed
        if threshold:
            np.minimum(tokens, threshold, out=tokens)
        candidates, tokens = self._allot(step, candidates, tokens, budget)
        if np.count_nonzero(tokens) < len(tokens):
            scheduled = tokens > 0
            candidates, tokens = candidates[scheduled], tokens[scheduled]
        if self.prefilling:
            # From now on prefix lookups find them, also for requests admitted in this step.
            partial = state.partial[candidates]
            after = state.computed[candidates[partial]] + tokens[partial]
            for row, known in zip(candidates[partial].tolist(), after.tolist(), strict=True):
                self.kv.publish(row, known)
        return candidates, tokens, budget - int(np.add.reduce(tokens))

    def _allot(self, step: Step, candidates: Ints, wanted: Ints, budget: int) -> tuple[Ints, Ints]:
        """Give running requests, in order, their tokens and the KV blocks for them; if blocks run out, preempt.

        ``wanted``: tokens that each could use. Returns the requests that keep their place, and the tokens of each.
        """
        tokens = self._within(candidates, wanted, budget)
        if self.states is None:
            need = self._blocks_needed(candidates, tokens)
            if self._suffices(need):
                self._grow(candidates, need)
                return candidates, tokens
        if self._rank is not None:
            return self._allot_by_rank(
                self._rank, step, dict(zip(candidates.tolist(), wanted.tolist(), strict=True)), budget
            )
        if self.states is None:
            kept = self._grow_preempting(step, candidates, need)
        else:
            after, slots, processed = self._ends_of(candidates, tokens)
            changes = self.state.partial.take(candidates) | self.states.changes(candidates, after, slots)
            kept = self._grow_states(
                self.states, step, candidates, ((tokens > 0) & changes).nonzero()[0], after, slots, processed
            )
        return candidates[:kept], tokens[:kept]

    def _slots(self, tokens: Ints) -> Ints:
        """KV slots of requests with so many computed tokens, those that a drafter needs ahead included."""
        return tokens

    def _blocks_needed(self, rows: Ints, tokens: Ints) -> Ints:
        """Further KV blocks of each row for ``tokens`` more tokens; below 0 where some have left a window."""
        computed, held_blocks = self.state.computed.take(rows), self.state.held_blocks.take(rows)
        if self.layout is not None:
            processed = self._processed(rows, computed, self.in_flight)
            need: Ints = self.layout.held(computed + tokens, processed) - held_blocks
            need[tokens == 0] = 0
            return need
        block_size = self.limits.block_size
        need = (computed + tokens + (block_size - 1)) // block_size - held_blocks
        return np.maximum(need, 0, out=need)

    def _decode_all(self, step: Step, rows: Ints, budget: int) -> tuple[Ints, Ints] | None:
        """Allocate blocks for one token of each of ``rows``, all in decode; returns the rows that get a token.

        These are the rows whose last token is not in flight; beside them, their computed tokens. Returns None without
        any change if budget or blocks do not suffice; the general path then handles the step.
        """
        state, block_size = self.state, self.limits.block_size
        computed = state.computed.take(rows)
        due = computed < state.last.take(rows)
        if self.states is not None:
            return self._decode_states(self.states, step, rows, computed, due, budget)
        if np.count_nonzero(due) < len(rows):
            rows, computed = rows[due], computed[due]
        if self.layout is not None:
            need = self._held_by_decodes(self.layout, rows, computed) - state.held_blocks.take(rows)
            fits = len(rows) * self.layout.most_per_token <= self.kv.free or self._suffices(need)
            if len(rows) > budget or not fits:
                return None
            self._take(rows, need)
            return rows, computed
        growing = rows[state.held_blocks.take(rows) * block_size == computed]  # all blocks held are full
        if len(rows) > budget or len(growing) > self.kv.free:
            return None
        if len(growing):
            self._take(growing, self.ones[: len(growing)])
        return rows, computed

    def _decode_states(
        self, states: StatesKv, step: Step, rows: Ints, computed: Ints, due: npt.NDArray[np.bool_], budget: int
    ) -> tuple[Ints, Ints] | None:
        """:meth:`_decode_all` where states are kept, preempting if blocks run out. ``due``: which have tokens left."""
        if self._rank is not None or len(rows) > budget:
            return None
        changes = computed >= states.quiet_tokens.take(rows)
        changing = (due & changes).nonzero()[0] if np.count_nonzero(changes) else NO_ROWS
        if len(changing) and not (
            self.in_flight_alike and self._grow_each(states, rows, computed, changing, len(self.in_flight))
        ):
            after, processed = computed + 1, self._processed(rows, computed, self.in_flight)
            kept = self._grow_states(states, step, rows, changing, after, after, processed)
            rows, computed, due = rows[:kept], computed[:kept], due[:kept]
        return (rows, computed) if np.count_nonzero(due) == len(rows) else (rows[due], computed[due])

    def _within(self, rows: Ints, wanted: Ints, budget: int) -> Ints:
        """The tokens that ``rows`` compute in a step of ``budget`` tokens, of those that they want."""
        if not (self.state_block_tokens and self.prefilling):
            if np.add.reduce(wanted) <= budget:
                return wanted
            return np.clip(budget - (np.cumsum(wanted) - wanted), 0, wanted)
        tokens = np.clip(budget - (np.cumsum(wanted) - wanted), 0, wanted)
        first = int(self.state.partial.take(rows).argmax())  # those before it, mostly all decodes, end nowhere else
        left = budget - int(np.add.reduce(tokens[:first]))
        for place, row in enumerate(rows[first:].tolist(), first):
            tokens[place] = self._running_chunk(row, min(int(wanted[place]), left), budget)
            left -= int(tokens[place])
        return tokens

    def _running_chunk(self, row: int, tokens: int, most: int) -> int:
        """``tokens`` of a running request, or fewer of a prompt that ends where a state is kept."""
        if not (tokens and self.state_block_tokens and self.state.partial[row]):
            return tokens
        return self.up_to_state(row, int(self.state.computed[row]), tokens, most)

    def up_to_state(self, row: int, done: int, tokens: int, most: int) -> int:
        """The part of a chunk of ``tokens`` after ``done`` tokens that ends where the state is kept.

        A state is kept at the end of a block, and only where a chunk ends. ``most``: tokens of a step; a block that is
        longer is computed in several chunks.
        """
        block, known, prompt = self.state_block_tokens, int(self.state.target[row]), int(self.state.prompt[row])
        end, whole = done + tokens, max(prompt, known - 1)
        if done >= whole:
            return tokens
        threshold = self.limits.long_prefill_token_threshold
        if end < whole:
            aligned = end // block * block
            if aligned > done or block <= (min(most, threshold) if threshold else most):
                end = aligned
        last = (known // block * block - block) if self.recomputes_block else (known - 1) // block * block
        junction = 0 if self.states is None else int(self.states.junction[row])
        shared = done + (junction - done) // block * block if junction < end else 0
        stops = (last, shared, (done // block + 1) * block if done % block else 0)
        return max(min((stop for stop in stops if done < stop < end), default=end) - done, 0)

    def _suffices(self, need: Ints) -> bool:
        """Whether the free blocks suffice for every request in turn; one may give back more than it takes."""
        if self.layout is None:
            return bool(np.add.reduce(need) <= self.kv.free)
        return not len(need) or bool(np.maximum.reduce(np.cumsum(need)) <= self.kv.free)

    @property
    def in_flight_alike(self) -> bool:
        """Whether every step in flight decoded all requests that the next one decodes."""
        return not self.in_flight or self.in_flight[0] is self.all_decodes

    def quiet_decodes(self, rows: Ints, computed: Ints, most: int) -> int:
        """How many steps to come, at most ``most``, that all decode ``rows`` need only counts of KV blocks.

        Where states are kept, these are the steps in which no row needs or gives back a block."""
        if self.states is None:
            return most
        return min(most, max(int(np.minimum.reduce(self.states.quiet_tokens.take(rows) - computed)), 0))

    def grow_decodes(self, rows: Ints, computed: Ints, flying: int) -> bool:
        """Give each row the blocks of states for a decode step and take back those it no longer needs; returns whether
        enough are free. A second call changes nothing. ``flying`` steps are in flight then, which all decode ``rows``.
        """
        states = self.states
        if states is None:
            return True
        changing = (computed >= states.quiet_tokens.take(rows)).nonzero()[0]
        return self._grow_each(states, rows, computed, changing, flying)

    def _grow_each(self, states: StatesKv, rows: Ints, computed: Ints, changing: Ints, flying: int) -> bool:
        """See :meth:`grow_decodes`, of the rows at the places ``changing``."""
        for place in changing.tolist():
            done = int(computed[place])
            if not states.grow(int(rows[place]), done + 1, done + 1, done - flying, done + 1 - flying):
                return False
        return True

    def decode_blocks(self, rows: Ints, computed: Ints) -> Iterator[tuple[int, int, Ints | None]]:
        """KV blocks of the steps to come that all decode ``rows``: how many must be free, how many are taken, and how
        many each row then holds where they are not by tokens alone."""
        size = self.limits.block_size
        if self.states is not None:
            return repeat((0, 0, None))
        if self.layout is None:
            growing = np.bincount(-computed % size, minlength=size).tolist()
            return cycle(zip(growing, growing, repeat(None)))
        return self._laid_out_blocks(self.layout, rows, computed)

    def _laid_out_blocks(self, layout: KvLayout, rows: Ints, computed: Ints) -> Iterator[tuple[int, int, Ints | None]]:
        """As :meth:`decode_blocks`; of ever more steps at once, since most callers take few."""
        steady, first = layout.by_length.decoding[len(self.in_flight)], self._held_by_decodes(layout, rows, computed)
        held, growth = self.state.held_blocks.take(rows), len(rows) * layout.most_per_token
        made, most = 0, max(4, min(1024 // len(rows), 64))
        while True:
            # No step is made after the last token of a row, wherever these lookups end.
            blocks = steady.take(np.arange(made, made + most)[:, None] + computed, mode="clip")
            if not made:
                blocks[0] = first
            at_once = [0] * most
            if most * growth > self.kv.free:  # in turn, since one row may give back more than it takes
                need = np.diff(blocks, axis=0, prepend=held[None])
                at_once = np.maximum.reduce(np.cumsum(need, axis=1), axis=1).tolist()
            in_all = [int(np.add.reduce(held)), *np.add.reduce(blocks, axis=1).tolist()]
            yield from zip(at_once, (after - before for before, after in pairwise(in_all)), blocks, strict=True)
            held, made, most = blocks[-1], made + most, min(2 * most, 64)

    def commit_decodes(self, rows: Ints, computed: Ints, held: Ints | None) -> None:
        """Count the tokens of steps that all decoded ``rows`` as scheduled; ``held``: see :meth:`decode_blocks`."""
        state = self.state
        state.computed[rows] = computed
        state.target[rows] = computed + 1
        if self.states is None:
            state.held_blocks[rows] = -(-computed // self.limits.block_size) if held is None else held
        self.all_decodes = self.in_flight[-1]

    def _held_by_decodes(self, layout: KvLayout, rows: Ints, computed: Ints) -> Ints:
        """Blocks that ``rows``, all in decode, hold with one token more."""
        if not self.in_flight_alike:
            return layout.held(computed + 1, self._processed(rows, computed, self.in_flight))
        return layout.by_length.decoding[len(self.in_flight)].take(computed)

    def _processed(self, rows: Ints, computed: Ints, in_flight: Collection[Step]) -> Ints:
        """Tokens of ``rows`` that are computed for good: without those of steps in flight."""
        if not in_flight:
            return computed
        flying = self._flying
        for step in in_flight:
            flying[step.rows] += step.tokens
        processed = computed - flying.take(rows)
        for step in in_flight:
            flying[step.rows] = 0
        return processed

    def _grow(self, rows: Ints, need: Ints) -> None:
        """Give each row the blocks it needs; the caller has checked that they are free."""
        growing = need.nonzero()[0]
        if len(growing):
            self._take(rows[growing], need[growing])

    def _take(self, rows: Ints, blocks: Ints) -> None:
        if self.counted is not None:
            self.counted.take(int(np.add.reduce(blocks)))
        else:
            self.kv.allocate(rows.tolist(), blocks.tolist())
        self.state.held_blocks[rows] += blocks

    def _grow_preempting(self, step: Step, candidates: Ints, need: Ints) -> int:
        """Allocate blocks in order and, if they run out, preempt from the end; returns how many candidates remain.

        The order is vLLM's: an earlier request takes its blocks before a later one's blocks are freed. Some may give
        back blocks that have left a window.
        """
        done, kept, taken, gross = 0, len(candidates), 0, 0
        upto, gross_upto = np.cumsum(need), np.cumsum(np.maximum(need, 0))
        most = np.maximum.accumulate(upto)
        while True:
            fit = min(int(most.searchsorted(taken + self.kv.free, side="right")), kept)
            if fit > done:
                if self.counted is None:
                    growing = done + need[done:fit].nonzero()[0]
                    self.kv.allocate(candidates[growing].tolist(), need[growing].tolist())
                else:
                    grown = int(gross_upto[fit - 1]) - gross
                    self.counted.take(grown)
                    self.counted.take(int(upto[fit - 1]) - taken - grown)
                done, taken, gross = fit, int(upto[fit - 1]), int(gross_upto[fit - 1])
            if done >= kept:
                break
            kept -= 1
            self._preempt(step, int(candidates[kept]))
            if kept == done:
                break
        self.state.held_blocks[candidates[:kept]] += need[:kept]
        self._leave_preempted(step)
        return kept

    def _grow_states(
        self, states: StatesKv, step: Step, candidates: Ints, changing: Ints, after: Ints, slots: Ints, processed: Ints
    ) -> int:
        """:meth:`_grow_preempting` where states are kept; ``changing``: places of the candidates whose blocks change,
        few in most steps. The last three: see :meth:`_ends_of`."""
        if not len(changing):
            return len(candidates)
        kept = len(candidates)
        for place in changing.tolist():
            ends = int(after[place]), int(slots[place]), int(processed[place])
            while kept > place and not self._grow_state(states, int(candidates[place]), *ends):
                kept -= 1
                self._preempt(step, int(candidates[kept]))
        if kept < len(candidates):
            self._leave_preempted(step)
        return kept

    def _ends_of(self, rows: Ints, tokens: Ints) -> tuple[Ints, Ints, Ints]:
        """Tokens of ``rows`` after a step of ``tokens``, KV slots for them, and tokens computed for good before it."""
        computed = self.state.computed.take(rows)
        after = computed + tokens
        return after, self._slots(after), self._processed(rows, computed, self.in_flight)

    def _grow_state(self, states: StatesKv, row: int, after: int, slots: int, processed: int) -> bool:
        """Whether the blocks were free that a row needs for a step, whose ends are those of :meth:`_ends_of`."""
        return states.grow(row, after, slots, processed, min(after, self.delivered_tokens(row)))

    def _allot_by_rank(self, ranks: Ints, step: Step, wanted: dict[int, int], budget: int) -> tuple[Ints, Ints]:
        """:meth:`_allot` where the running request of the highest rank is preempted, which may be one that this step
        has given tokens: they go back to the budget. Requests that a policy has set aside are preempted like others.
        """
        running, queue, scheduled, most = set(self.running.tolist()), deque(wanted), dict[int, int](), budget
        while queue and budget > 0:
            row = queue.popleft()
            tokens = self._running_chunk(row, min(wanted[row], budget), most)
            while tokens and self._lacks_blocks(row, tokens):
                victim = max(running, key=ranks.__getitem__)
                running.remove(victim)
                if victim in queue:
                    queue.remove(victim)
                returned = scheduled.pop(victim, 0)
                budget += returned
                self._preempt(step, victim, returned)
                if victim == row:
                    break
            if row not in running:
                break
            if tokens:
                scheduled[row] = tokens
                budget -= tokens
        self._leave_preempted(step)
        return np.array(list(scheduled), np.int64), np.array(list(scheduled.values()), np.int64)

    def _lacks_blocks(self, row: int, tokens: int) -> bool:
        """Whether too few blocks are free for ``tokens`` more tokens of a row; otherwise it gets them."""
        rows, counts = np.array([row], np.int64), np.array([tokens], np.int64)
        if self.states is not None:
            return not self._grow_state(self.states, row, *(int(ends[0]) for ends in self._ends_of(rows, counts)))
        need = self._blocks_needed(rows, counts)
        lacks = bool(need[0] > self.kv.free)
        if not lacks:
            self._grow(rows, need)
        return lacks

    def _leave_preempted(self, step: Step) -> None:
        victims = np.zeros(self.state.count, np.bool_)
        victims[step.preempted] = True
        self.running = self.running[~victims[self.running]]

    def _preempt(self, step: Step, row: int, scheduled_tokens: int = 0) -> None:
        """Take a running request's blocks. ``scheduled_tokens``: that this step had given it."""
        state = self.state
        self.delivered.pop(row, None)
        in_flight = next((queued for queued in self.in_flight if row in queued.rows), None)
        samples = in_flight is not None and (in_flight.sampled is in_flight.rows or row in in_flight.sampled)
        if in_flight is not None:
            self.stale[row] = samples
        published = self.delivered_tokens(row) if scheduled_tokens else self.published_tokens(row)
        self.kv.release(row, min(int(state.computed[row]) + scheduled_tokens, published))
        state.target[row], state.computed[row], state.held_blocks[row] = self.delivered_tokens(row), 0, 0
        self.prefilling -= int(state.partial[row])
        state.partial[row] = False
        state.preemptions[row] += 1
        if self._rank is None:
            self.waiting.appendleft(row)
        else:
            insort(self.waiting, row, key=self._rank.__getitem__)
        step.preempted.append(row)

    def got_token_since(self, row: int, time_ns: int) -> bool:
        """Whether a token of the row was delivered after a scheduling step at ``time_ns``."""
        slot = int(self.state.next_slot[row])
        return slot > self.state.first_slot[row] and bool(self.state.token_ns[slot - 1] > time_ns)

    def advance(self, step: Step) -> StepShape:
        """Count the tokens of a filled step as scheduled; returns the work for the device."""
        state, rows = self.state, step.rows
        self.steps += 1
        self.in_flight.append(step)
        before = step.computed
        if before is None or len(before) != len(rows):
            before = state.computed.take(rows)
        after = before + step.tokens
        step.computed = None  # steps are kept until the log folds them: this array would stay with each
        state.computed[rows] = after
        if not self.prefilling:
            step.sampled, step.decode_seqs = rows, len(rows)
            state.target[rows] = after + 1
            return StepShape((), len(rows), int(np.add.reduce(after)), len(rows))
        complete = after == state.target.take(rows)
        step.sampled = rows if np.count_nonzero(complete) == len(rows) else rows[complete]
        state.target[step.sampled] += 1
        prefill = state.partial.take(rows).nonzero()[0]
        chunks = tuple(zip(step.tokens[prefill].tolist(), before[prefill].tolist(), strict=True))
        step.prefill_tokens = int(np.add.reduce(step.tokens[prefill]))
        step.decode_seqs = len(rows) - len(prefill)
        decode_kv = int(np.add.reduce(after)) - int(np.add.reduce(after[prefill])) if step.decode_seqs else 0
        finished = complete[prefill]
        state.partial[rows[prefill]] = ~finished
        self.prefilling -= int(np.count_nonzero(finished))
        return StepShape(chunks, step.decode_seqs, decode_kv, len(step.sampled))

    def deliver(self) -> list[int]:
        """Deliver the tokens of the oldest step in flight. Returns the rows that it finished, in order."""
        self._drop_hung_up()
        step = self.in_flight.popleft()
        state, sampled = self.state, step.sampled
        if self.stale:
            self._drain_stale(step)
        slots = state.next_slot.take(sampled)
        state.token_ns[slots] = step.end_ns
        if self.front_end is not None:
            self.front_end.stream(step.end_ns, sampled, slots)
        slots += 1
        state.next_slot[sampled] = slots
        finished = slots == state.end_slot.take(sampled)
        return self._finish(sampled[finished].tolist(), step.end_ns) if np.count_nonzero(finished) else []

    def deliver_decodes(self, rows: Ints, count: int) -> None:
        """Deliver the ``count`` oldest steps in flight, all decodes of ``rows``, none of which finishes a request."""
        if not count:
            return
        state = self.state
        ends_ns = [self.in_flight.popleft().end_ns for _ in range(count)]
        slots = state.next_slot[rows]
        state.token_ns[slots[:, None] + np.arange(count)] = ends_ns
        state.next_slot[rows] = slots + count
        if self.front_end is not None:
            self.front_end.stream_steps(ends_ns, rows, slots)

    def _drain_stale(self, step: Step) -> None:
        """A preempted request still gets the token of the step that was in flight."""
        for row in [row for row in self.stale if row in step.rows]:
            if self.stale.pop(row):
                self.state.target[row] += 1

    def _finish(self, rows: list[int], now_ns: int) -> list[int]:
        """End these requests, and return them."""
        state = self.state
        for row in rows:
            state.done[row] = True
            if not state.held_blocks[row]:
                self.waiting.remove(row)  # it finished with the token in flight when it was preempted
            elif not self._keep_finished:
                self.kv.release(row, self.finished_tokens(row))
                state.held_blocks[row] = 0
            state.end_ns[row] = now_ns
            for listener in self.listeners:
                listener.finished(row)
        self.running = self.running[~state.done.take(self.running)]
        return rows

    def free_finished(self, row: int) -> None:
        """Free the blocks of a finished request; a second call has no effect."""
        state = self.state
        if state.held_blocks[row]:
            self.kv.release(row, int(state.last[row]))
            state.held_blocks[row] = 0
