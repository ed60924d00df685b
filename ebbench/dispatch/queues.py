"""Queue of requests held back: those left from earlier cycles before new ones, longest first within each group."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

from ebbench.dispatch.base import DispatchRequest

MAX_STALE_ENTRIES = 64
"""Heap entries of removed requests at which the heap is rebuilt."""


class QueuedRequest(NamedTuple):
    """A request queued at ``since_ns``; ``rank`` and ``order`` define the order."""

    rank: int
    order: int
    request: DispatchRequest
    since_ns: int = 0


class CycleQueue:
    """A queue in the order of Algorithm 2 with O(log n) per request.

    ``longest_first`` False keeps the order of arrival. The earlier of two equally long requests goes first. Not in the
    paper: a request left over in ``aged_cycles`` cycles goes before all others, longest waiting first; otherwise a
    stream of long requests would starve the short ones.
    """

    def __init__(self, *, longest_first: bool, aged_cycles: int | None = None) -> None:
        self._longest_first, self._aged_cycles = longest_first, aged_cycles
        self._order = 0
        self._cycle = 0
        self._pending: list[QueuedRequest] = []  # a heap, like the next list
        self._new: list[QueuedRequest] = []
        self._held: OrderedDict[int, QueuedRequest] = OrderedDict()  # the oldest entry is found in O(1)
        self.tokens = 0  # prompt tokens of all requests held
        # Pending requests, oldest first, with the number of the cycle before the first one they missed.
        self._joined: OrderedDict[int, int] = OrderedDict()
        self._tried: set[int] = set()  # requests tried in this cycle

    def __len__(self) -> int:
        return len(self._held)

    def add(self, request: DispatchRequest, now_ns: int = 0) -> None:
        """Add a request that no cycle has tried yet."""
        self._order += 1
        held = QueuedRequest(-request.tokens if self._longest_first else 0, self._order, request, now_ns)
        self._held[request.key] = held
        self.tokens += request.tokens
        heapq.heappush(self._new, held)

    def pop(self) -> QueuedRequest:
        """Remove and return the next request. Raises IndexError if the queue is empty."""
        aged = self._oldest_aged()
        if aged is not None:
            return self._remove(aged)
        for heap in (self._pending, self._new):
            while heap:
                held = heapq.heappop(heap)
                if self._held.get(held.request.key) is held:  # otherwise it was withdrawn
                    self._remove(held.request.key)
                    return held
        raise IndexError("the queue is empty")

    def oldest(self, count: int) -> list[QueuedRequest]:
        """The first ``count`` requests in order of arrival; they stay in the queue."""
        return list(islice(self._held.values(), count))

    def drain(self) -> list[DispatchRequest]:
        """Remove and return all requests, in order of arrival."""
        requests = [held.request for held in self._held.values()]
        self._held.clear()
        self._new.clear()
        self._pending.clear()
        self._joined.clear()
        self.tokens = 0
        return requests

    def put_back(self, popped: Iterable[QueuedRequest]) -> None:
        """Put back requests that were popped and fit nowhere; they count as pending."""
        for held in popped:
            self._tried.add(held.request.key)
            self._held[held.request.key] = held
            self.tokens += held.request.tokens
            heapq.heappush(self._new, held)

    def withdraw(self, key: int) -> None:
        """Remove a request."""
        if key in self._held:
            self._remove(key)

    def end_cycle(self, *, count: bool) -> None:
        """Mark all remaining requests as pending; ``count`` counts the cycle against their limit."""
        self._cycle += count
        for held in self._new:
            key = held.request.key
            if self._held.get(key) is held:
                heapq.heappush(self._pending, held)
                self._joined.setdefault(key, self._cycle - count)
        self._new = []
        if len(self._pending) > 2 * len(self._held) + MAX_STALE_ENTRIES:  # most of it was withdrawn
            self._pending = [held for held in self._pending if self._held.get(held.request.key) is held]
            heapq.heapify(self._pending)
        self._tried.clear()
        self._drop_withdrawn()

    def overdue(self, limit: int | None) -> list[DispatchRequest]:
        """Remove and return requests left over in more than ``limit`` cycles."""
        found: list[DispatchRequest] = []
        while limit is not None and self._joined:
            key, joined = next(iter(self._joined.items()))
            if self._cycle - joined <= limit:
                break
            found.append(self._remove(key).request)
            self._drop_withdrawn()
        return found

    def _oldest_aged(self) -> int | None:
        """The longest waiting request if it is aged and was not tried in this cycle."""
        if self._aged_cycles is None:
            return None
        for key, joined in self._joined.items():
            if self._cycle - joined < self._aged_cycles:
                return None
            if key in self._held and key not in self._tried:
                return key
        return None

    def _remove(self, key: int) -> QueuedRequest:
        held = self._held.pop(key)
        self.tokens -= held.request.tokens
        return held

    def _drop_withdrawn(self) -> None:
        while self._joined:
            oldest = next(iter(self._joined))
            if oldest in self._held:
                break
            del self._joined[oldest]
