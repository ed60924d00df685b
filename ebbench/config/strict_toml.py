"""Decodes TOML files into frozen structs; an unknown key is an error that names the nearest known one."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar, get_args

import msgspec

from ebbench.errors import InputFileError
from ebbench.foreign.documents import read_toml
from ebbench.foreign.opening import read_text
from vllm_eb.settings import name_hint

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
