"""Settings of policies: fields of a dataclass that know their range, their unit and what they are for."""

from __future__ import annotations

import math
import types
from dataclasses import MISSING, Field, dataclass, field, replace
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from vllm_eb.errors import GivenValueError

REQUIRED = object()


class SettingError(GivenValueError):
    """A value out of range; the message names the setting."""


@dataclass(frozen=True)
class Setting:
    """What is known of a setting.

    ``kind``: int, float, bool or a tuple of the words it can be. ``unit``: ``slots`` (of max_num_seqs), ``s``,
    ``s/token``, ``steps``, ``requests`` or ``share``; empty for a plain number. ``above`` and ``below`` are excluded,
    ``at_least`` and ``at_most`` included. ``doubtful_from``: a value this large is surely in another unit.
    ``example``: a value to begin with, of a setting that has no default.
    """

    help: str
    unit: str = ""
    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None
    doubtful_from: float | None = None
    example: object = None
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
            f"{word} {bound:g}"
            for word, bound in (
                ("above", self.above),
                ("below", self.below),
                ("at least", self.at_least),
                ("at most", self.at_most),
            )
            if bound is not None
        ]
        return " and ".join(parts) or "any number"

    @classmethod
    def of_field(cls, made: Field[Any], owner: type) -> Setting:
        """What :func:`setting` noted at a dataclass field, with its type and default."""
        about: Setting = made.metadata["setting"]
        return replace(
            about,
            default=REQUIRED if made.default is MISSING else made.default,
            kind=_kind(get_type_hints(owner)[made.name]),
        )


def setting(default: Any = REQUIRED, help: str = "", **about: Any) -> Any:
    """A dataclass field that is a setting; ``about`` as of :class:`Setting`. Without a default it has to be given."""
    noted = {"setting": Setting(help, **about)}
    return field(metadata=noted) if default is REQUIRED else field(default=default, metadata=noted)


def parse_value(text: str, about: Setting) -> object:
    """Read a value. Raises ValueError saying what is expected."""
    if about.kind is bool:
        if text.lower() not in ("true", "false", "on", "off", "1", "0"):
            raise ValueError("true or false")
        return text.lower() in ("true", "on", "1")
    if isinstance(about.kind, tuple):
        if text not in about.kind:
            raise ValueError(f"one of {', '.join(about.kind)}")
        return text
    return about.kind(text)


def check_value(name: str, value: Any, about: Setting) -> None:
    """Raise SettingError for a number out of range; None is always allowed where it is the default."""
    if value is None or isinstance(value, bool | str):
        return
    if not math.isfinite(value):
        raise SettingError(f"{name} must be a finite number, not {value}")
    inside = (
        (about.at_least is None or value >= about.at_least)
        and (about.at_most is None or value <= about.at_most)
        and (about.above is None or value > about.above)
        and (about.below is None or value < about.below)
    )
    if not inside:
        verb = "lie" if about.above is not None and about.below is not None else "be"
        unit = {"s": " seconds"}.get(about.unit, "")
        raise SettingError(f"{name} must {verb} {about.values}{unit}, not {value:g}")


def text_of(value: object) -> str:
    """A value as :func:`parse_value` reads it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _kind(annotation: Any) -> Any:
    """int, float, bool, or the words of a Literal; ``| None`` is left out."""
    if get_origin(annotation) in (Union, types.UnionType):
        annotation = next(part for part in get_args(annotation) if part is not type(None))
    return get_args(annotation) if get_origin(annotation) is Literal else annotation
