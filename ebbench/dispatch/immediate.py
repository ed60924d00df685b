"""Immediate dispatch: a request goes out the moment it arrives. What differs is the choice of the unit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from ebbench.dispatch.base import Ask, EndForward, Order
from ebbench.dispatch.fleet import Fleet, Unit
from ebbench.dispatch.prefix import PrefixMemory


class Choose(Protocol):
    """Picks one of ``units`` (never empty) for ``ask``."""

    def __call__(self, ask: Ask, units: Sequence[Unit]) -> Unit:
        """The unit."""
        ...


class RoundRobin:
    """One after the other, whatever they have to do."""

    def __init__(self) -> None:
        self._turn = 0

    def __call__(self, ask: Ask, units: Sequence[Unit]) -> Unit:
        """The next unit in turn."""
        chosen = units[self._turn % len(units)]
        self._turn += 1
        return chosen


class LeastOutstanding:
    """The unit with the fewest open requests; among equals they take turns."""

    def __init__(self) -> None:
        self._turn = 0

    def __call__(self, ask: Ask, units: Sequence[Unit]) -> Unit:
        """The least loaded unit."""
        loads = [unit.open_requests for unit in units]
        fewest = min(loads)
        try:
            place = loads.index(fewest, self._turn)
        except ValueError:
            place = loads.index(fewest)
        self._turn = place + 1
        return units[place]


class PowerOfTwo:
    """Two units at random, the one with fewer open requests of them (Mitzenmacher 2001)."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def __call__(self, ask: Ask, units: Sequence[Unit]) -> Unit:
        """The better of two."""
        if len(units) == 1:
            return units[0]
        first = int(self._rng.integers(len(units)))
        second = int(self._rng.integers(len(units) - 1))
        second += second >= first
        left, right = units[first], units[second]
        return right if right.open_requests < left.open_requests else left


class PrefixAffine:
    """The unit that holds most of the prompt, unless that would leave the load lopsided.

    A hit counts from half of the prompt on. The load is lopsided when the busiest unit has ``slack`` more open requests
    than the idlest and more than 1.5 times as many. The rule and its bounds are those of cache-aware routers
    (SGLang's, for one).
    """

    MIN_SHARE, MAX_RATIO = 0.5, 1.5

    def __init__(self, memory: PrefixMemory, slack: int = 32) -> None:
        self._memory, self._slack, self._balance = memory, slack, LeastOutstanding()

    def __call__(self, ask: Ask, units: Sequence[Unit]) -> Unit:
        """The best holder, else the least loaded unit."""
        loads = [unit.open_requests for unit in units]
        most, fewest = max(loads), min(loads)
        if not ask.prefix or (most - fewest > self._slack and most > self.MAX_RATIO * fewest):
            return self._balance(ask, units)
        hits = [self._memory.hit_tokens(ask, unit.index) for unit in units]
        best = max(hits)
        if best < self.MIN_SHARE * ask.tokens:
            return self._balance(ask, units)
        return self._balance(ask, [unit for unit, hit in zip(units, hits, strict=True) if hit == best])


class UntimedDispatcher(ABC):
    """Places everyone who waits as soon as an instance is active; without one, requests wait."""

    wants_prefix = False
    wants_signals = False
    wants_units = False

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self._held: dict[int, Ask] = {}

    @abstractmethod
    def _place(self, asks: Sequence[Ask]) -> list[Order]:
        """Send each of ``asks`` to a unit of the fleet."""

    @property
    def waiting(self) -> int:
        """Requests held back, which happens only while no instance is active."""
        return len(self._held)

    def arrive(self, ask: Ask, now_ns: int) -> None:
        """See Dispatcher."""
        self._held[ask.key] = ask

    def poll(self, now_ns: int) -> list[Order]:
        """See Dispatcher."""
        if not self._held or not self.fleet.candidates:
            return []
        orders = self._place(list(self._held.values()))
        self._held.clear()
        return orders

    def next_ns(self, now_ns: int) -> int | None:
        """Nothing is ever timed."""
        return None

    def end_forward(self, signal: EndForward, now_ns: int) -> None:
        """See Dispatcher."""
        self.fleet.report(signal)

    def prefilled(self, key: int, now_ns: int) -> None:
        """See Dispatcher."""
        self.fleet.prefilled(key)

    def ended(self, key: int, now_ns: int) -> None:
        """See Dispatcher."""
        self.fleet.ended(key)

    def withdraw(self, key: int) -> None:
        """See Dispatcher."""
        self._held.pop(key, None)

    def topology(self, active: Iterable[int], now_ns: int) -> None:
        """See Dispatcher."""
        self.fleet.set_active(active)


class ImmediateDispatcher(UntimedDispatcher):
    """Sends one request after the other, each to the unit ``choose`` picks."""

    def __init__(self, fleet: Fleet, choose: Choose, *, wants_prefix: bool = False) -> None:
        super().__init__(fleet)
        self.choose, self.wants_prefix = choose, wants_prefix

    def _place(self, asks: Sequence[Ask]) -> list[Order]:
        orders = []
        for ask in asks:
            unit = self.choose(ask, self.fleet.candidates)
            self.fleet.send(ask, unit)
            orders.append(Order(ask.key, unit.index))
        return orders
