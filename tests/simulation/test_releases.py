"""Releases after requests that end together, and after requests that fail."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from ebbench.records.plan import ClosedPhase
from ebbench.records.schema import PLAN_EXTRAS
from ebbench.simulation.releases import Releases
from tests.simulation.worlds import plan

PHASES = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 5)), min_size=1, max_size=4)


@given(PHASES, st.integers(0, 8), st.lists(st.integers(1, 4), min_size=1, max_size=30))
def test_requests_that_end_together_release_one_after_the_other(
    phases: list[tuple[int, int]], warmup: int, sizes: list[int]
) -> None:
    closed = [ClosedPhase(str(place), sessions, most) for place, (sessions, most) in enumerate(phases)]
    requests = plan([(5, 3)] * sum(sessions for sessions, _ in phases), phases=closed)
    together, single = Releases(requests, warmup), Releases(requests, warmup)
    open_rows = together.start()
    assert single.start() == open_rows
    for size in sizes:
        ending, open_rows = open_rows[:size], open_rows[size:]
        released = together.all_ended(ending)
        assert released == [later for row in ending for later in single.ended(row)]
        open_rows += released
    assert together.begun == single.begun


def test_a_request_that_waits_for_two_failed_ones_is_given_up_once() -> None:
    """Its session ends with the second failure, which frees the slot for the next session."""
    requests = plan([(5, 3)] * 8, turns=4, concurrency=1)
    after = pa.array([None, [0], [0], [1, 2]] * 2, pa.list_(pa.int32()))
    requests = replace(requests, table=requests.table.append_column(PLAN_EXTRAS.field("after"), after))
    releases = Releases(requests)
    assert releases.start() == [0]
    assert releases.ended(0) == [1, 2]
    assert releases.failed(1) == ([3], [])
    assert releases.failed(2) == ([], [4])
