"""The description of the load in the first lines of ``run`` and ``show``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ebbench.fakeserver.process import FakeServerProcess
from tests.gate.gate_data import SMALL, invoke


@pytest.fixture
def replayed(tmp_path: Path) -> Path:
    """The stored run of a trace with times in seconds: 41 requests, two per second."""
    trace, out = tmp_path / "times.jsonl", tmp_path / "out"
    rows = [{"timestamp": place / 2 + 0.25, "input_length": 20, "output_length": 4} for place in range(41)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = invoke("run", f"trace:{trace}", "--policy", "v1", "--engine", "sim", "--quiet", "-o", out)
    assert done.exit_code == 0, done.output
    assert "41 requests over 20 s, 2 per second; its times are read as seconds" in " ".join(done.stdout.split())
    return out


def test_a_replayed_trace_says_its_rate_and_how_its_times_were_read(replayed: Path) -> None:
    shown = " ".join(invoke("show", replayed).stdout.split())
    assert "41 requests over 20 s, 2 per second; its times are read as seconds" in shown
    [entry] = json.loads(invoke("show", replayed, "--json").stdout)
    assert entry["request_rate"] == pytest.approx(2.0)
    asked = invoke("query", "select request_rate from runs", "--runs", replayed, "--format", "json")
    assert json.loads(asked.stdout) == [{"request_rate": pytest.approx(2.0)}]


def test_seeds_far_apart_are_named_and_not_counted_through(tmp_path: Path) -> None:
    """A date as seed took a gigabyte, and the largest one ended in an OverflowError."""
    for seed in (0, 1, 2**63 - 1):
        done = invoke(*SMALL, "-p", "v1", "--seed", seed, "-o", tmp_path / "runs" / f"{seed}")
        assert done.exit_code == 0, done.output
    shown = invoke("show", tmp_path / "runs")
    assert shown.exit_code == 0, shown.output
    assert "seeds 0, 1, 9223372036854775807." in " ".join(shown.stdout.split())
    assert "seeds 0–1." in " ".join(invoke("show", tmp_path / "runs" / "0", tmp_path / "runs" / "1").stdout.split())


def test_more_samples_need_more_sessions_with_a_duration(tmp_path: Path) -> None:
    """All sessions were released: a longer --duration alone would change nothing."""
    with FakeServerProcess() as server:
        words = ("-n", 12, "-c", 4, "--input-len", 16, "--output-len", 4, "--duration", 30, "--lag-limit-ms", 10_000)
        done = invoke("run", "balanced", "--engine", server.url, *words, "--quiet", "-o", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert "Use --num-prompts 662 or more, and a --duration" in " ".join(done.stdout.split())
