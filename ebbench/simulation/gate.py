"""What a scheduling step may hold: everything (v1), or what the policy decides.

The controller (:mod:`vllm_eb.controller`) is called once per step, as by the plugin inside vLLM; requests that may not
be in the step are set aside. The scheduler (:mod:`ebbench.simulation.scheduler`) makes the step.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

import numpy as np

from ebbench.simulation.scheduler import Scheduler, admissible, prompt_tokens
from ebbench.simulation.state import UNSET
from ebbench.simulation.step import NO_ROWS, NS_PER_S, Step
from vllm_eb.controller import Controller
from vllm_eb.strategy import Decision, View


class Gate(Protocol):
    """Decides which requests of its scheduler a step holds."""

    @property
    def mode(self) -> str:
        """The current mode, for the progress line."""
        ...

    def fill(self, step: Step) -> None:
        """Fill ``step``; it stays empty if nothing can be scheduled."""
        ...

    @property
    def asks_each_step(self) -> bool:
        """Whether :meth:`admits_decode` must be called before every step; if not, :meth:`may_coast` is sufficient."""
        ...

    def may_coast(self) -> bool:
        """Whether the next steps may be decode steps of exactly the running requests."""
        ...

    def admits_decode(self, step: Step) -> bool:
        """Whether ``step`` is to hold exactly the running requests, all of them in decode."""
        ...


def gate_for(scheduler: Scheduler, controller: Controller | None) -> Gate:
    """The gate of a policy; ``controller`` None is vLLM's own scheduling."""
    return OpenGate(scheduler) if controller is None else PolicyGate(scheduler, controller)


class OpenGate:
    """vLLM's own scheduling: a step holds whatever fits."""

    mode = "mb"
    asks_each_step = False  # while only decodes run, free blocks and slots only decrease

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._limit = scheduler.limits.max_num_seqs

    def fill(self, step: Step) -> None:
        """See Gate."""
        self._scheduler.fill(step, self._scheduler.running, admit=True, running_limit=self._limit)

    def may_coast(self) -> bool:
        """See Gate: True unless a waiting request could join."""
        return not admissible(self._scheduler, self._limit)

    def admits_decode(self, step: Step) -> bool:
        """See Gate: always."""
        return True


class PolicyGate:
    """Asks a controller what each step may hold, and reports admissions and completions to it."""

    asks_each_step = True

    def __init__(self, scheduler: Scheduler, controller: Controller) -> None:
        self._scheduler, self._controller = scheduler, controller
        self._preempted = 0  # in the last scheduling step
        self._decided: Decision | None = None  # the decision for the next step, if already made
        scheduler.listeners.append(self)
        controller.follow_ages(scheduler.running_ages)

    @property
    def mode(self) -> str:
        """See Gate."""
        return self._controller.mode

    def fill(self, step: Step) -> None:
        """See Gate."""
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
        """See Gate: True unless the policy orders the queue in every step."""
        return not self._controller.orders_queue

    def admits_decode(self, step: Step) -> bool:
        """See Gate. Another decision is kept for :meth:`fill`, which is called next, at the same time."""
        decision = self._decided or self._controller.decide(self._view(step, coasting=True))
        if (
            decision.phase == "prefill"
            or (decision.phase == "mixed" and admissible(self._scheduler, decision.running_limit))
            or (decision.token_budget is not None and decision.token_budget < len(self._scheduler.running))
        ):
            self._decided = decision
            return False
        self._decided, self._preempted = None, 0
        step.mode, step.k, step.n_limit = decision.mode, decision.k, decision.n_limit
        return True

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
            oldest_wait_s=self._order_queue(step.scheduled_ns) if controller.orders_queue else 0.0,
            pass_number=step.pass_number,
            prompt_tokens=prompt_tokens(scheduler, wanted) if (wanted := controller.prompt_tokens_wanted) else 0,
        )

    def _order_queue(self, now_ns: int) -> float:
        """Let the policy order the queue if due; returns the waiting time (s) of the oldest punctual request."""
        scheduler, queue = self._scheduler, self._controller.queue
        now_s = now_ns / NS_PER_S
        if queue.due(now_s):
            rows = np.fromiter(scheduler.waiting, np.int64, len(scheduler.waiting))
            fresh = scheduler.state.scheduled_ns[rows] == UNSET
            started, rows = rows[~fresh], rows[fresh]
            seen_s = (scheduler.seen_ns[rows] / NS_PER_S).tolist()
            places = self._controller.queue_order(now_s, seen_s, scheduler.state.prompt[rows].tolist())
            scheduler.waiting = deque([*started.tolist(), *rows[places.in_order()].tolist()])
        return queue.oldest_wait_s(now_s)
