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
    """All links and stores. The caller owns the clock: it starts transfers and tells when they have ended."""

    def __init__(self, link: Link, sources: int, stores: list[ReceiveStore], *, backpressure: bool) -> None:
        self._link, self.stores, self._backpressure = link, stores, backpressure
        self._out_free_ns = [0] * sources
        self._in_free_ns = [0] * len(stores)
        self._waiting: list[deque[tuple[int, int, float]]] = [deque() for _ in stores]
        self.transfers = 0
        self.bytes = 0.0
        self.busy_ns = 0

    def start(self, row: int, source: int, target: int, size_bytes: float, now_ns: int) -> Transfer | None:
        """Send; None when backpressure holds it. Raises StoreFullError when the receiver has no memory left."""
        queue = self._waiting[target]
        if self._backpressure and (queue or not self.stores[target].fits(size_bytes)):
            queue.append((row, source, size_bytes))
            return None
        return self._send(row, source, target, size_bytes, now_ns)

    def release(self, row: int, target: int, now_ns: int) -> list[Transfer]:
        """The received copy of ``row`` is given up; what was waiting for room starts."""
        store, queue = self.stores[target], self._waiting[target]
        store.drop(row)
        started = []
        while queue and store.fits(queue[0][2]):
            waiting, source, size_bytes = queue.popleft()
            started.append(self._send(waiting, source, target, size_bytes, now_ns))
        return started

    def _send(self, row: int, source: int, target: int, size_bytes: float, now_ns: int) -> Transfer:
        store = self.stores[target]
        if not self._backpressure and store.held_bytes + size_bytes > store.capacity_bytes:
            raise StoreFullError(target, store.held_bytes, size_bytes, store.capacity_bytes)
        store.put(row, size_bytes)  # memory is taken when the transfer begins
        start_ns = max(now_ns, self._out_free_ns[source], self._in_free_ns[target])
        duration_ns = self._link.duration_ns(size_bytes)
        end_ns = start_ns + duration_ns
        self._out_free_ns[source] = self._in_free_ns[target] = end_ns
        self.transfers += 1
        self.bytes += size_bytes
        self.busy_ns += duration_ns
        return Transfer(row, source, target, end_ns)
