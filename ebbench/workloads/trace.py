"""Reads traces and logs of any format in FORMATS and selects the part that a scenario replays."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ebbench.errors import InputFileError, UsageError
from ebbench.foreign.documents import read_toml
from ebbench.records.warnings import RunWarning, warning
from ebbench.traffic.spec import Replay
from ebbench.workloads.files import LogFile, log_files, open_log
from ebbench.workloads.formats_columns import DATA_SETS, MOST_LOOKED_AT, Definition, looks_like_values, with_columns
from ebbench.workloads.formats_tools import AGENTS, TOOLS
from ebbench.workloads.log_columns import Columns, keeps_failed, names_in, parse_columns, plain_name
from ebbench.workloads.log_rows import Collected, arranged, collect
from ebbench.workloads.recorded import (
    UNUSABLE,
    Reading,
    ReadOptions,
    Stamps,
    TextReader,
    TimeReading,
    TraceFormat,
    mixed_epochs,
    read_time_unit,
    seconds_since_first,
)
from ebbench.workloads.requests import Floats, Requests

# The formats of traces and logs that are recognised, most specific first. A new format is one entry of FORMATS,
# or of log_formats.toml.
#
# A format turns records into `ebbench.workloads.recorded.Recorded`; `ebbench.workloads.recorded` decides the unit
# of times and `ebbench.workloads.trace` the order, sessions and blocks, for all formats alike.


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A format of ``log_formats.toml``."""

    expected: str
    fields: tuple[str, ...]
    definition: Definition


_TABLES = msgspec.convert(read_toml(Path(__file__).with_name("log_formats.toml")), dict[str, _Table])
TRACES = tuple(with_columns(name, by.expected, by.fields, by.definition) for name, by in _TABLES.items())
ACCESS_LOG = with_columns(
    "access log",
    "an access log with token counts as name=value, such as prompt_tokens=812 completion_tokens=90",
    ("time_local", "request", "status"),
    Definition(duration="s", time_is_end=True),
    lambda log: log.kind == "access log",
)
CHAT_LOG = with_columns(
    "chat log",
    "requests and responses of an OpenAI API: messages, or usage with prompt_tokens and completion_tokens",
    ("messages", "usage"),
    recognises=lambda log: any(
        name.rpartition(".")[2] in ("messages", "usage") for name in names_in(record.value for record in log.sample)
    ),
)
TABLE = with_columns(
    "table",
    "CSV, Parquet or JSON lines with columns such as timestamp, input_tokens, output_tokens",
    ("timestamp", "input_tokens", "output_tokens"),
    recognises=lambda log: False,  # the last resort: see recognise_format
)
_LIKE = 0.6
"""Likeness of names (0 to 1) from which a format is named as the nearest."""
FORMATS = (*TOOLS, *AGENTS, *DATA_SETS, *TRACES, ACCESS_LOG, CHAT_LOG, TABLE)


def recognise_format(log: LogFile, options: ReadOptions) -> tuple[TraceFormat, Reading]:
    """The format of a file by its first records, and the file opened in it.

    Raises InputFileError with the nearest format if the file has neither a known schema nor columns with known names.
    """
    known = next((trace_format for trace_format in FORMATS if trace_format.recognises(log)), TABLE)
    if log.parts and not known.in_folders:
        names = ", ".join(trace_format.name for trace_format in FORMATS if trace_format.in_folders)
        raise InputFileError(log.path, f"is a folder, which only {names} come in; give one file")
    if unused := [key for key in options.columns if key not in known.choices]:
        takes = f"; it takes {', '.join(f'{key}=' for key in known.choices)}" if 0 < len(known.choices) < 3 else ""
        raise UsageError(
            f"{log.path}: --columns {unused[0]}= has no effect, since it is read as {known.name}{takes}; leave it out"
        )
    try:
        return known, known.read(log, options)
    except InputFileError as error:
        if known is not TABLE or options.columns or "no column with" not in str(error):
            raise
        if looks_like_values(log.columns):
            problem = f"its first line, {', '.join(log.columns)[:60]}, holds values; put a line with names above it"
            raise InputFileError(log.path, f"{problem}, such as timestamp,input_tokens,output_tokens", 1) from None
        near = nearest(log)
        advice = f"nearest format: {near.name} ({near.expected}); or name them: --columns input=...,output=...,time=..."
        raise InputFileError(log.path, f"{str(error).partition(': ')[2]}; {advice}", error.line) from None


def nearest(log: LogFile) -> TraceFormat:
    """The format whose fields are most like the file's names; a table if none is like them."""
    import difflib

    all_names = names_in(record.value for record in log.sample)
    names = {plain_name(name).rpartition(".")[2] for name in all_names[:MOST_LOOKED_AT]}

    def likeness(known: TraceFormat) -> float:
        best = [
            max((difflib.SequenceMatcher(None, plain_name(field), name).ratio() for name in names), default=0.0)
            for field in known.fields
        ]
        return sum(best) / len(best)

    best = max((known for known in FORMATS if known.fields), key=likeness)
    return best if likeness(best) >= _LIKE else TABLE


_YEAR_S, _MOST_YEARS = 365.25 * 86_400, 10
_MOST_DROPPED = 0.5
"""Share of rows without usable lengths above which a file is refused instead of read in part."""


@dataclass(frozen=True)
class Trace:
    """A trace or log: its requests in order of arrival and their times as written.

    ``requests`` has no times; ``stamps`` (None: the file has no times) and ``lasted_s`` (seconds from a request's start
    to its end, NaN where unknown) have one entry per row of ``collected``, in file order.
    """

    path: Path
    name: str
    reading: Reading
    collected: Collected
    requests: Requests
    stamps: Stamps | None

    @property
    def columns(self) -> Columns | None:
        """The recognised columns, None for a format without columns to choose."""
        return self.reading.columns

    def timed(self, time_unit: str | None = None) -> Requests:
        """The requests with ``arrival_s`` relative to the first; their facts say how times were read.

        ``time_unit``: the value of ``--time-unit``, None if not given. Raises UsageError if the unit is ambiguous, or
        if there are no times.
        """
        reading, start_s = self.seconds(time_unit)
        requests = arranged(self.collected, start_s, self._ends(reading, start_s))
        span_s = float(start_s.max())
        facts = {
            **self.requests.facts,
            "time_unit": reading.unit,
            "time_unit_reason": reading.reason,
            "trace_requests": len(start_s),
            "trace_span_s": span_s,
            "trace_requests_per_s": (len(start_s) - 1) / span_s if span_s else None,
        }
        return replace(requests, facts=facts, warnings=self.requests.warnings)

    def seconds(self, time_unit: str | None = None) -> tuple[TimeReading, Floats]:
        """How the times are read, and the requests' start times in s from the first, in file order.

        Raises UsageError as ``timed``.
        """
        if self.stamps is None:
            hint = self.reading.time_hint or "or name its times with --columns time=COLUMN"
            raise UsageError(
                f"{self.path}: has no times to replay; give --scenario poisson --request-rate R or --scenario "
                f"saturated; {hint}"
            )
        reading = self.reading
        try:
            unit = read_time_unit(
                self.stamps, time_unit, whole_numbers_are=reading.whole_numbers_are, numbers_are=reading.numbers_are
            )
        except UsageError as error:
            if (mixed := mixed_epochs(self.stamps)) is not None:
                first, second, row = mixed
                problem = f"is a Unix time in {second}, the rows before it are in {first}; write all in one unit"
                raise InputFileError(self.path, problem, int(self.collected.line[row])) from None
            raise UsageError(f"{self.path}: {error}") from None
        start_s = seconds_since_first(self.stamps, unit)
        if (years := float(start_s.max()) / _YEAR_S) > _MOST_YEARS:
            begins, ends = (int(self.collected.line[row]) for row in (start_s.argmin(), start_s.argmax()))
            problem = f"its times go over {years:,.0f} years, from line {begins} to line {ends}"
            raise InputFileError(self.path, f"{problem}; a time that is missing is often 1970, or a zero")
        return unit, start_s

    def s_per_output_token(self, time_unit: str | None = None) -> float:
        """How long requests took per output token, of all together; 0 where the log has no ends."""
        if self.stamps is None:
            return 0.0
        unit, start_s = self.seconds(time_unit)
        ends = self._ends(unit, start_s)
        lasted = np.zeros(0) if ends is None else ends - start_s
        known = ~np.isnan(lasted)
        tokens = np.asarray(self.collected.output_tokens, np.int64)
        return float(lasted[known].sum() / max(1, tokens[: len(lasted)][known].sum()))

    def _ends(self, unit: TimeReading, start_s: Floats) -> Floats | None:
        """End of each request in s from the first start, NaN where unknown; None if no end is known."""
        assert self.stamps is not None  # the caller has read start times
        ends = self.collected.end_s(self.stamps, unit)
        lasted = self.collected.lasted_s
        if ends is None:
            return None if lasted is None else start_s + lasted
        return ends if lasted is None else np.where(np.isnan(ends), start_s + lasted, ends)


def read_trace(
    path: Path, columns: str | None = None, tokenizer: str | None = None, *, keep_text: bool = False
) -> Trace:
    """All requests of a trace; requests with equal times keep the order of the file.

    ``columns``: the value of ``--columns``; ``tokenizer`` counts the tokens of texts where the log has no counts;
    ``keep_text`` keeps its prompts. The last file read is kept in memory. Raises InputFileError, UsageError.
    """
    try:
        stats = [file.stat() for file in log_files(path)]
    except OSError as error:
        raise InputFileError(path, f"cannot be read: {error.strerror or error}") from None
    state = tuple((stat.st_mtime_ns, stat.st_size) for stat in stats)
    return _read(path, columns, tokenizer, keep_text, state)


@lru_cache(maxsize=2)
def _read(
    path: Path, columns: str | None, tokenizer: str | None, keep_text: bool, _state: tuple[tuple[int, int], ...]
) -> Trace:
    log = open_log(path)
    texts = TextReader(tokenizer, keep=keep_text)
    trace_format, reading = recognise_format(log, ReadOptions(texts, parse_columns(columns)))
    collected = collect(log, reading)
    names = {} if reading.columns is None else reading.columns.names
    _check_rows(path, collected, names)
    try:
        stamps = collected.stamps()
    except ValueError as error:
        at = collected.times.mixed_at
        raise InputFileError(path, str(error), None if at is None else int(collected.line[at])) from None
    facts: dict[str, Any] = {"source": f"file:{path}", "source_reason": trace_format.name}
    if reading.columns is not None and trace_format.name in ("table", "chat log", "access log"):
        facts["columns"] = dict(reading.columns.names)
    if collected.dropped:
        facts["rows_dropped"] = {reason: count for reason, (count, _) in collected.dropped.items()}
    if texts.counter is not None:
        facts["token_counts"] = texts.counter.description
    warnings = (
        *_warnings(collected, stamps if reading.ordered else None, names),
        *reading.notes,
        *(texts.counter.warnings if texts.counter else ()),
    )
    order = None if stamps is None else stamps.offsets
    requests = replace(arranged(collected, order, None), arrival_s=None, facts=facts, warnings=warnings)
    if tokenizer is not None and texts.counter is None:
        raise UsageError(f"--tokenizer counts the tokens of texts; {path} has token counts, leave it out")
    if keep_text and requests.prompt is None:
        raise UsageError(f"--keep-text: {path} holds no prompts; leave it out")
    return Trace(path, trace_format.name, reading, collected, requests, stamps)


def _check_rows(path: Path, collected: Collected, columns: Mapping[str, str]) -> None:
    """Raise InputFileError if no request, or less than half of the rows, can be replayed. ``columns``: by role."""
    rows, dropped = len(collected), sum(count for count, _ in collected.dropped.values())
    if rows + dropped == 0:
        raise InputFileError(path, "holds no requests")
    lacking = {why: where for why, where in collected.dropped.items() if why in UNUSABLE}
    without = sum(count for count, _ in lacking.values())
    if rows and without <= _MOST_DROPPED * (rows + without):
        return
    reasons = lacking or collected.dropped
    reason, (count, line) = max(reasons.items(), key=lambda item: item[1][0])
    total = rows + dropped
    column = columns.get(UNUSABLE.get(reason, ""))
    empty = "" if column is None else f", column {column!r} is empty in them"
    keeps = keeps_failed(collected.failed_by, columns)
    remedy = f"; {keeps} keeps failed requests" if keeps else ""
    raise InputFileError(
        path,
        f"{count:,} of {total:,} rows have {reason}{empty}: expected requests with their token counts{remedy}",
        line,
    )


def _warnings(collected: Collected, stamps: Stamps | None, columns: Mapping[str, str]) -> list[RunWarning]:
    warnings = []
    if collected.dropped:
        dropped = {reason: {"rows": rows, "first_line": line} for reason, (rows, line) in collected.dropped.items()}
        rows = len(collected) + sum(rows for rows, _ in collected.dropped.values())
        keeps = keeps_failed(collected.failed_by, columns)
        warnings.append(warning("rows-left-out", rows=rows, dropped=dropped, kept_with=keeps))
    if collected.derived_block:
        warnings.append(warning("block-size-derived", block_tokens=collected.block_tokens))
    for code, (count, line) in collected.odd.items():
        warnings.append(warning(code, requests=count, first_line=line))
    if collected.cached_share and not collected.hash_counts:
        sessions = bool(collected.sessions)
        warnings.append(warning("hits-not-replayed", cached_share=collected.cached_share, sessions=sessions))
    if stamps is not None:
        # Rows after which a later line of the file has an earlier time.
        backwards = np.flatnonzero((np.diff(stamps.offsets) < 0) & (np.diff(np.asarray(collected.line)) > 0))
        if backwards.size:
            line = int(collected.line[backwards[0] + 1])
            warnings.append(warning("rows-not-in-order", rows=backwards.size, first_line=line))
    return warnings


def sliced(requests: Requests, replay: Replay) -> Requests:
    """The sessions that start in the replay's part of the trace, which begins at time zero.

    Raises UsageError if there are none.
    """
    assert requests.arrival_s is not None  # a trace has times
    end = np.inf if replay.duration_s is None else replay.start_s + replay.duration_s
    inside = (requests.arrival_s >= replay.start_s) & (requests.arrival_s < end)
    if not inside.any():
        length = float(requests.arrival_s[-1])
        raise UsageError(f"the trace has no request in the slice from {replay.start_s:g} s; it is {length:g} s long")
    part = requests.keep(inside[requests.session])
    assert part.arrival_s is not None
    return replace(part, arrival_s=part.arrival_s - replay.start_s)


def replayed(part: Requests, replay: Replay, rate: float | None = None, sessions: int = 0) -> Requests:
    """Repeat a slice as the replay says, and until there are ``sessions`` sessions, and scale it in time.

    Each repetition has new contents. ``rate``: sessions/s to which the starts of sessions are scaled; pauses within
    sessions then stay as recorded, while the replay's speed also scales them. Raises UsageError if there is no rate to
    scale.
    """
    times = part.arrival_s
    assert times is not None  # a trace has times
    # Without a given length, repetitions follow each other after a mean gap.
    span = replay.duration_s or float(times[-1]) * (1 + 1 / max(1, len(times) - 1))
    if rate is not None and not span:
        raise UsageError(
            "all requests of the trace have one time, so there is no rate to scale; use --scenario poisson"
        )
    speed = replay.speed if rate is None else rate * span / len(times)
    n = max(replay.repeat, math.ceil(sessions / len(times)))
    starts = np.repeat(np.arange(n), len(times)) * span
    pause_s = part.pause_s if rate is not None or part.pause_s is None else part.pause_s / speed
    return replace(
        replace(part, pause_s=pause_s).repeated(n),
        arrival_s=(np.tile(times, n) + starts) / speed,
        facts={**part.facts, "speed": speed, "repeat": n},
    )
