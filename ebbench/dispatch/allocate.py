"""Algorithms 1 to 3 of Tian et al. 2025 (sections 4.1 to 4.3): dispatch interval, and requests of a batch to units."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ebbench.dispatch.base import DispatchRequest

# Algorithm 1: the dispatch interval from measured forward times (Tian et al. 2025, section 4.1.1).


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


Hit = Callable[[DispatchRequest, int], int]
"""Number of prompt tokens of a request that a unit has in its prefix cache."""


class ChunkPacking:
    """The capacity vector C_avail of Algorithm 2 while requests are placed one by one.

    Without ``hit`` in its basic mode: no prefix is cached anywhere.
    """

    def __init__(self, available: Mapping[int, int], hit: Hit | None = None, whole_chunk: int | None = None) -> None:
        self._capacity = dict(sorted(available.items()))
        self._whole_chunk = whole_chunk
        self._hit = hit

    @property
    def full(self) -> bool:
        """Whether no further request can be placed."""
        return all(capacity <= 0 for capacity in self._capacity.values())

    def place(self, request: DispatchRequest) -> int | None:
        """The unit with the most capacity left after ``request``, or None if that unit had no capacity before.

        A unit takes a request while its C_avail is positive, so a long prompt may exceed it and is then split over
        several passes. With ``whole_chunk`` (not in the paper) only prompts longer than that may exceed it; others go
        to units where they fit into one pass. The lowest unit number wins a tie.
        """
        best, best_after = -1, 0
        for unit, capacity in self._capacity.items():
            after = capacity - request.tokens
            if self._hit is not None:
                after += self._hit(request, unit)
            if best < 0 or after > best_after:
                best, best_after = unit, after
        if best < 0 or self._capacity[best] <= 0:
            return None
        if best_after < 0 and self._whole_chunk is not None and request.tokens <= self._whole_chunk:
            return None
        self._capacity[best] = best_after
        return best


class DecodeLoad(NamedTuple):
    """State of a decode unit: batch size B (sequences) and KV tokens K."""

    requests: int
    kv_tokens: int


def allocate_decode(
    batch: Sequence[DispatchRequest], loads: Mapping[int, DecodeLoad], multiplier: float = 1.5
) -> list[tuple[DispatchRequest, int]]:
    """Algorithm 3: longest request first; units with K above Q3 + multiplier * IQR are excluded; then the least (B, K).

    Quartiles are linearly interpolated (numpy's default). An infinite ``multiplier`` excludes no unit. If all units
    were excluded, none is. The lowest unit number wins a tie.
    """
    state = dict(sorted(loads.items()))
    assigned = []
    for request in sorted(batch, key=lambda a: -a.total_tokens):
        bound = outlier_bound([load.kv_tokens for load in state.values()], multiplier)
        safe = [unit for unit, load in state.items() if load.kv_tokens <= bound] or list(state)
        chosen = min(safe, key=state.__getitem__)
        before = state[chosen]
        state[chosen] = DecodeLoad(before.requests + 1, before.kv_tokens + request.total_tokens)
        assigned.append((request, chosen))
    return assigned


def outlier_bound(kv_tokens: Sequence[int], multiplier: float) -> float:
    """``Q3 + multiplier * (Q3 - Q1)`` of the units' KV tokens."""
    ordered = sorted(kv_tokens)
    q1, q3 = _quantile(ordered, 0.25), _quantile(ordered, 0.75)
    # Infinity times a spread of zero is undefined.
    return float("inf") if multiplier == float("inf") else q3 + multiplier * (q3 - q1)


def _quantile(ordered: Sequence[int], share: float) -> float:
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])
