"""Trace formats: Azure's CSV and Mooncake's JSON lines, recognised by the first line.

A format converts lines to :class:`Recorded`. To add a format, add a :class:`TraceFormat` to FORMATS;
:mod:`ebbench.workloads.trace_times` decides the unit of times for all formats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from ebbench.errors import InputFileError
from ebbench.records.content import CHUNK_TOKENS
from ebbench.workloads.trace_times import Stamp, parse_stamp

AZURE_HEADER = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_MOST_TOKENS = np.iinfo(np.int32).max
Line = tuple[int, str]
"""A line that is not empty, with its number in the file."""


@dataclass(frozen=True)
class Recorded:
    """One request as recorded. ``hash_ids``: identities of its prompt's blocks, if known."""

    stamp: Stamp
    input_tokens: int
    output_tokens: int
    hash_ids: list[int] | None = None


@dataclass(frozen=True)
class TraceFormat:
    """``recognises`` checks the first line; ``read`` converts all lines and raises InputFileError with the line number.

    ``whole_numbers_are``: unit of whole numbers among its times; None if the format does not define one.
    """

    name: str
    expected: str
    recognises: Callable[[str], bool]
    read: Callable[[Path, Sequence[Line]], Iterator[Recorded]]
    whole_numbers_are: str | None = None


def format_of(path: Path, first: Line) -> TraceFormat:
    """The format of a file by its first line. Raises InputFileError if it is none of FORMATS."""
    number, line = first
    for known in FORMATS:
        if known.recognises(line):
            return known
    raise InputFileError(path, f"is not a trace: expected {' or '.join(each.expected for each in FORMATS)}", number)


def _columns(line: str) -> list[str]:
    return [cell.strip().strip('"') for cell in line.split(",")]


def _is_azure(line: str) -> bool:
    return _columns(line)[:3] == list(AZURE_HEADER)


def _azure(path: Path, lines: Sequence[Line]) -> Iterator[Recorded]:
    for number, line in lines[1:]:
        cells = _columns(line)
        try:
            stamp, context, generated = parse_stamp(cells[0]), int(cells[1]), int(cells[2])
        except (ValueError, IndexError):
            problem = f"expected time, context tokens and generated tokens, found {line.strip()[:80]!r}"
            raise InputFileError(path, problem, number) from None
        _check_lengths(path, number, context, generated)
        yield Recorded(stamp, context, generated)


class MooncakeRow(msgspec.Struct, frozen=True):
    """One line: time, token counts, and identities of the prompt's blocks of CHUNK_TOKENS tokens."""

    timestamp: int | float | str
    input_length: int
    output_length: int
    hash_ids: list[int] | None = None


_MOONCAKE = msgspec.json.Decoder(MooncakeRow)


def _is_mooncake(line: str) -> bool:
    return line.lstrip().startswith("{")


def _mooncake(path: Path, lines: Sequence[Line]) -> Iterator[Recorded]:
    for number, line in lines:
        try:
            row = _MOONCAKE.decode(line)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            problem = str(error).replace("`", "'")
            raise InputFileError(
                path, f"{problem}; expected timestamp, input_length, output_length and optional hash_ids", number
            ) from None
        try:
            stamp = parse_stamp(row.timestamp)
        except ValueError:
            problem = f"timestamp {str(row.timestamp)[:40]!r} is neither a number nor ISO 8601"
            raise InputFileError(path, problem, number) from None
        _check_lengths(path, number, row.input_length, row.output_length)
        if row.hash_ids and len(row.hash_ids) > -(-row.input_length // CHUNK_TOKENS):
            problem = f"{len(row.hash_ids)} hash_ids are too many for {row.input_length} tokens, {CHUNK_TOKENS} each"
            raise InputFileError(path, problem, number)
        yield Recorded(stamp, row.input_length, row.output_length, row.hash_ids)


def _check_lengths(path: Path, line: int, input_tokens: int, output_tokens: int) -> None:
    if not (1 <= input_tokens <= _MOST_TOKENS and 1 <= output_tokens <= _MOST_TOKENS):
        problem = f"lengths must be 1 token or more, not {input_tokens} and {output_tokens}"
        raise InputFileError(path, problem, line)


FORMATS = (
    TraceFormat("Azure CSV", f"the header {','.join(AZURE_HEADER)} (Azure)", _is_azure, _azure),
    TraceFormat(
        "Mooncake JSON lines",
        "JSON lines with timestamp, input_length and output_length (Mooncake)",
        _is_mooncake,
        _mooncake,
        whole_numbers_are="ms",
    ),
)
