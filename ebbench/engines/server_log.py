"""Why a vLLM server ended, from its output: the first error and, where it is known, what to do."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator

from ebbench.engines.kv_memory import memory_remedy

_SOURCE = re.compile(r"^\((?:APIServer|EngineCore|Worker|Router)\w*(?: pid=\d+|[ =]\w+)*\) ?")
_LEVEL = re.compile(r"^(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] ?")
_EXCEPTION = re.compile(r"^(?:[A-Za-z_]\w*\.)*(?P<name>[A-Z]\w*)(?:: (?P<said>.*))?$")
_OPTIONS = re.compile(r"^\S[^:]*: error: (?P<said>.+)")
"""What argparse writes about a wrong option."""
_FOLLOWS = ("Engine core initialization failed", "WorkerProc initialization failed", "Failed core proc", "cancelled")
"""Errors that report another one, which another process wrote."""
_PYDANTIC = re.compile(r"^\d+ validation errors? for ")
_INPUT = re.compile(r" \[type=.*")
_PORT_TAKEN = re.compile(r"[Aa]ddress already in use")
_LONGEST = 400  # characters of an error that are shown


def first_error(output: str) -> str:
    """The first error that a server wrote, in one line; empty if it wrote none.

    That is the first exception's last line (the cause of those that follow), else what vLLM's reading of its options
    says, else the first line logged as ERROR.
    """
    lines = [_plain(line) for line in output.splitlines()]
    texts = [text for _, text in lines]
    raised = [said for said in _exceptions(texts) if not any(later in said for later in _FOLLOWS)]
    refused = [found["said"] for text in texts if (found := _OPTIONS.match(text))]
    logged = [text for level, text in lines if level in ("ERROR", "CRITICAL") and text.strip()]
    said = next(iter((*raised, *refused, *logged)), "")
    return said if len(said) <= _LONGEST else f"{said[:_LONGEST]}..."


def explain(output: str) -> str:
    """The first error and the remedy, in one line; empty if ``output`` shows no error."""
    if remedy := memory_remedy(output):
        return remedy
    said = first_error(output)
    return f"{said} (choose another --port, or end what listens there)" if _PORT_TAKEN.search(said) else said


def reason_of(error: BaseException) -> str:
    """An exception of vLLM in this process, as :func:`explain` would say it of a server's output."""
    return explain("".join(["Traceback (most recent call last):\n", *traceback.format_exception_only(error)]))


def _plain(line: str) -> tuple[str, str]:
    """A line's level, empty without one, and its text without process, level, time and place in the source."""
    text = _SOURCE.sub("", line)
    found = _LEVEL.match(text)
    return (found["level"], text[found.end() :]) if found else ("", text)


def _exceptions(lines: list[str]) -> Iterator[str]:
    """What each traceback ends with, as ``ValueError: reason``, in order."""
    inside = False
    for place, text in enumerate(lines):
        if text.startswith("Traceback (most recent call last)"):
            inside = True
        elif inside and text and not text[0].isspace() and (found := _EXCEPTION.match(text)):
            inside = False
            yield _said(found, lines[place + 1 : place + 3])


def _said(found: re.Match[str], below: list[str]) -> str:
    """An exception's name and reason. Pydantic writes the reason below the count of errors."""
    said = (found["said"] or "").strip()
    if _PYDANTIC.match(said):
        said = next((_INPUT.sub("", line.strip()) for line in below if line.startswith("  ")), said)
        return said.removeprefix("Value error, ")
    return f"{found['name']}: {said}" if said else found["name"]
