"""Decodes JSON, YAML and TOML: values of bounded depth, in which no object has a key twice.

Readers differ in which of two values of one key they take, so that such an object is refused.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar, get_args

import msgspec

from ebbench.errors import InputFileError
from ebbench.foreign.opening import SETTINGS_BYTES, read_bytes, read_text
from vllm_eb.settings import name_hint

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
        check_keys(text, value)
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


def check_keys(text: bytes, value: Any) -> None:
    """Raise BadValueError if an object in ``text``, decoded as ``value``, has a key twice.

    A key ends in ``":``. So if the text has as many of these as the decoded objects have keys, no key is repeated: the
    fast path. A row with a nested object takes 0.5 us, a second pass through its JSON 4 us.
    """
    ends = text.count(b'":')
    spaced = text.count(b":") != ends and _WHITE_BEFORE_COLON.search(text) is not None
    if spaced or ends != _keys(value):
        json.loads(text, object_pairs_hook=with_unique_keys, strict=False)


def with_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these pairs, for ``object_pairs_hook``. Raises BadValueError."""
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise BadValueError(f"has the key {twice[:60]!r} twice in one object; keep one of them")
    return found


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
        found = tomllib.loads(text)
        if too_deep(found):
            raise RecursionError
    except RecursionError:
        raise InputFileError(path, f"has more than {DEPTH} tables or lists within each other") from None
    except ValueError as error:  # also of numbers of thousands of digits, and of days that no calendar has
        line = _TOML_LINE.search(str(error))
        raise InputFileError(path, f"is not valid TOML: {error}", int(line[1]) if line else None) from None
    return found


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


def given_of(table: msgspec.Struct, keys: Iterable[str]) -> list[str]:
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
        found = [f for f in msgspec.structs.fields(current) if f.encode_name == part]
        nested = list(_structs(found[0].type)) if found else []
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
