"""Estimates the duration of a pass from the batches sent and the measured durations of their passes."""

from __future__ import annotations

from collections import deque

LEAST_PASSES = 8
"""A line fitted through fewer passes is not meaningful."""
FIRST_GUESS, LEAST_SHARE, MOST_SHARE = 0.25, 0.02, 1.0
"""Overhead as a share of a full chunk: the initial value, and the bounds of the estimate."""


class PassTimeModel:
    """Pass duration as a linear function of the tokens on the fullest unit, by least squares over the last passes."""

    def __init__(self, chunk_tokens: int, window: int) -> None:
        self._chunk = chunk_tokens
        self._planned: dict[int, int] = {}
        self._passes: deque[tuple[int, int]] = deque(maxlen=window)
        self._overhead_tokens: float | None = None

    def planned(self, instance: int, tokens: int | None) -> None:
        """Record the tokens on the fullest unit of the instance's next pass; None if unknown."""
        if tokens is None:
            self._planned.pop(instance, None)
        else:
            self._planned[instance] = tokens

    def ended(self, instance: int, duration_ns: int) -> None:
        """Record that a pass of ``instance`` has ended."""
        tokens = self._planned.pop(instance, None)
        if tokens is not None:
            self._passes.append((tokens, duration_ns))
            self._overhead_tokens = None

    @property
    def overhead_tokens(self) -> float:
        """Intercept over slope: the fixed part of a pass, in tokens that could be computed in that time."""
        if self._overhead_tokens is None:
            self._overhead_tokens = self._fit()
        return self._overhead_tokens

    def duration_ns(self, tokens: int) -> float | None:
        """Duration (ns) of a pass with ``tokens`` on its fullest unit; None before the first measurement."""
        count = len(self._passes)
        if count < LEAST_PASSES:
            return None
        mean_tokens = sum(known for known, _ in self._passes) / count
        mean_ns = sum(duration_ns for _, duration_ns in self._passes) / count
        return mean_ns * (self.overhead_tokens + tokens) / (self.overhead_tokens + mean_tokens)

    def _fit(self) -> float:
        count = len(self._passes)
        if count < LEAST_PASSES:
            return FIRST_GUESS * self._chunk
        mean_tokens = sum(tokens for tokens, _ in self._passes) / count
        mean_ns = sum(duration_ns for _, duration_ns in self._passes) / count
        spread = sum((tokens - mean_tokens) ** 2 for tokens, _ in self._passes)
        shared = sum((tokens - mean_tokens) * (duration_ns - mean_ns) for tokens, duration_ns in self._passes)
        if shared <= 0 or spread <= 0:  # all passes equally long, or longer batches did not take longer
            return FIRST_GUESS * self._chunk
        overhead = mean_ns * spread / shared - mean_tokens
        return min(MOST_SHARE * self._chunk, max(LEAST_SHARE * self._chunk, overhead))
