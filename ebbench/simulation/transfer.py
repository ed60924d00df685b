"""KV transfer between pools: links of limited bandwidth, and the memory that receives.

A link carries one request's KV after the other, in the order the prompts were finished; a transfer takes the sender's
way out and the receiver's way in. The received copy takes memory outside the receiver's KV cache. vLLM's P2P NCCL
connector keeps it until the request has finished and has no way to refuse more, so an overloaded decode instance runs
out of memory; with backpressure transfers wait for room instead.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Link:
    """Speed of every instance's connection, one way, and what a transfer costs whatever its size."""

    bytes_per_s: float
    latency_s: float

    def duration_ns(self, size_bytes: float) -> int:
        """How long the transfer of one request's KV takes."""
        return round((self.latency_s + size_bytes / self.bytes_per_s) * 1e9)


class StoreFullError(Exception):
    """The receiving GPU is out of memory; carries what was held and what was to come, in bytes."""

    def __init__(self, unit: int, held_bytes: float, size_bytes: float, capacity_bytes: float) -> None:
        super().__init__(unit)
        self.unit, self.held_bytes, self.size_bytes = unit, held_bytes, size_bytes
        self.capacity_bytes = capacity_bytes


@dataclass
class ReceiveStore:
    """Memory of one decode unit for received KV."""

    capacity_bytes: float
    held: dict[int, float] = field(default_factory=dict)
    held_bytes: float = 0.0
    peak_bytes: float = 0.0

    def fits(self, size_bytes: float) -> bool:
        """Whether there is room. A store that is empty takes anything, so that nothing waits for ever."""
        return not self.held or self.held_bytes + size_bytes <= self.capacity_bytes

    def put(self, row: int, size_bytes: float) -> None:
        """Take memory."""
        self.held[row] = size_bytes
        self.held_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def drop(self, row: int) -> None:
        """Give memory back, if there is any of this request."""
        self.held_bytes -= self.held.pop(row, 0.0)


@dataclass(frozen=True)
class Transfer:
    """One request's KV on its way, units counted within their pool."""

    row: int
    source: int
    target: int
    end_ns: int


class TransferFabric:
    """All links and stores. The caller owns the clock: it asks what starts, and tells what has ended."""

    def __init__(self, link: Link, sources: int, stores: list[ReceiveStore], *, backpressure: bool) -> None:
        self._link, self.stores, self._backpressure = link, stores, backpressure
        self._sending = [False] * sources
        self._receiving = [False] * len(stores)
        # What is ready to go, by target and source; (order, row, bytes).
        self._queues: list[list[deque[tuple[int, int, float]]]] = [[deque() for _ in range(sources)] for _ in stores]
        self._order = 0
        self.transfers = 0
        self.bytes = 0.0

    def offer(self, row: int, source: int, target: int, size_bytes: float, now_ns: int) -> list[Transfer]:
        """The KV of ``row`` is ready to go; returns what starts now. Raises StoreFullError."""
        self._order += 1
        self._queues[target][source].append((self._order, row, size_bytes))
        return self._start(target, now_ns)

    def ended(self, transfer: Transfer, now_ns: int) -> list[Transfer]:
        """A transfer is complete; returns what starts on the links it leaves. Raises StoreFullError."""
        self._sending[transfer.source] = self._receiving[transfer.target] = False
        started = self._start(transfer.target, now_ns)
        for target in range(len(self.stores)):
            started += self._start(target, now_ns)
        return started

    def release(self, row: int, target: int, now_ns: int) -> list[Transfer]:
        """The received copy of ``row`` is given up; returns what was waiting for room and starts."""
        self.stores[target].drop(row)
        return self._start(target, now_ns) if self._backpressure else []

    def _start(self, target: int, now_ns: int) -> list[Transfer]:
        """Start the oldest transfer to ``target`` whose two ways are free, if there is room."""
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
        store.put(row, size_bytes)  # memory is taken when the transfer begins
        self._sending[source] = self._receiving[target] = True
        duration_ns = self._link.duration_ns(size_bytes)
        self.transfers += 1
        self.bytes += size_bytes
        return [Transfer(row, source, target, now_ns + duration_ns)]
