"""Settings of staggered dispatch, and its check whether an instance is ready."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Literal

from ebbench.config.declare import Setting, setting

# The three-way readiness check of section 4.1.2: empty queue, end-of-forward signal, watchdog.

WATCHDOG_FORWARDS = 5
"""Mean forward times after which the watchdog expires (section 4.1.2)."""


class Readiness:
    """Tracks the instances that were sent a batch and have not signalled since."""

    def __init__(self, instances: int, settings: StaggeredSettings) -> None:
        self._checks = settings
        self._signalled = set(range(instances))  # no batch was sent yet
        self._running: OrderedDict[int, int] = OrderedDict()  # the others, with the time of dispatch

    def mark_busy(self, instance: int, now_ns: int) -> None:
        """Mark the instance busy and start its watchdog: a batch was sent."""
        self._signalled.discard(instance)
        self._running[instance] = now_ns
        self._running.move_to_end(instance)

    def mark_free(self, instance: int) -> None:
        """Mark the instance free: a forward pass has ended (fast path), or it returned without requests."""
        self._signalled.add(instance)
        self._running.pop(instance, None)

    def ready(self, active: AbstractSet[int], idle: AbstractSet[int]) -> AbstractSet[int]:
        """The instances of ``active`` that can start a batch. ``idle``: instances without open requests."""
        if not self._checks.signal:
            return active
        ready = self._signalled | idle if self._checks.zero_queue else self._signalled
        return ready & active

    def expired(self, mean_ns: float, now_ns: int) -> list[int]:
        """Instances silent for too long (safety path). They are reset: their batches count as done."""
        instances: list[int] = []
        while self._checks.watchdog and self._running:
            instance, since_ns = next(iter(self._running.items()))
            if now_ns < since_ns + round(WATCHDOG_FORWARDS * mean_ns):
                break
            self.mark_free(instance)
            instances.append(instance)
        return instances

    def next_expiry_ns(self, mean_ns: float) -> int | None:
        """When the next watchdog expires (ns)."""
        if not self._checks.watchdog or not self._running:
            return None
        return next(iter(self._running.values())) + round(WATCHDOG_FORWARDS * mean_ns)


@dataclass(frozen=True)
class StaggeredSettings:
    """Settings of the user, and of the caller (chunk, network delay, first forward time). Every part can be switched
    off.

    ``chunk_tokens``: prompt tokens that a unit computes per pass. Without ``adaptive``, ``default_forward_ns`` replaces
    the measured mean forward time. ``sizing`` works only without cached prefixes; ``aged_cycles`` then has no effect.
    """

    chunk_tokens: int
    network_ns: int = 0
    default_forward_ns: int = 50_000_000
    adaptive: bool = setting(True, "Algorithm 1: learn the interval from measured forward times")
    interval: bool = setting(True, "wait for the interval before sending a batch")
    packing: bool = setting(True, "Algorithm 2; off: in order of arrival, units in turn, while there is capacity")
    sizing: bool = setting(True, "choose the length of the next pass by its value")
    overdraw: Literal["on", "off", "auto"] = setting(
        "auto", "prompts may exceed the end of a chunk; auto: only with a backlog"
    )
    cache_aware: bool = setting(False, "count only prompt tokens that are not cached")
    bypass: bool = setting(True, "dispatch at once if waiting gains nothing")
    window: int = setting(100, "number of passes in moving averages", unit="passes", at_least=1)
    patience: float | None = setting(
        2,
        "a request that has waited for this many mean passes goes first",
        unit="passes",
        at_least=0,
        infinite=True,
        none="off",
    )
    lookahead: float = setting(
        0.9,
        "share of the expected pass after which a batch is sent ahead to a busy instance",
        unit="share",
        at_least=0,
        infinite=True,
    )
    aged_cycles: int | None = setting(
        4, "a request left over in more cycles is placed first", unit="cycles", at_least=1, none="off"
    )
    cycle_limit: int | None = setting(
        None, "a request left over in more cycles is refused", unit="cycles", at_least=1, none="off"
    )
    zero_queue: bool = setting(True, "an instance with an empty queue is ready")
    signal: bool = setting(True, "an instance is ready when its forward pass has ended")
    watchdog: bool = setting(True, "an instance that is silent for too long is ready")


OF_THE_CALLER = {
    "chunk": Setting("prompt tokens that a unit computes in one pass", unit="tokens", at_least=1, kind=int),
    "network_ms": Setting("one way from dispatcher to instance", unit="ms", at_least=0),
    "forward_ms": Setting("forward time assumed before one is measured", unit="ms", at_least=0),
}
"""Settings that replace the arguments of :func:`ebbench.dispatch.make_dispatcher`."""
