"""Stores measurements during a run, in shards large enough not to slow it down."""

from __future__ import annotations

import time

import pyarrow as pa

from ebbench.records.run import RunWriter, TableName

ROWS, INTERVAL_S = 5_000, 5.0


class Journal:
    """Collects batches of one table and appends them as a shard when many or old enough.

    A run that is killed loses at most the last ``interval_s`` seconds. Rows not yet stored when the run
    ends are dropped: the engine's whole table replaces the shards.
    """

    def __init__(self, writer: RunWriter, name: TableName, *, rows: int = ROWS, interval_s: float = INTERVAL_S) -> None:
        self._writer, self._name = writer, name
        self._rows, self._interval_s = rows, interval_s
        self._held: list[pa.Table] = []
        self._stored_s = time.monotonic()

    def add(self, batch: pa.Table) -> None:
        """Take a batch. Raises RunError when a shard cannot be stored."""
        self._held.append(batch)
        waiting = sum(held.num_rows for held in self._held)
        if waiting and (waiting >= self._rows or time.monotonic() - self._stored_s >= self._interval_s):
            self.flush()

    def flush(self) -> None:
        """Store the rows collected so far."""
        if self._held:
            self._writer.append(self._name, pa.concat_tables(self._held))
            self._held.clear()
        self._stored_s = time.monotonic()
