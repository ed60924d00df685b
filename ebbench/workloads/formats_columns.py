"""Formats with one record per request whose columns are recognised by name: published traces, chat logs, access logs.

They have one reader; a format only adds what its definition says beyond the names (units, blocks, links of sessions).
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, pairwise
from typing import Any

from ebbench.errors import InputFileError, UsageError
from ebbench.records.warnings import RunWarning, warning
from ebbench.workloads.files import LogFile, LogRecord
from ebbench.workloads.log_columns import (
    ALIASES,
    Columns,
    failure_reader,
    names_in,
    plain_name,
    recognise,
    tells_failures,
    value_at,
)
from ebbench.workloads.recorded import (
    BLOCK_TOKENS,
    MOST_TOKENS,
    Dropped,
    Reading,
    ReadOptions,
    Recorded,
    Rows,
    Stamp,
    TraceFormat,
    answer_text,
    brings_results,
    calls_tools,
    holds_media,
    is_empty,
    joined_text,
    parse_stamp,
    read_class,
    read_number,
    read_stamp,
    read_steps,
    read_tokens,
    read_turn,
    unusable,
)

# Hints for error messages: which columns of a log look like those that were not found.

_NUMBER = re.compile(r"\s*\d+(\.0*)?\s*")
"""A prompt that is a count of tokens, not a text."""
_COUNTS = re.compile(r"|unnamed.*|index|idx|row|number|(\w*_)?id")
"""Names of columns that count rows, as the index of pandas does."""
MOST_LOOKED_AT = 300
"""Names that are compared with those known; each takes 0.1 ms."""


def nearest_columns(names: Sequence[str], role: str) -> str:
    """Names of columns most like those of a role, for an error message; empty if none is similar."""
    plain = {plain_name(name).rpartition(".")[2]: name for name in names[:MOST_LOOKED_AT]}
    close = [
        match for alias in ALIASES[role] for match in difflib.get_close_matches(alias, list(plain), n=1, cutoff=0.75)
    ]
    return ", ".join(dict.fromkeys(repr(plain[match]) for match in close[:3]))


def _like_times(values: Sequence[object]) -> bool:
    if len(values) < 2:
        return False
    stamps: list[Stamp] = []
    for value in values:
        if isinstance(value, bool):
            return False
        try:
            stamps.append(parse_stamp(value))  # type: ignore[arg-type]
        except (TypeError, ValueError):
            return False
    if all(stamp.iso for stamp in stamps):
        return True
    numbers = [stamp.value for stamp in stamps]
    return numbers[0] < numbers[-1] and all(earlier <= later for earlier, later in pairwise(numbers))


def looks_like_values(names: Sequence[str]) -> bool:
    """Whether a table's first line holds values instead of names."""
    numbers = 0
    for name in names:
        try:
            parse_stamp(name)
        except ValueError:
            continue
        numbers += 1
    return 2 * numbers > len(names)


# Turns with a delay instead of a time, as in AIPerf's sessions: each starts that long after the turn before has ended.
#
# Such a turn's length is that of its new part, and its prompt holds the session so far. Its hash ids are of that part
# too, so that they are no prefix and are not used.


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

    def placed(self, record: LogRecord, row: Recorded) -> Recorded:
        """The request with its time, pause and whole prompt. Raises InputFileError."""
        name = self.columns.names["delay"]
        value = record.value.get(name)
        delay = read_number(self.log, record.line, "a delay of 0 or more", name, value, least=0.0) or 0.0
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


_MORE = ("end", "duration", "turn", "hash_ids", "session", "cached", "class", "accepted")
"""Roles that make a row more than a time and two lengths."""
CHOICES = (*ALIASES, "block_tokens")
"""Keys of ``--columns`` that a log with columns takes."""
_STOPS = ("finish_reason", "stop_reason")
"""Last parts of the names of columns that say how a response ended, so also whether with calls of tools."""
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


@dataclass(frozen=True)
class Definition:
    """What a format's definition says beyond the names of its columns.

    ``roles``: columns that its definition gives; ``parents``: the columns of a request's id and of its predecessor's.
    ``duration``: the unit of durations without a unit in their name. ``time_is_end``: requests are logged when done.
    """

    roles: Mapping[str, str] = field(default_factory=dict)
    numbers_are: str | None = None
    whole_numbers_are: str | None = None
    block_tokens: int | None = None
    parents: tuple[str, str] | None = None
    duration: str | None = None
    time_is_end: bool = False


def with_columns(
    name: str, expected: str, fields: tuple[str, ...], definition: Definition = Definition(),
    recognises: Callable[[LogFile], bool] | None = None,
) -> TraceFormat:  # fmt: skip
    """A format of records with columns; by default recognised by having all of ``fields`` (compared as plain names)."""

    def has_fields(log: LogFile) -> bool:
        names = {plain_name(column) for column in names_in(record.value for record in log.sample)}
        return all(plain_name(column) in names for column in fields)

    def read(log: LogFile, options: ReadOptions) -> Reading:
        return read_columns(log, options, definition)

    return TraceFormat(name, expected, fields, recognises or has_fields, read, choices=CHOICES)


def read_columns(log: LogFile, options: ReadOptions, definition: Definition) -> Reading:
    """Read a log by its columns. Raises InputFileError if no column holds the prompt's or the output's length."""
    names = names_in(record.value for record in log.sample)
    defined = {
        role: next((name for name in names if plain_name(name) == plain_name(column)), "")
        for role, column in definition.roles.items()
    }
    asked = {role: column for role, column in (defined | dict(options.columns)).items() if column}
    try:
        columns = recognise(names, asked)
    except UsageError as error:
        raise InputFileError(log.path, str(error), _names_line(log)) from None
    columns = _with_fitting_values(columns, log, asked)
    _refuse_questions(log, columns, asked)
    _check(log, columns, names)
    if "block_tokens" in options.columns and not {"hash_ids", "messages", "prompt"} & columns.names.keys():
        raise UsageError(f"{log.path}: has no hash_ids, whose size --columns block_tokens= sets; leave it out")
    starts, ends = (columns.units.get(role) for role in ("time", "end"))
    if ends is not None and starts != ends:
        start, end = columns.names.get("time", "the start"), columns.names["end"]
        raise UsageError(f"{log.path}: {end} is in {ends}, {start} is not; leave it out with --columns end=-")
    reader = _Reader(log, options, definition, columns, _stops_in(names, log))
    notes = [*_notes(columns, asked, definition), *reader.notes()]
    return Reading(
        reader.rows(),
        columns=columns,
        numbers_are=columns.units.get("time", definition.numbers_are),
        whole_numbers_are=definition.whole_numbers_are,
        block_tokens=int(options.columns.get("block_tokens", 0))
        or definition.block_tokens
        or (BLOCK_TOKENS if reader.from_texts else None),
        from_texts=reader.from_texts,
        notes=tuple(notes),
        before=reader.before,
        ordered=not (definition.time_is_end and "duration" in columns.names) and reader.delays is None,
        time_hint="" if "time" in columns.names or asked.get("time") == "-" else _time_hint(log, columns, names),
    )


def _time_hint(log: LogFile, columns: Columns, names: list[str]) -> str:
    """Columns that look like times, as a clause for a message; empty if there are none."""
    unused = [name for name in names if name not in (*columns.names.values(), *chain(*columns.added.values()))]
    possible = [name for name in unused if not _COUNTS.fullmatch(plain_name(name))]
    columns_of_times = [
        name for name in possible if _like_times([value_at(name)(record.value) for record in log.sample])
    ]
    if not columns_of_times:
        return ""
    look = "looks like its times" if len(columns_of_times) == 1 else "look like times"
    return f"{', '.join(map(repr, columns_of_times[:3]))} {look}: --columns time={columns_of_times[0]}"


def _with_fitting_values(columns: Columns, log: LogFile, asked: Mapping[str, str]) -> Columns:
    """Leave out columns that are named like texts or a status and hold neither, as ``output`` or ``code`` may."""
    names = dict(columns.names)
    for role, reads in (("messages", joined_text), ("prompt", joined_text), ("answer", answer_text)):
        get = value_at(names.get(role))
        if role in names and not any(reads(get(record.value)) for record in log.sample):
            del names[role]
    prompts = [value_at(names.get("prompt"))(record.value) for record in log.sample]
    if "prompt" in names and "prompt" not in asked and all(map(_NUMBER.fullmatch, map(str, prompts))):
        names = {role: column for role, column in names.items() if role not in ("prompt", "answer")}
    if "status" in names and "status" not in asked and not tells_failures(names["status"], log):
        del names["status"]
    if "delay" in names and not has_delays(names, log, asked):
        del names["delay"]
    return replace(columns, names=names)


def holds_answers(names: Mapping[str, str], log: LogFile) -> bool:
    """Whether the last message is the answer, since no column holds it."""
    if {"output", "answer"} & names.keys():
        return False
    get = value_at(names.get("messages"))
    return any(without_answer(get(record.value))[1] for record in log.sample)


def without_answer(messages: Any) -> tuple[Any, Any]:
    """The messages before the last one and that one, if the assistant says it; else all of them and None."""
    if not isinstance(messages, list) or not messages or not isinstance(messages[-1], Mapping):
        return messages, None
    return (messages[:-1], messages[-1]) if messages[-1].get("role") == "assistant" else (messages, None)


def _names_line(log: LogFile) -> int:
    """The line that has the names of columns: a table's header, or the first record."""
    return log.sample[0].line if log.kind != "CSV" else 1


def _check(log: LogFile, columns: Columns, names: list[str]) -> None:
    have = columns.names
    line = _names_line(log)
    for role, texts, what in (
        ("input", ("messages", "prompt"), "prompt tokens"),
        ("output", ("answer",), "output tokens"),
    ):
        if role in have or any(text in have for text in texts) or (role == "output" and holds_answers(have, log)):
            continue
        like = nearest_columns([name for name in names if name not in have.values()], role)
        hint = f"; {like} looks like it" if like else ""
        listed = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        raise InputFileError(log.path, f"no column with {what} among {listed}{hint}", line)
    if "session" in have and not {"time", "turn", "delay"} & have.keys():
        problem = (
            f"column {have['session']!r} groups requests into sessions, and neither a time nor a turn orders them; "
            "give --columns turn=COLUMN or time=COLUMN, or session=- for single requests"
        )
        raise InputFileError(log.path, problem, line)


def _stops_in(names: Iterable[str], log: LogFile) -> Iterator[str]:
    """Columns that say how a response ended; of a completion its first choice. ``stop`` may also be what ends an answer
    by the user's wish: it counts where it is one word."""
    for name in names:
        last = plain_name(name).rpartition(".")[2]
        if last in _STOPS:
            yield name
        elif last == "choices":
            yield f"{name}.0.finish_reason"
        elif plain_name(name) == "stop":
            known = [value for record in log.sample if (value := record.value.get(name)) is not None]
            if all(isinstance(value, str) and re.fullmatch(r"\w*", value) for value in known):
                yield name


def _notes(columns: Columns, asked: Mapping[str, str], definition: Definition) -> Iterator[RunWarning]:
    if columns.passed_over:
        yield warning("columns-passed-over", columns=list(columns.passed_over))
    if {"duration", "session"} <= columns.names.keys() and not (columns.units.get("duration") or definition.duration):
        yield warning("duration-without-unit", column=columns.names["duration"])
    if "user" in columns.names and "session" not in columns.names and asked.get("session") != "-":
        yield warning("users-are-no-sessions", column=columns.names["user"])
    for role, added in columns.added.items():
        yield warning("columns-added", role=role, column=columns.names[role], added=list(added))
    if definition.time_is_end and "duration" not in columns.names:
        yield warning("times-are-ends")


class _Reader:
    """Converts records to requests, with the columns' functions looked up once."""

    def __init__(
        self, log: LogFile, options: ReadOptions, definition: Definition, columns: Columns, stops: Iterable[str]
    ) -> None:
        self._log, self._texts, self._definition, self._columns = log, options.texts, definition, columns
        have = columns.names
        self.from_texts = "hash_ids" not in have and ("messages" in have or "prompt" in have)
        self._prompt = columns.getter("messages" if "messages" in have else "prompt")
        self._answered = holds_answers(have, log)
        self._answer, self._failure = columns.getter("answer"), failure_reader(columns, log)
        self._end, self._lasts, self._turns, self._hash_ids = (columns.getter(role) for role in _MORE[:4])
        self._session, self._cached = _name_getter(columns.getter("session")), columns.getter("cached")
        self.before: dict[Any, Any] = {}
        self._linked = "session" not in have and definition.parents is not None
        if self._linked and definition.parents is not None:  # a request's session is its chain of predecessors
            self._session, self._parent = (_name_getter(value_at(name)) for name in definition.parents)
        self._class, self._accepted = columns.getter("class"), columns.getter("accepted")
        self._added = [[(name, value_at(name)) for name in columns.added.get(role, ())] for role in ("input", "output")]
        self._stops = [value_at(name) for name in stops]
        # A prompt that is counted from its messages is whole; a length is of what the turn adds.
        self.delays = Delays(log, columns, not self.from_texts) if "delay" in have else None
        self._seconds = _SECONDS.get(columns.units.get("duration", definition.duration or ""))

    def notes(self) -> Iterator[RunWarning]:
        """How the rows are read."""
        if self.delays is not None:
            column = self._columns.names["delay"]
            yield warning("turns-by-delay", column=column, lengths_add=self.delays.lengths_add)
        if self._answered:
            yield warning("last-message-is-answer")
        if "input" not in self._columns.names and any(holds_media(self._prompt(row.value)) for row in self._log.sample):
            yield warning("texts-only")

    def rows(self) -> Rows:
        """All records, completed requests and dropped ones."""
        inputs_of, outputs_of, time_of = (self._columns.getter(role) for role in ("input", "output", "time"))
        names = self._columns.names
        added = any(self._added)
        more = self.from_texts or self._definition.parents is not None or any(role in names for role in _MORE)
        for record in self._log.records():
            value = record.value
            if self._linked and (request := self._session(value)) is not None:
                self.before[request] = self._parent(value)
            if failed := self._failure(value):
                yield Dropped(record.line, *failed)
                continue
            inputs, outputs, text = self._lengths(record, inputs_of(value), outputs_of(value))
            if added:
                inputs, outputs = map(partial(self._with_added, record), (inputs, outputs), self._added)
            if not inputs or not outputs:
                yield Dropped(record.line, unusable(inputs, outputs))
                continue
            row = Recorded(record.line, self._stamp(record, "time", time_of(value)), inputs, outputs)
            row = self._completed(record, row, text) if more else row
            yield row if self.delays is None else self.delays.placed(record, row)

    def _with_added(self, record: LogRecord, tokens: int | None, added: list[tuple[str, Any]]) -> int | None:
        """A count with those of the columns that it does not include."""
        if tokens is None:
            return None
        return tokens + sum(read_tokens(self._log, record, name, get(record.value)) or 0 for name, get in added)

    def _completed(self, record: LogRecord, row: Recorded, text: str) -> Recorded:
        """The request with its end, session and prefix."""
        value = record.value
        end = self._stamp(record, "end", self._end(value))
        lasted, stamp = self._duration(self._lasts(value)), row.stamp
        if self._definition.time_is_end and stamp is not None and lasted is not None:
            stamp, end = stamp._replace(value=stamp.value - lasted), stamp
        blocks = self._texts.prefix_ids(text, row.input_tokens) if self.from_texts else self._hash_ids(value)
        names = self._columns.names
        cached = read_tokens(self._log, record, names.get("cached", "cached"), self._cached(value))
        turn = read_turn(self._log, record.line, names.get("turn", "turn"), self._turns(value))
        return Recorded(
            row.line, stamp, row.input_tokens, row.output_tokens, self._blocks(record, blocks), self._session(value),
            turn, end, lasted, text if self._texts.keep and text else None, cached,
            request_class=read_class(self._log, record.line, names.get("class", "class"), self._class(value)),
            steps_by_accepted=read_steps(self._accepted(value)),
            brings_results=brings_results(self._prompt_of(value)) if self.from_texts else None,
            calls_tools=next((said for stop in self._stops if (said := calls_tools(stop(value))) is not None), None),
        )  # fmt: skip

    def _lengths(self, record: LogRecord, inputs: Any, outputs: Any) -> tuple[int | None, int | None, str]:
        """Token counts from the columns, or counted from the texts, and the prompt's text."""
        names = self._columns.names
        input_tokens = read_tokens(self._log, record, names.get("input", "input"), inputs)
        output_tokens = read_tokens(self._log, record, names.get("output", "output"), outputs)
        if not self.from_texts and output_tokens is not None:
            return input_tokens, output_tokens, ""
        prompt, answer = self._prompt_of(record.value), self._answer(record.value)
        if self._answered:
            answer = without_answer(self._prompt(record.value))[1]
        text = joined_text(prompt) if self.from_texts else ""
        if input_tokens is None and text:
            input_tokens = self._texts.tokens(text)
        if output_tokens is None and (answered := answer_text(answer)):
            output_tokens = self._texts.tokens(answered)
        return input_tokens, output_tokens, text

    def _prompt_of(self, record: Mapping[str, Any]) -> Any:
        """The text or messages of a record's prompt, without an answer that ends them."""
        prompt = self._prompt(record)
        return without_answer(prompt)[0] if self._answered else prompt

    def _stamp(self, record: LogRecord, role: str, value: Any) -> Stamp | None:
        if value is None:
            if role == "time" and role in self._columns.names and self.delays is None:
                name = self._columns.names[role]
                raise InputFileError(self._log.path, f"expected a time in {name}, found none", record.line)
            return None
        try:
            return read_stamp(value)
        except ValueError as error:
            remedy = "" if str(value).strip() else f"; --columns {role}=- reads the log without this column"
            raise InputFileError(self._log.path, f"{self._columns.names[role]} {error}{remedy}", record.line) from None

    def _duration(self, value: Any) -> float | None:
        """Seconds, None if the column has no unit or the cell no number."""
        if value is None or self._seconds is None:
            return None
        try:
            lasted_s = float(value) * self._seconds
        except (TypeError, ValueError, OverflowError):
            return None
        return lasted_s if math.isfinite(lasted_s) else None

    def _blocks(self, record: LogRecord, value: Any) -> list[int | str] | None:
        if value is None or value == "":
            return None
        if not isinstance(value, list) or not {*map(type, value)} <= {int, str}:
            problem = f"expected a list of whole numbers or texts, found {str(value)[:60]!r}"
            raise InputFileError(self._log.path, problem, record.line)
        return value


def _name_getter(get: Callable[[Mapping[str, Any]], Any]) -> Callable[[Mapping[str, Any]], Any]:
    """The name that a column gives, None if it is empty; one that is a list or an object as text."""

    def name(record: Mapping[str, Any]) -> Any:
        value = get(record)
        if is_empty(value):
            return None
        return value if isinstance(value, str | int | float) else str(value)

    return name


_QUESTIONS = ("question", "query", "instruction")


def _refuse_questions(log: LogFile, columns: Columns, asked: Mapping[str, str]) -> None:
    """Raise InputFileError for questions and answers with neither times nor token counts: a data set, not traffic."""
    have = columns.names
    if have.keys() & {"input", "output", "time", "end", "messages", "session"} or "prompt" in asked:
        return
    prompt, answer = have.get("prompt", ""), have.get("answer", "ANSWER")
    if plain_name(prompt).rpartition(".")[2] in _QUESTIONS:
        problem = "is a table of questions and answers, not a log: it has neither times nor token counts"
        remedy = f"to send its texts all the same, name them: --columns prompt={prompt},answer={answer}"
        raise InputFileError(log.path, f"{problem}; {remedy}", _names_line(log))


# Data sets given as logs: LongBench v2 is read; of the others, the error says how their texts are sent.


def _messages_with(name: str, *keys: str) -> Callable[[LogFile], bool]:
    """Whether the first record has a list under ``name`` of messages with these keys, and no token counts."""

    def recognises(log: LogFile) -> bool:
        messages = log.sample[0].value.get(name)
        return isinstance(messages, list) and bool(messages) and _has_texts(messages[0], keys)

    return recognises


def _fields(*names: str) -> Callable[[LogFile], bool]:
    return lambda log: _has_texts(log.sample[0].value, names)


def _has_texts(value: Any, names: tuple[str, ...]) -> bool:
    return isinstance(value, Mapping) and all(isinstance(value.get(name), str) for name in names)


def _without_counts(log: LogFile) -> bool:
    columns = recognise(names_in(record.value for record in log.sample), {})
    return not {"input", "output"} <= columns.names.keys()


def _data_set(name: str, workload: str, recognises: Callable[[LogFile], bool], hint: str = "") -> TraceFormat:
    """A data set that a bundled workload reads; as a log only by the columns that the user names."""

    def read(log: LogFile, options: ReadOptions) -> Reading:
        if options.columns:
            return read_columns(log, options, Definition())
        command = f"ebbench run {workload} --source file:{log.path}"
        problem = f"is {name}, a data set without token counts and no log; send its texts with: {command}{hint}"
        raise InputFileError(log.path, problem)

    return TraceFormat(
        f"{name} data set", "", (), lambda log: recognises(log) and _without_counts(log), read, choices=CHOICES
    )


_ROUNDS = " (conversations of 6 to 12 rounds; a copy of workloads/wildchat.toml with another rounds_min takes others)"
_LETTERS = ("choice_A", "choice_B", "choice_C", "choice_D")


def _read_longbench_v2(log: LogFile, options: ReadOptions) -> Reading:
    return Reading(
        _longbench_v2_rows(log, options), block_tokens=BLOCK_TOKENS, from_texts=True,
        notes=(warning("longbench-v2"),),
    )  # fmt: skip


def _longbench_v2_rows(log: LogFile, options: ReadOptions) -> Rows:
    texts = options.texts
    for record in log.records():
        parts = [record.value.get(name) for name in ("context", "question", *_LETTERS)]
        prompt, answer = "\n".join(part for part in parts if isinstance(part, str)), record.value.get("answer")
        inputs = texts.tokens(prompt) if prompt else None
        outputs = texts.tokens(answer) if isinstance(answer, str) and answer else None
        if not inputs or not outputs:
            yield Dropped(record.line, unusable(inputs, outputs))
            continue
        ids = texts.prefix_ids(prompt, inputs)
        yield Recorded(record.line, None, inputs, outputs, ids, prompt=prompt if texts.keep else None)


DATA_SETS = (
    _data_set("ShareGPT", "sharegpt", _messages_with("conversations", "from", "value")),
    _data_set("WildChat or LMSYS-Chat", "wildchat", _messages_with("conversation", "role", "content"), _ROUNDS),
    _data_set("NuminaMath", "numinamath", _fields("problem", "solution")),
    _data_set(
        "LongBench",
        "longbench",
        lambda log: _fields("context", "input")(log) and isinstance(log.sample[0].value.get("answers"), list),
    ),
    TraceFormat(
        "LongBench v2",
        "",
        (),
        _fields("question", "choice_A", "context", "answer"),
        _read_longbench_v2,
    ),
)
