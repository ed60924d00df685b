"""Reads records of a data set from JSON, JSON lines or Parquet, one at a time and only as many as needed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from ebbench.errors import InputFileError
from ebbench.foreign.documents import DEPTH, BadValueError, json_value, too_deep, with_unique_keys
from ebbench.foreign.opening import BLANK_LINES, LINE_BYTES, open_unpacked
from ebbench.foreign.tables import parquet_rows

CHUNK_BYTES = 1 << 20
_NOT_WHITE = re.compile(r"[^ \t\r\n\ufeff]")


class FileRecord(NamedTuple):
    """A decoded record with its line (None in Parquet) and its position (from 1)."""

    line: int | None
    number: int
    value: Any


def read_file(path: Path, columns: Sequence[str]) -> Iterator[FileRecord]:
    """Records of a local file, whose format is recognised from its first bytes. Raises InputFileError."""
    with open_unpacked(path) as stream:
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
    for index, value in enumerate(parquet_rows(name, stream, columns), start=1):
        yield FileRecord(None, index, value)


class _Text:
    """A window on a stream of UTF-8 text that counts lines."""

    def __init__(self, stream: IO[bytes], name: str) -> None:
        self._stream, self.name = stream, name
        self._pending = b""
        self.window, self.at, self.line, self.ended = "", 0, 1, False
        self.blank = 0  # characters of white space between records

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

    def grow(self) -> bool:
        """Twice as much unread text, at least one more piece; False at the end. Raises InputFileError if too long."""
        unread = len(self.window) - self.at
        if unread > LINE_BYTES:
            problem = f"has a line or record of more than {LINE_BYTES >> 20} MiB; expected JSON lines or a JSON array"
            raise InputFileError(self.name, problem, self.line)
        more = self.fill()
        while more and len(self.window) < min(2 * unread, LINE_BYTES) and self.fill():
            pass
        return more

    def advance(self, to: int) -> None:
        """Move to position ``to`` of the window, counting lines."""
        self.line += self.window.count("\n", self.at, to)
        self.at = to

    def skip_white(self) -> None:
        """Move to the next character that is not white space or a byte order mark."""
        while True:
            found = _NOT_WHITE.search(self.window, self.at)
            self.advance(len(self.window) if found is None else found.start())
            if found is not None or not self.fill():
                self.blank = 0
                return
            self.blank += CHUNK_BYTES
            if self.blank > LINE_BYTES:
                raise InputFileError(self.name, f"has {LINE_BYTES >> 20} MiB of white space; remove it", self.line)

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
    """Decode one JSON value, reading further while it is unfinished: twice as much each time."""
    while True:
        begins = text.at
        try:
            value, end = _decoder.raw_decode(text.window, begins)
            inside = text.window[begins:end]
            if inside.count("[") + inside.count("{") > DEPTH and too_deep(value):
                raise RecursionError
        except RecursionError:
            problem = f"record {index} has more than {DEPTH} objects or lists within each other"
            raise InputFileError(text.name, problem, text.line) from None
        except json.JSONDecodeError as error:
            if text.grow():
                continue
            line = text.line + text.window.count("\n", text.at, error.pos)
            raise InputFileError(text.name, f"record {index} is not valid JSON: {error.msg}", line) from None
        except BadValueError as error:
            raise InputFileError(text.name, f"record {index} {error}", text.line) from None
        except ValueError as error:
            raise InputFileError(text.name, f"record {index} is not valid JSON: {error}", text.line) from None
        if end == len(text.window) and not text.ended and text.fill():
            continue  # a number may continue in the next piece
        text.advance(end)
        return value


def _lines(text: _Text) -> Iterator[FileRecord]:
    index = blank = 0
    while text.peek():
        end = text.window.find("\n", text.at)
        while end < 0:
            looked_at = len(text.window) - text.at
            if not text.grow():
                break
            end = text.window.find("\n", text.at + looked_at)
        end = len(text.window) if end < 0 else end
        row = text.window[text.at : end].strip()
        blank += not row
        if row:
            index += 1
            yield FileRecord(text.line, index, _row(text, row))
        elif blank > BLANK_LINES:
            raise InputFileError(text.name, f"has more than {BLANK_LINES:,} empty lines; remove them", text.line)
        text.advance(min(end + 1, len(text.window)))
        if text.at == len(text.window):
            text.fill()


def _row(text: _Text, row: str) -> Any:
    try:
        return json_value(row.encode())
    except BadValueError as error:
        hint = "; a file with one JSON object over several lines must be an array" if row == "{" else ""
        raise InputFileError(text.name, f"{error}{hint}", text.line) from None
