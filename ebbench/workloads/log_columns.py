"""Which column of a log holds what: by recognised names, or as ``--columns input=...,output=...,time=...`` says.

A role is what a column means to a plan. Names are compared without regard to case and punctuation (``ContextTokens``,
``context-tokens`` and ``context_tokens`` are one name); a value inside nested objects has a name with dots
(``response.usage.prompt_tokens``), and its last part is recognised too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from ebbench.errors import UsageError
from ebbench.foreign.documents import read_toml
from ebbench.workloads.files import LogFile
from vllm_eb.settings import name_hint

_KNOWN = msgspec.convert(read_toml(Path(__file__).with_name("log_columns.toml")), dict[str, dict[str, tuple[str, ...]]])
ALIASES: Mapping[str, tuple[str, ...]] = _KNOWN["names"]
"""Recognised names per role, the preferred first. Units stand in the name: ``start_ns``, ``latency_ms``."""
_NO_ERROR, _UNSUCCESSFUL = (frozenset(_KNOWN["values"][name]) for name in ("no_error", "unsuccessful"))

# Which rows of a log are failed requests: by a status, an error or a flag of success, under usual names.

ROLES = ("status", "error", "success")
"""Roles that tell failed requests; ``--columns status=-`` keeps the rows that a role would leave out."""
_FAILED = re.compile(
    r"(?<!no_)(?<!no )error|fail|cancel|abort|time_?d?[ _]?out|reject|incomplete|exception|refused|unavailable|denied"
    r"|overload|dropped|killed|unsuccessful|not ok|^ko$|^[45]xx$|^false$"
)
_COMPLETED = re.compile(
    r"ok|success|complete|done|finish|^[123]xx$|^true$|^stop|^length$|tool_calls|content_filter|^eos|end_turn|max_tokens"
    r"|function_call"
)
_HTTP = re.compile(r"(\d{3})(?:\.0)?(?:\s.*)?")
"""A code of HTTP, also as pandas writes it (500.0) or with its reason (503 Service Unavailable)."""
_ALSO_OTHER = ("code", "sc", "outcome", "state", "result", "finish_reason", "stop_reason")
"""Names of a status that also have other meanings: the values must be those of a status."""


def failure_reader(columns: Columns, log: LogFile) -> Callable[[Mapping[str, Any]], tuple[str, str] | None]:
    """A function that returns why a record's request failed, with the role that says so; None if it did not."""
    status = columns.getter("status")
    http = any(_HTTP.fullmatch(_lower_text(status(record.value))) for record in log.sample)
    readers = {"status": _failed_http if http else _failed_status, "error": _error, "success": _unsuccessful}
    checks = [(role, columns.getter(role), readers[role]) for role in ROLES if role in columns.names]

    def failure(record: Mapping[str, Any]) -> tuple[str, str] | None:
        return next(((reason, role) for role, get, read in checks if (reason := read(get(record)))), None)

    return failure


def tells_failures(column: str, log: LogFile) -> bool:
    """Whether a column named like a status holds one; a name without another meaning always does."""
    if plain_name(column).rpartition(".")[2] not in _ALSO_OTHER:
        return True
    get = value_at(column)
    values = [value for record in log.sample if (value := get(record.value)) not in (None, "")]
    return bool(values) and all(type(known) in (str, int, float) and _is_status(_lower_text(known)) for known in values)


def keeps_failed(failed_by: Collection[str], columns: Mapping[str, str]) -> str:
    """The option that keeps failed rows, as ``--columns status=-``; empty if no column left them out."""
    roles = [role for role in ROLES if role in columns and role in failed_by]
    return f"--columns {','.join(f'{role}=-' for role in roles)}" if roles else ""


def _lower_text(value: object) -> str:
    return str(value).strip().lower()


@lru_cache(maxsize=1024)
def _is_status(text: str) -> bool:
    if code := _HTTP.fullmatch(text):
        return 100 <= int(code[1]) <= 599
    return len(text) <= 30 and bool(_FAILED.search(text) or _COMPLETED.search(text))


def _failed_status(value: Any) -> str:
    return _failed_text(_lower_text(value)) if isinstance(value, str | int | float) else ""


def _failed_http(value: Any) -> str:
    """As for any status; among codes of HTTP, 0 is a request without an answer."""
    return f"status {value}" if _lower_text(value) in ("0", "000", "0.0", "-1") else _failed_status(value)


@lru_cache(maxsize=1024)
def _failed_text(text: str) -> str:
    if code := _HTTP.fullmatch(text):
        return f"status {code[1]}" if int(code[1]) >= 400 else ""
    return f"status {text[:30]}" if _FAILED.search(text) else ""


def _error(value: Any) -> str:
    if value in (None, False, 0, {}, []) or value != value:
        return ""
    text = _lower_text(value)
    code = _HTTP.fullmatch(text)
    return "" if text in _NO_ERROR or (code and int(code[1]) < 400) else "an error"


def _unsuccessful(value: Any) -> str:
    return "success false" if value is not None and _lower_text(value) in _UNSUCCESSFUL else ""


_UNIT = re.compile(r"_(ns|us|ms|s|sec|secs|seconds|milliseconds)$")
_UNITS = {"sec": "s", "secs": "s", "seconds": "s", "milliseconds": "ms"}
_TIMES = ("time", "end", "duration", "delay")
NUMBERS = ("block_tokens", "benchmark")
"""Keys of ``--columns`` whose value is a number instead of a column."""
_PARTS = {
    "input_tokens": ("cache_read_input_tokens", "cache_creation_input_tokens", "cache_write_input_tokens"),
    "input_token_count": ("cache_read_input_token_count", "cache_write_input_token_count"),
    "candidates_token_count": ("thoughts_token_count",),
}
"""Counts, and those beside them that they do not include, as the APIs of Anthropic, Bedrock and Gemini define them."""


@dataclass(frozen=True)
class Columns:
    """The column of each role found, the unit that its name states (times only), and other columns with such names.

    ``added``: columns whose tokens are added to those of a role's column, by role.
    """

    names: Mapping[str, str]
    units: Mapping[str, str]
    passed_over: tuple[str, ...] = ()
    added: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def getter(self, role: str) -> Callable[[Mapping[str, Any]], Any]:
        """A function that returns the role's value in a record, None if it is missing."""
        return value_at(self.names.get(role))


def value_at(name: str | None) -> Callable[[Mapping[str, Any]], Any]:
    """A function that returns the value of a column, or with dots of a nested one; None if it is missing."""
    if name is None:
        return lambda record: None
    if "." not in name:
        return lambda record: record.get(name)
    parts = name.split(".")

    def get(record: Mapping[str, Any]) -> Any:
        if name in record:
            return record[name]
        value: Any = record
        for part in parts:
            if type(value) is dict:
                value = value.get(part)
            elif isinstance(value, list) and part.isdigit() and int(part) < len(value):
                value = value[int(part)]
            else:
                return None
        return value

    return get


@lru_cache(maxsize=65_536)
def plain_name(name: str) -> str:
    """``ContextTokens``, ``Context Tokens`` and ``context-tokens`` as ``context_tokens``; dots stay."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return re.sub(r"[^a-z0-9.]+", "_", spaced.lower()).strip("_")


def parse_columns(text: str | None) -> dict[str, str]:
    """``input=a,output=b`` as a mapping from role to column. Raises UsageError."""
    by_role: dict[str, str] = {}
    for pair in filter(None, (text or "").split(",")):
        role, equals, column = (part.strip() for part in pair.partition("="))
        if not equals or not column:
            raise UsageError(f"--columns takes role=column pairs, as input=prompt_tokens,output=answer, not {pair!r}")
        if role not in ALIASES and role not in NUMBERS:
            raise UsageError(f"--columns knows no {role!r}; {name_hint(role, (*ALIASES, *NUMBERS))}")
        if role in NUMBERS and not (column.isdigit() and int(column)):
            raise UsageError(f"--columns {role}= takes a positive whole number, not {column!r}")
        if role in by_role:
            raise UsageError(f"--columns names {role} twice")
        by_role[role] = column
    return by_role


def names_in(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """Column names of the records, nested ones with dots, in order of appearance."""
    names: dict[str, None] = {}
    for record in records:
        _collect(record, "", names, 0)
    return list(names)


_MOST_NESTED, _MOST_NAMES = 200, 5_000
"""Keys of a nested object, and names in all, from which on nested ones are data, such as probabilities by token."""


def _collect(value: Mapping[str, Any], prefix: str, names: dict[str, None], depth: int) -> None:
    for key, inner in value.items():
        name = f"{prefix}{key}"
        names.setdefault(name)
        if isinstance(inner, Mapping) and depth < 5 and len(inner) <= _MOST_NESTED and len(names) < _MOST_NAMES:
            _collect(inner, f"{name}.", names, depth + 1)


def recognise(names: Sequence[str], asked: Mapping[str, str]) -> Columns:
    """The columns of the roles: as ``asked``, otherwise by name. A value of ``-`` leaves a role out.

    Raises UsageError if a column that was asked for does not exist, or would have two roles.
    """
    chosen: dict[str, str] = {}
    also_named: list[str] = []
    units: dict[str, str] = {}
    for role in ALIASES:
        if (column := asked.get(role)) is not None:
            if column == "-":
                continue
            if role_of := next((other_role for other_role, taken in chosen.items() if taken == column), None):
                raise UsageError(f"column {column!r} cannot be both {role_of} and {role}; --columns gives each its own")
            if column not in names:
                shown = ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
                raise UsageError(f"has no column {column!r} for --columns {role}=; its columns are {shown}")
            chosen[role] = column
        else:
            matches = _matches(role, names, asked.values())
            if matches:
                chosen[role] = matches[0]
                also_named += matches[1:] if role in ("input", "output", "time", "session") else []
        if role in _TIMES and role in chosen and (unit := _UNIT.search(plain_name(chosen[role]))):
            units[role] = _UNITS.get(unit[1], unit[1])
    counts: list[str] = [role for role in ("input", "output") if role in chosen and role not in asked]
    parts = {role: _parts_of(chosen[role], names) for role in counts}
    added = {role: columns for role, columns in parts.items() if columns}
    return Columns(chosen, units, tuple(also_named), added)


def _parts_of(column: str, names: Sequence[str]) -> tuple[str, ...]:
    """The columns beside ``column`` whose tokens it does not include."""
    outer, _, last = column.rpartition(".")
    parts = _PARTS.get(plain_name(last), ())
    beside = {
        plain_name(inner): name
        for name in names
        for where, _, inner in [name.rpartition(".")]
        if parts and where == outer
    }
    return tuple(beside[part] for part in parts if part in beside)


def _matches(role: str, names: Sequence[str], taken: Iterable[str]) -> list[str]:
    """Columns with a name of this role, the preferred alias and the outermost first."""
    used = set(taken)
    rank = {alias: place for place, alias in enumerate(ALIASES[role])}
    ranked = []
    for place, name in enumerate(names):
        if name in used:
            continue
        plain = plain_name(name).rpartition(".")[2]
        if role in _TIMES and plain not in rank:
            plain = _UNIT.sub("", plain)
        if plain in rank:
            ranked.append((name.count("."), rank[plain], place, name))
    return [name for *_, name in sorted(ranked)]
