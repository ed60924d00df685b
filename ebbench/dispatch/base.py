"""Interface of a dispatcher: the events that it receives and the orders that it returns.

Terms of Tian et al. (2025): an *instance* runs forward passes; a *DP unit* is the smallest target of a request. A
data-parallel replica is an instance with one unit; a DP+EP instance has several units, which wait for each other in
every pass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ebbench.records import CHUNK_TOKENS


class DispatchRequest(NamedTuple):
    """A request as a dispatcher sees it.

    ``tokens``: prompt tokens, the length of Algorithm 2. ``total_tokens``: prompt plus output tokens as far as known,
    the length of Algorithm 3. ``prefix``: one hash per leading block of the prompt; each covers all blocks before it.
    """

    key: int
    tokens: int
    total_tokens: int
    prefix: tuple[int, ...] = ()


class Order(NamedTuple):
    """Send request ``key`` to ``unit``; ``unit`` None refuses it (flow control)."""

    key: int
    unit: int | None


class UnitReport(NamedTuple):
    """State of one DP unit at the end of a forward pass.

    ``received``: requests received since the start, which separates tokens in transit from queued ones.
    ``queued_tokens``: prompt tokens held and not scheduled. ``kv_tokens``: KV tokens in use.
    """

    unit: int
    received: int
    queued_tokens: int
    kv_tokens: int


class EndForward(NamedTuple):
    """A forward pass of ``instance`` has ended after ``duration_ns`` (the EndForward signal of section 4.1).

    ``continues``: the instance starts the next pass at once, on requests it holds. ``generates``: some of these are
    sequences in decode, so passes follow each other. ``units`` is empty if the end was inferred from streams.
    """

    instance: int
    duration_ns: int
    continues: bool = False
    generates: bool = False
    units: tuple[UnitReport, ...] = ()


class Dispatcher(ABC):
    """Decides where and when requests are sent. Times are monotonic ns and never decrease."""

    wants_signals = False
    """Whether :meth:`end_forward` has an effect; if not, callers may skip it."""
    wants_prefix = False
    """Whether ``DispatchRequest.prefix`` is used."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet

    @property
    def wants_units(self) -> bool:
        """Whether ``EndForward.units`` is used now; if not, callers may leave it empty."""
        return self.wants_signals

    @abstractmethod
    def arrive(self, request: DispatchRequest, now_ns: int) -> None:
        """Add a request that has arrived."""

    @abstractmethod
    def poll(self, now_ns: int) -> list[Order]:
        """Orders to carry out now. Call it after every other event and at :meth:`next_ns`."""

    def next_ns(self, now_ns: int) -> int | None:
        """When to poll again without a further event; None: only after an event."""
        return None

    def end_forward(self, signal: EndForward, now_ns: int) -> None:
        """Record the end of a forward pass."""
        self.fleet.report(signal)

    def prefilled(self, key: int, now_ns: int) -> None:
        """Record that the first token of a dispatched request was seen: its prompt is computed."""
        self.fleet.prefilled(key)

    def ended(self, key: int, now_ns: int) -> None:
        """Record that a dispatched request has ended, successfully or not."""
        self.fleet.ended(key)

    @abstractmethod
    def withdraw(self, key: int) -> None:
        """Remove a request that has not been dispatched."""

    def topology(self, active: Iterable[int], now_ns: int) -> None:
        """Set the instances that take requests from now on (health checks, scaling)."""
        self.fleet.set_active(active)

    @property
    @abstractmethod
    def waiting(self) -> int:
        """Number of requests held back."""


# Approximate record of the prompt prefixes that each unit has computed.
#
# Units evict blocks without notice; this record is bounded in the same way, least recently used first. A wrong hit
# costs time, never correctness.


class PrefixMemory:
    """Remembers up to ``capacity_blocks`` prefix blocks per unit."""

    def __init__(self, units: int, capacity_blocks: int = 4096, block_tokens: int = CHUNK_TOKENS) -> None:
        self._blocks: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(units)]
        self._capacity, self._block_tokens = capacity_blocks, block_tokens

    def hit_tokens(self, request: DispatchRequest, unit: int) -> int:
        """Leading prompt tokens that ``unit`` has probably computed; at least the last token remains to compute."""
        known = self._blocks[unit]
        count = 0
        for block in request.prefix:
            if block not in known:
                break
            count += 1
        return min(count * self._block_tokens, max(request.tokens - 1, 0))

    def note(self, request: DispatchRequest, unit: int) -> None:
        """Record that ``unit`` gets ``request`` and will hold its prompt."""
        known = self._blocks[unit]
        for block in request.prefix:
            known[block] = None
            known.move_to_end(block)
        while len(known) > self._capacity:
            known.popitem(last=False)

    def forget(self, unit: int) -> None:
        """Clear the record of a unit that was restarted."""
        self._blocks[unit].clear()


# The global state matrix: the dispatcher's estimate of the state of every DP unit (section 4, figure 5).


@dataclass(slots=True)
class UnitState:
    """Estimated state of one DP unit.

    ``open_requests`` is B and ``kv_tokens`` is K of Algorithm 3. ``in_flight_tokens`` is U: prompt tokens sent and not
    acknowledged. ``queued_tokens`` is R: the backlog on the device from its last report. ``running_tokens`` of U are in
    the current pass.
    """

    index: int
    instance: int
    open_requests: int = 0
    kv_tokens: int = 0
    in_flight_tokens: int = 0
    queued_tokens: int = 0
    running_tokens: int = 0
    sent: int = 0
    unacknowledged: deque[tuple[int, int]] = field(default_factory=deque)  # (sequence number, key)

    @property
    def backlog_tokens(self) -> int:
        """U + R: prompt tokens computed before any sent now, without those of the current pass."""
        return max(0, self.in_flight_tokens - self.running_tokens) + self.queued_tokens


class Fleet:
    """All units, grouped into instances, and the requests open on them.

    ``instances[i]`` lists the units of instance i; unit numbers run from 0 across instances.
    """

    def __init__(self, units_per_instance: Sequence[int]) -> None:
        self.units: list[UnitState] = []
        self.instances: list[list[UnitState]] = []
        for instance, count in enumerate(units_per_instance):
            first = len(self.units)
            group = [UnitState(first + i, instance) for i in range(count)]
            self.units += group
            self.instances.append(group)
        self.active: set[int] = set(range(len(self.instances)))
        self.idle: set[int] = set(self.active)  # instances without open requests (zero-task state)
        self.candidates: list[UnitState] = self._interleaved()
        self._open_on = [0] * len(self.instances)
        self.memory: PrefixMemory | None = None
        self._open: dict[int, tuple[UnitState, DispatchRequest, int]] = {}
        self._counted: dict[int, int] = {}  # prompt tokens still counted in U, by request

    def set_active(self, active: Iterable[int]) -> None:
        """Send requests to these instances only; requests open on others stay accounted for."""
        self.active = set(active)
        self.candidates = self._interleaved()

    @property
    def open_requests(self) -> int:
        """Number of requests sent that have not ended, on all units."""
        return len(self._open)

    def send(self, request: DispatchRequest, unit: UnitState) -> None:
        """Record that ``request`` is sent to ``unit``."""
        key, instance, uncached = request.key, unit.instance, request.tokens
        if self.memory is not None:
            uncached -= self.memory.hit_tokens(request, unit.index)
            self.memory.note(request, unit.index)
        unit.sent = number = unit.sent + 1
        unit.open_requests += 1
        unit.kv_tokens += request.total_tokens
        unit.in_flight_tokens += uncached
        unit.unacknowledged.append((number, key))
        if not self._open_on[instance]:
            self.idle.discard(instance)
        self._open_on[instance] += 1
        self._counted[key] = uncached
        self._open[key] = (unit, request, number)

    def report(self, signal: EndForward) -> None:
        """Apply the reports of the units: remove acknowledged tokens from U; take R and K from the report."""
        for report in signal.units:
            unit = self.units[report.unit]
            waiting = unit.unacknowledged
            while waiting and waiting[0][0] <= report.received:
                self._acknowledge(unit, waiting.popleft()[1])
            unit.running_tokens = 0
            unit.queued_tokens = report.queued_tokens
            unit.kv_tokens = report.kv_tokens + self._in_transit_kv(unit)

    def prefilled(self, key: int) -> UnitState | None:
        """Record that the prompt of ``key`` is computed, before its unit reports it.

        Returns its unit, or None if not open.
        """
        if key not in self._open:
            return None
        unit = self._open[key][0]
        self._acknowledge(unit, key)
        return unit

    def ended(self, key: int) -> UnitState | None:
        """Record that ``key`` has ended; returns its unit, or None if not open."""
        assigned = self._open.pop(key, None)
        if assigned is None:
            return None
        unit, request, _ = assigned
        counted, waiting, instance = self._counted, unit.unacknowledged, unit.instance
        unit.in_flight_tokens -= counted.pop(key, 0)
        unit.open_requests -= 1
        unit.kv_tokens = max(0, unit.kv_tokens - request.total_tokens)
        while waiting and waiting[0][1] not in counted:
            waiting.popleft()
        open_on = self._open_on[instance] = self._open_on[instance] - 1
        if not open_on:
            self.idle.add(instance)
        return unit

    def begin_pass(self, instance: int, chunk_tokens: int) -> None:
        """Record that the instance has begun a pass on its reported queue: up to a chunk of it is being computed."""
        for unit in self.instances[instance]:
            unit.queued_tokens = max(0, unit.queued_tokens - chunk_tokens)

    def begin_pass_on_sent(self, instance: int, chunk_tokens: int) -> None:
        """Record that the instance has begun a pass on requests that were sent and not reported yet."""
        for unit in self.instances[instance]:
            unit.running_tokens = min(chunk_tokens, unit.in_flight_tokens)

    def forget_backlog(self, instance: int) -> None:
        """Treat everything sent to the instance as computed (state reset of the watchdog)."""
        for unit in self.instances[instance]:
            while unit.unacknowledged:
                self._acknowledge(unit, unit.unacknowledged.popleft()[1])
            unit.queued_tokens = unit.running_tokens = 0

    def _interleaved(self) -> list[UnitState]:
        """Units of active instances, ordered so that neighbours are on different instances: round robin spreads over
        them."""
        groups = [self.instances[i] for i in sorted(self.active)]
        depth = max((len(group) for group in groups), default=0)
        return [group[place] for place in range(depth) for group in groups if place < len(group)]

    def _acknowledge(self, unit: UnitState, key: int) -> None:
        unit.in_flight_tokens -= self._counted.pop(key, 0)

    def _in_transit_kv(self, unit: UnitState) -> int:
        """KV tokens of requests in transit, which their unit cannot report yet."""
        return sum(self._open[key][1].total_tokens for _, key in unit.unacknowledged if key in self._open)
