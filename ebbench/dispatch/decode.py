"""Dispatch to decode units: requests that arrived together are placed together by Algorithm 3."""

from __future__ import annotations

from collections.abc import Sequence

from ebbench.dispatch.allocate import Load, allocate_decode
from ebbench.dispatch.base import DispatchRequest, Order
from ebbench.dispatch.fleet import Fleet
from ebbench.dispatch.immediate import UntimedDispatcher


class DecodeDispatcher(UntimedDispatcher):
    """Places the requests that arrived since the last poll: IQR mask, then the least (B, K)."""

    wants_signals = True
    wants_units = True

    def __init__(self, fleet: Fleet, multiplier: float = 1.5) -> None:
        super().__init__(fleet)
        self._multiplier = multiplier

    def _place(self, requests: Sequence[DispatchRequest]) -> list[Order]:
        loads = {unit.index: Load(unit.open_requests, unit.kv_tokens) for unit in self.fleet.candidates}
        placed = allocate_decode(requests, loads, self._multiplier)
        for request, unit in placed:
            self.fleet.send(request, self.fleet.units[unit])
        return [Order(request.key, unit) for request, unit in placed]
