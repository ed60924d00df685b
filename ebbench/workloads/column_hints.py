"""Hints for error messages: which columns of a log look like those that were not found."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from itertools import pairwise

from ebbench.workloads.log_columns import ALIASES, plain_name, value_at
from ebbench.workloads.log_files import LogFile
from ebbench.workloads.trace_times import Stamp, parse_stamp

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


def columns_like_times(log: LogFile, names: Sequence[str]) -> list[str]:
    """Those of ``names`` whose values in the first records can be times: calendar times, or numbers that never fall."""
    possible = [name for name in names if not _COUNTS.fullmatch(plain_name(name))]
    return [name for name in possible if _like_times([value_at(name)(record.value) for record in log.sample])]


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
    return numbers[0] < numbers[-1] and all(one <= later for one, later in pairwise(numbers))


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
