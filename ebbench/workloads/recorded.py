"""What every log format yields, record by record: requests as recorded, with their times, and rows left out."""

from __future__ import annotations

import datetime as dt
import json
import math
import re
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from ebbench.errors import InputFileError, UsageError
from ebbench.foreign.documents import visible
from ebbench.records.warnings import RunWarning
from ebbench.workloads.files import LogFile, LogRecord
from ebbench.workloads.log_columns import Columns
from ebbench.workloads.options import TIME_UNITS
from ebbench.workloads.tokens import BYTES_PER_TOKEN, TokenCounter, token_counter

# The unit of a trace's times: one rule for all formats; an ambiguous unit is refused, not guessed.
#
# 1. ISO 8601 text has no unit.
# 2. Numbers that are all calendar times of the years 2014 to 2049 in one unit (Unix time in s, ms, us or ns) have that
#    unit, if the rate is then at least `SLOWEST_EPOCH_RATE` requests/s.
# 3. Whole numbers are in the unit that the format defines for them (Mooncake: ms), if the mean rate is then plausible:
#    at least `PLAUSIBLE_RATE[0]` and less than `PLAUSIBLE_RATE[1]` requests/s. That range spans a factor of 1000,
#    so of the units s, ms, us and ns only one gives a plausible rate.
# 4. Numbers with fractions are seconds, if the rate is then at least `PLAUSIBLE_RATE[0]`. Where the format defines the
#    unit of whole numbers and they could be in that one too (less than `FASTEST_DEFINED_RATE` requests/s), few
#    fractions (`FEW_FRACTIONS`) are taken as that unit, more are ambiguous.
# 5. All other cases need `--time-unit`. If all times are equal, the unit has no effect and is not needed.
#
# A format whose definition leaves no doubt (a column `start_ns`, a load generator's result file) gives its unit itself.

NAMES = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds", "iso": "ISO 8601"}

PLAUSIBLE_RATE = (0.1, 100.0)
"""Lowest and highest plausible mean requests/s. Public traces: Mooncake 3 to 7, Azure 2 to 70."""
SLOWEST_EPOCH_RATE = 1e-3
"""Requests/s below which large numbers are not read as Unix times."""
FASTEST_DEFINED_RATE = 1000.0
"""Requests/s below which a log can be in its format's own unit even if its times have fractions."""
FEW_FRACTIONS = 0.1
"""Share of times with fractions up to which the others were written as whole numbers on purpose."""
_LATEST = 1e19  # of ns since 1970 until 2286; also false for NaN
_EPOCH_S = (1.388e9, 2.525e9)  # the years 2014 to 2049
_SPREADSHEET_DAYS = (41_640, 54_788)  # the same years


class Stamp(NamedTuple):
    """One recorded time: ISO text as seconds since 1970 (``iso``; ``zone``: it has an offset), else a number."""

    value: int | float
    iso: bool
    zone: bool = False


_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_SERVER_LOG = re.compile(r"(\d\d)/(\w{3})/(\d{4}):(\d\d:\d\d:\d\d) ([+-]\d\d)(\d\d)")
"""The clock of web servers' logs: ``10/Oct/2026:13:55:36 +0200``."""
_UTC = re.compile(r" (?:\+0000 )?(?:UTC|GMT)$")
_DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+")
_DAY_AND_MONTH = re.compile(r"\d{1,2}[/.]\d{1,2}[/.]\d{4}")


def read_stamp(value: Any) -> Stamp:
    """``parse_stamp`` for a cell of a log. Raises ValueError that says what is wrong and what to write instead."""
    try:
        return parse_stamp(value)
    except (TypeError, ValueError):
        text = str(value).strip()
    if not text:
        raise ValueError("is empty; expected a number or ISO 8601")
    if _DECIMAL_COMMA.fullmatch(text):
        remedy = f"; write decimals with a point, {text.replace(',', '.')}"
    elif _DAY_AND_MONTH.match(text):
        remedy = "; which number is the month cannot be told, write 2026-03-31 for the 31st of March"
    else:
        remedy = ", such as 12.5 or 2026-03-31T09:00:00.5Z"
    raise ValueError(f"{text[:40]!r} is neither a number nor ISO 8601{remedy}")


def parse_stamp(text: str | int | float | Decimal | dt.date) -> Stamp:
    """Parse a time: a number, a calendar time, ISO 8601 with any number of decimals (also with " UTC" at its end), or
    the clock of web servers' logs. Raises ValueError."""
    if isinstance(text, dt.date):
        return _calendar(text if isinstance(text, dt.datetime) else dt.datetime.combine(text, dt.time()))
    if isinstance(text, bool):
        raise ValueError(f"{text} is no time")
    if not isinstance(text, str):
        number = text if isinstance(text, int | float) else float(text)  # a decimal number of a Parquet file
    elif text[4:5] == "-":
        return _iso(text.strip())  # a calendar time, by far the most frequent text
    else:
        plain = text.strip()
        try:
            number = float(plain) if "." in plain else int(plain)
        except ValueError:
            try:
                number = float(plain)  # 1e3
            except ValueError:
                return _iso(plain)
    if not abs(number) <= _LATEST:
        raise ValueError(f"{str(text)[:40]!r} is no time")
    return Stamp(number, iso=False)


def _iso(text: str) -> Stamp:
    if text.endswith(("UTC", "GMT")):
        text = _UTC.sub("+00:00", text)
    elif (clock := _SERVER_LOG.fullmatch(text)) and clock[2] in _MONTHS:
        day, month, year, time, hours, minutes = clock.groups()
        text = f"{year}-{_MONTHS.index(month) + 1:02}-{day}T{time}{hours}:{minutes}"
    whole, _, rest = text.partition(".")
    if not rest:
        return _calendar(dt.datetime.fromisoformat(whole))
    digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    value, iso, zone = _calendar(dt.datetime.fromisoformat(whole + rest[len(digits) :]))
    return Stamp(value + float(f"0.{digits}") if digits else value, iso, zone)


def _calendar(moment: dt.datetime) -> Stamp:
    zone = moment.tzinfo is not None
    return Stamp((moment if zone else moment.replace(tzinfo=dt.UTC)).timestamp(), iso=True, zone=zone)


@dataclass(frozen=True)
class Stamps:
    """The times of a trace: ``first`` is the earliest, ``offsets`` of all times from it, in the file's unit.

    ``fractions``: the share of times that are no whole numbers.
    """

    first: int | float
    offsets: npt.NDArray[np.float64]
    iso: bool
    fractions: float = 0.0

    @property
    def whole(self) -> bool:
        """Whether all times are whole numbers."""
        return not self.fractions

    @property
    def span(self) -> float:
        """Time from the earliest to the latest, in the file's unit."""
        return float(self.offsets.max())

    def rate(self, unit: str) -> float:
        """Mean requests/s if read in ``unit``; infinite if all times are equal."""
        return (len(self.offsets) - 1) * TIME_UNITS[unit] / self.span if self.span else math.inf


@dataclass
class StampColumn:
    """Collects the times of one trace, 8 bytes per time, and whether they are of one kind.

    ``mixed_at``: index of the first time of another kind than the one before it, None if all are of one kind.
    """

    base: int | float = 0
    offsets: array[float] = field(default_factory=lambda: array("d"))
    fractions: int = 0
    mixed_at: int | None = None
    _iso: bool = False
    _zone: bool = False
    _mixed: str = ""

    def append(self, stamp: Stamp) -> None:
        """Add one time."""
        value, iso, zone = stamp
        if not self.offsets:
            self.base, self._iso, self._zone = value, iso, zone
        elif not self._mixed and (iso != self._iso or zone != self._zone):
            kinds = "are ISO 8601 and some are numbers" if iso != self._iso else "name their zone and some do not"
            self._mixed, self.mixed_at = f"some times {kinds}; write all of them one way", len(self.offsets)
        self.offsets.append(value - self.base)  # subtract first: ns need more than 53 bits
        if value != int(value):
            self.fractions += 1

    def stamps(self) -> Stamps:
        """The times from the earliest. Raises ValueError if their kinds are mixed."""
        if self._mixed:
            raise ValueError(self._mixed)
        offsets = np.array(self.offsets, np.float64)
        lowest = float(offsets.min())
        first = self.base + (lowest if self.fractions else int(lowest))
        return Stamps(first, offsets - lowest, self._iso, self.fractions / len(offsets))


@dataclass(frozen=True)
class TimeReading:
    """The unit of a trace's times (one of NAMES), and why."""

    unit: str
    reason: str


def read_time_unit(
    stamps: Stamps, asked: str | None = None, *, whole_numbers_are: str | None = None, numbers_are: str | None = None
) -> TimeReading:
    """The unit of a trace's times, by the rule above.

    ``asked``: the value of ``--time-unit``. ``whole_numbers_are``: the unit in which the format writes whole numbers,
    None if it has none; ``numbers_are``: the unit of all numbers where the format leaves no doubt. Raises UsageError if
    the unit is ambiguous.
    """
    if stamps.iso:
        if asked is not None:
            raise UsageError(f"the trace's times are ISO 8601 text, which has no unit; leave out --time-unit {asked}")
        return TimeReading("iso", "text in that form")
    if asked is not None:
        return TimeReading(asked, "--time-unit")
    if not stamps.span:
        return TimeReading(numbers_are or whole_numbers_are or "s", "all requests have the same time")
    epoch = _epoch_unit(stamps)
    if numbers_are is not None:
        if epoch is not None and TIME_UNITS[epoch] > TIME_UNITS[numbers_are]:
            problem = f"look like Unix times in {NAMES[epoch]}, and their format or column says {NAMES[numbers_are]}"
            raise UsageError(f"the trace's times {problem}; say which with --time-unit {epoch} or {numbers_are}")
        return TimeReading(numbers_are, "by the format's definition")
    if epoch is not None:
        return TimeReading(epoch, "Unix times")
    slowest, fastest = PLAUSIBLE_RATE
    earliest, latest = _SPREADSHEET_DAYS
    if not stamps.whole and earliest <= stamps.first <= latest and stamps.rate("s") >= fastest:
        remedy = "write them as 2026-03-31T09:00:00, or give --time-unit s if they are seconds"
        raise UsageError(f"the trace's times look like a spreadsheet's days since 1900; {remedy}")
    if not stamps.whole and whole_numbers_are is not None and stamps.rate(whole_numbers_are) < FASTEST_DEFINED_RATE:
        if stamps.fractions <= FEW_FRACTIONS and stamps.rate(whole_numbers_are) >= slowest:
            in_seconds = f"--time-unit s would make it {short_number(stamps.rate('s'))} per second"
            return TimeReading(whole_numbers_are, f"nearly all whole numbers, by the format's definition; {in_seconds}")
    elif not stamps.whole and stamps.rate("s") >= slowest:
        return TimeReading("s", "numbers with fractions")
    if stamps.whole and whole_numbers_are is not None and slowest <= stamps.rate(whole_numbers_are) < fastest:
        return TimeReading(whole_numbers_are, "whole numbers, by the format's definition")
    readings = "; ".join(
        f"{unit}: {short_number(stamps.rate(unit))} requests/s over {short_number(stamps.span / per_second)} s"
        for unit, per_second in TIME_UNITS.items()
    )
    kind = "whole numbers" if stamps.whole else "numbers with fractions"
    raise UsageError(f"the unit of the trace's times ({kind}) is ambiguous; give it with --time-unit ({readings})")


def seconds_since_first(stamps: Stamps, reading: TimeReading) -> npt.NDArray[np.float64]:
    """All times in seconds from the earliest."""
    return stamps.offsets if reading.unit == "iso" else stamps.offsets / TIME_UNITS[reading.unit]


def _epoch_unit(stamps: Stamps) -> str | None:
    """The unit in which all numbers are Unix times with a plausible rate; the ranges of the units do not overlap."""
    earliest, latest = _EPOCH_S
    for unit, per_second in TIME_UNITS.items():
        inside = earliest * per_second <= stamps.first and stamps.first + stamps.span <= latest * per_second
        if inside and stamps.rate(unit) >= SLOWEST_EPOCH_RATE:
            return unit
    return None


def mixed_epochs(stamps: Stamps) -> tuple[str, str, int] | None:
    """Two units (names) if all numbers are Unix times but not in one unit, and the index of the first in the second."""
    earliest, latest = _EPOCH_S
    units = np.full(len(stamps.offsets), -1)
    values = stamps.first + stamps.offsets
    for place, per_second in enumerate(TIME_UNITS.values()):
        units[(values >= earliest * per_second) & (values <= latest * per_second)] = place
    unlike = np.flatnonzero(units != units[0])
    if (units < 0).any() or not len(unlike):
        return None
    first, second = (NAMES[list(TIME_UNITS)[units[at]]] for at in (0, unlike[0]))
    return first, second, int(unlike[0])


def short_number(value: float) -> str:
    """Three significant digits, or all digits before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


# Lengths and shared prefixes of the texts in a log; the texts themselves are kept only on request.
#
# A prompt's prefix identities cover blocks of `BLOCK_TOKENS` tokens, taken as four UTF-8 bytes each: two prompts that
# begin with the same system prompt have the same first identities. They are numbers in order of appearance, from
# which no text can be derived.

BLOCK_TOKENS = 64
_BLOCK_BYTES = BLOCK_TOKENS * BYTES_PER_TOKEN


@dataclass
class TextReader:
    """Counts the tokens of texts by ``tokenizer`` and numbers their prefixes. ``keep``: prompts are kept as text.

    ``counter`` is None until a text had to be counted.
    """

    tokenizer: str | None = None
    keep: bool = False
    counter: TokenCounter | None = None
    _known: dict[tuple[int, bytes], int] = field(default_factory=dict)

    def tokens(self, text: str) -> int:
        """Tokens of a text: counted, or estimated from its bytes."""
        if self.counter is None:
            self.counter = token_counter(self.tokenizer)
        return int(self.counter.count([text])[0])

    def prefix_ids(self, text: str, input_tokens: int) -> list[int]:
        """Identities of the text's first blocks, at most as many as ``input_tokens`` fill."""
        data = text.encode(errors="replace")
        blocks = min(len(data) // _BLOCK_BYTES, input_tokens // BLOCK_TOKENS)
        ids, previous = [], -1
        for block in range(blocks):
            digest = blake2b(data[block * _BLOCK_BYTES : (block + 1) * _BLOCK_BYTES], digest_size=8).digest()
            previous = self._known.setdefault((previous, digest), len(self._known))
            ids.append(previous)
        return ids


def joined_text(value: Any) -> str:
    """The text of a prompt: a string, chat messages with roles, or a list of strings; empty for anything else."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        content, calls = "", _calls(value)
        for key in ("content", "text", "parts", "messages", "prompt", "value"):
            if key in value:
                content = joined_text(value[key])
                break
        else:
            if not calls:
                return ""
        text = "\n".join(filter(None, (content, calls)))
        return f"{value['role']}: {text}" if "role" in value else text
    if isinstance(value, Sequence):
        return "\n".join(filter(None, (joined_text(part) for part in value)))
    return ""


_MEDIA = re.compile("image|audio|video|file|document")


def holds_media(value: Any) -> bool:
    """Whether a prompt has a part that is no text, such as an image, whose tokens :func:`joined_text` leaves out."""
    if isinstance(value, Mapping):
        kind = value.get("type")
        return (isinstance(kind, str) and _MEDIA.search(kind) is not None) or holds_media(value.get("content"))
    return isinstance(value, list) and any(map(holds_media, value))


def _calls(message: Mapping[str, Any]) -> str:
    """Names and arguments of the tools that a message calls, which are tokens of the model as well."""
    calls = message.get("tool_calls") or [message.get("function_call")]
    if not isinstance(calls, Sequence):
        return ""
    functions = [call.get("function", call) for call in calls if isinstance(call, Mapping)]
    if message.get("type") in ("function_call", "tool_use"):
        functions.append(message)
    words = [
        function.get(key)
        for function in functions
        if isinstance(function, Mapping)
        for key in ("name", "arguments", "input")
    ]
    return "\n".join(
        json.dumps(word) if isinstance(word, dict) else word for word in words if isinstance(word, str | dict)
    )


def answer_text(value: Any) -> str:
    """The text of a response: a string, a message, or the first choice of a completion; empty for anything else.

    Thinking and tool calls are part of it, as they are of the output tokens.
    """
    if isinstance(value, Mapping):
        if isinstance(choices := value.get("choices"), Sequence) and choices:
            return answer_text(choices[0])
        thinking = value.get("reasoning_content") or value.get("reasoning") or value.get("thinking")
        own = next((value[key] for key in ("message", "body", "content", "text", "output") if value.get(key)), "")
        parts = (thinking if isinstance(thinking, str) else "", answer_text(own), _calls(value))
        return "\n".join(filter(None, parts))
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "\n".join(filter(None, map(answer_text, value)))
    return value if isinstance(value, str) else ""


_SEPARATED = re.compile(r"\d{1,3}(?:[.,' _]\d{3})+(?:[.,]\d+)?")
"""A number with thousands separators, such as ``1,234`` or ``1.234,0``."""
MOST_TOKENS = 1 << 24
"""No model takes or answers more; a longer request would take gigabytes of memory wherever lengths are counted."""


class Recorded(NamedTuple):
    """One request. ``hash_ids``: identities of its prompt's blocks, labels of any size; ``turn`` orders the requests of
    a ``session``.

    ``end``: when its response was complete; ``duration_s``: how long it took, where only that is known;
    ``cached_tokens``: how much of the prompt the server had in its cache then; ``pause_s``: the time from the end of
    the turn before to its start, where that is what the log says; ``request_class``: the name of its class;
    ``steps_by_accepted``: decode steps that accepted 0, 1, ... drafted tokens. ``brings_results``: whether its prompt
    ends with results of tools; ``calls_tools``: whether its response ends with calls of tools; None: not said.
    """

    line: int
    stamp: Stamp | None
    input_tokens: int
    output_tokens: int
    hash_ids: Sequence[int | str] | None = None
    session: Any = None
    turn: float | None = None
    end: Stamp | None = None
    duration_s: float | None = None
    prompt: str | None = None
    cached_tokens: int | None = None
    pause_s: float | None = None
    request_class: str | None = None
    steps_by_accepted: Sequence[int] | None = None
    brings_results: bool | None = None
    calls_tools: bool | None = None


def calls_tools(stop: Any) -> bool | None:
    """Whether a response with this finish reason, or list of them, ends with calls of tools; None: not said."""
    reasons = [reason for reason in (stop if isinstance(stop, list) else [stop]) if isinstance(reason, str) and reason]
    return any(_CALLS.search(reason) for reason in reasons) if reasons else None


def brings_results(messages: Any) -> bool | None:
    """Whether a prompt of messages ends with results of tools; None if it is none."""
    if not isinstance(messages, list) or not messages or not isinstance(messages[-1], Mapping):
        return None
    last = messages[-1]
    content = last.get("content") or last.get("parts")
    parts = [part for part in content if isinstance(part, Mapping)] if isinstance(content, list) else []
    kinds = [part.get("type") for part in (last, *parts)]
    return last.get("role") in ("tool", "function") or bool({*map(str, kinds)} & _RESULTS)


_CALLS = re.compile("tool|function_call", re.IGNORECASE)
_RESULTS = {"tool_result", "function_call_output", "tool_call_response"}
"""Types of messages or their parts in Anthropic's Messages, OpenAI's Responses, OpenTelemetry's conventions."""


class Dropped(NamedTuple):
    """A row that is no completed request, and why; ``role``: of the column that says that the request failed."""

    line: int
    reason: str
    role: str = ""


Rows = Iterator[Recorded | Dropped]


@dataclass(frozen=True)
class ReadOptions:
    """``columns``: the roles given by ``--columns``; ``texts``: how texts become lengths."""

    texts: TextReader
    columns: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Reading:
    """A log being read: its rows, and what is known before the first one.

    ``numbers_are``/``whole_numbers_are``: see :func:`ebbench.workloads.recorded.read_time_unit`. ``block_tokens``:
    prompt tokens per hash id, None to derive it from the lengths. ``columns`` as recognised, None where the format has
    no columns to choose. ``from_texts``: its hash ids are of texts. ``notes``: what the user should know. ``ordered``:
    rows are expected in order of time. ``time_hint``: where there are no times, the columns that look like them.
    ``before``: where sessions are chains of requests, the id of each one's predecessor by its own; grows with the rows.
    """

    rows: Rows
    columns: Columns | None = None
    numbers_are: str | None = None
    whole_numbers_are: str | None = None
    block_tokens: int | None = None
    from_texts: bool = False
    notes: tuple[RunWarning, ...] = ()
    ordered: bool = True
    time_hint: str = ""
    before: Mapping[Any, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TraceFormat:
    """A format of logs. ``expected`` describes a record; ``fields`` are the names by which the nearest is found.

    ``in_folders``: its files may come as a folder, one per session. ``choices``: keys of ``--columns`` that it takes.
    """

    name: str
    expected: str
    fields: tuple[str, ...]
    recognises: Callable[[LogFile], bool]
    read: Callable[[LogFile, ReadOptions], Reading]
    in_folders: bool = False
    choices: tuple[str, ...] = ()


_EMPTY = ("", "-", "null", "None", "NaN", "nan")


def is_empty(value: Any) -> bool:
    """Whether a cell has no value: as JSON, CSV, and Python's libraries write that."""
    return value is None or value in _EMPTY or value != value


def read_tokens(log: LogFile, record: LogRecord, name: str, value: Any) -> int | None:
    """A token count, or None if the cell is empty. Raises InputFileError if it is no whole number of 0 or more."""
    if type(value) is int:
        count = value
    elif is_empty(value):
        return None
    else:
        try:
            number = math.nan if isinstance(value, bool) else float(value)
            count = int(number)
        except (TypeError, ValueError, OverflowError):
            number, count = 0.5, -1
        if count != number:
            remedy = "; write it without separators" if _SEPARATED.fullmatch(str(value)) else ""
            problem = f"expected a number of tokens in {name}, found {str(value)[:40]!r}{remedy}"
            raise InputFileError(log.path, problem, record.line)
    if not 0 <= count <= MOST_TOKENS:
        problem = f"expected 0 to {MOST_TOKENS:,} tokens in {name}, found {count}"
        raise InputFileError(log.path, problem, record.line)
    return count


def read_steps(value: Any) -> Sequence[int] | None:
    """Counts of steps by how many drafted tokens they accepted, in a list or as JSON; None for anything else."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    counts = isinstance(value, list) and all(type(count) is int and 0 <= count <= MOST_TOKENS for count in value)
    return value if counts else None


def converted(log: LogFile, line: int, value: Any, kind: Any) -> Any:
    """A nested value of a format as its type. Raises InputFileError that names the field."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        problem = str(error).replace("`", "'").replace("$.", "")
        raise InputFileError(log.path, f"is not as its format has it: {problem}", line) from None


def read_number(
    log: LogFile, line: int, what: str, name: str, value: Any, least: float = -sys.float_info.max
) -> float | None:
    """A number of at least ``least``, None for an empty cell. Raises InputFileError that says ``what`` it is."""
    if value is None or value == "":
        return None
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not (math.isfinite(number) and number >= least):
        raise InputFileError(log.path, f"expected {what} in {name}, found {str(value)[:40]!r}", line)
    return number


def read_turn(log: LogFile, line: int, name: str, value: Any) -> float | None:
    """The number of a turn, None for an empty cell. Raises InputFileError."""
    return read_number(log, line, "the number of a turn", name, value)


MOST_CLASSES = 100
"""Different values of a column of classes: one with more names requests, users or times."""


def read_class(log: LogFile, line: int, name: str, value: Any) -> str | None:
    """The class that a cell names, None for an empty one; blanks, colons and commas, which limits cannot name, become
    ``_``. Raises InputFileError for what is no name.
    """
    if is_empty(value):
        return None
    if isinstance(value, str | int | float) and len(text := visible(str(value).strip())) <= _LONGEST_CLASS:
        return sys.intern(re.sub(r"[\s:,=]+", "_", text)) or None
    problem = f"expected the name of a class in {name}, found {str(value)[:40]!r}"
    raise InputFileError(log.path, f"{problem}; --columns class=- leaves it out", line)


_LONGEST_CLASS = 60
"""Letters in the name of a class, which stands in a table."""
UNUSABLE: Mapping[str, str] = {
    "no prompt length": "input", "no output length": "output", "no prompt token": "", "no output token": "",
}  # fmt: skip
"""Reasons of :func:`unusable`, each with the role of the column that is empty then."""


def unusable(input_tokens: int | None, output_tokens: int | None) -> str:
    """Why a request with these lengths cannot be replayed; empty if it can."""
    if input_tokens is None:
        return "no prompt length"
    if output_tokens is None:
        return "no output length"
    if not input_tokens:
        return "no prompt token"
    return "" if output_tokens else "no output token"
