"""The load generator from the command line: output, files, exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ebbench.cli.main import app
from ebbench.fakeserver import FakeConfig, FakeServerProcess, parse_fault
from ebbench.fakeserver.scheduled_response import decode
from ebbench.records.run import Run

SMALL = ["--input-len", "20", "--output-len", "5", "--length-distribution", "fixed"]


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-c", "from ebbench.cli.main import run; run()", *arguments]


def _ebbench(cwd: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environ}
    return subprocess.run(_command(*arguments), cwd=cwd, env=env, capture_output=True, text=True, timeout=120)


def test_a_run_against_a_server_is_stored_and_saved_as_vllm_does(tmp_path: Path) -> None:
    with FakeServerProcess(FakeConfig(ttft_ms=5, itl_ms=20)) as server:
        done = _ebbench(
            tmp_path, "run", "balanced", "--engine", server.url, "-n", "40", "-c", "4", *SMALL, "--output-dir", "out",
            "--goodput", "ttft:5000", "e2el:5000", "--warmup", "2", "--save-as-vllm", "vllm.json", "--json",
        )  # fmt: skip
        ledger = [e for e in server.ledger() if not e.request_id.startswith("warmup")]
    # A busy test machine may make the run INVALID (4); anything else is an error.
    assert done.returncode in (0, 4), done.stderr
    assert "Warning" not in done.stderr
    (summary,) = json.loads(done.stdout)
    assert (summary["planned"], summary["completed"], summary["failed"]) == (40, 40, 0)
    assert summary["total_output_tokens"] == sum(entry.tokens for entry in ledger) == 200
    assert summary["request_goodput"] == pytest.approx(summary["request_throughput"])
    assert (summary["engine"], summary["model"]) == ("endpoint", "fake-model")
    stored = Run.load(tmp_path / "out")
    assert stored.table("server_metrics").num_rows > 0
    saved = json.loads((tmp_path / "vllm.json").read_text())
    assert saved["completed"] == len(saved["ttfts"]) == 40
    assert saved["mean_ttft_ms"] == pytest.approx(1000 * sum(saved["ttfts"]) / 40)
    assert [len(gaps) for gaps in saved["itls"]] == [4] * 40
    assert saved["output_lens"] == [5] * 40
    assert (saved["max_concurrency"], saved["request_rate"], saved["model_id"]) == (4, "inf", "fake-model")


def test_when_every_request_fails_the_run_is_written_and_metrics_are_null(tmp_path: Path) -> None:
    key = "sk-" + os.urandom(12).hex()
    with FakeServerProcess(FakeConfig(faults=(parse_fault("echo-auth"),))) as server:
        arguments = ("run", "balanced", "--engine", server.url, "-n", "6", *SMALL, "--output-dir", "out", "--json")
        done = _ebbench(tmp_path, *arguments, EBBENCH_API_KEY=key)
    assert done.returncode == 4
    (summary,) = json.loads(done.stdout)
    assert (summary["completed"], summary["failed"], summary["valid"]) == (0, 6, False)
    assert summary["mean_ttft_ms"] is None
    assert summary["p99_itl_ms"] is None
    bodies = Run.load(tmp_path / "out").requests.column("error_body").to_pylist()
    assert all("Bearer [hidden]" in body for body in bodies)
    for text in (done.stdout, done.stderr):
        assert key not in text
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or key.encode() not in path.read_bytes(), path


@pytest.mark.parametrize("interrupts", [1, 2])
def test_ctrl_c_keeps_what_was_measured(tmp_path: Path, interrupts: int) -> None:
    with FakeServerProcess(FakeConfig(ttft_ms=30, itl_ms=30)) as server:
        command = _command(
            "run", "balanced", "--engine", server.url, "-n", "5000", "-c", "8", *SMALL, "--output-dir", "out", "--json"
        )
        process = subprocess.Popen(
            command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        deadline = time.monotonic() + 60
        while sum(entry.outcome == "length" for entry in server.ledger()) < 10 and time.monotonic() < deadline:
            time.sleep(0.05)
        for _ in range(interrupts):
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers too
            time.sleep(0.05)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    (summary,) = json.loads(stdout)
    assert summary["interrupted"]
    assert not summary["valid"]
    assert summary["completed"] >= 10 - 8
    assert summary["planned"] == 5000
    counts = [summary[key] for key in ("completed", "failed", "timed_out", "cancelled", "never_sent")]
    assert sum(counts) == 5000
    assert summary["cancelled"] == 0 or interrupts == 2
    assert Run.load(tmp_path / "out").requests.num_rows == 5000
    _wait_until_gone(process.pid)


def _wait_until_gone(group: int) -> None:
    """Fail if a process of the group outlives its leader by a minute."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    pytest.fail("a process was left behind")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--engine", "http://127.0.0.1:9", "--ready-timeout", "0"], 4, "is not ready"),
        (["--engine", "http://me:secret@127.0.0.1:9"], 2, "leave credentials out of the URL"),
        (["--engine", "sim", "--workers", "3"], 2, "--workers is for sending requests"),
        (["--engine", "sim", "--warmup", "-1"], 2, "--warmup must be 0 or more requests"),
        (["--engine", "http://127.0.0.1:9", "--extra-body", "[1]"], 2, "--extra-body must be a JSON object"),
        (["--engine", "http://127.0.0.1:9", "--header", "x"], 2, "is not KEY=VALUE"),
        (["--engine", "http://127.0.0.1:9", "--header", "Authorization=x"], 2, "EBBENCH_API_KEY"),
    ],
)
def test_options_that_cannot_work_are_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["run", "balanced", "-n", "5", *SMALL, *arguments])
    assert done.exit_code == code, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert "secret" not in done.stderr
    assert not list(tmp_path.rglob("manifest.json"))


def test_the_fake_server_command_says_where_it_is_and_leaves_its_ledger(tmp_path: Path) -> None:
    command = _command("fake-server", "--port", "0", "--ttft-ms", "1", "--itl-ms", "1", "--ledger", "ledger.json")
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    url = process.stderr.readline().split()[0]
    done = _ebbench(tmp_path, "run", "balanced", "--engine", url, "-n", "5", *SMALL, "--quiet")
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert done.returncode in (0, 4)
    assert process.returncode == 0
    assert "5 requests, 5 complete answers, 25 tokens" in stderr
    assert [entry.tokens for entry in decode((tmp_path / "ledger.json").read_bytes())] == [5] * 5
    again = _ebbench(tmp_path, "fake-server", "--ledger", "ledger.json")
    assert again.returncode == 2
    assert "exists" in again.stderr


def test_client_check_prints_the_load_that_the_client_can_generate(tmp_path: Path) -> None:
    done = _ebbench(tmp_path, "client-check", "--max-streams", "4", "--seconds", "0.4", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    (rung,) = document["rungs"]
    assert (rung["streams"], rung["lost"]) == (4, 0)
    assert rung["cpu_us_per_token"] > 0
    assert rung["ttft_error_p50_ms"] >= 0
    limit = document["trustworthy_up_to"]
    assert (limit is not None) == rung["trustworthy"]


def test_a_killed_client_leaves_no_worker_behind(tmp_path: Path) -> None:
    with FakeServerProcess(FakeConfig(ttft_ms=20, itl_ms=20)) as server:
        command = _command("run", "balanced", "--engine", server.url, "-n", "5000", "-c", "8", *SMALL, "--quiet")
        process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while not server.ledger() and time.monotonic() < deadline:
            time.sleep(0.05)
        process.kill()
        process.wait(timeout=60)
        # Its worker notices, gives up what it has under way, and ends: the server gets no further request.
        while any(e.outcome == "open" for e in server.ledger()) and time.monotonic() < deadline:
            time.sleep(0.05)
        ended = server.ledger()
        time.sleep(0.5)
        assert len(server.ledger()) == len(ended)
    assert {entry.outcome for entry in ended} <= {"length", "disconnected"}


def test_files_in_the_working_directory_are_not_taken_for_modules(tmp_path: Path) -> None:
    (tmp_path / "queue.py").write_text("raise SystemExit('imported')\n")
    (tmp_path / "msgspec.py").write_text("raise SystemExit('imported')\n")
    script = tmp_path / "elsewhere" / "script.py"  # without a main guard: nothing imports it again
    script.parent.mkdir()
    script.write_text(
        "from client_runs import plan_of\n"
        "from ebbench.client import ClientOptions, drive\n"
        "from ebbench.fakeserver import FakeConfig, FakeServerProcess\n"
        "with FakeServerProcess(FakeConfig(ttft_ms=1, itl_ms=1)) as server:\n"
        "    done = drive(server.url, plan_of(4), ClientOptions(workers=2), environ={})\n"
        "print(done.requests.column('status').to_pylist())\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['ok', 'ok', 'ok', 'ok']\n"


def test_a_request_rate_alone_means_open_loop_arrivals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    base = ("run", "balanced", "--engine", "sim", "--policy", "v1", "-n", "20", "--request-rate", "5", "--json", *SMALL)
    for more, scenario in (((), "poisson"), (("--burstiness", "0.5"), "gamma")):
        done = CliRunner().invoke(app, [*base, *more])
        assert done.exit_code == 0, done.stderr
        assert json.loads(done.stdout)[0]["scenario"] == scenario
