"""The global state matrix: what the dispatcher knows of every DP unit (section 4, figure 5)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ebbench.dispatch.base import DispatchRequest, EndForward
from ebbench.dispatch.prefix import PrefixMemory


@dataclass(slots=True)
class Unit:
    """One DP unit as the dispatcher believes it to be.

    ``open_requests`` is B and ``kv_tokens`` is K of Algorithm 3. ``in_flight_tokens`` is U: prompt tokens sent and not
    acknowledged; ``queued_tokens`` is R: the backlog on the device, from its last report. ``begun_tokens`` of U are in
    the pass that runs.
    """

    index: int
    instance: int
    open_requests: int = 0
    kv_tokens: int = 0
    in_flight_tokens: int = 0
    queued_tokens: int = 0
    begun_tokens: int = 0
    sent: int = 0
    unacknowledged: deque[tuple[int, int]] = field(default_factory=deque)  # (number of the request here, its key)

    @property
    def backlog_tokens(self) -> int:
        """U + R: prompt tokens that will be computed before anything sent now, those of the pass that runs left out."""
        return max(0, self.in_flight_tokens - self.begun_tokens) + self.queued_tokens


class Fleet:
    """All units, grouped into instances, and the requests open on them.

    ``instances[i]`` lists the units of instance i; unit numbers run from 0 across instances.
    """

    def __init__(self, units_per_instance: Sequence[int]) -> None:
        self.units: list[Unit] = []
        self.instances: list[list[Unit]] = []
        for instance, count in enumerate(units_per_instance):
            first = len(self.units)
            group = [Unit(first + i, instance) for i in range(count)]
            self.units += group
            self.instances.append(group)
        self.active: set[int] = set(range(len(self.instances)))
        self.idle: set[int] = set(self.active)  # nothing is open on them (zero-task state)
        self.candidates: list[Unit] = self._spread()
        self._open_on = [0] * len(self.instances)
        self.memory: PrefixMemory | None = None
        self._open: dict[int, tuple[Unit, DispatchRequest, int]] = {}
        self._counted: dict[int, int] = {}  # prompt tokens still counted in U, by request

    def set_active(self, active: Iterable[int]) -> None:
        """Take requests on these instances only; what is open elsewhere stays accounted for."""
        self.active = set(active)
        self.candidates = self._spread()

    @property
    def open_requests(self) -> int:
        """Requests sent that have not ended, on all units."""
        return len(self._open)

    def send(self, request: DispatchRequest, unit: Unit) -> None:
        """``request`` goes to ``unit``."""
        uncached = request.tokens - (self.memory.hit_tokens(request, unit.index) if self.memory is not None else 0)
        unit.sent += 1
        unit.open_requests += 1
        unit.kv_tokens += request.total_tokens
        unit.in_flight_tokens += uncached
        unit.unacknowledged.append((unit.sent, request.key))
        self._open_on[unit.instance] += 1
        self.idle.discard(unit.instance)
        self._counted[request.key] = uncached
        self._open[request.key] = (unit, request, unit.sent)
        if self.memory is not None:
            self.memory.note(request, unit.index)

    def report(self, signal: EndForward) -> None:
        """Take over what the units say about themselves: acknowledged tokens leave U, R and K are theirs."""
        for report in signal.units:
            unit = self.units[report.unit]
            waiting = unit.unacknowledged
            while waiting and waiting[0][0] <= report.received:
                self._uncount(unit, waiting.popleft()[1])
            unit.begun_tokens = 0
            unit.queued_tokens = report.queued_tokens
            unit.kv_tokens = report.kv_tokens + self._unseen_kv(unit)

    def prefilled(self, key: int) -> Unit | None:
        """The prompt of ``key`` is computed, whether or not its unit has said so. Returns where it is, if open."""
        if key not in self._open:
            return None
        unit = self._open[key][0]
        self._uncount(unit, key)
        return unit

    def ended(self, key: int) -> Unit | None:
        """``key`` has ended; returns where it was, None if it was not open."""
        found = self._open.pop(key, None)
        if found is None:
            return None
        unit, request, _ = found
        self._uncount(unit, key)
        unit.open_requests -= 1
        unit.kv_tokens = max(0, unit.kv_tokens - request.total_tokens)
        while unit.unacknowledged and unit.unacknowledged[0][1] not in self._counted:
            unit.unacknowledged.popleft()
        self._open_on[unit.instance] -= 1
        if not self._open_on[unit.instance]:
            self.idle.add(unit.instance)
        return unit

    def begin_pass(self, instance: int, chunk_tokens: int) -> None:
        """The instance has begun a pass on what it reported as queued: up to a chunk of it is taken up now."""
        for unit in self.instances[instance]:
            unit.queued_tokens = max(0, unit.queued_tokens - chunk_tokens)

    def begin_sent(self, instance: int, chunk_tokens: int) -> None:
        """The instance has begun a pass on what was sent to it and it has not reported yet."""
        for unit in self.instances[instance]:
            unit.begun_tokens = min(chunk_tokens, unit.in_flight_tokens)

    def forget_backlog(self, instance: int) -> None:
        """Take everything sent to the instance as computed (the watchdog's state reset)."""
        for unit in self.instances[instance]:
            while unit.unacknowledged:
                self._uncount(unit, unit.unacknowledged.popleft()[1])
            unit.queued_tokens = unit.begun_tokens = 0

    def _spread(self) -> list[Unit]:
        """Units of active instances, neighbours on different instances, so that taking turns spreads over them."""
        groups = [self.instances[i] for i in sorted(self.active)]
        depth = max((len(group) for group in groups), default=0)
        return [group[place] for place in range(depth) for group in groups if place < len(group)]

    def _uncount(self, unit: Unit, key: int) -> None:
        unit.in_flight_tokens -= self._counted.pop(key, 0)

    def _unseen_kv(self, unit: Unit) -> int:
        """KV that requests in transit will take; their unit cannot know of it yet."""
        return sum(self._open[key][1].total_tokens for _, key in unit.unacknowledged if key in self._open)
