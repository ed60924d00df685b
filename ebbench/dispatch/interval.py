"""Algorithm 1: the dispatch interval, from measured forward times (Tian et al. 2025, section 4.1.1)."""

from __future__ import annotations

from collections import deque


class AdaptiveInterval:
    """``I = (mean T_fwd + L_net) / N_active`` over a sliding window of forward times; all in nanoseconds.

    Recomputed at every end of a forward pass and at every change of topology. With no instance active it keeps its last
    value, as in the paper.
    """

    def __init__(self, window: int, network_ns: int, default_ns: int, active: int) -> None:
        self._window, self._network_ns = window, network_ns
        self._times: deque[int] = deque()
        self._total = 0
        self._active = active
        self.mean_ns: float = default_ns
        self.interval_ns = 0
        self._recompute()

    def end_forward(self, measured_ns: int) -> None:
        """OnEndForward: take one measured forward time in."""
        self._times.append(measured_ns)
        self._total += measured_ns
        if len(self._times) > self._window:
            self._total -= self._times.popleft()
        self.mean_ns = self._total / len(self._times)
        self._recompute()

    def topology(self, active: int) -> None:
        """OnTopologyChange: that many instances are active now."""
        self._active = active
        self._recompute()

    def _recompute(self) -> None:
        if self._active > 0:
            self.interval_ns = round((self.mean_ns + self._network_ns) / self._active)
