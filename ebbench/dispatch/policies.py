"""Dispatch policies by name.

Settings follow the name, as for scheduling policies: ``sbs:packing=off,cycle_limit=100``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ebbench.config.declare import Setting, named_settings, settings_of, split_kind
from ebbench.dispatch.algorithms import AdaptiveInterval
from ebbench.dispatch.base import Dispatcher, Fleet, PrefixMemory
from ebbench.dispatch.immediate import (
    DecodeDispatcher,
    ImmediateDispatcher,
    LeastOutstanding,
    PowerOfTwo,
    PrefixAffine,
    RoundRobin,
)
from ebbench.dispatch.staggered import OF_THE_CALLER, StaggeredDispatcher, StaggeredSettings
from ebbench.errors import check_known

SLACK = Setting(
    "open requests by which a unit may exceed another before its cached prefix stops counting",
    unit="requests",
    at_least=1,
    kind=int,
    default=32,
)
MULTIPLIER = Setting(
    "interquartile ranges above the third quartile from which a KV load is an outlier",
    at_least=0,
    infinite=True,
    default=1.5,
)
WINDOW = Setting(
    "place the requests of an interval of Algorithm 1 together, longest first; off (ours): each as it arrives",
    kind=bool,
    default=True,
)
PASSES_AVERAGED = 100
DESCRIPTIONS = {
    "round-robin": "one unit after the other",
    "least-outstanding": "the unit with the fewest open requests",
    "power-of-two": "the better of two units picked at random",
    "prefix-affine": "the unit that holds most of the prompt's prefix, unless the load gets unbalanced",
    "iqr": "Algorithm 3 of Tian et al.: a window's requests, longest first, to the least (batch size, KV tokens) of "
    "the units whose KV load is no outlier",
    "sbs": "staggered batch scheduling: held back until an instance can start, then packed by chunk capacity",
}


@dataclass(frozen=True)
class DispatchSpec:
    """A parsed dispatch policy. ``settings`` holds the given values; the others are defaults."""

    kind: str
    settings: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        """The canonical text, which :func:`parse_dispatch` accepts."""
        if not self.settings:
            return self.kind
        return f"{self.kind}:" + ",".join(f"{key}={_setting_text(value)}" for key, value in self.settings)


def parse_dispatch(text: str) -> DispatchSpec:
    """Parse ``NAME[:key=value,...]``. Raises UnknownNameError for a name or key, UsageError for a value."""
    kind, rest = split_kind(text)
    check_known("dispatch policy", kind, DESCRIPTIONS)
    return DispatchSpec(kind, tuple(sorted(named_settings(rest, _SETTINGS.get(kind, {}), f"dispatch {kind}").items())))


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
    """Build the dispatcher of ``spec`` over ``fleet``.

    ``chunk_tokens``: prompt tokens that a unit computes per pass. ``network_ns``: the estimate L_net of the network
    delay. ``default_forward_ns``: forward time assumed before the first measurement. ``seed``: of random choices.
    ``generates``: the instances prefill and decode (they are not a prefill pool).
    """
    given = dict(spec.settings)
    if spec.kind == "sbs":
        for key, name in (("forward_ms", "default_forward_ns"), ("network_ms", "network_ns")):
            if key in given:
                given[name] = round(given.pop(key) * 1e6)
        if "chunk" in given:
            given["chunk_tokens"] = given.pop("chunk")
        settings = replace(
            StaggeredSettings(chunk_tokens, network_ns=network_ns, default_forward_ns=default_forward_ns), **given
        )
        if settings.cache_aware:
            fleet.memory = PrefixMemory(len(fleet.units))
        return StaggeredDispatcher(fleet, settings, generates=generates)
    if spec.kind == "iqr":
        interval = AdaptiveInterval(PASSES_AVERAGED, network_ns, default_forward_ns, len(fleet.active))
        return DecodeDispatcher(fleet, interval, **given)
    if spec.kind == "prefix-affine":
        fleet.memory = PrefixMemory(len(fleet.units))
        slack = given.get("slack", SLACK.default)
        return ImmediateDispatcher(fleet, PrefixAffine(fleet.memory, slack), wants_prefix=True)
    if spec.kind == "power-of-two":
        return ImmediateDispatcher(fleet, PowerOfTwo(np.random.default_rng(seed)))
    return ImmediateDispatcher(fleet, RoundRobin() if spec.kind == "round-robin" else LeastOutstanding())


def _setting_text(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "off" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


_SETTINGS: Mapping[str, Mapping[str, Setting]] = {
    "prefix-affine": {"slack": SLACK},
    "iqr": {"multiplier": MULTIPLIER, "window": WINDOW},
    "sbs": {**settings_of(StaggeredSettings), **OF_THE_CALLER},
}
