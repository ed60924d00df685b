"""What is on disk while a run is measured: shards, the tail, and what becomes of a directory that is taken away."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow as pa
import pytest

from ebbench.analysis.rebuild import rebuild
from ebbench.engines.base import EngineResult
from ebbench.errors import RunError
from ebbench.records import files
from ebbench.records.run import Journal, NotStoredError, Run, RunWriter
from tests.analysis.made_runs import plan_of
from tests.records.test_run_directory import manifest, result, tables

__all__ = ["result"]


def begun(path: Path) -> RunWriter:
    writer = RunWriter.create(path)
    writer.begin(manifest(), plan_of(30).table)
    return writer


def recorded(directory: Path) -> int:
    return rebuild(directory).recorded


def test_every_batch_can_be_rebuilt_as_soon_as_it_came(tmp_path: Path, result: EngineResult) -> None:
    journal = Journal(begun(tmp_path / "run"), "requests", rows=8, interval_s=1e9)
    for start in range(0, 30, 3):
        journal.add(result.requests.slice(start, 3))
        copy = shutil.copytree(tmp_path / "run", tmp_path / f"killed-{start}")  # as a kill at this moment leaves it
        assert recorded(copy) == start + 3


def test_batches_with_a_column_more_can_be_rebuilt_too(tmp_path: Path, result: EngineResult) -> None:
    journal = Journal(begun(tmp_path / "run"), "requests", rows=100, interval_s=1e9)
    for start in range(0, 30, 10):
        batch = result.requests.slice(start, 10)
        if start:  # as of a server that tells of drafts, once one of its answers does
            batch = batch.append_column("drafted_tokens", pa.array([start] * 10, pa.int32()))
        journal.add(batch)
        copy = shutil.copytree(tmp_path / "run", tmp_path / f"killed-{start}")
        assert recorded(copy) == start + 10
    assert Run.load(copy).table("requests", ["drafted_tokens"])["drafted_tokens"].null_count == 10


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_a_tail_that_breaks_off_gives_its_whole_batches(tmp_path: Path, result: EngineResult, share: float) -> None:
    writer = begun(tmp_path / "run")
    journal = Journal(writer, "requests", rows=100, interval_s=1e9)
    journal.add(result.requests.slice(0, 10))
    whole = writer.tail_path("requests").stat().st_size
    journal.add(result.requests.slice(10, 10))
    content = writer.tail_path("requests").read_bytes()
    writer.tail_path("requests").write_bytes(content[: whole + int(share * (len(content) - whole))])
    assert recorded(writer.path) == 10
    assert not list(writer.path.glob("*.arrows"))


def test_any_exception_stores_what_the_journal_holds(tmp_path: Path, result: EngineResult) -> None:
    def fails() -> None:
        with begun(tmp_path / "run") as writer:
            Journal(writer, "requests").add(result.requests.slice(0, 12))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as raised:
        fails()
    assert files.read_footer(tmp_path / "run" / "requests.part-0000.parquet")[1] == 12
    assert f"`ebbench recover {tmp_path / 'run'}`" in raised.value.__notes__[0]
    assert recorded(tmp_path / "run") == 12


def test_a_removed_directory_is_made_again(tmp_path: Path, result: EngineResult) -> None:
    with begun(tmp_path / "deep" / "run") as writer:
        journal = Journal(writer, "requests", rows=1)
        journal.add(result.requests.slice(0, 12))
        shutil.rmtree(tmp_path / "deep")
        journal.add(result.requests.slice(12, 3))
        assert recorded(shutil.copytree(tmp_path / "deep" / "run", tmp_path / "killed")) == 3
        writer.finish(manifest(), tables(result))
    run = Run.load(tmp_path / "deep" / "run")
    assert run.requests.equals(result.requests)
    assert run.manifest.warnings[-1].code == "directory-lost"


@pytest.mark.parametrize("journalled", [True, False])
def test_nothing_is_written_to_a_directory_that_took_the_place(
    tmp_path: Path, result: EngineResult, journalled: bool
) -> None:
    with begun(tmp_path / "run") as writer:
        journal = Journal(writer, "requests", rows=1)
        (tmp_path / "run").rename(tmp_path / "moved")
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "own").touch()
        if journalled:
            journal.add(result.requests.slice(0, 12))
        with pytest.raises(NotStoredError, match=r"was replaced .* stored in .*run-2") as raised:
            writer.finish(manifest(), tables(result))
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["own"]
    assert raised.value.run is not None
    assert Run.load(tmp_path / "run-2").requests.equals(result.requests)


def test_a_file_in_place_of_the_directory_is_left_alone(tmp_path: Path, result: EngineResult) -> None:
    with begun(tmp_path / "run") as writer:
        shutil.rmtree(tmp_path / "run")
        (tmp_path / "run").write_text("mine")
        with pytest.raises(NotStoredError, match="run-2"):
            writer.finish(manifest(), tables(result))
    assert (tmp_path / "run").read_text() == "mine"
    assert Run.load(tmp_path / "run-2").requests.equals(result.requests)


def test_a_directory_too_deep_for_its_files_is_refused_at_once(tmp_path: Path) -> None:
    deep = tmp_path
    while len(str(deep)) < 4096 - 250:
        deep = deep / ("d" * 200)
    deep = deep / ("e" * (4096 - 30 - len(str(deep))))
    with pytest.raises(RunError, match=r"cannot write to output directory .*: File name too long"):
        RunWriter.create(deep)
    assert not deep.exists()


def test_a_schema_that_changes_between_batches_loses_no_row(tmp_path: Path, result: EngineResult) -> None:
    writer = begun(tmp_path / "run")
    journal = Journal(writer, "requests", rows=100, interval_s=1e9)
    journal.add(result.requests.slice(0, 5))
    more = result.requests.slice(5, 5)
    journal.add(more.append_column("logprob", pa.array([0.5] * 5)))
    journal.flush()
    assert recorded(writer.path) == 10
