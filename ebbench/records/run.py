"""The run directory: manifest.json, plan.parquet, requests.parquet, steps.parquet, decisions.parquet, summary.parquet,
server_metrics.parquet if a server's metrics were read, classes.parquet if requests have classes, and sessions.parquet
if a session has several requests.

Tables are appended as shards during a run and joined at its end. The manifest is written last, so that a directory with
a manifest is complete.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal

import msgspec
import pyarrow as pa

from ebbench.errors import DataError, RunError, UsageError
from ebbench.records import files
from ebbench.records.manifest import Manifest, decode_manifest, encode_manifest
from ebbench.records.schema import DECISIONS, PLAN, REQUESTS, STEPS
from ebbench.records.warnings import warning

MANIFEST = "manifest.json"
PARTIAL = "manifest.partial.json"
"""Preliminary manifest: what was known when the run began. It exists during a run and after an interrupted one."""
SEARCH = "capacity.json"
"""Settings of a capacity search: the runs below its directory are its probes."""
VALIDATION = "question.json"
"""What a validation asks: its directory has a manifest of its own, and its runs are below."""
TAIL = ".tail.arrows"
"""How the names of files end that hold the rows which are in no shard yet."""
LONGEST_NAME = 60
"""Letters in the longest name of a file in a run directory, while it is written."""
_NAME_LETTERS = 60
TableName = Literal["plan", "requests", "steps", "decisions", "server_metrics", "summary", "classes", "sessions"]
SCHEMAS: Mapping[str, pa.Schema] = {
    "plan": PLAN,
    "requests": REQUESTS,
    "steps": STEPS,
    "decisions": DECISIONS,
}


@dataclass(frozen=True)
class Run:
    """A finished run. Tables are read on demand; ``tables`` holds those in memory."""

    path: Path
    manifest: Manifest
    tables: Mapping[str, pa.Table] = field(default_factory=dict, repr=False)

    @classmethod
    def load(cls, path: Path | str) -> Run:
        """Open a run directory and check that every table exists, is readable and complete.

        Raises DataError naming the faulty file.
        """
        directory = Path(path)
        manifest = read_manifest(directory)
        for name in dict.fromkeys([*SCHEMAS, *manifest.rows]):
            _check_table(directory / f"{name}.parquet", SCHEMAS.get(name), manifest.rows.get(name))
        return cls(directory, manifest)

    def table(self, name: TableName, columns: Sequence[str] | None = None) -> pa.Table:
        """A table, or some of its columns. Raises DataError if the file is damaged."""
        in_memory = self.tables.get(name)
        if in_memory is not None:
            return in_memory if columns is None else in_memory.select(list(columns))
        path = self.path / f"{name}.parquet"
        table = files.read_table(path, columns)
        schema = SCHEMAS.get(name)
        for column in schema or ():
            if not column.nullable and column.name in table.column_names and table[column.name].null_count:
                raise DataError(f"{path}: column {column.name} has rows without a value; rewritten?")
        return table

    def column_names(self, name: TableName) -> Sequence[str]:
        """The columns that a table has; some exist only where a run uses them. Raises DataError if it is damaged."""
        in_memory = self.tables.get(name)
        stored = files.read_footer(self.path / f"{name}.parquet")[0] if in_memory is None else in_memory.schema
        return list(stored.names)

    @property
    def requests(self) -> pa.Table:
        """One row per planned request."""
        return self.table("requests")

    @property
    def steps(self) -> pa.Table:
        """One row per engine step."""
        return self.table("steps")

    @property
    def decisions(self) -> pa.Table:
        """One row per recorded scheduler decision."""
        return self.table("decisions")

    @property
    def plan(self) -> pa.Table:
        """One row per planned request."""
        return self.table("plan")


class NotStoredError(RunError):
    """A run was measured but is not where it should be.

    ``run``: the run stored elsewhere, or held in memory and marked INVALID.
    """

    def __init__(self, message: str, run: Run | None = None) -> None:
        super().__init__(message)
        self.run = run

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self),)  # a run in memory is not sent from a worker process to its parent


class RunWriter:
    """Writes one run directory.

    Use as a context manager. If it is left without ``finish``, a directory with measurements is kept and any other one
    removed; the functions in ``at_exit``, which may raise RunError, are called before. If the directory is removed or
    replaced meanwhile, a new one is made and ``path`` changes: nothing is written to a directory that is not ours.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.at_exit: list[Callable[[], None]] = []
        self._asked, self._remade = path, False
        self._own: _Held | None = None
        self._begun: tuple[Manifest, pa.Table] | None = None
        self._shards: dict[str, list[Path]] = {}
        self._rows: dict[str, int] = {}
        self._finished = False

    @classmethod
    def create(cls, path: Path | str) -> RunWriter:
        """Create the directory. Raises UsageError if it exists, RunError if it or a file in it cannot be created."""
        writer = cls(Path(path))
        writer._own = _new_directory(writer.path)
        return writer

    def tail_path(self, name: TableName) -> Path:
        """The file of rows that are in no shard yet."""
        return self.path / f"{name}{TAIL}"

    def append(self, name: TableName, table: pa.Table) -> Path:
        """Store rows as the next shard of a table. Raises RunError if that fails."""
        self._stay()
        return self._append(name, table)

    def _append(self, name: TableName, table: pa.Table) -> Path:
        shards = self._shards.setdefault(name, [])
        path = self.path / f"{name}.part-{len(shards):04d}.parquet"
        files.write_table(_conform(table, name), path)
        shards.append(path)
        self._rows[name] = self._rows.get(name, 0) + table.num_rows
        return path

    def begin(self, manifest: Manifest, plan: pa.Table) -> None:
        """Store the plan and the preliminary manifest, from which an interrupted run can be rebuilt."""
        self._begun = manifest, plan
        self._append("plan", plan)
        files.write_bytes(encode_manifest(manifest), self.path / PARTIAL)

    def finish(self, manifest: Manifest, tables: Mapping[str, pa.Table | files.TableParts] | None = None) -> Run:
        """Store ``tables`` in place of their shards, join the other shards and write the manifest last.

        A table in parts is written part by part.

        Returns the finished run. Raises RunError, or NotStoredError with the run if it had to be stored elsewhere.
        """
        whole = dict(tables or {})
        try:
            self._stay()
            if self._remade:
                manifest = msgspec.structs.replace(manifest, warnings=(*manifest.warnings, warning("directory-lost")))
            run = self._finish(manifest, whole)
        except RunError as error:
            if self._begun is None or whole.keys() < SCHEMAS.keys():
                raise
            # In the directory of temporary files: a real server was measured, perhaps for hours.
            place = Path(tempfile.mkdtemp(prefix=f"ebbench-{self.path.name[:_NAME_LETTERS]}-"))
            try:
                kept = RunWriter(place)._finish(manifest, whole)
            except RunError:
                shutil.rmtree(place, ignore_errors=True)
                raise error from None
            self._finished = True
            if self._own is None or self._own.is_at(self.path):
                self._remove_traces([*whole, *self._shards])
                for name in whole:
                    with suppress(OSError):
                        (self.path / f"{name}.parquet").unlink(missing_ok=True)
                self._remove_empty()
            raise NotStoredError(f"{error}; the run is stored in {kept.path}", kept) from error
        if self.path != self._asked:
            raise NotStoredError(f"{self._asked} was replaced during the run, which is stored in {self.path}", run)
        return run

    def _finish(self, manifest: Manifest, whole: dict[str, pa.Table | files.TableParts]) -> Run:
        for name, schema in SCHEMAS.items():
            if name not in self._shards:
                whole.setdefault(name, schema.empty_table())
        for name, table in whole.items():
            path = self.path / f"{name}.parquet"
            if isinstance(table, pa.Table):
                files.write_table(_conform(table, name), path)
            else:
                files.write_parts((_conform(part, name) for part in table), path)
            self._rows[name] = table.num_rows
        for name, shards in self._shards.items():
            if name not in whole:
                files.merge_tables(shards, self.path / f"{name}.parquet")
        complete = msgspec.structs.replace(manifest, rows=dict(self._rows))
        files.write_bytes(encode_manifest(complete), self.path / MANIFEST)
        self._finished = True
        self._remove_traces(whole)
        # Steps name every request of every step; where there are some, the columns that are needed are read again.
        held = {name: table for name, table in whole.items() if name != "steps" or not table.num_rows}
        return Run(self.path, complete, held)

    def _stay(self) -> None:
        """Make sure that the directory is the one that was created; else make another, beside what is there now.

        Raises RunError.
        """
        if self._own is None or self._own.is_at(self.path):
            return
        self.path = unused(self._asked)
        self._own, self._remade = _new_directory(self.path), True
        self._shards, self._rows = {}, {}
        if self._begun is not None:
            self.begin(*self._begun)

    def _remove_traces(self, replaced: Iterable[str]) -> None:
        """Remove the files that only an interrupted run needs.

        A remaining one is harmless: the manifest marks the run complete.
        """
        with suppress(OSError):
            for shard in (shard for name in replaced for shard in self._shards.get(name, ())):
                shard.unlink(missing_ok=True)
            for path in (self.path / PARTIAL, *self.path.glob(f"*{TAIL}")):
                path.unlink(missing_ok=True)

    def _remove_empty(self) -> None:
        with suppress(OSError):  # not empty, or gone
            self.path.rmdir()

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._own is not None:
            self._own.release()
        if self._finished:
            return
        for flush in self.at_exit:
            with suppress(RunError):
                flush()
        if any(self._rows.get(name) for name in ("requests", "steps", "decisions")):
            if error is not None and self._begun is not None:
                error.add_note(f"what was measured is kept: `ebbench recover {self.path}` rebuilds the run")
            return
        self._remove_traces(["plan"])
        self._remove_empty()


class _Held:
    """A directory that is kept open, so that no other one gets its identity when it is removed.

    Locked meanwhile: :func:`is_being_written`.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        weakref.finalize(self, os.close, self._descriptor)

    def release(self) -> None:
        """Say that the run is finished."""
        with suppress(OSError):
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def is_at(self, path: Path) -> bool:
        """Whether ``path`` is still the locked directory: it may have been moved or replaced."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), path.stat())
        except OSError:
            return False


def is_being_written(path: Path) -> bool:
    """Whether a process writes a run, or a series of runs, into a directory now, or holds a lock file."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(descriptor)
    return False


def _new_directory(path: Path) -> _Held:
    """Create a directory in which files of a run can be made.

    Raises UsageError if it exists, RunError if it cannot be created or used.
    """
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        raise UsageError(f"output directory {path} exists; give another --output-dir or remove it") from None
    except OSError as error:
        raise RunError(f"cannot make output directory {path}: {error.strerror or error}") from error
    longest = path.absolute() / ("x" * LONGEST_NAME)
    try:
        longest.touch()
        longest.unlink()
        return _Held(path)
    except OSError as error:
        with suppress(OSError):
            path.rmdir()
        raise RunError(f"cannot write to output directory {path}: {error.strerror or error}") from error


@contextmanager
def new_directory(path: Path) -> Iterator[None]:
    """Inside, ``path`` is a directory for several runs that this command alone has made; removed if it stays empty.

    Raises UsageError if it exists, RunError if it cannot be created or used.
    """
    lock = _new_directory(path)
    try:
        yield
    finally:
        del lock
        with suppress(OSError):  # not empty, or gone
            path.rmdir()


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Run directories among ``paths``, in name order; a directory stands for all run directories below it.

    Probes of a capacity search belong to it: they are among the runs only where its directory itself, or one in it, is
    given. A path without a run is returned unchanged, so that the caller reports it. A run that is given twice, beside
    the directory above it, is returned once.
    """
    directories: list[Path] = []
    for path in paths:
        manifests = {
            *path.glob(f"*/{MANIFEST}"),
            *path.glob(f"**/{MANIFEST}"),
        }  # the first pattern follows symbolic links
        manifests = {manifest for manifest in manifests if not manifest.with_name(VALIDATION).exists()}
        searches = {settings.parent for settings in (*path.glob(f"*/{SEARCH}"), *path.glob(f"**/{SEARCH}"))} - {path}
        inside = sorted(manifest.parent for manifest in manifests if not searches.intersection(manifest.parents))
        of_run = (path / MANIFEST).exists() and not (path / VALIDATION).exists()
        directories += [path] if of_run or not manifests else inside
    return each_once(directories)


def each_once(paths: Iterable[Path]) -> list[Path]:
    """The paths without those that name a directory again."""
    by_place: dict[Path, Path] = {}
    for path in paths:
        by_place.setdefault(path.resolve(), path)
    return list(by_place.values())


def require_directory(path: Path) -> None:
    """Raise DataError, saying why, for what is no directory and hence no run."""
    if path.is_file():
        raise DataError(f"{path} is a file; give the directory of the run")
    if not path.is_dir():
        raise DataError(f"{path}: no such run directory")


def slug(text: str) -> str:
    """A short name that is safe as a path component: only letters, digits, ``.``, ``_`` and ``-``, no leading dot."""
    clean = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")
    return re.sub(r"\.{2,}", ".", clean)[:80].rstrip("-._") or "run"


def default_run_dir(workload: str, policy: str, *, root: Path = Path("runs"), now: datetime | None = None) -> Path:
    """``runs/<UTC timestamp>-<workload>-<policy>``, with a number appended if that exists."""
    stamp = (now or datetime.now(UTC)).strftime("%Y%m%dT%H%M%SZ")
    source, _, rest = workload.partition(":")
    short = f"{source}-{Path(rest).stem}" if rest else workload
    return unused(root / f"{stamp}-{slug(short)}-{slug(policy)}")


def unused(path: Path) -> Path:
    """``path``, or the first of ``path-2``, ``path-3``, ... that does not exist."""
    candidate, number = path, 1
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate


def _conform(table: pa.Table, name: str) -> pa.Table:
    """The table cast to its schema with extra columns kept.

    Raises RunError if a column is missing or has another type.
    """
    schema = SCHEMAS.get(name)
    if schema is None or table.schema.equals(schema):
        return table
    missing = [column.name for column in schema if column.name not in table.column_names]
    if missing:
        raise RunError(f"{name} table lacks {', '.join(missing)}; this is a bug in the engine")
    extra = [table.schema.field(column) for column in table.column_names if column not in schema.names]
    target = pa.schema([*schema, *extra])
    try:
        return table.select(target.names).cast(target)
    except (pa.ArrowException, ValueError) as error:
        raise RunError(f"{name} table does not fit its schema: {error}") from error


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a run directory. Raises DataError if there is none, or it is damaged."""
    path = directory / MANIFEST
    require_directory(directory)
    if not path.exists():
        kept = any(directory.glob("*.part-*.parquet"))
        remedy = (
            "the run did not finish; `ebbench recover` rebuilds it from its shards" if kept else "not a run directory"
        )
        raise DataError(f"{path}: missing; {remedy}")
    return decode_manifest(files.read_stored(path), path)


def _check_table(path: Path, schema: pa.Schema | None, rows: int | None) -> None:
    fields, count = files.read_footer(path)
    lacking = [column.name for column in schema or () if column.name not in fields.names]
    if lacking:
        raise DataError(f"{path}: lacks {files.some_columns(lacking)}; not written by ebbench?")
    for column in schema or ():
        stored = fields.field(column.name).type
        if _kind(stored) != _kind(column.type):
            raise DataError(f"{path}: column {column.name} is {stored} where ebbench stores {column.type}; rewritten?")
    if rows is not None and rows != count:
        raise DataError(f"{path}: {count} rows where the manifest says {rows}; the file was replaced or damaged")


def _kind(stored: pa.DataType) -> str:
    """The kind of a column's values, ignoring their width, which differs between tools."""
    if pa.types.is_list(stored) or pa.types.is_large_list(stored):
        return f"list of {_kind(stored.value_type)}"
    if pa.types.is_integer(stored):
        return "integer"
    if pa.types.is_floating(stored):
        return "float"
    return "string" if pa.types.is_large_string(stored) else str(stored)


# Stores measurements during a run: in shards large enough not to slow it down, and until then in a tail file.
#
# A batch is in the tail file, and so with the operating system, as soon as it comes. It is lost only if the machine
# stops, not if the program is killed.

ROWS, INTERVAL_S = 5_000, 5.0


class Journal:
    """Collects batches of one table and writes a shard after enough rows or enough time.

    A shard that cannot be stored (disk full) does not end the run: its rows are kept for the next attempt,
    ``interval_s`` later. The writer stores what is left if it ends without a finished run; else the engine's
    complete table replaces everything.
    """

    def __init__(self, writer: RunWriter, name: TableName, *, rows: int = ROWS, interval_s: float = INTERVAL_S) -> None:
        self._writer, self._name = writer, name
        self._rows, self._interval_s = rows, interval_s
        self._held: list[pa.Table] = []
        self._waiting = 0
        self._tried_s, self._failed = time.monotonic(), False
        self._tail = _Tail()
        writer.at_exit.append(self.flush)

    def add(self, batch: pa.Table) -> None:
        """Add a batch."""
        if not batch.num_rows:
            return
        if self._held and batch.schema != self._held[-1].schema:  # which the file of the tail cannot follow
            with suppress(RunError):
                self.flush()
        self._held.append(batch)
        self._waiting += batch.num_rows
        many = self._waiting >= self._rows and not self._failed
        if many or time.monotonic() - self._tried_s >= self._interval_s:
            self._tried_s, self._failed = time.monotonic(), True
            with suppress(RunError):
                self.flush()
        if self._held:
            self._tail.append(batch, self._writer.tail_path(self._name))

    def flush(self) -> None:
        """Write the collected rows as a shard. Raises RunError, which keeps them."""
        if self._held:
            self._writer.append(self._name, pa.concat_tables(self._held, promote_options="default"))
            self._held.clear()
            self._waiting = 0
        self._tail.clear()
        self._tried_s, self._failed = time.monotonic(), False


class _Tail:
    """A file in Arrow's stream format to which batches are appended. It helps recovery only, so errors end it."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._stream: pa.ipc.RecordBatchStreamWriter | None = None

    def append(self, batch: pa.Table, path: Path) -> None:
        try:
            if self._file is None or self._stream is None:
                self._file = path.open("wb")
                self._stream = pa.ipc.new_stream(self._file, batch.schema)
            self._stream.write_table(batch)
            self._file.flush()
        except (OSError, pa.ArrowException):
            self.clear()

    def clear(self) -> None:
        if self._file is None:
            return
        file, self._file, self._stream = self._file, None, None
        with suppress(OSError):
            file.close()
        with suppress(OSError):
            Path(file.name).unlink()
