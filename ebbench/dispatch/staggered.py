"""Staggered batch scheduling: hold requests back until an instance can start on them (Tian et al. 2025, section 4).

One cycle: the interval of Algorithm 1 has passed since the last dispatch *and* an instance is ready; then what has
gathered goes to the DP units of that one instance by Algorithm 2. Instances take turns; one that is not ready loses its
turn to the next that is.

Not in the paper: where waiting for the interval gains nothing it is left out (``bypass``, see
:mod:`ebbench.dispatch.foresight`); requests and units are chosen by the value of each possible length of the next pass
(``sizing``, see :mod:`ebbench.dispatch.sizing`). Without ``sizing`` it is Algorithm 2, except that a prompt that fits
into a chunk goes only where it fits, unless much is waiting (``overdraw``). Both are :mod:`ebbench.dispatch.filling`.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet

from ebbench.dispatch.base import DispatchRequest, EndForward, Order
from ebbench.dispatch.cost import PassCost
from ebbench.dispatch.filling import Filling
from ebbench.dispatch.fleet import Fleet, Unit
from ebbench.dispatch.foresight import LIGHT_ARRIVALS_ALONE, ArrivalRate, Generation, GoingOn
from ebbench.dispatch.immediate import LeastOutstanding, PrefixAffine
from ebbench.dispatch.interval import AdaptiveInterval
from ebbench.dispatch.queues import CycleQueue
from ebbench.dispatch.readiness import Readiness
from ebbench.dispatch.staggered_settings import StaggeredSettings


class StaggeredDispatcher:
    """The schedule loop: Algorithms 1 and 2 with the three-way readiness check."""

    wants_signals = True

    def __init__(self, fleet: Fleet, settings: StaggeredSettings, *, generates: bool = False) -> None:
        """``generates``: the instances are taken to generate answers, too, until their signals say otherwise."""
        self.fleet, self.settings = fleet, settings
        self.wants_prefix = settings.cache_aware
        self.interval = AdaptiveInterval(
            settings.window, settings.network_ns, settings.default_forward_ns, len(fleet.active)
        )
        self._ready = Readiness(len(fleet.instances), settings.checks)
        self._queue = CycleQueue(longest_first=settings.packing, aged_cycles=settings.aged_cycles)
        self._filling = Filling(fleet, self._queue, settings)
        self._cost = PassCost(settings.chunk_tokens, settings.window)
        self._generation = Generation(settings.window, expected=generates)
        self._at_once = False  # requests go out as they come: the instances generate
        self._note_generation()
        self._immediate = LeastOutstanding() if fleet.memory is None else PrefixAffine(fleet.memory)
        self._arrivals = ArrivalRate()
        self._going_on = GoingOn(settings.network_ns, settings.lookahead)
        self._last_ns: int | None = None
        self._counted_ns: int | None = None
        self._turn = 0
        self._full: set[int] = set()  # instances without capacity, until something happens there
        self._ahead: set[int] = set()  # a batch is on its way to their next pass; later requests may still join it

    @property
    def waiting(self) -> int:
        """Requests held back."""
        return len(self._queue)

    def arrive(self, request: DispatchRequest, now_ns: int) -> None:
        """See Dispatcher."""
        self._queue.add(request, now_ns)
        if not self._at_once:
            self._arrivals.note(now_ns)
            self._full -= self._ahead

    @property
    def wants_units(self) -> bool:
        """See Dispatcher: requests that go out at once are counted by their ends."""
        return not self._at_once

    def _note_generation(self) -> None:
        self._at_once = self.settings.bypass and self._generation.seen(len(self.fleet.active))

    def end_forward(self, signal: EndForward, now_ns: int) -> None:
        """The fast path: acknowledge, measure, mark ready."""
        self._generation.signalled(signal.generates)
        self._note_generation()
        if self._at_once:
            return
        self.fleet.report(signal)
        self._cost.ended(signal.instance, signal.duration_ns)
        if self.settings.adaptive:
            self.interval.end_forward(signal.duration_ns)
        self._ready.free(signal.instance)
        self._full.discard(signal.instance)
        self._ahead.discard(signal.instance)
        if not signal.goes_on:
            self._going_on.forget(signal.instance)
            return
        self._going_on.signalled(signal.instance, signal.generates, self._next_pass_ns(signal.instance), now_ns)
        if not self._going_on.in_time:
            self._ready.dispatched(signal.instance, now_ns)
            self.fleet.begin_pass(signal.instance, self.settings.chunk_tokens)

    def _next_pass_ns(self, instance: int) -> float:
        """How long the pass will take that the instance begins now, on what it has queued."""
        queued = max(unit.queued_tokens for unit in self.fleet.instances[instance])
        tokens = min(self.settings.chunk_tokens, queued)
        known_ns = self._cost.duration_ns(tokens) if queued else None
        if queued and not self._going_on.in_time:
            self._cost.planned(instance, tokens)
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
        """OnTopologyChange; an instance that comes back is taken to be free."""
        before = self.fleet.active
        self.fleet.set_active(active)
        for instance in self.fleet.active - before:
            self._reset(instance)
        self.interval.topology(len(self.fleet.active))
        self._note_generation()

    def poll(self, now_ns: int) -> list[Order]:
        """Carry out every cycle that is due; dispatch at once while the instances generate."""
        if self._at_once:
            return self._dispatch_at_once(now_ns) if self._queue else []
        if self._alone_and_light(now_ns):
            return self._dispatch_at_once(now_ns)
        orders = self._cycles(now_ns) if self._queue else []
        if self._going_on.in_time:
            for instance in self._going_on.open_to(now_ns):
                self._ready.dispatched(instance, now_ns)
            self._going_on.end_of_moment()
        return orders

    def _alone_and_light(self, now_ns: int) -> bool:
        """One instance of several units under light load: no other instance, and too few requests to choose from."""
        if not self.settings.bypass or len(self.fleet.active) != 1 or len(self.fleet.candidates) == 1:
            return False
        if len(self._queue) + self.fleet.open_requests >= LIGHT_ARRIVALS_ALONE * len(self.fleet.candidates):
            return False
        return self._arrivals.light(self.interval.interval_ns, now_ns, LIGHT_ARRIVALS_ALONE)

    def _dispatch_at_once(self, now_ns: int) -> list[Order]:
        units = self.fleet.candidates
        if not self._queue or not units:
            return []
        instances = () if self._at_once else self.fleet.active
        busy = {instance: bool(self._fullest(instance)) for instance in instances}
        orders = []
        for request in self._queue.drain():
            unit = self._immediate(request, units)
            self.fleet.send(request, unit)
            orders.append(Order(request.key, unit.index))
        for instance in instances:
            self._sent(instance, now_ns, busy[instance])
        return orders

    def _sent(self, instance: int, now_ns: int, busy: bool) -> None:
        """A batch is on its way to ``instance``; ``busy``: it will find others there."""
        if self._filling.sizing and instance not in self._going_on:
            self._cost.planned(instance, None if busy else min(self.settings.chunk_tokens, self._fullest(instance)))
        self._ready.dispatched(instance, now_ns)

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
        if not self._queue or not self.fleet.active or self._at_once:
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
        self._cost.planned(instance, None)
        self._going_on.forget(instance)
        self.fleet.forget_backlog(instance)
        self._full.discard(instance)
        self._ahead.discard(instance)

    def _due_ns(self) -> int:
        if self._last_ns is None or not self.settings.interval:
            return 0
        return self._last_ns + self.interval.interval_ns

    def _able(self, now_ns: int) -> AbstractSet[int]:
        """Instances a batch may go to now, whether or not they have capacity."""
        active = self.fleet.active
        idle = self.fleet.idle & active
        going_on = self._going_on.open_to(now_ns) & active
        if now_ns >= self._due_ns():
            return self._ready.ready(active, idle) | going_on
        if not self.settings.bypass:
            return set()
        return going_on | idle if self._waiting_gains_nothing(now_ns) else going_on

    def _waiting_gains_nothing(self, now_ns: int) -> bool:
        """Whether the interval would bring an idle instance nothing: a full batch is there, or the load is light, or
        all are idle, so that there is no cadence to keep."""
        if self._filling.full_batches >= 1 or self.fleet.active <= self.fleet.idle:
            return True
        return self._arrivals.light(self.interval.interval_ns, now_ns)

    def _by_turn(self, instance: int) -> tuple[bool, bool, int]:
        """Those that would start at once before those that are busy and go on."""
        return instance in self._going_on, instance < self._turn, instance

    def _cycle(self, instance: int, now_ns: int) -> list[Order]:
        """Send what is to go to ``instance``; what is left over waits one cycle more."""
        joining = instance in self._ahead
        busy = bool(self._fullest(instance))
        orders = self._filling.batch(
            instance, now_ns, self.interval.mean_ns, self._cost.overhead_tokens, gainful=joining
        )
        if not orders:
            self._full.add(instance)
        elif not joining:
            self._sent(instance, now_ns, busy)
            self._last_ns = now_ns
            self._turn = instance + 1
            self._pass_to_come(instance, now_ns)
        return orders

    def _fullest(self, instance: int) -> int:
        return max(unit.backlog_tokens for unit in self.fleet.instances[instance])

    def _pass_to_come(self, instance: int, now_ns: int) -> None:
        """Whether more may be sent before the instance is heard of again: to share the pass that the batch sent now is
        in, or the one that must follow on it."""
        if not self._filling.sizing or self._going_on.in_time:
            self._going_on.forget(instance)
        elif instance in self._going_on:
            self._ahead.add(instance)
            self._full.add(instance)
        else:
            self._foresee_end(instance, now_ns)

    def _foresee_end(self, instance: int, now_ns: int) -> None:
        """Let the next batch leave ahead of the end of the pass that begins now: where a prompt takes several passes,
        or where no other instance could take what is waiting."""
        fullest, chunk = self._fullest(instance), self.settings.chunk_tokens
        pass_ns = self._cost.duration_ns(min(fullest, chunk))
        if fullest > chunk:
            self._going_on.begins(instance, self.interval.mean_ns if pass_ns is None else pass_ns, now_ns)
        elif pass_ns is not None and self.settings.bypass and len(self.fleet.active) == 1:
            self._going_on.begins(instance, pass_ns, now_ns)
        else:
            return
        self.fleet.begin_sent(instance, chunk)

    def _leave_over(self, now_ns: int) -> list[Order]:
        """Overload detection (phase 3): count the cycle for requests left over; refuse those with too many cycles.

        Several instances may be tried at one moment; a cycle counts once per interval.
        """
        if self._counted_ns is not None and now_ns < self._counted_ns + self.interval.interval_ns:
            self._queue.end_cycle(count=False)
            return []
        self._counted_ns = now_ns
        self._queue.end_cycle(count=True)
        return [Order(request.key, None) for request in self._queue.overdue(self.settings.cycle_limit)]
