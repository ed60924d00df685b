"""Attention time of one layer, from joint tables if they exist, else from pure tables.

A step's attention is ``prefill + increment``: the prompts' own cost, and what the decodes add to it. The increment is
measured (joint tables) or derived from the pure decode cost. Tables are extrapolated as follows:

- Decodes beyond the last row: a decode has a fixed cost and a cost per KV token; both are estimated from the whole
  last row, not from the slope of two points.
- Mixed steps beyond 128 decodes: FlashAttention 2 gives every decode of a mixed batch its own tile per query head and
  processes the batch head by head. Queries that share a KV head then find their keys in the L2 cache only if the keys
  of the *whole batch* fit. So the cost depends on the sum of contexts, which the 128-decode rows cover up to two
  million tokens, plus a fixed cost per sequence.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

# Query rows of one FlashAttention tile: a shorter chunk costs as much as this many rows.
TILE_ROWS = 64
MAX_CHUNK = 65_536


@dataclass(frozen=True)
class Grid:
    """A table on a regular grid, for multilinear interpolation with linear extrapolation of the last axis."""

    axes: tuple[tuple[float, ...], ...]
    values: list[float]

    @staticmethod
    def of(axes: tuple[tuple[float, ...], ...], values: Array) -> Grid:
        """Flatten ``values``, whose shape is given by ``axes``. Raises ValueError for a missing or negative value."""
        if values.shape != tuple(map(len, axes)) or not np.isfinite(values).all() or (values < 0).any():
            raise ValueError("a kernel grid has a hole or a negative value")
        return Grid(axes, values.ravel().tolist())

    def at2(self, x: float, y: float) -> float:
        """Bilinear interpolation with linear extrapolation."""
        xs, ys = self.axes
        # The search leaves out the ends of the axes, so that the cell found always has a right neighbour.
        width = len(ys)
        i = bisect_right(xs, x, 1, len(xs) - 1) - 1
        j = bisect_right(ys, y, 1, width - 1) - 1
        x0, y0 = xs[i], ys[j]
        u = (x - x0) / (xs[i + 1] - x0)
        v = (y - y0) / (ys[j + 1] - y0)
        if u < 0.0:
            u = 0.0
        if v < 0.0:
            v = 0.0
        values = self.values
        at = i * width + j
        low = values[at] + (values[at + 1] - values[at]) * v
        at += width
        return low + (values[at] + (values[at + 1] - values[at]) * v - low) * u

    def at4(self, a: float, b: float, x: float, y: float) -> float:
        """Multilinear interpolation in four axes; the first two are clamped, the last two extrapolated."""
        first, second, xs, ys = self.axes
        i = bisect_right(first, a, 1, len(first) - 1) - 1
        j = bisect_right(second, b, 1, len(second) - 1) - 1
        s = min(max((a - first[i]) / (first[i + 1] - first[i]), 0.0), 1.0)
        t = min(max((b - second[j]) / (second[j + 1] - second[j]), 0.0), 1.0)
        k = bisect_right(xs, x, 1, len(xs) - 1) - 1
        m = bisect_right(ys, y, 1, len(ys) - 1) - 1
        u = max((x - xs[k]) / (xs[k + 1] - xs[k]), 0.0)
        v = max((y - ys[m]) / (ys[m + 1] - ys[m]), 0.0)
        width = len(ys)
        plane = len(xs) * width
        at = ((i * len(second) + j) * plane) + k * width + m
        row = len(second) * plane
        low = self._cell(at, width, u, v)
        if t:
            low += (self._cell(at + plane, width, u, v) - low) * t
        if not s:
            return low
        high = self._cell(at + row, width, u, v)
        if t:
            high += (self._cell(at + row + plane, width, u, v) - high) * t
        return low + (high - low) * s

    def _cell(self, at: int, width: int, u: float, v: float) -> float:
        values = self.values
        low = values[at] + (values[at + 1] - values[at]) * v
        at += width
        return low + (values[at] + (values[at + 1] - values[at]) * v - low) * u


@dataclass(frozen=True)
class AttentionTables:
    """Attention times of one layer in seconds.

    ``first_s[c]``: a single prompt chunk of c tokens; ``first_context_s[c]``: its cost per cached token before it.
    ``next_s`` and ``next_context_s``: the same for every further chunk of the step, when the GPU is already full; the
    chunk with the largest difference pays its single cost. ``decode``: pure decode over (sequences, mean context).
    ``increment``: cost that decodes add to a prefill step over (longest chunk, its context, sequences, mean context).
    ``window`` 0: no sliding window.
    """

    first_s: list[float]
    first_context_s: list[float]
    next_s: list[float]
    next_context_s: list[float]
    decode: Grid
    increment: Grid
    window: int = 0

    def step_s(self, prefill: tuple[tuple[int, int], ...], seqs: int, kv_tokens: float) -> float:
        """Time (s) of one layer's attention in one step."""
        window = self.window
        context = kv_tokens / seqs if seqs else 0.0
        if window and context > window:
            context = float(window)
        if not prefill:
            return self.decode.at2(seqs, context)
        first, first_context, following, next_context = (
            self.first_s, self.first_context_s, self.next_s, self.next_context_s,
        )  # fmt: skip
        total = alone = 0.0
        longest = before = 0
        for chunk, cached in prefill:
            further = following[chunk]
            lead = first[chunk]
            if cached:  # most prompts have no cached prefix: a step with many must stay cheap
                if window and cached > window:
                    cached = window
                further += next_context[chunk] * cached
                lead += first_context[chunk] * cached
            total += further
            lead -= further
            if lead > alone:
                alone = lead
            if chunk > longest:
                longest, before = chunk, cached
        total += alone
        if not seqs:
            return total
        total += self.increment.at4(longest, before, seqs, context)
        decode = self.decode.at2(seqs, context)
        return total if total > decode else decode

    def single_token_step_s(self, prefill: tuple[tuple[int, int], ...], seqs: int, kv_tokens: int) -> float:
        """Time (s) of one layer's attention in a step in which some prompts' chunks have one token.

        vLLM tells prompts from decodes by the number of tokens alone, so such a chunk (the last token of a prompt whose
        KV was computed elsewhere or found in the cache) is a decode. It has a context of its own, while the tables know
        only the mean of all, and a mean falls when short sequences join long ones. So the step takes the longest time
        that any number of its longest sequences would take; the step's decodes have their mean context, and to them a
        longer single sequence adds one of that mean. Without decodes, it takes no longer than if these were prompts.
        """
        chunks = tuple(part for part in prefill if part[0] > 1)
        contexts = sorted((before + 1 for chunk, before in prefill if chunk == 1), reverse=True)
        longest = self._longest_s(chunks, 0, 0, contexts)
        if not seqs:
            return min(longest, self.step_s(prefill, 0, 0))
        mean = kv_tokens / seqs
        longer = sum(context > mean for context in contexts)
        joint = self._longest_s(chunks, seqs + longer, kv_tokens + longer * mean, contexts[longer:])
        return max(longest, joint)

    def _longest_s(
        self, chunks: tuple[tuple[int, int], ...], seqs: int, kv_tokens: float, contexts: list[int]
    ) -> float:
        """The longest time (s) of the step while sequences of ``contexts``, longest first, join its decodes."""
        longest = self.step_s(chunks, seqs, kv_tokens) if seqs else 0.0
        for context in contexts:
            seqs, kv_tokens = seqs + 1, kv_tokens + context
            longest = max(longest, self.step_s(chunks, seqs, kv_tokens))
        return longest


SPIKE = 1.3
"""Ratio to its neighbours, or to a larger call, from which on a measured time is a fault of its measurement; kernels
that change with the batch differ by up to 1.25 (FP8 products on Hopper between 128 and 256 tokens)."""


def without_spikes(times: Array) -> Array:
    """Times along the first axis, with single ones above ``SPIKE`` times their neighbours at those neighbours' mean.

    Smaller humps stay: kernels are chosen by size, and a larger call can be the faster one. None is longer than
    ``SPIKE`` times a larger call.
    """
    before, after = np.concatenate((times[1:2], times[:-1])), np.concatenate((times[1:], times[-1:]))
    single = np.where(times > SPIKE * np.maximum(before, after), np.sqrt(before * after), times)
    return np.minimum(single, SPIKE * lower_envelope(single, 0))


def lower_envelope(values: Array, *axes: int) -> Array:
    """The largest values that rise along the axes and are nowhere above the given ones: measuring only adds time."""
    for axis in axes:
        values = np.flip(np.minimum.accumulate(np.flip(values, axis), axis=axis), axis)
    return values


def increasing(values: Array, *axes: int) -> Array:
    """The smallest array not below ``values`` that is non-decreasing along ``axes``."""
    for axis in axes:
        values = np.maximum.accumulate(values, axis=axis)
    return values
