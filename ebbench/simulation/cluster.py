"""The event loop of a cluster: one virtual clock for dispatchers, instances and KV transfers.

Events at the same nanosecond are taken in the order of their priority, then in the order they were made:

    0  ARRIVAL   a session's first request reaches the front door
    1  DELIVERY  a dispatched request reaches its unit
    2  TRANSFER  the KV of a request has arrived at its decode unit
    3  PASS      a forward pass has ended: the instance signals
    4  SIGNAL    the signal reaches the dispatcher
    5  NOTICE    the dispatcher learns which requests have ended
    6  TIMER     the dispatcher asked to be polled
    7  WAKE      an instance's oldest step has ended, or an arrival wakes it

A signal comes before its instance wakes. Without network delay a dispatcher can therefore still hand a batch to the
step that is scheduled at this very moment; with a delay of ``network_ns`` each way it cannot.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ebbench.dispatch.base import Order
from ebbench.records.plan import Plan
from ebbench.simulation.handover import Handover
from ebbench.simulation.releases import Releases
from ebbench.simulation.stage import Stage
from ebbench.simulation.state import UNSET
from ebbench.simulation.transfer import StoreFullError, Transfer

ARRIVAL, DELIVERY, TRANSFER, PASS, SIGNAL, NOTICE, TIMER, WAKE = range(8)

Tick = Callable[[int], None]


@dataclass
class Outcome:
    """What the tables do not show. ``failed``: row to (class, message, HTTP status). Times in ns, by row."""

    failed: dict[int, tuple[str, str, int | None]] = field(default_factory=dict)
    dead: str | None = None  # why the run ended before its time


class Cluster:
    """Runs a plan on a front stage, and on a back stage if prefill and decode are apart."""

    def __init__(
        self,
        plan: Plan,
        front: Stage,
        back: Stage | None = None,
        handover: Handover | None = None,
        *,
        network_ns: int = 0,
        tick: Tick | None = None,
    ) -> None:
        self.front, self.back, self.handover = front, back, handover
        self.stages = [front] if back is None else [front, back]
        self.last = self.stages[-1]
        self._network_ns, self.tick = network_ns, tick
        self._releases = Releases(plan)
        self._heap: list[tuple[int, int, int, Any]] = []
        self._sequence = 0
        self._place: dict[int, int] = {}  # decode unit of a request whose KV is on its way
        self.dispatched_ns = np.full(len(plan), UNSET, np.int64)
        self.unit_of = np.full(len(plan), UNSET, np.int64)
        self.now_ns = 0
        self.ended = 0
        self.outcome = Outcome()
        if handover is not None:
            handover.on_start = self._transfer_started
        if not plan.closed_loop:
            arrivals = np.asarray(plan.table["arrival_ns"].fill_null(0))
            for row in self._releases.first_rows:
                self._push(int(arrivals[row]), ARRIVAL, row)

    def run(self) -> None:
        """Run to the end, or until a decode instance has died. A KeyboardInterrupt leaves a consistent state behind."""
        handlers: tuple[Callable[[Any], None], ...] = (
            self._arrival, self._delivery, self._arrived_kv, self._pass, self._signal, self._notice, self._timer,
            self._wake,
        )  # fmt: skip
        try:
            self._submit(self._releases.start(), 0)
            while self._heap:
                self.now_ns, kind, _, subject = heapq.heappop(self._heap)
                handlers[kind](subject)
                if self.tick is not None:
                    self.tick(self.now_ns)
        except StoreFullError as full:
            self._died(full)

    def pass_ended(self, stage: int, node: int, start_ns: int, end_ns: int) -> None:
        """A forward pass was timed; its end will be signalled. For the sinks of instances and groups."""
        if self.stages[stage].dispatcher.wants_signals:
            self._push(end_ns, PASS, (stage, node, end_ns - start_ns))

    # Requests coming in and going out.

    def _arrival(self, row: int) -> None:
        self.front.state.intended_ns[row] = self.now_ns
        self._submit(self._releases.arrived(row), self.now_ns)

    def _submit(self, rows: list[int], intended_ns: int) -> None:
        """Requests are sent: they reach the front dispatcher."""
        if not rows:
            return
        for state in {self.front.state, self.last.state}:
            for row in rows:
                if state.intended_ns[row] < 0:
                    state.intended_ns[row] = intended_ns
                state.sent_ns[row] = self.now_ns
        for row in rows:
            self.front.dispatcher.arrive(self.front.ask(row), self.now_ns)
        self._poll(0)

    def _poll(self, index: int) -> None:
        """Carry out what a dispatcher orders, and remember when it wants to be asked again."""
        stage = self.stages[index]
        for order in stage.dispatcher.poll(self.now_ns):
            self._carry_out(index, order)
        next_ns = stage.dispatcher.next_ns(self.now_ns)
        if next_ns is not None and (stage.timer_ns is None or next_ns < stage.timer_ns):
            stage.timer_ns = next_ns
            self._push(next_ns, TIMER, index)

    def _timer(self, index: int) -> None:
        stage = self.stages[index]
        if stage.timer_ns == self.now_ns:  # others were overtaken by an earlier one
            stage.timer_ns = None
            self._poll(index)

    def _carry_out(self, index: int, order: Order) -> None:
        row, unit = order
        if unit is None:
            self._refused(row)
        elif index == 1:
            self._place[row] = unit
        else:
            self.dispatched_ns[row], self.unit_of[row] = self.now_ns, unit
            if self._network_ns:
                self._push(self.now_ns + self._network_ns, DELIVERY, (row, unit))
            else:
                self._delivery((row, unit))

    def _delivery(self, subject: tuple[int, int]) -> None:
        row, unit = subject
        stage = self.front
        stage.units[unit].add(row)
        stage.received[unit] += 1
        self._rouse(0, stage.node_of_unit[unit])

    def _refused(self, row: int) -> None:
        self.outcome.failed[row] = ("http_429", "flow control: waited too many dispatch cycles", 429)
        self.last.state.end_ns[row] = self.now_ns
        self._gone([row])

    def _gone(self, rows: list[int]) -> None:
        """Requests are over, well or not."""
        self.ended += len(rows)
        self._submit([released for row in rows for released in self._releases.ended(row)], self.now_ns)

    # Instances.

    def _rouse(self, index: int, node: int) -> None:
        stage = self.stages[index]
        if stage.nodes[node].idle and not stage.woken[node]:
            self._push_wake(self.now_ns, index, node)

    def _push_wake(self, time_ns: int, index: int, node: int) -> None:
        self.stages[index].woken[node] = True
        self._push(time_ns, WAKE, (index, node))

    def _wake(self, subject: tuple[int, int]) -> None:
        index, node = subject
        stage = self.stages[index]
        while True:
            again_ns, ended = stage.nodes[node].wake(self.now_ns)
            if not ended:
                break
            if self._network_ns and index == 0:
                self._push(self.now_ns + self._network_ns, NOTICE, (index, ended))
            else:
                self._notice((index, ended))
            if index == 0 and self.handover is not None:
                self._hand_over(ended)
            else:
                self._finished(ended)
        stage.woken[node] = False
        if again_ns is not None:
            self._push_wake(again_ns, index, node)

    def _notice(self, subject: tuple[int, list[int]]) -> None:
        index, rows = subject
        for row in rows:
            self.stages[index].dispatcher.ended(row, self.now_ns)
        self._poll(index)

    def _finished(self, rows: list[int]) -> None:
        if self.handover is not None:
            for row in rows:
                self._continue(self.handover.finished(row, self.now_ns))
        self._gone(rows)

    def _pass(self, subject: tuple[int, int, int]) -> None:
        index, node, duration_ns = subject
        signal = self.stages[index].report(node, duration_ns)
        if self._network_ns:
            self._push(self.now_ns + self._network_ns, SIGNAL, (index, signal))
        else:
            self._signal((index, signal))

    def _signal(self, subject: tuple[int, Any]) -> None:
        index, signal = subject
        self.stages[index].dispatcher.end_forward(signal, self.now_ns)
        self._poll(index)

    # From prefill to decode.

    def _hand_over(self, rows: list[int]) -> None:
        """Prompts computed in one pass are placed together, then their KV is sent."""
        assert self.back is not None
        assert self.handover is not None
        over = [row for row in rows if self.handover.prefilled(row, int(self.unit_of[row]), self.now_ns)]
        for row in over:
            self.back.dispatcher.arrive(self.back.ask(row), self.now_ns)
        self._poll(1)
        for row in over:
            self._continue(self.handover.send(row, int(self.unit_of[row]), self._place.pop(row), self.now_ns))
        if len(over) < len(rows):  # a single token was asked for: nothing to decode
            decoding = set(over)
            self._gone([row for row in rows if row not in decoding])

    def _continue(self, transfers: list[Transfer]) -> None:
        for transfer in transfers:
            self._transfer_started(transfer)

    def _transfer_started(self, transfer: Transfer) -> None:
        self._push(transfer.end_ns, TRANSFER, transfer)

    def _arrived_kv(self, transfer: Transfer) -> None:
        assert self.back is not None
        assert self.handover is not None
        self._continue(self.handover.arrived(transfer, self.now_ns))
        self.back.received[transfer.target] += 1
        self._rouse(0, self.front.node_of_unit[transfer.source])  # its blocks are free again
        self._rouse(1, self.back.node_of_unit[transfer.target])

    def _died(self, full: StoreFullError) -> None:
        """A decode unit ran out of memory: what was on it is lost, and the run ends."""
        assert self.handover is not None
        gib = 2**30
        self.outcome.dead = (
            f"decode unit {full.unit} ran out of memory at {self.now_ns / 1e9:.2f} s: {full.held_bytes / gib:.1f} GiB "
            f"of received KV held, {full.size_bytes / gib:.2f} GiB more to come, room for "
            f"{full.capacity_bytes / gib:.1f} GiB; "
            "lower the concurrency, add decode instances or turn backpressure on"
        )
        for row in self.handover.on_target(full.unit):
            self.outcome.failed[row] = ("out_of_memory", self.outcome.dead, None)
            self.last.state.end_ns[row] = self.now_ns

    def _push(self, time_ns: int, kind: int, subject: Any) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (time_ns, kind, self._sequence, subject))
