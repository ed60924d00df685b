"""Reads trace files and selects the part that a scenario replays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ebbench.errors import InputFileError, UsageError
from ebbench.traffic.spec import Replay
from ebbench.workloads.arrow import int_lists
from ebbench.workloads.requests import Requests, single_turn
from ebbench.workloads.trace_formats import Line, TraceFormat, format_of
from ebbench.workloads.trace_times import (
    NAMES,
    Stamps,
    collect_stamps,
    read_time_unit,
    seconds_since_first,
    short_number,
)


@dataclass(frozen=True)
class Trace:
    """A trace file: its requests in order of time without arrival times, and their times as written."""

    path: Path
    requests: Requests
    stamps: Stamps
    format: TraceFormat

    def timed(self, time_unit: str | None = None) -> Requests:
        """The requests with ``arrival_s`` relative to the first; their facts say how times were read.

        ``time_unit``: the value of ``--time-unit``, None if not given. Raises UsageError if the unit is ambiguous.
        """
        try:
            reading = read_time_unit(self.stamps, time_unit, whole_numbers_are=self.format.whole_numbers_are)
        except UsageError as error:
            raise UsageError(f"{self.path}: {error}") from None
        arrival_s = seconds_since_first(self.stamps, reading)
        span_s = float(arrival_s.max())
        facts = {
            **self.requests.facts,
            "time_unit": reading.unit,
            "time_unit_reason": reading.reason,
            "trace_requests": len(arrival_s),
            "trace_span_s": span_s,
            "trace_requests_per_s": (len(arrival_s) - 1) / span_s if span_s else None,
        }
        return replace(self.requests, arrival_s=arrival_s, facts=facts)


def read_trace(path: Path) -> Trace:
    """All requests of a trace; requests with equal times keep the order of the file. Raises InputFileError."""
    lines = _lines(path)
    if not lines:
        raise InputFileError(path, "is empty; expected an Azure CSV or Mooncake JSON lines")
    found = format_of(path, lines[0])
    rows = list(found.read(path, lines))
    if not rows:
        raise InputFileError(path, "holds no requests")
    try:
        stamps = collect_stamps([row.stamp for row in rows])
    except ValueError as error:
        raise InputFileError(path, str(error)) from None
    order = np.argsort(stamps.offsets, kind="stable")
    rows = [rows[index] for index in order]
    hash_ids = [row.hash_ids for row in rows]
    requests = single_turn(
        np.array([row.input_tokens for row in rows], np.int32),
        np.array([row.output_tokens for row in rows], np.int32),
        hash_ids=int_lists(hash_ids) if any(one is not None for one in hash_ids) else None,
        facts={"source": f"file:{path}", "source_reason": found.name},
    )
    return Trace(path, requests, replace(stamps, offsets=stamps.offsets[order]), found)


def _lines(path: Path) -> list[Line]:
    """The lines that are not empty. Raises InputFileError."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise InputFileError(path, f"cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise InputFileError(path, f"is not UTF-8 text ({error.reason})") from None
    return [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]


def time_note(facts: Mapping[str, Any]) -> str:
    """How a replayed trace's times were read, with its rate and duration; empty without a replay."""
    unit = facts.get("time_unit")
    if unit is None:
        return ""
    rate = facts["trace_requests_per_s"]
    what = f"{facts['trace_requests']:,} requests over {short_number(facts['trace_span_s'])} s"
    rated = f", {short_number(rate)} per second" if rate is not None else ""
    speed = facts.get("speed", 1.0)
    scaled = "" if speed == 1.0 else f"; replayed {speed:g} times as fast"
    name = Path(str(facts["source"]).removeprefix("file:")).name
    return f"trace {name}: {what}{rated}; its times are read as {NAMES[unit]} ({facts['time_unit_reason']}){scaled}"


def replayed(requests: Requests, replay: Replay) -> Requests:
    """Slice, repeat and scale in time. A slice begins at time zero; each repetition has new contents.

    Raises UsageError if the slice is empty.
    """
    assert requests.arrival_s is not None  # a trace has times
    end = np.inf if replay.duration_s is None else replay.start_s + replay.duration_s
    inside = (requests.arrival_s >= replay.start_s) & (requests.arrival_s < end)
    if not inside.any():
        length = float(requests.arrival_s[-1])
        raise UsageError(f"the trace has no request in the slice from {replay.start_s:g} s; it is {length:g} s long")
    part = requests.keep(inside)
    assert part.arrival_s is not None
    part = replace(part, arrival_s=part.arrival_s - replay.start_s)
    times = part.arrival_s
    assert times is not None
    # Without a given length, repetitions follow each other after a mean gap.
    span = replay.duration_s or float(times[-1]) * (1 + 1 / max(1, len(times) - 1))
    starts = np.repeat(np.arange(replay.repeat), len(times)) * span
    n = replay.repeat
    return replace(
        single_turn(np.tile(part.input_tokens, n), np.tile(part.output_tokens, n)),
        hash_ids=_repeated_hashes(part.hash_ids, n),
        arrival_s=(np.tile(times, n) + starts) / replay.speed,
        facts={**requests.facts, "speed": replay.speed, "repeat": n},
    )


def _repeated_hashes(hash_ids: pa.Array | None, repeat: int) -> pa.Array | None:
    """New hash ids in each repetition; otherwise it would be served from the prefix cache."""
    if hash_ids is None or repeat == 1:
        return hash_ids
    rows = hash_ids.to_pylist()
    step = max((one for row in rows if row for one in row), default=-1) + 1
    return int_lists([None if row is None else [one + i * step for one in row] for i in range(repeat) for row in rows])
