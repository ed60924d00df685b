"""Declares a setting of a run: its default, help, range, and how a user writes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from typing import Any, get_type_hints

from ebbench.config.setting_strings import check_range, option_name
from vllm_eb.settings import Setting

DEFAULT_DEVICE, DEFAULT_MODEL = "rtx-pro-6000", "qwen3-8b"
"""What a command simulates where neither a device nor a model is given."""

DEFAULT_VLLM = "0.32"
"""The version by whose rules a simulated server sizes its KV cache: the newest that the plugin is tested with."""


WORKLOAD, LOAD, SESSIONS, ENGINE = "Workload", "Load", "Sessions", "Engine"
CLIENT, CLUSTER = "Client (with a server's URL)", "Several instances"


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
    """Function of :mod:`ebbench.cli.options` that completes its value."""
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

    @property
    def option_names(self) -> tuple[str, ...]:
        """How the option is written, as :class:`Option`'s ``names``."""
        if self.option is not None and self.option.names:
            return tuple(one for names in self.option.names for one in names.split("/"))
        return (option_name(self.name),)


def declare(
    default: Any = MISSING, help: str = "", panel: str = "", *, default_factory: Any = MISSING,
    names: tuple[str, ...] = (),
    turns_off: bool = False, complete: str = "", text: Any = None,
    read: Callable[[Any], Mapping[str, Any]] | None = None, **about: Any,
) -> Any:  # fmt: skip
    """A dataclass field that is a setting; ``about``: range and unit, as in :class:`vllm_eb.settings.Setting`.

    Without a panel it has no option of its own, only a name in files.
    """
    option = Option(panel, names, turns_off, complete, text, read) if panel else None
    noted = {"declared": (Setting(help, **about), option)}
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
    return {name: replace(one, part=part) for name, one in _declared[kind].items()} if part else _declared[kind]


def _declared_in(kind: type) -> Mapping[str, Declared]:
    hints = get_type_hints(kind)
    return {
        one.name: Declared(one.name, "", hints[one.name], _default(one), *one.metadata["declared"])
        for one in fields(kind)
        if "declared" in one.metadata
    }


def check_ranges(owner: Any) -> None:
    """Raise UsageError, naming the option, for a declared number of ``owner`` that is out of its range."""
    for one in declared_in(type(owner)).values():
        value = getattr(owner, one.name)
        if isinstance(value, int | float):
            check_range(next(name for name in one.option_names if name.startswith("--")), value, one.about)


def _default(one: Field[Any]) -> Any:
    if one.default is not MISSING:
        return one.default
    return one.default_factory() if one.default_factory is not MISSING else MISSING
