"""Execution of sweeps: resumed, killed, with cells that fail or end their process."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from ebbench.analysis.summary import summarise
from ebbench.devices.loader import load_device
from ebbench.records.run import Run
from ebbench.runs.execute import Task, make
from ebbench.runs.file import spec_of_file
from ebbench.runs.key import directory_name, result_key
from ebbench.runs.pool import ATTEMPTS, Processes, attempt
from ebbench.runs.prepare import device_of
from ebbench.runs.store import Measured
from ebbench.sweep.drive import SCHEMA, Finished, SweepStore, run_sweep
from ebbench.sweep.show import baseline_policy, findings
from ebbench.sweep.spec import load_sweep
from tests.sweep.sweep_data import TINY, invoke, spec_file
from tests.sweep.sweep_jobs import deadly


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished sweep: ``spec.toml`` and ``out``."""
    folder = tmp_path_factory.mktemp("tiny")
    text = TINY.replace("[common]", "max_num_batched_tokens = [64, 256]\n[common]")
    done = invoke("sweep", spec_file(folder, text), "--output-dir", folder / "out", "--workers", 2)
    assert done.exit_code == 0, done.output
    (folder / "shown.txt").write_text(done.stdout)
    return folder


def test_results_are_one_table_in_the_order_of_the_grid(tiny: Path) -> None:
    table = pq.read_table(tiny / "out" / "results.parquet")
    assert table.schema.equals(SCHEMA)
    cells = load_sweep(tiny / "spec.toml").cells
    assert table["key"].to_pylist() == [result_key(cell) for cell in cells]
    assert table["completed"].to_pylist() == [40.0] * 8
    assert set(table["valid"].to_pylist()) == {True}
    rows = table.to_pylist()
    assert {row["plan_hash"] for row in rows if row["seed"] == 0} != {row["plan_hash"] for row in rows if row["seed"]}
    assert len({row["plan_hash"] for row in rows}) == 2


def test_a_cell_is_what_run_gives(tiny: Path, tmp_path: Path) -> None:
    arguments = ("balanced", "--source", "profile", "-n", 40, "--input-len", 32, "--output-len", 8, "-c", 16)
    done = invoke(
        "run", *arguments, "--max-num-seqs", 16, "--max-num-batched-tokens", 256,
        "-p", "eb", "--seed", 1, "--json", "-q", "--engine", "sim",
        "-o", tmp_path / "run",
    )  # fmt: skip
    (summary,) = json.loads(done.stdout)
    rows = pq.read_table(tiny / "out" / "results.parquet").to_pylist()
    (row,) = [r for r in rows if (r["policy"], r["seed"], r["max_num_batched_tokens"]) == ("eb", 1, 256)]
    assert row["plan_hash"] == Run.load(tmp_path / "run").manifest.plan_hash
    for figure in ("output_throughput", "median_ttft_ms", "median_tpot_ms", "duration"):
        assert row[figure] == summary[figure]


def test_a_cell_with_a_rate_is_what_run_gives(tmp_path: Path) -> None:
    text = TINY.replace("max_concurrency = 16", "request_rate = 40").replace("repeats = 2", "keep_runs = true")
    assert invoke("sweep", spec_file(tmp_path, text), "-o", tmp_path / "out", "-q", "--workers", 1).exit_code == 0
    done = invoke(
        "run", "balanced", "--source", "profile", "-n", 40, "--input-len", 32, "--output-len", 8, "--request-rate", 40,
        "--max-num-seqs", 16, "-p", "v1", "-q", "--engine", "sim", "-o", tmp_path / "run",
    )  # fmt: skip
    assert done.exit_code == 0
    hashes = set(pq.read_table(tmp_path / "out" / "results.parquet")["plan_hash"].to_pylist())
    assert hashes == {Run.load(tmp_path / "run").manifest.plan_hash}


def test_findings_name_the_best_configuration(tiny: Path) -> None:
    done = invoke("sweep", tiny / "spec.toml", "--output-dir", tiny / "out", "--json", "-q")
    document = json.loads(done.stdout)
    assert (document["from_before"], document["finished"]) == (8, 8)
    rows = pq.read_table(tiny / "out" / "results.parquet").to_pylist()
    for finding in document["findings"]:
        means = {
            budget: sum(
                r["request_throughput"]
                for r in rows
                if (r["policy"], r["max_num_batched_tokens"]) == (finding["policy"], budget)
            )
            / 2
            for budget in (64, 256)
        }
        assert finding["best_budget"] == max(means, key=means.__getitem__)
        assert finding["best"] == pytest.approx(max(means.values()))
        assert finding["range_ratio"] == pytest.approx(max(means.values()) / min(means.values()))
        assert finding["n_sens"] is None  # one batch size only
    assert "best B" in (tiny / "shown.txt").read_text()


def test_findings_name_the_policy_they_are_against_and_the_setting(tmp_path: Path) -> None:
    text = TINY.replace("max_concurrency = 16\n", "").replace("repeats = 2\n", "")
    spec = spec_file(tmp_path, text.replace('"v1", "eb"]', '"eb", "ebplus"]\nmax_concurrency = [4, 8]'))
    shown = invoke("sweep", spec, "-o", tmp_path / "out", "--workers", 1).stdout
    assert "vs eb " in shown
    assert "vs v1" not in shown
    assert [line for line in shown.splitlines() if "=" in line] == ["max_concurrency=4", "max_concurrency=8"]
    document = json.loads(invoke("sweep", spec, "-o", tmp_path / "out", "--json", "-q").stdout)
    assert document["baseline"] == "eb"
    best = {(f["max_concurrency"], f["policy"]): f["best"] for f in document["findings"]}
    for finding in document["findings"]:
        setting, policy = finding["max_concurrency"], finding["policy"]
        gain = None if policy == "eb" else pytest.approx(best[setting, policy] / best[setting, "eb"] - 1)
        assert finding["gain"] == gain


def test_there_is_one_baseline_and_no_gain_where_it_is_missing() -> None:
    def cell(policy: str, concurrency: int, throughput: float) -> Finished:
        made = spec_of_file({"workload": "balanced", "policy": policy, "max_concurrency": concurrency})
        return Finished(made, Measured({"valid": True, "request_throughput": throughput}, (), Path()))

    cells = [cell("eb", 4, 2.0), cell("ebplus", 4, 3.0), cell("eb", 8, 5.0), cell("v1", 8, 4.0)]
    found = findings(cells, ("policy", "max_concurrency"))
    assert baseline_policy(found) == "v1"
    assert [finding.gain for finding in found] == [None, None, 0.25, None]


def test_nothing_is_run_twice(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stamps = {path: path.stat().st_mtime_ns for path in (tiny / "out" / "cells").glob("*/cell.json")}
    assert invoke("sweep", tiny / "spec.toml", "--output-dir", tiny / "out", "-q").exit_code == 0
    assert stamps == {path: path.stat().st_mtime_ns for path in (tiny / "out" / "cells").glob("*/cell.json")}


def test_a_wider_grid_runs_only_what_is_new(tiny: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny / "out", tmp_path / "out")
    text = (tiny / "spec.toml").read_text().replace("[64, 256]", "[64, 128, 256]")
    dry = invoke("sweep", spec_file(tmp_path, text), "-o", tmp_path / "out", "--dry-run")
    assert "12 cells, 4 to run, 8 finished" in dry.stdout
    listed = json.loads(invoke("sweep", tmp_path / "spec.toml", "-o", tmp_path / "out", "--dry-run", "--json").stdout)
    assert sum(cell["finished"] for cell in listed["cells"]) == 8
    done = invoke("sweep", tmp_path / "spec.toml", "-o", tmp_path / "out", "--json", "-q", "--workers", 1)
    assert (json.loads(done.stdout)["from_before"], json.loads(done.stdout)["finished"]) == (8, 12)


def test_a_damaged_result_is_named(tiny: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny / "out", tmp_path / "out")
    victim = next((tmp_path / "out" / "cells").glob("*/cell.json"))
    victim.write_bytes(b"{")
    done = invoke("sweep", tiny / "spec.toml", "-o", tmp_path / "out", "-q")
    assert done.exit_code == 3
    assert f"{victim}:1: is not valid JSON" in done.stderr


def test_a_summary_alone_is_the_summary_of_the_run_kept(tmp_path: Path) -> None:
    cell = spec_of_file(
        {"workload": "balanced", "source": "profile", "num_prompts": 700, "input_len": 32, "output_len": 8,
         "max_concurrency": 64, "policy": "ebplus", "goodput": "ttft:500"}
    )  # fmt: skip
    alone, kept = make(Task(cell)).figures, make(Task(cell, tmp_path / "run")).figures
    assert alone["request_goodput"] > 0
    assert dict(alone) | {"run_dir": ""} == dict(kept) | {"run_dir": ""}
    again = summarise(Run.load(tmp_path / "run")).to_dict()
    assert again == {name: kept[name] for name in again}


def test_cells_share_a_devices_tables_but_not_its_memory() -> None:
    first = spec_of_file({"workload": "balanced", "max_num_seqs": 64, "gpu_memory_utilization": 0.5})
    second = spec_of_file({"workload": "balanced", "max_num_seqs": 2048, "max_num_batched_tokens": 16384})
    third = spec_of_file({"workload": "balanced", "num_kv_blocks": 100})
    devices = [device_of(cell) for cell in (first, second, third)]
    assert devices[0].cost is devices[1].cost is devices[2].cost
    for cell, device in zip((first, second, third), devices, strict=True):
        fresh = load_device(
            str(cell.device), str(cell.model), gpu_memory_utilization=cell.server.gpu_memory_utilization,
            max_num_seqs=cell.server.max_num_seqs, max_num_batched_tokens=cell.server.max_num_batched_tokens,
            kv_tokens=1600 if cell is third else None,
        )  # fmt: skip
        assert device == fresh


def test_a_cell_that_fails_is_reported_and_the_rest_goes_on(tmp_path: Path) -> None:
    text = TINY.replace("[common]", "max_num_batched_tokens = [8, 64]\n[common]")
    done = invoke("sweep", spec_file(tmp_path, text), "-o", tmp_path / "out", "--workers", 1)
    assert done.exit_code == 4
    assert "4 of 8 cells failed" in done.stderr
    assert "4 cells: --max-num-batched-tokens 8 is below --max-num-seqs 16" in " ".join(done.stdout.split())
    assert len(list((tmp_path / "out" / "cells").glob("*/cell.json"))) == 4
    assert len(list((tmp_path / "out" / "failed").iterdir())) == 4


def test_an_exception_in_an_engine_fails_only_its_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    import ebbench.engines

    def broken(name: str) -> object:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(ebbench.engines.setup, "select_engine", broken)
    outcome = attempt(make, Task(spec_of_file({"workload": "balanced", "source": "profile", "num_prompts": 5})))
    assert outcome.value is None
    assert str(outcome.error).startswith("ZeroDivisionError: a bug (test_sweep_runs.py:")


def test_a_cell_that_kills_its_process_fails_alone(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    text = TINY.replace("repeats = 2", "repeats = 6").replace('"v1", "eb"', '"v1"') + f'tokenizer = "{notes}"\n'
    spec = spec_file(tmp_path, text)
    result = run_sweep(load_sweep(spec), SweepStore(tmp_path / "out"), Processes(2), spec=b"", job=deadly)
    assert sorted(entry.cell.plan.seed for entry in result.finished) == [0, 1, 3, 4, 5]
    (failed,) = result.failed
    assert failed.cell.plan.seed == 2
    assert f"died {ATTEMPTS} times" in str(failed.error)


def test_a_killed_sweep_goes_on_where_it_was(tmp_path: Path) -> None:
    """SIGKILL in the middle: whole files only, no orphans, and the second call runs exactly the rest."""
    text = TINY.replace("repeats = 2", "repeats = 20").replace("num_prompts = 40", "num_prompts = 400")
    spec, out = spec_file(tmp_path, text), tmp_path / "out"
    code = "from ebbench.cli.main import run; run()"
    command = [sys.executable, "-c", code, "sweep", str(spec), "-o", str(out), "--workers", "1", "-q"]
    process = subprocess.Popen(command, start_new_session=True)
    deadline = time.monotonic() + 60
    while len(list(out.glob("cells/[!.]*/cell.json"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = {path.parent.name: path.read_bytes() for path in out.glob("cells/[!.]*/cell.json")}
    assert 3 <= len(before) < 40
    assert _gone(process.pid), "worker processes outlive the sweep"
    again = json.loads(invoke("sweep", spec, "-o", out, "--json", "-q", "--workers", 1).stdout)
    assert (again["from_before"], again["finished"]) == (len(before), 40)
    assert before == {name: (out / "cells" / name / "cell.json").read_bytes() for name in before}


def _gone(session: int) -> bool:
    """Whether no process of the session is left, given a moment."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if not any(_session_of(entry) == session for entry in Path("/proc").iterdir() if entry.name.isdigit()):
            return True
        time.sleep(0.1)
    return False


def _session_of(process: Path) -> int | None:
    try:
        return os.getsid(int(process.name))
    except OSError:
        return None


def test_ctrl_c_keeps_what_is_finished(tmp_path: Path) -> None:
    text = TINY.replace("repeats = 2", "repeats = 20").replace("num_prompts = 40", "num_prompts = 400")
    spec, out = spec_file(tmp_path, text), tmp_path / "out"
    code = "from ebbench.cli.main import run; run()"
    command = [sys.executable, "-c", code, "sweep", str(spec), "-o", str(out), "--workers", "1", "-q"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not list(out.glob("cells/[!.]*/cell.json")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    kept = len(list(out.glob("cells/[!.]*/cell.json")))
    assert f"interrupted; {kept} of 40 cells are finished" in errors
    assert pq.read_table(out / "results.parquet").num_rows == kept


def test_runs_are_kept_on_request(tmp_path: Path) -> None:
    text = TINY.replace("repeats = 2", "repeats = 1\nkeep_runs = true")
    spec, out = spec_file(tmp_path, text), tmp_path / "out"
    assert invoke("sweep", spec, "-o", out, "-q", "--workers", 1).exit_code == 0
    for cell in load_sweep(spec).cells:
        assert Run.load(out / "cells" / directory_name(cell)).manifest.policy == cell.policy
    assert not list((out / "cells").glob(".cell-*"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--workers", "0"), "--workers must be at least 1"),
        (("--executor", "dask"), "unknown executor 'dask'"),
        (("--metric", "speed"), "unknown metric 'speed'"),
        (("--ray-address", "auto"), "need --executor ray"),
    ],
)
def test_sweep_refuses_bad_arguments(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    done = invoke("sweep", spec_file(tmp_path, TINY), "-o", tmp_path / "out", *arguments)
    assert done.exit_code == 2
    assert message in done.stderr


def test_the_caveats_of_a_device_are_said_once_of_its_cells(tmp_path: Path) -> None:
    """The host of the L40S was never fitted; the H200's was. It adds to every step without asynchronous scheduling."""
    devices = TINY.replace('"v1", "eb"]', '"v1", "eb"]\ndevice = ["l40s", "h200"]')
    spec = spec_file(tmp_path, f"{devices}async_scheduling = false\n")
    first = invoke("sweep", spec, "-o", tmp_path / "out", "-q", "--workers", 1).stdout
    again = invoke("sweep", spec, "-o", tmp_path / "out", "-q").stdout  # from what is stored
    for shown in (first, again):
        assert " ".join(shown.split()).count("device=l40s: the host's time per step on l40s was never fitted") == 1
        assert "p99" not in shown
    document = json.loads(invoke("sweep", spec, "-o", tmp_path / "out", "-q", "--json").stdout)
    unfitted = [text for text in document["warnings"] if "never fitted" in text]
    assert [text.partition(":")[0] for text in unfitted] == ["device=l40s"]
    rows = pq.read_table(tmp_path / "out" / "results.parquet").to_pylist()
    assert {(row["device"], "never fitted" in row["warnings"]) for row in rows} == {("l40s", True), ("h200", False)}
