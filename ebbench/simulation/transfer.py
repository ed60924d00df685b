"""From prefill to decode: links with limited bandwidth, receive memory, and the handover of requests.

A prefill unit runs requests of one output token and keeps the KV blocks of a computed prompt until they have been
transferred. A link carries the KV of one request at a time, in the order in which prompts finished; a transfer uses the
sender's outgoing and the receiver's incoming direction. A decode unit admits a request with delivered KV without
computing its prompt; after a preemption it must compute it.

The received copy uses memory outside the receiver's KV cache. vLLM's P2P NCCL connector keeps it until the request has
finished and cannot refuse more, so an overloaded decode instance runs out of memory; with backpressure, transfers wait
for room.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ebbench.config.topology import TransferSpec
from ebbench.records.warnings import warning
from ebbench.simulation.scheduler import Scheduler, SchedulerListener
from ebbench.simulation.state import BACK, FRONT, TRANSFER, RequestState, StoreFullError

if TYPE_CHECKING:
    from ebbench.dispatch import Dispatcher
    from ebbench.simulation.loop import EventLoop, Stage

GIB = 2**30


@dataclass(frozen=True)
class TransferLink:
    """Speed of every instance's connection (one way), and the fixed time per transfer."""

    bytes_per_s: float
    latency_s: float

    def duration_ns(self, size_bytes: float) -> int:
        """Duration (ns) of the transfer of one request's KV."""
        return round((self.latency_s + size_bytes / self.bytes_per_s) * 1e9)


@dataclass
class ReceiveStore:
    """Memory of one decode unit for received KV."""

    capacity_bytes: float
    held: dict[int, float] = field(default_factory=dict)
    held_bytes: float = 0.0
    peak_bytes: float = 0.0

    def fits(self, size_bytes: float) -> bool:
        """Whether there is room. An empty store accepts any size, so that no transfer waits forever."""
        return not self.held or self.held_bytes + size_bytes <= self.capacity_bytes

    def put(self, row: int, size_bytes: float) -> None:
        """Allocate memory."""
        self.held[row] = size_bytes
        self.held_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def drop(self, row: int) -> None:
        """Free the memory of this request, if any."""
        self.held_bytes -= self.held.pop(row, 0.0)


@dataclass(frozen=True)
class Transfer:
    """One request's KV in transfer; units are counted within their pool."""

    row: int
    source: int
    target: int
    end_ns: int


class TransferFabric:
    """All links and stores. The caller owns the clock: it asks what starts and reports what has ended."""

    def __init__(self, link: TransferLink, sources: int, stores: list[ReceiveStore], *, backpressure: bool) -> None:
        self._link, self.stores, self._backpressure = link, stores, backpressure
        self._sending = [False] * sources
        self._receiving = [False] * len(stores)
        # Transfers that are ready, by target and source: (order, row, bytes).
        self._queues: list[list[deque[tuple[int, int, float]]]] = [[deque() for _ in range(sources)] for _ in stores]
        self._order = 0
        self._moving: set[int] = set()  # rows whose transfers have begun and not ended
        self.transfers = 0
        self.bytes = 0.0

    def forget_totals(self) -> None:
        """Reset the counts of transfers and bytes and the peaks of the stores."""
        self.transfers, self.bytes = 0, 0.0
        for store in self.stores:
            store.peak_bytes = store.held_bytes

    def offer(self, row: int, source: int, target: int, size_bytes: float, now_ns: int) -> list[Transfer]:
        """Queue the KV of ``row``; returns the transfers that start now. Raises StoreFullError."""
        self._order += 1
        self._queues[target][source].append((self._order, row, size_bytes))
        return self._start(target, now_ns)

    def ended(self, transfer: Transfer, now_ns: int) -> list[Transfer]:
        """Record a complete transfer; returns those that start on its links. Raises StoreFullError."""
        self._moving.remove(transfer.row)
        self._sending[transfer.source] = self._receiving[transfer.target] = False
        started = self._start(transfer.target, now_ns)
        for target in range(len(self.stores)):
            started += self._start(target, now_ns)
        return started

    def release(self, row: int, target: int, now_ns: int) -> list[Transfer]:
        """Free the received copy of ``row``; returns transfers that waited for room and start now."""
        self.stores[target].drop(row)
        return self._start(target, now_ns) if self._backpressure else []

    def moving(self, row: int) -> bool:
        """Whether the KV of ``row`` is on a link now."""
        return row in self._moving

    def withdraw(self, row: int, target: int, now_ns: int) -> list[Transfer]:
        """Forget the KV of ``row``, which is not on a link: it waits for one, or has arrived.

        Returns the transfers that start now. Raises StoreFullError.
        """
        self.stores[target].drop(row)
        for queue in self._queues[target]:
            for entry in queue:
                if entry[1] == row:
                    queue.remove(entry)
                    break
        return self._start(target, now_ns)

    def _start(self, target: int, now_ns: int) -> list[Transfer]:
        """Start the oldest transfer to ``target`` whose links are free, if there is room."""
        if self._receiving[target]:
            return []
        heads = [
            (queue[0], source)
            for source, queue in enumerate(self._queues[target])
            if queue and not self._sending[source]
        ]
        if not heads:
            return []
        (_, row, size_bytes), source = min(heads)
        store = self.stores[target]
        if self._backpressure and not store.fits(size_bytes):
            return []
        if store.held_bytes + size_bytes > store.capacity_bytes and not self._backpressure:
            raise StoreFullError(target, store.held_bytes, size_bytes, store.capacity_bytes)
        self._queues[target][source].popleft()
        store.put(row, size_bytes)  # memory is allocated when the transfer begins
        self._sending[source] = self._receiving[target] = True
        self._moving.add(row)
        duration_ns = self._link.duration_ns(size_bytes)
        self.transfers += 1
        self.bytes += size_bytes
        return [Transfer(row, source, target, now_ns + duration_ns)]


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
            "decode-out-of-memory", unit=full.unit, at_s=loop.now_ns / 1e9, held_gib=full.held_bytes / GIB,
            size_gib=full.size_bytes / GIB, capacity_gib=full.capacity_bytes / GIB,
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
