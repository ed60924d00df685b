"""vLLM's queue of waiting requests, put into the order that a policy asks for."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_eb import compat
from vllm_eb.controller import Controller

SHORT = 32  # requests


class WaitingOrder:
    """Keeps the arrival times of requests, and orders those that were never started by the controller's rule.

    Preempted requests stay in front. All times in seconds of the scheduler's clock. Between two orderings the queue
    mostly loses requests at its front and gets new ones at its end: then the arrays of the last ordering are cut and
    extended instead of made anew.
    """

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self.arrived_s: dict[str, float] = {}
        self._fresh: list[Any] = []  # the queue as the last ordering left it, if it held only fresh requests
        self._admitted = 0  # of these, from the first on
        self._seen_s = np.zeros(0)  # their arrival times
        self._prompt_tokens = np.zeros(0, np.int64)

    def arrived(self, request_id: str, now_s: float) -> None:
        """Keep a request's arrival time."""
        if request_id in self.arrived_s:  # the next turn of a streaming session
            self.forget()
        self.arrived_s[request_id] = now_s

    def left(self, request_id: str) -> None:
        """Forget a request that ended."""
        self.arrived_s.pop(request_id, None)

    def admitted(self, request: Any) -> None:
        """Record that a request left the queue to run."""
        if self._admitted < len(self._fresh) and self._fresh[self._admitted] is request:
            self._admitted += 1
        else:
            self.forget()

    def forget(self) -> None:
        """Forget the queue of the last ordering: one of its requests has changed, or ran before its turn."""
        self._fresh, self._admitted = [], 0

    def order(self, waiting: Any, now_s: float) -> float:
        """Order the queue if due; returns the waiting time (s) of the oldest request that can meet its target."""
        queue = self._controller.queue
        if queue.due(now_s):
            if not waiting:
                self.forget()
                queue.emptied(now_s)
            elif not self._stands(waiting, now_s):
                self._reorder(waiting, now_s)
        return queue.oldest_wait_s(now_s)

    def _stands(self, waiting: Any, now_s: float) -> bool:
        """Whether the queue is short and certainly needs no other order, which costs less to find out than an order."""
        if len(waiting) > SHORT:
            return False
        prompt_tokens, oldest_s, last_s = 0, None, -math.inf
        for request in waiting:
            seen_s = self.arrived_s.get(request.request_id)
            if seen_s is None or seen_s < last_s or request.num_preemptions:
                return False
            if oldest_s is None:
                oldest_s = seen_s
            last_s = seen_s
            prompt_tokens += request.num_prompt_tokens
        return oldest_s is not None and self._controller.order_stands(now_s, oldest_s, len(waiting), prompt_tokens)

    def _reorder(self, waiting: Any, now_s: float) -> None:
        started, fresh = self._read(waiting)
        places = self._controller.queue_order(now_s, self._seen_s, self._prompt_tokens)
        ordered = list(map(fresh.__getitem__, places.tolist()))
        compat.reorder(waiting, [*started, *ordered] if started else ordered)
        self._fresh, self._admitted = [] if started else ordered, 0
        self._seen_s, self._prompt_tokens = self._seen_s[places], self._prompt_tokens[places]

    def _read(self, waiting: Any) -> tuple[list[Any], list[Any]]:
        """Started and fresh requests in queue order; updates the arrays of the fresh ones."""
        queued = list(waiting)
        known = self._fresh[self._admitted :]
        further = queued[len(known) :]
        if known and queued[: len(known)] == known and all(map(self._is_fresh, further)):
            self._seen_s = self._seen_s[self._admitted :]
            self._prompt_tokens = self._prompt_tokens[self._admitted :]
            if further:
                seen_s, prompt_tokens = self._arrays(further)
                self._seen_s = np.concatenate((self._seen_s, seen_s))
                self._prompt_tokens = np.concatenate((self._prompt_tokens, prompt_tokens))
            return [], queued
        fresh = list(filter(self._is_fresh, queued))
        self._seen_s, self._prompt_tokens = self._arrays(fresh)
        if len(fresh) == len(queued):
            return [], fresh
        return [request for request in queued if not self._is_fresh(request)], fresh

    def _is_fresh(self, request: Any) -> bool:
        return not request.num_preemptions and request.request_id in self.arrived_s

    def _arrays(self, requests: list[Any]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        seen_s = np.array([self.arrived_s[request.request_id] for request in requests], np.float64)
        return seen_s, np.array([request.num_prompt_tokens for request in requests], np.int64)
