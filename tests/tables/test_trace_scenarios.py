"""The bundled replays of a trace: sliced, repeated, faster."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ebbench.workloads import build_plan


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """One request per second for half an hour, its answer as long as its minute."""
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    lines += [f"2023-11-16 18:{s // 60:02d}:{s % 60:02d}.0000000,100,{1 + s // 60}" for s in range(1800)]
    path = tmp_path / "azure.csv"
    path.write_text("\n".join(lines) + "\n")
    return f"trace:{path}"


def test_a_slice_holds_its_ten_minutes(trace: str) -> None:
    plan = build_plan(trace, "trace-slice")
    assert len(plan) == 600
    assert plan.table["output_tokens"].to_pylist()[0] == 11
    times = plan.table["arrival_ns"].to_numpy() / 1e9
    assert times[0] == pytest.approx(0.0)
    np.testing.assert_allclose(np.diff(times), 1.0)


def test_a_repetition_is_longer_and_denser(trace: str) -> None:
    plan = build_plan(trace, "trace-repeat")
    assert len(plan) == 900
    times = plan.table["arrival_ns"].to_numpy() / 1e9
    assert times[-1] == pytest.approx(899 / 2)
    assert (np.diff(times) > 0).all()
    assert len(plan.table["content"].unique()) == 900, "a repetition is not served from the last one's cache"


def test_speed_can_be_given_over_the_file(trace: str) -> None:
    slow = build_plan(trace, "trace-repeat", speed=0.5)
    assert slow.table["arrival_ns"].to_numpy()[-1] / 1e9 == pytest.approx(2 * 899)
