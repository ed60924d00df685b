"""What a pass costs beside its tokens, from the batches that were sent and how long their passes took."""

from __future__ import annotations

from collections import deque

LEAST_PASSES = 8
"""With fewer measured passes a line through them says nothing."""
FIRST_GUESS, LEAST_SHARE, MOST_SHARE = 0.25, 0.02, 1.0
"""Overhead as a share of a full chunk: before it is known, and the bounds of what is believed."""


class PassCost:
    """The straight line of pass duration over the tokens of the fullest unit, by least squares over the last passes."""

    def __init__(self, chunk_tokens: int, window: int) -> None:
        self._chunk = chunk_tokens
        self._planned: dict[int, int] = {}
        self._passes: deque[tuple[int, int]] = deque(maxlen=window)
        self._overhead_tokens: float | None = None

    def planned(self, instance: int, tokens: int | None) -> None:
        """The next pass of ``instance`` has ``tokens`` on its fullest unit; None where that is not known."""
        if tokens is None:
            self._planned.pop(instance, None)
        else:
            self._planned[instance] = tokens

    def ended(self, instance: int, duration_ns: int) -> None:
        """A pass of ``instance`` has ended."""
        tokens = self._planned.pop(instance, None)
        if tokens is not None:
            self._passes.append((tokens, duration_ns))
            self._overhead_tokens = None

    @property
    def overhead_tokens(self) -> float:
        """Intercept over slope: the tokens that could be computed in the time a pass takes whatever is in it."""
        if self._overhead_tokens is None:
            self._overhead_tokens = self._fit()
        return self._overhead_tokens

    def duration_ns(self, tokens: int) -> float | None:
        """How long a pass with ``tokens`` on its fullest unit takes; None before there is anything to tell it by."""
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
        if shared <= 0 or spread <= 0:  # all alike, or longer passes took no longer
            return FIRST_GUESS * self._chunk
        overhead = mean_ns * spread / shared - mean_tokens
        return min(MOST_SHARE * self._chunk, max(LEAST_SHARE * self._chunk, overhead))
