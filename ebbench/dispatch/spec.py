"""Dispatch policies by name; :func:`dispatch_descriptions` lists them.

Settings follow the name, as with scheduling policies: ``sbs:packing=off,cycle_limit=100``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ebbench.dispatch.base import Dispatcher
from ebbench.dispatch.decode import DecodeDispatcher
from ebbench.dispatch.fleet import Fleet
from ebbench.dispatch.immediate import ImmediateDispatcher, LeastOutstanding, PowerOfTwo, PrefixAffine, RoundRobin
from ebbench.dispatch.prefix import PrefixMemory
from ebbench.dispatch.readiness import Checks
from ebbench.dispatch.staggered import StaggeredDispatcher
from ebbench.dispatch.staggered_settings import StaggeredSettings
from ebbench.errors import UnknownNameError, UsageError

DEFAULT = "least-outstanding"

_DESCRIPTIONS = {
    "round-robin": "one unit after the other",
    "least-outstanding": "the unit with the fewest open requests",
    "power-of-two": "the better of two units picked at random",
    "prefix-affine": "the unit that holds most of the prompt's prefix, unless the load gets lopsided",
    "iqr": "Algorithm 3 of Tian et al.: outliers in KV load masked, then the least (batch size, KV tokens)",
    "sbs": "staggered batch scheduling: held back until an instance can start, then packed by chunk capacity",
}


@dataclass(frozen=True)
class DispatchSpec:
    """A parsed dispatch policy. ``settings`` holds what was given; the rest are defaults."""

    kind: str
    settings: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        """Canonical text, which :func:`parse_dispatch` reads back."""
        if not self.settings:
            return self.kind
        return f"{self.kind}:" + ",".join(f"{key}={_shown(value)}" for key, value in self.settings)


def dispatch_descriptions() -> Mapping[str, str]:
    """One line per policy."""
    return dict(_DESCRIPTIONS)


def parse_dispatch(text: str) -> DispatchSpec:
    """Parse ``NAME[:key=value,...]``. Raises UnknownNameError for a name or key, UsageError for a value."""
    kind, _, rest = text.strip().partition(":")
    if kind not in _DESCRIPTIONS:
        raise UnknownNameError("dispatch policy", kind, _DESCRIPTIONS)
    known = _SETTINGS.get(kind, {})
    settings: dict[str, Any] = {}
    for pair in filter(None, rest.split(",")):
        key, equals, value = pair.partition("=")
        if key not in known:
            if not known:
                raise UsageError(f"dispatch policy {kind} takes no settings; write just {kind}")
            raise UnknownNameError(f"setting of dispatch policy {kind}", key, known)
        try:
            settings[key] = known[key](value)
        except ValueError:
            raise UsageError(f"dispatch policy {kind}: {key}={value!r} is not {_expected(known[key])}") from None
        if not equals:
            raise UsageError(f"dispatch policy {kind}: write {key}=VALUE")
    return DispatchSpec(kind, tuple(sorted(settings.items())))


def make_dispatcher(
    spec: DispatchSpec,
    fleet: Fleet,
    *,
    chunk_tokens: int,
    network_ns: int = 0,
    default_forward_ns: int = 50_000_000,
    seed: int = 0,
    generates: bool = False,
) -> Dispatcher:
    """Build the dispatcher over ``fleet``.

    ``chunk_tokens``: prompt tokens a unit computes in one pass; ``network_ns``: the estimate L_net of the way there;
    ``default_forward_ns``: the forward time assumed before the first is measured; ``seed`` of random choices;
    ``generates``: the instances compute prompts and answers both (they are no prefill pool).
    """
    given = dict(spec.settings)
    if spec.kind == "sbs":
        settings = _staggered(
            given, StaggeredSettings(chunk_tokens, network_ns=network_ns, default_forward_ns=default_forward_ns)
        )
        if settings.cache_aware:
            fleet.memory = PrefixMemory(len(fleet.units))
        return StaggeredDispatcher(fleet, settings, generates=generates)
    if spec.kind == "iqr":
        return DecodeDispatcher(fleet, given.get("multiplier", 1.5))
    if spec.kind == "prefix-affine":
        fleet.memory = PrefixMemory(len(fleet.units))
        return ImmediateDispatcher(fleet, PrefixAffine(fleet.memory, given.get("slack", 32)), wants_prefix=True)
    if spec.kind == "power-of-two":
        return ImmediateDispatcher(fleet, PowerOfTwo(np.random.default_rng(seed)))
    return ImmediateDispatcher(fleet, RoundRobin() if spec.kind == "round-robin" else LeastOutstanding())


def _staggered(given: dict[str, Any], base: StaggeredSettings) -> StaggeredSettings:
    checks = Checks(**{key: given.pop(key) for key in ("zero_queue", "signal", "watchdog") if key in given})
    for key, name in (("forward_ms", "default_forward_ns"), ("network_ms", "network_ns")):
        if key in given:
            given[name] = round(given.pop(key) * 1e6)
    if "chunk" in given:
        given["chunk_tokens"] = given.pop("chunk")
    return replace(base, checks=checks, **given)


def _flag(text: str) -> bool:
    values = {"on": True, "off": False, "true": True, "false": False}
    if text not in values:
        raise ValueError
    return values[text]


def _overdraw(text: str) -> str:
    if text not in ("on", "off", "auto"):
        raise ValueError
    return text


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def _limit(text: str) -> int | None:
    return None if text == "off" else _count(text)


def _patience(text: str) -> float | None:
    return None if text == "off" else _positive(text)


def _positive(text: str) -> float:
    value = float(text)
    if not value >= 0:
        raise ValueError
    return value


def _expected(reader: Callable[[str], Any]) -> str:
    texts: dict[Callable[[str], Any], str] = {
        _flag: "on or off", _count: "a whole number of at least 1", _limit: "a whole number of at least 1, or off",
        _patience: "a number of at least 0, or off", _positive: "a number of at least 0", _overdraw: "on, off or auto",
    }  # fmt: skip
    return texts[reader]


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "off" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


_SETTINGS: Mapping[str, Mapping[str, Callable[[str], Any]]] = {
    "prefix-affine": {"slack": _count},
    "iqr": {"multiplier": _positive},
    "sbs": {
        "chunk": _count, "window": _count, "network_ms": _positive, "forward_ms": _positive, "lookahead": _positive,
        "patience": _patience,
        "cycle_limit": _limit, "aged_cycles": _limit, "overdraw": _overdraw,
        **dict.fromkeys(
            ("adaptive", "interval", "packing", "sizing", "cache_aware", "bypass", "zero_queue", "signal", "watchdog"),
            _flag,
        ),
    },
}  # fmt: skip
