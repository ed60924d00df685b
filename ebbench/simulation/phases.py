"""The scheduler under a policy: what of vLLM's step the policy lets through, as the plugin does it in vLLM.

The policy core (:mod:`vllm_eb.controller`) is asked once per step, and requests that are not to be in it are set aside;
the step itself is vLLM's (:mod:`ebbench.simulation.scheduling`). Without a controller (v1) nothing is set aside.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from ebbench.simulation.kv import KvBlocks
from ebbench.simulation.scheduling import Scheduler
from ebbench.simulation.state import UNSET, RequestState
from ebbench.simulation.step import NO_ROWS, NS_PER_S, SchedulerLimits, Step
from vllm_eb.controller import Controller
from vllm_eb.decisions import Decision, View


class PhasedScheduler(Scheduler):
    """A scheduler that asks its controller, if it has one, what each step may hold."""

    def __init__(
        self, state: RequestState, limits: SchedulerLimits, kv: KvBlocks, controller: Controller | None
    ) -> None:
        super().__init__(state, limits, kv)
        self._controller = controller
        self._steps = 0
        self._preempted = 0  # in the last scheduling step
        self._decided: Decision | None = None  # the policy's answer for the next step, where it was asked already

    def _assemble(self, now_ns: int) -> Step:
        """The next step, empty where nothing can be scheduled."""
        step = Step(now_ns)
        if self._controller is None:
            self._fill(step, self.running, admit=True, running_limit=self._limits.max_num_seqs)
        else:
            self._ask_policy(step, self._controller)
        return step

    def _ask_policy(self, step: Step, controller: Controller) -> None:
        prefilling = self._prefilling
        view = self._view(step, controller)
        decision = self._decided or controller.decide(view)
        self._decided = None
        self._follow(step, decision, prefilling)
        if decision.phase == "prefill" and step.empty:
            controller.prefill_blocked(view)
            if view.decodes and not step.preempted:
                self._follow(step, controller.decide(view), prefilling)
        self._preempted = len(step.preempted)

    def _follow(self, step: Step, decision: Decision, prefilling: int) -> None:
        step.mode, step.k, step.n_limit = decision.mode, decision.k, decision.n_limit
        candidates = self.running
        if decision.phase == "prefill":
            candidates = candidates[self._state.partial[candidates]] if prefilling else NO_ROWS
        elif decision.phase == "decode" and prefilling:
            candidates = candidates[~self._state.partial[candidates]]
        self._fill(step, candidates, admit=decision.phase != "decode", running_limit=decision.running_limit)

    def _may_decode(self, step: Step, controller: Controller) -> bool:
        """Ask the policy; True where the step is to hold the running requests, all of them decoding, and no other.

        Otherwise the answer is kept for the step that the ordinary way will make at this very moment.
        """
        decision = self._decided or controller.decide(self._view(step, controller))
        if decision.phase == "prefill" or (decision.phase == "mixed" and self._admissible(decision.running_limit)):
            self._decided = decision
            return False
        self._decided, self._preempted = None, 0
        step.mode, step.k, step.n_limit = decision.mode, decision.k, decision.n_limit
        return True

    @property
    def generates(self) -> bool:
        """Whether a running request with its prompt computed has tokens left to schedule."""
        state, running = self._state, self.running
        if not len(running):
            return False
        first = running[0]  # nearly always tells
        if not state.partial[first] and state.computed[first] < state.last[first]:
            return True
        return bool(((state.computed[running] < state.last[running]) & ~state.partial[running]).any())

    def _view(self, step: Step, controller: Controller) -> View:
        prefilling = self._prefilling
        return View(
            now_s=step.scheduled_ns / NS_PER_S,
            step_id=self._steps,
            decoding=len(self.running) - prefilling,
            prefilling=prefilling,
            waiting=len(self.waiting),
            free_blocks=self._kv.free,
            preempted=self._preempted,
            last_tokens_out=not self.generates,
            oldest_wait_s=self._order_queue(step.scheduled_ns, controller) if controller.orders_queue else 0.0,
        )

    def _order_queue(self, now_ns: int, controller: Controller) -> float:
        """Let the policy order the queue when it is due; returns how long the oldest punctual request has waited."""
        now_s = now_ns / NS_PER_S
        if controller.queue.due(now_s):
            rows = np.fromiter(self.waiting, np.int64, len(self.waiting))
            fresh = self._state.scheduled_ns[rows] == UNSET
            started, rows = rows[~fresh], rows[fresh]
            seen_s = (self._seen_ns[rows] / NS_PER_S).tolist()
            places = controller.queue_order(now_s, seen_s, self._state.prompt[rows].tolist())
            self.waiting = deque([*started.tolist(), *rows[places].tolist()])
        return controller.queue.oldest_wait_s(now_s)

    def _note_admission(self, row: int, cached_tokens: int, now_ns: int) -> None:
        first = self._state.scheduled_ns[row] == UNSET
        super()._note_admission(row, cached_tokens, now_ns)
        if self._controller is None:
            return
        if first:
            self._controller.on_prompt(int(self._state.prompt[row]), cached_tokens)
        else:
            self._controller.on_resume()
