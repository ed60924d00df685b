"""Turns with a delay in place of a time, as in AIPerf's sessions: they start so long after the turn before has ended.

Such a turn's length is that of its new part, and its prompt holds the session so far. Its hash ids are of that part
too, so that they are no prefix and are not used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ebbench.errors import InputFileError
from ebbench.workloads.log_columns import Columns
from ebbench.workloads.log_files import LogFile, LogRecord
from ebbench.workloads.recorded import MOST_TOKENS, Recorded
from ebbench.workloads.trace_times import Stamp

_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


def has_delays(names: Mapping[str, str], log: LogFile, asked: Mapping[str, str]) -> bool:
    """Whether a column of delays says when turns start: some requests of sessions have no time."""
    if "delay" not in names or "session" not in names:
        return False
    untimed = "time" not in names or any(record.value.get(names["time"]) is None for record in log.sample)
    return "delay" in asked or untimed


@dataclass
class Delays:
    """Places turns after those before them. ``lengths_add``: lengths are of the new part of a prompt."""

    log: LogFile
    columns: Columns
    lengths_add: bool
    _last: dict[Any, tuple[Stamp | None, int]] = field(default_factory=dict)

    @property
    def note(self) -> str:
        """What is said about such a log."""
        added = "; their prompts hold the session so far, and their hash_ids are not used" if self.lengths_add else ""
        return (
            f"later turns start {self.columns.names['delay']} after the turn before has ended{added}. Rates count "
            "answers as if they took no time"
        )

    def placed(self, record: LogRecord, row: Recorded) -> Recorded:
        """The request with its time, pause and whole prompt. Raises InputFileError."""
        delay = self._delay(record)
        stamp, history = self._last.get(row.session, (None, 0))
        if row.stamp is not None:
            stamp, pause_s = row.stamp, None
        elif row.session in self._last:
            pause_s = delay * _SECONDS[self.columns.units.get("delay", "ms")]
            stamp = None if stamp is None else stamp._replace(value=stamp.value + (0 if stamp.iso else delay))
        elif "time" in self.columns.names:
            name = self.columns.names["time"]
            raise InputFileError(self.log.path, f"the first turn of its session has no {name}", record.line)
        else:
            pause_s = None
        inputs = row.input_tokens + (history if self.lengths_add else 0)
        if inputs > MOST_TOKENS:
            problem = f"its session has more than {MOST_TOKENS:,} tokens by then"
            raise InputFileError(self.log.path, problem, record.line)
        if row.session is not None:
            self._last[row.session] = (stamp, inputs + row.output_tokens)
        ids = None if self.lengths_add else row.hash_ids
        return row._replace(stamp=stamp, input_tokens=inputs, hash_ids=ids, pause_s=pause_s)

    def _delay(self, record: LogRecord) -> float:
        value = record.value.get(self.columns.names["delay"])
        if value is None or value == "":
            return 0.0
        try:
            delay = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            delay = math.nan
        if not 0.0 <= delay < math.inf:
            problem = f"expected a delay of 0 or more in {self.columns.names['delay']}, found {str(value)[:40]!r}"
            raise InputFileError(self.log.path, problem, record.line)
        return delay
