"""Staggered batch scheduling: hold requests back until an instance can start on them (Tian et al. 2025, section 4).

One cycle: the interval of Algorithm 1 has passed since the last dispatch *and* an instance is ready; then what has
gathered goes to the DP units of that one instance by Algorithm 2. Instances take turns; one that is not ready loses its
turn to the next that is.

Not in the paper: where waiting for the interval gains nothing it is left out (``bypass``, see
:mod:`ebbench.dispatch.foresight`), and a prompt that fits into a chunk goes only where it fits (``overdraw`` off).
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Literal

from ebbench.dispatch.allocate import ChunkPacking, no_hit
from ebbench.dispatch.base import Ask, EndForward, Order
from ebbench.dispatch.fleet import Fleet, Unit
from ebbench.dispatch.foresight import ArrivalRate, GoingOn
from ebbench.dispatch.interval import AdaptiveInterval
from ebbench.dispatch.queues import CycleQueue, Held
from ebbench.dispatch.readiness import Checks, Readiness

Overdraw = Literal["on", "off", "auto"]

BACKLOG_BATCHES = 2.0
"""With so many full batches waiting, filling every chunk matters more than leaving no remainders (overdraw auto)."""
MISFITS = 32
"""A cycle ends when so many requests have found no place; the rest is taken to find none either."""


@dataclass(frozen=True)
class StaggeredSettings:
    """Every part can be switched off by itself.

    ``adaptive``: Algorithm 1's interval; off: ``default_forward_ns`` stands for the mean forward time for good.
    ``interval``: wait for the interval at all. ``packing``: Algorithm 2; off: in order of arrival, units in turn, while
    the instance has capacity. ``cache_aware``: count uncached tokens only. ``cycle_limit``: refuse a request that was
    left over in more cycles (None: never). ``chunk_tokens``: prompt tokens a unit computes in one pass.
    """

    chunk_tokens: int
    window: int = 100
    network_ns: int = 0
    default_forward_ns: int = 50_000_000
    adaptive: bool = True
    interval: bool = True
    packing: bool = True
    overdraw: Overdraw = "auto"
    cache_aware: bool = False
    bypass: bool = True
    lookahead: float = 0.75
    aged_cycles: int | None = 4
    cycle_limit: int | None = None
    checks: Checks = field(default_factory=Checks)


class StaggeredDispatcher:
    """The schedule loop: Algorithms 1 and 2 with the three-way readiness check."""

    wants_signals = True

    def __init__(self, fleet: Fleet, settings: StaggeredSettings) -> None:
        self.fleet, self.settings = fleet, settings
        self.wants_prefix = settings.cache_aware
        self.interval = AdaptiveInterval(
            settings.window, settings.network_ns, settings.default_forward_ns, len(fleet.active)
        )
        self._ready = Readiness(len(fleet.instances), settings.checks)
        self._queue = CycleQueue(longest_first=settings.packing, aged_cycles=settings.aged_cycles)
        self._arrivals = ArrivalRate()
        self._going_on = GoingOn(settings.network_ns, settings.lookahead)
        self._last_ns: int | None = None
        self._counted_ns: int | None = None
        self._turn = 0
        self._next_unit = 0
        self._full: set[int] = set()  # instances without capacity, until something happens there

    @property
    def waiting(self) -> int:
        """Requests held back."""
        return len(self._queue)

    def arrive(self, ask: Ask, now_ns: int) -> None:
        """See Dispatcher."""
        self._queue.add(ask)
        self._arrivals.note(now_ns)

    def end_forward(self, signal: EndForward, now_ns: int) -> None:
        """The fast path: acknowledge, measure, mark ready."""
        self.fleet.report(signal)
        if self.settings.adaptive:
            self.interval.end_forward(signal.duration_ns)
        self._ready.free(signal.instance)
        self._full.discard(signal.instance)
        if not signal.goes_on:
            self._going_on.forget(signal.instance)
            return
        self._going_on.signalled(signal.instance, signal.generates, self.interval.mean_ns, now_ns)
        if not self._going_on.in_time:
            self._ready.dispatched(signal.instance, now_ns)
            self.fleet.begin_pass(signal.instance, self.settings.chunk_tokens)

    def prefilled(self, key: int, now_ns: int) -> None:
        """See Dispatcher."""
        self._changed(self.fleet.prefilled(key))

    def ended(self, key: int, now_ns: int) -> None:
        """See Dispatcher."""
        self._changed(self.fleet.ended(key))

    def withdraw(self, key: int) -> None:
        """See Dispatcher."""
        self._queue.withdraw(key)

    def topology(self, active: Iterable[int], now_ns: int) -> None:
        """OnTopologyChange; an instance that comes back is taken to be free."""
        before = self.fleet.active
        self.fleet.set_active(active)
        for instance in self.fleet.active - before:
            self._reset(instance)
        self.interval.topology(len(self.fleet.active))

    def poll(self, now_ns: int) -> list[Order]:
        """Carry out every cycle that is due."""
        orders = self._cycles(now_ns) if self._queue else []
        if self._going_on.in_time:
            for instance in self._going_on.open_to(now_ns):
                self._ready.dispatched(instance, now_ns)
            self._going_on.end_of_moment()
        return orders

    def _cycles(self, now_ns: int) -> list[Order]:
        for instance in self._ready.expired(self.interval.mean_ns, now_ns):
            self._reset(instance)
        orders: list[Order] = []
        able = self._able(now_ns)
        cycle = bool(able)
        while self._queue and (open_to := able - self._full):
            orders += self._cycle(min(open_to, key=self._by_turn), now_ns)
            able = self._able(now_ns)
        return orders + self._leave_over(now_ns) if cycle and self._queue else orders

    def next_ns(self, now_ns: int) -> int | None:
        """The end of the interval, else the first watchdog."""
        if not self._queue or not self.fleet.active:
            return None
        due_ns = self._due_ns()
        if due_ns > now_ns and not self.settings.bypass:
            return due_ns
        expiry_ns = self._ready.next_expiry_ns(self.interval.mean_ns)
        opens_ns = self._going_on.next_ns(now_ns)
        return min((t for t in (due_ns, expiry_ns, opens_ns) if t is not None and t > now_ns), default=None)

    @property
    def watchdog_resets(self) -> int:
        """How often an instance was silent for too long."""
        return self._ready.resets

    def _changed(self, unit: Unit | None) -> None:
        if unit is not None:
            self._full.discard(unit.instance)

    def _reset(self, instance: int) -> None:
        """Take the instance as free, with nothing queued."""
        self._ready.free(instance)
        self._going_on.forget(instance)
        self.fleet.forget_backlog(instance)
        self._full.discard(instance)

    def _due_ns(self) -> int:
        if self._last_ns is None or not self.settings.interval:
            return 0
        return self._last_ns + self.interval.interval_ns

    def _able(self, now_ns: int) -> AbstractSet[int]:
        """Instances a batch may go to now, whether or not they have capacity."""
        active = self.fleet.active
        idle = self.fleet.idle & active
        going_on = self._going_on.open_to(now_ns) & active
        if self._going_on.in_time:
            going_on = going_on - self.fleet.above_mean(going_on & self._going_on.generating)
        if now_ns >= self._due_ns():
            return self._ready.ready(active, idle) | going_on
        if not self.settings.bypass:
            return set()
        return going_on | idle if self._waiting_is_vain(now_ns) else going_on

    def _waiting_is_vain(self, now_ns: int) -> bool:
        """Whether the interval would bring an idle instance nothing: a full batch is there, or hardly anyone comes."""
        return self._full_batches() >= 1 or self._arrivals.light(self.interval.interval_ns, now_ns)

    def _full_batches(self) -> float:
        """How often an instance's chunks could be filled with what is waiting."""
        units = len(self.fleet.units) / len(self.fleet.instances)
        return self._queue.tokens / (units * self.settings.chunk_tokens)

    def _by_turn(self, instance: int) -> tuple[int, bool, int]:
        """In turn; those that generate by their load, since what they get stays with them."""
        load = self.fleet.open_on(instance) if instance in self._going_on.generating else 0
        return load, instance < self._turn, instance

    def _cycle(self, instance: int, now_ns: int) -> list[Order]:
        """Send what fits to ``instance``; what is left over waits one cycle more."""
        units = self.fleet.instances[instance]
        # An instance that generates may leave its queue alone for many passes and take it up in one refill (EB does):
        # what is queued there takes nothing away from the next pass, and a refill can only be as large as the queue.
        gathers = self.settings.bypass and instance in self._going_on.generating
        available = {
            unit.index: self.settings.chunk_tokens - (unit.in_flight_tokens if gathers else unit.backlog_tokens)
            for unit in units
        }
        orders: list[Order] = []
        if max(available.values()) > 0:
            orders = self._pack(available) if self.settings.packing else self._in_turn_over(available)
        if orders:
            self._ready.dispatched(instance, now_ns)
            self._going_on.dispatched(instance)
            self._last_ns = now_ns
            self._turn = instance + 1
        else:
            self._full.add(instance)
        return orders

    def _pack(self, available: dict[int, int]) -> list[Order]:
        """Algorithm 2."""
        memory = self.fleet.memory
        hit = memory.hit_tokens if self.settings.cache_aware and memory is not None else no_hit
        packing = ChunkPacking(available, hit, None if self._overdraw() else self.settings.chunk_tokens)
        orders: list[Order] = []
        passed_over: list[Held] = []
        while self._queue and not packing.full and len(passed_over) < MISFITS:
            held = self._queue.pop()
            unit = packing.place(held.ask)
            if unit is None:
                passed_over.append(held)
            else:
                orders.append(self._send(held.ask, unit))
        self._queue.leave_over(passed_over)
        return orders

    def _overdraw(self) -> bool:
        """Whether prompts may run over the end of a chunk."""
        if self.settings.overdraw == "auto":
            return self._full_batches() >= BACKLOG_BATCHES
        return self.settings.overdraw == "on"

    def _in_turn_over(self, available: dict[int, int]) -> list[Order]:
        """Without Algorithm 2: by arrival, to the units in turn, skipping those without capacity."""
        orders: list[Order] = []
        while self._queue:
            open_units = [unit for unit, capacity in available.items() if capacity > 0]
            if not open_units:
                break
            unit = open_units[self._next_unit % len(open_units)]
            self._next_unit += 1
            ask = self._queue.pop().ask
            available[unit] -= ask.tokens
            orders.append(self._send(ask, unit))
        return orders

    def _send(self, ask: Ask, unit: int) -> Order:
        self.fleet.send(ask, self.fleet.units[unit])
        return Order(ask.key, unit)

    def _leave_over(self, now_ns: int) -> list[Order]:
        """Overload detection (phase 3): a cycle ends for those left; refuse whoever has seen too many.

        Several instances may be tried at one moment; a cycle counts once per interval.
        """
        if self._counted_ns is not None and now_ns < self._counted_ns + self.interval.interval_ns:
            self._queue.end_cycle(count=False)
            return []
        self._counted_ns = now_ns
        self._queue.end_cycle(count=True)
        return [Order(ask.key, None) for ask in self._queue.overdue(self.settings.cycle_limit)]
