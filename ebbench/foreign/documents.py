"""Opens and decodes files of others: JSON, YAML, TOML, CSV, Parquet, within bounds; shows their texts without harm.

Values have a bounded depth, tables a bounded width and length. Readers differ in which of two values of one key they
take, so an object that has a key twice is refused.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import os
import re
import stat
import tomllib
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar, get_args

import msgspec

from ebbench.errors import InputFileError
from vllm_eb.settings import name_hint

if TYPE_CHECKING:
    import pyarrow.parquet as pq


SETTINGS_BYTES = 16 << 20
"""Largest file of settings: TOML, config.json, a manifest. Written by hand or by tools, they have kilobytes."""
DOCUMENT_BYTES = 512 << 20
"""Largest JSON document that is decoded as a whole: the detailed result of 50,000 requests has 300 MB."""
LINE_BYTES = 64 << 20
"""Longest line, and longest record of a JSON array. A prompt of a million tokens has 4 MB."""
BLANK_LINES = 1_000_000
"""Most empty lines in a file."""
UNPACKED_RATIO = 300
"""Most bytes per compressed byte. Logs have 5 to 20 times, tables of equal rows 200 times; zeros have 1,000 times."""
_UNCHECKED_BYTES = 64 << 20  # unpacked bytes from which the ratio counts: less does no harm
_GZIP, _MARK = b"\x1f\x8b", b"\xef\xbb\xbf"
_CHUNK_BYTES = 1 << 17
_LATIN = "is not UTF-8 text ({}); convert it first, from Latin 1 with: iconv -f latin1 -t utf-8"
_KINDS: tuple[tuple[Callable[[int], bool], str], ...] = (
    (stat.S_ISDIR, "is a folder; give a file"),
    (stat.S_ISFIFO, "is a pipe, which can be read only once; write it into a file first"),
    (stat.S_ISCHR, "is a device, which never ends; give a file"),
    (stat.S_ISBLK, "is a device; give a file"),
    (stat.S_ISSOCK, "is a socket; give a file"),
)


def open_regular(path: Path) -> io.BufferedReader:
    """A regular file, opened to be read. Raises InputFileError for anything else; it never waits, as a pipe would."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        mode = os.fstat(descriptor).st_mode
    except OSError as error:
        kind = next((what for is_kind, what in _KINDS if is_kind(_mode(path))), "")
        raise InputFileError(path, kind or f"cannot be read: {error.strerror or error}") from None
    except ValueError:
        raise InputFileError(str(path).replace("\0", "\\0"), "is no path: it holds a zero byte") from None
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise InputFileError(path, next((what for is_kind, what in _KINDS if is_kind(mode)), "is no regular file"))
    return os.fdopen(descriptor, "rb")


def _mode(path: Path) -> int:
    try:
        return path.stat().st_mode
    except OSError:
        return 0


def open_unpacked(path: Path) -> io.BufferedReader:
    """A regular file, unpacked if it is compressed with gzip. Raises InputFileError, also while it is read."""
    stream = open_regular(path)
    packed = stream.read(2) == _GZIP
    stream.seek(0)
    return io.BufferedReader(_Unpacked(path, stream), _CHUNK_BYTES) if packed else stream


class _Unpacked(io.RawIOBase):
    """The contents of a gzip file. Raises InputFileError if they are damaged, or unpack to far more than they are."""

    def __init__(self, path: Path, packed: IO[bytes]) -> None:
        self._path, self._packed, self._size = path, packed, os.fstat(packed.fileno()).st_size
        self._file = gzip.GzipFile(fileobj=packed, mode="rb")
        self._unpacked = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def readinto(self, buffer: object) -> int:
        try:
            count = self._file.readinto(buffer)  # type: ignore[arg-type]
        except (OSError, EOFError, zlib.error) as error:
            raise InputFileError(self._path, f"cannot be unpacked: {error}") from None
        self._unpacked += count
        if self._unpacked > max(_UNCHECKED_BYTES, UNPACKED_RATIO * self._size):
            raise InputFileError(
                self._path, f"unpacks to more than {UNPACKED_RATIO} times its size; if that is meant, unpack it first: "
                "gunzip"
            )  # fmt: skip
        return count

    def close(self) -> None:
        self._file.close()
        self._packed.close()
        super().close()


def read_bytes(path: Path, most: int = SETTINGS_BYTES) -> bytes:
    """A whole file of at most ``most`` bytes. Raises InputFileError."""
    with open_regular(path) as stream:
        return read_rest(path, stream, most)


def read_rest(path: Path, stream: IO[bytes], most: int) -> bytes:
    """What is left of a stream, at most ``most`` bytes. Raises InputFileError."""
    try:
        content = stream.read(most + 1)
    except OSError as error:
        raise InputFileError(path, f"cannot be read: {error.strerror or error}") from None
    if len(content) > most:
        raise InputFileError(path, f"is larger than {most >> 20} MiB, the most that is read as a whole")
    return content


def read_text(path: Path, most: int = SETTINGS_BYTES) -> str:
    """A whole text in UTF-8, without a byte order mark. Raises InputFileError with the line."""
    return decoded(path, read_bytes(path, most))


def decoded(path: Path, content: bytes, line: int = 1) -> str:
    """UTF-8 text that begins in this line, without a byte order mark. Raises InputFileError with the line."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise not_text(path, error, line) from None


def not_text(path: Path, error: UnicodeDecodeError, line: int | None = None) -> InputFileError:
    """The error of bytes that are no UTF-8 text. ``line``: the one with which they begin, if it is known."""
    problem = "is not UTF-8 text, nor Parquet" if b"\0" in error.object else _LATIN.format(error.reason)
    return InputFileError(path, problem, line and line + error.object.count(b"\n", 0, error.start))


def read_lines(path: Path | str, stream: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Lines that are not empty, with their numbers, without a byte order mark. Raises InputFileError."""
    blank = 0
    try:
        for number, line in enumerate(iter(partial(stream.readline, LINE_BYTES + 1), b""), start=1):
            if line.isspace():
                blank += 1
                if blank > BLANK_LINES:
                    raise InputFileError(path, f"has more than {BLANK_LINES:,} empty lines; remove them", number)
                continue
            if len(line) > LINE_BYTES:
                raise InputFileError(path, f"has a line of more than {LINE_BYTES >> 20} MiB; is it a log?", number)
            yield number, line.removeprefix(_MARK) if number == 1 else line
    except OSError as error:
        raise InputFileError(path, f"cannot be read: {error.strerror or error}") from None


# Reads CSV and Parquet: tables of bounded width and length, in which no two columns have one name.

COLUMNS = 2_000
"""Most columns of a table. The widest tables of spans have 300."""
ROWS = 50_000_000
"""Most rows of a Parquet file, 5 GB as a log's columns: the size of a file does not say how many it has."""
CELL_CHARACTERS = 16 << 20
"""Longest cell and longest line of a CSV file. The csv module's own limit is 131,072 characters, less than a prompt."""
_BATCH_ROWS, _WIDE_BATCH_ROWS = 16_384, 512
_SEPARATORS = ",;\t|"

csv.field_size_limit(CELL_CHARACTERS)


def csv_rows(path: Path, text: IO[str]) -> Iterator[tuple[int, list[str]]]:
    """Rows of a table, the header first, with the number of their last line. Empty rows are left out, and remarks
    above the header: lines that begin with ``#`` and hold no separator.

    The separator is that of ``,``, ``;``, ``|`` and tab which is most frequent in the header. Raises InputFileError.
    """
    lines = _bounded(path, text)
    header, above = "", 0
    while not header.strip() or (header.startswith("#") and not any(map(header.count, _SEPARATORS))):
        header, above = next(lines, "\0"), above + 1
    separator = max(_SEPARATORS, key=header.count)
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
    """The lines of a text. Raises InputFileError for a line that is too long, and for too many empty lines."""
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
    problem = f"has {len(row)} cells where the header names {len(names)} columns"
    if len(row) > len(names):
        return f"{problem}; a cell that holds {separator!r} needs quotes"
    missing = ", ".join(repr(name) for name in names[len(row) :])
    return f"{problem}; if {missing} is empty, end the row with {separator * (len(names) - len(row))!r}"


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
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputFileError(path, f"not a readable Parquet file ({first_line[:200]})") from None


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


DEPTH = 100
"""Most objects and lists within each other. Python's own limit depends on where a value is decoded."""
YAML_BYTES = 64 << 20
"""Largest YAML document, whose reader takes 20 s for so much."""
_YAML_VALUES = 5_000_000
"""Most values of a YAML document: a file of 1 kB can name one list a billion times."""
_decode = msgspec.json.Decoder().decode
_WHITE_BEFORE_COLON = re.compile(rb"[ \t\n\r]:")
_BYTE = re.compile(r"byte (\d+)")
_TOML_LINE = re.compile(r"at line (\d+)")


class BadValueError(ValueError):
    """Text that is no value of its format; the message says why, ``at`` is the byte if it is known."""

    def __init__(self, problem: str, at: int | None = None) -> None:
        super().__init__(problem)
        self.at = at


def json_value(text: bytes) -> Any:
    """The value of a JSON text; NaN and Infinity are numbers, as Python writes them. Raises BadValueError."""
    try:
        try:
            value = _decode(text)
        except (UnicodeDecodeError, msgspec.DecodeError) as error:
            value = _python_value(text, str(error))
        if len(text) > 2 * DEPTH and text.count(b"[") + text.count(b"{") > DEPTH and too_deep(value):
            raise RecursionError
        # A key ends in `":`. So if the text has as many of these as the decoded objects have keys, no key is repeated:
        # the fast path. A row with a nested object takes 0.5 us, a second pass through its JSON 4 us.
        ends = text.count(b'":')
        spaced = text.count(b":") != ends and _WHITE_BEFORE_COLON.search(text) is not None
        if spaced or ends != _keys(value):
            json.loads(text, object_pairs_hook=with_unique_keys, strict=False)
    except RecursionError:
        raise BadValueError(f"has more than {DEPTH} objects or lists within each other") from None
    return value


def _python_value(text: bytes, problem: str) -> Any:
    """What Python's own reader makes of a text that msgspec refuses. Raises BadValueError."""
    place = _BYTE.search(problem)
    try:
        value = json.loads(text.decode())
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise BadValueError(f"is not UTF-8 text ({error.reason})", error.start) from None
    except UnicodeEncodeError:
        raise BadValueError("has half of a surrogate pair (\\ud800 to \\udfff), which is no character") from None
    except ValueError:
        raise BadValueError(f"is not valid JSON: {problem}", int(place[1]) if place else len(text) - 1) from None
    return value


def too_deep(value: Any, most: int = DEPTH, values: float = math.inf) -> bool:
    """Whether a value has more than ``most`` objects and lists within each other, or more than ``values`` in all."""
    level = [value] if type(value) in (dict, list) else []
    seen = 0
    for _ in range(most):
        seen += sum(map(len, level))
        if seen > values:
            break
        level = [
            inner
            for outer in level
            for inner in (outer.values() if type(outer) is dict else outer)
            if type(inner) is dict or type(inner) is list
        ]
        if not level:
            break
    return bool(level)


def with_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these pairs, for ``object_pairs_hook``. Raises BadValueError."""
    unique = dict(pairs)
    if len(unique) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise BadValueError(f"has the key {twice[:60]!r} twice in one object; keep one of them")
    return unique


def _keys(value: Any) -> int:
    """Keys of all objects in a decoded value; too few where a list begins with a number and holds objects later."""
    if type(value) is dict:
        count = len(value)
        for inner in value.values():
            if type(inner) is dict or type(inner) is list:
                count += _keys(inner)
        return count
    if type(value) is not list or not value or type(value[0]) not in (dict, list):
        return 0
    return sum(_keys(inner) for inner in value if type(inner) in (dict, list))


def read_json(path: Path, most: int = SETTINGS_BYTES) -> Any:
    """The value of a JSON file. Raises InputFileError with the line."""
    return json_document(path, read_bytes(path, most))


def json_document(path: Path, content: bytes) -> Any:
    """The value of a JSON file's content. Raises InputFileError with the line."""
    content = content.removeprefix(b"\xef\xbb\xbf")
    try:
        return json_value(content)
    except BadValueError as error:
        line = None if error.at is None else 1 + content.count(b"\n", 0, error.at)
        raise InputFileError(path, str(error), line) from None


def read_object(path: Path, most: int = SETTINGS_BYTES) -> dict[str, Any]:
    """The object of a JSON file. Raises InputFileError."""
    value = read_json(path, most)
    if not isinstance(value, dict):
        raise InputFileError(path, "is not a JSON object")
    return value


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises InputFileError with the line."""
    text = read_text(path)
    try:
        tables = tomllib.loads(text)
        if too_deep(tables):
            raise RecursionError
    except RecursionError:
        raise InputFileError(path, f"has more than {DEPTH} tables or lists within each other") from None
    except ValueError as error:  # also of numbers of thousands of digits, and of days that no calendar has
        line = _TOML_LINE.search(str(error))
        raise InputFileError(path, f"is not valid TOML: {error}", int(line[1]) if line else None) from None
    return tables


def toml_value(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(key)} = {toml_value(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    return repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


def yaml_document(path: Path, content: bytes) -> Any:
    """The value of a YAML document; its tags make no objects. Raises InputFileError with the line."""
    import yaml  # takes 10 ms

    try:
        value = yaml.load(content, Loader=_yaml_loader(yaml))
    except yaml.YAMLError as error:
        mark, why = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        line = None if mark is None else mark.line + 1
        raise InputFileError(path, f"is not valid YAML: {why or str(error).splitlines()[0]}", line) from None
    except RecursionError:
        raise InputFileError(path, f"has more than {DEPTH} objects or lists within each other") from None
    except ValueError as error:  # of days that no calendar has, and of numbers of thousands of digits
        raise InputFileError(path, f"is not valid YAML: {error}") from None
    if too_deep(value, values=_YAML_VALUES):
        raise InputFileError(
            path, f"has more than {DEPTH} objects or lists within each other, or {_YAML_VALUES:,} in all"
        )
    return value


def _yaml_loader(yaml: Any) -> Any:
    base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    class UniqueKeys(base):  # type: ignore[misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            seen: set[str] = set()
            for key in keys:
                if key.value in seen:
                    raise yaml.MarkedYAMLError(None, None, f"the key {key.value!r} is there twice", key.start_mark)
                seen.add(key.value)
            return super().construct_mapping(node, deep)

    return UniqueKeys


# Decodes TOML files into frozen structs; an unknown key is an error that names the nearest known one.

T = TypeVar("T", bound=msgspec.Struct)


def not_positive(name: str, value: float | None) -> str:
    """The problem of a value that must be positive and finite, in words; empty if it is valid or None."""
    if value is None or 0 < value < math.inf:
        return ""
    return f"{name} must be {'finite' if value == math.inf else 'positive'}, not {value:g}"


def given_keys(table: msgspec.Struct, keys: Iterable[str]) -> list[str]:
    """Names among ``keys`` whose value differs from the default."""
    defaults = {field.name: field.default for field in msgspec.structs.fields(table)}
    return [key for key in keys if getattr(table, key) != defaults[key]]


_UNKNOWN = re.compile(r"unknown field `(?P<key>[^`]*)`(?: - at `(?P<where>[^`]*)`)?")


def load_toml(path: Path, struct: type[T]) -> T:
    """Decode ``path`` into ``struct``. Raises InputFileError that names the file, the key and what is expected."""
    data = read_toml(path)
    try:
        return msgspec.convert(data, struct)
    except msgspec.ValidationError as error:
        raise _explained(path, str(error), struct) from None


def _explained(path: Path, message: str, struct: type[msgspec.Struct]) -> InputFileError:
    match = _UNKNOWN.search(message)
    if match is None:
        return InputFileError(path, message.replace("`", "'").replace("$.", ""))
    key, where = match["key"], (match["where"] or "$").removeprefix("$").removeprefix(".")
    known = {field.encode_name for field in _fields_at(struct, where)}
    table = f" in [{where}]" if where else ""
    return InputFileError(path, f"unknown key {key!r}{table}; {name_hint(key, known)}", _line_of(path, key))


def _fields_at(struct: type[msgspec.Struct], where: str) -> tuple[msgspec.structs.FieldInfo, ...]:
    current: type[msgspec.Struct] = struct
    for part in filter(None, (name.split("[")[0] for name in where.split("."))):
        matching = [f for f in msgspec.structs.fields(current) if f.encode_name == part]
        nested = list(_structs(matching[0].type)) if matching else []
        if not nested:
            break
        current = nested[0]
    return msgspec.structs.fields(current)


def _structs(annotation: Any) -> Iterator[type[msgspec.Struct]]:
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        yield annotation
    for argument in get_args(annotation):
        yield from _structs(argument)


def _line_of(path: Path, key: str) -> int | None:
    pattern = re.compile(rf"^\s*(?:\[+\s*)?{re.escape(key)}\s*[=.\]]")
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        if pattern.match(line):
            return number
    return None


# Texts of others, made harmless where they are shown: they may hold control sequences of terminals, commands of CI
# logs, Markdown, or formulas of spreadsheets.

# Controls, what changes the direction of text or has no width, the line ends of Unicode, and lone surrogates.
_HIDDEN = r"\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb\ud800-\udfff"
_ONE_LINE = re.compile(f"[{_HIDDEN}]")
_LINES = re.compile(f"(?!\n)[{_HIDDEN}]")
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_CI_COMMAND = re.compile(  # of GitHub; of Azure and TeamCity
    r"::(?=(?:error|warning|notice|debug|group|endgroup|echo|set-|save-|add-|remove-|stop-)[\w-]*)|##(?=\w*\[)",
    re.IGNORECASE,
)
_MARKDOWN = re.compile(r"[\\`*\[\]|~#]|(?<![^\W_])_|_(?![^\W_])|(?<=:)//|(?<=www)\.", re.IGNORECASE)
_BLOCK = re.compile(r"^(\s*)([-+](?=\s|$)|-(?=[-\s]*$)|=(?==*\s*$)|\d+(?=[.)](?:\s|$)))")  # lists, rules, headings
_NUMBER = re.compile(r"[-+]?([\d.,]+([eE][-+]?\d+)?)?")
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def visible(text: str, *, lines: bool = False) -> str:
    """The text with control characters as escapes, and without what a CI log takes for a command.

    ``lines``: line ends stay, for texts of several lines that are ours.
    """
    text = (_LINES if lines else _ONE_LINE).sub(lambda matched: _escaped(matched.group()), text)
    return _CI_COMMAND.sub(lambda matched: f"{matched.group()[0]}\\{matched.group()[1]}", text)


def markdown(text: str) -> str:
    """The text on one line, as text: no element, link, image, mention or block of GitHub's Markdown."""
    text = visible(" ".join(text.splitlines())).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = _BLOCK.sub(_escaped_block, _MARKDOWN.sub(lambda matched: f"\\{matched.group()}", text))
    return text.replace("@", "@<!-- -->")  # an escaped @ would still mention


def csv_cell(value: Any) -> Any:
    """A value for a CSV file: a text that a spreadsheet would compute is preceded by an apostrophe."""
    if not isinstance(value, str):
        return value
    formula = value.startswith(_FORMULA) and _NUMBER.fullmatch(value) is None
    return _LINES.sub(lambda matched: _escaped(matched.group()), f"'{value}" if formula else value)


def _escaped(character: str) -> str:
    number = ord(character)
    return _SHORT.get(character) or (f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}")


def _escaped_block(matched: re.Match[str]) -> str:
    start, sign = matched.groups()
    return f"{start}{sign}\\" if sign.isdigit() else f"{start}\\{sign}"
