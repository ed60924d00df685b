"""Staggered batch scheduling: hold requests back until an instance can start on them (Tian et al. 2025, section 4).

One cycle: when the interval of Algorithm 1 has passed since the last dispatch *and* an instance is ready, the waiting
requests are sent to the DP units of that instance by Algorithm 2. Instances take turns; an instance that is not ready
loses its turn to the next ready one.

Not in the paper: the interval is skipped where waiting gains nothing (``bypass``), and requests and units are chosen by
the value of each possible pass length (``sizing``, :mod:`ebbench.dispatch.algorithms`). Without ``sizing``, Algorithm 2
chooses, except that a prompt that fits into a chunk goes only where it fits, unless many requests wait (``overdraw``).
Early dispatch, pass times and the batch builder are below.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Literal

from ebbench.config.declare import Setting, setting
from ebbench.dispatch.algorithms import (
    CANDIDATES_A_UNIT,
    AdaptiveInterval,
    ChunkPacking,
    CycleQueue,
    PassModel,
    QueuedRequest,
    candidates,
    choose_pass,
)
from ebbench.dispatch.base import Dispatcher, DispatchRequest, EndForward, Fleet, Order, UnitState
from ebbench.dispatch.immediate import LeastOutstanding, PrefixAffine

# The three-way readiness check of section 4.1.2: empty queue, end-of-forward signal, watchdog.

WATCHDOG_FORWARDS = 5
"""Mean forward times after which the watchdog expires (section 4.1.2)."""


class Readiness:
    """Tracks the instances that were sent a batch and have not signalled since."""

    def __init__(self, instances: int, settings: StaggeredSettings) -> None:
        self._checks = settings
        self._signalled = set(range(instances))  # no batch was sent yet
        self._running: OrderedDict[int, int] = OrderedDict()  # the others, with the time of dispatch

    def mark_busy(self, instance: int, now_ns: int) -> None:
        """Mark the instance busy and start its watchdog: a batch was sent."""
        self._signalled.discard(instance)
        self._running[instance] = now_ns
        self._running.move_to_end(instance)

    def mark_free(self, instance: int) -> None:
        """Mark the instance free: a forward pass has ended (fast path), or it returned without requests."""
        self._signalled.add(instance)
        self._running.pop(instance, None)

    def ready(self, active: AbstractSet[int], idle: AbstractSet[int]) -> AbstractSet[int]:
        """The instances of ``active`` that can start a batch. ``idle``: instances without open requests."""
        if not self._checks.signal:
            return active
        ready = self._signalled | idle if self._checks.zero_queue else self._signalled
        return ready & active

    def expired(self, mean_ns: float, now_ns: int) -> list[int]:
        """Instances silent for too long (safety path). They are reset: their batches count as done."""
        instances: list[int] = []
        while self._checks.watchdog and self._running:
            instance, since_ns = next(iter(self._running.items()))
            if now_ns < since_ns + round(WATCHDOG_FORWARDS * mean_ns):
                break
            self.mark_free(instance)
            instances.append(instance)
        return instances

    def next_expiry_ns(self, mean_ns: float) -> int | None:
        """When the next watchdog expires (ns)."""
        if not self._checks.watchdog or not self._running:
            return None
        return next(iter(self._running.values())) + round(WATCHDOG_FORWARDS * mean_ns)


@dataclass(frozen=True)
class StaggeredSettings:
    """Settings of the user, and of the caller (chunk, network delay, first forward time). Every part can be switched
    off.

    ``chunk_tokens``: prompt tokens that a unit computes per pass. Without ``adaptive``, ``default_forward_ns`` replaces
    the measured mean forward time. ``sizing`` works only without cached prefixes; ``aged_cycles`` then has no effect.
    """

    chunk_tokens: int
    network_ns: int = 0
    default_forward_ns: int = 50_000_000
    adaptive: bool = setting(True, "Algorithm 1: learn the interval from measured forward times")
    interval: bool = setting(True, "wait for the interval before sending a batch")
    packing: bool = setting(True, "Algorithm 2; off: in order of arrival, units in turn, while there is capacity")
    sizing: bool = setting(True, "choose the length of the next pass by its value")
    overdraw: Literal["on", "off", "auto"] = setting(
        "auto", "prompts may exceed the end of a chunk; auto: only with a backlog"
    )
    cache_aware: bool = setting(False, "count only prompt tokens that are not cached")
    bypass: bool = setting(True, "dispatch at once if waiting gains nothing")
    window: int = setting(100, "number of passes in moving averages", unit="passes", at_least=1)
    patience: float | None = setting(
        2,
        "a request that has waited for this many mean passes goes first",
        unit="passes",
        at_least=0,
        infinite=True,
        none="off",
    )
    lookahead: float = setting(
        0.9,
        "share of the expected pass after which a batch is sent ahead to a busy instance",
        unit="share",
        at_least=0,
        infinite=True,
    )
    aged_cycles: int | None = setting(
        4, "a request left over in more cycles is placed first", unit="cycles", at_least=1, none="off"
    )
    cycle_limit: int | None = setting(
        None, "a request left over in more cycles is refused", unit="cycles", at_least=1, none="off"
    )
    zero_queue: bool = setting(True, "an instance with an empty queue is ready")
    signal: bool = setting(True, "an instance is ready when its forward pass has ended")
    watchdog: bool = setting(True, "an instance that is silent for too long is ready")


OF_THE_CALLER = {
    "chunk": Setting("prompt tokens that a unit computes in one pass", unit="tokens", at_least=1, kind=int),
    "network_ms": Setting("one way from dispatcher to instance", unit="ms", at_least=0),
    "forward_ms": Setting("forward time assumed before one is measured", unit="ms", at_least=0),
}
"""Settings that replace the arguments of :func:`ebbench.dispatch.make_dispatcher`."""
LEAST_PASSES = 8
"""A line fitted through fewer passes is not meaningful."""
FIRST_GUESS, LEAST_SHARE, MOST_SHARE = 0.25, 0.02, 1.0
"""Overhead as a share of a full chunk: the initial value, and the bounds of the estimate."""


class PassTimeModel:
    """Pass duration as a linear function of the tokens on the fullest unit, by least squares over the last passes."""

    def __init__(self, chunk_tokens: int, window: int) -> None:
        self._chunk = chunk_tokens
        self._planned: dict[int, int] = {}
        self._passes: deque[tuple[int, int]] = deque(maxlen=window)
        self._overhead_tokens: float | None = None

    def planned(self, instance: int, tokens: int | None) -> None:
        """Record the tokens on the fullest unit of the instance's next pass; None if unknown."""
        if tokens is None:
            self._planned.pop(instance, None)
        else:
            self._planned[instance] = tokens

    def ended(self, instance: int, duration_ns: int) -> None:
        """Record that a pass of ``instance`` has ended."""
        tokens = self._planned.pop(instance, None)
        if tokens is not None:
            self._passes.append((tokens, duration_ns))
            self._overhead_tokens = None

    @property
    def overhead_tokens(self) -> float:
        """Intercept over slope: the fixed part of a pass, in tokens that could be computed in that time."""
        if self._overhead_tokens is None:
            self._overhead_tokens = self._fit()
        return self._overhead_tokens

    def duration_ns(self, tokens: int) -> float | None:
        """Duration (ns) of a pass with ``tokens`` on its fullest unit; None before the first measurement."""
        if len(self._passes) < LEAST_PASSES:
            return None
        mean_tokens, mean_ns = self._means()
        return mean_ns * (self.overhead_tokens + tokens) / (self.overhead_tokens + mean_tokens)

    def _means(self) -> tuple[float, float]:
        tokens, durations_ns = zip(*self._passes, strict=True)
        return sum(tokens) / len(tokens), sum(durations_ns) / len(durations_ns)

    def _fit(self) -> float:
        if len(self._passes) < LEAST_PASSES:
            return FIRST_GUESS * self._chunk
        mean_tokens, mean_ns = self._means()
        spread = sum((tokens - mean_tokens) ** 2 for tokens, _ in self._passes)
        shared = sum((tokens - mean_tokens) * (duration_ns - mean_ns) for tokens, duration_ns in self._passes)
        if shared <= 0 or spread <= 0:  # all passes equally long, or longer batches did not take longer
            return FIRST_GUESS * self._chunk
        overhead = mean_ns * spread / shared - mean_tokens
        return min(MOST_SHARE * self._chunk, max(LEAST_SHARE * self._chunk, overhead))


BACKLOG_BATCHES = 2.0
"""Without sizing: from this many waiting full batches on, filling every chunk matters more than avoiding remainders."""
MISFITS = 32
"""A cycle ends after this many requests that fit nowhere; the remaining ones are assumed not to fit either."""


class BatchBuilder:
    """Moves requests from the queue to units of the fleet."""

    def __init__(self, fleet: Fleet, queue: CycleQueue, settings: StaggeredSettings) -> None:
        self._fleet, self._queue, self._settings = fleet, queue, settings
        self.sizing = settings.packing and settings.sizing and not settings.cache_aware
        self._next_unit = 0

    def batch(
        self, instance: int, now_ns: int, mean_pass_ns: float, overhead_tokens: float, *, only_if_gain: bool
    ) -> list[Order]:
        """The orders of the next batch for ``instance``; the fleet counts them as sent when this returns.

        ``overhead_tokens``: see PassModel. ``only_if_gain``: send only requests that raise the value of the pass per
        time.
        """
        backlog = {unit.index: unit.backlog_tokens for unit in self._fleet.instances[instance]}
        available = {index: self._settings.chunk_tokens - tokens for index, tokens in backlog.items()}
        if max(available.values()) <= 0:
            return []
        if self.sizing:
            return self._best_pass(backlog, now_ns, mean_pass_ns, overhead_tokens, only_if_gain)
        return self._pack(available) if self._settings.packing else self._round_robin(available)

    @property
    def full_batches(self) -> float:
        """Number of batches, with all chunks of an instance full, that the waiting requests would fill."""
        units = len(self._fleet.units) / len(self._fleet.instances)
        return self._queue.tokens / (units * self._settings.chunk_tokens)

    def _send(self, request: DispatchRequest, unit: int) -> Order:
        self._fleet.send(request, self._fleet.units[unit])
        return Order(request.key, unit)

    def _best_pass(
        self, backlog: dict[int, int], now_ns: int, mean_pass_ns: float, overhead_tokens: float, only_if_gain: bool
    ) -> list[Order]:
        """The pass with the highest value per time, built from the oldest requests."""
        oldest = self._queue.oldest(CANDIDATES_A_UNIT * len(backlog))
        # A token is worth as much as a request of mean length, times the square of the number of waiting batches.
        token_worth = self.full_batches**2 * len(self._queue) / max(1, self._queue.tokens)
        chosen = choose_pass(
            candidates(
                [(h.request, h.since_ns) for h in oldest], now_ns, mean_pass_ns, token_worth, self._settings.patience
            ),
            backlog,
            PassModel(self._settings.chunk_tokens, overhead_tokens, token_worth, self._overdraw()),
            only_if_gain=only_if_gain,
        )
        for request, _ in chosen:
            self._queue.withdraw(request.key)
        return [self._send(request, unit) for request, unit in chosen]

    def _pack(self, available: dict[int, int]) -> list[Order]:
        """Algorithm 2."""
        memory = self._fleet.memory
        hit = memory.hit_tokens if self._settings.cache_aware and memory is not None else None
        packing = ChunkPacking(available, hit, None if self._overdraw() else self._settings.chunk_tokens)
        orders: list[Order] = []
        passed_over: list[QueuedRequest] = []
        while self._queue and not packing.full and len(passed_over) < MISFITS:
            queued = self._queue.pop()
            unit = packing.place(queued.request)
            if unit is None:
                passed_over.append(queued)
            else:
                orders.append(self._send(queued.request, unit))
        self._queue.put_back(passed_over)
        return orders

    def _overdraw(self) -> bool:
        """Whether prompts may exceed the end of a chunk."""
        if self._settings.overdraw == "auto":
            # With sizing, only if the waiting requests fill every instance once: remainders determine the next pass.
            return self.full_batches >= (len(self._fleet.active) if self.sizing else BACKLOG_BATCHES)
        return self._settings.overdraw == "on"

    def _round_robin(self, available: dict[int, int]) -> list[Order]:
        """Assign without Algorithm 2: in order of arrival to the units in turn, skipping units without capacity."""
        orders: list[Order] = []
        while self._queue:
            open_units = [unit for unit, capacity in available.items() if capacity > 0]
            if not open_units:
                break
            unit = open_units[self._next_unit % len(open_units)]
            self._next_unit += 1
            request = self._queue.pop().request
            available[unit] -= request.tokens
            orders.append(self._send(request, unit))
        return orders


LIGHT_ARRIVALS = 2.0
"""With fewer arrivals expected per interval, no batch would form."""
LIGHT_ARRIVALS_ALONE = 3.0
"""The same for a single instance, and the limit of open requests per unit: with fewer, choosing which requests share a
pass gains nothing."""
ARRIVALS_KEPT, LEAST_ARRIVALS = 64, 8
"""Number of arrivals kept, and the fewest from which a rate is computed."""


class ArrivalRate:
    """Arrival rate over the last arrivals."""

    def __init__(self) -> None:
        self._times_ns: deque[int] = deque(maxlen=ARRIVALS_KEPT)

    def note(self, now_ns: int) -> None:
        """Record an arrival."""
        self._times_ns.append(now_ns)

    def light(self, interval_ns: float, now_ns: int, arrivals: float = LIGHT_ARRIVALS) -> bool:
        """Whether fewer than ``arrivals`` are expected per interval; True before the rate is known."""
        if len(self._times_ns) < LEAST_ARRIVALS:
            return True
        return len(self._times_ns) * interval_ns < arrivals * (now_ns - self._times_ns[0])


class DecodeDetector:
    """Whether the instances decode: any of them did in the last ``window`` passes of each.

    ``expected``: the value assumed until signals arrive.
    """

    def __init__(self, window: int, *, expected: bool = False) -> None:
        self._window = window
        self._passes_since: int | None = 0 if expected else None  # None: never

    def on_signal(self, generates: bool) -> None:
        """Record the ``generates`` flag of a signal."""
        if generates:
            self._passes_since = 0
        elif self._passes_since is not None:
            self._passes_since += 1

    def detected(self, instances: int) -> bool:
        """Whether any of ``instances`` active instances decoded recently."""
        return self._passes_since is not None and self._passes_since < self._window * max(1, instances)


class ContinuingInstances:
    """Instances that continue by themselves, and when a batch for their next pass may be sent."""

    def __init__(self, network_ns: int, lookahead: float) -> None:
        self._network_ns, self._lookahead = network_ns, lookahead
        self._opens_ns: dict[int, int] = {}

    @property
    def reaches_next_pass(self) -> bool:
        """Whether a batch sent on a signal still reaches the pass that begins then (no network delay)."""
        return self._network_ns == 0

    def on_signal(self, instance: int, generates: bool, pass_ns: float, now_ns: int) -> None:
        """Record that the instance continues with a pass expected to take ``pass_ns``."""
        ahead_ns = 0
        if not generates and not self.reaches_next_pass:
            ahead_ns = max(0, round(self._lookahead * pass_ns) - self._network_ns)
        self._opens_ns[instance] = now_ns + ahead_ns

    def add(self, instance: int, pass_ns: float, now_ns: int) -> None:
        """Record that a batch was sent that takes several passes, the first expected to take ``pass_ns``."""
        self._opens_ns[instance] = now_ns + round(self._lookahead * pass_ns)

    def __contains__(self, instance: int) -> bool:
        return instance in self._opens_ns

    def forget(self, instance: int) -> None:
        """Remove an instance: it does not continue, or its next pass has its batch."""
        self._opens_ns.pop(instance, None)

    def end_of_instant(self) -> None:
        """Remove all instances: without network delay a batch can be sent only at the time of the signal."""
        if self.reaches_next_pass:
            self._opens_ns.clear()

    def open_instances(self, now_ns: int) -> AbstractSet[int]:
        """Instances to which a batch may be sent now."""
        return {instance for instance, opens_ns in self._opens_ns.items() if opens_ns <= now_ns}

    def next_ns(self, now_ns: int) -> int | None:
        """When the next instance can be sent a batch (ns), or None."""
        return min((t for t in self._opens_ns.values() if t > now_ns), default=None)


class StaggeredDispatcher(Dispatcher):
    """The scheduling loop: Algorithms 1 and 2 with the three-way readiness check."""

    wants_signals = True

    def __init__(self, fleet: Fleet, settings: StaggeredSettings, *, generates: bool = False) -> None:
        """``generates``: assume that the instances also decode, until their signals say otherwise."""
        super().__init__(fleet)
        self.settings = settings
        self.wants_prefix = settings.cache_aware
        self.interval = AdaptiveInterval(
            settings.window, settings.network_ns, settings.default_forward_ns, len(fleet.active)
        )
        self._ready = Readiness(len(fleet.instances), settings)
        self._queue = CycleQueue(longest_first=settings.packing, aged_cycles=settings.aged_cycles)
        self._builder = BatchBuilder(fleet, self._queue, settings)
        self._pass_time = PassTimeModel(settings.chunk_tokens, settings.window)
        self._decode_detector = DecodeDetector(settings.window, expected=generates)
        self._immediate_mode = False  # the instances decode: requests are sent as they arrive
        self._update_immediate()
        self._immediate_rule = LeastOutstanding() if fleet.memory is None else PrefixAffine(fleet.memory)
        self._arrivals = ArrivalRate()
        self._continuing = ContinuingInstances(settings.network_ns, settings.lookahead)
        self._last_ns: int | None = None
        self._counted_ns: int | None = None
        self._turn = 0
        self._without_capacity: set[int] = set()  # instances without capacity, until their state changes
        self._sent_ahead: set[int] = set()  # the batch of their next pass is in transit; others may join

    @property
    def waiting(self) -> int:
        """Number of requests held back."""
        return len(self._queue)

    def arrive(self, request: DispatchRequest, now_ns: int) -> None:
        """See Dispatcher."""
        self._queue.add(request, now_ns)
        if not self._immediate_mode:
            self._arrivals.note(now_ns)
            self._without_capacity -= self._sent_ahead

    @property
    def wants_units(self) -> bool:
        """See Dispatcher. Requests dispatched immediately are counted by their ends, not by reports."""
        return not self._immediate_mode

    def _update_immediate(self) -> None:
        self._immediate_mode = self.settings.bypass and self._decode_detector.detected(len(self.fleet.active))

    def end_forward(self, signal: EndForward, now_ns: int) -> None:
        """Fast path: apply the report, record the duration, mark the instance ready."""
        self._decode_detector.on_signal(signal.generates)
        self._update_immediate()
        if self._immediate_mode:
            return
        self.fleet.report(signal)
        self._pass_time.ended(signal.instance, signal.duration_ns)
        if self.settings.adaptive:
            self.interval.end_forward(signal.duration_ns)
        self._ready.mark_free(signal.instance)
        self._without_capacity.discard(signal.instance)
        self._sent_ahead.discard(signal.instance)
        if not signal.continues:
            self._continuing.forget(signal.instance)
            return
        self._continuing.on_signal(signal.instance, signal.generates, self._next_pass_ns(signal.instance), now_ns)
        if not self._continuing.reaches_next_pass:
            self._ready.mark_busy(signal.instance, now_ns)
            self.fleet.begin_pass(signal.instance, self.settings.chunk_tokens)

    def _next_pass_ns(self, instance: int) -> float:
        """Expected duration (ns) of the pass that the instance begins now, on its queued tokens."""
        queued = max(unit.queued_tokens for unit in self.fleet.instances[instance])
        tokens = min(self.settings.chunk_tokens, queued)
        known_ns = self._pass_time.duration_ns(tokens) if queued else None
        if queued and not self._continuing.reaches_next_pass:
            self._pass_time.planned(instance, tokens)
        return self.interval.mean_ns if known_ns is None else known_ns

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
        """OnTopologyChange; an instance that returns counts as free."""
        before = self.fleet.active
        self.fleet.set_active(active)
        for instance in self.fleet.active - before:
            self._reset(instance)
        self.interval.topology(len(self.fleet.active))
        self._update_immediate()

    def poll(self, now_ns: int) -> list[Order]:
        """Run every cycle that is due; dispatch immediately while the instances decode."""
        if self._immediate_mode:
            return self._dispatch_immediately(now_ns) if self._queue else []
        if self._single_and_light(now_ns):
            return self._dispatch_immediately(now_ns)
        orders = self._run_due_cycles(now_ns) if self._queue else []
        if self._continuing.reaches_next_pass:
            for instance in self._continuing.open_instances(now_ns):
                self._ready.mark_busy(instance, now_ns)
            self._continuing.end_of_instant()
        return orders

    def _single_and_light(self, now_ns: int) -> bool:
        """Whether the only active instance has several units and the load leaves no choice between requests."""
        if not self.settings.bypass or len(self.fleet.active) != 1 or len(self.fleet.candidates) == 1:
            return False
        if len(self._queue) + self.fleet.open_requests >= LIGHT_ARRIVALS_ALONE * len(self.fleet.candidates):
            return False
        return self._arrivals.light(self.interval.interval_ns, now_ns, LIGHT_ARRIVALS_ALONE)

    def _dispatch_immediately(self, now_ns: int) -> list[Order]:
        units = self.fleet.candidates
        if not self._queue or not units:
            return []
        instances = () if self._immediate_mode else self.fleet.active
        busy = {instance: bool(self._max_backlog_tokens(instance)) for instance in instances}
        orders = []
        for request in self._queue.drain():
            unit = self._immediate_rule(request, units)
            self.fleet.send(request, unit)
            orders.append(Order(request.key, unit.index))
        for instance in instances:
            self._mark_dispatched(instance, now_ns, busy[instance])
        return orders

    def _mark_dispatched(self, instance: int, now_ns: int, busy: bool) -> None:
        """Record that a batch was sent to ``instance``; ``busy``: the instance has earlier requests to compute."""
        if self._builder.sizing and instance not in self._continuing:
            self._pass_time.planned(
                instance, None if busy else min(self.settings.chunk_tokens, self._max_backlog_tokens(instance))
            )
        self._ready.mark_busy(instance, now_ns)

    def _run_due_cycles(self, now_ns: int) -> list[Order]:
        for instance in self._ready.expired(self.interval.mean_ns, now_ns):
            self._reset(instance)
        orders: list[Order] = []
        available = self._available_instances(now_ns)
        cycle = bool(available)
        while self._queue and (open_instances := available - self._without_capacity):
            # Idle instances before those that continue, then in turn.
            chosen = min(open_instances, key=lambda one: (one in self._continuing, one < self._turn, one))
            orders += self._dispatch_to(chosen, now_ns)
            available = self._available_instances(now_ns)
        return orders + self._end_cycle(now_ns) if cycle and self._queue else orders

    def next_ns(self, now_ns: int) -> int | None:
        """The end of the interval, else the first watchdog, else the next early dispatch (ns)."""
        if not self._queue or not self.fleet.active or self._immediate_mode:
            return None
        due_ns = self._due_ns()
        if due_ns > now_ns and not self.settings.bypass:
            return due_ns
        expiry_ns = self._ready.next_expiry_ns(self.interval.mean_ns)
        opens_ns = self._continuing.next_ns(now_ns)
        return min((t for t in (due_ns, expiry_ns, opens_ns) if t is not None and t > now_ns), default=None)

    def _changed(self, unit: UnitState | None) -> None:
        if unit is not None:
            self._without_capacity.discard(unit.instance)

    def _reset(self, instance: int) -> None:
        """Treat the instance as free, with an empty queue."""
        self._ready.mark_free(instance)
        self._pass_time.planned(instance, None)
        self._continuing.forget(instance)
        self.fleet.forget_backlog(instance)
        self._without_capacity.discard(instance)
        self._sent_ahead.discard(instance)

    def _due_ns(self) -> int:
        if self._last_ns is None or not self.settings.interval:
            return 0
        return self._last_ns + self.interval.interval_ns

    def _available_instances(self, now_ns: int) -> AbstractSet[int]:
        """Instances that may be sent a batch now, with or without capacity."""
        active = self.fleet.active
        idle = self.fleet.idle & active
        going_on = self._continuing.open_instances(now_ns) & active
        if now_ns >= self._due_ns():
            return self._ready.ready(active, idle) | going_on
        if not self.settings.bypass:
            return set()
        return going_on | idle if self._interval_unneeded(now_ns) else going_on

    def _interval_unneeded(self, now_ns: int) -> bool:
        """Whether an idle instance gains nothing by the interval: a full batch waits, the load is light, or all
        instances are idle, so that there is no staggering to keep."""
        if self._builder.full_batches >= 1 or self.fleet.active <= self.fleet.idle:
            return True
        return self._arrivals.light(self.interval.interval_ns, now_ns)

    def _dispatch_to(self, instance: int, now_ns: int) -> list[Order]:
        """Dispatch a batch to ``instance``; requests that do not fit wait for the next cycle."""
        joining = instance in self._sent_ahead
        busy = bool(self._max_backlog_tokens(instance))
        orders = self._builder.batch(
            instance, now_ns, self.interval.mean_ns, self._pass_time.overhead_tokens, only_if_gain=joining
        )
        if not orders:
            self._without_capacity.add(instance)
        elif not joining:
            self._mark_dispatched(instance, now_ns, busy)
            self._last_ns = now_ns
            self._turn = instance + 1
            self._plan_early_dispatch(instance, now_ns)
        return orders

    def _max_backlog_tokens(self, instance: int) -> int:
        return max(unit.backlog_tokens for unit in self.fleet.instances[instance])

    def _plan_early_dispatch(self, instance: int, now_ns: int) -> None:
        """Decide whether further requests may be sent before the next signal of the instance: to join the pass of the
        batch sent now, or the pass that must follow it."""
        if not self._builder.sizing or self._continuing.reaches_next_pass:
            self._continuing.forget(instance)
        elif instance in self._continuing:
            self._sent_ahead.add(instance)
            self._without_capacity.add(instance)
        else:
            self._allow_early_dispatch(instance, now_ns)

    def _allow_early_dispatch(self, instance: int, now_ns: int) -> None:
        """Allow the next batch to be sent before the pass that begins now ends: if a prompt takes several passes, or if
        no other instance could take the waiting requests."""
        fullest, chunk = self._max_backlog_tokens(instance), self.settings.chunk_tokens
        pass_ns = self._pass_time.duration_ns(min(fullest, chunk))
        if fullest > chunk:
            self._continuing.add(instance, self.interval.mean_ns if pass_ns is None else pass_ns, now_ns)
        elif pass_ns is not None and self.settings.bypass and len(self.fleet.active) == 1:
            self._continuing.add(instance, pass_ns, now_ns)
        else:
            return
        self.fleet.begin_pass_on_sent(instance, chunk)

    def _end_cycle(self, now_ns: int) -> list[Order]:
        """Overload detection (phase 3): count the cycle for requests left over; refuse those with too many cycles.

        Several instances may be tried at one time; a cycle counts once per interval.
        """
        if self._counted_ns is not None and now_ns < self._counted_ns + self.interval.interval_ns:
            self._queue.end_cycle(count=False)
            return []
        self._counted_ns = now_ns
        self._queue.end_cycle(count=True)
        return [Order(request.key, None) for request in self._queue.overdue(self.settings.cycle_limit)]
