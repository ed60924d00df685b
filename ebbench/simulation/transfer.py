"""From prefill to decode: links with limited bandwidth, and receive memory.

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
from dataclasses import dataclass, field

from ebbench.simulation.state import StoreFullError


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
