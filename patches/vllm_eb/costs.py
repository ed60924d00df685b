"""Step times for the scheduler: measured on a grid, or the linear model without measurements.

``ebbench calibrate`` measures the grid on a real engine; for an emulated device it is evaluated from the cost model.
Policies that compare the costs of exclusive and mixed prefills need it; the published policies do not.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from numbers import Integral
from typing import Protocol

from vllm_eb.errors import GivenValueError


class CostGridError(GivenValueError):
    """A grid that is not ordered, has holes, or has times that are not positive; the message names the field."""


class StepCosts(Protocol):
    """Step times in seconds. ``context_tokens``: mean KV length of a decoding sequence.

    Step times for the scheduler: measured on a grid, or the linear model without measurements.

    ``ebbench calibrate`` measures the grid on a real engine; for an emulated device it is evaluated from the cost
    model. Policies that compare the costs of exclusive and mixed prefills need it; the published policies do not.
    """

    def prefill_s(self, tokens: float) -> float:
        """Time (s) of a step with ``tokens`` prompt tokens and no decodes."""
        ...

    def decode_s(self, seqs: float, context_tokens: float) -> float:
        """Time (s) of a step with one token for each of ``seqs`` sequences."""
        ...

    def decode_at(self, context_tokens: float) -> Callable[[float], float]:
        """``decode_s`` at this context, as a function of the sequences: cheaper where it is asked several times."""
        ...

    def mixed_s(self, tokens: float, seqs: float, context_tokens: float) -> float:
        """Time (s) of a step with ``tokens`` prompt tokens and ``seqs`` decoding sequences."""
        ...


@dataclass(frozen=True)
class CostGrid:
    """Measured step times in seconds, interpolated linearly and extrapolated linearly beyond the grid.

    Axes are increasing: ``tokens`` (prompt tokens of a step), ``seqs`` (decoding sequences), ``contexts`` (mean KV
    tokens per sequence). ``prefill[i]`` is at tokens i; ``decode[j][c]`` at seqs j, contexts c; ``mixed[i][j][c]``.
    """

    tokens: tuple[int, ...]
    seqs: tuple[int, ...]
    contexts: tuple[int, ...]
    prefill: tuple[float, ...]
    decode: tuple[tuple[float, ...], ...]
    mixed: tuple[tuple[tuple[float, ...], ...], ...]

    def __post_init__(self) -> None:
        for name in ("tokens", "seqs", "contexts"):
            axis = getattr(self, name)
            numbers = all(_counts(value) for value in axis)
            if len(axis) < 2 or not numbers or any(b <= a for a, b in pairwise(axis)):
                raise CostGridError(f"grid.{name} must hold at least two increasing numbers, whole and positive")
        shape = (len(self.tokens), len(self.seqs), len(self.contexts))
        _check("grid.prefill", self.prefill, shape[:1])
        _check("grid.decode", self.decode, shape[1:])
        _check("grid.mixed", self.mixed, shape)

    def prefill_s(self, tokens: float) -> float:
        """See StepCosts."""
        index, share = _locate(self.tokens, tokens)
        return _between(self.prefill[index], self.prefill[index + 1], share)

    def decode_s(self, seqs: float, context_tokens: float) -> float:
        """See StepCosts."""
        return _plane(self.decode, _locate(self.seqs, seqs), _locate(self.contexts, context_tokens))

    def decode_at(self, context_tokens: float) -> Callable[[float], float]:
        """See StepCosts."""
        column = _locate(self.contexts, context_tokens)
        return lambda seqs: _plane(self.decode, _locate(self.seqs, seqs), column)

    def mixed_s(self, tokens: float, seqs: float, context_tokens: float) -> float:
        """See StepCosts."""
        index, share = _locate(self.tokens, tokens)
        row, column = _locate(self.seqs, seqs), _locate(self.contexts, context_tokens)
        return _between(_plane(self.mixed[index], row, column), _plane(self.mixed[index + 1], row, column), share)


@dataclass(frozen=True)
class LinearCosts:
    """The linear model (Zhang et al. 2026, 3.1).

    Without measured mixed costs a mixed step costs the sum of its parts.
    """

    alpha_p: float
    beta_p: float
    alpha_d: float
    beta_d: float
    alpha_mb: float
    mixed_a: float | None = None
    mixed_b: float = 0.0
    mixed_c: float = 0.0

    def prefill_s(self, tokens: float) -> float:
        """See StepCosts."""
        return self.alpha_p + self.beta_p * tokens

    def decode_s(self, seqs: float, context_tokens: float) -> float:
        """See StepCosts; the linear model ignores contexts."""
        return self.alpha_d + self.beta_d * seqs

    def decode_at(self, context_tokens: float) -> Callable[[float], float]:
        """See StepCosts; the linear model ignores contexts."""
        return lambda seqs: self.alpha_d + self.beta_d * seqs

    def mixed_s(self, tokens: float, seqs: float, context_tokens: float) -> float:
        """See StepCosts."""
        if self.mixed_a is None:
            return max(self.alpha_p, self.alpha_d) + self.beta_p * tokens + self.beta_d * seqs
        r = seqs / (tokens + seqs)
        return self.alpha_mb + (self.mixed_a + (self.mixed_b + self.mixed_c * r) * r) * (tokens + seqs)


def _locate(axis: Sequence[int], value: float) -> tuple[int, float]:
    """Grid cell of ``value`` and its position in it: in [0, 1] inside, above 1 beyond the end, 0 before the start.

    A scheduler calls this a dozen times per step: no further function is called.
    """
    index, last = bisect_right(axis, value) - 1, len(axis) - 2
    if index < 0:
        index = 0
    elif index > last:
        index = last
    low = axis[index]
    share = (value - low) / (axis[index + 1] - low)
    return index, share if share > 0.0 else 0.0


def _between(low: float, high: float, share: float) -> float:
    return low + (high - low) * share


def _plane(table: Sequence[Sequence[float]], row: tuple[int, float], column: tuple[int, float]) -> float:
    (i, u), (j, v) = row, column
    first, second = table[i], table[i + 1]
    low, high = first[j] + (first[j + 1] - first[j]) * v, second[j] + (second[j + 1] - second[j]) * v
    return low + (high - low) * u


def _counts(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) > 0


def _check(name: str, values: object, shape: tuple[int, ...]) -> None:
    if not shape:
        if not isinstance(values, int | float) or not math.isfinite(values) or values <= 0:
            raise CostGridError(f"{name} holds {values!r}, not a positive time in seconds")
        return
    if not isinstance(values, tuple) or len(values) != shape[0]:
        raise CostGridError(f"{name} does not have the {shape[0]} entries its axis asks for")
    for value in values:
        _check(name, value, shape[1:])
