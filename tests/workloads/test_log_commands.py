"""Every command that takes a workload takes a log, with the same requests."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from ebbench.cli.main import app
from ebbench.records.run import Run


@pytest.fixture
def log(tmp_path: Path) -> str:
    rng = np.random.default_rng(5)
    path = tmp_path / "own.csv"
    times = np.cumsum(rng.exponential(0.2, 400)) + 1.7e9
    rows = zip(times, rng.integers(50, 900, 400), rng.integers(5, 120, 400), strict=True)
    path.write_text("when,fed,made\n" + "".join(f"{t:.4f},{i},{o}\n" for t, i, o in rows))
    return f"log:{path}"


COLUMNS = ("--columns", "input=fed,output=made,time=when")


def call(*words: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})
    assert done.exit_code == code, done.output
    return done.output


def test_show_says_what_was_recognised(log: str) -> None:
    found = json.loads(call("workloads", "show", log, *COLUMNS, "--json"))["log"]
    assert found["columns"] == {"input": "fed", "output": "made", "time": "when"}
    assert found["rows"] == found["requests"] == 400
    assert found["arrivals"]["requests_per_s"] == pytest.approx(5, rel=0.15)
    assert found["arrivals"]["gap_variation"] == pytest.approx(1, abs=0.15)
    text = call("workloads", "show", log, *COLUMNS)
    assert "input = fed, output = made, time = when" in text
    assert "coefficient of variation" in text
    assert "completion hazard" in text


def test_show_counts_what_it_leaves_out(data: Path) -> None:
    text = call("workloads", "show", f"log:{data / 'logs' / 'access.log'}")
    assert "rows: 4, of which 2 are used" in text
    assert "1 left out: status 503 (first: line 3)" in text
    text = call("workloads", "show", f"log:{data / 'logs' / 'servegen_offline.jsonl'}")
    assert "times: none" in text


def test_a_run_of_a_log_records_its_columns(log: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["run", log, *COLUMNS, "--policy", "v1", "-o", str(tmp_path / "run"), "--quiet"])
    assert done.exit_code == 0, done.output
    run = Run.load(tmp_path / "run")
    assert run.manifest.facts["columns"] == {"input": "fed", "output": "made", "time": "when"}
    assert run.table("requests", ["status"])["status"].to_pylist() == ["ok"] * 400
    assert "columns: input = fed" in done.output


def test_prompts_that_an_engine_does_not_use_are_refused(data: Path) -> None:
    log = f"log:{data / 'logs' / 'chat.jsonl'}"
    assert "reads none, leave it out" in call("run", log, "--keep-text", "--engine", "sim", code=2)
    words = ("run", "balanced", "--cache-hit-rate", "0.3", "--no-prefix-caching", "--engine", "sim")
    assert "leave out --no-prefix-caching" in call(*words, code=2)


@pytest.mark.parametrize(
    "words",
    [
        ("capacity", "--goodput", "ttft:4000", "tpot:200", "--policy", "v1", "--max-probes", "4", "-n", "400"),
        ("plan", "--goodput", "ttft:4000", "tpot:200", "--request-rate", "4", "--policy", "v1", "--device", "h200",
         "--tp", "1", "--model", "qwen3-8b"),
        ("advise", "-n", "200", "--policy", "v1", "--seeds", "1", "--no-crossover"),
    ],
)  # fmt: skip
def test_searches_take_a_log(log: str, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ebbench.sizing.candidates.SESSIONS", 200)
    command, *options = words
    assert call(command, log, *COLUMNS, *options)
    assert "no column with prompt tokens" in CliRunner().invoke(app, [command, log, *options]).output


def test_a_plan_for_a_log_smaller_than_a_batch_has_a_deployment(log: str) -> None:
    """It is read again until the batch of 1,024 is full, so its saturated rate is known."""
    load = "--goodput ttft:4000 tpot:200 --request-rate 4 --policy v1 --device h200 --tp 1 --model qwen3-8b"
    said = call("plan", log, *COLUMNS, *load.split())
    assert "Cheapest that carries this rate: 1 x h200" in said
    assert "too few sessions to fill a batch" not in said


def test_a_sweep_takes_a_log(log: str, tmp_path: Path) -> None:
    grid = tmp_path / "grid.toml"
    grid.write_text(
        f'name = "own"\n[common]\nworkload = "{log}"\ncolumns = "{COLUMNS[1]}"\nnum_prompts = 60\n'
        '[grid]\npolicy = ["v1", "eb"]\n'
    )
    assert "eb" in call("sweep", str(grid), "--output-dir", str(tmp_path / "out"), "--quiet")
