"""No child process, nor any of its descendants, outlives the process that started it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ebbench.process.child import Child, child_environ, descendants_guarded, run_supervised, supervised
from tests.processes.process_tree import assert_gone, descendants, left_of, running, wait_until

# A program with a child in a session of its own, as servers have engines: killing its process group would miss it.
WITH_GRANDCHILD = "setsid sleep 600 & touch started; wait"
DEAF_WITH_GRANDCHILD = "trap '' TERM; setsid sleep 600 & touch started; while :; do sleep 0.1; done"
PARENT = """
import subprocess, sys, time
from ebbench.process.child import Child, supervised
child = Child(supervised(["sh", "-c", sys.argv[1]], 0.5), start_new_session=True)
time.sleep(600)
"""


def started(folder: Path, program: str, grace_s: float = 0.5) -> Child:
    child = Child(supervised(["sh", "-c", program], grace_s), cwd=folder, start_new_session=True)
    wait_until((folder / "started").exists, "the program did not start")
    return child


@pytest.mark.parametrize("program", [WITH_GRANDCHILD, DEAF_WITH_GRANDCHILD])
def test_a_parent_killed_outright_takes_everything_with_it(tmp_path: Path, program: str) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, program], cwd=tmp_path, env=child_environ(os.environ))
    wait_until((tmp_path / "started").exists, "the program did not start")
    below = descendants(parent.pid)
    assert len(below) >= 3  # the supervisor, the program, its child
    parent.kill()
    parent.wait()
    assert_gone(below)


@pytest.mark.parametrize("program", [WITH_GRANDCHILD, DEAF_WITH_GRANDCHILD])
def test_the_end_of_a_child_is_the_end_of_all_below_it(tmp_path: Path, program: str) -> None:
    child = started(tmp_path, program)
    below = descendants(child.pid)
    child.end(10)
    assert not left_of(below)
    expected = signal.SIGTERM if program is WITH_GRANDCHILD else signal.SIGKILL
    assert child.returncode == 128 + expected


def test_a_program_that_dies_leaves_no_child(tmp_path: Path) -> None:
    child = started(tmp_path, "setsid sleep 600 & touch started; sleep 0.3; exit 7")
    below = descendants(child.pid)
    assert child.wait(60) == 7
    assert not left_of(below)


def test_a_supervisor_killed_outright_takes_the_program_with_it(tmp_path: Path) -> None:
    child = started(tmp_path, "touch started; exec sleep 600")
    below = descendants(child.pid)
    child.kill()
    child.wait()
    assert_gone(below)


def test_run_supervised_returns_exit_code_and_output() -> None:
    assert run_supervised(["sh", "-c", "echo no >&2; exit 3"], 1.0, stderr=subprocess.PIPE) == (3, "no\n")
    with pytest.raises(FileNotFoundError):
        run_supervised(["no-such-program"], 1.0)


def test_a_program_that_cannot_be_started_is_named_with_the_reason(tmp_path: Path) -> None:
    command = supervised([str(tmp_path / "missing")], 1.0)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as supervisor:
        status = supervisor.wait()  # before its standard input closes, which would end it
        assert supervisor.stderr is not None
        said = supervisor.stderr.read()
    assert (status, said) == (127, f"cannot start {tmp_path}/missing: No such file or directory\n")


def test_errors_are_shown_while_the_program_runs_and_returned_at_its_end(tmp_path: Path) -> None:
    """The program writes more than a pipe holds, then waits until its first line has been shown."""
    program = (
        "{ echo first; head -c 200000 /dev/zero | tr '\\0' x; until grep -q first shown; do :; done; echo last; } >&2"
    )
    code = f"""
from ebbench.process.child import KEPT_BYTES, run_supervised
status, errors = run_supervised(["sh", "-c", {program!r} + "; exit 3"], 1.0, shows_errors=True)
print(status, len(errors) == KEPT_BYTES, errors.endswith("xlast\\n"))
"""
    with (tmp_path / "shown").open("wb") as shown:
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, env=child_environ(os.environ), stdout=subprocess.PIPE,
            stderr=shown, timeout=60,
        )  # fmt: skip
    assert done.stdout == b"3 True True\n"
    assert (tmp_path / "shown").read_bytes() == b"first\n" + b"x" * 200000 + b"last\n"


def test_the_program_does_not_inherit_the_lifeline(tmp_path: Path) -> None:
    """It would keep the pipe of its own supervisor open, or take its end of file for input."""
    program = ["sh", "-c", "cat >&2; ls -l /proc/self/fd >&2"]
    status, said = run_supervised(program, 1.0, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert status == 0
    assert "/dev/null" in said
    assert len(set(re.findall(r"pipe:\[\d+\]", said))) == 1  # the one it writes to


@pytest.mark.parametrize("module", ["ebbench.fakeserver", "ebbench.gateway"])
def test_modules_of_this_program_end_with_their_parent(module: str, tmp_path: Path) -> None:
    code = f"""
import os, time
from ebbench.fakeserver.process import FakeServerProcess
from ebbench.gateway.process import GatewayProcess
from ebbench.gateway.settings import GatewaySettings
with FakeServerProcess() as server:
    if {module!r} == "ebbench.gateway":
        front = GatewayProcess(GatewaySettings(upstreams=(server.url,), port=0))
        front.__enter__()
    open("started", "w").close()
    time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env=child_environ(os.environ))
    wait_until((tmp_path / "started").exists, "it did not start")
    below = descendants(parent.pid)
    assert len(below) == (2 if module == "ebbench.gateway" else 1)
    parent.kill()
    parent.wait()
    assert_gone(below)


def test_workers_of_a_pool_leave_hang_ups_to_their_parent_and_end_with_it(tmp_path: Path) -> None:
    code = """
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from ebbench.process.child import begin_pool_worker
if __name__ == "__main__":
    pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=begin_pool_worker)
    pool.submit(int).result()
    pool.submit(time.sleep, 600)
    time.sleep(0.2)
    open("started", "w").close()
    time.sleep(600)
"""
    (tmp_path / "program.py").write_text(code)
    parent = subprocess.Popen([sys.executable, "program.py"], cwd=tmp_path, env=child_environ(os.environ))
    wait_until((tmp_path / "started").exists, "it did not start")
    below = descendants(parent.pid)
    for process in below:
        if b"spawn_main" in Path(f"/proc/{process.pid}/cmdline").read_bytes():
            os.kill(process.pid, signal.SIGHUP)
            os.kill(process.pid, signal.SIGINT)
    time.sleep(0.3)
    assert left_of(below) == below
    parent.kill()
    parent.wait()
    assert_gone(below)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_children_in_own_sessions_end_when_the_process_is_killed(tmp_path: Path, number: int) -> None:
    """A program in a session of its own whose parent has ended, as the agents of a Ray cluster."""
    code = """
import subprocess, time
from ebbench.process.child import descendants_guarded
with descendants_guarded():
    subprocess.Popen(["sh", "-c", "setsid sleep 600 & wait"], start_new_session=True)
    time.sleep(3)
    open("started", "w").close()
    time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env=child_environ(os.environ))
    wait_until((tmp_path / "started").exists, "it did not start")
    below = descendants(parent.pid)
    assert len(below) == 3  # the guard, the shell, its child
    parent.send_signal(number)
    parent.wait()
    assert_gone(below)


def test_a_process_that_lost_its_parent_at_once_is_killed_too(tmp_path: Path) -> None:
    """An agent whose parent, killed with the program, ends before the guard looks again: no descendant of anything."""
    code = """
import subprocess, time
from ebbench.process.child import descendants_guarded
with descendants_guarded():
    subprocess.run(["sh", "-c", "setsid sleep 600 > /dev/null & echo $! > pid"], stdout=subprocess.DEVNULL)
    open("started", "w").close()
    time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env=child_environ(os.environ))
    wait_until((tmp_path / "started").exists, "it did not start")
    orphans = {process for process in running() if process.pid == int((tmp_path / "pid").read_text())}
    assert len(orphans) == 1
    parent.kill()
    parent.wait()
    assert_gone(orphans)


def test_the_guard_ends_first_where_all_goes_well(tmp_path: Path) -> None:
    with descendants_guarded():
        assert os.environ["EBBENCH_GUARDED"]
        program = subprocess.Popen(["sleep", "600"])
        time.sleep(1.5)
    assert "EBBENCH_GUARDED" not in os.environ
    assert program.poll() is None, "only a process that is gone takes what it started with it"
    program.kill()
    program.wait()
