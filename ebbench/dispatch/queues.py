"""Requests held back: those left over from earlier cycles before the new ones, longest first within each."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

from ebbench.dispatch.base import DispatchRequest

SLACK = 64
"""Entries of requests that are gone and may stay in the heap before it is cleared."""


class Held(NamedTuple):
    """A request in the queue since ``since_ns``; ``rank`` and ``order`` sort it."""

    rank: int
    order: int
    request: DispatchRequest
    since_ns: int = 0


class CycleQueue:
    """A queue in the order of Algorithm 2 that costs O(log n) per request, however many are waiting.

    ``longest_first`` off keeps the order of arrival. Among equally long requests the earlier goes first. Not in the
    paper: a request left over in ``aged_cycles`` cycles goes before all others, the longest waiting first; else short
    ones would starve behind the long ones that keep coming.
    """

    def __init__(self, *, longest_first: bool, aged_cycles: int | None = None) -> None:
        self._longest_first, self._aged_cycles = longest_first, aged_cycles
        self._order = 0
        self._cycle = 0
        self._pending: list[Held] = []  # a heap, as the next
        self._new: list[Held] = []
        self._held: OrderedDict[int, Held] = OrderedDict()  # whose oldest costs nothing to find, unlike a dict's
        self.tokens = 0  # prompt tokens of all that is held
        # Pending requests, oldest first, with the cycle before the first one they missed.
        self._joined: OrderedDict[int, int] = OrderedDict()
        self._passed_over: set[int] = set()  # in this cycle

    def __len__(self) -> int:
        return len(self._held)

    def add(self, request: DispatchRequest, now_ns: int = 0) -> None:
        """A request that no cycle has seen yet."""
        self._order += 1
        held = Held(-request.tokens if self._longest_first else 0, self._order, request, now_ns)
        self._held[request.key] = held
        self.tokens += request.tokens
        heapq.heappush(self._new, held)

    def pop(self) -> Held:
        """Remove and return the next one in order. Raises IndexError when empty."""
        aged = self._oldest_aged()
        if aged is not None:
            return self._remove(aged)
        for heap in (self._pending, self._new):
            while heap:
                held = heapq.heappop(heap)
                if self._held.get(held.request.key) is held:  # else it was withdrawn
                    self._remove(held.request.key)
                    return held
        raise IndexError("the queue is empty")

    def oldest(self, count: int) -> list[Held]:
        """Those that came first, in order of arrival. They stay, unless :meth:`withdraw` takes them out."""
        return list(islice(self._held.values(), count))

    def drain(self) -> list[DispatchRequest]:
        """Remove and return all, in order of arrival."""
        requests = [held.request for held in self._held.values()]
        self._held.clear()
        self._new.clear()
        self._pending.clear()
        self._joined.clear()
        self.tokens = 0
        return requests

    def leave_over(self, popped: Iterable[Held]) -> None:
        """Requests that were popped and found no place are new no more."""
        for held in popped:
            self._passed_over.add(held.request.key)
            self._held[held.request.key] = held
            self.tokens += held.request.tokens
            heapq.heappush(self._new, held)

    def withdraw(self, key: int) -> None:
        """Forget a request."""
        if key in self._held:
            self._remove(key)

    def end_cycle(self, *, count: bool) -> None:
        """What is left becomes pending; with ``count`` the cycle counts against the limit of every request left."""
        self._cycle += count
        for held in self._new:
            key = held.request.key
            if self._held.get(key) is held:
                heapq.heappush(self._pending, held)
                self._joined.setdefault(key, self._cycle - count)
        self._new = []
        if len(self._pending) > 2 * len(self._held) + SLACK:  # most of it was withdrawn
            self._pending = [held for held in self._pending if self._held.get(held.request.key) is held]
            heapq.heapify(self._pending)
        self._passed_over.clear()
        self._forget_gone()

    def overdue(self, limit: int | None) -> list[DispatchRequest]:
        """Remove and return the requests left over in more than ``limit`` cycles."""
        found: list[DispatchRequest] = []
        while limit is not None and self._joined:
            key, joined = next(iter(self._joined.items()))
            if self._cycle - joined <= limit:
                break
            found.append(self._remove(key).request)
            self._forget_gone()
        return found

    def _oldest_aged(self) -> int | None:
        """The longest waiting request if it is aged and this cycle has not tried it yet."""
        if self._aged_cycles is None:
            return None
        for key, joined in self._joined.items():
            if self._cycle - joined < self._aged_cycles:
                return None
            if key in self._held and key not in self._passed_over:
                return key
        return None

    def _remove(self, key: int) -> Held:
        held = self._held.pop(key)
        self.tokens -= held.request.tokens
        return held

    def _forget_gone(self) -> None:
        while self._joined:
            oldest = next(iter(self._joined))
            if oldest in self._held:
                break
            del self._joined[oldest]
