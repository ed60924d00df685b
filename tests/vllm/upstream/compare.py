"""Compares the results of vLLM's tests under a policy with those on vLLM as it is."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


@dataclass(frozen=True)
class Outcome:
    """Result of one test; ``problem``: type and message of the exception, if there was one."""

    outcome: str
    problem: str = ""

    @property
    def short(self) -> str:
        """The outcome and the first line of the problem."""
        first = self.problem.strip().partition("\n")[0][:160]
        return f"{self.outcome} ({first})" if first else self.outcome


@dataclass(frozen=True)
class Expected:
    """One entry of the file of differences: tests that fail under some policies, and why they may.

    ``tests``: patterns of test ids from the file's name on. ``policies``: kinds of policies. ``problem``: what the
    failure's message contains; empty: anything. ``versions``: of vLLM; empty: all.
    """

    tests: tuple[str, ...]
    policies: tuple[str, ...]
    reason: str
    problem: str = ""
    versions: tuple[str, ...] = ()

    def covers(self, test: str, kind: str, version: str, found: Outcome) -> bool:
        """Whether this is the failure that was expected."""
        return self.is_for(kind, version) and self.names(test) and self.problem in found.problem

    def is_for(self, kind: str, version: str) -> bool:
        """Whether it is about this kind of policy on this vLLM."""
        return kind in self.policies and (not self.versions or version in self.versions)

    def names(self, test: str) -> bool:
        """Whether it is about this test."""
        return any(fnmatchcase(test.rpartition("/")[2], pattern) for pattern in self.tests)


@dataclass(frozen=True)
class Comparison:
    """One policy compared with stock vLLM: counts and differences."""

    passed: int
    skipped: int
    failed_on_both: int
    expected: Mapping[str, str]
    """Test ids and the reason of their entry."""
    unexpected: Mapping[str, str]
    """Test ids, and their results here and on stock."""
    unused: Sequence[str]
    """Entries for this policy and version without a difference."""

    @property
    def good(self) -> bool:
        """Nothing is unexpected, and every entry is needed."""
        return not self.unexpected and not self.unused


def read_expected(path: Path) -> tuple[Expected, ...]:
    """The entries of the file of differences."""
    entries = tomllib.loads(path.read_text(encoding="utf-8"))["difference"]
    found = []
    for entry in entries:
        lists: dict[str, Any] = {
            name: tuple(entry.pop(name)) for name in ("tests", "policies", "versions") if name in entry
        }
        found.append(Expected(**lists, **entry))
    return tuple(found)


def read_outcomes(path: Path) -> dict[str, Outcome]:
    """Outcomes by test id; a test that failed at any stage has failed."""
    found: dict[str, Outcome] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["test"] not in found or row["outcome"] == FAILED:
            found[row["test"]] = Outcome(row["outcome"], row["problem"])
    return found


def compare(
    stock: Mapping[str, Outcome], ours: Mapping[str, Outcome], expected: Sequence[Expected], kind: str, version: str
) -> Comparison:
    """Compare one policy's results with stock's. A test that fails on stock tells nothing about the policy."""
    known: dict[str, str] = {}
    unexpected: dict[str, str] = {}
    used: set[Expected] = set()
    for test in sorted(stock.keys() | ours.keys()):
        before, now = stock.get(test, Outcome("not run")), ours.get(test, Outcome("not run"))
        if before.outcome == now.outcome or (before.outcome == FAILED and now.outcome == PASSED):
            continue
        entry = next((one for one in expected if one.covers(test, kind, version, now)), None)
        if entry is None:
            unexpected[test] = f"{now.short}; on stock {before.short}"
        else:
            known[test] = entry.reason
            used.add(entry)
    meant = [one for one in expected if one.is_for(kind, version) and any(map(one.names, stock))]
    return Comparison(
        passed=sum(one.outcome == PASSED for one in ours.values()),
        skipped=sum(one.outcome == SKIPPED for one in ours.values()),
        failed_on_both=sum(
            one.outcome == FAILED and ours.get(test, one).outcome == FAILED for test, one in stock.items()
        ),
        expected=known,
        unexpected=unexpected,
        unused=[f"{', '.join(one.tests)} ({one.reason})" for one in meant if one not in used],
    )
