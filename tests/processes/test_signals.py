"""SIGTERM and SIGHUP are Ctrl-C for every command: nothing it started is left, what was measured is kept, exit 130."""

from __future__ import annotations

import json
import os
import pty
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebbench.fakeserver.config import FakeConfig
from ebbench.fakeserver.process import FakeServerProcess
from ebbench.records.run import Run
from tests.processes.process_tree import Process, assert_gone, descendants, wait_until

COMMAND = [sys.executable, "-m", "ebbench"]
AS_CTRL_C = [signal.SIGTERM, signal.SIGHUP]
SWEEP = """
name = "many"
repeats = 40
[common]
workload = "balanced"
source = "profile"
num_prompts = 400
max_concurrency = 16
max_num_seqs = 16
[grid]
policy = ["v1", "eb"]
"""


def begin(folder: Path, *words: object, **options: object) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own, so that signals and process ids are its own."""
    settings = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    command = [*COMMAND, *map(str, words)]
    return subprocess.Popen(command, cwd=folder, start_new_session=True, **settings)  # type: ignore[call-overload]


def begin_run(
    folder: Path, server: FakeServerProcess, *more: str, answers: int = 10, **options: object
) -> subprocess.Popen[bytes]:
    """Measure a server with two workers; returns once it has completed so many answers."""
    words = ("-n", 5000, "-c", 8, "--input-len", 20, "--output-len", 10, "--workers", 2, "-o", folder / "out", *more)
    process = begin(folder, "run", "balanced", "--engine", server.url, *words, **options)
    answered = lambda: sum(entry.outcome == "length" for entry in server.ledger()) >= answers  # noqa: E731
    wait_until(answered, "nothing was measured", 300.0)
    return process


def ended(process: subprocess.Popen[bytes], below: set[Process]) -> tuple[int, bytes, bytes]:
    """Exit code, stdout and stderr, once nothing that the process started is left."""
    stdout, stderr = process.communicate(timeout=300)
    assert_gone(below)
    return process.returncode, stdout, stderr


@pytest.fixture
def server() -> Iterator[FakeServerProcess]:
    with FakeServerProcess(FakeConfig(ttft_ms=30, itl_ms=30)) as running:
        yield running


@pytest.mark.parametrize("number", AS_CTRL_C)
def test_a_run_ends_and_is_kept(tmp_path: Path, server: FakeServerProcess, number: signal.Signals) -> None:
    process = begin_run(tmp_path, server, "--json")
    below = descendants(process.pid)
    assert len(below) == 2
    process.send_signal(number)
    code, stdout, stderr = ended(process, below)
    assert code == 130, stderr
    (summary,) = json.loads(stdout)
    assert summary["interrupted"]
    assert summary["completed"] >= 10
    assert summary["cancelled"] == 0, "running requests were given up, as after the second Ctrl-C"
    assert Run.load(tmp_path / "out").requests.num_rows == 5000


SECOND_SIGNALS = 30
"""Trials of a second signal, a third of them in ``make test``; each moment from 0 to 0.5 s has the same chance."""


@pytest.mark.slow
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.nightly) for part in (1, 2))])
def test_a_second_signal_at_any_moment_undoes_nothing(tmp_path: Path, part: int) -> None:
    """Of any kind: while open requests end, while the run is stored and shown, while the process ends."""
    dice = random.Random(part)
    with FakeServerProcess(FakeConfig(ttft_ms=20, itl_ms=5)) as server:
        for trial in range(SECOND_SIGNALS // 3):
            folder = tmp_path / str(trial)
            folder.mkdir()
            before = sum(entry.outcome == "length" for entry in server.ledger())
            process = begin_run(folder, server, answers=before + 10)
            first, *later = dice.choices([signal.SIGINT, *AS_CTRL_C], k=dice.choice([2, 2, 4]))
            pauses_s = [dice.uniform(0, 0.5) for _ in later]
            process.send_signal(first)
            for number, pause_s in zip(later, pauses_s, strict=True):
                time.sleep(pause_s)
                process.send_signal(number)
            code, stdout, stderr = ended(process, set())
            told = f"{first.name}, then {list(zip(later, pauses_s, strict=True))}: {stderr.decode()}"
            assert code == 130, told
            assert b"error: interrupted; kept 1 run" in stderr, told
            assert b"INVALID v1" in stdout, told
            statuses = Run.load(folder / "out").requests["status"].to_pylist()
            assert statuses.count("ok") >= 10, told


def test_workers_leave_a_signal_to_the_process_group_to_their_parent(tmp_path: Path, server: FakeServerProcess) -> None:
    """As service managers and batch systems send it. Running requests may end, as after Ctrl-C."""
    process = begin_run(tmp_path, server, "--json")
    below = descendants(process.pid)
    for number in AS_CTRL_C:
        for worker in below:
            os.kill(worker.pid, number)
    process.send_signal(signal.SIGTERM)
    code, stdout, stderr = ended(process, below)
    assert code == 130, stderr
    (summary,) = json.loads(stdout)
    assert (summary["cancelled"], summary["failed"]) == (0, 0)


def test_a_run_whose_shell_ignores_ctrl_c_ends_all_the_same(tmp_path: Path, server: FakeServerProcess) -> None:
    """As in the background of a script."""
    process = begin_run(tmp_path, server, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    below = descendants(process.pid)
    process.send_signal(signal.SIGTERM)
    code, _, stderr = ended(process, below)
    assert code == 130, stderr
    assert Run.load(tmp_path / "out").requests.num_rows == 5000


def test_a_run_under_nohup_goes_on(tmp_path: Path, server: FakeServerProcess) -> None:
    process = begin_run(tmp_path, server, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    below = descendants(process.pid)
    process.send_signal(signal.SIGHUP)
    before = len(server.ledger())
    wait_until(lambda: len(server.ledger()) > before + 20, "it stopped sending")
    process.send_signal(signal.SIGTERM)
    assert ended(process, below)[0] == 130


def test_a_run_is_kept_when_its_terminal_is_closed(tmp_path: Path, server: FakeServerProcess) -> None:
    """The kernel sends SIGHUP, and from then on every word written to the terminal is an error."""
    pid, terminal = pty.fork()
    if pid == 0:
        words = ("-n", "5000", "-c", "8", "--input-len", "20", "--output-len", "10", "--workers", "2", "-o", "out")
        os.chdir(tmp_path)
        os.execvp(COMMAND[0], [*COMMAND, "run", "balanced", "--engine", server.url, *words])
    os.set_blocking(terminal, False)
    answered = lambda: sum(entry.outcome == "length" for entry in server.ledger()) >= 10  # noqa: E731
    wait_until(answered, "nothing was measured", 300.0)
    below = descendants(pid)
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert_gone(below)
    assert os.waitstatus_to_exitcode(status) == 130
    assert Run.load(tmp_path / "out").requests.num_rows == 5000


def test_a_run_killed_outright_leaves_no_worker_and_can_be_rebuilt(tmp_path: Path, server: FakeServerProcess) -> None:
    process = begin_run(tmp_path, server)
    wait_until(lambda: list(tmp_path.glob("out/requests.part-*")), "nothing was stored")
    below = descendants(process.pid)
    process.kill()
    ended(process, below)
    done = subprocess.run([*COMMAND, "recover", tmp_path / "out"], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "ok" in Run.load(tmp_path / "out").requests.column("status").to_pylist()


@pytest.mark.parametrize("number", AS_CTRL_C)
@pytest.mark.parametrize("background", [False, True])
def test_the_gateway_ends_in_order(
    tmp_path: Path, server: FakeServerProcess, number: signal.Signals, background: bool
) -> None:
    """Also in the background of a shell script, where SIGINT is ignored."""
    ignoring = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)} if background else {}
    process = begin(tmp_path, "gateway", "-u", server.url, "--port", free_port(), **ignoring)
    assert process.stderr is not None
    assert b"is ready" in process.stderr.readline()
    process.send_signal(number)
    code, _, stderr = ended(process, set())
    assert code == 130
    assert b"Traceback" not in stderr


@pytest.mark.parametrize("number", AS_CTRL_C)
def test_the_fake_server_writes_its_ledger(tmp_path: Path, number: signal.Signals) -> None:
    process = begin(tmp_path, "fake-server", "--port", 0, "--ledger", "ledger.json")
    assert process.stderr is not None
    assert b"is ready" in process.stderr.readline()
    process.send_signal(number)
    code, _, stderr = ended(process, set())
    assert (code, json.loads((tmp_path / "ledger.json").read_text())) == (0, [])
    assert b"0 requests" in stderr


def finished_cells(folder: Path) -> int:
    """Cells of a sweep that have been stored; one still in its hidden directory may be dropped."""
    return len(list(folder.glob("out/cells/[!.]*/cell.json")))


@pytest.mark.parametrize("number", [*AS_CTRL_C, signal.SIGKILL])
def test_a_sweep_keeps_finished_cells_and_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "sweep.toml").write_text(SWEEP)
    process = begin(tmp_path, "sweep", "sweep.toml", "-o", "out", "--workers", 2, "-q")
    wait_until(lambda: finished_cells(tmp_path) >= 2, "no cell was finished", 300.0)
    below = descendants(process.pid)
    assert len(below) >= 2
    process.send_signal(number)
    code, _, stderr = ended(process, below)
    assert code == (-signal.SIGKILL if number == signal.SIGKILL else 130), stderr
    assert 2 <= finished_cells(tmp_path) < 80


@pytest.mark.parametrize("number", [*AS_CTRL_C, signal.SIGKILL])
def test_the_gate_ends_the_command_it_measures_with(
    tmp_path: Path, server: FakeServerProcess, number: signal.Signals
) -> None:
    side = (
        f"{sys.executable} -m ebbench run balanced --engine {server.url} -n 5000 -c 8 --input-len 20 --output-len 10 "
        "--workers 2 -q -o {out}"
    )
    process = begin(
        tmp_path, "gate", "baseline", "candidate", "--pairs", 6, "--baseline-command", side, "--candidate-command", side
    )
    answered = lambda: sum(entry.outcome == "length" for entry in server.ledger()) >= 10  # noqa: E731
    wait_until(answered, "nothing was measured", 300.0)
    below = descendants(process.pid)
    process.send_signal(number)
    code, _, stderr = ended(process, below)
    assert code == (-signal.SIGKILL if number == signal.SIGKILL else 130), stderr
    if number != signal.SIGKILL:  # nothing can be waited for then
        assert Run.load(next((tmp_path / "baseline").glob("pair-*"))).requests.num_rows == 5000


def free_port() -> int:
    """A TCP port of this machine that nothing listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_tests_under_nohup_start_processes_that_a_hang_up_ends() -> None:
    def ignore() -> None:
        for number in (signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)

    shown = "import signal, tests.conftest; print(*(signal.getsignal(n) is signal.SIG_IGN for n in (1, 2)))"
    done = subprocess.run([sys.executable, "-c", shown], capture_output=True, text=True, preexec_fn=ignore)
    assert done.stdout == "False False\n", done.stderr
