"""The event loop of a simulation and its stages: pools of equal engines behind one dispatcher.

Events at the same nanosecond are taken in the order of :mod:`ebbench.simulation.state`. One engine alone runs in the
same loop, without dispatcher and network.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ebbench.records import CHUNK_TOKENS
from ebbench.records.plan import Plan, block_tokens
from ebbench.records.warnings import RunWarning, warning
from ebbench.simulation.engine import EngineLoop, Unit
from ebbench.simulation.front_end import FrontEnd
from ebbench.simulation.releases import AtTime, Clients
from ebbench.simulation.scheduler import Scheduler, SchedulerListener
from ebbench.simulation.state import (
    BACK,
    DELIVERY,
    DEPARTURE,
    ENTRY,
    FRONT,
    NEVER_NS,
    NOTICE,
    PASS,
    SIGNAL,
    TIMER,
    TRANSFER,
    UNSET,
    WAKE,
    RequestState,
    StoreFullError,
)
from ebbench.spec.server import EngineOptions

if TYPE_CHECKING:
    from ebbench.config.topology import TransferSpec
    from ebbench.dispatch import Dispatcher, DispatchRequest, EndForward, Order
    from ebbench.simulation.transfer import Transfer, TransferFabric


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


class EventLoop(Clients):
    """Runs a plan on a front stage and, if prefill and decode are separate, a back stage."""

    def __init__(
        self,
        plan: Plan,
        front: Stage,
        back: Stage | None = None,
        handover: Handover | None = None,
        *,
        network_ns: int = 0,
        options: EngineOptions | None = None,
        begin: AtTime | None = None,
    ) -> None:
        """``options``, ``begin``: see Clients."""
        self.front, self.back, self.handover = front, back, handover
        self.stages = [front] if back is None else [front, back]
        super().__init__(plan, [stage.state for stage in self.stages], options, begin)
        self.last = self.stages[-1]
        self.tick: AtTime | None = None  # called after every event
        self.dispatched_ns = np.full(front.state.count, UNSET, np.int64)
        self.unit_of = np.full(front.state.count, UNSET, np.int64)
        self.dead: RunWarning | None = None  # why the run ended early
        self._network_ns = network_ns
        # Requests that have reached their unit, by stage; kept if clients may hang up.
        self._inside: list[set[int]] = [set() for _ in self.stages]
        # Times at which engines continue by themselves; at those of the other events a request may arrive at one.
        self._wakes: list[tuple[int, int, int, Any]] = []
        if handover is not None:
            handover.loop = self
        for index, stage in enumerate(self.stages):
            if stage.dispatcher is not None and stage.dispatcher.wants_signals:
                for place, engine in enumerate(stage.engines):
                    engine.on_pass = partial(self._on_pass, index, place)

    def run(self) -> None:
        """Run to the end, or until a decode unit runs out of memory. A KeyboardInterrupt leaves a consistent state."""
        handlers: tuple[Callable[[Any], object], ...] = (
            self._arrival, self._resume, self._follow, self._delivery, self._entry, self._transferred, self._departure,
            self._pass_ended, self._signal_arrived, self._notice, self._timer, self._wake, self._hang_up,
        )  # fmt: skip
        events, wakes, pop = self._events, self._wakes, heapq.heappop
        try:
            self._start()
            while events or wakes:
                heap = wakes if not events or (wakes and wakes[0] < events[0]) else events
                self.now_ns, kind, _, subject = pop(heap)
                handlers[kind](subject)
                if self.tick is not None:
                    self.tick(self.now_ns)
        except StoreFullError as full:
            assert self.handover is not None
            self.handover.died(full)

    # Requests between clients, dispatchers and engines.

    def _bring(self, rows: list[int]) -> None:
        """See Clients: to the front dispatcher, or to the only unit."""
        dispatcher = self.front.dispatcher
        if dispatcher is None:
            self._deliver(FRONT, 0, rows)
            return
        for row in rows:
            dispatcher.arrive(self.front.dispatch_request(row), self.now_ns)
        self.poll(FRONT)

    def poll(self, index: int) -> None:
        """Carry out the orders of a dispatcher, and store when it wants to be polled again."""
        stage = self.stages[index]
        if stage.dispatcher is None:
            return
        for order in stage.dispatcher.poll(self.now_ns):
            self._follow_order(index, order)
        if index == BACK and self.handover is not None:
            self.handover.send_placed()
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
            assert self.handover is not None
            self.handover.place(row, unit)
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
        self.hang_ups.ended([row])
        self.failed[row] = ("http_429", "flow control: waited too many dispatch cycles", 429)
        self._release(self._lose(row, self.never_sent))

    def _hang_up(self, row: int) -> bool:
        hangs_up = super()._hang_up(row)
        if hangs_up:
            self.poll(FRONT)
        return hangs_up

    def _withdraw(self, row: int) -> None:
        """See Clients: the stage that has the request drops it."""
        if self.handover is None or not self.handover.hang_up(row):
            self.withdraw(FRONT, row, int(self.unit_of[row]))

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
            if index == BACK and self.handover is not None:
                self.handover.decoded(ended)
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
        if self.handover is not None:
            if index == FRONT:
                self.handover.hand_over(rows)
                return
            self.handover.departed(rows)
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
        assert self.handover is not None
        self.handover.arrived(transfer)

    # Signals: what a dispatcher that wants them is told of the passes of all its engines.

    def _on_pass(self, index: int, engine: int, start_ns: int, end_ns: int) -> None:
        self.push(end_ns, PASS, (index, engine, end_ns - start_ns))

    def _pass_ended(self, subject: tuple[int, int, int]) -> None:
        """A pass has ended: its engine sends the signal."""
        index, engine, duration_ns = subject
        signal = self.stages[index].report(engine, duration_ns)
        if self._network_ns:
            self.push(self.now_ns + self._network_ns, SIGNAL, (index, signal))
        else:
            self._signal_arrived((index, signal))

    def _signal_arrived(self, subject: tuple[int, EndForward]) -> None:
        """A signal has reached its dispatcher, which may dispatch now."""
        index, signal = subject
        dispatcher = self.stages[index].dispatcher
        assert dispatcher is not None
        dispatcher.end_forward(signal, self.now_ns)
        self.poll(index)


_GIB = 2**30


class Handover:
    """Places prompts on decode units, sends their KV and lets them enter when it has arrived.

    Row i of ``before`` and of ``after`` is the same request. ``sources`` and ``targets``: the schedulers of the two
    stages, by unit. ``unit_of``: decode unit of each request from the order of the decode dispatcher until it has ended
    for its client. A computed prompt keeps its KV on the prefill unit until the dispatcher has placed it. ``loop``: set
    by the event loop.
    """

    loop: EventLoop

    def __init__(
        self,
        before: RequestState,
        after: RequestState,
        sources: Sequence[Scheduler],
        targets: Sequence[Scheduler],
        fabric: TransferFabric,
        spec: TransferSpec,
        kv_bytes_per_token: float,
    ) -> None:
        self.unit_of: dict[int, int] = {}
        self._before, self._after = before, after
        self._sources, self._targets, self.fabric = sources, targets, fabric
        self._from_prefill = spec.first_token == "prefill"
        self._kv_bytes = kv_bytes_per_token
        self._unplaced: set[int] = set()  # computed, without a unit yet
        self._placed: list[int] = []  # with a unit since the last poll, in the order of the dispatcher
        self._entry_ns: dict[int, int] = {}  # when the decode unit's front end is done with a request
        if spec.held_until == "admission":
            for index, target in enumerate(targets):
                target.listeners.append(_ReleaseAtAdmission(self, index))

    @property
    def _back(self) -> Stage:
        assert self.loop.back is not None
        return self.loop.back

    @property
    def _dispatcher(self) -> Dispatcher:
        assert self._back.dispatcher is not None
        return self._back.dispatcher

    def hand_over(self, rows: list[int]) -> None:
        """Give the prompts computed in one pass to the dispatcher together."""
        over = [row for row in rows if self._prefilled(row)]
        for row in over:
            self._unplaced.add(row)
            self._dispatcher.arrive(self._back.dispatch_request(row), self.loop.now_ns)
        self.loop.poll(BACK)
        if len(over) < len(rows):  # a single token was requested: there is nothing to decode
            decoding = set(over)
            self.loop.gone([row for row in rows if row not in decoding])

    def _prefilled(self, row: int) -> bool:
        """The prompt of ``row`` is computed. Returns False if only the first token was requested."""
        after, now_ns = self._after, self.loop.now_ns
        if not self._from_prefill:
            return True
        slot = int(after.first_slot[row])
        after.token_ns[slot] = now_ns
        if after.client_ns is not None:
            after.client_ns[slot] = now_ns
        after.next_slot[row] = slot + 1
        after.target[row] += 1
        if after.max_output[row] > 1:
            return True
        after.done[row] = True
        after.end_ns[row] = now_ns
        self._free_source(row)
        return False

    def _free_source(self, row: int) -> None:
        """Free the KV of a computed prompt on its prefill unit, which may go on with others."""
        unit = int(self.loop.unit_of[row])
        self._sources[unit].free_finished(row)
        self.loop.wake_if_idle(FRONT, self.loop.front.engine_of_unit[unit])

    def place(self, row: int, unit: int) -> None:
        """The dispatcher chose a unit."""
        self.unit_of[row] = unit
        self._unplaced.remove(row)
        self._placed.append(row)

    def send_placed(self) -> None:
        """Send the KV of the prompts that the last poll placed."""
        placed, self._placed = self._placed, []
        for row in placed:
            target, size_bytes = self.unit_of[row], float(self._before.prompt[row]) * self._kv_bytes
            self._entry_ns[row] = self._back.enter(row, target, self.loop.now_ns)
            self._start(self.fabric.offer(row, int(self.loop.unit_of[row]), target, size_bytes, self.loop.now_ns))

    def _start(self, transfers: list[Transfer]) -> None:
        for transfer in transfers:
            self.loop.push(transfer.end_ns, TRANSFER, transfer)

    def arrived(self, transfer: Transfer) -> None:
        """The KV of a request has arrived: its blocks on the prefill unit are free, and it enters the decode unit.

        If its client hung up meanwhile, the copy is freed here.
        """
        row = transfer.row
        self._sources[transfer.source].free_finished(row)
        if row in self.unit_of:
            # If the first token is still missing, the last prompt token is computed again to get it.
            computed = int(self._before.prompt[row]) - (0 if self._from_prefill else 1)
            self._targets[transfer.target].delivered[row] = computed
        else:
            self.fabric.stores[transfer.target].drop(row)
        self._start(self.fabric.ended(transfer, self.loop.now_ns))
        self.loop.wake_if_idle(FRONT, self.loop.front.engine_of_unit[transfer.source])
        self.loop.enter_at(self._entry_ns.pop(row, 0), BACK, transfer.target, row)

    def release_copy(self, row: int, target: int) -> None:
        """Free the received copy of ``row``."""
        self._start(self.fabric.release(row, target, self.loop.now_ns))

    def decoded(self, rows: list[int]) -> None:
        """Decoding has ended: the KV that was received for it is given up."""
        for row in rows:
            if (target := self.unit_of.get(row)) is not None:
                self.release_copy(row, target)

    def departed(self, rows: list[int]) -> None:
        """Requests have ended for their clients."""
        for row in rows:
            del self.unit_of[row]

    def hang_up(self, row: int) -> bool:
        """The client of a request hung up. Returns False, without any change, if its prompt was not handed over.

        Its KV is freed on both sides. A transfer that has begun goes on to its end, since a connector cannot stop it.
        """
        if row in self._unplaced:
            self._unplaced.remove(row)
            self._dispatcher.withdraw(row)
            self._free_source(row)
            return True
        if row not in self.unit_of:
            return False
        target = self.unit_of.pop(row)
        self._entry_ns.pop(row, None)
        if not self._after.done[row] and not self.fabric.moving(row):
            self._free_source(row)
            self._start(self.fabric.withdraw(row, target, self.loop.now_ns))
        self.loop.withdraw(BACK, row, target)
        self.loop.poll(BACK)
        return True

    def died(self, full: StoreFullError) -> None:
        """A decode unit ran out of memory: its requests are lost and the run ends."""
        loop = self.loop
        loop.dead = warning(
            "decode-out-of-memory", unit=full.unit, at_s=loop.now_ns / 1e9, held_gib=full.held_bytes / _GIB,
            size_gib=full.size_bytes / _GIB, capacity_gib=full.capacity_bytes / _GIB,
        )  # fmt: skip
        for row, target in self.unit_of.items():
            if target == full.unit and not self._after.done[row]:
                loop.failed[row] = ("out_of_memory", str(loop.dead), None)
                self._after.end_ns[row] = loop.now_ns


@dataclass(frozen=True)
class _ReleaseAtAdmission(SchedulerListener):
    """Listens to the scheduler of a decode unit and frees the copy at admission, when the KV is in the cache."""

    handover: Handover
    target: int

    def admitted(self, row: int, cached_tokens: int, now_ns: int, *, first: bool) -> None:
        """See SchedulerListener."""
        self.handover.release_copy(row, self.target)
