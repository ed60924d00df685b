"""Settings of staggered dispatch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ebbench.dispatch.readiness import Checks

Overdraw = Literal["on", "off", "auto"]


@dataclass(frozen=True)
class StaggeredSettings:
    """Every part can be switched off by itself.

    ``adaptive``: Algorithm 1's interval; off: ``default_forward_ns`` stands for the mean forward time for good.
    ``interval``: wait for the interval at all. ``packing``: Algorithm 2; off: in order of arrival, units in turn, while
    the instance has capacity. ``cache_aware``: count uncached tokens only. ``cycle_limit``: refuse a request that was
    left over in more cycles (None: never). ``chunk_tokens``: prompt tokens a unit computes in one pass. ``sizing``:
    weigh the length of the next pass; without cached prefixes only, and ``aged_cycles`` then does not matter.
    ``overdraw``: prompts may run over the end of a chunk; auto: under backlog only. ``patience``: one that has waited
    for so many mean passes goes first (None: never). ``lookahead``: share of the expected pass after which a batch is
    sent ahead to an instance that goes on.
    """

    chunk_tokens: int
    window: int = 100
    network_ns: int = 0
    default_forward_ns: int = 50_000_000
    adaptive: bool = True
    interval: bool = True
    packing: bool = True
    sizing: bool = True
    patience: float | None = 2
    overdraw: Overdraw = "auto"
    cache_aware: bool = False
    bypass: bool = True
    lookahead: float = 0.9
    aged_cycles: int | None = 4
    cycle_limit: int | None = None
    checks: Checks = field(default_factory=Checks)
