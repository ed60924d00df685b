"""What is wrong with a command's surroundings, found before anything is measured."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

_PRINTED = "µ–×│━→"
"""Characters that tables and sentences hold beside ASCII."""
_PLAIN = frozenset({"--json", "--help", "-h", "--version"})
"""Options of commands that print ASCII alone, or adapt to the encoding."""
_UTF8 = "set LC_ALL=C.UTF-8"


def refusal(arguments: Sequence[str]) -> str | None:
    """Why a command with these arguments cannot give its result here, with the remedy; None if it can."""
    for text in (*arguments, _working_directory()):
        if problem := _problem_of(text):
            return problem
    return None if _PLAIN & set(arguments) else _output_problem()


def _working_directory() -> str:
    try:
        return str(Path.cwd())
    except OSError:  # removed: commands that need it say so
        return ""


def _problem_of(text: str) -> str | None:
    """Why a text from the system cannot be stored: stored files hold Unicode."""
    encoding = sys.getfilesystemencoding()
    if encoding.lower() not in ("utf-8", "utf8") and not text.isascii():
        return f"{text!a}: the locale's encoding is {encoding}, not UTF-8; {_UTF8}"
    if any("\ud800" <= letter <= "\udfff" for letter in text):  # Python's form of bytes that are not UTF-8
        return f"{text!a}: not UTF-8; rename the file or directory"
    return None


def _output_problem() -> str | None:
    try:
        _PRINTED.encode(sys.stdout.encoding or "utf-8", sys.stdout.errors or "strict")
    except (UnicodeEncodeError, LookupError):
        lacking = f"the output's encoding, {sys.stdout.encoding}, lacks characters that ebbench prints"
        return f"{lacking}; set PYTHONIOENCODING=utf-8 or LC_ALL=C.UTF-8"
    return None
