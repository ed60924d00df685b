"""Infers the ends of forward passes from the response streams of one upstream.

An engine sends all tokens of a pass together, so messages arrive in bursts. The first message after a pause marks the
end of a pass; the time between two marks is the duration of a pass. A pause is a quarter of the smoothed duration, at
least 1 ms. Silence without open requests is not counted.
"""

from __future__ import annotations

_SHARE, _LEAST_NS = 4, 1_000_000
_WEIGHT = 0.1


class BurstClock:
    """Turns the message times of one upstream into durations of forward passes."""

    def __init__(self) -> None:
        self._mark_ns = 0
        self._last_ns = 0
        self._mean_ns = 0.0

    def message(self, now_ns: int) -> int | None:
        """Record a message.

        Returns the duration (ns) of the pass that it ended, or None if it belongs to an earlier pass.
        """
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
        """Record that no request is open: the next pause is not a pass."""
        self._mark_ns = 0
