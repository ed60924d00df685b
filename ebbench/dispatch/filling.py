"""Chooses requests for the units of one instance: by worth (``sizing``), by Algorithm 2, or in turn."""

from __future__ import annotations

from ebbench.dispatch.allocate import ChunkPacking, no_hit
from ebbench.dispatch.base import DispatchRequest, Order
from ebbench.dispatch.fleet import Fleet
from ebbench.dispatch.queues import CycleQueue, Held
from ebbench.dispatch.sizing import CANDIDATES_A_UNIT, PassModel, candidates, choose_pass
from ebbench.dispatch.staggered_settings import StaggeredSettings

BACKLOG_BATCHES = 2.0
"""Without sizing: with so many full batches waiting, filling every chunk matters more than leaving no remainders."""
MISFITS = 32
"""A cycle ends when so many requests have found no place; the rest is taken to find none either."""


class Filling:
    """Takes requests out of the queue and gives them to units of the fleet."""

    def __init__(self, fleet: Fleet, queue: CycleQueue, settings: StaggeredSettings) -> None:
        self._fleet, self._queue, self._settings = fleet, queue, settings
        self.sizing = settings.packing and settings.sizing and not settings.cache_aware
        self._next_unit = 0

    def batch(
        self, instance: int, now_ns: int, mean_pass_ns: float, overhead_tokens: float, *, gainful: bool
    ) -> list[Order]:
        """What goes to ``instance`` now; it is on its way when this returns.

        ``overhead_tokens``: see PassModel. ``gainful``: only what makes the pass worth more for its time.
        """
        backlog = {unit.index: unit.backlog_tokens for unit in self._fleet.instances[instance]}
        available = {index: self._settings.chunk_tokens - tokens for index, tokens in backlog.items()}
        if max(available.values()) <= 0:
            return []
        if self.sizing:
            return self._best_pass(backlog, now_ns, mean_pass_ns, overhead_tokens, gainful)
        return self._pack(available) if self._settings.packing else self._in_turn_over(available)

    @property
    def full_batches(self) -> float:
        """How often an instance's chunks could be filled with what is waiting."""
        units = len(self._fleet.units) / len(self._fleet.instances)
        return self._queue.tokens / (units * self._settings.chunk_tokens)

    def _send(self, request: DispatchRequest, unit: int) -> Order:
        self._fleet.send(request, self._fleet.units[unit])
        return Order(request.key, unit)

    def _best_pass(
        self, backlog: dict[int, int], now_ns: int, mean_pass_ns: float, overhead_tokens: float, gainful: bool
    ) -> list[Order]:
        """The pass that is worth most for its time, made of the oldest requests."""
        held = self._queue.oldest(CANDIDATES_A_UNIT * len(backlog))
        # A token is worth as much as a request of mean length, times the square of the batches that are waiting.
        token_worth = self.full_batches**2 * len(self._queue) / max(1, self._queue.tokens)
        chosen = choose_pass(
            candidates(
                [(h.request, h.since_ns) for h in held], now_ns, mean_pass_ns, token_worth, self._settings.patience
            ),
            backlog,
            PassModel(self._settings.chunk_tokens, overhead_tokens, token_worth, self._overdraw()),
            gainful=gainful,
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
        passed_over: list[Held] = []
        while self._queue and not packing.full and len(passed_over) < MISFITS:
            held = self._queue.pop()
            unit = packing.place(held.request)
            if unit is None:
                passed_over.append(held)
            else:
                orders.append(self._send(held.request, unit))
        self._queue.leave_over(passed_over)
        return orders

    def _overdraw(self) -> bool:
        """Whether prompts may run over the end of a chunk."""
        if self._settings.overdraw == "auto":
            # With sizing only where as much is waiting as fills every instance once: remainders decide the next pass.
            return self.full_batches >= (len(self._fleet.active) if self.sizing else BACKLOG_BATCHES)
        return self._settings.overdraw == "on"

    def _in_turn_over(self, available: dict[int, int]) -> list[Order]:
        """Without Algorithm 2: by arrival, to the units in turn, skipping those without capacity."""
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
