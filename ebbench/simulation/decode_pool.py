"""The way of requests from the prefill stage to the decode stage of an event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ebbench.simulation.events import BACK, FRONT, TRANSFER
from ebbench.simulation.transfer import Handover, StoreFullError, Transfer

if TYPE_CHECKING:
    from ebbench.simulation.loop import EventLoop

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
        self._entry_ns: dict[int, int] = {}  # when the decode unit's API server is done with a request
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
            if (servers := loop.back.api_servers_of(target)) is not None:
                self._entry_ns[row] = servers.enter(row, loop.now_ns)
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
        loop.outcome.dead = (
            f"decode unit {full.unit} ran out of memory at {loop.now_ns / 1e9:.2f} s: {full.held_bytes / GIB:.1f} GiB "
            f"of received KV held, {full.size_bytes / GIB:.2f} GiB more to come, room for "
            f"{full.capacity_bytes / GIB:.1f} GiB; "
            "lower the concurrency, add decode instances or turn backpressure on"
        )
        for row in self._handover.on_target(full.unit):
            loop.outcome.failed[row] = ("out_of_memory", loop.outcome.dead, None)
            loop.last.state.end_ns[row] = loop.now_ns
