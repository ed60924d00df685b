"""Stored tables: their schemas, written atomically so that a crash leaves only complete files, read with clear errors.

Times are int64 ns from the start of the run.
"""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ebbench.errors import DataError, InputFileError, RunError, UsageError
from ebbench.foreign.documents import open_parquet, open_regular, parquet_errors, read_bytes, read_json
from ebbench.process.interpreter import skip_pandas

skip_pandas()
EARLIER_TURN_FAILED = "earlier_turn_failed"
"""``error_class`` of a turn that was not sent because an earlier turn of its session failed."""
ABANDONED = "abandoned"
"""``status`` of a request whose client hung up before the answer was complete."""
EARLIER_TURN_ABANDONED = "earlier_turn_abandoned"
"""``error_class`` of a turn that was not sent because the client hung up during an earlier turn of its session."""

PLAN = pa.schema(
    [
        pa.field("request_id", pa.string(), nullable=False),
        # Requests of a session run one after the other: turn t+1 is sent when turn t has ended.
        pa.field("session", pa.int64(), nullable=False),
        pa.field("turn", pa.int32(), nullable=False),
        pa.field("phase", pa.string(), nullable=False),
        # Open loop: intended start of the session's first turn. Null in closed loop and for turn > 0.
        pa.field("arrival_ns", pa.int64()),
        pa.field("input_tokens", pa.int32(), nullable=False),
        pa.field("output_tokens", pa.int32(), nullable=False),
        # Content identity: token p of the prompt is token p of stream `content`, and the output continues that stream.
        # Turns of a session have the same `content`, so that they share their history as a prefix.
        pa.field("content", pa.int64(), nullable=False),
        # Prefix identity: hash_ids[j] identifies tokens [b j, b (j+1)) and all tokens before. The column's metadata
        # `block_tokens` is b; 512, as in Mooncake's traces, without it.
        pa.field("hash_ids", pa.list_(pa.int64())),
        # Real text if the source has it; null for synthetic lengths.
        pa.field("prompt", pa.string()),
    ]
)

# Columns that a plan has only if a request uses them; a plan without them has the bytes and the hash it always had.
PLAN_EXTRAS = pa.schema(
    [
        # Pause (ns) between the end of the requests that this one waits for and its own intended start: the user's
        # think time, or the time of a tool call. Null: none.
        pa.field("pause_ns", pa.int64()),
        # Turns of the same session, all of them lower, whose ends this request waits for. Null: the turn before. Empty:
        # it starts with the session. Two requests that wait for the same turn run at the same time (sub-agents); one
        # that waits for both of them joins them.
        pa.field("after", pa.list_(pa.int32())),
        # The client hangs up so long (ns) after it sent the request, unless the answer is complete. Null: never.
        pa.field("hang_up_ns", pa.int64()),
        # How many of the output tokens, from the first one on, are thinking; the others are the answer. Null: none.
        pa.field("thinking_tokens", pa.int32()),
        # LoRA adapter as the server names it; null: the model itself.
        pa.field("lora", pa.string()),
        # Images at the beginning of the prompt: their prompt tokens, which `input_tokens` includes, and the height and
        # width of each in pixels.
        pa.field("image_tokens", pa.list_(pa.int32())),
        pa.field("image_side", pa.int32()),
    ]
)

REQUESTS = pa.schema(
    [
        pa.field("request_id", pa.string(), nullable=False),
        pa.field("session", pa.int64()),
        pa.field("turn", pa.int32()),
        pa.field("phase", pa.string()),
        pa.field("input_tokens", pa.int32()),
        pa.field("output_tokens_planned", pa.int32()),
        pa.field("output_tokens", pa.int32()),
        pa.field("cached_tokens", pa.int32()),
        # ok | failed | timed_out | cancelled | abandoned | never_sent
        pa.field("status", pa.string(), nullable=False),
        pa.field("finish_reason", pa.string()),
        pa.field("intended_ns", pa.int64()),
        pa.field("sent_ns", pa.int64()),
        pa.field("scheduled_ns", pa.int64()),  # first time the engine scheduled tokens of it; simulated engines only
        pa.field("first_byte_ns", pa.int64()),
        pa.field("first_token_ns", pa.int64()),
        pa.field("last_token_ns", pa.int64()),
        pa.field("end_ns", pa.int64()),
        pa.field("itl_ns", pa.list_(pa.int64())),
        # Not every output token has a time of its own: several came in one message or one read, or thinking was counted
        # and not sent. Tokens that came together have gaps of (nearly) zero in itl_ns; unsent ones have no gap.
        pa.field("bundled_tokens", pa.bool_()),
        pa.field("preemptions", pa.int32()),
        pa.field("error_class", pa.string()),
        pa.field("error_body", pa.string()),
        pa.field("http_status", pa.int32()),
        pa.field("worker", pa.int32()),
    ]
)

# Columns that a requests table has only where they apply. The first two: where answers may have a thinking part, so in
# simulated runs whose plan says so, and in runs against the chat endpoint.
REQUESTS_EXTRAS = pa.schema(
    [
        # Thinking tokens of the output; null where the server marked none. The server's `usage` decides, else messages.
        pa.field("thinking_tokens", pa.int32()),
        # First token of the answer after the thinking. Null without thinking, and where the output ended in it.
        pa.field("first_answer_ns", pa.int64()),
        # When a prefill instance had computed the prompt; in simulated runs with separate prefill and decode pools
        # where clients may hang up.
        pa.field("prefilled_ns", pa.int64()),
    ]
)

# Latencies of each request by the definitions of docs/metrics.md, null where undefined. Added to REQUESTS when a run is
# concluded; runs stored before 27 November 2026 lack them.
REQUEST_LATENCIES = pa.schema(
    [
        pa.field("ttft_ms", pa.float64()),
        pa.field("tpot_ms", pa.float64()),
        pa.field("e2el_ms", pa.float64()),
        # Whether it completed within every limit of the run (`slo` in the manifest); null in a run without limits.
        pa.field("in_limits", pa.bool_()),
    ]
)

STEPS = pa.schema(
    [
        pa.field("step_id", pa.int64(), nullable=False),
        pa.field("instance", pa.int32(), nullable=False),
        pa.field("scheduled_ns", pa.int64(), nullable=False),
        pa.field("start_ns", pa.int64(), nullable=False),
        pa.field("end_ns", pa.int64(), nullable=False),
        pa.field("phase", pa.string(), nullable=False),  # prefill | decode | mixed
        pa.field("mode", pa.string(), nullable=False),  # eb | mb
        pa.field("prefill_tokens", pa.int32(), nullable=False),
        pa.field("decode_seqs", pa.int32(), nullable=False),
        pa.field("request_ids", pa.list_(pa.string()), nullable=False),  # in the order they were scheduled
        pa.field("request_tokens", pa.list_(pa.int32()), nullable=False),
        pa.field("kv_blocks_used", pa.int32(), nullable=False),
        pa.field("kv_blocks_total", pa.int32(), nullable=False),
        pa.field("waiting", pa.int32(), nullable=False),
        pa.field("running", pa.int32(), nullable=False),
        pa.field("preemptions", pa.int32(), nullable=False),  # in this step
        pa.field("preempted_ids", pa.list_(pa.string()), nullable=False),  # in plan order
        pa.field("k", pa.int32()),  # idle slots required for a refill, as if N sequences were active
        pa.field("n_limit", pa.int32()),  # memory-safe batch size in force
    ]
)

# One row per phase switch, mode evaluation and parameter update, with every intermediate value.
DECISIONS = pa.schema(
    [
        pa.field("time_ns", pa.int64(), nullable=False),
        pa.field("step_id", pa.int64(), nullable=False),
        pa.field("instance", pa.int32(), nullable=False),
        pa.field("kind", pa.string(), nullable=False),  # phase | update | mode
        pa.field("reason", pa.string(), nullable=False),  # a code; a sentence in runs of schema version 1
        pa.field("mode", pa.string(), nullable=False),
        pa.field("phase", pa.string(), nullable=False),
    ]
    + [pa.field(name, pa.int32()) for name in ("decoding", "prefilling", "waiting", "idle", "k", "n_limit")]
    + [
        pa.field(name, pa.float64())
        for name in (
            "theta", "theta0", "delta_theta", "zeta", "p0", "eta", "mu_l", "mu_o", "n_obs", "r",
            "beta_mb", "beta_eb", "lhs", "rhs", "margin", "kv_free_share", "kv_gate", "samples",
            "overhead_exclusive_s", "overhead_mixed_s",
        )
    ]
)  # fmt: skip

# Columns that a decisions table has only where they apply: every how many passes ranks in lockstep refill.
DECISIONS_EXTRAS = pa.schema([pa.field("period_passes", pa.int32())])


def decisions_table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """DECISIONS, one row per mapping, with those of DECISIONS_EXTRAS that a row has."""
    extras = [column for column in DECISIONS_EXTRAS if any(column.name in row for row in rows)]
    return pa.Table.from_pylist(rows, schema=pa.schema([*DECISIONS, *extras]))


# Samples of a server's metrics page, one row per change; only if a server was read.
SERVER_METRICS = pa.schema(
    [
        pa.field("time_ns", pa.int64(), nullable=False),
        pa.field("name", pa.string(), nullable=False),
        pa.field("labels", pa.string(), nullable=False),  # a JSON object with sorted keys
        pa.field("value", pa.float64(), nullable=False),
    ]
)


# Which output tokens have a time of their own.
#
# A message of a stream may carry several tokens, a proxy may deliver several messages at once, and a server may count
# thinking that it does not send. The tokens that come at the time of the first one tell nothing of the speed of
# generation: the time per output token is that of the tokens after them.

SAME_TIME_NS = 200_000
"""Tokens that follow each other faster were delivered together: no server decodes 5,000 tokens/s for one user."""

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


def tokens_after_first(output_tokens: Ints, bundled: Bools, gap_counts: Ints, gaps_ns: Ints) -> Ints:
    """Per request the output tokens that came later than the first one; 0 where all came at one time.

    ``bundled``: requests in which not every token has a time of its own. ``gaps_ns`` concatenates the gaps between the
    tokens of all requests (ns), ``gap_counts`` of each.
    """
    after = output_tokens - 1
    if bundled.any():
        stops = np.cumsum(gap_counts)
        starts = (stops - gap_counts)[bundled]
        apart = np.append(np.flatnonzero(gaps_ns >= SAME_TIME_NS), len(gaps_ns))
        first_apart = apart[np.searchsorted(apart, starts)]
        after[bundled] = stops[bundled] - np.minimum(first_apart, stops[bundled])
    return np.maximum(after, 0)


def tokens_after_first_of(requests: pa.Table) -> Ints:
    """:func:`tokens_after_first` of a table in the REQUESTS schema."""
    gaps = requests.column("itl_ns").combine_chunks()
    return tokens_after_first(
        np.array(pc.fill_null(requests.column("output_tokens"), 0).to_numpy(), np.int64),
        np.array(pc.fill_null(requests.column("bundled_tokens"), False).to_numpy(), np.bool_),
        np.array(pc.fill_null(pc.list_value_length(gaps), 0).to_numpy(zero_copy_only=False), np.int64),
        pc.list_flatten(gaps).to_numpy(zero_copy_only=False),
    )


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
    _replace(path, lambda temporary: _write(table, temporary))


def write_parts(parts: Iterable[pa.Table], path: Path) -> None:
    """As :func:`write_table`, for a table in parts; the file is the same."""
    _replace(path, lambda temporary: _write_parts(iter(parts), temporary))


def write_bytes(content: bytes, path: Path) -> None:
    """Write a file through a temporary file, fsync and rename. Raises RunError."""
    _replace(path, lambda temporary: temporary.write_bytes(content) and None)


def write_text(text: str, path: Path) -> None:
    """As :func:`write_bytes`, for text in UTF-8; creates the directory if it does not exist."""
    write_with(path, lambda temporary: temporary.write_bytes(text.encode()) and None)


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
    """Concatenate shards of one schema into ``path`` by row group, then remove them. A single shard is renamed."""
    if len(shards) == 1:
        shards[0].replace(path)
        sync_directory(path.parent)
        return
    _replace(path, lambda temporary: _copy_row_groups(shards, temporary))
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
        if _is_special(path):
            _copy_to(path, write)
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


def _is_special(path: Path) -> bool:
    """Whether there is something that a file must not replace: a device, a pipe, an open descriptor."""
    own = path.absolute().as_posix().startswith(("/proc/", "/dev/fd/", "/dev/std"))
    return path.exists() and not path.is_dir() and (own or not path.is_file())


def _copy_to(path: Path, write: Callable[[Path], object]) -> None:
    with tempfile.TemporaryDirectory() as folder, path.open("wb") as target:
        written = Path(folder) / "written"
        write(written)
        with written.open("rb") as source:
            shutil.copyfileobj(source, target)


def _writer(schema: pa.Schema, path: Path) -> pq.ParquetWriter:
    leaves = [name for field in schema for name in _leaf_names(field)]
    return pq.ParquetWriter(
        path,
        schema,
        compression="zstd",
        compression_level=1,
        use_dictionary=[name for name in leaves if name in _DICTIONARY],
        write_statistics=[name for name in leaves if "." not in name],
        write_page_checksum=True,
    )


def _leaf_names(field: pa.Field) -> list[str]:
    return [f"{field.name}.list.element"] if pa.types.is_list(field.type) else [field.name]


def _write(table: pa.Table, path: Path) -> None:
    with _writer(table.schema, path) as writer:
        writer.write_table(table, row_group_size=ROW_GROUP_ROWS)


def _write_parts(parts: Iterator[pa.Table], path: Path) -> None:
    """Parts are collected until they fill a row group, so that groups are as large as those of a table."""
    first = next(parts)
    with _writer(first.schema, path) as writer:
        held = first
        for part in parts:
            held = pa.concat_tables([held, part])
            while len(held) >= ROW_GROUP_ROWS:
                writer.write_table(held.slice(0, ROW_GROUP_ROWS), row_group_size=ROW_GROUP_ROWS)
                held = held.slice(ROW_GROUP_ROWS)
        if len(held):
            writer.write_table(held, row_group_size=ROW_GROUP_ROWS)


def _copy_row_groups(shards: Sequence[Path], path: Path) -> None:
    with _writer(read_footer(shards[0])[0], path) as writer:
        for shard in shards:
            with pq.ParquetFile(shard) as file:
                for index in range(file.num_row_groups):
                    writer.write_table(file.read_row_group(index), row_group_size=ROW_GROUP_ROWS)
