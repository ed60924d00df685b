"""The event loop of a simulation and its stages: pools of equal engines behind one dispatcher.

Events at the same nanosecond are taken in the order of :mod:`ebbench.simulation.state`. One engine alone runs in the
same loop, without dispatcher and network.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ebbench.records import CHUNK_TOKENS
from ebbench.records.plan import Plan, block_tokens
from ebbench.records.warnings import RunWarning, warning
from ebbench.simulation.engine import EngineLoop, OnPass, Unit
from ebbench.simulation.front_end import FrontEnd, QueueLimits
from ebbench.simulation.releases import Releases
from ebbench.simulation.scheduler import HangUps
from ebbench.simulation.state import (
    ARRIVAL,
    BACK,
    DELIVERY,
    DEPARTURE,
    ENTRY,
    FOLLOW,
    FRONT,
    HANG_UP,
    NEVER_NS,
    NOTICE,
    PASS,
    RESUME,
    SIGNAL,
    TIMER,
    TRANSFER,
    TURNAROUND_NS,
    UNSET,
    WAKE,
    Failure,
    RequestState,
    StoreFullError,
)

if TYPE_CHECKING:
    from ebbench.dispatch import Dispatcher, DispatchRequest, EndForward, Order
    from ebbench.simulation.transfer import Handover, Transfer


@dataclass
class Stage:
    """Engines and their dispatcher; None sends everything to the only unit.

    ``prefixes`` returns the leading blocks of a request's prompt; None if the dispatcher does not use them.
    ``received``: requests received per unit. ``timer_ns``: when the dispatcher wants to be polled.
    ``front_ends``: one per engine, through which clients reach it.
    """

    state: RequestState
    engines: list[EngineLoop]
    front_ends: list[FrontEnd]
    dispatcher: Dispatcher | None = None
    prefixes: Callable[[int], tuple[int, ...]] | None = None
    timer_ns: int | None = None
    units: list[Unit] = field(init=False)
    engine_of_unit: list[int] = field(init=False)
    units_of_engine: list[list[int]] = field(init=False)
    woken: list[bool] = field(init=False)
    received: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.units = [unit for engine in self.engines for unit in engine.units]
        self.engine_of_unit = [place for place, engine in enumerate(self.engines) for _ in engine.units]
        self.units_of_engine = [[] for _ in self.engines]
        for unit, place in enumerate(self.engine_of_unit):
            self.units_of_engine[place].append(unit)
        self.woken = [False] * len(self.engines)
        self.received = [0] * len(self.units)
        for served, front_end in zip(self.units, map(self.front_ends.__getitem__, self.engine_of_unit), strict=True):
            served.scheduler.front_end = front_end if front_end.streams else None

    def enter(self, row: int, unit: int, now_ns: int) -> int:
        """A request comes to the front end of the unit's engine; returns when it enters the engine, in ns."""
        return self.front_ends[self.engine_of_unit[unit]].enter(row, now_ns)

    def dispatch_request(self, row: int) -> DispatchRequest:
        """The request as the dispatcher sees it, without its output length."""
        from ebbench.dispatch import DispatchRequest

        tokens = int(self.state.prompt[row])
        return DispatchRequest(row, tokens, tokens, self.prefixes(row) if self.prefixes is not None else ())

    def report(self, engine: int, duration_ns: int) -> EndForward:
        """The signal of the engine at the end of a pass of that duration."""
        from ebbench.dispatch import EndForward, UnitReport

        schedulers = [unit.scheduler for unit in self.engines[engine].units]
        generates = any(scheduler.generates for scheduler in schedulers)
        if generates and self.dispatcher is not None and not self.dispatcher.wants_units:
            return EndForward(engine, duration_ns, continues=True, generates=True)
        reports = []
        continues = generates
        for unit, scheduler in zip(self.units_of_engine[engine], schedulers, strict=True):
            queued = scheduler.queued_tokens()
            continues = continues or queued > 0 or self.engines[engine].busy
            kv_tokens = scheduler.kv_blocks_used * scheduler.limits.block_size
            reports.append(UnitReport(unit, self.received[unit], queued, kv_tokens))
        return EndForward(engine, duration_ns, continues, generates, tuple(reports))


def prefix_reader(plan: Plan) -> Callable[[int], tuple[int, ...]]:
    """Returns a function for the prefix hashes of a plan's prompts, one per 512 tokens: hash ids if the plan has them,
    else content."""
    step = max(1, CHUNK_TOKENS // block_tokens(plan.table))
    hash_ids = plan.table["hash_ids"].to_pylist()
    content = plan.table["content"].to_pylist()
    tokens = plan.table["input_tokens"].to_pylist()

    def read(row: int) -> tuple[int, ...]:
        if hash_ids[row]:
            return tuple(hash_ids[row][step - 1 :: step])
        return tuple(_blocks(content[row], tokens[row] // CHUNK_TOKENS))

    return read


def _blocks(content: int, count: int) -> Iterator[int]:
    return (hash((content, block)) for block in range(count))


class PassSignals:
    """Follows the passes of all engines whose dispatcher wants signals; a signal takes ``network_ns`` to arrive."""

    def __init__(self, loop: EventLoop, network_ns: int) -> None:
        self._loop, self._network_ns = loop, network_ns
        for index, stage in enumerate(loop.stages):
            if stage.dispatcher is not None and stage.dispatcher.wants_signals:
                for place, engine in enumerate(stage.engines):
                    engine.on_pass = self._follower(index, place)

    def _follower(self, index: int, engine: int) -> OnPass:
        def on_pass(start_ns: int, end_ns: int) -> None:
            self._loop.push(end_ns, PASS, (index, engine, end_ns - start_ns))

        return on_pass

    def pass_ended(self, subject: tuple[int, int, int]) -> None:
        """A pass has ended: its engine sends the signal."""
        index, engine, duration_ns = subject
        signal = self._loop.stages[index].report(engine, duration_ns)
        if self._network_ns:
            self._loop.push(self._loop.now_ns + self._network_ns, SIGNAL, (index, signal))
        else:
            self.arrived((index, signal))

    def arrived(self, subject: tuple[int, EndForward]) -> None:
        """A signal has reached its dispatcher, which may dispatch now."""
        index, signal = subject
        dispatcher = self._loop.stages[index].dispatcher
        assert dispatcher is not None
        dispatcher.end_forward(signal, self._loop.now_ns)
        self._loop.poll(index)


GIB = 2**30


class DecodePool:
    """Places prompts on decode units, sends their KV and lets them enter when it has arrived.

    ``unit_of``: decode unit of each request from the order of the decode dispatcher until it has ended for its client.
    A computed prompt keeps its KV on the prefill unit until the dispatcher has placed it.
    """

    def __init__(self, loop: EventLoop, handover: Handover) -> None:
        self.unit_of: dict[int, int] = {}
        self._loop, self._handover = loop, handover
        self._unplaced: set[int] = set()  # computed, without a unit yet
        self._placed: list[int] = []  # with a unit since the last poll, in the order of the dispatcher
        self._entry_ns: dict[int, int] = {}  # when the decode unit's front end is done with a request
        handover.start = self._started

    def hand_over(self, rows: list[int]) -> None:
        """Give the prompts computed in one pass to the dispatcher together."""
        loop, handover = self._loop, self._handover
        assert loop.back is not None
        assert loop.back.dispatcher is not None
        over = [row for row in rows if handover.prefilled(row, int(loop.unit_of[row]), loop.now_ns)]
        for row in over:
            self._unplaced.add(row)
            loop.back.dispatcher.arrive(loop.back.dispatch_request(row), loop.now_ns)
        loop.poll(BACK)
        if len(over) < len(rows):  # a single token was requested: there is nothing to decode
            decoding = set(over)
            loop.gone([row for row in rows if row not in decoding])

    def place(self, row: int, unit: int) -> None:
        """The dispatcher chose a unit."""
        self.unit_of[row] = unit
        self._unplaced.remove(row)
        self._placed.append(row)

    def send_placed(self) -> None:
        """Send the KV of the prompts that the last poll placed."""
        loop = self._loop
        assert loop.back is not None
        placed, self._placed = self._placed, []
        for row in placed:
            target = self.unit_of[row]
            self._entry_ns[row] = loop.back.enter(row, target, loop.now_ns)
            self._start_all(self._handover.send(row, int(loop.unit_of[row]), target, loop.now_ns))

    def _start_all(self, transfers: list[Transfer]) -> None:
        for transfer in transfers:
            self._started(transfer)

    def _started(self, transfer: Transfer) -> None:
        self._loop.push(transfer.end_ns, TRANSFER, transfer)

    def arrived(self, transfer: Transfer) -> None:
        """The KV of a request has arrived: its blocks on the prefill unit are free, and it enters the decode unit."""
        loop = self._loop
        self._start_all(self._handover.arrived(transfer, loop.now_ns))
        loop.wake_if_idle(FRONT, loop.front.engine_of_unit[transfer.source])
        loop.enter_at(self._entry_ns.pop(transfer.row, 0), BACK, transfer.target, transfer.row)

    def decoded(self, rows: list[int]) -> None:
        """Decoding has ended: the KV that was received for it is given up."""
        for row in rows:
            self._start_all(self._handover.finished(row, self._loop.now_ns))

    def departed(self, rows: list[int]) -> None:
        """Requests have ended for their clients."""
        for row in rows:
            del self.unit_of[row]

    def hang_up(self, row: int) -> bool:
        """The client of a request hung up. Returns False, without any change, if its prompt was not handed over.

        Its KV is freed on both sides. A transfer that has begun goes on to its end, since a connector cannot stop it.
        """
        loop = self._loop
        source = int(loop.unit_of[row])
        if row in self._unplaced:
            assert loop.back is not None
            assert loop.back.dispatcher is not None
            self._unplaced.remove(row)
            loop.back.dispatcher.withdraw(row)
            self._handover.discard(row, source)
            loop.wake_if_idle(FRONT, loop.front.engine_of_unit[source])
            return True
        if row not in self.unit_of:
            return False
        self._entry_ns.pop(row, None)
        self._start_all(self._handover.withdraw(row, source, loop.now_ns))
        loop.wake_if_idle(FRONT, loop.front.engine_of_unit[source])
        loop.withdraw(BACK, row, self.unit_of.pop(row))
        loop.poll(BACK)
        return True

    def died(self, full: StoreFullError) -> None:
        """A decode unit ran out of memory: its requests are lost and the run ends."""
        loop = self._loop
        loop.outcome.dead = warning(
            "decode-out-of-memory", unit=full.unit, at_s=loop.now_ns / 1e9, held_gib=full.held_bytes / GIB,
            size_gib=full.size_bytes / GIB, capacity_gib=full.capacity_bytes / GIB,
        )  # fmt: skip
        for row in self._handover.on_target(full.unit):
            loop.outcome.failed[row] = ("out_of_memory", str(loop.outcome.dead), None)
            loop.last.state.end_ns[row] = loop.now_ns


AtTime = Callable[[int], None]
"""Called with the time of the clock, in ns."""


@dataclass
class LoopOutcome:
    """Results that the tables do not show.

    ``failed``: row to (class, message, HTTP status). ``never_sent``: rows that wait for a refused one.
    """

    failed: dict[int, Failure] = field(default_factory=dict)
    never_sent: list[int] = field(default_factory=list)
    dead: RunWarning | None = None  # why the run ended early


class EventLoop:
    """Runs a plan on a front stage and, if prefill and decode are separate, a back stage."""

    def __init__(
        self,
        plan: Plan,
        front: Stage,
        back: Stage | None = None,
        handover: Handover | None = None,
        *,
        network_ns: int = 0,
        warmup: int = 0,
        begin: AtTime | None = None,
        queue_limits: QueueLimits | None = None,
    ) -> None:
        """``warmup``: number of requests before the plan; ``begin`` is called when they have ended, before the plan
        starts. ``queue_limits`` of the only front end."""
        self.front, self.back, self.handover = front, back, handover
        self.stages = [front] if back is None else [front, back]
        self.last = self.stages[-1]
        self.tick: AtTime | None = None  # called after every event
        self.dispatched_ns = np.full(len(plan) + warmup, UNSET, np.int64)
        self.unit_of = np.full(len(plan) + warmup, UNSET, np.int64)
        self.now_ns = 0
        self.ended = 0  # including warm-up requests, and requests that are never sent
        self.outcome = LoopOutcome()
        self._plan, self._begin, self._warming = plan, begin, warmup > 0
        self._network_ns, self._queue_limits = network_ns, queue_limits
        self._releases = Releases(plan, warmup)
        self.hang_ups = HangUps(plan)
        # Requests that have reached their unit, by stage; kept if clients may hang up.
        self._inside: list[set[int]] = [set() for _ in self.stages]
        # Times at which a request may arrive at an engine, and times at which engines continue by themselves.
        self._events: list[tuple[int, int, int, Any]] = []
        self._wakes: list[tuple[int, int, int, Any]] = []
        self._sequence = 0
        self._decode_pool = None if handover is None else DecodePool(self, handover)
        self._signals = PassSignals(self, network_ns)

    def run(self) -> None:
        """Run to the end, or until a decode unit runs out of memory. A KeyboardInterrupt leaves a consistent state."""
        handlers: tuple[Callable[[Any], None], ...] = (
            self._arrival, self._resume, self._follow, self._delivery, self._entry, self._transferred, self._departure,
            self._signals.pass_ended, self._signals.arrived, self._notice, self._timer, self._wake, self._hang_up,
        )  # fmt: skip
        events, wakes, pop = self._events, self._wakes, heapq.heappop
        try:
            if not self._warming:
                self._schedule_arrivals()
            self._release(self._releases.start())
            while events or wakes:
                heap = wakes if not events or (wakes and wakes[0] < events[0]) else events
                self.now_ns, kind, _, subject = pop(heap)
                handlers[kind](subject)
                if self.tick is not None:
                    self.tick(self.now_ns)
        except StoreFullError as full:
            assert self._decode_pool is not None
            self._decode_pool.died(full)

    # Arrivals and completions of requests.

    def _schedule_arrivals(self) -> None:
        if self._plan.closed_loop:
            return
        arrivals = np.asarray(self._plan.table["arrival_ns"].fill_null(0))
        for row in self._releases.first_rows:
            self.push(self.now_ns + int(arrivals[row]), ARRIVAL, row)

    def _count_ended(self, requests: int) -> None:
        self.ended += requests
        if self._warming and self._releases.begun:
            self._end_warmup()

    def _end_warmup(self) -> None:
        self._warming = False
        if self._begin is not None:
            self._begin(self.now_ns)
        self._schedule_arrivals()

    def _arrival(self, row: int) -> None:
        self.front.state.intended_ns[row] = self.last.state.intended_ns[row] = self.now_ns
        self._release(self._releases.arrived(row))

    def _release(self, rows: list[int]) -> None:
        """Send requests when they have paused."""
        self._submit(self._pause(rows))

    def _pause(self, rows: list[int]) -> list[int]:
        """Let requests pause; returns those that do not."""
        at_once = []
        for row in rows:
            if pause_ns := self._releases.pause_ns(row):
                self.push(self.now_ns + pause_ns, RESUME, row)
            else:
                at_once.append(row)
        return at_once

    def _resume(self, row: int) -> None:
        self._submit([row])

    def _follow(self, rows: list[int]) -> None:
        for stage in self.stages:
            stage.state.intend(rows, self.now_ns - TURNAROUND_NS)
        self._submit(rows)

    def _submit(self, rows: list[int]) -> None:
        """Send requests to the front dispatcher, or to the only unit."""
        if not rows:
            return
        if self._queue_limits is None:
            self._stamp(rows, self.now_ns)
        else:
            rows, ended = self._queue_limits.accept(rows, self.now_ns, self._releases, self._stamp)
            self._count_ended(ended)
        if self.hang_ups.any:
            for row in rows:
                if (patience_ns := self.hang_ups.sent(row)) is not None:
                    self.push(self.now_ns + patience_ns, HANG_UP, row)
        dispatcher = self.front.dispatcher
        if dispatcher is None:
            self._deliver(FRONT, 0, rows)
            return
        for row in rows:
            dispatcher.arrive(self.front.dispatch_request(row), self.now_ns)
        self.poll(FRONT)

    def _stamp(self, rows: Sequence[int], now_ns: int) -> None:
        """Note that requests are sent now."""
        for stage in self.stages:
            stage.state.intend(rows, now_ns)
            for row in rows:
                stage.state.sent_ns[row] = now_ns

    def poll(self, index: int) -> None:
        """Carry out the orders of a dispatcher, and store when it wants to be polled again."""
        stage = self.stages[index]
        if stage.dispatcher is None:
            return
        for order in stage.dispatcher.poll(self.now_ns):
            self._follow_order(index, order)
        if index == BACK and self._decode_pool is not None:
            self._decode_pool.send_placed()
        next_ns = stage.dispatcher.next_ns(self.now_ns)
        if next_ns is not None and (stage.timer_ns is None or next_ns < stage.timer_ns):
            stage.timer_ns = next_ns
            self.push(next_ns, TIMER, index)

    def _timer(self, index: int) -> None:
        stage = self.stages[index]
        if stage.timer_ns == self.now_ns:  # other timers were replaced by an earlier one
            stage.timer_ns = None
            self.poll(index)

    def _follow_order(self, index: int, order: Order) -> None:
        row, unit = order
        if unit is None:
            self._refused(row)
        elif index == BACK:
            assert self._decode_pool is not None
            self._decode_pool.place(row, unit)
        else:
            self.dispatched_ns[row], self.unit_of[row] = self.now_ns, unit
            if self._network_ns:
                self.push(self.now_ns + self._network_ns, DELIVERY, (row, unit))
            else:
                self._deliver(FRONT, unit, (row,))

    def _delivery(self, subject: tuple[int, int]) -> None:
        row, unit = subject
        self._deliver(FRONT, unit, (row,))

    def _deliver(self, index: int, unit: int, rows: Sequence[int]) -> None:
        """Deliver requests to the front end of their unit's engine."""
        for row in rows:
            self.enter_at(self.stages[index].enter(row, unit, self.now_ns), index, unit, row)

    def enter_at(self, time_ns: int, index: int, unit: int, row: int) -> None:
        """Deliver a request to its unit at that time, or now if it has passed."""
        if time_ns <= self.now_ns:
            self._enter(index, unit, (row,))
        else:
            self.push(time_ns, ENTRY, (index, unit, row))

    def _entry(self, subject: tuple[int, int, int]) -> None:
        index, unit, row = subject
        self._enter(index, unit, (row,))

    def _enter(self, index: int, unit: int, rows: Sequence[int]) -> None:
        """Deliver requests to their unit."""
        stage = self.stages[index]
        scheduler = stage.units[unit].scheduler
        if self.hang_ups.any:
            rows = self.hang_ups.still_wanted(rows)
            self._inside[index].update(rows)
        for row in rows:
            scheduler.add(row)
        stage.received[unit] += len(rows)
        self.wake_if_idle(index, stage.engine_of_unit[unit])

    def _refused(self, row: int) -> None:
        """The dispatcher refuses a request. Its client sends nothing that waits for it, as the load generator does."""
        self.hang_ups.ended([row])
        self.outcome.failed[row] = ("http_429", "flow control: waited too many dispatch cycles", 429)
        self.last.state.end_ns[row] = self.now_ns
        lost, released = self._releases.failed(row)
        self.outcome.never_sent += lost
        self._count_ended(1 + len(lost))
        self._release(released)

    def gone(self, rows: list[int]) -> None:
        """Requests have ended for their clients: send those that their ends release."""
        if self.hang_ups.any:
            self.hang_ups.ended(rows)
        if self._queue_limits is not None:
            for row in rows:
                self._queue_limits.ended(row)
        warming = self._warming
        released = self._releases.all_ended(rows)
        self._count_ended(len(rows))
        if warming and not self._warming:  # the plan's first requests, at its time zero
            self._release(released)
        elif following := self._pause(released):
            self.push(self.now_ns + TURNAROUND_NS, FOLLOW, following)

    def _hang_up(self, row: int) -> None:
        """A client closes its connection: the stage that has the request drops it."""
        if not self.hang_ups.hangs_up(row):
            return
        self.last.state.end_ns[row] = self.now_ns
        if self._decode_pool is None or not self._decode_pool.hang_up(row):
            self.withdraw(FRONT, row, int(self.unit_of[row]))
        if self._queue_limits is not None:
            self._queue_limits.ended(row)
        lost, released = self._releases.failed(row)
        self.hang_ups.given_up += lost
        self._count_ended(1 + len(lost))
        self._release(released)
        self.poll(FRONT)

    def withdraw(self, index: int, row: int, unit: int) -> None:
        """The client of a request hung up: its unit drops it, or the dispatcher where it has no unit yet (UNSET)."""
        stage = self.stages[index]
        if row in self._inside[index]:
            inside = max(unit, 0)  # without a dispatcher there is only one
            stage.units[inside].scheduler.hang_up(row)
            self.wake_if_idle(index, stage.engine_of_unit[inside])
        if stage.dispatcher is not None and unit != UNSET:
            stage.dispatcher.ended(row, self.now_ns)
        elif stage.dispatcher is not None:
            stage.dispatcher.withdraw(row)

    # Engines.

    def wake_if_idle(self, index: int, engine: int) -> None:
        """Wake an engine of stage ``index`` now, unless it runs or is about to be woken."""
        stage = self.stages[index]
        if not stage.woken[engine] and stage.engines[engine].idle:
            self._push_wake(self.now_ns, index, engine)

    def _push_wake(self, time_ns: int, index: int, engine: int) -> None:
        self.stages[index].woken[engine] = True
        self._sequence += 1
        heapq.heappush(self._wakes, (time_ns, WAKE, self._sequence, (index, engine)))

    def _quiet_until_ns(self) -> int:
        """Earliest time at which a request may arrive at the engine being woken, whatever other engines do."""
        until_ns = self._events[0][0] if self._events else NEVER_NS
        if self._wakes and (self.back is not None or self._releases.by_completions):
            return min(until_ns, self._wakes[0][0])
        return until_ns

    def _wake(self, subject: tuple[int, int]) -> None:
        index, place = subject
        stage = self.stages[index]
        engine = stage.engines[place]  # stays marked as woken, so that deliveries meanwhile do not wake it again
        while True:
            again_ns, ended = engine.wake(self.now_ns, self._quiet_until_ns)
            if not ended:
                break
            if index == BACK and self._decode_pool is not None:
                self._decode_pool.decoded(ended)
            self._depart(stage.front_ends[place], index, ended)
        stage.woken[place] = False
        if again_ns is not None:
            self._push_wake(again_ns, index, place)

    def _depart(self, front_end: FrontEnd, index: int, rows: list[int]) -> None:
        """Requests that ended in the engine end for their clients when their last tokens have left the front end."""
        at_once: list[int] = []
        for row in rows:
            departed_ns = front_end.departed_ns(row)
            if departed_ns > self.now_ns:
                self.push(departed_ns, DEPARTURE, (index, [row]))
            else:
                at_once.append(row)
        if at_once:
            self._departure((index, at_once))

    def _departure(self, subject: tuple[int, list[int]]) -> None:
        """Requests have ended for their sender: the client, or the proxy between prefill and decode."""
        index, rows = subject
        if self.hang_ups.any:
            rows = self.hang_ups.still_wanted(rows)
        if self.stages[index].dispatcher is not None:
            if self._network_ns and index == FRONT:
                self.push(self.now_ns + self._network_ns, NOTICE, (index, rows))
            else:
                self._notice((index, rows))
        if self._decode_pool is not None:
            if index == FRONT:
                self._decode_pool.hand_over(rows)
                return
            self._decode_pool.departed(rows)
        self.gone(rows)

    def _notice(self, subject: tuple[int, list[int]]) -> None:
        index, rows = subject
        dispatcher = self.stages[index].dispatcher
        if dispatcher is None:
            return
        for row in rows:
            dispatcher.ended(row, self.now_ns)
        self.poll(index)

    def _transferred(self, transfer: Transfer) -> None:
        assert self._decode_pool is not None
        self._decode_pool.arrived(transfer)

    def push(self, time_ns: int, kind: int, subject: Any) -> None:
        """Add an event; ``kind``: see :mod:`ebbench.simulation.state`."""
        self._sequence += 1
        heapq.heappush(self._events, (time_ns, kind, self._sequence, subject))
