"""A pool of equal engines behind one dispatcher, and its construction."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ebbench.config.topology import PoolSpec
from ebbench.devices.base import CostModel, StepShape
from ebbench.devices.profiles import ApiServerCosts
from ebbench.records.plan import CHUNK_TOKENS, Plan, block_tokens
from ebbench.simulation.api_server import ApiServers
from ebbench.simulation.engine import EngineLoop, Unit
from ebbench.simulation.kv import KvBlocks
from ebbench.simulation.scheduler import Scheduler
from ebbench.simulation.state import RequestState
from ebbench.simulation.step import SchedulerLimits, StepSink
from vllm_eb.controller import Controller

if TYPE_CHECKING:
    from ebbench.dispatch import Dispatcher, DispatchRequest, EndForward
    from ebbench.simulation.drafting import Drafting

MakeController = Callable[[int], Controller | None]
"""Creates the controller of a unit from its number of KV blocks; None is vLLM's own scheduling."""
MakeKv = Callable[[RequestState, int], KvBlocks]
"""Creates the KV manager of a unit from the requests and its number of KV blocks."""


@dataclass
class Stage:
    """Engines and their dispatcher; None sends everything to the only unit.

    ``prefixes`` returns the leading blocks of a request's prompt; None if the dispatcher does not use them.
    ``received``: requests received per unit. ``timer_ns``: when the dispatcher wants to be polled.
    ``api_servers``: one per engine; empty if clients reach the engines without them.
    """

    state: RequestState
    engines: list[EngineLoop]
    dispatcher: Dispatcher | None = None
    prefixes: Callable[[int], tuple[int, ...]] | None = None
    timer_ns: int | None = None
    api_servers: list[ApiServers] = field(default_factory=list)
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
        for place, servers in enumerate(self.api_servers):
            for served in self.engines[place].units:
                served.scheduler.api_servers = servers if servers.streams else None

    def api_servers_of(self, unit: int) -> ApiServers | None:
        """The API servers of the unit's engine; None if it has none."""
        return self.api_servers[self.engine_of_unit[unit]] if self.api_servers else None

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


@dataclass(frozen=True)
class StageSpec:
    """Everything that determines a stage.

    ``cost``: cost model of one unit. ``dispatch`` None: there is only one unit. ``prefill_only``: it computes prompts
    whose KV is then transferred. ``generates``: requests ask for more than their first token. ``first_unit``: index of
    its first unit among those of all stages. ``api_server``: costs of an API server, None without;
    ``api_server_count``: processes per engine, None is one per unit. ``drafting``: None without speculative decoding.
    """

    pool: PoolSpec
    cost: CostModel
    limits: SchedulerLimits
    kv_blocks: int
    make_kv: MakeKv
    make_controller: MakeController
    dispatch: str | None = None
    prefill_only: bool = False
    generates: bool = True
    network_ns: int = 0
    first_unit: int = 0
    api_server: ApiServerCosts | None = None
    api_server_count: int | None = None
    drafting: Drafting | None = None


def _scheduler(state: RequestState, spec: StageSpec, kv: KvBlocks) -> Scheduler:
    if spec.drafting is None:
        return Scheduler(state, spec.limits, kv, keep_finished=spec.prefill_only)
    from ebbench.simulation.drafting import DraftingScheduler

    return DraftingScheduler(state, spec.limits, kv, spec.drafting)


def build_stage(
    plan: Plan, state: RequestState, spec: StageSpec, sink: StepSink, seed: int
) -> tuple[Stage, list[Controller]]:
    """Build the engines of one stage and their dispatcher; also returns the controllers, by unit."""
    units: list[Unit] = []
    controllers: list[Controller] = []
    for number in range(spec.pool.units):
        kv = spec.make_kv(state, spec.kv_blocks)
        scheduler = _scheduler(state, spec, kv)
        controller = spec.make_controller(spec.kv_blocks)
        if controller is not None:
            controllers.append(controller)
        units.append(Unit.of(spec.first_unit + number, scheduler, controller))
    size = spec.pool.dp
    engines = [
        EngineLoop(units[size * place : size * (place + 1)], spec.cost, sink) for place in range(spec.pool.instances)
    ]
    servers = _api_servers(spec, state, len(engines))
    if spec.dispatch is None:
        return Stage(state, engines, api_servers=servers), controllers
    from ebbench.dispatch import Fleet, make_dispatcher, parse_dispatch

    dispatcher = make_dispatcher(
        parse_dispatch(spec.dispatch),
        Fleet([size] * spec.pool.instances),
        chunk_tokens=spec.limits.max_num_batched_tokens,
        network_ns=2 * spec.network_ns,
        default_forward_ns=_first_guess_ns(spec),
        seed=seed,
        generates=spec.generates,
    )
    prefixes = prefix_reader(plan) if dispatcher.wants_prefix else None
    return Stage(state, engines, dispatcher, prefixes, api_servers=servers), controllers


def _api_servers(spec: StageSpec, state: RequestState, engines: int) -> list[ApiServers]:
    if spec.api_server is None:
        return []
    count = spec.api_server_count or spec.pool.dp
    return [ApiServers(spec.api_server, count, state) for _ in range(engines)]


def _first_guess_ns(spec: StageSpec) -> int:
    """Forward time (ns) assumed before the first measurement: that of a full chunk (the paper measures it offline)."""
    chunk = spec.limits.max_num_batched_tokens
    return round(spec.cost.step_s(StepShape(((chunk, 0),), 0, 0, 1)) * 1e9)


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
