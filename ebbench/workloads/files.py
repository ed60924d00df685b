"""Reads records of a data set from JSON, JSON lines or Parquet, one at a time and only as many as needed."""

from __future__ import annotations

import codecs
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from ebbench.errors import InputFileError
from ebbench.foreign.documents import (
    COLUMNS,
    DEPTH,
    DOCUMENT_BYTES,
    LINE_BYTES,
    YAML_BYTES,
    BadValueError,
    csv_rows,
    decoded,
    json_document,
    json_value,
    not_text,
    open_unpacked,
    parquet_rows,
    read_lines,
    read_rest,
    too_deep,
    with_unique_keys,
    yaml_document,
)

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
    """Records of a JSON array, read in pieces of 1 MiB, or of JSON lines. Raises InputFileError."""
    if _begins_array(stream):
        return _array(_Text(stream, name))
    records = _json_lines(name, stream)
    if (first := next(records, None)) is None:
        raise InputFileError(name, "is empty; expected a JSON array, JSON lines or Parquet")
    return chain((first,), records)


def _begins_array(stream: IO[bytes]) -> bool:
    """Whether a stream's text begins with a bracket; leaves the stream at its beginning."""
    text = b""
    while not text and (piece := stream.read(1024)):
        text = piece.lstrip(b"\xef\xbb\xbf \t\r\n")
    stream.seek(0)
    return text.startswith(b"[")


def _json_lines(path: Path | str, stream: IO[bytes]) -> Iterator[FileRecord]:
    for number, (line, row) in enumerate(read_lines(path, stream), start=1):
        try:
            yield FileRecord(line, number, json_value(row))
        except BadValueError as error:
            hint = "; a file with one JSON object over several lines must be an array" if row.strip() == b"{" else ""
            raise InputFileError(path, f"{error}{hint}", line) from None


def read_parquet(stream: IO[bytes], name: str, columns: Sequence[str] | None) -> Iterator[FileRecord]:
    """Records of a Parquet file with these columns, None for all of them. Raises InputFileError."""
    for index, value in enumerate(parquet_rows(name, stream, columns), start=1):
        yield FileRecord(None, index, value)


class _Text:
    """A window on a stream of UTF-8 text that counts lines."""

    def __init__(self, stream: IO[bytes], name: str) -> None:
        self._stream, self.name = stream, name
        self._decoder = codecs.getincrementaldecoder("utf-8")()  # a piece may end within a character
        self.window, self.at, self.line, self.ended = "", 0, 1, False
        self.blank = 0  # characters of white space between records

    def fill(self) -> bool:
        """Append the next piece to the window; returns False at the end of the stream."""
        if self.ended:
            return False
        piece = self._stream.read(CHUNK_BYTES)
        self.ended = not piece
        try:
            text = self._decoder.decode(piece, self.ended)
        except UnicodeDecodeError as error:
            line = self.line + self.window.count("\n", self.at) + error.object.count(b"\n", 0, error.start)
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
            matched = _NOT_WHITE.search(self.window, self.at)
            self.advance(len(self.window) if matched is None else matched.start())
            if matched is not None or not self.fill():
                self.blank = 0
                return
            self.blank += CHUNK_BYTES
            if self.blank > LINE_BYTES:
                raise InputFileError(self.name, f"has {LINE_BYTES >> 20} MiB of white space; remove it", self.line)

    def peek(self) -> str:
        """The current character, or an empty string at the end."""
        return self.window[self.at : self.at + 1]


_decoder = json.JSONDecoder(object_pairs_hook=with_unique_keys)


def _array(text: _Text) -> Iterator[FileRecord]:
    text.skip_white()
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


# Opens a log of requests in any of its file formats and yields its records with their line numbers.
#
# JSON lines, a JSON array or document, a YAML document, Parquet, CSV (separated by commas, semicolons or tabs) and
# access logs, each also compressed with gzip. A folder holds files of one format. Every record is a mapping from
# column names to values; an access log's columns are its `name=value` pairs, and its fields by number, `1` for the
# first.

Kind = Literal["JSON lines", "JSON", "YAML", "Parquet", "CSV", "access log"]

_PARQUET = b"PAR1"
_OTHER_BYTES = {
    b"PK\x03\x04": "is a zip archive or an Excel sheet; unpack it, or save the sheet as CSV",
    b"\x28\xb5\x2f\xfd": "is compressed with zstd; unpack it first: zstd -d",
    b"\xfd7zX": "is compressed with xz; unpack it first: xz -d",
    b"BZh": "is compressed with bzip2; unpack it first: bzip2 -d",
    b"\xff\xfe": "is UTF-16 text; convert it first: iconv -f utf-16 -t utf-8",
    b"\xfe\xff": "is UTF-16 text; convert it first: iconv -f utf-16 -t utf-8",
    b"SQLi": "is an SQLite database; export its table as CSV",
    b"Obj\x01": "is an Avro file; convert it to Parquet or JSON lines",
    b"ORC": "is an ORC file; convert it to Parquet",
}
"""What files begin with that are often logs and cannot be read, and what to do."""
_SAMPLE = 50  # records that are looked at to recognise columns
_IN_FOLDERS = (".json", ".jsonl", ".json.gz", ".jsonl.gz")
_YAML_START = re.compile(r"(---|%YAML|\w+:)(\s|$)")


class LogRecord(NamedTuple):
    """A record and where it is: its line, or in Parquet its number from 1."""

    line: int
    value: Mapping[str, Any]


@dataclass(frozen=True)
class LogFile:
    """A recognised file, or a folder of them.

    ``columns``: names in the header of a table, empty for JSON; ``sample``: first records; ``parts``: the files of a
    folder, which has the kind of the first one.
    """

    path: Path
    kind: Kind
    columns: tuple[str, ...]
    sample: tuple[LogRecord, ...]
    parts: tuple[Path, ...] = ()

    def files(self) -> Iterator[LogFile]:
        """The files of a folder by name; a file is its only one. Raises InputFileError."""
        return map(open_log, self.parts) if self.parts else iter((self,))

    def records(self) -> Iterator[LogRecord]:
        """All records in order. Raises InputFileError with the line."""
        if self.parts:
            return chain.from_iterable(file.records() for file in self.files())
        return _read(self.path, self.kind)


def log_files(path: Path) -> tuple[Path, ...]:
    """The files of a log: those of a folder that end in .json or .jsonl (also .gz), by name; else the file itself."""
    if not path.is_dir():
        return (path,)
    return tuple(entry for entry in sorted(path.iterdir()) if entry.is_file() and entry.name.endswith(_IN_FOLDERS))


def open_log(path: Path) -> LogFile:
    """Recognise the kind of a file, or of a folder's files, and read the first records. Raises InputFileError."""
    if path.is_dir():
        return _open_folder(path)
    kind = _kind_of(path)
    sample = tuple(islice(_read(path, kind), _SAMPLE))
    if not sample:
        raise InputFileError(path, "holds no requests, only a header" if kind == "CSV" else "holds no requests")
    names: set[str] = set()
    for record in sample:
        names.update(record.value)
        if len(names) > COLUMNS:
            problem = f"has more than {COLUMNS:,} columns; keep those of times and token counts"
            raise InputFileError(path, problem, record.line)
    columns = tuple(sample[0].value) if kind in ("CSV", "Parquet") else ()
    return LogFile(path, kind, columns, sample)


def _open_folder(path: Path) -> LogFile:
    parts = log_files(path)
    if not parts:
        raise InputFileError(path, f"is a folder without files that end in {', '.join(_IN_FOLDERS)}")
    first = open_log(parts[0])
    sample = chain.from_iterable(_read(part, _kind_of(part)) for part in parts)
    return LogFile(path, first.kind, first.columns, tuple(islice(sample, _SAMPLE)), parts)


def _kind_of(path: Path) -> Kind:
    with open_unpacked(path) as stream:
        start = stream.read(4)
        stream.seek(0)
        if start == _PARQUET:
            return "Parquet"
        if problem := next((what for mark, what in _OTHER_BYTES.items() if start.startswith(mark)), ""):
            raise InputFileError(path, problem)
        if len(start) == 4 and {start[0::2], start[1::2]} & {b"\0\0"} and any(start):
            code = "utf-16be" if start[0] == 0 else "utf-16le"  # without its mark
            problem = f"is UTF-16 text; convert it first: iconv -f {code} -t utf-8"
            raise InputFileError(path, problem)
        number, line = next(read_lines(path, stream), (1, b""))
    text = decoded(path, line, number).strip()
    if not text:
        raise InputFileError(path, "is empty; expected one record per line, a table with a header, or JSON")
    if text.startswith("["):
        return "JSON"
    if text.startswith("{"):
        return "JSON lines" if _is_json(text) else "JSON"
    if _CLOCK.search(text):
        return "access log"
    return "YAML" if _YAML_START.match(text) and not any(mark in text for mark in ",;\t") else "CSV"


def _is_json(text: str) -> bool:
    """Whether the line is a whole JSON value; a broken one is taken as such if it is closed or followed by others."""
    try:
        json_value(text.encode())
    except BadValueError:
        return text not in ("{", "{ ") and not text.endswith(("{", "[", ",", ":"))
    return True


def _read(path: Path, kind: Kind) -> Iterator[LogRecord]:
    """The records of a file of this kind. Raises InputFileError with the line."""
    with open_unpacked(path) as stream:
        for line, number, value in _READERS[kind](path, stream):
            at = number if line is None else line
            if type(value) is not dict:
                problem = f"expected an object with one request's columns, found {str(value)[:60]!r}"
                raise InputFileError(path, problem, at)
            yield LogRecord(at, value)


def _json(path: Path, stream: BufferedReader) -> Iterator[FileRecord]:
    """Records of an array, or a document as one record."""
    if _begins_array(stream):
        yield from read_json(stream, str(path))
    else:
        yield FileRecord(1, 1, json_document(path, read_rest(path, stream, DOCUMENT_BYTES)))


def _yaml(path: Path, stream: BufferedReader) -> Iterator[FileRecord]:
    yield FileRecord(1, 1, yaml_document(path, read_rest(path, stream, YAML_BYTES)))


def _parquet(path: Path, stream: BufferedReader) -> Iterator[FileRecord]:
    # A stream that is unpacked cannot be read from its end, as Parquet is.
    whole = stream if isinstance(stream.raw, io.FileIO) else io.BytesIO(read_rest(path, stream, DOCUMENT_BYTES))
    return read_parquet(whole, str(path), None)


def _csv(path: Path, stream: BufferedReader) -> Iterator[FileRecord]:
    with io.TextIOWrapper(stream, encoding="utf-8-sig", newline="") as text:
        rows = csv_rows(path, text)
        try:
            line, names = next(rows)
            if names[0] == "Run Info":
                problem = "is GuideLLM's CSV, which holds totals; its requests are in benchmarks.json"
                raise InputFileError(path, problem, 1)
            for line, row in rows:
                yield FileRecord(line, line, dict(zip(names, row, strict=True)))
        except UnicodeDecodeError as error:
            raise not_text(path, error) from None


_CLOCK = re.compile(r"\[(\d\d/\w{3}/\d{4}:\d\d:\d\d:\d\d [+-]\d{4})\]|(?:^|\s)\"(?:GET|POST) ")
"""What tells an access log from a table: the time in brackets, or a quoted request line."""
# None of the following looks at a character twice, however a line is written.
_REQUEST = re.compile(r"\"(?P<request>[A-Z]++ [^\s\"]++ HTTP/[\d.]++)\" (?P<status>\d{3})")
_FIELD = re.compile(r"\[[^\[\]]*+\]|\"(?:[^\"\\]|\\.)*+\"|\S++")
_PAIR = re.compile(r"(?<![\w.@-])-*+([A-Za-z_@][\w.\-]*+)[=:](\"[^\"]*+\"|[^\s,;\"]++)")
_MOST_FIELDS = 500
"""Fields and pairs that are looked at of a line of more than ``_LONG_LINE`` characters."""
_LONG_LINE = 4000


def _first(pattern: re.Pattern[str], line: str) -> list[Any]:
    """What ``findall`` finds in a line, of a very long line only the first."""
    if len(line) < _LONG_LINE:
        return pattern.findall(line)
    return [match.groups() or match[0] for match in islice(pattern.finditer(line), _MOST_FIELDS)]


def _access_log(path: Path, stream: BufferedReader) -> Iterator[FileRecord]:
    for number, data in read_lines(path, stream):
        # By number, by name as ``name=value``, and what every access log has: its clock and its request.
        line = decoded(path, data, number)
        parts = _first(_FIELD, line)
        fields: dict[str, Any] = {str(place): part.strip('"[]') for place, part in enumerate(parts, start=1)}
        clock, request = _CLOCK.search(line), _REQUEST.search(line)
        if clock is not None and clock[1]:
            fields["time_local"] = clock[1]
        if request is not None:
            fields |= request.groupdict()
            line = line[request.end() :]
        fields |= {name: value.strip('"') for name, value in _first(_PAIR, line)}
        yield FileRecord(number, number, fields)


_READERS: Mapping[Kind, Callable[[Path, BufferedReader], Iterator[FileRecord]]] = {
    "JSON lines": _json_lines,
    "JSON": _json,
    "YAML": _yaml,
    "Parquet": _parquet,
    "CSV": _csv,
    "access log": _access_log,
}
