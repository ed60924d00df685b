"""Dispatch to decode units: whatever arrived together is placed together by Algorithm 3."""

from __future__ import annotations

from collections.abc import Iterable

from ebbench.dispatch.allocate import Load, allocate_decode
from ebbench.dispatch.base import Ask, EndForward, Order
from ebbench.dispatch.fleet import Fleet


class DecodeDispatcher:
    """Places the requests that arrived since the last poll: IQR mask, then the least (B, K)."""

    wants_signals = True
    wants_units = True
    wants_prefix = False

    def __init__(self, fleet: Fleet, multiplier: float = 1.5) -> None:
        self.fleet = fleet
        self._multiplier = multiplier
        self._held: dict[int, Ask] = {}

    @property
    def waiting(self) -> int:
        """Requests held back."""
        return len(self._held)

    def arrive(self, ask: Ask, now_ns: int) -> None:
        """See Dispatcher."""
        self._held[ask.key] = ask

    def poll(self, now_ns: int) -> list[Order]:
        """See Dispatcher."""
        if not self._held or not self.fleet.candidates:
            return []
        loads = {unit.index: Load(unit.open_requests, unit.kv_tokens) for unit in self.fleet.candidates}
        placed = allocate_decode(list(self._held.values()), loads, self._multiplier)
        self._held.clear()
        for ask, unit in placed:
            self.fleet.send(ask, self.fleet.units[unit])
        return [Order(ask.key, unit) for ask, unit in placed]

    def next_ns(self, now_ns: int) -> int | None:
        """Nothing is ever timed."""
        return None

    def end_forward(self, signal: EndForward, now_ns: int) -> None:
        """See Dispatcher."""
        self.fleet.report(signal)

    def prefilled(self, key: int, now_ns: int) -> None:
        """See Dispatcher."""
        self.fleet.prefilled(key)

    def ended(self, key: int, now_ns: int) -> None:
        """See Dispatcher."""
        self.fleet.ended(key)

    def withdraw(self, key: int) -> None:
        """See Dispatcher."""
        self._held.pop(key, None)

    def topology(self, active: Iterable[int], now_ns: int) -> None:
        """See Dispatcher."""
        self.fleet.set_active(active)
