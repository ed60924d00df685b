"""What every log format yields, record by record: requests as recorded, and rows that were left out with the reason."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec
import numpy as np

from ebbench.errors import InputFileError
from ebbench.foreign.documents import visible
from ebbench.records.warnings import RunWarning
from ebbench.workloads.files import LogFile, LogRecord
from ebbench.workloads.log_columns import Columns
from ebbench.workloads.tokens import BYTES_PER_TOKEN, TokenCounter, token_counter
from ebbench.workloads.trace_times import Stamp

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


def _calls(message: Mapping[str, Any]) -> str:
    """Names and arguments of the tools that a message calls, which are tokens of the model as well."""
    calls = message.get("tool_calls") or [message.get("function_call")]
    if not isinstance(calls, Sequence):
        return ""
    functions = [call.get("function", call) for call in calls if isinstance(call, Mapping)]
    if message.get("type") == "function_call":
        functions.append(message)
    words = [
        function.get(key) for function in functions if isinstance(function, Mapping) for key in ("name", "arguments")
    ]
    return "\n".join(word for word in words if isinstance(word, str))


def answer_text(value: Any) -> str:
    """The text of a response: a string, a message, or the first choice of a completion; empty for anything else.

    Thinking and tool calls are part of it, as they are of the output tokens.
    """
    if isinstance(value, Mapping):
        if isinstance(choices := value.get("choices"), Sequence) and choices:
            return answer_text(choices[0])
        thinking = value.get("reasoning_content") or value.get("reasoning")
        own = next((value[key] for key in ("message", "body", "content", "text", "output") if value.get(key)), "")
        parts = (thinking if isinstance(thinking, str) else "", answer_text(own), _calls(value))
        return "\n".join(filter(None, parts))
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "\n".join(filter(None, map(answer_text, value)))
    return value if isinstance(value, str) else ""


_SEPARATED = re.compile(r"\d{1,3}(?:[.,' _]\d{3})+(?:[.,]\d+)?")
"""A number with thousands separators, such as ``1,234`` or ``1.234,0``."""
MOST_TOKENS = int(np.iinfo(np.int32).max)


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
    content = last.get("content")
    parts = [part for part in content if isinstance(part, Mapping)] if isinstance(content, list) else []
    kinds = [part.get("type") for part in (last, *parts)]
    return last.get("role") in ("tool", "function") or bool({*map(str, kinds)} & _RESULTS)


_CALLS = re.compile("tool|function_call", re.IGNORECASE)
_RESULTS = {"tool_result", "function_call_output"}
"""Types of messages or their parts in Anthropic's Messages and OpenAI's Responses."""


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

    ``numbers_are``/``whole_numbers_are``: see :func:`ebbench.workloads.trace_times.read_time_unit`. ``block_tokens``:
    prompt tokens per hash id, None to derive it from the lengths. ``columns`` as recognised, None where the format has
    no columns to choose. ``from_texts``: its hash ids are of texts. ``notes``: what the user should know. ``ordered``:
    rows are expected in order of time. ``time_hint``: where there are no times, the columns that look like them.
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


def read_tokens(log: LogFile, record: LogRecord, name: str, value: Any) -> int | None:
    """A token count, or None if the cell is empty. Raises InputFileError if it is no whole number of 0 or more."""
    if type(value) is int:
        count = value
    elif value is None or value in ("", "-", "null", "None", "NaN", "nan") or value != value:
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


def read_turn(log: LogFile, line: int, name: str, value: Any) -> float | None:
    """The number of a turn, None for an empty cell. Raises InputFileError."""
    if value is None or value == "":
        return None
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise InputFileError(log.path, f"expected the number of a turn in {name}, found {str(value)[:40]!r}", line)
    return number


MOST_CLASSES = 100
"""Different values of a column of classes: one with more names requests, users or times."""


def read_class(log: LogFile, line: int, name: str, value: Any) -> str | None:
    """The class that a cell names, None for an empty one; blanks, colons and commas, which limits cannot name, become
    ``_``. Raises InputFileError for what is no name.
    """
    if value is None or value == "" or value != value:
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
