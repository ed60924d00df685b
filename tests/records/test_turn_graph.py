"""The graph of a session's requests."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pytest

from ebbench.errors import UsageError
from ebbench.records.manifest import plan_hash
from ebbench.records.plan import turn_graph
from ebbench.records.schema import PLAN, PLAN_EXTRAS
from tests.simulation.worlds import plan


def table(after: list[list[int] | None], **extras: list[int | None]) -> pa.Table:
    made = plan([(5, 3)] * len(after), turns=len(after), concurrency=1).table
    made = made.append_column(PLAN_EXTRAS.field("after"), pa.array(after, pa.list_(pa.int32())))
    for name, values in extras.items():
        made = made.append_column(PLAN_EXTRAS.field(name), pa.array(values, pa.int64()))
    return made


def test_without_the_column_turns_follow_one_another() -> None:
    graph = turn_graph(plan([(5, 3)] * 6, turns=3, concurrency=1).table)
    assert graph.waits.tolist() == [0, 1, 1, 0, 1, 1]
    assert [graph.followers(row) for row in range(6)] == [[1], [2], [], [4], [5], []]
    assert (graph.first_rows, graph.branched, graph.pause_ns) == ([0, 3], False, None)


def test_turns_start_together_and_join() -> None:
    graph = turn_graph(table([None, [0], [0], [], [1, 2], None], pause_ns=[None, 7, None, None, None, None]))
    assert graph.waits.tolist() == [0, 1, 1, 0, 2, 1]
    assert graph.followers(0) == [1, 2]
    assert graph.followers(1) == graph.followers(2) == [4]
    assert graph.parallel_starts == {0: [3]}
    assert sorted(graph.descendants(1)) == [4, 5]
    assert [graph.pause_of(row) for row in range(7)] == [0, 7, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("wrong", [[1], [2], [-1], [9]])
def test_a_turn_that_waits_for_no_earlier_one_is_refused(wrong: list[int]) -> None:
    with pytest.raises(UsageError, match=r"r0001 waits for turn -?\d, which is not an earlier turn"):
        turn_graph(table([None, wrong, None]))


def test_the_hash_of_a_plan_covers_its_extra_columns() -> None:
    bare = plan([(5, 3)] * 3, turns=3, concurrency=1)
    assert bare.table.schema.equals(PLAN)
    some = [replace(bare, table=table([None, None, None], pause_ns=[0, pause, 0])) for pause in (1, 2)]
    assert len({plan_hash(one) for one in (bare, *some)}) == 3
