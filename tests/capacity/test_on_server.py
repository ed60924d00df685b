"""``ebbench capacity`` over HTTP, on a server whose capacity is known, and the conditions that end a search.

On a busy test machine some requests are late, and a client that is late does not make a run INVALID: it is half of the
requests that must keep a limit, and above capacity most miss it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from ebbench.fakeserver import FakeConfig, FakeServerProcess, LedgerEntry, parse_fault
from ebbench.fakeserver.config import Fault

REQUESTS = "--input-len 20 --output-len 5"
LATE = "--lag-limit-ms 5000"


def capacity(folder: Path, url: str, *more: str) -> subprocess.CompletedProcess[str]:
    """The command in its own process, so that client and server do not share an interpreter."""
    code = "from ebbench.cli.main import run; run()"
    options = f"capacity balanced --engine {url} {REQUESTS} -q -o {folder}".split()
    options += [] if "--length-distribution" in more else ["--length-distribution", "fixed"]
    return subprocess.run([sys.executable, "-c", code, *options, *more], capture_output=True, text=True, timeout=300)


def answer(done: subprocess.CompletedProcess[str]) -> dict[str, object]:
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


@pytest.mark.slow
def test_the_number_of_requests_that_the_server_runs_at_a_time_is_found(tmp_path: Path) -> None:
    """Two slots, about 120 ms each: with three open requests each waits 60 ms on average, and 20 ms are allowed.

    Lengths differ, so that slots become free one after another. Half of the requests must keep the limit: on a busy
    machine some may be late by more than 20 ms; of three open requests more than half are.
    """
    with FakeServerProcess(FakeConfig(ttft_ms=40, itl_ms=20, max_running=2)) as server:
        options = [*LATE.split(), "--length-distribution", "uniform", "--by", "concurrency", "--goodput", "ttft:60"]
        found = answer(capacity(tmp_path / "out", server.url, *options, "--attainment", "0.5", "-n", "32", "--json"))
    assert 1.5 < float(str(found["capacity_concurrency"])) < 3, found
    assert found["limited_by"] == "ttft"


@pytest.mark.slow
def test_the_rate_at_which_the_queue_grows_is_found(tmp_path: Path) -> None:
    """Two slots, 60 ms each: at most 33 requests/s. TPOT does not suffer from a queue, so only the queue limits.

    A busy machine makes the server slower than that: its ledger tells how fast it was. A busy client may read the
    tokens of a response in one go, which then has no TPOT: half of them need one, so the queue limits all the same.
    """
    with FakeServerProcess(FakeConfig(ttft_ms=20, itl_ms=10, max_running=2)) as server:
        options = f"{LATE} --goodput tpot:60000 --attainment 0.5 -n 90 --precision 0.1 --max-probes 4 --json"
        found = answer(capacity(tmp_path / "out", server.url, *options.split()))
        rates = rates_with_a_queue(server.ledger())
    assert found["limited_by"] == "queue"
    # Both responses of the two slots may end just within a second and a half.
    assert 0.7 * min(rates) <= float(str(found["capacity_requests_per_s"])) <= 35, (rates, found)
    curve = found["curve"]
    assert isinstance(curve, list)
    by_time = sorted(curve, key=lambda point: int(str(point["run_dir"]).rpartition("seed")[2]))
    first = next(index for index, point in enumerate(by_time) if point["runaway"])
    assert first < len(by_time) - 1
    assert all(point["load"] <= by_time[first]["load"] for point in by_time[first:])


def rates_with_a_queue(ledger: list[LedgerEntry]) -> list[float]:
    """Requests/s that the server completed while requests waited, in the runs in which they waited longest."""
    ledger = sorted(ledger, key=lambda entry: entry.received_ns)
    begins = [0, *(place for place, (one, other) in enumerate(pairwise(ledger), 1) if pause_s(one, other) > 1)]
    found = []
    for begin, end in pairwise([*begins, len(ledger)]):
        run, waited_ns, completed, until_ns = ledger[begin:end], 0, 0, 0
        for entry in run:
            since_ns = max(entry.received_ns, until_ns)
            if entry.started_ns > since_ns:
                waited_ns += entry.started_ns - since_ns
                completed += sum(since_ns < (one.done_ns or 0) <= entry.started_ns for one in run)
                until_ns = entry.started_ns
        found.append((waited_ns, completed))
    longest_ns = max(waited_ns for waited_ns, _ in found)
    assert longest_ns > 0, "no request waited in any run"
    return [completed / waited_ns * 1e9 for waited_ns, completed in found if waited_ns >= longest_ns / 2]


def pause_s(one: LedgerEntry, other: LedgerEntry) -> float:
    """Time (s) between the arrivals of two requests."""
    return (other.received_ns - one.received_ns) / 1e9


@pytest.mark.parametrize(
    ("faults", "more", "words"),
    [
        ((parse_fault("status:code=500,every=3"),), LATE, "failed"),
        ((parse_fault("kill:after=60"),), LATE, "server"),
        ((), "--lag-limit-ms 0.0001", "INVALID"),
    ],
    ids=["requests fail", "server dies", "client late"],
)
def test_a_search_stops_where_nothing_can_be_measured(
    tmp_path: Path, faults: tuple[Fault, ...], more: str, words: str
) -> None:
    with FakeServerProcess(FakeConfig(ttft_ms=5, itl_ms=1, faults=faults)) as server:
        done = capacity(tmp_path / "out", server.url, "--goodput", "ttft:5000", "-n", "50", *more.split())
        sent = len(server.ledger()) if "kill" not in str(faults) else 0
    assert done.returncode == 4, done.stdout + done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert sent <= 3 * 40


def test_a_server_that_refuses_is_one_line(tmp_path: Path) -> None:
    done = capacity(tmp_path / "out", "http://127.0.0.1:9", "--goodput", "ttft:5000", "-n", "50")
    assert done.returncode == 4
    assert len(done.stderr.strip().splitlines()) <= 2
    assert "127.0.0.1:9" in done.stderr


def test_a_search_whose_requests_all_fail_says_why(tmp_path: Path) -> None:
    with FakeServerProcess(FakeConfig(faults=(parse_fault("status:code=400"),))) as server:
        done = capacity(tmp_path / "out", server.url, "--goodput", "ttft:500", "-n", "8")
    assert done.returncode != 0
    assert "INVALID: every request failed; " in done.stderr
    assert " x http_400: fault: status 400 -> " in done.stderr
