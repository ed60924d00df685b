"""Which rows of a log are failed requests: by a status, an error or a flag of success, under usual names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from ebbench.workloads.log_columns import Columns, plain_name, value_at
from ebbench.workloads.log_files import LogFile

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
_NOTHING = {
    "",
    "-",
    "null",
    "none",
    "nan",
    "n/a",
    "na",
    "false",
    "f",
    "no",
    "n",
    "0",
    "0.0",
    "ok",
    "success",
    "{}",
    "[]",
}
"""Values of an error's column without an error, in small letters."""


def failure_of(columns: Columns, log: LogFile) -> Callable[[Mapping[str, Any]], str]:
    """A function that returns why a record's request failed, empty if it did not."""
    status = columns.getter("status")
    http = any(_HTTP.fullmatch(_plain(status(record.value))) for record in log.sample)
    readers = {"status": _failed_http if http else _failed_status, "error": _error, "success": _unsuccessful}
    checks = [(columns.getter(role), readers[role]) for role in ROLES if role in columns.names]

    def failure(record: Mapping[str, Any]) -> str:
        return next((reason for get, read in checks if (reason := read(get(record)))), "")

    return failure


def tells_failures(column: str, log: LogFile) -> bool:
    """Whether a column named like a status holds one; a name without another meaning always does."""
    if plain_name(column).rpartition(".")[2] not in _ALSO_OTHER:
        return True
    get = value_at(column)
    values = [value for record in log.sample if (value := get(record.value)) not in (None, "")]
    return bool(values) and all(type(one) in (str, int, float) and _is_status(_plain(one)) for one in values)


def keeps_failed(reasons: Mapping[str, Any], columns: Mapping[str, str]) -> str:
    """The option that keeps failed rows, as ``--columns status=-``; empty if no column left them out."""
    roles = [role for role in ROLES if role in columns and any(reason.startswith(_BEGINS[role]) for reason in reasons)]
    return f"--columns {','.join(f'{role}=-' for role in roles)}" if roles else ""


_BEGINS = {"status": "status ", "error": "an error", "success": "success false"}


def _plain(value: object) -> str:
    return str(value).strip().lower()


@lru_cache(maxsize=1024)
def _is_status(text: str) -> bool:
    if code := _HTTP.fullmatch(text):
        return 100 <= int(code[1]) <= 599
    return len(text) <= 30 and bool(_FAILED.search(text) or _COMPLETED.search(text))


def _failed_status(value: Any) -> str:
    return _failed_text(_plain(value)) if isinstance(value, str | int | float) else ""


def _failed_http(value: Any) -> str:
    """As for any status; among codes of HTTP, 0 is a request without an answer."""
    return f"status {value}" if _plain(value) in ("0", "000", "0.0", "-1") else _failed_status(value)


@lru_cache(maxsize=1024)
def _failed_text(text: str) -> str:
    if code := _HTTP.fullmatch(text):
        return f"status {code[1]}" if int(code[1]) >= 400 else ""
    return f"status {text[:30]}" if _FAILED.search(text) else ""


def _error(value: Any) -> str:
    if value in (None, False, 0, {}, []) or value != value:
        return ""
    text = _plain(value)
    code = _HTTP.fullmatch(text)
    return "" if text in _NOTHING or (code and int(code[1]) < 400) else "an error"


def _unsuccessful(value: Any) -> str:
    return "success false" if value is not None and _plain(value) in _UNSUCCESSFUL else ""


_UNSUCCESSFUL = {"false", "f", "no", "n", "0", "0.0", "failed", "error", "ko"}
