"""What a worker process loads: it starts beside the measurement, and its CPU counts."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ebbench.process import alarm
from tests.client.client_runs import plan_of, run
from tests.client.raw_server import END, EVENTS, Asked, chunk, counted, event, raw_server, said

NOT_NEEDED = ("httpx", "pyarrow.compute", "prometheus_client", "rich", "typer", "ebbench.client.load_generator")


def test_a_worker_loads_only_what_sends_requests() -> None:
    listing = f"import sys, ebbench.client.worker; print([m for m in {NOT_NEEDED!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", listing], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_package_gives_what_callers_of_the_load_generator_need() -> None:
    from ebbench.client import ClientOptions, DriveResult, drive

    assert callable(drive)
    assert ClientOptions().endpoint == "completions"
    assert "requests" in DriveResult._fields


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_worker_has_what_prompt_times_need_and_its_parent_waits(workers: int) -> None:
    """Its parent waits for others meanwhile; a program that imports ebbench is left as it is."""
    seen: list[dict[int, tuple[str, int]]] = []

    async def answer(asked: Asked) -> None:
        seen.append({pid: _of_process(pid) for pid in (os.getpid(), *_children(os.getpid()))})
        await asked.send(EVENTS + chunk(b"".join(map(event, (said("a"), said("b", "length"), counted(2))))) + END)

    before = _of_process(os.getpid())
    with raw_server(answer) as server:
        done = run(server.url, plan_of(1, output_tokens=2), workers=workers)
    assert done.requests["status"].to_pylist() == ["ok"]
    assert _of_process(os.getpid()) == before
    (processes,) = seen
    own = processes.pop(os.getpid())
    if not workers:
        assert own == before
        return
    if before[0] == str(os.SCHED_OTHER):
        assert own[0] == str(os.SCHED_BATCH)
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert any(room >= min(soft, 16_384) for _, room in processes.values())
    assert all(policy == before[0] for policy, _ in processes.values())


def _children(pid: int) -> list[int]:
    return [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]


def _of_process(pid: int) -> tuple[str, int]:
    """Scheduling policy of its main thread, and the size of its table of files."""
    room = re.search(r"FDSize:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert room is not None
    return str(os.sched_getscheduler(pid)), int(room[1])


@pytest.mark.skipif(not Path("/proc/self/sched").exists(), reason="reads /proc")
def test_short_slices_change_nothing_else() -> None:
    def told() -> tuple[int, int, int]:
        length = re.search(
            r"se.slice\s*:\s*(\d+)", Path(f"/proc/self/task/{threading.get_native_id()}/sched").read_text()
        )
        return os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0), int(length[1]) if length else 0

    def in_thread() -> None:
        seen.append(told())
        alarm.take_short_slices()
        seen.append(told())

    seen: list[tuple[int, int, int]] = []
    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join()
    (policy, nice, before_ns), after = seen
    assert after[:2] == (policy, nice)
    if policy == os.SCHED_OTHER and before_ns:  # Linux 6.12 or later, which says how long slices are
        assert after[2] < before_ns


def test_a_sandbox_that_refuses_another_scheduling_policy_stops_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", refused)
    with alarm.behind_others():
        assert os.sched_getscheduler(0) == os.SCHED_OTHER
