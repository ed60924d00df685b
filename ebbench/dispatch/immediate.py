"""Immediate dispatch: send each request when it arrives, to a unit chosen by one of several rules."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from ebbench.dispatch.algorithms import AdaptiveInterval, DecodeLoad, allocate_decode
from ebbench.dispatch.base import Dispatcher, DispatchRequest, EndForward, Fleet, Order, PrefixMemory, UnitState

Choose = Callable[[DispatchRequest, Sequence[UnitState]], UnitState]
"""Picks one of some units (never empty) for a request."""


class RoundRobin:
    """One unit after the other, independent of load."""

    def __init__(self) -> None:
        self._turn = 0

    def __call__(self, request: DispatchRequest, units: Sequence[UnitState]) -> UnitState:
        """The next unit in turn."""
        chosen = units[self._turn % len(units)]
        self._turn += 1
        return chosen


class LeastOutstanding:
    """The unit with the fewest open requests; ties are broken in turn."""

    def __init__(self) -> None:
        self._turn = 0

    def __call__(self, request: DispatchRequest, units: Sequence[UnitState]) -> UnitState:
        """The unit with the fewest open requests."""
        loads = [unit.open_requests for unit in units]
        fewest = min(loads)
        try:
            place = loads.index(fewest, self._turn)
        except ValueError:
            place = loads.index(fewest)
        self._turn = place + 1
        return units[place]


class PowerOfTwo:
    """The one of two random units with fewer open requests (Mitzenmacher 2001)."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def __call__(self, request: DispatchRequest, units: Sequence[UnitState]) -> UnitState:
        """The less loaded of two random units."""
        if len(units) == 1:
            return units[0]
        first = int(self._rng.integers(len(units)))
        second = int(self._rng.integers(len(units) - 1))
        second += second >= first
        left, right = units[first], units[second]
        return right if right.open_requests < left.open_requests else left


class PrefixAffine:
    """The unit that has most of the prompt in its prefix cache, unless the load would become unbalanced.

    A prefix counts if it covers at least half of the prompt. The load is unbalanced if the busiest unit has ``slack``
    more open requests than the least busy one and more than 1.5 times as many. The rule and its bounds are those of
    cache-aware routers such as SGLang's.
    """

    MIN_SHARE, MAX_RATIO = 0.5, 1.5

    def __init__(self, memory: PrefixMemory, slack: int = 32) -> None:
        self._memory, self._slack, self._balance = memory, slack, LeastOutstanding()

    def __call__(self, request: DispatchRequest, units: Sequence[UnitState]) -> UnitState:
        """The unit with the longest cached prefix, else the least loaded unit."""
        loads = [unit.open_requests for unit in units]
        most, fewest = max(loads), min(loads)
        if not request.prefix or (most - fewest > self._slack and most > self.MAX_RATIO * fewest):
            return self._balance(request, units)
        hits = [self._memory.hit_tokens(request, unit.index) for unit in units]
        best = max(hits)
        if best < self.MIN_SHARE * request.tokens:
            return self._balance(request, units)
        return self._balance(request, [unit for unit, hit in zip(units, hits, strict=True) if hit == best])


class UntimedDispatcher(Dispatcher):
    """Places all waiting requests as soon as an instance is active, unless a subclass holds them back."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet)
        self._held: dict[int, DispatchRequest] = {}

    @abstractmethod
    def _place(self, requests: Sequence[DispatchRequest]) -> list[Order]:
        """Assign each of ``requests`` to a unit of the fleet and return the orders."""

    @property
    def waiting(self) -> int:
        """Number of requests held back."""
        return len(self._held)

    def arrive(self, request: DispatchRequest, now_ns: int) -> None:
        """See Dispatcher."""
        self._held[request.key] = request

    def poll(self, now_ns: int) -> list[Order]:
        """See Dispatcher."""
        if not self._held or not self.fleet.candidates:
            return []
        orders = self._place(list(self._held.values()))
        self._held.clear()
        return orders

    def withdraw(self, key: int) -> None:
        """See Dispatcher."""
        self._held.pop(key, None)


class ImmediateDispatcher(UntimedDispatcher):
    """Sends requests one by one, each to the unit that ``choose`` picks."""

    def __init__(self, fleet: Fleet, choose: Choose, *, wants_prefix: bool = False) -> None:
        super().__init__(fleet)
        self.choose, self.wants_prefix = choose, wants_prefix

    def _place(self, requests: Sequence[DispatchRequest]) -> list[Order]:
        orders = []
        for request in requests:
            unit = self.choose(request, self.fleet.candidates)
            self.fleet.send(request, unit)
            orders.append(Order(request.key, unit.index))
        return orders


class DecodeDispatcher(UntimedDispatcher):
    """Algorithm 3 of Tian et al.: the requests of a window together, longest first, each to the least (B, K) of the
    units whose KV is no outlier.

    A window is an interval of Algorithm 1 after the last placement; without ``window`` (ours) each request is placed as
    it arrives.
    """

    wants_signals = True

    def __init__(
        self, fleet: Fleet, interval: AdaptiveInterval, *, multiplier: float = 1.5, window: bool = True
    ) -> None:
        super().__init__(fleet)
        self._interval, self._multiplier, self._window = interval, multiplier, window
        self._last_ns: int | None = None

    def _due_ns(self) -> int:
        return 0 if self._last_ns is None or not self._window else self._last_ns + self._interval.interval_ns

    def poll(self, now_ns: int) -> list[Order]:
        """See Dispatcher."""
        if now_ns < self._due_ns():
            return []
        orders = super().poll(now_ns)
        if orders:
            self._last_ns = now_ns
        return orders

    def next_ns(self, now_ns: int) -> int | None:
        """The end of the window, while requests wait for it (ns)."""
        due_ns = self._due_ns()
        return due_ns if self._held and self.fleet.candidates and due_ns > now_ns else None

    def end_forward(self, signal: EndForward, now_ns: int) -> None:
        """See Dispatcher."""
        super().end_forward(signal, now_ns)
        self._interval.end_forward(signal.duration_ns)

    def topology(self, active: Iterable[int], now_ns: int) -> None:
        """See Dispatcher."""
        super().topology(active, now_ns)
        self._interval.topology(len(self.fleet.active))

    def _place(self, requests: Sequence[DispatchRequest]) -> list[Order]:
        loads = {unit.index: DecodeLoad(unit.open_requests, unit.kv_tokens) for unit in self.fleet.candidates}
        placed = allocate_decode(requests, loads, self._multiplier)
        for request, unit in placed:
            self.fleet.send(request, self.fleet.units[unit])
        return [Order(request.key, unit) for request, unit in placed]
