"""The vllm engine end to end on the CPU: a real server and model, and servers that fail."""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import sys
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ebbench.engines.machine import machine_name
from ebbench.errors import RunError
from ebbench.records.run import Run
from tests.processes.process_tree import wait_until
from tests.vllm import whole_command
from tests.vllm.emulated_run import BLOCKS, TABLES
from tests.vllm.forked_command import ForkedCommand
from tests.vllm.whole_command import LONGEST_S, command_environment, ebbench

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("forking")]


def server_processes(model: Path) -> list[int]:
    """Process ids of vLLM servers that serve the model folder of this test."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").split()
            except OSError:
                continue
            if b"serve" in words and str(model).encode() in words:
                found.append(int(entry.name))
    return found


def test_two_policies_with_real_tokens_from_the_command_line(small_model_folder: Path, tmp_path: Path) -> None:
    done = ebbench(
        "run", "balanced", "--input-len", 60, "--output-len", 20, "--engine", "vllm", "--model", small_model_folder,
        "--policy", "v1", "--policy", "ebplus", "--num-prompts", 24, "--max-concurrency", 6, "--max-model-len", 1024,
        "--device", "h200", "--json", "-o", tmp_path / "runs",
    )  # fmt: skip
    summaries = {summary["policy"]: summary for summary in json.loads(done.stdout)}
    assert set(summaries) == {"v1", "ebplus"}, done.stderr
    for summary in summaries.values():
        # Invalid only for reasons of a crowded test machine, if at all: every request must be there, whole.
        assert summary["failed"] == 0
        assert summary["completed"] > 0
        run = Run.load(summary["run_dir"])
        assert run.manifest.device == machine_name()  # the policy may compute from the costs of another device
        requests = run.table("requests").to_pylist()
        assert all(row["output_tokens"] == row["output_tokens_planned"] for row in requests if row["status"] == "ok")
        assert (Path(summary["run_dir"]) / "server.log").stat().st_size > 0
        reports = run.manifest.facts["server_reports"]
        assert run.manifest.kv_capacity_tokens == reports["num_kv_blocks"] * reports["block_size"]
    steps = Run.load(summaries["ebplus"]["run_dir"]).table("steps").to_pylist()
    assert [step["step_id"] for step in steps] == list(range(len(steps)))
    known = {row["request_id"] for row in requests}
    assert known <= {name for step in steps for name in step["request_ids"]}
    assert not server_processes(small_model_folder)


def run_emulated(model: Path, folder: Path, *vllm_options: str) -> tuple[int, str]:
    """A run through the API server with an emulated device: its exit code, and what it wrote to stderr."""
    command = [sys.executable, "-m", "tests.vllm.emulated_run", str(model), str(folder), *vllm_options]
    with (folder / "said").open("wb") as said:
        process = ForkedCommand(command, command_environment(), said, said, folder)
    return process.wait(LONGEST_S), (folder / "said").read_text()


@pytest.fixture(scope="module")
def emulated(forking: None, small_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, pa.Table]:
    """The tables of such a run."""
    folder = tmp_path_factory.mktemp("emulated")
    code, said = run_emulated(small_model_folder, folder)
    assert code == 0, said
    return {name: pq.read_table(folder / f"{name}.parquet") for name in TABLES}


def test_an_emulated_device_serves_through_the_api_server(emulated: dict[str, pa.Table]) -> None:
    assert set(emulated["requests"]["status"].to_pylist()) == {"ok"}
    steps = emulated["steps"].to_pylist()
    assert {step["phase"] for step in steps} == {"prefill", "decode"}
    assert all(step["kv_blocks_total"] == BLOCKS for step in steps)
    # Twice the time of an H200 step, which is some milliseconds; one that caught up with a busy machine may be shorter.
    assert statistics.median(step["end_ns"] - step["start_ns"] for step in steps) > 5e6


def test_step_records_join_the_requests(emulated: dict[str, pa.Table]) -> None:
    steps = emulated["steps"].to_pylist()
    for row in emulated["requests"].to_pylist():
        mine = [step for step in steps if row["request_id"] in step["request_ids"]]
        assert row["sent_ns"] <= row["scheduled_ns"] == mine[0]["scheduled_ns"]
        assert len(mine) >= row["output_tokens"]
        assert mine[-1]["start_ns"] < row["end_ns"]
    kinds = {(row["kind"], row["phase"]) for row in emulated["decisions"].to_pylist()}
    assert {("phase", "prefill"), ("phase", "decode")} <= kinds


def command(model: Path, folder: Path, requests: int, *more: object) -> list[object]:
    """A run on a server that the command starts, into ``folder``/out."""
    return [
        "run", "balanced", "--input-len", 60, "--output-len", 40, "--engine", "vllm", "--model", model,
        "--policy", "eb:k=2", "-n", requests, "-c", 4, "--max-model-len", 1024, "-o", folder / "out", *more,
    ]  # fmt: skip


def test_a_server_that_the_plugin_does_not_schedule_is_not_measured(small_model_folder: Path, tmp_path: Path) -> None:
    other = ("--scheduler-cls", "vllm.v1.core.sched.scheduler.Scheduler")
    code, said = run_emulated(small_model_folder, tmp_path, *other)
    assert code
    assert re.search(r"RunError: .*policy eb:k=3 does not schedule it", said), said
    assert not server_processes(small_model_folder)


def test_a_server_that_dies_at_start_is_reported_with_the_end_of_its_log(
    small_model_folder: Path, tmp_path: Path
) -> None:
    done = ebbench(*command(small_model_folder, tmp_path, 2, "--", "--no-such-option"))
    assert done.returncode == RunError.exit_code
    assert re.search(r"did not come up \(exit status 2\)(.|\n)*--no-such-option", done.stderr), done.stderr


def test_a_server_killed_midway_makes_an_invalid_run_with_exact_counts(
    small_model_folder: Path, tmp_path: Path
) -> None:
    with (tmp_path / "said").open("wb") as said:
        words = [str(word) for word in command(small_model_folder, tmp_path, 5000)]
        process = whole_command.begin(words, command_environment(), said, said, tmp_path)
    wait_until(lambda: list(tmp_path.glob("out/requests.part-*")), "nothing was measured", 480.0)
    for pid in server_processes(small_model_folder):
        if b"supervisor.py" not in Path(f"/proc/{pid}/cmdline").read_bytes():  # it cleans up after the server
            os.kill(pid, signal.SIGKILL)
    assert process.wait(120) == RunError.exit_code
    run = Run.load(tmp_path / "out")
    statuses = Counter(run.requests["status"].to_pylist())
    assert sum(statuses.values()) == 5000
    assert 0 < statuses["ok"] < 5000
    assert not run.manifest.valid
    reasons = map(str, run.manifest.reasons)
    assert any("died during the run" in reason and "server.log" in reason for reason in reasons)
    assert (tmp_path / "out" / "server.log").stat().st_size > 0
    assert not server_processes(small_model_folder)
