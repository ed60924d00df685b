"""vLLM v1's engine loop (0.32) in virtual time: what steps hold, when they are scheduled, how long they take.

One loop drives one unit, or several units in lockstep: the units of a DP+EP instance exchange tokens in the expert
layers, so they wait for each other in every layer, and a step lasts as long as its slowest unit (Tian et al. 2025,
section 3.3). Each unit has its own scheduler, KV cache and policy; a unit without requests takes part with an empty
batch.

:meth:`EngineLoop.wake` does what vLLM's engine core does between two blocking waits and returns the time of its next
call; the event loop (:mod:`ebbench.simulation.loop`) owns the clock.

Asynchronous scheduling is vLLM's: up to two steps are in flight, so step n+1 is scheduled before the completions of
step n are known, and a freed slot becomes visible one step later. A step without scheduled tokens takes no time but, as
in vLLM, one of the two places in the queue. Steps that only decode are made in runs without the loop (coasting).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ebbench.devices.base import CostModel, PassCost, StepShape
from ebbench.simulation.scheduler import Scheduler, SchedulerListener, admissible, prompt_tokens
from ebbench.simulation.state import TURNAROUND_NS, UNSET
from ebbench.simulation.step import NO_ROWS, NS_PER_S, FigureLog, Step, StepLog
from vllm_eb.controller import Controller
from vllm_eb.strategy import Decision, View

# What a scheduling step may hold: everything (v1), or what the policy decides.
#
# The controller (`vllm_eb.controller`) is called once per step, as by the plugin inside vLLM; requests that may not
# be in the step are set aside. The scheduler (`ebbench.simulation.scheduler`) makes the step.


class OpenGate:
    """Decides which requests of its scheduler a step holds: by vLLM's own scheduling, whatever fits.

    ``asks_each_step``: :meth:`admits_decode` must be called before every step; if not, :meth:`may_coast` is sufficient.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._limit = scheduler.limits.running_limit
        # While only decodes run, free slots only decrease, and so do free blocks, unless some leave a window.
        self.asks_each_step = scheduler.layout is not None and scheduler.states is None

    @property
    def mode(self) -> str:
        """The current mode, for the progress line."""
        return "mb"

    def fill(self, step: Step) -> None:
        """Fill ``step``; it stays empty if nothing can be scheduled."""
        self._scheduler.fill(step, self._scheduler.running, admit=True, running_limit=self._limit)

    def may_coast(self) -> bool:
        """Whether the next steps may be decode steps of exactly the running requests: no waiting one could join."""
        return not admissible(self._scheduler, self._limit)

    def admits_decode(self, step: Step, taken: int) -> bool:
        """Whether ``step`` is to hold exactly the running requests, all of them in decode, with ``taken`` more KV
        blocks."""
        return not admissible(self._scheduler, self._limit, taken)


class PolicyGate(OpenGate, SchedulerListener):
    """Asks a controller what each step may hold, and reports admissions and completions to it."""

    def __init__(self, scheduler: Scheduler, controller: Controller) -> None:
        super().__init__(scheduler)
        self.asks_each_step = True
        self._controller = controller
        self._preempted = 0  # in the last scheduling step
        self._decided: Decision | None = None  # the decision for the next step, if already made
        scheduler.listeners.append(self)
        controller.follow_ages(scheduler.running_ages)
        scheduler.on_verified = controller.on_verified
        scheduler.draft_lengths = lambda: controller.draft_lengths

    @property
    def mode(self) -> str:
        """See OpenGate."""
        return self._controller.mode

    def fill(self, step: Step) -> None:
        """See OpenGate."""
        prefilling = self._scheduler.prefilling
        view = self._view(step)
        decision = self._decided or self._controller.decide(view)
        self._decided = None
        self._follow(step, decision, prefilling)
        if decision.phase == "prefill" and step.empty:
            self._controller.prefill_blocked(view)
            if view.decodes and not step.preempted:
                self._follow(step, self._controller.decide(view), prefilling)
        self._preempted = len(step.preempted)

    def _follow(self, step: Step, decision: Decision, prefilling: int) -> None:
        step.mode, step.k, step.n_limit = decision.mode, decision.k, decision.n_limit
        scheduler = self._scheduler
        candidates = scheduler.running
        if decision.phase != "decode":
            self._order_queue(step.scheduled_ns, admits=True)
        if decision.phase == "prefill":
            candidates = candidates[scheduler.state.partial[candidates]] if prefilling else NO_ROWS
        elif decision.phase == "decode" and prefilling:
            candidates = candidates[~scheduler.state.partial[candidates]]
        scheduler.fill(
            step,
            candidates,
            admit=decision.phase != "decode",
            running_limit=decision.running_limit,
            token_budget=decision.token_budget,
        )

    def may_coast(self) -> bool:
        """See OpenGate: always, since the policy is asked before each step."""
        return True

    def admits_decode(self, step: Step, taken: int) -> bool:
        """See OpenGate. Another decision is kept for :meth:`fill`, which is called next, at the same time."""
        decision = self._decided or self._controller.decide(self._view(step, coasting=True))
        if (
            decision.phase == "prefill"
            or (decision.phase == "mixed" and self._may_admit(decision.running_limit, taken))
            or (decision.token_budget is not None and decision.token_budget < len(self._scheduler.running))
        ):
            self._decided = decision
            return False
        self._decided, self._preempted = None, 0
        step.mode, step.k, step.n_limit = decision.mode, decision.k, decision.n_limit
        return True

    def _may_admit(self, running_limit: int, taken: int) -> bool:
        """Whether a mixed step may admit a request: any that waits where :meth:`fill` orders the queue first."""
        ordered = self._controller.orders_queue and bool(self._scheduler.waiting)
        return ordered or admissible(self._scheduler, running_limit, taken)

    def admitted(self, row: int, cached_tokens: int, now_ns: int, *, first: bool) -> None:
        """See SchedulerListener."""
        if first:
            self._controller.on_prompt(int(self._scheduler.state.prompt[row]), cached_tokens)
        else:
            self._controller.on_resume()

    def finished(self, row: int) -> None:
        """See SchedulerListener."""
        self._controller.on_finish(int(self._scheduler.state.max_output[row]))

    def withdrawn(self, row: int, output_tokens: int) -> None:
        """See SchedulerListener: like in the plugin, a request that had tokens counts as ended after them."""
        if output_tokens:
            self._controller.on_finish(output_tokens)

    def _view(self, step: Step, *, coasting: bool = False) -> View:
        """The policy's view of the step. ``coasting``: all running requests have tokens left and need no check."""
        scheduler, controller = self._scheduler, self._controller
        prefilling = scheduler.prefilling
        return View(
            now_s=step.scheduled_ns / NS_PER_S,
            step_id=scheduler.steps,
            decoding=len(scheduler.running) - prefilling,
            prefilling=prefilling,
            waiting=len(scheduler.waiting),
            free_blocks=scheduler.kv.free,
            preempted=self._preempted,
            last_tokens_out=not coasting and not scheduler.generates,
            oldest_wait_s=self._order_queue(step.scheduled_ns),
            pass_number=step.pass_number,
            prompt_tokens=prompt_tokens(scheduler, wanted) if (wanted := controller.prompt_tokens_wanted) else 0,
        )

    def _order_queue(self, now_ns: int, *, admits: bool = False) -> float:
        """Let the policy order the queue if due; returns the waiting time (s) of the oldest punctual request.

        ``admits``: the next step may admit requests.
        """
        scheduler = self._scheduler
        if not (self._controller.orders_queue and scheduler.waiting):
            return 0.0
        queue, now_s = self._controller.queue, now_ns / NS_PER_S
        if queue.due(now_s, admits=admits):
            rows = np.fromiter(scheduler.waiting, np.int64, len(scheduler.waiting))
            fresh = scheduler.state.scheduled_ns[rows] == UNSET
            started, rows = rows[~fresh], rows[fresh]
            seen_s = (scheduler.seen_ns[rows] / NS_PER_S).tolist()
            places = self._controller.queue_order(now_s, seen_s, scheduler.state.prompt[rows].tolist())
            scheduler.waiting = deque([*started.tolist(), *rows[places.in_order()].tolist()])
        return queue.oldest_wait_s(now_s)


SHORTEST_RUN = 2  # steps; a single step is as fast without coasting

RunStep = Callable[[Step, StepShape], None]
"""Times a scheduled step on the device and records it."""


class Coasting:
    """Coasts one unit whose KV blocks are counted, or do not change.

    An attempt looks at all running requests. In a saturated engine one of them ends in nearly every step; attempts that
    are known to fail for that are left out. Results do not depend on it.
    """

    def __init__(self, scheduler: Scheduler, gate: OpenGate, run_step: RunStep) -> None:
        self._scheduler, self._gate, self._run_step = scheduler, gate, run_step
        self._ending = False  # at the next attempt a running request has its last token in flight

    def due(self) -> bool:
        """Whether an attempt may succeed. To be asked before each scheduling step."""
        if self._ending:
            self._ending = False
            return False
        return self._scheduler.only_decodes

    def make_steps(self, now_ns: int, until_ns: int) -> bool:
        """Make decode steps of the running requests; the first is scheduled now, all before ``until_ns``.

        A step is scheduled when the step m places before it ends, with m the number of steps in flight now. The same
        number is in flight afterwards; the tokens of the others are delivered. Returns False if no step was made;
        nothing has then changed.
        """
        scheduler, gate = self._scheduler, self._gate
        state, rows, limits, kv = scheduler.state, scheduler.running, scheduler.limits, scheduler.kv
        if len(rows) > limits.max_num_batched_tokens or not gate.may_coast():
            return False
        computed, in_flight = state.computed.take(rows), scheduler.in_flight
        most, before = int(np.minimum.reduce(state.last.take(rows) - computed)), len(in_flight)
        if most < SHORTEST_RUN:
            self._ending = most == 1 and before > 0
            return False
        ends, quiet = most, scheduler.quiet_decodes(rows, computed, most)
        if gate.asks_each_step or not scheduler.in_flight_alike:
            most = quiet
        if most < SHORTEST_RUN:
            return False
        seqs, ones, asks = len(rows), scheduler.ones[: len(rows)], gate.asks_each_step
        kv_tokens, made, wake_ns, held_blocks = int(np.add.reduce(computed)), 0, now_ns, None
        blocks = scheduler.decode_blocks(rows, computed)
        while made < most and wake_ns < until_ns:
            if made == quiet:
                if not scheduler.grow_decodes(rows, computed + made, before) or not gate.may_coast():
                    break
                quiet += max(scheduler.quiet_decodes(rows, computed + made, most - made), 1)
            at_once, in_all, held = next(blocks)
            if at_once > kv.free:
                break
            step = Step(wake_ns, rows=rows, tokens=ones, sampled=rows, decode_seqs=seqs)
            if asks and not gate.admits_decode(step, in_all):
                break
            if scheduler.counted is not None:
                scheduler.counted.take(in_all)
            made += 1
            kv_tokens += seqs
            scheduler.steps += 1
            self._run_step(step, StepShape((), seqs, kv_tokens, seqs))
            in_flight.append(step)
            wake_ns, held_blocks = in_flight[made - 1].end_ns, held
        if made:
            self._ending = made == ends and before > 0
            scheduler.commit_decodes(rows, computed + made, held_blocks)
            for _ in range(min(before, made - 1)):
                scheduler.deliver()
            scheduler.deliver_decodes(rows, max(made - 1 - before, 0))
        return made > 0


def not_quiet() -> int:
    """A request may arrive at any time."""
    return 0


@dataclass(frozen=True)
class Unit:
    """One scheduler with its policy. ``index`` counts the units of all stages."""

    index: int
    scheduler: Scheduler
    gate: OpenGate

    @staticmethod
    def of(index: int, scheduler: Scheduler, controller: Controller | None) -> Unit:
        """A unit with the policy of ``controller``; None is vLLM's own scheduling."""
        return Unit(index, scheduler, OpenGate(scheduler) if controller is None else PolicyGate(scheduler, controller))


class StepTimer:
    """The device of one engine, which runs one step after the other."""

    def __init__(self) -> None:
        self._free_ns = 0

    def run(self, scheduled_ns: int, duration_s: float) -> tuple[int, int]:
        """Start and end (ns) of a step scheduled now."""
        start_ns = self._free_ns
        if scheduled_ns > start_ns:
            start_ns = scheduled_ns
        self._free_ns = end_ns = start_ns + round(duration_s * NS_PER_S)
        return start_ns, end_ns


@dataclass(slots=True)
class Pass:
    """The steps that all units make together, one per unit with scheduled tokens."""

    end_ns: int
    steps: list[Step]


OnPass = Callable[[int, int], None]
"""Called with the start and end (ns) of every pass when it is scheduled."""


class EngineLoop:
    """One engine instance: its units, the device that times their steps, and the steps in flight."""

    def __init__(self, units: Sequence[Unit], cost: CostModel, log: StepLog | FigureLog) -> None:
        """``cost``: cost model of one unit; a PassCost also knows the duration of a pass of several units."""
        self.units = units
        self.on_pass: OnPass | None = None
        self._cost, self._log = cost, log
        self._alone = units[0] if len(units) == 1 else None
        self._first, self._scheduler = units[0].index, units[0].scheduler
        self._coasting: Coasting | None = None
        scheduler = self._scheduler
        by_tokens = scheduler.layout is None or scheduler.limits.scheduler_reserve_full_isl
        if self._alone is not None and (scheduler.states or (scheduler.counted and by_tokens)):
            self._coasting = Coasting(scheduler, self._alone.gate, self._run_alone)
        self._timer = StepTimer()
        self._depth = 2 if units[0].scheduler.limits.async_scheduling else 1
        self._passes: deque[Pass] = deque()
        self._blocked = False
        self._pass_number = 0

    @property
    def idle(self) -> bool:
        """Whether a new arrival must wake the engine."""
        return not self._blocked

    @property
    def busy(self) -> bool:
        """Whether a unit has a further step in flight after the oldest; a single unit's empty step counts, as in
        vLLM."""
        if len(self.units) == 1:
            return len(self._passes) > 1
        return any(len(unit.scheduler.in_flight) > 1 for unit in self.units)

    def wake(self, now_ns: int, quiet_until_ns: Callable[[], int] = not_quiet) -> tuple[int | None, list[int]]:
        """Continue the loop at ``now_ns``. Returns the time (ns) of the next call (None: on arrival) and the rows that
        ended.

        The caller passes on the ended rows and calls again at the same time before any later event. What ends release
        is sent TURNAROUND_NS later, so the next scheduling step does not see it. No request arrives before
        ``quiet_until_ns()``, so steps up to then may be made at once; by default that time is not known.
        """
        if self._blocked:
            self._blocked = False
            ended = self._deliver(self._passes.popleft())
            if ended:
                return now_ns, ended
        if len(self._passes) == self._depth - 1 and self._coast(now_ns, quiet_until_ns):
            self._blocked = True
            return self._passes[0].end_ns, []
        fruitless = 0
        while True:
            if self._take_arrivals(now_ns):
                self._passes.append(self._schedule(now_ns))
                if not self._passes[-1].steps and not any(queued.steps for queued in self._passes):
                    # Nothing is in flight and nothing was scheduled. A prompt that preempted itself fits now; otherwise
                    # only an arrival can change that.
                    self._passes.clear()
                    fruitless += 1
                    if fruitless > 1:
                        return None, []
                    continue
                if len(self._passes) < self._depth:
                    continue
            elif not self._passes:
                return None, []
            if not self._passes[0].steps:
                self._passes.popleft()
                continue
            self._blocked = True
            return self._passes[0].end_ns, []

    def _take_arrivals(self, now_ns: int) -> bool:
        """Move arrivals into every unit's queue; returns whether any unit has a request."""
        if self._alone is not None:
            scheduler = self._scheduler
            scheduler.take_arrivals(now_ns)
            return len(scheduler.running) > 0 or len(scheduler.waiting) > 0
        has_requests = False
        for unit in self.units:
            unit.scheduler.take_arrivals(now_ns)
            has_requests = has_requests or unit.scheduler.has_requests
        return has_requests

    def _schedule(self, now_ns: int) -> Pass:
        """Schedule one pass. It has no steps and takes no time if no unit could schedule anything."""
        if self._alone is not None:
            step = Step(now_ns, rows=NO_ROWS, tokens=NO_ROWS, sampled=NO_ROWS)  # as the defaults, which are calls
            self._alone.gate.fill(step)
            if step.empty:
                return Pass(now_ns, [])
            self._run_alone(step, self._alone.scheduler.advance(step))
            if self.on_pass is not None:
                self.on_pass(step.start_ns, step.end_ns)
            return Pass(step.end_ns, [step])
        return self._schedule_together(now_ns)

    def _schedule_together(self, now_ns: int) -> Pass:
        steps: list[tuple[Unit, Step]] = []
        shapes: list[StepShape] = []
        for unit in self.units:
            step = Step(now_ns, pass_number=self._pass_number)
            if unit.scheduler.has_requests:
                unit.gate.fill(step)
            if not step.empty:
                shapes.append(unit.scheduler.advance(step))
                steps.append((unit, step))
        if not steps:
            return Pass(now_ns, [])
        self._pass_number += 1
        start_ns, end_ns = self._timer.run(now_ns, self._pass_s(shapes))
        for unit, step in steps:
            step.start_ns, step.end_ns = start_ns, end_ns
            self._record(unit, step)
        if self.on_pass is not None:
            self.on_pass(start_ns, end_ns)
        return Pass(end_ns, [step for _, step in steps])

    def _pass_s(self, shapes: Sequence[StepShape]) -> float:
        """Duration (s) of a pass: by a PassCost, else that of the slowest unit's step."""
        if isinstance(self._cost, PassCost):
            return self._cost.pass_s(shapes, len(self.units))
        return max(self._cost.step_s(shape) for shape in shapes)

    def _run_alone(self, step: Step, shape: StepShape) -> None:
        """Time a step of the only unit and record it. It inlines :meth:`_record`, since it is called for every step."""
        scheduler = self._scheduler
        step.start_ns, step.end_ns = self._timer.run(step.scheduled_ns, self._cost.step_s(shape))
        step.kv_blocks_used = scheduler.kv.total - scheduler.kv.free
        step.waiting, step.running = len(scheduler.waiting), len(scheduler.running)
        self._log.step(self._first, step)

    def _record(self, unit: Unit, step: Step) -> None:
        scheduler = unit.scheduler
        step.kv_blocks_used = scheduler.kv.total - scheduler.kv.free
        step.waiting, step.running = len(scheduler.waiting), len(scheduler.running)
        self._log.step(unit.index, step)

    def _deliver(self, ended_pass: Pass) -> list[int]:
        """Deliver the tokens of a pass; returns the rows that ended, by unit and in scheduling order."""
        if self._alone is not None:
            return self._scheduler.deliver()
        ended: list[int] = []
        for unit in self.units:
            if unit.scheduler.in_flight and unit.scheduler.in_flight[0] in ended_pass.steps:
                ended += unit.scheduler.deliver()
        return ended

    def _coast(self, now_ns: int, quiet_until_ns: Callable[[], int]) -> bool:
        """Make decode steps of the running requests up to ``quiet_until_ns()`` while there is nothing else to do.

        Returns False if no such step was made; nothing has then changed. Only engines with one unit coast, and only if
        its KV blocks are counted, what one admits does not depend on those just taken, and no listener follows the
        passes.
        """
        coasting, passes = self._coasting, self._passes
        if coasting is None or self.on_pass is not None or not coasting.due() or (passes and not passes[0].steps):
            return False
        until_ns = quiet_until_ns()
        # At most one step would fit.
        if until_ns <= now_ns + TURNAROUND_NS or (passes and passes[0].end_ns >= until_ns):
            return False
        if not coasting.make_steps(now_ns, until_ns):
            return False
        self._passes = deque(Pass(step.end_ns, [step]) for step in self._scheduler.in_flight)
        return True
