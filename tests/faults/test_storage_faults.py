"""Faults 12, 13 and 15: killed at any moment, disk full, damaged files."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from typer.testing import CliRunner, Result

from ebbench.analysis.rebuild import NOT_RECORDED, cut_off_runs, rebuild
from ebbench.analysis.summary import summarise
from ebbench.cli.main import app
from ebbench.devices.loader import load_device
from ebbench.engines.base import EngineResult
from ebbench.engines.sim import SimEngine
from ebbench.errors import DataError, RunError
from ebbench.fakeserver import FakeConfig, FakeServerProcess
from ebbench.records import files
from ebbench.records.run import MANIFEST, Journal, NotStoredError, Run, RunWriter, TableName
from ebbench.runs.conclude import RunContext, begin, conclude
from ebbench.spec.server import EngineOptions
from ebbench.workloads import build_plan
from vllm_eb.policy import parse_policy

REQUESTS, BATCHES = 60, 4


Arrange = Callable[..., list[str]]


class Killed(BaseException):
    """Simulates SIGKILL: it is not caught, and no cleanup runs."""


@pytest.fixture(scope="module")
def measured() -> tuple[RunContext, EngineResult]:
    """A finished measurement that claims to have taken real time."""
    plan = build_plan(
        "balanced", num_prompts=REQUESTS, seed=1, source="profile", max_concurrency=8, input_len=16, output_len=4
    )
    device, policy, options = load_device("rtx-pro-6000", "qwen3-8b"), parse_policy("eb"), EngineOptions(max_num_seqs=8)
    result = SimEngine().run(plan, policy, device, options)
    return RunContext(plan, policy, "vllm", device, options, 10**18, clock="real"), result


def store(directory: Path, measured: tuple[RunContext, EngineResult]) -> None:
    """Store a measurement in real time as ``ebbench run`` does; an exception ends it without cleanup."""
    context, result = measured
    writer = RunWriter.create(directory)
    begin(writer, context)
    journal = Journal(writer, "requests", rows=REQUESTS // BATCHES)
    for start in range(0, REQUESTS, 5):
        journal.add(result.requests.slice(start, 5))
    conclude(writer, context, result)


@pytest.fixture
def operations(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, BaseException], list[str]]:
    """Make the n-th write or rename of a file fail, or all from it on; returns the list of those made."""

    def arrange(fail_at: int, error: BaseException, *, lasting: bool = False) -> list[str]:
        made: list[str] = []
        writing, renaming = files._replace, Path.replace

        def write(path: Path, content: Callable[[Path], object]) -> None:
            def counted(temporary: Path) -> None:
                content(temporary)
                step(f"write {path.name}")

            writing(path, counted)

        def rename(self: Path, target: Path) -> Path:
            step(f"rename {Path(target).name}")
            return renaming(self, target)

        def step(name: str) -> None:
            made.append(name)
            if len(made) - 1 == fail_at or (lasting and len(made) > fail_at):
                raise error

        monkeypatch.setattr(files, "_replace", write)
        monkeypatch.setattr(Path, "replace", rename)
        return made

    return arrange


def same_requests(run: Run, result: EngineResult) -> bool:
    """Whether a stored run holds what was measured, beside the latencies computed from it."""
    return bool(run.requests.select(result.requests.column_names).equals(result.requests))


def steps_of_a_run() -> int:
    """Writes and renames: manifest, plan and shards, then four tables, the summary and the manifest."""
    return 2 * (2 + BATCHES + 6)


@pytest.mark.parametrize("moment", range(steps_of_a_run()))
def test_12_killed_at_any_moment_leaves_a_run_that_can_be_rebuilt(
    tmp_path: Path,
    measured: tuple[RunContext, EngineResult],
    operations: Callable[[int, BaseException], list[str]],
    moment: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    operations(moment, Killed())
    with pytest.raises(Killed):
        store(tmp_path / "run", measured)
    monkeypatch.undo()
    for shard in (tmp_path / "run").glob("*.parquet"):
        files.read_table(shard)  # a file under its final name is complete
    with pytest.raises(DataError):
        Run.load(tmp_path / "run")
    if not cut_off_runs([tmp_path / "run"]):
        assert not list((tmp_path / "run").glob("requests.*"))  # it had not begun
        return
    done = rebuild(tmp_path / "run")
    run = Run.load(tmp_path / "run")
    assert (run.manifest.valid, run.manifest.interrupted) == (False, True)
    assert run.manifest.plan_hash == _plan_hash(measured[0])
    assert run.requests["request_id"].equals(measured[0].plan.table["request_id"])
    errors = run.requests["error_class"].to_pylist()
    assert errors.count(NOT_RECORDED) == REQUESTS - done.recorded
    kept = run.requests.filter(pa.array([error != NOT_RECORDED for error in errors]))
    before = measured[1].requests
    rows = [before["request_id"].to_pylist().index(name) for name in kept["request_id"].to_pylist()]
    assert kept["last_token_ns"].to_pylist() == before.take(pa.array(rows, pa.int64()))["last_token_ns"].to_pylist()
    assert summarise(run).metrics.completed == done.recorded
    assert not list((tmp_path / "run").glob("*.part-*"))


def _plan_hash(context: RunContext) -> str:
    from ebbench.records.manifest import plan_hash

    return plan_hash(context.plan)


def test_the_number_of_moments_is_right(
    tmp_path: Path, measured: tuple[RunContext, EngineResult], operations: Callable[[int, BaseException], list[str]]
) -> None:
    made = operations(-1, Killed())
    store(tmp_path / "run", measured)
    assert len(made) == steps_of_a_run()
    assert made[-1] == f"rename {MANIFEST}"


def test_12_killed_while_recovering_recovers_again(
    tmp_path: Path,
    measured: tuple[RunContext, EngineResult],
    operations: Callable[[int, BaseException], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    operations(2 * (2 + BATCHES) + 1, Killed())
    with pytest.raises(Killed):
        store(tmp_path / "run", measured)
    for moment in range(0, 10, 3):
        operations(moment, Killed())
        with pytest.raises(Killed):
            rebuild(tmp_path / "run")
        monkeypatch.undo()
    assert rebuild(tmp_path / "run").recorded >= REQUESTS - REQUESTS // BATCHES


def test_12_the_client_killed_while_measuring(tmp_path: Path) -> None:
    """SIGKILL to a process of `ebbench run` against a server, then `ebbench recover`."""
    with FakeServerProcess(FakeConfig(ttft_ms=0.0, itl_ms=0.0)) as server:
        code = "import ebbench.records.run as j; j.Journal.__init__.__kwdefaults__['rows'] = 50; " \
               "from ebbench.cli.main import run; run()"  # fmt: skip
        arguments = [
            "run", "balanced", "--source", "profile", "-n", "20000", "-c", "4", "--input-len", "4", "--output-len", "4",
            "--engine", server.url, "-o", str(tmp_path / "run"), "-q",
        ]  # fmt: skip
        process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments], start_new_session=True, stderr=subprocess.DEVNULL
        )
        try:
            deadline = time.monotonic() + 60
            while len(list((tmp_path / "run").glob("requests.part-*"))) < 2 and time.monotonic() < deadline:
                time.sleep(0.01)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    shown = invoke("show", tmp_path / "run")
    assert shown.exit_code == 3
    assert "`ebbench recover` rebuilds it" in shown.stderr
    done = invoke("recover", tmp_path / "run")
    assert done.exit_code == 0, done.output
    manifest = Run.load(tmp_path / "run").manifest
    assert (manifest.valid, manifest.rows["requests"]) == (False, 20_000)
    assert summarise(Run.load(tmp_path / "run")).metrics.completed >= 100
    assert invoke("gate", tmp_path / "run", tmp_path / "run").exit_code == 3
    assert "nothing to recover" in invoke("recover", tmp_path / "run").stdout


BEGINNING, JOURNAL = range(0, 4, 2), range(4, 4 + 2 * BATCHES, 2)
STORING = range(JOURNAL.stop, steps_of_a_run(), 2)


def full_disk() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def other_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of temporary files."""
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    return place


@pytest.mark.parametrize("moment", JOURNAL)
def test_13_a_journal_that_cannot_be_written_ends_no_run(
    tmp_path: Path, measured: tuple[RunContext, EngineResult], operations: Arrange, moment: int
) -> None:
    operations(moment, full_disk())
    store(tmp_path / "run", measured)
    assert same_requests(Run.load(tmp_path / "run"), measured[1])


@pytest.mark.parametrize("moment", STORING)
def test_13_a_full_disk_at_the_end_moves_the_run(
    tmp_path: Path,
    measured: tuple[RunContext, EngineResult],
    operations: Arrange,
    moment: int,
    other_disk: Path,
) -> None:
    operations(moment, full_disk())
    with pytest.raises(NotStoredError, match="No space left on device; the run is stored in ") as raised:
        store(tmp_path / "run", measured)
    assert raised.value.exit_code == 4
    run = raised.value.run
    assert run is not None
    assert run.path.parent == other_disk
    assert run.manifest.valid
    assert same_requests(Run.load(run.path), measured[1])
    assert not (tmp_path / "run").exists()  # nothing that looks like another run is left


@pytest.mark.parametrize("moment", [*BEGINNING, *JOURNAL, *STORING])
def test_13_all_disks_full_from_any_write_on(
    tmp_path: Path,
    measured: tuple[RunContext, EngineResult],
    operations: Arrange,
    moment: int,
    other_disk: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    operations(moment, full_disk(), lasting=True)
    with pytest.raises(RunError, match="No space left on device") as raised:
        store(tmp_path / "run", measured)
    assert raised.value.exit_code == 4
    monkeypatch.undo()
    assert not list(other_disk.iterdir())
    assert not (tmp_path / "run" / MANIFEST).exists()
    assert not list((tmp_path / "run").glob(".*"))  # nothing half-written is left
    if moment in BEGINNING:
        return
    assert rebuild(tmp_path / "run").recorded == REQUESTS, "the tail file, which nothing here makes fail, has the rest"


@pytest.mark.parametrize("moment", JOURNAL)
def test_13_shards_before_a_full_disk_are_whole(
    tmp_path: Path,
    measured: tuple[RunContext, EngineResult],
    operations: Arrange,
    moment: int,
    other_disk: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    operations(moment, full_disk(), lasting=True)
    with pytest.raises(RunError):
        store(tmp_path / "run", measured)
    monkeypatch.undo()
    shards = sorted((tmp_path / "run").glob("requests.part-*"))
    for place, shard in enumerate(shards):
        expected = measured[1].requests.slice(place * (REQUESTS // BATCHES), REQUESTS // BATCHES)
        assert files.read_table(shard)["request_id"].equals(expected["request_id"])
    assert len(shards) == min(max(moment // 2 - 2, 0), BATCHES)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of half a megabyte."""
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(place)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip("mounting a small file system is not allowed here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_13_a_disk_that_is_really_full(small_disk: Path) -> None:
    done = invoke(
        "run",
        "balanced",
        "--source",
        "profile",
        "-n",
        4000,
        "--engine",
        "sim",
        "-p",
        "v1",
        "-q",
        "-o",
        small_disk / "run",
    )
    assert done.exit_code == 4
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.output
    assert "INVALID v1 (seed 0): not stored" in " ".join(done.stdout.split())  # what was measured is shown
    row = next(line for line in done.stdout.splitlines() if line.startswith("v1 INVALID"))
    assert float(row.split()[2].replace(",", "")) > 0
    assert not (small_disk / "run" / MANIFEST).exists()


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory, measured: tuple[RunContext, EngineResult]) -> Path:
    """A complete run."""
    path = tmp_path_factory.mktemp("stored") / "run"
    store(path, measured)
    return path


@pytest.mark.parametrize("name", ["plan", "requests", "steps", "decisions"])
@pytest.mark.parametrize("damage", ["truncated", "garbage", "empty", "flipped", "missing"])
def test_15_a_damaged_table_is_named_and_rejected(tmp_path: Path, stored: Path, name: TableName, damage: str) -> None:
    shutil.copytree(stored, tmp_path / "run")
    path = tmp_path / "run" / f"{name}.parquet"
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "flipped":
        # All pages, since no command reads every column; the footer, whose length is at the end, stays.
        pages_end = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
        flipped = bytes(byte ^ 0xFF for byte in content[40:pages_end])
        path.write_bytes(content[:40] + flipped + content[pages_end:])
    else:
        path.write_bytes(
            {"truncated": content[: len(content) // 2], "garbage": b"PAR1" + os.urandom(500), "empty": b""}[damage]
        )
    for command in (("gate", tmp_path / "run", stored), ("report", tmp_path / "run", "-o", tmp_path / "r.html")):
        done = invoke(*command)
        if damage == "flipped" and (name == "plan" or (name != "requests" and command[0] == "gate")):
            with pytest.raises(DataError, match=rf"{name}\.parquet"):  # these commands read no page of that table
                Run.load(tmp_path / "run").table(name)
            continue
        assert (done.exit_code, done.stderr.count("\n")) == (3, 1), done.output
        assert f"{name}.parquet" in done.stderr


def test_15_a_damaged_shard_is_named_or_left_out_on_request(
    tmp_path: Path, measured: tuple[RunContext, EngineResult]
) -> None:
    context, result = measured
    writer = RunWriter.create(tmp_path / "run")
    begin(writer, context)
    for start in range(0, REQUESTS, 20):
        writer.append("requests", result.requests.slice(start, 20))
    del writer  # a run that is being written is left alone
    (tmp_path / "run" / "requests.part-0001.parquet").write_bytes(b"PAR1 and no more")
    done = invoke("recover", tmp_path / "run")
    assert done.exit_code == 3
    assert "requests.part-0001.parquet: not a readable Parquet file" in done.stderr
    assert "--skip-damaged" in done.stderr
    done = invoke("recover", tmp_path, "--skip-damaged")
    assert done.exit_code == 0
    assert "40 of 60 requests have a record" in done.stdout
    assert "requests.part-0001.parquet: damaged, left out" in done.stdout
    assert (tmp_path / "run" / "requests.part-0001.parquet").exists()  # the damaged files are kept
    assert "without 1 damaged shard" in str(Run.load(tmp_path / "run").manifest.warnings[-1])


def test_recover_of_what_is_not_there(tmp_path: Path) -> None:
    assert invoke("recover", tmp_path / "nothing").exit_code == 3
    with pytest.raises(DataError, match=r"manifest\.partial\.json is missing"):
        rebuild(tmp_path)


def test_a_request_stored_twice_counts_once(tmp_path: Path, measured: tuple[RunContext, EngineResult]) -> None:
    context, result = measured
    writer = RunWriter.create(tmp_path / "run")
    begin(writer, replace(context))
    for start, count in ((0, 20), (10, 20)):
        writer.append("requests", result.requests.slice(start, count))
    done = rebuild(tmp_path / "run")
    assert done.recorded == 30
    assert done.run.manifest.rows["requests"] == REQUESTS


def invoke(*args: object) -> Result:
    """One command, in this process."""
    return CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": "120"})
