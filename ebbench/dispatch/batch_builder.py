"""Builds the batch for one instance: by value of the pass (``sizing``), by Algorithm 2, or round robin."""

from __future__ import annotations

from ebbench.dispatch.allocate import ChunkPacking, no_hit
from ebbench.dispatch.base import DispatchRequest, Order
from ebbench.dispatch.fleet import Fleet
from ebbench.dispatch.queues import CycleQueue, QueuedRequest
from ebbench.dispatch.sizing import CANDIDATES_A_UNIT, PassModel, candidates, choose_pass
from ebbench.dispatch.staggered_settings import StaggeredSettings

BACKLOG_BATCHES = 2.0
"""Without sizing: from this many waiting full batches on, filling every chunk matters more than avoiding remainders."""
MISFITS = 32
"""A cycle ends after this many requests that fit nowhere; the remaining ones are assumed not to fit either."""


class BatchBuilder:
    """Moves requests from the queue to units of the fleet."""

    def __init__(self, fleet: Fleet, queue: CycleQueue, settings: StaggeredSettings) -> None:
        self._fleet, self._queue, self._settings = fleet, queue, settings
        self.sizing = settings.packing and settings.sizing and not settings.cache_aware
        self._next_unit = 0

    def batch(
        self, instance: int, now_ns: int, mean_pass_ns: float, overhead_tokens: float, *, only_if_gain: bool
    ) -> list[Order]:
        """The orders of the next batch for ``instance``; the fleet counts them as sent when this returns.

        ``overhead_tokens``: see PassModel. ``only_if_gain``: send only requests that raise the value of the pass per
        time.
        """
        backlog = {unit.index: unit.backlog_tokens for unit in self._fleet.instances[instance]}
        available = {index: self._settings.chunk_tokens - tokens for index, tokens in backlog.items()}
        if max(available.values()) <= 0:
            return []
        if self.sizing:
            return self._best_pass(backlog, now_ns, mean_pass_ns, overhead_tokens, only_if_gain)
        return self._pack(available) if self._settings.packing else self._round_robin(available)

    @property
    def full_batches(self) -> float:
        """Number of batches, with all chunks of an instance full, that the waiting requests would fill."""
        units = len(self._fleet.units) / len(self._fleet.instances)
        return self._queue.tokens / (units * self._settings.chunk_tokens)

    def _send(self, request: DispatchRequest, unit: int) -> Order:
        self._fleet.send(request, self._fleet.units[unit])
        return Order(request.key, unit)

    def _best_pass(
        self, backlog: dict[int, int], now_ns: int, mean_pass_ns: float, overhead_tokens: float, only_if_gain: bool
    ) -> list[Order]:
        """The pass with the highest value per time, built from the oldest requests."""
        held = self._queue.oldest(CANDIDATES_A_UNIT * len(backlog))
        # A token is worth as much as a request of mean length, times the square of the number of waiting batches.
        token_worth = self.full_batches**2 * len(self._queue) / max(1, self._queue.tokens)
        chosen = choose_pass(
            candidates(
                [(h.request, h.since_ns) for h in held], now_ns, mean_pass_ns, token_worth, self._settings.patience
            ),
            backlog,
            PassModel(self._settings.chunk_tokens, overhead_tokens, token_worth, self._overdraw()),
            only_if_gain=only_if_gain,
        )
        for request, _ in chosen:
            self._queue.withdraw(request.key)
        return [self._send(request, unit) for request, unit in chosen]

    def _pack(self, available: dict[int, int]) -> list[Order]:
        """Algorithm 2."""
        memory = self._fleet.memory
        hit = memory.hit_tokens if self._settings.cache_aware and memory is not None else no_hit
        packing = ChunkPacking(available, hit, None if self._overdraw() else self._settings.chunk_tokens)
        orders: list[Order] = []
        passed_over: list[QueuedRequest] = []
        while self._queue and not packing.full and len(passed_over) < MISFITS:
            held = self._queue.pop()
            unit = packing.place(held.request)
            if unit is None:
                passed_over.append(held)
            else:
                orders.append(self._send(held.request, unit))
        self._queue.put_back(passed_over)
        return orders

    def _overdraw(self) -> bool:
        """Whether prompts may exceed the end of a chunk."""
        if self._settings.overdraw == "auto":
            # With sizing, only if the waiting requests fill every instance once: remainders determine the next pass.
            return self.full_batches >= (len(self._fleet.active) if self.sizing else BACKLOG_BATCHES)
        return self._settings.overdraw == "on"

    def _round_robin(self, available: dict[int, int]) -> list[Order]:
        """Without Algorithm 2: in order of arrival to the units in turn, skipping units without capacity."""
        orders: list[Order] = []
        while self._queue:
            open_units = [unit for unit, capacity in available.items() if capacity > 0]
            if not open_units:
                break
            unit = open_units[self._next_unit % len(open_units)]
            self._next_unit += 1
            request = self._queue.pop().request
            available[unit] -= request.tokens
            orders.append(self._send(request, unit))
        return orders
