"""The formats of traces and logs that are recognised, most specific first. A new format is one entry of FORMATS.

A format turns records into :class:`ebbench.workloads.recorded.Recorded`; :mod:`ebbench.workloads.trace_times` decides
the unit of times and :mod:`ebbench.workloads.trace` the order, sessions and blocks, for all formats alike.
"""

from __future__ import annotations

from ebbench.errors import InputFileError, UsageError
from ebbench.workloads.column_hints import MOST_LOOKED_AT, looks_like_values
from ebbench.workloads.formats_agents import AGENTS
from ebbench.workloads.formats_columns import CHOICES, Definition, read_columns, with_columns
from ebbench.workloads.formats_datasets import DATA_SETS
from ebbench.workloads.formats_tools import TOOLS
from ebbench.workloads.log_columns import names_in, plain_name
from ebbench.workloads.log_files import LogFile
from ebbench.workloads.recorded import Reading, ReadOptions, TraceFormat

_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_BURST = ("Timestamp", "Request tokens", "Response tokens")
_BAILIAN = ("chat_id", "parent_chat_id", "timestamp", "input_length", "output_length")
_MOONCAKE = ("timestamp", "input_length", "output_length")


def _roles(names: tuple[str, ...]) -> dict[str, str]:
    return dict(zip(("time", "input", "output"), names[-3:], strict=True))


TRACES = (
    with_columns("Azure CSV", f"a table with the columns {', '.join(_AZURE)}", _AZURE, Definition(_roles(_AZURE))),
    with_columns(
        "BurstGPT CSV",
        f"a table with the columns {', '.join(_BURST)}",
        _BURST,
        # A failed request has 0 response tokens. The release with sessions has `Session ID` and `Elapsed time` in s.
        Definition({**_roles(_BURST), "session": "Session ID"}, numbers_are="s", duration="s"),
    ),
    with_columns(
        "Bailian JSON lines",
        f"JSON lines with {', '.join(_BAILIAN)}, turn and hash_ids of 16 tokens",
        _BAILIAN,
        Definition(
            _roles(_BAILIAN), numbers_are="s", block_tokens=16, parents=("chat_id", "parent_chat_id"), duration="ms"
        ),
    ),
    with_columns(
        "Mooncake JSON lines",
        "JSON lines with timestamp, input_length, output_length and optional hash_ids (Mooncake, TimedTrace)",
        _MOONCAKE,
        Definition(_roles(_MOONCAKE), whole_numbers_are="ms"),
    ),
)

_CHAT = Definition()
_ACCESS = Definition(duration="s", time_is_end=True)


def _is_access_log(log: LogFile) -> bool:
    return log.kind == "access log"


def _read_access_log(log: LogFile, options: ReadOptions) -> Reading:
    return read_columns(log, options, _ACCESS)


def _is_chat(log: LogFile) -> bool:
    names = names_in(record.value for record in log.sample)
    return any(name.rpartition(".")[2] in ("messages", "usage") for name in names)


def _read_chat(log: LogFile, options: ReadOptions) -> Reading:
    return read_columns(log, options, _CHAT)


def _is_table(log: LogFile) -> bool:
    return False  # the last resort: see format_of


def _read_table(log: LogFile, options: ReadOptions) -> Reading:
    return read_columns(log, options, Definition())


ACCESS_LOG = TraceFormat(
    "access log",
    "an access log with token counts as name=value, such as prompt_tokens=812 completion_tokens=90",
    ("time_local", "request", "status"),
    _is_access_log,
    _read_access_log,
    choices=CHOICES,
)
CHAT_LOG = TraceFormat(
    "chat log",
    "requests and responses of an OpenAI API: messages, or usage with prompt_tokens and completion_tokens",
    ("messages", "usage"),
    _is_chat,
    _read_chat,
    choices=CHOICES,
)
TABLE = TraceFormat(
    "table",
    "CSV, Parquet or JSON lines with columns such as timestamp, input_tokens, output_tokens",
    ("timestamp", "input_tokens", "output_tokens"),
    _is_table,
    _read_table,
    choices=CHOICES,
)
_LIKE = 0.6
"""Likeness of names (0 to 1) from which a format is named as the nearest."""
FORMATS = (*TOOLS, *AGENTS, *DATA_SETS, *TRACES, ACCESS_LOG, CHAT_LOG, TABLE)


def format_of(log: LogFile, options: ReadOptions) -> tuple[TraceFormat, Reading]:
    """The format of a file by its first records, and the file opened in it.

    Raises InputFileError with the nearest format if the file has neither a known schema nor columns with known names.
    """
    known = next((each for each in FORMATS if each.recognises(log)), TABLE)
    if log.parts and not known.in_folders:
        names = ", ".join(each.name for each in FORMATS if each.in_folders)
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
            max((difflib.SequenceMatcher(None, plain_name(one), name).ratio() for name in names), default=0.0)
            for one in known.fields
        ]
        return sum(best) / len(best)

    best = max((known for known in FORMATS if known.fields), key=likeness)
    return best if likeness(best) >= _LIKE else TABLE


def with_expected(formats: tuple[TraceFormat, ...] = FORMATS) -> list[tuple[str, str]]:
    """Name and description of each format, for documents and lists."""
    return [(each.name, each.expected) for each in formats if each.expected]
