"""Overlapping requests of a session: what is learned of a log with sub-agents is drawn again."""

from __future__ import annotations

import tomllib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from ebbench.cli.main import app
from ebbench.devices.loader import load_device
from ebbench.engines.sim import SimEngine
from ebbench.spec.server import EngineOptions
from ebbench.workloads import build_plan
from ebbench.workloads.overlap import draw_order, draw_session, find_starts, fit_overlap
from ebbench.workloads.requests import Requests
from ebbench.workloads.trace import read_trace
from vllm_eb.policy import parse_policy

S_PER_TOKEN = 0.02


@pytest.fixture
def agents(tmp_path: Path) -> Path:
    """Sessions that fork into one to six sub-agents of one to four requests; in three of ten they go on beside them."""
    rng, rows = np.random.default_rng(5), list[tuple[float, float, int, int, int]]()
    for session in range(80):
        now, history = 20.0 * session, int(rng.lognormal(7, 0.6))
        for _ in range(rng.integers(4, 10)):
            output = int(rng.lognormal(4.8, 0.6)) + 1
            rows.append((now, now + S_PER_TOKEN * output, session, history, output))
            now, history = now + S_PER_TOKEN * output, history + output + int(rng.lognormal(5, 0.8))
            if rng.random() < 0.5:
                ends = [_sub_agent(rng, rows, session, now) for _ in range(min(6, rng.geometric(0.35)))]
                now, history = (max(ends), history + 300) if rng.random() < 0.7 else (now, history)
            now += rng.exponential(2.0)
    path = tmp_path / "agents.csv"
    text = "".join(f"{1.7e9 + a:.6f},{1.7e9 + e:.6f},s{s},{i},{o}\n" for a, e, s, i, o in sorted(rows))
    path.write_text(f"start_time,end_time,session_id,input_tokens,output_tokens\n{text}")
    return path


def _sub_agent(
    rng: np.random.Generator, rows: list[tuple[float, float, int, int, int]], session: int, now: float
) -> float:
    """Append the requests of one sub-agent that starts about ``now``; returns when it ends."""
    at, history = now + float(rng.exponential(0.2)), int(rng.lognormal(6.5, 0.4))
    for _ in range(rng.integers(1, 5)):
        output = int(rng.lognormal(4.3, 0.6)) + 1
        rows.append((at, at + S_PER_TOKEN * output, session, history, output))
        at, history = at + S_PER_TOKEN * output + float(rng.exponential(0.5)), history + output + 150
    return at


def fitted(log: Path) -> Path:
    path = log.with_suffix(".toml")
    done = CliRunner().invoke(app, ["workloads", "fit", f"log:{log}", "-o", str(path)])
    assert done.exit_code == 0, done.output
    return path


def mean_open(workload: str) -> float:
    """Requests of a session that are open at once, on average over the time in which any is, simulated."""
    plan = build_plan(workload)
    table = SimEngine().run(plan, parse_policy("v1"), load_device("h200", "qwen3-8b"), EngineOptions()).requests
    session, start, end = (table[name].to_numpy() for name in ("session", "intended_ns", "end_ns"))
    busy = total = 0
    for one in np.unique(session):
        rows = session == one
        moments = np.concatenate([start[rows], end[rows]])
        order = np.argsort(moments, kind="stable")
        change = np.repeat([1, -1], rows.sum())[order]
        lasts, count = np.diff(moments[order]), np.cumsum(change)[:-1]
        busy, total = busy + int(lasts[count > 0].sum()), total + int((lasts * count).sum())
    return total / busy


def test_as_many_requests_of_a_session_are_open_at_once_as_in_the_log(agents: Path) -> None:
    replay, drawn = mean_open(f"log:{agents}"), mean_open(str(fitted(agents)))
    assert replay > 1.3
    assert drawn == pytest.approx(replay, rel=0.12)


def test_what_was_running_when_a_request_started_is_learned(agents: Path) -> None:
    real = find_starts(read_trace(agents).timed())
    overlap = tomllib.loads(fitted(agents).read_text())["fitted"]["sessions"]["overlap"]
    assert overlap["s_per_output_token"] == pytest.approx(S_PER_TOKEN, rel=1e-3)
    learned = fit_overlap(real, S_PER_TOKEN)
    drawn = [draw_session(learned, 60, np.random.default_rng(seed)) for seed in range(60)]
    running, left = 0, list[int]()
    for session in drawn:
        running = 0
        for ended in session.ended[1:]:
            running += 1 - ended
            left.append(running)
            assert running >= 0
    assert np.mean(left) == pytest.approx((real.running - real.ended).mean(), rel=0.15)
    # Three of four requests that begin beside others are of sub-agents.
    assert (real.kind[real.ended < real.running] > 0).mean() > 0.75


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 12), st.integers(1, 90)), min_size=3, max_size=40),
    st.integers(0, 9),
)
def test_a_request_continues_only_what_it_waits_for(rows: list[tuple[int, int, int]], seed: int) -> None:
    count = len(rows)
    turn = np.arange(count, dtype=np.int32)
    rng = np.random.default_rng(seed)
    after = [None if at < 2 else sorted(set(rng.integers(max(0, at - 4), at, 2).tolist())) for at in range(count)]
    made = Requests(
        np.zeros(count, np.int64), turn, np.full(count, 9, np.int32), np.full(count, 3, np.int32), after=after,
        content=rng.integers(0, 5, count),
    )  # fmt: skip
    overlap = fit_overlap(find_starts(made), 0.1)
    session = draw_session(overlap, count, rng)
    lasts = [float(last) for _, last, _ in rows]
    order = draw_order(overlap, session, lasts, [float(pause) for pause, _, _ in rows], rng)
    before: list[set[int]] = []
    for at, waits in enumerate(order.after):
        assert all(one < at for one in waits)
        before.append({*waits, *(earlier for one in waits for earlier in before[one])})
        assert order.grew_from[at] == -1 or order.grew_from[at] in before[at]
    taken = [grew for kind, grew in zip(order.kind, order.grew_from, strict=True) if kind and grew >= 0]
    assert len(set(taken)) == len(taken)
