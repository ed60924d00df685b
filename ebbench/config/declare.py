"""Declares a setting of a run: its default, help, range, and how a user writes it, in a string too (``ttft:500``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ebbench.errors import UnknownNameError, UsageError
from vllm_eb.settings import Setting as Setting
from vllm_eb.settings import SettingError, UnknownSettingError, check_value, read_settings, read_value
from vllm_eb.settings import setting as setting
from vllm_eb.settings import settings_of as settings_of
from vllm_eb.settings import split_kind as split_kind
from vllm_eb.settings import split_pairs as split_pairs


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


def parse_values(option: str, text: str, about: Setting) -> tuple[Any, ...]:
    """The values of an option that takes several, separated by commas or white space. Raises UsageError."""
    with _usage_errors():
        return tuple(read_value("", part, about, option, equals="") for part in split_pairs(text))


def split_all_pairs(texts: Iterable[str]) -> list[str]:
    """The pairs of an option that may be repeated, with one or several pairs per use."""
    return [pair for text in texts for pair in split_pairs(text)]


def option_name(field: str) -> str:
    """The command-line option of a field: without the unit of times, which its help says."""
    return f"--{field.removesuffix('_s').replace('_', '-')}"


DEFAULT_DEVICE, DEFAULT_MODEL = "rtx-pro-6000", "qwen3-8b"
"""What a command simulates where neither a device nor a model is given."""

DEFAULT_VLLM = "0.32"
"""The version by whose rules a simulated server sizes its KV cache: the newest that the plugin is tested with."""

WORKLOAD, LOAD, SESSIONS, ENGINE = "Workload", "Load", "Sessions", "Engine"
LIMITS, SEARCH, OUTPUT = "Limits", "Search", "Output"
CLIENT, CLUSTER, LABELS = "Client (with a server's URL)", "Several instances", "Labels"


@dataclass(frozen=True)
class Option:
    """How a user writes a setting on the command line."""

    panel: str
    """Heading of ``--help``."""
    names: tuple[str, ...] = ()
    """Names of the option; derived from the field's name if empty."""
    turns_off: bool = False
    """The option takes no value and sets the field to False."""
    complete: str = ""
    """What completes its value, of :data:`ebbench.config.options.COMPLETIONS`."""
    text: Any = None
    """Type of its value on the command line, if not the field's."""
    read: Callable[[Any], Mapping[str, Any]] | None = None
    """Converts that value to settings by name. Raises UsageError."""


@dataclass(frozen=True)
class Declared:
    """One setting. ``part``: the section of a RunSpec that holds it, "" for the spec itself."""

    name: str
    part: str
    kind: Any
    default: Any
    about: Setting
    option: Option | None
    shown: str | None = None
    """A run's condition in words where the value is not the default, with a place for it; "": told elsewhere."""
    real: str = ""
    """What a real server has in place of a setting that only simulated ones take, as a clause; "": they take it too."""
    file: bool = False
    """Its value may name a file of the user's, whose content then belongs to a result's key."""

    def condition(self, value: Any) -> str:
        """The value as a condition of a run; "" for the default, and for settings that are shown elsewhere."""
        if value is None or value == self.default or self.shown == "":
            return ""
        return f"{self.name} {value}" if self.shown is None else self.shown.format(value)

    @property
    def option_names(self) -> tuple[str, ...]:
        """How the option is written, as :class:`Option`'s ``names``."""
        if self.option is not None and self.option.names:
            return tuple(name for names in self.option.names for name in names.split("/"))
        return (option_name(self.name),)


def declare(
    default: Any = MISSING, help: str = "", panel: str = "", *, default_factory: Any = MISSING,
    names: tuple[str, ...] = (),
    turns_off: bool = False, complete: str = "", text: Any = None,
    read: Callable[[Any], Mapping[str, Any]] | None = None, shown: str | None = None, real: str = "",
    file: bool = False, **about: Any,
) -> Any:  # fmt: skip
    """A dataclass field that is a setting; ``about``: range and unit, as in :class:`vllm_eb.settings.Setting`.

    ``shown``, ``real``, ``file``: as in :class:`Declared`.

    Without a panel it has no option of its own, only a name in files.
    """
    option = Option(panel, names, turns_off, complete, text, read) if panel else None
    noted = {"declared": (Setting(help, **about), option, shown, real, file)}
    given = {"default": default} if default is not MISSING else {}
    given |= {"default_factory": default_factory} if default_factory is not MISSING else {}
    return field(**given, metadata=noted)


MOST_SECONDS = 1e8
"""Longest time that can be given or planned: three years; tables hold nanoseconds."""
_declared: dict[type, Mapping[str, Declared]] = {}


def declared_in(kind: type, part: str = "") -> Mapping[str, Declared]:
    """The settings of a dataclass by name; fields that are not declared are left out."""
    if kind not in _declared:
        _declared[kind] = _declared_in(kind)
    return (
        {name: replace(declared, part=part) for name, declared in _declared[kind].items()} if part else _declared[kind]
    )


def _declared_in(kind: type) -> Mapping[str, Declared]:
    hints = get_type_hints(kind)
    return {
        member.name: Declared(member.name, "", hints[member.name], _default(member), *member.metadata["declared"])
        for member in fields(kind)
        if "declared" in member.metadata
    }


def check_ranges(owner: Any) -> None:
    """Raise UsageError, naming the option, for a declared number of ``owner`` out of its range, or an unknown word."""
    kind = type(owner)
    if kind not in _ranges:
        _ranges[kind] = _ranges_of(kind)
    for name, option, about, words in _ranges[kind]:
        value = getattr(owner, name)
        if isinstance(value, int | float):
            check_range(option, value, about)
        elif words and value not in words:
            raise UnknownNameError(option, value, words)


_Range = tuple[str, str, Setting, tuple[Any, ...]]
_ranges: dict[type, tuple[_Range, ...]] = {}


def _ranges_of(kind: type) -> tuple[_Range, ...]:
    """Name, option, range and words of each setting that :func:`check_ranges` looks at."""
    return tuple(
        (
            declared.name,
            next(name for name in declared.option_names if name.startswith("--")),
            declared.about,
            get_args(declared.kind) if get_origin(declared.kind) is Literal else (),
        )
        for declared in declared_in(kind).values()
    )


def _default(member: Field[Any]) -> Any:
    if member.default is not MISSING:
        return member.default
    return member.default_factory() if member.default_factory is not MISSING else MISSING
