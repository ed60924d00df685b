"""vLLM's queue of waiting requests, put into the order that a policy asks for."""

from __future__ import annotations

import math
from collections import deque
from itertools import takewhile
from operator import gt
from typing import Any

from vllm_eb.controller import Controller
from vllm_eb.queueing import Waited

SHORT = 32  # requests


class WaitingOrder:
    """Keeps the arrival times of requests, and orders those that were never started by the controller's rule.

    Preempted requests stay in front. All times in seconds of the scheduler's clock. Overdue requests stand together in
    the queue and keep their order, so an ordering reads only the others: under overload thousands are overdue and some
    dozens are not. Most steps admit nothing, so an ordering changes only lists of these others, and :meth:`arrange` the
    queue itself. The queue mostly loses requests at its front and gets new ones at its end: then the lists are cut and
    extended. After any other change the next ordering reads the queue anew.
    """

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
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
        self.arrange(waiting)
        self._known, self._last_overdue, self._turn = False, None, None

    def order(self, waiting: deque[Any], now_s: float) -> float:
        """Find a new order if due; returns the waiting time (s) of the oldest request that can meet its target."""
        queue = self._controller.queue
        if queue.due(now_s):
            if not waiting:
                self._empty()
                queue.emptied(now_s)
            elif not self._is_known(waiting):
                self._order_anew(waiting, now_s)
            elif not self._stands(now_s):
                self._reorder(now_s)
        return queue.oldest_wait_s(now_s)

    def arrange(self, waiting: deque[Any]) -> None:
        """Put the queue into the order last found. Call it before a step that may admit requests."""
        if self._first is None:
            return
        queued, started = self._take_out(waiting), []
        first, late, rest = self._others[: self._first], self._late, self._others[self._first :]
        if {*first, *late, *rest}.symmetric_difference(queued):
            self._known = False
            present, ordered = set(queued), {*late, *self._others[: self._ordered]}
            first, late, rest = ([one for one in part if one in present] for part in (first, late, rest))
            rest = [one for one in rest if one in ordered]
            started = list(takewhile(lambda one: one not in ordered, queued))
            rest += [one for one in queued[len(started) :] if one not in ordered]
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

    def _empty(self) -> None:
        self._others, self._seen_s, self._prompt_tokens, self._admitted, self._known = [], [], [], 0, True
        self._overdue, self._last_overdue, self._turn = 0, None, None
        self._first, self._late, self._oldest, self._oldest_first = None, [], None, False

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

    def _stands(self, now_s: float) -> bool:
        """Cheap check that a short queue in arrival order needs no reordering."""
        seen_s = self._seen_s
        if not seen_s or len(seen_s) > SHORT or self._overdue or self._late or any(map(gt, seen_s, seen_s[1:])):
            return False
        return self._controller.order_stands(now_s, seen_s[0], len(seen_s), sum(self._prompt_tokens))

    def _reorder(self, now_s: float) -> None:
        """Order the requests that are not overdue."""
        others, seen_s, prompt_tokens = self._others, self._seen_s, self._prompt_tokens
        places = self._controller.queue_order(now_s, seen_s, prompt_tokens, self._oldest)
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
        self.arrange(waiting)
        queued = self._take_out(waiting)
        started = [one for one in queued if not self._is_fresh(one)]
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
