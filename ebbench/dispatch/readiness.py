"""The three-way readiness check of section 4.1.2: zero queue, end-of-forward signal, watchdog."""

from __future__ import annotations

from dataclasses import dataclass

WATCHDOG_FORWARDS = 5
"""The watchdog expires after this many mean forward times (section 4.1.2)."""


@dataclass(frozen=True)
class Checks:
    """Which of the three paths count; each can be switched off."""

    zero_queue: bool = True
    signal: bool = True
    watchdog: bool = True


@dataclass(slots=True)
class _Instance:
    signalled: bool = True  # nothing was sent yet, so there is nothing to wait for
    dispatched_ns: int = 0
    lost: int = 0  # watchdog resets in a row, without a signal between


class Readiness:
    """Remembers, per instance, what was dispatched and signalled."""

    def __init__(self, instances: int, checks: Checks) -> None:
        self._checks = checks
        self._instances = [_Instance() for _ in range(instances)]

    def dispatched(self, instance: int, now_ns: int) -> None:
        """A batch was sent: from now on the instance is busy, and the watchdog runs."""
        state = self._instances[instance]
        state.signalled, state.dispatched_ns = False, now_ns

    def end_forward(self, instance: int) -> None:
        """The fast path."""
        self._instances[instance].signalled = True
        self._instances[instance].lost = 0

    def reset(self, instance: int) -> None:
        """Forget everything: the instance is new, or back."""
        self._instances[instance] = _Instance()

    def ready(self, instance: int, idle: bool) -> bool:
        """Whether the instance can start on a batch. ``idle``: nothing is open on it."""
        if self._checks.zero_queue and idle:
            return True
        return self._instances[instance].signalled or not self._checks.signal

    def expired(self, instance: int, mean_ns: float, now_ns: int) -> bool:
        """The safety path: no signal for too long. Forces the reset; what was sent is taken to be done."""
        if not self._checks.watchdog or now_ns < self.expires_ns(instance, mean_ns):
            return False
        self._instances[instance].signalled = True
        self._instances[instance].lost += 1
        return True

    def expires_ns(self, instance: int, mean_ns: float) -> int:
        """When the watchdog of an instance that has not signalled expires."""
        return self._instances[instance].dispatched_ns + round(WATCHDOG_FORWARDS * mean_ns)

    def silent(self, instance: int) -> int:
        """How many watchdog resets in a row there were."""
        return self._instances[instance].lost
