"""The Python API beside an event loop, in threads and under signals: what was measured is kept, and nothing else is."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest

import ebbench as eb
from ebbench.fakeserver.config import FakeConfig
from ebbench.fakeserver.process import FakeServerProcess

ENDLESS: dict[str, Any] = {"source": "profile", "num_prompts": 60_000, "max_concurrency": 512, "policies": "v1"}
OVER_HTTP: dict[str, Any] = {
    "source": "profile", "output_len": 3, "request_rate": 50.0, "lag_limit_ms": 60_000.0, "num_prompts": 10,
}  # fmt: skip


def kept(error: BaseException) -> eb.Runs:
    """The runs that the note on an error names."""
    [note] = error.__notes__
    place = note.partition("eb.load(")[2].rstrip(")")
    return eb.load(place.strip("'"))


def begun(then: Any) -> Any:
    """A progress function that calls ``then`` once, after the first request has ended."""
    called = threading.Event()

    def progress(event: eb.ProgressEvent) -> None:
        if event.snapshot is not None and event.done and not called.is_set():
            called.set()
            then()

    return progress


def test_other_tasks_go_on_beside_a_run() -> None:
    async def both(url: str) -> tuple[eb.Runs, int]:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        ticking = asyncio.create_task(tick())
        runs = await eb.run_async("sharegpt", engine=url, **OVER_HTTP)
        ticking.cancel()
        return runs, ticks

    with FakeServerProcess() as server:
        runs, ticks = asyncio.run(both(server.url))
    assert runs.valid
    assert ticks > 3


def test_a_run_inside_a_running_loop_works() -> None:
    async def notebook(url: str) -> eb.Runs:
        return eb.run("sharegpt", engine=url, **OVER_HTTP)

    with FakeServerProcess() as server:
        assert asyncio.run(notebook(server.url)).valid


@pytest.mark.parametrize("over_http", [False, True])
def test_a_cancelled_run_stops_and_is_kept(over_http: bool) -> None:
    async def cancelled(settings: dict[str, Any]) -> eb.Runs:
        loop = asyncio.get_running_loop()
        task: asyncio.Task[eb.Runs]
        progress = begun(lambda: loop.call_soon_threadsafe(task.cancel))
        task = asyncio.create_task(eb.run_async("sharegpt", progress=progress, **settings))
        with pytest.raises(asyncio.CancelledError) as stopped:
            await task
        return kept(stopped.value)

    with FakeServerProcess(FakeConfig()) as server:
        endless = {**OVER_HTTP, "engine": server.url, "num_prompts": 10_000} if over_http else ENDLESS
        runs = asyncio.run(cancelled(endless))
    [result] = runs
    assert result.summary.interrupted
    assert 0 < result.summary.metrics.completed < result.summary.metrics.planned


@pytest.mark.parametrize("workers", [1, 2])
def test_a_cancelled_plan_stops_amid_its_simulations(workers: int) -> None:
    """The rate is so high that sizing a candidate takes far longer than the test waits."""

    async def cancelled() -> None:
        loop = asyncio.get_running_loop()
        task: asyncio.Task[eb.PlanResult]

        def progress(event: eb.ProgressEvent) -> None:
            if event.done == 1:
                loop.call_later(0.1, task.cancel)

        task = asyncio.create_task(
            eb.plan_async(
                "sharegpt", source="profile", request_rate=3000.0, goodput="ttft:500 tpot:50", device="h200",
                tp=[1, 2], policies="v1", max_num_seqs=16, workers=workers,
                progress=lambda event: loop.call_soon_threadsafe(progress, event),
            )
        )  # fmt: skip
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(cancelled(), 60))


def test_a_part_of_a_simulation_is_no_plan() -> None:
    stops = threading.Event()

    def progress(event: eb.ProgressEvent) -> None:
        if event.done == 1 and not stops.is_set():
            stops.set()
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()

    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            eb.plan(
                "sharegpt", source="profile", request_rate=3000.0, goodput="ttft:500 tpot:50", device="h200",
                tp=[1, 2], policies="v1", max_num_seqs=16, workers=1, progress=progress,
            )  # fmt: skip
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_keeps_what_was_measured() -> None:
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt) as stopped:
            eb.run("sharegpt", progress=begun(lambda: os.kill(os.getpid(), signal.SIGINT)), **ENDLESS)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert kept(stopped.value)[0].summary.interrupted


def test_ctrl_c_reaches_a_run_over_http_inside_a_running_loop() -> None:
    async def notebook(url: str) -> eb.Runs:
        progress = begun(lambda: os.kill(os.getpid(), signal.SIGINT))
        settings = {**OVER_HTTP, "num_prompts": 10_000}
        with pytest.raises(KeyboardInterrupt) as stopped:
            eb.run("sharegpt", engine=url, progress=progress, **settings)
        return kept(stopped.value)

    before = signal.getsignal(signal.SIGINT)
    with FakeServerProcess() as server, asyncio.Runner() as runner:
        # A notebook's kernel leaves Python's own handler in place while a cell runs; asyncio.run() would set another.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            [result] = runner.get_loop().run_until_complete(notebook(server.url))
        finally:
            signal.signal(signal.SIGINT, before)
    assert result.summary.interrupted


def test_runs_in_threads_do_not_disturb_each_other() -> None:
    found: dict[int, eb.Runs] = {}

    def measure(seed: int) -> None:
        found[seed] = eb.run("balanced", policies="v1", num_prompts=40, max_concurrency=8, seed=seed)

    threads = [threading.Thread(target=measure, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {seed: runs[0].summary.seed for seed, runs in found.items()} == {0: 0, 1: 1, 2: 2}


def test_worker_processes_do_not_run_the_script_again(tmp_path: Any) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text(
        "import operator\nfrom ebbench.runs.pool import Processes, values\n"
        "print(sorted(values(Processes(2), operator.neg, [1, 2, 3])))\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[-3, -2, -1]\n"
