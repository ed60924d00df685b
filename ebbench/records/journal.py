"""Stores measurements during a run, in shards large enough not to slow it down."""

from __future__ import annotations

import time

import pyarrow as pa

from ebbench.records.run import RunWriter, TableName

ROWS, INTERVAL_S = 5_000, 5.0


class Journal:
    """Collects batches of one table and writes a shard after enough rows or enough time.

    A killed run loses at most the last ``interval_s`` seconds. Rows not yet stored at the end of the run are dropped:
    the engine's complete table replaces the shards.
    """

    def __init__(self, writer: RunWriter, name: TableName, *, rows: int = ROWS, interval_s: float = INTERVAL_S) -> None:
        self._writer, self._name = writer, name
        self._rows, self._interval_s = rows, interval_s
        self._held: list[pa.Table] = []
        self._stored_s = time.monotonic()

    def add(self, batch: pa.Table) -> None:
        """Add a batch. Raises RunError if a shard cannot be stored."""
        self._held.append(batch)
        waiting = sum(held.num_rows for held in self._held)
        if waiting and (waiting >= self._rows or time.monotonic() - self._stored_s >= self._interval_s):
            self.flush()

    def flush(self) -> None:
        """Write the collected rows as a shard."""
        if self._held:
            self._writer.append(self._name, pa.concat_tables(self._held))
            self._held.clear()
        self._stored_s = time.monotonic()
