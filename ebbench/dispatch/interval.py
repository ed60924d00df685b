"""Algorithm 1: the dispatch interval from measured forward times (Tian et al. 2025, section 4.1.1)."""

from __future__ import annotations

from collections import deque


class AdaptiveInterval:
    """``I = (mean T_fwd + L_net) / N_active`` over a sliding window of forward times, in ns.

    Recomputed after every forward pass and every change of topology. Without active instances the last value holds, as
    in the paper.
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
        """OnEndForward: add one measured forward time (ns)."""
        self._times.append(measured_ns)
        self._total += measured_ns
        if len(self._times) > self._window:
            self._total -= self._times.popleft()
        self.mean_ns = self._total / len(self._times)
        self._recompute()

    def topology(self, active: int) -> None:
        """OnTopologyChange: set the number of active instances."""
        self._active = active
        self._recompute()

    def _recompute(self) -> None:
        if self._active > 0:
            self.interval_ns = round((self.mean_ns + self._network_ns) / self._active)
