"""Stores measurements during a run: in shards large enough not to slow it down, and until then in a tail file.

A batch is in the tail file, and so with the operating system, as soon as it comes. It is lost only if the machine
stops, not if the program is killed.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import IO

import pyarrow as pa

from ebbench.errors import RunError
from ebbench.records.run import RunWriter, TableName

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
