"""Ends of forward passes, inferred from the streams of one upstream.

All tokens of a pass leave the engine together, so messages come in bursts. The first message after a pause marks the
end of a pass; the time between two such marks is its duration. A pause is a quarter of the smoothed duration, at
least 1 ms. Silence while nothing was open says nothing.
"""

from __future__ import annotations

_SHARE, _LEAST_NS = 4, 1_000_000
_WEIGHT = 0.1


class BurstClock:
    """Turns message times of one upstream into durations of forward passes."""

    def __init__(self) -> None:
        self._mark_ns = 0
        self._last_ns = 0
        self._mean_ns = 0.0

    def message(self, now_ns: int) -> int | None:
        """A message came. The duration of the pass that ended with it, None if it belongs to an earlier one."""
        quiet_ns, self._last_ns = now_ns - self._last_ns, now_ns
        if quiet_ns < max(_LEAST_NS, self._mean_ns / _SHARE):
            return None
        mark_ns, self._mark_ns = self._mark_ns, now_ns
        if not mark_ns:
            return None
        duration_ns = now_ns - mark_ns
        self._mean_ns += _WEIGHT * (duration_ns - self._mean_ns) if self._mean_ns else duration_ns
        return duration_ns

    def idle(self) -> None:
        """Nothing is open any more: the next pause is no pass."""
        self._mark_ns = 0
