"""Parses settings that a user writes as text: ``eb:theta=0.5``, ``sbs:packing=off``, ``reset:every=10``, ``ttft:500``.

The only parser of such strings. A setting is a field of a frozen dataclass with range, unit and help text
(:func:`setting`); :func:`read_settings` converts text to typed values in range. Its errors name the setting, what it
accepts and, for a mistyped name, the nearest one. The module is part of the plugin, which a server loads without
ebbench; ``ebbench.config.declare`` adds ebbench's error classes.

Numbers are parsed by Python's ``int`` and ``float``. msgspec's lenient conversion would refuse ``.5``, ``+3``,
``1_000`` and ``on``, which earlier versions accepted.
"""

from __future__ import annotations

import inspect
import math
import re
import types
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


class GivenValueError(ValueError):
    """An invalid policy, setting, calibration or coefficient; the message says what to give instead."""


MOST_NAMED = 60
"""Names that an error lists: all policies, devices or workloads, but not all runs of a year."""


def name_hint(name: str, known: Iterable[str]) -> str:
    """What to write instead of an unknown name: the nearest known one, or all of them."""
    import difflib

    choices = sorted(known)
    by_small_letters = {choice.lower(): choice for choice in reversed(choices)}
    near = difflib.get_close_matches(name.lower(), by_small_letters, n=1, cutoff=0.5)
    if near:
        return f"did you mean {by_small_letters[near[0]]!r}?"
    more = f" and {len(choices) - MOST_NAMED} more" if len(choices) > MOST_NAMED else ""
    return f"known: {', '.join(choices[:MOST_NAMED])}{more}" if choices else "there is none"


REQUIRED = object()

_TRUE, _FALSE = ("on", "true", "1"), ("off", "false", "0")
_WITHOUT_COMMA = 9_999
_BETWEEN = re.compile(r"[,\s]+")
_UNITS = {"s": "seconds", "ms": "milliseconds", "s/token": "seconds per token"}


class SettingError(GivenValueError):
    """A value out of range; the message names the setting."""


class UnknownSettingError(SettingError):
    """An unknown setting. ``what``: the kind of thing in words; ``name`` and ``known``: the names."""

    def __init__(self, of: str, name: str, known: Mapping[str, Setting], noun: str = "setting") -> None:
        published = name.replace("-", "_")
        own = next((own for own, about in known.items() if about.published == published), None)
        if own is not None:
            remedy = f"here it is {own}="
        else:
            remedy = name_hint(name, known) if known else f"it takes no {noun}s"
        self.what = f"{noun} of {of}"
        super().__init__(f"unknown {self.what} {name!r}; {remedy}")
        self.name, self.known = name, tuple(known)


@dataclass(frozen=True)
class Setting:
    """Description of a setting.

    ``kind``: int, float, bool or a tuple of allowed words. ``unit``: ``slots`` (of max_num_seqs), ``s``, ``ms``,
    ``s/token``, ``steps``, ``requests``, ``percent``, ``share`` and others; empty for a plain number. ``above`` and
    ``below`` are exclusive bounds, ``at_least`` and ``at_most`` inclusive ones; infinity is allowed only with
    ``infinite``. ``none``: the word for None. ``doubtful_from``: a value this large is probably in another unit.
    ``example``: a valid value for messages. ``published``: the name of the same setting where the rule comes from.
    """

    help: str
    unit: str = ""
    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None
    doubtful_from: float | None = None
    example: object = None
    published: str = ""
    none: str = ""
    infinite: bool = False
    default: object = REQUIRED
    kind: Any = float

    @property
    def required(self) -> bool:
        """Whether it has no default."""
        return self.default is REQUIRED

    @property
    def values(self) -> str:
        """Its range in words."""
        if self.kind is bool:
            return "true or false"
        if isinstance(self.kind, tuple):
            return " or ".join(self.kind)
        if self.above is not None and self.below is not None:
            return f"strictly between {self.above:g} and {self.below:g}"
        parts = [
            f"{word} {_written(bound)}"
            for word, bound in (
                ("above", self.above),
                ("below", self.below),
                ("at least", self.at_least),
                ("at most", self.at_most),
            )
            if bound is not None
        ]
        return " and ".join(parts) or "any number"

    @property
    def takes(self) -> str:
        """The accepted values in words, with the unit."""
        if self.kind is bool:
            return "on or off"
        if isinstance(self.kind, tuple):
            return f"one of {', '.join(self.kind)}"
        number = "a whole number" if self.kind is int else "a number"
        bounds = "" if self.values == "any number" else f" {self.values}"
        bounds = bounds.replace(" at least", " of at least", 1) if bounds.startswith(" at least") else bounds
        unit = f" ({self.unit_in_words})" if self.unit else ""
        return number + bounds + unit + (f", or {self.none}" if self.none else "")

    @property
    def unit_in_words(self) -> str:
        """The unit in words."""
        return _UNITS.get(self.unit, self.unit)

    @classmethod
    def of_field(cls, made: Field[Any], owner: type) -> Setting:
        """The setting of a dataclass field made by :func:`setting`, with its type and default."""
        about: Setting = made.metadata["setting"]
        return replace(
            about,
            default=REQUIRED if made.default is MISSING else made.default,
            kind=_kind(get_type_hints(owner)[made.name]),
        )


def setting(default: Any = REQUIRED, help: str = "", **about: Any) -> Any:
    """A dataclass field that is a setting; ``about`` as in :class:`Setting`. Without a default it is required."""
    noted = {"setting": Setting(help, **about)}
    return field(metadata=noted) if default is REQUIRED else field(default=default, metadata=noted)


_known: dict[type, Mapping[str, Setting]] = {}


def settings_of(kind: type) -> Mapping[str, Setting]:
    """The settings of a dataclass by name: its own first, then inherited ones. Other fields are left out."""
    if kind not in _known:
        made = {field.name: field for field in fields(kind) if "setting" in field.metadata}
        names = (name for owner in kind.__mro__ for name in inspect.get_annotations(owner) if name in made)
        _known[kind] = {name: Setting.of_field(made[name], kind) for name in dict.fromkeys(names)}
    return _known[kind]


def split_kind(text: str) -> tuple[str, str]:
    """Split ``eb:k=3`` into kind and settings."""
    kind, _, rest = text.strip().partition(":")
    return kind.strip(), rest


def split_pairs(text: str) -> list[str]:
    """The ``key=value`` pairs of a text, separated by commas or white space."""
    return [part for part in _BETWEEN.split(text) if part]


def read_settings(
    text: str,
    known: Mapping[str, Setting],
    of: str,
    *,
    noun: str = "setting",
    equals: str = "=",
    aliases: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Parse ``key=value`` pairs into typed values in range, in the order given.

    ``of``: the owner of the settings; ``noun``: the word for a key; both for messages. ``aliases``: other names of
    settings. Raises UnknownSettingError for a key that is not in ``known``, SettingError for a repeated key and for an
    invalid value.
    """
    settings: dict[str, Any] = {}
    for pair in split_pairs(text):
        written, given, value = pair.partition(equals)
        key = (aliases or {}).get(written, written)
        if key not in known:
            raise UnknownSettingError(of, key, known, noun)
        if key in settings:
            raise SettingError(f"{of}: {key} is given twice; give it once")
        settings[key] = read_value(key, value if given else "", known[key], of, equals=equals)
    return settings


def read_value(name: str, text: str, about: Setting, of: str, *, equals: str = "=") -> Any:
    """Parse one value. Raises SettingError that says what the setting accepts."""
    if about.kind is int and about.at_most is None and len(text) > len(str(_WITHOUT_COMMA)):
        about = replace(about, at_most=MOST_COUNT)  # the message then names this bound
    try:
        value = _typed(text, about)
        check_value(name, value, about)
    except ValueError:
        example = "" if about.example is None else f", e.g. {name}{equals}{about.example}"
        written = f"{name}{equals}{text}"
        raise SettingError(f"{of}: {written!r} is not valid; write {about.takes}{example}") from None
    return value


def _typed(text: str, about: Setting) -> Any:
    if about.none and text == about.none:
        return None
    if about.kind is bool:
        if text.lower() not in _TRUE + _FALSE:
            raise ValueError
        return text.lower() in _TRUE
    if isinstance(about.kind, tuple):
        if text not in about.kind:
            raise ValueError
        return text
    return about.kind(text)


MOST_COUNT = 2**31 - 1
"""Largest whole number of a setting that states no bound: tables and simulator hold 32-bit counts, as vLLM does."""


def check_value(name: str, value: Any, about: Setting) -> None:
    """Raise SettingError for a number out of range; None is allowed if it is the default."""
    if value is None or isinstance(value, bool | str):
        return
    if not math.isfinite(value) and not (about.infinite and value == math.inf):
        raise SettingError(f"{name} must be a finite number, not {value}")
    inside = (
        (about.at_least is None or value >= about.at_least)
        and (about.at_most is None or value <= about.at_most)
        and (about.above is None or value > about.above)
        and (about.below is None or value < about.below)
    )
    if isinstance(value, int) and about.at_most is None and value > MOST_COUNT:
        raise SettingError(f"{name} must be at most {MOST_COUNT:,}, not {value:,}")
    if not inside:
        verb = "lie" if about.above is not None and about.below is not None else "be"
        unit = f" ({about.unit_in_words})" if about.unit else ""
        raise SettingError(f"{name} must {verb} {about.values}{unit}, not {_written(value)}")


def _written(value: float) -> str:
    return f"{value:g}" if isinstance(value, float) else f"{value:,}" if abs(value) > _WITHOUT_COMMA else str(value)


def text_of(value: object) -> str:
    """The text that :func:`read_value` parses to ``value``."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _kind(annotation: Any) -> Any:
    """int, float, bool, or the words of a Literal; ``| None`` is ignored."""
    if get_origin(annotation) in (Union, types.UnionType):
        annotation = next(part for part in get_args(annotation) if part is not type(None))
    return get_args(annotation) if get_origin(annotation) is Literal else annotation
