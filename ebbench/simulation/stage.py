"""A pool of instances behind one dispatcher, as the cluster's clock sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from ebbench.dispatch.base import Ask, Dispatcher, EndForward, UnitReport
from ebbench.dispatch.prefix import BLOCK_TOKENS
from ebbench.records.plan import Plan
from ebbench.simulation.instance import Instance
from ebbench.simulation.state import RequestState


class Node(Protocol):
    """What the clock wakes: a single instance, or a group of units with a barrier."""

    @property
    def idle(self) -> bool:
        """Whether a new arrival must wake it."""
        ...

    def wake(self, now_ns: int) -> tuple[int | None, list[int]]:
        """Go on at ``now_ns``; returns when to be woken again, and the rows that ended."""
        ...


@dataclass
class Stage:
    """Units, the nodes they belong to, and the dispatcher in front of them.

    ``prefixes`` names the leading blocks of a request's prompt, None where the dispatcher does not look at them.
    """

    state: RequestState
    units: list[Instance]
    nodes: list[Node]
    node_of_unit: list[int]
    dispatcher: Dispatcher
    block_size: int
    prefixes: Callable[[int], tuple[int, ...]] | None = None
    timer_ns: int | None = None
    woken: list[bool] = field(init=False)
    received: list[int] = field(init=False)
    units_of_node: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.woken = [False] * len(self.nodes)
        self.received = [0] * len(self.units)
        self.units_of_node = [[] for _ in self.nodes]
        for unit, node in enumerate(self.node_of_unit):
            self.units_of_node[node].append(unit)

    def ask(self, row: int) -> Ask:
        """The request as the dispatcher may see it: its answer's length is not known beforehand."""
        tokens = int(self.state.prompt[row])
        return Ask(row, tokens, tokens, self.prefixes(row) if self.prefixes is not None else ())

    def report(self, node: int, duration_ns: int) -> EndForward:
        """What the node would signal now."""
        units = self.units_of_node[node]
        generates = any(self.units[unit].generates for unit in units)
        if generates and not self.dispatcher.wants_units:
            return EndForward(node, duration_ns, goes_on=True, generates=True)
        reports = []
        goes_on = generates
        for unit in units:
            instance = self.units[unit]
            queued = instance.queued_tokens()
            goes_on = goes_on or queued > 0 or instance.busy
            reports.append(UnitReport(unit, self.received[unit], queued, instance.kv_blocks_used * self.block_size))
        return EndForward(node, duration_ns, goes_on, generates, tuple(reports))


def prefix_reader(plan: Plan) -> Callable[[int], tuple[int, ...]]:
    """Prefix hashes of a plan's prompts, one per 512 tokens: hash ids where the plan has them, else content."""
    hash_ids = plan.table["hash_ids"].to_pylist()
    content = plan.table["content"].to_pylist()
    tokens = plan.table["input_tokens"].to_pylist()

    def read(row: int) -> tuple[int, ...]:
        if hash_ids[row]:
            return tuple(hash_ids[row])
        return tuple(_blocks(content[row], tokens[row] // BLOCK_TOKENS))

    return read


def _blocks(content: int, count: int) -> Iterator[int]:
    return (hash((content, block)) for block in range(count))
