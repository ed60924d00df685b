"""Opens a log of requests in any of its file formats and yields its records with their line numbers.

JSON lines, a JSON array or document, a YAML document, Parquet, CSV (separated by commas, semicolons or tabs) and access
logs, each also compressed with gzip. A folder holds files of one format. Every record is a mapping from column names to
values; an access log's columns are its ``name=value`` pairs, and its fields by number, ``1`` for the first.
"""

from __future__ import annotations

import csv
import gzip
import io
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import msgspec

from ebbench.errors import InputFileError
from ebbench.workloads.files import read_json, read_parquet
from ebbench.workloads.json_keys import RepeatedKeyError, check_keys

Kind = Literal["JSON lines", "JSON", "YAML", "Parquet", "CSV", "access log"]

_GZIP, _PARQUET, _MARK = b"\x1f\x8b", b"PAR1", b"\xef\xbb\xbf"
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
_LATIN = "is not UTF-8 text ({}); convert it first, from Latin 1 with: iconv -f latin1 -t utf-8"
_SAMPLE = 50  # records that are looked at to recognise columns
_IN_FOLDERS = (".json", ".jsonl", ".json.gz", ".jsonl.gz")
_YAML_START = re.compile(r"(---|%YAML|\w+:)(\s|$)")
_BYTE = re.compile(r"byte (\d+)")


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
            return chain.from_iterable(one.records() for one in self.files())
        return _READERS[self.kind](self.path)


def files_of(path: Path) -> tuple[Path, ...]:
    """The files of a log: those of a folder that end in .json or .jsonl (also .gz), by name; else the file itself."""
    if not path.is_dir():
        return (path,)
    return tuple(one for one in sorted(path.iterdir()) if one.is_file() and one.name.endswith(_IN_FOLDERS))


def open_log(path: Path) -> LogFile:
    """Recognise the kind of a file, or of a folder's files, and read the first records. Raises InputFileError."""
    if path.is_dir():
        return _open_folder(path)
    kind = _kind_of(path)
    sample = tuple(islice(_READERS[kind](path), _SAMPLE))
    if not sample:
        raise InputFileError(path, "holds no requests, only a header" if kind == "CSV" else "holds no requests")
    columns = tuple(sample[0].value) if kind in ("CSV", "Parquet") else ()
    return LogFile(path, kind, columns, sample)


def _open_folder(path: Path) -> LogFile:
    parts = files_of(path)
    if not parts:
        raise InputFileError(path, f"is a folder without files that end in {', '.join(_IN_FOLDERS)}")
    first = open_log(parts[0])
    sample = chain.from_iterable(_READERS[_kind_of(part)](part) for part in parts)
    return LogFile(path, first.kind, first.columns, tuple(islice(sample, _SAMPLE)), parts)


def _open(path: Path) -> IO[bytes]:
    try:
        stream = path.open("rb")
        packed = stream.read(2) == _GZIP
        stream.seek(0)
    except OSError as error:
        raise InputFileError(path, f"cannot be read: {error.strerror or error}") from None
    return gzip.open(stream) if packed else stream  # type: ignore[return-value]


def _kind_of(path: Path) -> Kind:
    with _open(path) as stream:
        start = _read(path, stream, 4)
        if start == _PARQUET:
            return "Parquet"
        if problem := next((what for mark, what in _OTHER_BYTES.items() if start.startswith(mark)), ""):
            raise InputFileError(path, problem)
        line = start + _line(path, stream)
        while line and not line.strip(b"\xef\xbb\xbf \t\r\n"):
            line = _line(path, stream)
    text = _decoded(path, line, 1).strip()
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
        msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text not in ("{", "{ ") and not text.endswith(("{", "[", ","))
    return True


def _read(path: Path, stream: IO[bytes], size: int) -> bytes:
    try:
        return stream.read(size)
    except (OSError, EOFError) as error:
        raise InputFileError(path, f"cannot be unpacked: {error}") from None


def _line(path: Path, stream: IO[bytes]) -> bytes:
    try:
        return stream.readline()
    except (OSError, EOFError) as error:
        raise InputFileError(path, f"cannot be unpacked: {error}") from None


def _decoded(path: Path, line: bytes, number: int) -> str:
    try:
        return line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        problem = "is neither Parquet nor text" if b"\0" in line else _LATIN.format(error.reason)
        raise InputFileError(path, problem, number) from None


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines that are not empty, with their numbers, without a byte order mark."""
    with _open(path) as stream:
        try:
            for number, line in enumerate(stream, start=1):
                if not line.isspace():
                    yield number, line.removeprefix(_MARK) if number == 1 else line
        except (OSError, EOFError) as error:
            raise InputFileError(path, f"cannot be unpacked: {error}") from None


def _json_lines(path: Path) -> Iterator[LogRecord]:
    decode = msgspec.json.Decoder().decode
    for number, line in _lines(path):
        try:
            value = decode(line)
            if type(value) is dict:
                check_keys(line, value)
        except msgspec.DecodeError as error:
            raise InputFileError(path, f"is not valid JSON: {error}", number) from None
        except RepeatedKeyError as error:
            raise InputFileError(path, str(error), number) from None
        yield LogRecord(number, value if type(value) is dict else _mapping(path, number, value))


def _mapping(path: Path, line: int, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise InputFileError(path, f"expected an object with one request's columns, found {str(value)[:60]!r}", line)
    return value


def _json(path: Path) -> Iterator[LogRecord]:
    """Records of an array, or a document as one record."""
    with _open(path) as stream:
        start = _read(path, stream, 1024).lstrip(b"\xef\xbb\xbf \t\r\n")
        stream.seek(0)
        if start.startswith(b"["):
            for record in read_json(stream, str(path)):
                yield LogRecord(record.line or 1, _mapping(path, record.line or 1, record.value))
            return
        text = _read(path, stream, -1)
    try:
        value = msgspec.json.decode(text.removeprefix(_MARK))
        check_keys(text.removeprefix(_MARK), value)
    except RepeatedKeyError as error:
        raise InputFileError(path, str(error)) from None
    except msgspec.DecodeError as error:
        place = _BYTE.search(str(error))
        line = 1 + text.count(b"\n", 0, int(place[1]) if place else len(text) - 1)
        raise InputFileError(path, f"is neither JSON lines nor one JSON document: {error}", line) from None
    yield LogRecord(1, _mapping(path, 1, value))


def _yaml(path: Path) -> Iterator[LogRecord]:
    """A document as one record. Its tags make no objects."""
    import yaml  # takes 10 ms

    with _open(path) as stream:
        text = _read(path, stream, -1)
    base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    class UniqueKeys(base):  # type: ignore[misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            names = [key.value for key in keys]
            if len(set(names)) != len(names):
                twice = next(key for place, key in enumerate(keys) if key.value in names[:place])
                raise yaml.MarkedYAMLError(None, None, f"the key {twice.value!r} is there twice", twice.start_mark)
            return super().construct_mapping(node, deep)

    try:
        value = yaml.load(text, Loader=UniqueKeys)
    except yaml.YAMLError as error:
        mark, why = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        line = None if mark is None else mark.line + 1
        raise InputFileError(path, f"is not valid YAML: {why or str(error).splitlines()[0]}", line) from None
    yield LogRecord(1, _mapping(path, 1, value))


def _parquet(path: Path) -> Iterator[LogRecord]:
    with _open(path) as stream:
        whole = stream if not isinstance(stream, gzip.GzipFile) else io.BytesIO(_read(path, stream, -1))
        for record in read_parquet(whole, str(path), None):
            yield LogRecord(record.number, record.value)


def _csv(path: Path) -> Iterator[LogRecord]:
    with _open(path) as stream, io.TextIOWrapper(stream, encoding="utf-8-sig", newline="") as text:
        try:
            yield from _csv_records(path, text)
        except UnicodeDecodeError as error:
            raise InputFileError(path, _LATIN.format(error.reason)) from None
        except (OSError, EOFError) as error:
            raise InputFileError(path, f"cannot be unpacked: {error}") from None


def _csv_records(path: Path, text: IO[str]) -> Iterator[LogRecord]:
    header, above = "", 0
    while not header.strip():
        header, above = text.readline(), above + 1
    separator = max(",;\t", key=header.count)
    names = [name.strip() for name in next(csv.reader([header], delimiter=separator))]
    if names[0] == "Run Info":
        raise InputFileError(path, "is GuideLLM's CSV, which holds totals; its requests are in benchmarks.json", 1)
    twice = next((name for name in names if name and names.count(name) > 1), None)
    if twice is not None:
        raise InputFileError(path, f"has two columns named {twice!r}", 1)
    rows = csv.reader(text, delimiter=separator, strict=True)  # else an unclosed quote takes the rest of the file
    width, line = len(names), above
    try:
        for row in rows:
            line = above + rows.line_num
            if not row:
                continue
            if len(row) > width and not any(row[width:]):
                row = row[:width]  # separators at the end of each row, and none at the end of the header
            if len(row) != width:
                raise InputFileError(path, _wrong_width(row, names, separator), line)
            yield LogRecord(line, dict(zip(names, row, strict=True)))
    except csv.Error as error:
        why = "a quote is not closed" if "end of data" in str(error) else str(error)
        raise InputFileError(path, f"cannot be read as CSV after this line: {why}", line) from None


def _wrong_width(row: list[str], names: list[str], separator: str) -> str:
    found = f"has {len(row)} cells where the header names {len(names)} columns"
    if len(row) > len(names):
        return f"{found}; a cell that holds {separator!r} needs quotes"
    missing = ", ".join(repr(name) for name in names[len(row) :])
    return f"{found}; if {missing} is empty, end the row with {separator * (len(names) - len(row))!r}"


_CLOCK = re.compile(r"\[(\d\d/\w{3}/\d{4}:\d\d:\d\d:\d\d [+-]\d{4})\]|(?:^|\s)\"(?:GET|POST) ")
"""What tells an access log from a table: the time in brackets, or a quoted request line."""
_REQUEST = re.compile(r"\"(?P<request>[A-Z]+ \S+ HTTP/[\d.]+)\" (?P<status>\d{3})")
_FIELD = re.compile(r"\[[^\]]*\]|\"(?:[^\"\\]|\\.)*\"|\S+")
_PAIR = re.compile(r"([A-Za-z_@][\w.\-]*)[=:](\"[^\"]*\"|[^\s,;\"]+)")


def _access_log(path: Path) -> Iterator[LogRecord]:
    for number, line in _lines(path):
        yield LogRecord(number, _access_fields(_decoded(path, line, number)))


def _access_fields(line: str) -> dict[str, Any]:
    """Fields of a line: by number, ``name=value`` pairs by name, ``time_local``, ``request`` and ``status``."""
    fields: dict[str, Any] = {str(place): part.strip('"[]') for place, part in enumerate(_FIELD.findall(line), start=1)}
    clock, request = _CLOCK.search(line), _REQUEST.search(line)
    if clock is not None and clock[1]:
        fields["time_local"] = clock[1]
    if request is not None:
        fields |= request.groupdict()
        line = line[request.end() :]
    fields |= {name: value.strip('"') for name, value in _PAIR.findall(line)}
    return fields


_READERS = {
    "JSON lines": _json_lines,
    "JSON": _json,
    "YAML": _yaml,
    "Parquet": _parquet,
    "CSV": _csv,
    "access log": _access_log,
}
