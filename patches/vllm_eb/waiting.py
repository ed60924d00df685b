"""vLLM's queue of waiting requests, put into the order that a policy asks for."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

from vllm_eb.controller import Controller
from vllm_eb.queueing import Waited

SHORT = 32  # requests


class WaitingOrder:
    """Keeps the arrival times of requests, and orders those that were never started by the controller's rule.

    Preempted requests stay in front. All times in seconds of the scheduler's clock. Overdue requests stand together in
    the queue and keep their order, so an ordering takes only the others out of it: under overload thousands are overdue
    and some dozens are not. Of these, the queue mostly loses some at its front and gets new ones at its end between two
    orderings: then the lists of the last ordering are cut and extended instead of made anew.
    """

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self.arrived_s: dict[str, float] = {}
        self._ordered: list[Any] = []  # the requests of the last ordering that were not overdue, if all were fresh
        self._admitted = 0  # of these, from the first on
        self._seen_s: list[float] = []  # their arrival times
        self._prompt_tokens: list[int] = []
        self._last_overdue: Any = None  # the last of the overdue requests in the queue; None if there are none
        self._overdue_until_s = -math.inf  # its arrival
        self._turn: Any = None  # the overdue request that the last ordering put before all others

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
        if request is self._turn:
            self._turn = None
        elif self._admitted < len(self._ordered) and self._ordered[self._admitted] is request:
            self._admitted += 1
        else:
            self._ordered, self._admitted = [], 0

    def forget(self) -> None:
        """Forget the queue of the last ordering: one of its requests has changed."""
        self._ordered, self._admitted = [], 0
        self._last_overdue, self._turn = None, None

    def order(self, waiting: deque[Any], now_s: float) -> float:
        """Order the queue if due; returns the waiting time (s) of the oldest request that can meet its target."""
        queue = self._controller.queue
        if queue.due(now_s):
            if not waiting:
                self.forget()
                queue.emptied(now_s)
            elif not self._stands(waiting, now_s):
                self._reorder(waiting, now_s)
        return queue.oldest_wait_s(now_s)

    def _stands(self, waiting: deque[Any], now_s: float) -> bool:
        """Whether the queue is short and certainly needs no other order, which costs less to find out than an order."""
        if len(waiting) > SHORT or self._last_overdue is not None:
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

    def _reorder(self, waiting: deque[Any], now_s: float) -> None:
        """Order the requests that are not overdue; meanwhile ``waiting`` holds the overdue ones alone."""
        started, fresh = self._read(self._take_out(waiting))
        oldest = Waited(self.arrived_s[waiting[0].request_id], waiting[0].num_prompt_tokens) if waiting else None
        places = self._controller.queue_order(now_s, self._seen_s, self._prompt_tokens, oldest)
        waiting.extend(map(fresh.__getitem__, places.overdue))
        self._turn = waiting.popleft() if places.oldest_first else None
        self._last_overdue = waiting[-1] if waiting else self._turn
        if self._last_overdue is not None:
            self._overdue_until_s = self.arrived_s[self._last_overdue.request_id]
        first, rest = list(map(fresh.__getitem__, places.first)), list(map(fresh.__getitem__, places.rest))
        waiting.extend(rest)
        front = [*started, *first] if self._turn is None else [*started, self._turn, *first]
        waiting.extendleft(reversed(front))
        ordered = [*places.first, *places.rest]
        self._ordered, self._admitted = [] if started else first + rest, 0
        self._seen_s = list(map(self._seen_s.__getitem__, ordered))
        self._prompt_tokens = list(map(self._prompt_tokens.__getitem__, ordered))

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

    def _read(self, queued: list[Any]) -> tuple[list[Any], list[Any]]:
        """Started and fresh requests in queue order; updates the lists of the fresh ones."""
        known = self._ordered[self._admitted :]
        further = queued[len(known) :]
        if known and queued[: len(known)] == known and all(map(self._is_fresh, further)):
            self._seen_s = self._seen_s[self._admitted :]
            self._prompt_tokens = self._prompt_tokens[self._admitted :]
            started, fresh = [], queued
        else:
            fresh = further = list(filter(self._is_fresh, queued))
            started = [] if len(fresh) == len(queued) else [r for r in queued if not self._is_fresh(r)]
            self._seen_s, self._prompt_tokens = [], []
        self._seen_s += [self.arrived_s[request.request_id] for request in further]
        self._prompt_tokens += [request.num_prompt_tokens for request in further]
        return started, fresh

    def _is_fresh(self, request: Any) -> bool:
        return not request.num_preemptions and request.request_id in self.arrived_s

    def _is_overdue(self, request: Any) -> bool:
        """Whether the last ordering found so old a request overdue."""
        seen_s = self.arrived_s.get(request.request_id, math.inf)
        return seen_s <= self._overdue_until_s and not request.num_preemptions
