"""Sweeps on a Ray cluster of several local nodes, one of which is lost during the sweep."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebbench.runs.pool import RayCluster
from ebbench.spec.run import RunSpec
from ebbench.sweep.drive import SweepStore, run_sweep, sweep_pool
from ebbench.sweep.spec import load_sweep
from tests.processes.process_tree import assert_gone, descendants, wait_until
from tests.sweep.sweep_data import TINY, invoke, spec_file
from tests.sweep.sweep_jobs import slow

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster() -> Iterator[object]:
    """A head without CPUs and two nodes of one CPU each, with a made-up GPU."""
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # as this process, workers find `tests`
    prompt = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 3}
    head = {"num_cpus": 0, "include_dashboard": False, "_system_config": prompt}
    made = Cluster(initialize_head=True, head_node_args=head)
    made.nodes = [made.add_node(num_cpus=1, num_gpus=1) for _ in range(2)]  # type: ignore[attr-defined]
    ray.init(address=made.address, log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()


def sweep_apart(tmp_path: Path, *more: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A sweep in a process of its own: this one may be in a cluster already."""
    spec, output = spec_file(tmp_path, TINY), tmp_path / "out"
    return subprocess.run(
        [sys.executable, "-m", "ebbench", "sweep", spec, "--executor", "ray", "--output-dir", output, "--json", *more],
        capture_output=True, text=True, timeout=200, check=False, env=os.environ | environment,
    )  # fmt: skip


@pytest.mark.parametrize("way", ["option", "environment"])
def test_an_address_without_a_ray_cluster_is_refused_at_once(way: str, tmp_path: Path) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        if way == "option":
            done = sweep_apart(tmp_path, "--ray-address", address)
        else:
            done = sweep_apart(tmp_path, RAY_ADDRESS=address)
    assert (done.returncode, done.stderr.splitlines()[-1][:40]) == (4, f"error: no Ray cluster at {address}"[:40])


def test_a_running_cluster_is_not_used_without_an_address(cluster: object, tmp_path: Path) -> None:
    """Ray itself would join it, and refuse a number of workers there."""
    done = sweep_apart(tmp_path, "--workers", "1", RAY_ADDRESS="")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["finished"] == 4
    assert {job["DriverPid"] for job in ray._private.state.jobs()} == {os.getpid()}


def test_a_cluster_of_its_own_ends_with_a_sweep_that_is_killed(tmp_path: Path) -> None:
    """Without cleanup two of Ray's agents run for another minute."""
    spec = spec_file(tmp_path, TINY.replace("repeats = 2", "repeats = 200"))
    command = [sys.executable, "-m", "ebbench", "sweep", str(spec), "--executor", "ray", "--workers", "1", "-o", "out"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=os.environ | {"RAY_ADDRESS": ""}, stderr=subprocess.DEVNULL, start_new_session=True
    ) as process:
        wait_until(lambda: list(tmp_path.glob("out/cells/[!.]*/cell.json")), "no cell was finished", 300.0)
        below = descendants(process.pid)
        process.kill()
    assert len(below) > 3
    assert_gone(below, 50.0)


def test_cells_run_on_the_cluster_through_the_command(cluster: object, tmp_path: Path) -> None:
    spec = spec_file(tmp_path, TINY)
    done = invoke("sweep", spec, "--executor", "ray", "--output-dir", tmp_path / "ray", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["finished"] == 4
    invoke("sweep", spec, "--output-dir", tmp_path / "here", "--workers", 1, "--json")
    here, there = (SweepStore(tmp_path / name).load(load_sweep(spec).cells) for name in ("here", "ray"))
    rates = [{e.cell: e.measured.figures["output_throughput"] for e in entries} for entries in (here, there)]
    assert rates[0] == rates[1]


def test_a_lost_node_costs_no_finished_cell(cluster: object, tmp_path: Path) -> None:
    """A node dies with half the cells done: all finish, and none that was finished runs again."""
    notes = tmp_path / "notes"
    notes.mkdir()
    text = TINY.replace("repeats = 2", "repeats = 12").replace('policy = ["v1", "eb"]', 'policy = ["v1"]')
    spec = spec_file(tmp_path, text + f'tokenizer = "{notes}"\n')
    done: list[RunSpec] = []
    lost: list[int] = []

    class Losing(SweepStore):
        def succeeded(self, cell: RunSpec) -> None:
            done.append(cell)
            if len(done) == 4:
                before = list((tmp_path / "out" / "cells").glob("*/cell.json"))
                cluster.remove_node(cluster.nodes.pop(), allow_graceful=False)  # type: ignore[attr-defined]
                lost.append(len(before))

    sweep, store = load_sweep(spec), Losing(tmp_path / "out")
    result = run_sweep(sweep, store, RayCluster(gpus=1.0), spec=spec.read_bytes(), job=slow)
    assert lost == [4]
    assert (len(result.finished), len(result.failed)) == (12, 0)
    executions = [len(path.read_text().splitlines()) for path in notes.iterdir()]
    assert len(executions) == 12
    assert sum(executions) <= 13  # at most the cell that was running on the lost node ran again


@pytest.mark.parametrize(("engine", "gpus", "workers"), [("vllm", 1.0, 1), ("sim", 0.0, 3)])
def test_cells_of_the_vllm_engine_get_a_gpu_each(
    engine: str, gpus: float, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ebbench.runs.pool.usable_processors", lambda: 3)
    sweep = load_sweep(spec_file(tmp_path, TINY + f'engine = "{engine}"\n'))
    chosen = sweep_pool(sweep, None, "ray", None, None)
    assert isinstance(chosen, RayCluster)
    assert chosen.gpus == gpus
    assert sweep_pool(sweep, None, "ray", None, 0.5).gpus == 0.5  # type: ignore[attr-defined]
    assert sweep_pool(sweep, None, "process", None, None).workers == workers  # type: ignore[attr-defined]


def test_more_gpus_than_there_are_is_said_at_once(cluster: object, tmp_path: Path) -> None:
    sweep = load_sweep(spec_file(tmp_path, TINY))
    from ebbench.errors import RunError

    with pytest.raises(RunError, match=r"no node with 64 GPU\(s\)"):
        run_sweep(sweep, SweepStore(tmp_path / "out"), RayCluster(gpus=64), spec=b"")
