"""Errors shown to the user, one exit code per class.

::

    EbbenchError               exit 4   the run could not be carried out
    |- UsageError              exit 2   bad usage or input; the message says what to do
    |  |- UnknownNameError     exit 2   a workload, policy, device, model or key that does not exist
    |  `- InputFileError       exit 2   a file in the wrong format; names the file and the line
    |- DataError               exit 3   stored data invalid, missing or not comparable
    |- RunError                exit 4   the run failed or is INVALID
    `- InterruptedRunError     exit 130 interrupted by the user; measurements so far are kept

Exit codes 1 (regression) and 5 (inconclusive) are verdicts of the gate, not errors; 141 is a closed pipe.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from vllm_eb.settings import name_hint


class EbbenchError(Exception):
    """Base of every error shown to the user as one line."""

    exit_code = 4

    def __reduce__(self) -> tuple[Any, ...]:
        # Python would rebuild a worker's error from its message alone and lose the other attributes.
        return _remade, (type(self), self.args, self.__dict__)


def _remade(kind: type[EbbenchError], args: tuple[Any, ...], state: dict[str, Any]) -> EbbenchError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class UsageError(EbbenchError):
    """Bad usage or bad input."""

    exit_code = 2


class UnknownNameError(UsageError):
    """A name that does not exist; the message suggests the nearest known name."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        choices = sorted(known)
        super().__init__(f"unknown {kind} {name!r}; {name_hint(name, choices)}")
        self.kind, self.name, self.known = kind, name, choices


def check_known(kind: str, name: str, known: Collection[str]) -> None:
    """Raise UnknownNameError unless ``name`` is among the known ones."""
    if name not in known:
        raise UnknownNameError(kind, name, known)


class InputFileError(UsageError):
    """A file that does not have the expected format."""

    def __init__(self, path: Path | str, problem: str, line: int | None = None) -> None:
        where = f"{path}:{line}" if line is not None else f"{path}"
        super().__init__(f"{where}: {problem}")
        self.path, self.line = Path(path), line


class DataError(EbbenchError):
    """Stored data that is invalid, missing or not comparable."""

    exit_code = 3


class RunError(EbbenchError):
    """The run could not be carried out, or is INVALID."""

    exit_code = 4


class InterruptedRunError(EbbenchError):
    """The user stopped the run; finished measurements are kept."""

    exit_code = 130
