"""Reads records of a data set from JSON, JSON lines or Parquet, one at a time and only as many as needed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from ebbench.errors import InputFileError
from ebbench.workloads.json_keys import RepeatedKeyError, with_unique_keys

CHUNK_BYTES = 1 << 20
_MAX_RECORD_BYTES = 64 << 20  # a longer unfinished JSON value means a broken file
_WHITE = " \t\r\n"


class FileRecord(NamedTuple):
    """A decoded record with its line (None in Parquet) and its position (from 1)."""

    line: int | None
    number: int
    value: Any


def read_file(path: Path, columns: Sequence[str]) -> Iterator[FileRecord]:
    """Records of a local file, whose format is recognised from its first bytes. Raises InputFileError."""
    try:
        stream = path.open("rb")
    except OSError as error:
        raise InputFileError(path, f"cannot be read: {error.strerror or error}") from None
    with stream:
        start = stream.read(4)
        stream.seek(0)
        if start == b"PAR1":
            yield from read_parquet(stream, str(path), columns)
        else:
            yield from read_json(stream, str(path))


def read_json(stream: IO[bytes], name: str) -> Iterator[FileRecord]:
    """Records of a JSON array or of JSON lines, read in pieces of 1 MiB. Raises InputFileError."""
    text = _Text(stream, name)
    text.skip_white()
    if text.peek() == "":
        raise InputFileError(name, "is empty; expected a JSON array, JSON lines or Parquet")
    return _array(text) if text.peek() == "[" else _lines(text)


def read_parquet(stream: IO[bytes], name: str, columns: Sequence[str] | None) -> Iterator[FileRecord]:
    """Records of a Parquet file with these columns, None for all of them. Raises InputFileError."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(stream)
        present = file.schema_arrow.names
        if twice := next((column for column in present if present.count(column) > 1), None):
            raise InputFileError(name, f"has two columns named {twice!r}")
        missing = [column for column in columns or () if column not in present]
        if missing:
            raise InputFileError(name, f"has no column {missing[0]!r}; its columns are {', '.join(present)}")
        index = 0
        chosen = None if columns is None else list(columns)
        for batch in file.iter_batches(batch_size=512 if chosen else 16_384, columns=chosen):
            for value in batch.to_pylist():
                index += 1
                yield FileRecord(None, index, value)
    except pa.ArrowInvalid as error:
        raise InputFileError(name, f"is not readable Parquet: {str(error).splitlines()[0]}") from None


class _Text:
    """A window on a stream of UTF-8 text that counts lines."""

    def __init__(self, stream: IO[bytes], name: str) -> None:
        self._stream, self.name = stream, name
        self._pending = b""
        self.window, self.at, self.line, self.ended = "", 0, 1, False

    def fill(self) -> bool:
        """Append the next piece to the window; returns False at the end of the stream."""
        if self.ended:
            return False
        piece = self._stream.read(CHUNK_BYTES)
        self.ended = not piece
        data = self._pending + piece
        # Keep a character that the piece cut in two for the next piece.
        keep = 0 if self.ended else _cut_character(data)
        self._pending = data[len(data) - keep :] if keep else b""
        try:
            text = (data[: len(data) - keep] if keep else data).decode("utf-8")
        except UnicodeDecodeError as error:
            line = self.line + self.window.count("\n", self.at) + data[: error.start].count(b"\n")
            raise InputFileError(self.name, f"is neither Parquet nor UTF-8 text ({error.reason})", line) from None
        self.window = self.window[self.at :] + text
        self.at = 0
        return True

    def advance(self, to: int) -> None:
        """Move to position ``to`` of the window, counting lines."""
        self.line += self.window.count("\n", self.at, to)
        self.at = to

    def skip_white(self) -> None:
        """Move to the next character that is not white space or a byte order mark."""
        while True:
            to = self.at
            while to < len(self.window) and self.window[to] in _WHITE + "\ufeff":
                to += 1
            self.advance(to)
            if to < len(self.window) or not self.fill():
                return

    def peek(self) -> str:
        """The current character, or an empty string at the end."""
        return self.window[self.at : self.at + 1]


def _cut_character(data: bytes) -> int:
    """Number of bytes at the end that begin an unfinished UTF-8 character."""
    for back in range(1, min(4, len(data) + 1)):
        byte = data[-back]
        if byte >= 0xC0:
            size = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return back if back < size else 0
        if byte < 0x80:
            return 0
    return 0


_decoder = json.JSONDecoder(object_pairs_hook=with_unique_keys)


def _array(text: _Text) -> Iterator[FileRecord]:
    text.advance(text.at + 1)
    index = 0
    while True:
        text.skip_white()
        if text.peek() == "]":
            return
        if index:
            if text.peek() != ",":
                raise InputFileError(text.name, f"expected ',' or ']' after record {index}", text.line)
            text.advance(text.at + 1)
            text.skip_white()
        index += 1
        line, value = text.line, _value(text, index)
        yield FileRecord(line, index, value)


def _value(text: _Text, index: int) -> Any:
    """Decode one JSON value, reading further while it is unfinished."""
    while True:
        try:
            value, end = _decoder.raw_decode(text.window, text.at)
        except json.JSONDecodeError as error:
            if len(text.window) - text.at < _MAX_RECORD_BYTES and text.fill():
                continue
            line = text.line + text.window.count("\n", text.at, error.pos)
            raise InputFileError(text.name, f"record {index} is not valid JSON: {error.msg}", line) from None
        except RepeatedKeyError as error:
            raise InputFileError(text.name, f"record {index} {error}", text.line) from None
        if end == len(text.window) and not text.ended and text.fill():
            continue  # a number may continue in the next piece
        text.advance(end)
        return value


def _lines(text: _Text) -> Iterator[FileRecord]:
    index = 0
    while text.peek():
        end = text.window.find("\n", text.at)
        while end < 0 and text.fill():
            end = text.window.find("\n", text.at)
        end = len(text.window) if end < 0 else end
        row = text.window[text.at : end].strip()
        if row:
            index += 1
            yield FileRecord(text.line, index, _row(text, row))
        text.advance(min(end + 1, len(text.window)))
        if text.at == len(text.window):
            text.fill()


def _row(text: _Text, row: str) -> Any:
    try:
        return json.loads(row, object_pairs_hook=with_unique_keys)
    except RepeatedKeyError as error:
        raise InputFileError(text.name, str(error), text.line) from None
    except json.JSONDecodeError as error:
        hint = "; a file with one JSON object over several lines must be an array" if row == "{" else ""
        raise InputFileError(
            text.name, f"is not valid JSON: {error.msg} (column {error.pos + 1}){hint}", text.line
        ) from None
