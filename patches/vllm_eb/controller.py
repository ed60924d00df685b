"""The controller: from counts, lengths, KV occupancy and time to what the next step may contain.

The simulator and the vLLM scheduler call it once per scheduling step and report admissions and completions to it; it is
the only implementation of the scheduling rules. It reads neither clock nor random numbers, so a run is a function of
its inputs. The policy's :class:`~vllm_eb.strategy.Strategy` decides; phases, KV gate and records are common to all
policies. Changes of phase or mode and updates are recorded with all intermediate values, if the caller reads the
records.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

from vllm_eb.calibration import Calibration
from vllm_eb.policy import PolicySpec
from vllm_eb.queueing import Places, QueueOrder, ShortestFirst, Waited
from vllm_eb.strategy import (
    Decision,
    EngineFacts,
    Lengths,
    Mode,
    Phase,
    Record,
    RecordKind,
    StepChoice,
    Strategy,
    Values,
    View,
)
from vllm_eb.theory import NO_DRAFTS, Drafts

GATE_MARGIN, GATE_MIN, GATE_MAX = 0.5, 0.05, 0.6  # appendix D.6, whose reserve is 0

Entered = Callable[[View, str, Values], None]


class Phases:
    """Current phase and mode, remaining admissions of a refill, KV gate.

    ``entered`` is called after each change of phase.
    """

    def __init__(self, engine: EngineFacts, strategy: Strategy, lengths: Lengths, entered: Entered) -> None:
        self._engine, self._strategy, self._lengths, self._entered = engine, strategy, lengths, entered
        self._max_num_seqs, self._num_blocks = engine.max_num_seqs, engine.num_blocks
        self.mode: Mode = strategy.mode
        self.phase: Phase = "decode" if self.mode == "eb" else "mixed"
        self.token_budget: int | None = None  # of the step being decided on
        self._quota = self._admitted = 0
        self._blocked = False
        self._last_limit = engine.max_num_seqs  # batch limit when idle slots were last counted

    def on_admission(self) -> None:
        """Record an admission, first or repeated."""
        self._admitted += 1

    def pop_blocked(self) -> bool:
        """Whether the last prefill found no KV blocks; resets the flag."""
        blocked, self._blocked = self._blocked, False
        return blocked

    def block(self, view: View) -> None:
        """Switch to decode, which frees blocks: the prefill step decided on could schedule nothing."""
        self._blocked = True
        self.enter("decode", view, "no_kv_blocks")

    def enter(self, phase: Phase, view: View, reason: str, values: Values | None = None) -> None:
        """Change the phase."""
        self.phase = phase
        self._entered(view, reason, values or {})

    def switch(self, mode: Mode, view: View) -> None:
        """Change the mode. Running requests keep their KV and their place; half-computed prompts come first."""
        self.mode = mode
        self.phase = "mixed" if mode == "mb" else "prefill" if view.prefilling else "decode"
        self._quota = self._admitted = 0

    def follow(self, choice: StepChoice, view: View) -> None:
        """Apply the choice of a strategy that chooses every step."""
        self.token_budget = choice.token_budget
        if choice.phase == self.phase:
            return
        self.mode = choice.mode
        self._quota, self._admitted = choice.refill, 0
        self.enter(choice.phase, view, choice.reason, choice.values)

    def extend(self, view: View) -> None:
        """During a prefill that delays no decode, admit as many requests as there are slots."""
        if not view.decodes:
            self._quota = max(self._quota, self._admitted + self.refill(view))

    def alternate(self, view: View) -> None:
        """Change from decode to prefill when a refill is due, and back when it is complete."""
        refilled = self.phase == "prefill" and not self.refilling(view)
        if refilled:
            self.enter("decode", view, "refill_complete")
        # A decode step follows a refill, unless all admitted requests have ended already.
        if self.phase != "prefill" and not (refilled and view.decodes):
            reason = None if self._blocked and view.decodes else self._refill_reason(view)
            self._blocked = False
            if reason is not None:
                self._quota, self._admitted = self.refill(view), 0
                self.enter("prefill", view, reason)

    def refilling(self, view: View) -> bool:
        """Whether the current prefill phase has requests left to admit or to compute."""
        return view.prefilling > 0 or (self._admitted < self._quota and view.waiting > 0 and self.idle(view) > 0)

    def refill(self, view: View) -> int:
        """Number of waiting requests for which there are idle slots."""
        return max(min(view.waiting, self.idle(view)), 0) if view.waiting else 0

    def idle(self, view: View) -> int:
        """Number of idle slots; negative while more requests run than are allowed."""
        strategy = self._strategy
        active = view.decoding + view.prefilling
        slots = min(strategy.seqs_allowed, self._max_num_seqs - view.idle_sessions) - active
        if slots > 0 and (fit := strategy.prompts_that_fit(view)) != math.inf:
            slots = min(slots, math.ceil(fit))
        self._last_limit = active + max(slots, 0)
        return slots

    def batch_limit(self, view: View, idle: int | None = None) -> int:
        """The current batch limit; if the strategy bounds memory, at most the number of sequences with room.

        ``idle``: what :meth:`idle` returns, if that is known already.
        """
        if not self._strategy.bounds_mixed:
            return self._strategy.seqs_allowed
        return view.decoding + view.prefilling + max(self.idle(view) if idle is None else idle, 0)

    def decision(self, view: View) -> Decision:
        """The decision for the next step."""
        limit, strategy = self._max_num_seqs, self._strategy
        if self.phase == "decode" and strategy.bounds_mixed:
            # It admits nothing: its batch limit is only reported, and not counted again.
            return Decision(self.phase, self.mode, limit, strategy.slots, self._last_limit, self.token_budget)
        batch_limit = self.batch_limit(view)
        if self.phase == "prefill" or (self.phase == "mixed" and strategy.bounds_mixed):
            active = view.decoding + view.prefilling
            limit = batch_limit
            if self.phase == "prefill":
                limit = min(limit, active + self._quota - self._admitted)
            limit = max(limit, active)
        return Decision(self.phase, self.mode, limit, strategy.slots, batch_limit, self.token_budget)

    def gate(self) -> float:
        """The share of KV memory that must be free for a refill."""
        limit = self._strategy.seqs_allowed
        expected_share = limit * self._lengths.mu_o * GATE_MARGIN / self._engine.capacity_tokens
        return min(max(expected_share, GATE_MIN), GATE_MAX)

    def _refill_reason(self, view: View) -> str | None:
        """Why to change from decode to prefill now, or None."""
        if view.decoding == 0:
            return "nothing_decodes" if view.prefilling or view.waiting else None
        if view.last_tokens_out:
            return "last_tokens_in_flight" if view.prefilling or self.refill(view) else None
        if view.prefilling:
            return "prompts_half_computed"
        if not view.waiting:
            return None
        idle = self.idle(view)
        refill = min(view.waiting, idle)
        if refill < 1 or not self._strategy.refill_due(view, refill, idle):
            return None
        if self._strategy.gated and view.free_blocks / self._num_blocks <= self.gate():
            return None
        return "slots_free"


class Controller:
    """Controls one engine instance. ``keep_records``: keep records for :meth:`drain_records`.

    ``ranks`` and ``pass_interval``: see :class:`~vllm_eb.strategy.EngineFacts`. ``drafts``: how many tokens the engine
    drafts; how many are accepted is learnt.
    """

    def __init__(
        self,
        spec: PolicySpec,
        calibration: Calibration,
        *,
        max_num_seqs: int,
        block_size: int,
        num_blocks: int,
        max_num_batched_tokens: int,
        keep_records: bool = False,
        ranks: int = 1,
        pass_interval: int = 1,
        drafts: Drafts = NO_DRAFTS,
    ) -> None:
        engine = EngineFacts(
            calibration, max_num_seqs, block_size, num_blocks, max_num_batched_tokens, ranks, pass_interval
        )
        self._num_blocks = num_blocks
        self._lengths = Lengths(spec.completions_per_update, drafts)
        self._strategy = spec.strategy(engine, self._lengths)
        self._queue = ShortestFirst() if spec.order == "shortest" else self._strategy.queue
        self._phases = Phases(engine, self._strategy, self._lengths, self._entered)
        self._running_ages: Callable[[], Sequence[int]] = lambda: ()
        self._keep_records = keep_records
        self._records: list[Record] = []

    @property
    def mode(self) -> Mode:
        """The current mode."""
        return self._phases.mode

    def follow_ages(self, running_ages: Callable[[], Sequence[int]]) -> None:
        """Set the function that returns the output tokens so far of every running request (for the censored
        estimator)."""
        self._running_ages = running_ages

    def keep_records(self) -> None:
        """Keep records for :meth:`drain_records` from now on."""
        self._keep_records = True

    def drain_records(self) -> list[Record]:
        """Records since the last call."""
        records, self._records = self._records, []
        return records

    def on_prompt(self, input_tokens: int, cached_tokens: int = 0) -> None:
        """Record the first admission of a request: tokens of its prompt, and how many of them are cached."""
        self._lengths.on_prompt(input_tokens, cached_tokens)
        self._phases.on_admission()
        self._strategy.on_prompt(input_tokens, cached_tokens)

    def on_resume(self) -> None:
        """Record that a preempted request was admitted again."""
        self._phases.on_admission()
        self._strategy.on_resume()

    def on_verified(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Record, by position, how many drafts of a step were as long, and how many were accepted that far."""
        self._lengths.on_verified(drafted, accepted)
        self._strategy.on_accepted(accepted)

    @property
    def draft_lengths(self) -> Sequence[int] | None:
        """See Strategy."""
        return self._strategy.draft_lengths

    def on_finish(self, output_tokens: int) -> None:
        """Record that a request left its slot after ``output_tokens`` >= 1 tokens, finished or aborted."""
        self._lengths.on_finish(output_tokens)
        self._strategy.on_finish(output_tokens)

    def decide(self, view: View) -> Decision:
        """What the next step may contain."""
        phases = self._phases
        self._strategy.observe(view)
        if self._lengths.update_due:
            self._update(view)
        if phases.phase == "prefill":
            phases.extend(view)
        choice = self._strategy.choose(view, phases)
        if choice is not None:
            phases.follow(choice, view)
        elif phases.mode == "eb":
            phases.alternate(view)
        return phases.decision(view)

    def prefill_blocked(self, view: View) -> None:
        """Report that the prefill step decided on could schedule nothing. Ask again: completions free blocks."""
        self._phases.block(view)

    # Order of waiting requests.

    @property
    def orders_queue(self) -> bool:
        """Whether :meth:`queue_order` determines the order of requests that were never started."""
        return self._queue is not None

    @property
    def queue(self) -> QueueOrder:
        """Tells when to reorder the queue, and how long its oldest punctual request has waited."""
        assert self._queue is not None
        return self._queue

    def queue_order(
        self, now_s: float, seen_s: Sequence[float], prompt_tokens: Sequence[int], oldest: Waited | None = None
    ) -> Places:
        """New order of never-started requests, as indices into the queue. Call it when ``queue`` is due.

        ``seen_s``: arrival times in queue order; ``prompt_tokens``: prompt lengths. ``oldest``: the oldest of the
        overdue requests, if those that earlier orders found overdue are left out.
        """
        if isinstance(self._queue, ShortestFirst):
            return self._queue.order(now_s, prompt_tokens)
        return self._strategy.queue_order(now_s, seen_s, prompt_tokens, oldest)

    @property
    def prompt_tokens_wanted(self) -> int:
        """Up to how many tokens ``View.prompt_tokens`` is to be counted; 0: not at all."""
        return self._strategy.prompt_tokens_wanted

    # Parameters and records.

    def _update(self, view: View) -> None:
        self._lengths.update()
        for change in self._strategy.update(view, self._running_ages):
            if change.mode is not None:
                self._phases.switch(change.mode, view)
            self._record(change.kind, view, change.reason, change.values)

    def _entered(self, view: View, reason: str, values: Values) -> None:
        self._record("phase", view, reason, values)

    def _record(self, kind: RecordKind, view: View, reason: str, values: Values) -> None:
        if not self._keep_records:
            return
        phases, strategy, lengths = self._phases, self._strategy, self._lengths
        facts, idle = strategy.facts, phases.idle(view)
        common: dict[str, float | int | None] = {
            "decoding": view.decoding,
            "prefilling": view.prefilling,
            "waiting": view.waiting,
            "idle": max(idle, 0),
            "k": strategy.slots,
            "n_limit": phases.batch_limit(view, idle),
            "theta": strategy.theta,
            "theta0": facts.get("theta0"),
            "mu_l": lengths.mu_l,
            "mu_o": lengths.mu_o,
            "n_obs": facts.get("n_obs"),
            "kv_free_share": view.free_blocks / self._num_blocks,
            "kv_gate": phases.gate(),
        }
        self._records.append(
            Record(view.now_s, view.step_id, kind, reason, phases.mode, phases.phase, common | dict(values))
        )


class WaitingOrder:
    """vLLM's queue: keeps arrival times, and orders requests that were never started by the controller's rule.

    Preempted requests stay in front. All times in seconds of the scheduler's clock. Overdue requests stand together
    in the queue and keep their order, so an ordering reads only the others: under overload thousands are overdue
    and some dozens are not. Most steps admit nothing: they need an order only if the oldest request may have waited
    for too long, and such an ordering changes only lists of these others; :meth:`arrange` changes the queue itself.
    The queue mostly loses requests at its front and gets new ones at its end: then the lists are cut and extended.
    After any other change the next ordering reads the queue anew.
    """

    def __init__(self, controller: Controller) -> None:
        self._controller, self._queue = controller, controller.queue
        self.arrived_s: dict[str, float] = {}
        # Requests that were not overdue at the last ordering, in its order, then those that have come since.
        self._others: list[Any] = []
        self._seen_s: list[float] = []  # their arrival times
        self._prompt_tokens: list[int] = []
        self._admitted = 0  # of these, from the first on
        self._known = True  # whether the queue holds these and the overdue requests, and no preempted one
        # The queue as it was last arranged.
        self._overdue = 0  # its overdue requests
        self._last_overdue: Any = None  # the last of them; None if there are none
        self._overdue_until_s = -math.inf  # its arrival
        self._turn: Any = None  # the overdue request that stands before all others
        # What the last ordering changed.
        self._first: int | None = None  # how many of the others go before the overdue requests; None: it is arranged
        self._ordered = 0  # how many of the others were there
        self._late: list[Any] = []  # found overdue since the queue was arranged
        self._oldest: Waited | None = None  # the oldest overdue request
        self._oldest_first = False  # whether it goes before all others

    def arrived(self, request: Any, waiting: deque[Any], now_s: float) -> None:
        """Keep the arrival time of a request that was added to the queue."""
        if request.request_id in self.arrived_s:  # the next turn of a streaming session
            self.forget(waiting)
        self.arrived_s[request.request_id] = now_s
        if self._known:
            self._append(request)

    def left(self, request: Any) -> None:
        """Forget a request that ended."""
        self.arrived_s.pop(request.request_id, None)
        if not request.num_computed_tokens:  # it was waiting
            self._known = False

    def admitted(self, request: Any) -> None:
        """Record that a request left the queue to run."""
        place = self._admitted
        if place < len(self._others) and self._others[place] is request and self._first is None:
            self._admitted += 1
            return
        if request is self._turn:
            self._turn = None
        self._known = False

    def forget(self, waiting: deque[Any]) -> None:
        """Let the next ordering read all requests: one of them has changed."""
        self._rearrange(waiting)
        self._known, self._last_overdue, self._turn = False, None, None

    def order(self, waiting: deque[Any], now_s: float) -> float:
        """Order a queue that is not empty if that matters before the step is chosen; returns the waiting time (s) of
        the oldest request that can meet its target."""
        if self._queue.due(now_s):
            self._order(waiting, now_s)
        return self._queue.oldest_wait_s(now_s)

    def arrange(self, waiting: deque[Any], now_s: float) -> None:
        """Put the queue into its order, a new one if due. Call it before a step that may admit requests."""
        if waiting and self._queue.due(now_s, admits=True):
            self._order(waiting, now_s)
        self._rearrange(waiting)

    def _order(self, waiting: deque[Any], now_s: float) -> None:
        if self._is_known(waiting):
            self._reorder(now_s)
        else:
            self._order_anew(waiting, now_s)

    def _rearrange(self, waiting: deque[Any]) -> None:
        """Put the queue into the order last found."""
        if self._first is None:
            return
        queued, started = self._take_out(waiting), []
        first, late, rest = self._others[: self._first], self._late, self._others[self._first :]
        if {*first, *late, *rest}.symmetric_difference(queued):
            self._known = False
            present, ordered = set(queued), {*late, *self._others[: self._ordered]}
            first, late, rest = ([request for request in part if request in present] for part in (first, late, rest))
            rest = [request for request in rest if request in ordered]
            started = list(takewhile(lambda request: request not in ordered, queued))
            rest += [request for request in queued[len(started) :] if request not in ordered]
        self._place(waiting, started, first, late, rest)

    def _place(
        self, waiting: deque[Any], started: list[Any], first: list[Any], late: list[Any], rest: list[Any]
    ) -> None:
        """Add requests to ``waiting``, which holds the overdue ones alone; ``late`` ones are overdue too."""
        waiting.extend(late)
        self._overdue = len(waiting)
        self._turn = waiting.popleft() if self._oldest_first and waiting else None
        self._last_overdue = waiting[-1] if waiting else self._turn
        if self._last_overdue is not None:
            self._overdue_until_s = self.arrived_s[self._last_overdue.request_id]
        waiting.extend(rest)
        waiting.extendleft(reversed([*started, *first] if self._turn is None else [*started, self._turn, *first]))
        self._first, self._late = None, []

    def _append(self, request: Any) -> None:
        self._others.append(request)
        self._seen_s.append(self.arrived_s[request.request_id])
        self._prompt_tokens.append(request.num_prompt_tokens)

    def _is_known(self, waiting: deque[Any]) -> bool:
        """Whether the lists hold all requests that are not overdue; takes admitted ones out of them."""
        if self._admitted:
            for part in (self._others, self._seen_s, self._prompt_tokens):
                del part[: self._admitted]
            self._admitted = 0
        return self._known and len(waiting) == self._overdue + len(self._late) + len(self._others)

    def _reorder(self, now_s: float) -> None:
        """Order the requests that are not overdue."""
        others, seen_s, prompt_tokens = self._others, self._seen_s, self._prompt_tokens
        places = self._controller.queue_order(now_s, seen_s, prompt_tokens, self._oldest)
        if places.first == range(len(others)):  # all stay where they are, among themselves
            if self._first is not None or self._overdue or self._late:
                self._first, self._ordered, self._oldest_first = len(others), len(others), places.oldest_first
            return
        if places.overdue:
            self._late += map(others.__getitem__, places.overdue)
            if self._oldest is None:
                self._oldest = Waited(seen_s[places.overdue[0]], prompt_tokens[places.overdue[0]])
        ordered = [*places.first, *places.rest]
        self._others = list(map(others.__getitem__, ordered))
        self._seen_s = list(map(seen_s.__getitem__, ordered))
        self._prompt_tokens = list(map(prompt_tokens.__getitem__, ordered))
        self._first, self._ordered, self._oldest_first = len(places.first), len(ordered), places.oldest_first

    def _order_anew(self, waiting: deque[Any], now_s: float) -> None:
        """Read the queue, order and arrange it."""
        self._rearrange(waiting)
        queued, self._first = self._take_out(waiting), 0
        started = [queued_request for queued_request in queued if not self._is_fresh(queued_request)]
        self._others, self._seen_s, self._prompt_tokens = [], [], []
        for request in filter(self._is_fresh, queued):
            self._append(request)
        self._known = not started
        self._oldest = Waited(self.arrived_s[waiting[0].request_id], waiting[0].num_prompt_tokens) if waiting else None
        self._reorder(now_s)
        self._place(waiting, started, self._others[: self._first], self._late, self._others[self._first :])

    def _take_out(self, waiting: deque[Any]) -> list[Any]:
        """Take all but the overdue requests out of the queue; returns them in its order."""
        if self._last_overdue is None:
            requests = list(waiting)
            waiting.clear()
            return requests
        before, after, turn = [], [], None
        while waiting and (waiting[0] is self._turn or not self._is_overdue(waiting[0])):
            request = waiting.popleft()
            if request is self._turn:
                turn = request
            else:
                before.append(request)
        if turn is not None:
            waiting.appendleft(turn)
        while waiting and waiting[-1] is not self._last_overdue:
            after.append(waiting.pop())
        after.reverse()
        if any(map(self._is_overdue, after)):  # a session after its turn, or the last overdue request has left
            after = [*waiting, *after]
            waiting.clear()
        return before + after

    def _is_fresh(self, request: Any) -> bool:
        return not request.num_preemptions and request.request_id in self.arrived_s

    def _is_overdue(self, request: Any) -> bool:
        """Whether a request of this age was overdue at the last ordering."""
        seen_s = self.arrived_s.get(request.request_id, math.inf)
        return seen_s <= self._overdue_until_s and not request.num_preemptions
