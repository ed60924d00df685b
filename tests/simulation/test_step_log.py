"""Tables that are made piece by piece are the same as those made at once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbench.devices.loader import load_device
from ebbench.engines.sim import SimEngine
from ebbench.errors import RunError
from ebbench.records import files
from ebbench.records.run import NotStoredError, RunWriter
from ebbench.runs.conclude import RunContext, conclude
from ebbench.simulation import state, step
from ebbench.simulation.step import FOLD, Step, StepLog
from ebbench.spec.server import EngineOptions
from ebbench.workloads import build_plan
from tests.simulation.worlds import World, worlds
from vllm_eb.policy import parse_policy


@given(worlds(), st.integers(1, 9), st.integers(0, 5))
def test_tables_do_not_depend_on_the_size_of_their_pieces(world: World, fold: int, warmup: int) -> None:
    world = replace(world, options=replace(world.options, warmup=warmup))
    at_once = world.run()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "FOLD", fold)
        patch.setattr(state, "_SLOTS_AT_ONCE", fold)
        folded = world.run()
        parts = world.on(SimEngine(steps_in_parts=True))
        assert parts.step_parts is not None
        assert parts.step_parts.table().equals(at_once.steps)
        assert parts.step_parts.num_rows == at_once.steps.num_rows
        assert parts.last_mode == at_once.last_mode
    assert not parts.steps.num_rows
    assert folded.steps.equals(at_once.steps)
    assert folded.requests.equals(at_once.requests)
    assert folded.decisions.equals(at_once.decisions)
    assert folded.steps["step_id"].to_pylist() == list(range(folded.steps.num_rows))


@given(worlds(), st.integers(0, 5))
def test_the_numbers_that_figures_need_are_those_of_the_table(world: World, warmup: int) -> None:
    world = replace(world, options=replace(world.options, warmup=warmup))
    whole, figures = world.run(), world.on(SimEngine(figures_only=True))
    assert figures.steps.equals(whole.steps.select(figures.steps.column_names))
    assert {"phase", "running", "preemptions", "kv_blocks_total"} < set(figures.steps.column_names)
    assert figures.requests.equals(whole.requests)
    assert figures.last_mode == ""


def test_steps_in_parts_are_stored_as_the_table_is(tmp_path: Path) -> None:
    plan = build_plan("balanced", num_prompts=30, max_concurrency=8)
    device, options, policy = load_device("h200", "qwen3-8b"), EngineOptions(), parse_policy("v1")
    context = RunContext(plan, policy, "sim", device, options, 0)
    results = [SimEngine(steps_in_parts=parts).run(plan, policy, device, options) for parts in (False, True)]
    stored = []
    for number, result in enumerate(results):
        with RunWriter.create(tmp_path / str(number)) as writer:
            conclude(writer, context, result)
        stored.append((tmp_path / str(number) / "steps.parquet").read_bytes())
    assert stored[0] == stored[1]
    with pytest.MonkeyPatch.context() as patch, RunWriter.create(tmp_path / "full") as writer:
        patch.setattr(files, "write_parts", _full_disk)
        with pytest.raises(NotStoredError) as lost:
            conclude(writer, context, results[1])
    assert lost.value.run is not None
    assert lost.value.run.table("steps").equals(results[0].steps)


def _full_disk(*_: object) -> None:
    raise RunError("no space left")


def test_no_more_steps_than_the_fold_are_kept_as_objects() -> None:
    log = StepLog()
    for number in range(2 * FOLD + 3):
        log.step(number % 2, Step(number))
    assert len(log._kept.steps) == 3
    assert len(log) == 2 * FOLD + 3
    assert log.steps_per_instance() == {0: FOLD + 2, 1: FOLD + 1}


@given(st.lists(st.integers(0, 20), max_size=30), st.integers(1, 40))
def test_steps_by_time_are_sorted_and_equal_times_keep_their_order(times_ns: list[int], fold: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "FOLD", fold)
        log = StepLog()
        for place, time_ns in enumerate(times_ns):
            log.step(0, Step(time_ns, running=place))
    table = log.parts(pa.array([], pa.string()), 1, by_time=True).table()
    expected = sorted(enumerate(times_ns), key=lambda item: item[1])
    assert table["running"].to_pylist() == [place for place, _ in expected]
    assert table["scheduled_ns"].to_pylist() == [time_ns for _, time_ns in expected]


def test_only_steps_out_of_order_are_copied_to_sort_them() -> None:
    """Parts in order are the largest tables of a run: each stays a part."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "FOLD", 4)
        log = StepLog()
        for time_ns in (*range(17), 20, 18, 19):
            log.step(0, Step(time_ns))
    times_ns = log.parts(pa.array([], pa.string()), 1, by_time=True).table()["scheduled_ns"]
    assert times_ns.to_pylist() == [*range(17), 18, 19, 20]
    assert [len(chunk) for chunk in times_ns.chunks if len(chunk)] == [4, 4, 4, 4, 1, 3]


def test_folded_steps_take_a_small_part_of_their_size() -> None:
    """Successive steps hold nearly the same requests; the log must not grow by each of their names."""
    log, running = StepLog(), 200
    for number in range(FOLD):
        rows = np.arange(number // 20, number // 20 + running)  # every 20 steps a request ends and another starts
        log.step(0, Step(number, rows=rows, tokens=np.ones(running, np.int64)))
    [part] = log._kept.folded
    plain_bytes = 2 * 4 * running * FOLD
    assert part.stream.size < plain_bytes / 10
    names = pa.array([f"r{row}" for row in range(FOLD)])
    table = log.parts(names, 1).table()
    assert table["request_ids"][25].as_py() == [f"r{row}" for row in range(1, running + 1)]
    assert len(log) == 0
