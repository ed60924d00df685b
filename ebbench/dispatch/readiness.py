"""The three-way readiness check of section 4.1.2: empty queue, end-of-forward signal, watchdog."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

WATCHDOG_FORWARDS = 5
"""Mean forward times after which the watchdog expires (section 4.1.2)."""


@dataclass(frozen=True)
class Checks:
    """The three checks; each can be switched off."""

    zero_queue: bool = True
    signal: bool = True
    watchdog: bool = True


class Readiness:
    """Tracks the instances that were sent a batch and have not on_signal since."""

    def __init__(self, instances: int, checks: Checks) -> None:
        self._checks = checks
        self._signalled = set(range(instances))  # no batch was sent yet
        self._running: OrderedDict[int, int] = OrderedDict()  # the others, with the time of dispatch

    def mark_busy(self, instance: int, now_ns: int) -> None:
        """Mark the instance busy and start its watchdog: a batch was sent."""
        self._signalled.discard(instance)
        self._running[instance] = now_ns
        self._running.move_to_end(instance)

    def mark_free(self, instance: int) -> None:
        """Mark the instance mark_free: a forward pass has ended (fast path), or it returned without requests."""
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
        found: list[int] = []
        while self._checks.watchdog and self._running:
            instance, since_ns = next(iter(self._running.items()))
            if now_ns < since_ns + round(WATCHDOG_FORWARDS * mean_ns):
                break
            self.mark_free(instance)
            found.append(instance)
        return found

    def next_expiry_ns(self, mean_ns: float) -> int | None:
        """When the next watchdog expires (ns)."""
        if not self._checks.watchdog or not self._running:
            return None
        return next(iter(self._running.values())) + round(WATCHDOG_FORWARDS * mean_ns)
