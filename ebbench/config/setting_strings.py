"""Setting strings such as ``sbs:packing=off`` and ``ttft:500``: :mod:`vllm_eb.settings` with ebbench's errors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from ebbench.errors import UnknownNameError, UsageError
from vllm_eb.settings import (
    Setting,
    SettingError,
    UnknownSettingError,
    check_value,
    read_settings,
    read_value,
    setting,
    settings_of,
    split_kind,
    split_pairs,
)

__all__ = [
    "COUNT",
    "NOT_NEGATIVE",
    "PORT",
    "POSITIVE",
    "Setting",
    "check_fields",
    "check_range",
    "named_settings",
    "option_name",
    "pairs_of",
    "setting",
    "settings_of",
    "split_kind",
    "split_pairs",
    "value_of",
    "values_of",
]


@contextmanager
def _usage_errors() -> Iterator[None]:
    try:
        yield
    except UnknownSettingError as error:
        if not error.known:
            raise UsageError(str(error)) from None
        raise UnknownNameError(error.what, error.name, error.known) from None
    except SettingError as error:
        raise UsageError(str(error)) from None


named_settings = _usage_errors()(read_settings)
""":func:`vllm_eb.settings.read_settings`, but raises UnknownNameError for an unknown key, UsageError for a value."""
check_range = _usage_errors()(check_value)
""":func:`vllm_eb.settings.check_value`, but raises UsageError."""
value_of = _usage_errors()(read_value)
""":func:`vllm_eb.settings.read_value`, but raises UsageError."""


def values_of(option: str, text: str, about: Setting) -> tuple[Any, ...]:
    """The values of an option that takes several, separated by commas or white space. Raises UsageError."""
    with _usage_errors():
        return tuple(read_value("", part, about, option, equals="") for part in split_pairs(text))


def pairs_of(texts: Iterable[str]) -> list[str]:
    """The pairs of an option that may be repeated, with one or several pairs per use."""
    return [pair for text in texts for pair in split_pairs(text)]


POSITIVE, NOT_NEGATIVE, COUNT = Setting("", above=0), Setting("", at_least=0), Setting("", at_least=1)
PORT = Setting("", at_least=0, at_most=65535)


def option_name(field: str) -> str:
    """The command-line option of a field: without the unit of times, which its help says."""
    return f"--{field.removesuffix('_s').replace('_', '-')}"


def check_fields(owner: object, names: Iterable[str], about: Setting) -> None:
    """Raise UsageError, naming the option, for a field of ``owner`` that is out of range; None is allowed."""
    with _usage_errors():
        for name in names:
            check_value(option_name(name), getattr(owner, name), about)
