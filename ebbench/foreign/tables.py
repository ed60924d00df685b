"""Reads CSV and Parquet: tables of bounded width and length, in which no two columns have one name."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ebbench.errors import InputFileError
from ebbench.foreign.opening import BLANK_LINES

if TYPE_CHECKING:
    import pyarrow.parquet as pq

COLUMNS = 2_000
"""Most columns of a table. The widest tables of spans have 300."""
ROWS = 50_000_000
"""Most rows of a Parquet file, 5 GB as a log's columns: the size of a file does not say how many it has."""
CELL_CHARACTERS = 16 << 20
"""Longest cell and longest line of a CSV file. The csv module's own limit is 131,072 characters, less than a prompt."""
_BATCH_ROWS, _WIDE_BATCH_ROWS = 16_384, 512

csv.field_size_limit(CELL_CHARACTERS)


def csv_rows(path: Path, text: IO[str]) -> Iterator[tuple[int, list[str]]]:
    """Rows of a table, the header first, with the number of their last line. Empty rows are left out.

    The separator is that of ``,``, ``;``, ``|`` and tab which is most frequent in the header. Raises InputFileError.
    """
    lines = _bounded(path, text)
    header, above = "", 0
    while not header.strip():
        header, above = next(lines, "\0"), above + 1
    separator = max(",;\t|", key=header.count)
    if header.count(separator) >= COLUMNS:
        raise InputFileError(path, f"has more than {COLUMNS:,} columns; keep those of times and token counts", above)
    names = [name.strip() for name in next(csv.reader([header], delimiter=separator))]
    yield above, names
    refuse_repeated(path, names, above)
    width, line = len(names), above
    rows = csv.reader(lines, delimiter=separator, strict=True)  # else an unclosed quote takes the rest of the file
    try:
        for row in rows:
            line = above + rows.line_num
            if not row:
                continue
            if len(row) > width and not any(row[width:]):
                row = row[:width]  # separators at the end of each row, and none at the end of the header
            if len(row) != width:
                raise InputFileError(path, _wrong_width(row, names, separator), line)
            yield line, row
    except csv.Error as error:
        why = "a quote is not closed" if "end of data" in str(error) else str(error)
        raise InputFileError(path, f"cannot be read as CSV after this line: {why}", line) from None


def _bounded(path: Path, text: IO[str]) -> Iterator[str]:
    """The lines of a text, of which none and no number of empty ones is beyond the limits."""
    blank = 0
    for number, line in enumerate(iter(partial(text.readline, CELL_CHARACTERS + 1), ""), start=1):
        if len(line) > CELL_CHARACTERS:
            raise InputFileError(path, f"has a line of more than {CELL_CHARACTERS:,} characters; is it a log?", number)
        if line.isspace():
            blank += 1
            if blank > BLANK_LINES:
                raise InputFileError(path, f"has more than {BLANK_LINES:,} empty lines; remove them", number)
        yield line


def _wrong_width(row: Sequence[str], names: Sequence[str], separator: str) -> str:
    found = f"has {len(row)} cells where the header names {len(names)} columns"
    if len(row) > len(names):
        return f"{found}; a cell that holds {separator!r} needs quotes"
    missing = ", ".join(repr(name) for name in names[len(row) :])
    return f"{found}; if {missing} is empty, end the row with {separator * (len(names) - len(row))!r}"


def refuse_repeated(path: Path | str, names: Sequence[str], line: int | None = None) -> None:
    """Raise InputFileError if two columns have one name; columns without names are not told apart."""
    seen: set[str] = set()
    for name in names:
        if name and name in seen:
            raise InputFileError(path, f"has two columns named {name[:60]!r}", line)
        seen.add(name)


@contextmanager
def parquet_errors(path: Path | str) -> Iterator[None]:
    """Turn whatever Arrow says about a damaged file into one InputFileError."""
    import pyarrow as pa

    try:
        yield
    except InputFileError:
        raise
    except (pa.ArrowException, OSError, ValueError, OverflowError, KeyError) as error:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputFileError(path, f"not a readable Parquet file ({said[:200]})") from None


def open_parquet(path: Path | str, stream: Any, columns: Sequence[str] | None = None) -> pq.ParquetFile:
    """A Parquet file that has these columns. Raises InputFileError, also if it has more rows than are read."""
    import pyarrow.parquet as pq

    with parquet_errors(path):
        file = pq.ParquetFile(stream, page_checksum_verification=True)
        present, rows = file.schema_arrow.names, int(file.metadata.num_rows)
        if not 0 <= rows <= ROWS:
            raise InputFileError(path, f"has {rows:,} rows, and at most {ROWS:,} are read; take a part of it")
        if len(present) > COLUMNS:
            raise InputFileError(path, f"has {len(present):,} columns, and at most {COLUMNS:,} are read")
        refuse_repeated(path, present)
    for column in columns or ():
        if column not in present:
            raise InputFileError(path, f"has no column {column!r}; its columns are {', '.join(present)}")
    return file


def parquet_rows(path: Path | str, stream: Any, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    """Rows of a Parquet file with these columns, None for all of them. Raises InputFileError."""
    file = open_parquet(path, stream, columns)
    chosen = None if columns is None else list(columns)
    with parquet_errors(path):
        for batch in file.iter_batches(batch_size=_WIDE_BATCH_ROWS if chosen else _BATCH_ROWS, columns=chosen):
            yield from batch.to_pylist()
