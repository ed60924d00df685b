"""A pool of equal engines behind one dispatcher."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ebbench.records.plan import CHUNK_TOKENS, Plan, block_tokens
from ebbench.simulation.engine import EngineLoop, Unit
from ebbench.simulation.front_end import FrontEnd
from ebbench.simulation.state import RequestState

if TYPE_CHECKING:
    from ebbench.dispatch import Dispatcher, DispatchRequest, EndForward


@dataclass
class Stage:
    """Engines and their dispatcher; None sends everything to the only unit.

    ``prefixes`` returns the leading blocks of a request's prompt; None if the dispatcher does not use them.
    ``received``: requests received per unit. ``timer_ns``: when the dispatcher wants to be polled.
    ``front_ends``: one per engine, through which clients reach it.
    """

    state: RequestState
    engines: list[EngineLoop]
    front_ends: list[FrontEnd]
    dispatcher: Dispatcher | None = None
    prefixes: Callable[[int], tuple[int, ...]] | None = None
    timer_ns: int | None = None
    units: list[Unit] = field(init=False)
    engine_of_unit: list[int] = field(init=False)
    units_of_engine: list[list[int]] = field(init=False)
    woken: list[bool] = field(init=False)
    received: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.units = [unit for engine in self.engines for unit in engine.units]
        self.engine_of_unit = [place for place, engine in enumerate(self.engines) for _ in engine.units]
        self.units_of_engine = [[] for _ in self.engines]
        for unit, place in enumerate(self.engine_of_unit):
            self.units_of_engine[place].append(unit)
        self.woken = [False] * len(self.engines)
        self.received = [0] * len(self.units)
        for served, front_end in zip(self.units, map(self.front_ends.__getitem__, self.engine_of_unit), strict=True):
            served.scheduler.front_end = front_end if front_end.streams else None

    def enter(self, row: int, unit: int, now_ns: int) -> int:
        """A request comes to the front end of the unit's engine; returns when it enters the engine, in ns."""
        return self.front_ends[self.engine_of_unit[unit]].enter(row, now_ns)

    def dispatch_request(self, row: int) -> DispatchRequest:
        """The request as the dispatcher sees it, without its output length."""
        from ebbench.dispatch import DispatchRequest

        tokens = int(self.state.prompt[row])
        return DispatchRequest(row, tokens, tokens, self.prefixes(row) if self.prefixes is not None else ())

    def report(self, engine: int, duration_ns: int) -> EndForward:
        """The signal of the engine at the end of a pass of that duration."""
        from ebbench.dispatch import EndForward, UnitReport

        schedulers = [unit.scheduler for unit in self.engines[engine].units]
        generates = any(scheduler.generates for scheduler in schedulers)
        if generates and self.dispatcher is not None and not self.dispatcher.wants_units:
            return EndForward(engine, duration_ns, continues=True, generates=True)
        reports = []
        continues = generates
        for unit, scheduler in zip(self.units_of_engine[engine], schedulers, strict=True):
            queued = scheduler.queued_tokens()
            continues = continues or queued > 0 or self.engines[engine].busy
            kv_tokens = scheduler.kv_blocks_used * scheduler.limits.block_size
            reports.append(UnitReport(unit, self.received[unit], queued, kv_tokens))
        return EndForward(engine, duration_ns, continues, generates, tuple(reports))


def prefix_reader(plan: Plan) -> Callable[[int], tuple[int, ...]]:
    """Returns a function for the prefix hashes of a plan's prompts, one per 512 tokens: hash ids if the plan has them,
    else content."""
    step = max(1, CHUNK_TOKENS // block_tokens(plan.table))
    hash_ids = plan.table["hash_ids"].to_pylist()
    content = plan.table["content"].to_pylist()
    tokens = plan.table["input_tokens"].to_pylist()

    def read(row: int) -> tuple[int, ...]:
        if hash_ids[row]:
            return tuple(hash_ids[row][step - 1 :: step])
        return tuple(_blocks(content[row], tokens[row] // CHUNK_TOKENS))

    return read


def _blocks(content: int, count: int) -> Iterator[int]:
    return (hash((content, block)) for block in range(count))
