"""Writes Parquet files atomically, so that a crash leaves only complete files, and reads them with clear errors."""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from ebbench.errors import DataError, InputFileError, RunError, UsageError
from ebbench.foreign.documents import open_parquet, open_regular, parquet_errors, read_bytes, read_json

# A directory of results belongs to one command at a time.

LOCK = ".lock"


@contextmanager
def sole_use(directory: Path) -> Iterator[None]:
    """Inside, no other process can enter ``directory``, which is made if it does not exist.

    The kernel releases the lock when this process ends; if it is killed, the file stays and means nothing. Raises
    UsageError if another process holds the directory, RunError if a lock cannot be made there.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = _locked(directory)
    except OSError as error:
        raise RunError(f"cannot lock {error.filename or directory}: {error.strerror or error}") from error
    try:
        with suppress(OSError):  # a full disk; the name is only for the message
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {platform.node()}".encode(), 0)
        yield
    finally:
        with suppress(OSError):  # the directory may be gone
            (directory / LOCK).unlink()
        os.close(descriptor)


def _locked(directory: Path) -> int:
    """An open descriptor of the lock file, locked."""
    path = directory / LOCK
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _lock(descriptor, directory)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), path.stat()):
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its holder removed it between the two calls


def _lock(descriptor: int, directory: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        holder = os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"
        raise UsageError(
            f"{directory} is in use by {holder}; wait until it ends, or give another output directory"
        ) from None


_NAMED = 3
_NAME_LETTERS = 50  # of a file's name in that of its temporary file: four bytes each in UTF-8, and at most 255 bytes
ROW_GROUP_ROWS = 1 << 15
"""A row group is encoded in memory as a whole; rows of steps and requests hold lists of hundreds of values."""
# Columns with few distinct values. The others are stored without dictionary, which is faster to write.
_DICTIONARY = frozenset(
    {
        "request_id", "phase", "status", "finish_reason", "mode", "kind", "reason", "error_class", "http_status",
        "request_ids.list.element", "request_tokens.list.element", "preempted_ids.list.element",
        "itl_ns.list.element",
    }
)  # fmt: skip


def some_columns(names: Sequence[str]) -> str:
    """``the columns a, b, c and 4 more``: a short description of a table for error messages."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"the columns {', '.join(names[:_NAMED])}{more}"


class TableParts(Protocol):
    """A table in parts of one schema, at least one, which need not be in memory at the same time."""

    @property
    def num_rows(self) -> int:
        """Rows of all parts."""
        ...

    def __iter__(self) -> Iterator[pa.Table]:
        """The parts in their order."""
        ...


def write_table(table: pa.Table, path: Path) -> None:
    """Write a Parquet file through a temporary file, fsync and rename. Raises RunError (disk full, ...)."""
    write_parts((table,), path)


def write_parts(parts: Iterable[pa.Table], path: Path) -> None:
    """As :func:`write_table`, for a table in parts; the file is the same."""
    _replace(path, lambda temporary: _write(iter(parts), temporary))


def write_bytes(content: bytes, path: Path) -> None:
    """Write a file through a temporary file, fsync and rename. Raises RunError."""
    _replace(path, lambda temporary: temporary.write_bytes(content) and None)


def write_text(text: str, path: Path) -> None:
    """As :func:`write_bytes`, for text in UTF-8; creates the directory if it does not exist."""
    write_with(path, lambda temporary: temporary.write_bytes(text.encode()) and None)


def user_cache() -> Path:
    """The directory of what can be made again: in XDG_CACHE_HOME, else in the home; for a user without one, among the
    temporary files."""
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # no HOME, and a user id without a name, as in some containers
        base = Path(tempfile.gettempdir()) / f"cache-{os.getuid()}"
    return base / "ebbench"


def append_to_summary(text: str, path: Path | None) -> None:
    """Append text to ``path``, else to the job's summary of GitHub, if there is one. Raises RunError."""
    github = os.environ.get("GITHUB_STEP_SUMMARY")
    target = path or (Path(github) if github else None)
    if target is None:
        return
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise RunError(f"could not write {target}: {error.strerror or error}") from error


def write_with(path: Path, write: Callable[[Path], object]) -> None:
    """Replace ``path`` by the file that ``write`` writes to the path that it is given, whole or not at all.

    The directory is made if it does not exist. Raises RunError.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"could not write {path}: {error.strerror or error}") from error
    _replace(path, write)


def merge_tables(shards: Sequence[Path], path: Path) -> None:
    """Concatenate shards of one schema into ``path``, then remove them. A single shard is renamed."""
    if len(shards) == 1:
        shards[0].replace(path)
        sync_directory(path.parent)
        return
    write_parts(_row_groups(shards), path)
    for shard in shards:
        shard.unlink()


def read_table(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Read a Parquet file. Raises DataError naming the file if it is missing, truncated or not Parquet."""
    with stored(path), open_stored_parquet(path) as file, parquet_errors(path):
        return file.read(columns=list(columns) if columns is not None else None)


def read_stream(path: Path) -> pa.Table | None:
    """The complete batches of a file in Arrow's stream format, which may break off anywhere. None if there is none."""
    batches: list[pa.RecordBatch] = []
    try:
        with pa.OSFile(str(path)) as source, pa.ipc.open_stream(source) as stream:
            while True:
                batches.append(stream.read_next_batch())
    except (pa.ArrowException, OSError, StopIteration):
        pass
    return pa.Table.from_batches(batches) if batches else None


def read_footer(path: Path) -> tuple[pa.Schema, int]:
    """Schema and number of rows of a Parquet file. Raises DataError like :func:`read_table`."""
    with stored(path), open_stored_parquet(path) as file:
        return file.schema_arrow, int(file.metadata.num_rows)


def read_stored(path: Path) -> bytes:
    """The content of a stored file that is no table. Raises DataError."""
    with stored(path):
        return read_bytes(path)


def read_stored_json(path: Path) -> Any:
    """The value of a stored JSON file. Raises DataError."""
    with stored(path):
        return read_json(path)


@contextmanager
def stored(path: Path) -> Iterator[None]:
    """Inside, errors in a stored file's content are raised as DataError."""
    try:
        yield
    except InputFileError as error:
        if not path.exists():
            raise DataError(f"{path}: missing; the run directory is incomplete") from None
        raise DataError(str(error)) from None


def open_stored_parquet(path: Path) -> pq.ParquetFile:
    """A Parquet file that Arrow reads itself, which is faster than through Python. Raises InputFileError."""
    with open_regular(path):
        return open_parquet(path, path)


def sync_directory(directory: Path) -> None:
    """Make renames in ``directory`` durable, if the file system supports fsync of directories."""
    with suppress(OSError):
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file beside ``path`` and rename it. A link keeps what it points to; a device gets the content."""
    try:
        # What a file must not replace: a device, a pipe, an open descriptor.
        own = path.absolute().as_posix().startswith(("/proc/", "/dev/fd/", "/dev/std"))
        if path.exists() and not path.is_dir() and (own or not path.is_file()):
            with tempfile.TemporaryDirectory() as folder, path.open("wb") as target:
                written = Path(folder) / "written"
                write(written)
                with written.open("rb") as source:
                    shutil.copyfileobj(source, target)
            return
        final = Path(os.path.realpath(path)) if path.is_symlink() else path
        temporary = final.with_name(f".{final.name[:_NAME_LETTERS]}.{os.getpid()}.tmp")
        try:
            write(temporary)
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            temporary.replace(final)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
    except OSError as error:
        raise RunError(f"could not write {path}: {error.strerror or error}") from error
    sync_directory(final.parent)


def _writer(schema: pa.Schema, path: Path) -> pq.ParquetWriter:
    leaves = [
        name
        for field in schema
        for name in ([f"{field.name}.list.element"] if pa.types.is_list(field.type) else [field.name])
    ]
    return pq.ParquetWriter(
        path,
        schema,
        compression="zstd",
        compression_level=1,
        use_dictionary=[name for name in leaves if name in _DICTIONARY],
        write_statistics=[name for name in leaves if "." not in name],
        write_page_checksum=True,
    )


def _write(parts: Iterator[pa.Table], path: Path) -> None:
    """Parts are collected until they fill a row group, so that groups are as large as those of a table."""
    buffered = next(parts)
    with _writer(buffered.schema, path) as writer:
        for part in chain(parts, (None,)):
            while len(buffered) >= ROW_GROUP_ROWS or (part is None and len(buffered)):
                writer.write_table(buffered.slice(0, ROW_GROUP_ROWS), row_group_size=ROW_GROUP_ROWS)
                buffered = buffered.slice(ROW_GROUP_ROWS)
            buffered = buffered if part is None else pa.concat_tables([buffered, part])


def _row_groups(shards: Sequence[Path]) -> Iterator[pa.Table]:
    yield read_footer(shards[0])[0].empty_table()
    for shard in shards:
        with pq.ParquetFile(shard) as file:
            for index in range(file.num_row_groups):
                yield file.read_row_group(index)
