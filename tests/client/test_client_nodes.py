"""One plan sent by several nodes of a local Ray cluster to a fake server, over real sockets."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ebbench.client import drive
from ebbench.engines.endpoint import EndpointEngine
from ebbench.engines.setup import unknown_device
from ebbench.fakeserver import FakeConfig, FakeServerProcess, LedgerEntry
from ebbench.records.plan import Plan, Progress
from ebbench.runs.execute import run_plan
from ebbench.spec.client import ClientOptions
from ebbench.spec.server import EngineOptions
from ebbench.workloads import build_plan
from tests.client.client_runs import column, plan_of
from tests.processes.process_tree import wait_until
from tests.sweep.sweep_data import invoke
from vllm_eb.policy import parse_policy

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.slow
QUICK = FakeConfig(ttft_ms=5, itl_ms=2)


@pytest.fixture(scope="module")
def started() -> Iterator[Any]:
    """A head without CPUs and two nodes of one CPU each; this process is connected to it."""
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    ray.init(address=made.address, log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture
def cluster(started: Any) -> Any:
    """With two nodes, although a test before may have lost one."""

    while len(started.worker_nodes) < 2:
        started.add_node(num_cpus=1)
    meant = {node.node_id for node in started.worker_nodes}

    def alive() -> set[str]:
        return {node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")}

    wait_until(lambda: alive() == meant, "the cluster is not of its two nodes", 120.0)
    return started


def options_of(cluster: Any, **more: Any) -> ClientOptions:
    # Limits that a busy machine does not reach: these tests are not about lateness.
    settings: dict[str, Any] = {"lag_limit_ms": 1e6, "ready_timeout_s": 60.0, "metrics_interval_s": None}
    settings |= {"idle_timeout_s": 60.0, "id_prefix": "", **more}
    return ClientOptions(client_nodes=2, ray_address=cluster.address, **settings)


def clients_left() -> list[int]:
    """Worker processes of the load generator on this machine that run under Ray."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if b"-m\0ebbench.client\0" in (folder / "cmdline").read_bytes():
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                if b"ray::" in Path(f"/proc/{parent}/cmdline").read_bytes():
                    found.append(int(folder.name))
    return found


def most_at_once(entries: list[LedgerEntry]) -> int:
    events = sorted([(e.received_ns, 1) for e in entries] + [(e.done_ns or 0, -1) for e in entries])
    level = peak = 0
    for _, step in events:
        level += step
        peak = max(peak, level)
    return peak


@pytest.mark.parametrize("arrivals_ms", [None, [10.0 * i for i in range(21)]])
def test_two_nodes_send_one_plan_as_one_run(cluster: Any, arrivals_ms: list[float] | None) -> None:
    plan = plan_of(21, turns=2, concurrency=5 if arrivals_ms is None else None, arrivals_ms=arrivals_ms)
    with FakeServerProcess(QUICK) as server:
        result = drive(server.url, plan, options_of(cluster), environ={})
        entries = server.ledger()
    assert result.invalid == ()
    assert set(column(result, "status")) == {"ok"}
    assert column(result, "request_id") == plan.table["request_id"].to_pylist()
    assert sorted(entry.request_id for entry in entries) == sorted(column(result, "request_id"))  # each sent once
    if arrivals_ms is None:
        assert most_at_once(entries) <= 5
    else:
        assert column(result, "intended_ns")[::2] == [round(ms * 1e6) for ms in arrivals_ms]
    workers: dict[int, set[int]] = {}
    for session, worker in zip(column(result, "session"), column(result, "worker"), strict=True):
        workers.setdefault(session, set()).add(worker)
    assert {len(own) for own in workers.values()} == {1}  # a session stays on its node
    assert set(column(result, "worker")) == {0, 1}
    _check_times(result, entries)
    assert clients_left() == []


def _check_times(result: Any, entries: list[LedgerEntry]) -> None:
    """All processes have one clock here, so offsets are 0 within their errors."""
    nodes = result.facts["client_nodes"]
    assert [node["requests"] for node in nodes] in ([22, 20], [26, 16])
    for node in nodes:
        assert abs(node["clock_offset_ms"]) <= node["round_trip_ms"] / 2 + 1e-6
        assert node["alignment_error_ms"] <= result.facts["clock_alignment_error_ms"]
    error_ns = result.facts["clock_alignment_error_ms"] * 1e6 + 1000
    start_ns = result.facts["start_monotonic_ns"]
    rows = {row["request_id"]: row for row in result.requests.to_pylist()}
    for entry in entries:
        row = rows[entry.request_id]
        assert row["sent_ns"] - error_ns <= entry.received_ns - start_ns
        assert entry.first_token_ns is not None
        assert entry.first_token_ns - start_ns <= row["first_token_ns"] + error_ns


class Acting:
    """Acts once, in a thread of its own, when so many requests are complete."""

    def __init__(self, completed: int, act: Callable[[], None]) -> None:
        self.completed, self.act = completed, act
        self.thread: threading.Thread | None = None

    def update(self, progress: Progress) -> None:
        if self.thread is None and progress.completed >= self.completed:
            self.thread = threading.Thread(target=self.act)
            self.thread.start()


@pytest.mark.parametrize("closed_loop", [True, False])
def test_a_killed_node_is_accounted_for_request_by_request(cluster: Any, closed_loop: bool) -> None:
    lost = next(iter(cluster.worker_nodes))  # both nodes are used
    plan = plan_of(400, concurrency=8 if closed_loop else None, output_tokens=20,
                   arrivals_ms=None if closed_loop else [25.0 * i for i in range(400)])  # fmt: skip
    acting = Acting(20, lambda: cluster.remove_node(lost, allow_graceful=False))
    with FakeServerProcess(FakeConfig(ttft_ms=20, itl_ms=5)) as server:
        result = drive(server.url, plan, options_of(cluster), acting, environ={})
        entries = server.ledger()
    assert acting.thread is not None
    acting.thread.join()
    rows = result.requests.to_pylist()
    assert [row["request_id"] for row in rows] == plan.table["request_id"].to_pylist()
    assert {row["status"] for row in rows} <= {"ok", "failed", "cancelled", "never_sent"}
    of_lost = [row for row in rows if row["error_class"] == "node_lost"]
    assert {row["status"] for row in of_lost} == {"failed", "never_sent"}
    assert {row["error_class"] for row in rows if row["status"] == "failed"} == {"node_lost"}
    received = {entry.request_id for entry in entries}
    assert {row["request_id"] for row in rows if row["status"] in ("ok", "cancelled")} <= received
    assert len({row["worker"] for row in rows if row["status"] == "ok"}) == 2  # what it had reported is kept
    assert [node["lost"] for node in result.facts["client_nodes"]].count(True) == 1
    assert any("was lost" in reason for reason in map(str, result.invalid))
    wait_until(lambda: clients_left() == [], "worker processes of the lost node still run", 120.0)


def test_one_interrupt_drains_all_nodes(cluster: Any) -> None:
    acting = Acting(4, lambda: os.kill(os.getpid(), signal.SIGINT))
    with FakeServerProcess(FakeConfig(ttft_ms=20, itl_ms=10)) as server:
        result = drive(server.url, plan_of(200, output_tokens=5), options_of(cluster), acting, environ={})
    assert result.interrupted
    assert set(column(result, "status")) == {"ok", "never_sent"}
    assert {row["error_class"] for row in result.requests.to_pylist()} == {None, "not_released"}


def test_a_duration_keeps_the_sessions_that_each_node_released(cluster: Any) -> None:
    asked: dict[str, Any] = {"num_prompts": 400, "max_concurrency": 5, "source": "profile", "with_text": False}
    plan: Plan = build_plan("balanced", duration_s=1.5, input_len=20, output_len=10, **asked)
    with FakeServerProcess(FakeConfig(ttft_ms=20, itl_ms=10)) as server:
        engine = EndpointEngine(url=server.url, client=options_of(cluster))
        part, result = run_plan(engine, plan, parse_policy("v1"), unknown_device(None, "m"), EngineOptions(), None)
        received = {entry.request_id for entry in server.ledger()}
    assert set(part.table["request_id"].to_pylist()) == received
    assert 0 < len(part) < len(plan)
    assert column(result, "request_id") == part.table["request_id"].to_pylist()
    assert set(column(result, "status")) == {"ok"}


def test_the_command_reports_the_nodes_and_refuses_more_than_there_are(cluster: Any, tmp_path: Path) -> None:
    with FakeServerProcess(QUICK) as server:
        asked = ("balanced", "--engine", server.url, "--num-prompts", 30, "--max-concurrency", 4, "--input-len", 20,
                 "--output-len", 8, "--lag-limit-ms", 1e6, "--quiet", "--ray-address", cluster.address)  # fmt: skip
        done = invoke("run", *asked, "--workers", "ray:2", "--output-dir", tmp_path / "run", "--json")
        refused = invoke("run", *asked, "--workers", "ray:9")
    assert done.exit_code == 0, done.output
    (summary,) = json.loads(done.stdout)
    assert (summary["client_nodes"], summary["client_nodes_lost"], summary["completed"]) == (2, 0, 30)
    assert summary["clock_alignment_error_ms"] > 0
    shown = invoke("show", tmp_path / "run").output
    assert "Clients: 2 client nodes with 2 processes, clocks aligned to" in " ".join(shown.split())
    assert refused.exit_code == 2
    assert "the Ray cluster has 2 nodes with a CPU" in " ".join(refused.output.split())
