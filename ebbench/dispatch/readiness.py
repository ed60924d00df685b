"""The three-way readiness check of section 4.1.2: zero queue, end-of-forward signal, watchdog."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

WATCHDOG_FORWARDS = 5
"""The watchdog expires after this many mean forward times (section 4.1.2)."""


@dataclass(frozen=True)
class Checks:
    """Which of the three paths count; each can be switched off."""

    zero_queue: bool = True
    signal: bool = True
    watchdog: bool = True


class Readiness:
    """Remembers which instances were sent a batch and have not signalled since."""

    def __init__(self, instances: int, checks: Checks) -> None:
        self._checks = checks
        self._signalled = set(range(instances))  # nothing was sent yet, so there is nothing to wait for
        self._running: OrderedDict[int, int] = OrderedDict()  # the others, with the time of dispatch, oldest first
        self.resets = 0

    def dispatched(self, instance: int, now_ns: int) -> None:
        """A batch was sent: from now on the instance is busy, and the watchdog runs."""
        self._signalled.discard(instance)
        self._running[instance] = now_ns
        self._running.move_to_end(instance)

    def free(self, instance: int) -> None:
        """The fast path: a forward pass has ended; or the instance is back from somewhere and has nothing to do."""
        self._signalled.add(instance)
        self._running.pop(instance, None)

    def ready(self, active: AbstractSet[int], idle: AbstractSet[int]) -> AbstractSet[int]:
        """Which of ``active`` can start on a batch. ``idle``: those with nothing open."""
        if not self._checks.signal:
            return active
        ready = self._signalled | idle if self._checks.zero_queue else self._signalled
        return ready & active

    def expired(self, mean_ns: float, now_ns: int) -> list[int]:
        """The safety path: instances silent for too long. They are reset; what they were sent is taken to be done."""
        found: list[int] = []
        while self._checks.watchdog and self._running:
            instance, since_ns = next(iter(self._running.items()))
            if now_ns < since_ns + round(WATCHDOG_FORWARDS * mean_ns):
                break
            self.free(instance)
            self.resets += 1
            found.append(instance)
        return found

    def next_expiry_ns(self, mean_ns: float) -> int | None:
        """When the next watchdog expires."""
        if not self._checks.watchdog or not self._running:
            return None
        return next(iter(self._running.values())) + round(WATCHDOG_FORWARDS * mean_ns)
