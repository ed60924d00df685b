"""Attention times: kernel table rows, or estimates, as tables of one device and model geometry."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache

import numpy as np
import numpy.typing as npt

from ebbench.devices.base import BANDWIDTH_SHARE, COMPUTE_SHARE
from ebbench.devices.geometry import WEIGHT_BITS, Mixer, decode_flops, pair_flops
from ebbench.devices.library import Rows, select
from ebbench.devices.profiles import DeviceProfile
from ebbench.errors import UsageError
from ebbench.records.warnings import RunWarning, warning

# Attention time of one layer, from joint tables if they exist, else from pure tables.
#
# A step's attention is `prefill + increment`: the prompts' own cost, and what the decodes add to it. The increment is
# measured (joint tables) or derived from the pure decode cost. Tables are extrapolated as follows:
#
# - Decodes beyond the last row: a decode has a fixed cost and a cost per KV token; both are estimated from the whole
#   last row, not from the slope of two points.
# - Mixed steps beyond 128 decodes: FlashAttention 2 gives every decode of a mixed batch its own tile per query head and
#   processes the batch head by head. Queries that share a KV head then find their keys in the L2 cache only if the keys
#   of the *whole batch* fit. So the cost depends on the sum of contexts, which the 128-decode rows cover up to two
#   million tokens, plus a fixed cost per sequence.

Array = npt.NDArray[np.float64]


def in_line(values: Array) -> array[float]:
    """For single values to be read from: a list takes four times the memory and most of a device's time to load, and
    numpy three times as long per value."""
    return array("d", values.tobytes())


# Query rows of one FlashAttention tile: a shorter chunk costs as much as this many rows.
TILE_ROWS = 64
MAX_CHUNK = 65_536


@dataclass(frozen=True)
class Grid:
    """A table on a regular grid, for multilinear interpolation with linear extrapolation of the last axis."""

    axes: tuple[tuple[float, ...], ...]
    values: array[float]

    @staticmethod
    def of(axes: tuple[tuple[float, ...], ...], values: Array) -> Grid:
        """Flatten ``values``, whose shape is given by ``axes``. Raises ValueError for a missing or negative value."""
        if values.shape != tuple(map(len, axes)) or not np.isfinite(values).all() or (values < 0).any():
            raise ValueError("a kernel grid has a hole or a negative value")
        return Grid(axes, in_line(values.astype(float)))

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
    ``window`` 0: no sliding window. ``draft_state_s``: of layers with a state, per drafted token of a decode, after
    which the state is written too (a model: its bytes by the GPU's bandwidth); 0 for other layers.
    """

    first_s: array[float]
    first_context_s: array[float]
    next_s: array[float]
    next_context_s: array[float]
    decode: Grid
    increment: Grid
    window: int = 0
    draft_state_s: float = 0.0

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

    def verify_s(self, seqs: int, kv_tokens: int) -> float:
        """Time (s) of one layer's attention where every decode has several queries.

        A model: the kernel is that of mixed batches, and a decode's queries share the tile that one query has there;
        where a state stands for the context, it is read once, as for one query.
        """
        context = kv_tokens / seqs
        if self.draft_state_s:
            return self.decode.at2(seqs, context)
        if self.window and context > self.window:
            context = float(self.window)
        return max(self.increment.at4(0, 0, seqs, context), self.decode.at2(seqs, context))

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
    ``SPIKE`` times a larger call, and the first not than the second: kernels pad the smallest batches to one tile.
    """
    before, after = np.concatenate((times[1:2], times[:-1])), np.concatenate((times[1:], times[-1:]))
    single = np.where(times > SPIKE * np.maximum(before, after), np.sqrt(before * after), times)
    single[0] = np.minimum(single[0], single[1])
    return np.asarray(np.minimum(single, SPIKE * lower_envelope(single, 0)))


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


US = 1e-6
SEQS = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096)
CONTEXTS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 16384)
CHUNKS = (16, 32, 64, 128, 256, 512, 1024, 2048)
BEFORE = (0, 512, 1024, 2048, 4096, 8192, 16384)
MIXED_SEQS = 128  # last row of joint tables

Heads = tuple[int, int, int]


@dataclass(frozen=True)
class Surfaces:
    """Raw surfaces in seconds over the axes SEQS, CONTEXTS, CHUNKS, BEFORE; prompts by chunk length 0..MAX_CHUNK."""

    first: Array
    first_context: Array
    next: Array
    next_context: Array
    decode: Array
    increment: Array

    def blend(self, other: Surfaces, share: float) -> Surfaces:
        """The weighted mean of this (``1 - share``) and ``other`` (``share``)."""
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in self.__dataclass_fields__}
        return Surfaces(**{name: a + (b - a) * share for name, (a, b) in pairs.items()})

    def scaled(self, queries: float, keys: float) -> Surfaces:
        """Surfaces of another geometry: work proportional to query heads and KV traffic are scaled separately."""
        return Surfaces(
            self.first * queries,
            self.first_context * queries,
            self.next * queries,
            self.next_context * queries,
            self.decode * keys,
            np.maximum(self.increment * queries, 0.0),
        )

    def like(self, ours: Surfaces, theirs: Surfaces) -> Surfaces:
        """This times ``ours`` over ``theirs``, entry by entry: another geometry or KV type by its own pure tables."""
        pairs = {name: (getattr(ours, name), getattr(theirs, name)) for name in self.__dataclass_fields__}
        ratio = {name: np.divide(a, b, out=np.ones_like(a), where=b > 0) for name, (a, b) in pairs.items()}
        ratio["increment"] = np.broadcast_to(ratio["decode"], self.increment.shape)
        return Surfaces(**{name: getattr(self, name) * ratio[name] for name in self.__dataclass_fields__})

    def decoding_no_faster_than(self, other: Surfaces) -> Surfaces:
        """Decodes take at least as long as ``other``'s, and add to a prefill step as much more."""
        decode = np.maximum(self.decode, other.decode)
        return replace(self, decode=decode, increment=self.increment * (decode / self.decode))

    def tables(self, mixed_excess: float, window: int = 0) -> AttentionTables:
        """The attention tables, with the mixed excess (increment beyond the pure decode cost) scaled."""
        decode = increasing(self.decode, 0, 1)
        excess = np.maximum(self.increment - decode, 0.0) * mixed_excess
        increment = increasing(np.minimum(self.increment, decode) + excess, 2, 3)
        first, following = self.first, self.next
        if window:  # beyond its window a prompt's cost grows linearly with its length
            lengths = np.arange(len(first))
            inside = np.minimum(lengths, window)
            growth = np.maximum(lengths / window, 1.0)
            first, following = first[inside] * growth, following[inside] * growth
        return AttentionTables(
            in_line(increasing(first, 0)),
            in_line(increasing(self.first_context, 0)),
            in_line(increasing(following, 0)),
            in_line(increasing(self.next_context, 0)),
            Grid.of((SEQS, CONTEXTS), decode),
            Grid.of((CHUNKS, BEFORE, SEQS, CONTEXTS), increment),
            window,
        )


def surfaces(profile: DeviceProfile, mixer: Mixer, kv_dtype: str) -> tuple[Surfaces, tuple[RunWarning, ...]] | None:
    """The best surfaces for a device and layers with grouped keys, with warnings; None if the device has no attention
    tables.

    A device without joint tables may name another device whose ratio of mixed to pure decode cost it uses.
    """
    wanted = (mixer.heads, mixer.kv_heads, mixer.head_dim)
    measured = _own_surfaces(profile.name, wanted, kv_dtype, profile.bandwidth_bytes_per_s)
    if measured is not None and kv_dtype == "fp8" and profile.fp8_kv_as_16_bits:
        plain = _own_surfaces(profile.name, wanted, "bfloat16", profile.bandwidth_bytes_per_s)
        assert plain is not None  # FP8 tables come with those in 16 bits
        measured = measured[0].decoding_no_faster_than(plain[0]), measured[1]
    if measured is None or not profile.mixed_from:
        return measured
    own, warnings = measured
    lender = _own_surfaces(profile.mixed_from, wanted, "bfloat16", profile.bandwidth_bytes_per_s)
    if lender is None:
        return measured
    return replace(own, increment=own.decode * (lender[0].increment / lender[0].decode)), warnings


@lru_cache(maxsize=16)  # each 2 MB
def _own_surfaces(
    device: str, wanted: Heads, kv_dtype: str, bandwidth: float
) -> tuple[Surfaces, tuple[RunWarning, ...]] | None:
    """Measured surfaces, interpolated between two numbers of query heads, or scaled from the nearest geometry with a
    warning."""
    joint = has_joint_tables(device)
    available = _geometries(device, kv_dtype, joint)
    if not available:
        return None
    kv = "bfloat16" if joint else kv_dtype
    same_keys = sorted(g for g in available if g[1:] == wanted[1:])
    below = [g for g in same_keys if g[0] < wanted[0]]
    above = [g for g in same_keys if g[0] > wanted[0]]
    warnings: tuple[RunWarning, ...] = ()
    if wanted in available:
        measured = _load(device, wanted, kv, bandwidth)
    elif below and above:
        low, high = below[-1], above[0]
        share = (wanted[0] - low[0]) / (high[0] - low[0])
        measured = _load(device, low, kv, bandwidth).blend(_load(device, high, kv, bandwidth), share)
    else:
        measured, warnings = _from_nearest(device, wanted, available, kv, bandwidth)
    if kv != kv_dtype:
        measured = _with_kv_dtype(device, wanted, measured, kv_dtype, bandwidth)
    return measured, warnings


def _from_nearest(
    device: str, wanted: Heads, available: list[Heads], kv: str, bandwidth: float
) -> tuple[Surfaces, tuple[RunWarning, ...]]:
    """The nearest geometry, scaled by the pure tables of both, or without those by heads."""
    nearest = min(available, key=lambda g: _distance(g, wanted))
    near = _load(device, nearest, kv, bandwidth)
    pure = _geometries(device, kv, joint=False)
    if has_joint_tables(device) and wanted in pure and nearest in pure:
        ours, theirs = (_load_pure(device, g, kv, bandwidth) for g in (wanted, nearest))
        return near.like(ours, theirs), ()
    queries = wanted[0] * wanted[2] / (nearest[0] * nearest[2])
    keys = wanted[1] * wanted[2] / (nearest[1] * nearest[2])
    return near.scaled(queries, keys), (
        warning("attention-scaled", wanted=[*wanted], device=device, nearest=[*nearest]),
    )


def _with_kv_dtype(device: str, wanted: Heads, measured: Surfaces, kv_dtype: str, bandwidth: float) -> Surfaces:
    """Joint tables have a 16-bit KV cache: scale them by the pure tables of the nearest geometry."""
    pure = [g for g in _geometries(device, kv_dtype, joint=False) if g in _geometries(device, "bfloat16", joint=False)]
    if not pure:
        raise UsageError(
            f"attention over a KV cache in {kv_dtype} was not measured on {device}; leave the KV cache in 16 bits"
        )
    nearest = min(pure, key=lambda g: _distance(g, wanted))
    ours, theirs = (_load_pure(device, nearest, kv, bandwidth) for kv in (kv_dtype, "bfloat16"))
    return measured.like(ours, theirs)


def has_joint_tables(device: str) -> bool:
    """Whether mixed attention was measured on this device."""
    return bool(select("mixed", device=device).num_rows)


def _distance(a: Heads, b: Heads) -> float:
    return float(sum(abs(np.log(x / y)) for x, y in zip(a, b, strict=True)))


@cache
def _geometries(device: str, kv_dtype: str, joint: bool) -> list[Heads]:
    rows = select("mixed", device=device) if joint else select("decode", device=device, kv_dtype=kv_dtype)
    table = rows.select(["heads", "kv_heads", "head_dim"]).to_pydict()
    return sorted(set(zip(table["heads"], table["kv_heads"], table["head_dim"], strict=True)))


def _load(device: str, heads: Heads, kv_dtype: str, bandwidth: float) -> Surfaces:
    if not has_joint_tables(device):
        return _load_pure(device, heads, kv_dtype, bandwidth)
    key = _key(heads)
    return _from_joint(device, key, _batched_prompts(device, key | {"kv_dtype": "bfloat16"}))


def _load_pure(device: str, heads: Heads, kv_dtype: str, bandwidth: float) -> Surfaces:
    key = _key(heads) | {"kv_dtype": kv_dtype}
    key_bytes = 2.0 * heads[1] * heads[2] * WEIGHT_BITS[kv_dtype] / 8  # K and V of one token
    return _from_pure(device, key, _batched_prompts(device, key), key_bytes / bandwidth)


def _key(heads: Heads) -> dict[str, int | str]:
    return {"heads": heads[0], "kv_heads": heads[1], "head_dim": heads[2]}


def _rows(kind: str, columns: tuple[str, ...], device: str, key: dict[str, int | str]) -> dict[tuple[int, ...], float]:
    table = select(kind, device=device, **key).to_pydict()
    times = [t * US for t in table["time_us"]]
    return dict(zip(zip(*(table[c] for c in columns), strict=True), times, strict=True))


# --- joint tables -----------------------------------------------------------------------------------------------


def _from_joint(device: str, key: dict[str, int | str], batched: dict[tuple[int, ...], float]) -> Surfaces:
    rows = _rows("mixed", ("chunk", "before", "seqs", "context"), device, key)
    contexts = sorted({k for (_, _, s, k) in rows if s})
    lone = {c: rows[c, 0, 0, 0] for c in CHUNKS}
    chunks = {(c, b): t for (c, b, s, _), t in rows.items() if not s}
    slopes = {c: _context_slope(chunks, c) for c in CHUNKS}
    per_pair = slopes[CHUNKS[-1]] / CHUNKS[-1]
    longer = {chunk: t for (seqs, chunk), t in batched.items() if seqs == 1 and chunk > CHUNKS[-1]}
    first = _by_length({**lone, **longer}, per_pair)
    first_context = _slope_by_length(slopes, per_pair)
    following, next_context = _further_prompts(batched, first, per_pair)
    decode = _decode_surface({(s, k): rows[0, 0, s, k] for (c, _, s, k) in rows if not c}, contexts)
    return Surfaces(first, first_context, following, next_context, decode, _increment_surface(rows, contexts))


def _context_slope(times: dict[tuple[int, int], float], chunk: int) -> float:
    """Time (s) per cached token before a single chunk: least squares over all measured contexts."""
    points = sorted((before, t) for (c, before), t in times.items() if c == chunk)
    x, y = np.array(points).T
    return max(float(np.polyfit(x, y, 1)[0]), 0.0)


def _decode_surface(rows: dict[tuple[int, int], float], contexts: list[int]) -> Array:
    """Pure decode over SEQS x CONTEXTS; beyond the table a fixed part per sequence and a part per KV token."""
    seqs = sorted({s for s, _ in rows})
    table = np.array([[rows[s, k] for k in contexts] for s in seqs])
    last = seqs[-1]
    fixed = (table[-1, 0] - table[-2, 0]) / (last - seqs[-2])
    out = np.empty((len(SEQS), len(CONTEXTS)))
    measured = _between(seqs, table)
    for i, n in enumerate(SEQS):
        if n <= last:
            out[i] = _along(CONTEXTS, contexts, measured[i])
        else:
            streamed = (_along(CONTEXTS, contexts, table[-1]) - table[-1, 0]) * (n / last)
            out[i] = table[-1, 0] + fixed * (n - last) + np.maximum(streamed, 0.0)
    return out


def _increment_surface(rows: dict[tuple[int, ...], float], contexts: list[int]) -> Array:
    """What decodes add to a prefill step, over CHUNKS x BEFORE x SEQS x CONTEXTS (see above)."""
    seqs = [s for s in sorted({s for (_, _, s, _) in rows if s}) if s <= MIXED_SEQS]
    out = np.empty((len(CHUNKS), len(BEFORE), len(SEQS), len(CONTEXTS)))
    for a, chunk in enumerate(CHUNKS):
        for b, before in enumerate(BEFORE):
            alone = rows[chunk, before, 0, 0]
            table = np.array([[rows[chunk, before, s, k] - alone for k in contexts] for s in seqs])
            table = increasing(np.maximum(table, 0.0), 0, 1)
            per_seq = table[-1, 0] / MIXED_SEQS
            measured = _between(seqs, table)
            for i, n in enumerate(SEQS):
                if n <= MIXED_SEQS:
                    out[a, b, i] = _along(CONTEXTS, contexts, measured[i])
                else:
                    mean = np.array(CONTEXTS) * (n / MIXED_SEQS)
                    out[a, b, i] = _along(mean, contexts, table[-1]) + per_seq * (n - MIXED_SEQS)
    return out


def _between(seqs: list[int], table: Array) -> Array:
    """The rows of ``table``, which are at ``seqs``, interpolated to SEQS."""
    return np.stack([np.interp(SEQS, seqs, column) for column in table.T], axis=1)


def _along(x: object, points: list[int], values: Array) -> Array:
    """Linear interpolation; beyond the end with the mean slope of the last three cells."""
    at = np.asarray(x, dtype=float)
    inside = np.interp(at, points, values)
    slope = max((values[-1] - values[-4]) / (points[-1] - points[-4]), 0.0)
    return np.asarray(inside + np.maximum(at - points[-1], 0.0) * slope)


# --- prompts ----------------------------------------------------------------------------------------------------


def _batched_prompts(device: str, key: dict[str, int | str]) -> dict[tuple[int, ...], float]:
    return _rows("prefill", ("seqs", "chunk"), device, key)


def _by_length(points: Mapping[int, float], per_pair: float) -> Array:
    """A single prompt's cost at every length; beyond the last point it grows with the number of query-key pairs."""
    lengths = sorted(points)
    x = np.arange(MAX_CHUNK + 1, dtype=float)
    inside = np.interp(x, lengths, np.maximum.accumulate([points[c] for c in lengths]))
    beyond = np.maximum(x**2 - lengths[-1] ** 2, 0.0) / 2 * per_pair
    return np.asarray(inside + beyond)


def _single_prompts(times: Mapping[tuple[int, ...], float]) -> dict[int, float]:
    """Times of one prompt by its length, of those of several (``(prompts, length)``)."""
    lengths = sorted(length for prompts, length in times if prompts == 1)
    single = without_spikes(np.array([times[1, length] for length in lengths]))
    return dict(zip(lengths, single.tolist(), strict=True))


def _slope_by_length(slopes: dict[int, float], per_pair: float) -> Array:
    x = np.arange(MAX_CHUNK + 1, dtype=float)
    lengths = sorted(slopes)
    rising = increasing(without_spikes(np.array([slopes[c] for c in lengths])), 0)
    return np.asarray(np.interp(x, lengths, rising) + np.maximum(x - lengths[-1], 0.0) * per_pair)


def _further_prompts(batched: Mapping[tuple[int, ...], float], first: Array, per_pair: float) -> tuple[Array, Array]:
    """Cost of one more prompt when the GPU is already full, and its slope in cached tokens."""
    x = np.arange(MAX_CHUNK + 1, dtype=float)
    rows = np.ceil(x / TILE_ROWS) * TILE_ROWS
    context = rows * per_pair
    marginal = {}
    for chunk in sorted({c for _, c in batched if c > 1}):
        sizes = sorted(s for s, c in batched if c == chunk)
        few, many = sizes[len(sizes) // 2 - 1], sizes[-1]
        if many > few:
            marginal[chunk] = max((batched[many, chunk] - batched[few, chunk]) / (many - few), 0.0)
    if not marginal:  # no batched table: full tiles at the rate of a long chunk
        return np.asarray(np.minimum(rows * (rows / 2 + TILE_ROWS / 2) * per_pair, first)), context
    return _by_length({0: 0.0, **marginal}, per_pair), context


# --- pure tables only -------------------------------------------------------------------------------------------


def _from_pure(
    device: str, key: dict[str, int | str], batched: dict[tuple[int, ...], float], stream_s: float
) -> Surfaces:
    """Only decode and prompt tables: the increment starts as twice the pure decode cost (see HostCosts.mixed_excess).

    These tables were measured with the same keys repeatedly, so small batches found them in the L2 cache. In a model
    the weights pass through the cache between two layers: no entry is below the time to read its keys from memory.
    """
    rows = _rows("decode", ("seqs", "context"), device, key)
    decode = _pure_decode(rows, max(_stream_rate(rows), stream_s))
    lone = _single_prompts(batched)
    *_, short, _, long = sorted(lone)
    per_pair = 2 * (lone[long] - lone[short]) / (long**2 - short**2)
    first = _by_length(lone, per_pair)
    following, next_context = _further_prompts(batched, first, per_pair)
    contexts = sorted(c for s, c in rows if s == 1)
    slow = max((rows[1, contexts[-1]] - rows[1, contexts[-4]]) / (contexts[-1] - contexts[-4]), 0.0)
    first_context = np.maximum(next_context, slow)
    increment = np.broadcast_to(2.0 * decode, (len(CHUNKS), len(BEFORE), len(SEQS), len(CONTEXTS))).copy()
    return Surfaces(first, first_context, following, next_context, decode, increment)


def library_surfaces(rows: Rows, stream_s: float = 0.0) -> Surfaces:
    """Surfaces of rows of the library; ``stream_s``: least time (s) to read one token's keys from memory.

    A module's decodes add to a step with prompts what exceeds the smallest decode: its weights are read once. What has
    a state in place of a cache takes as long after any context.
    """
    alone = _single_prompts(rows.prompt)
    cached = sorted({tokens for _, tokens in rows.following})
    slopes = {}
    for chunk in sorted({chunk for chunk, _ in rows.following}):
        growth = np.array([max(rows.following[chunk, tokens] - alone[chunk], 0.0) for tokens in cached])
        slopes[chunk] = float(growth @ cached / np.dot(cached, cached))
    per_pair = slopes[max(slopes)] / max(slopes)
    first = _by_length(alone, per_pair)
    following, next_context = _further_prompts(rows.prompt, first, per_pair)
    shortest, longest = min(rows.decode), max(rows.decode)
    grows = rows.decode[longest] > rows.decode[longest[0], shortest[1]]
    decode = _pure_decode(rows.decode, max(_stream_rate(rows.decode), stream_s) if grows else 0.0)
    added = np.maximum(decode - decode[0, 0], 0.0) if rows.module else 2.0 * decode
    increment = np.broadcast_to(added, (len(CHUNKS), len(BEFORE), len(SEQS), len(CONTEXTS))).copy()
    return Surfaces(first, _slope_by_length(slopes, per_pair), following, next_context, decode, increment)


def _pure_decode(rows: Mapping[tuple[int, ...], float], rate: float) -> Array:
    """Pure decode over SEQS x CONTEXTS, nowhere below ``rate`` seconds per KV token."""
    decode = np.empty((len(SEQS), len(CONTEXTS)))
    measured = sorted({s for s, _ in rows})
    for i, n in enumerate(SEQS):
        low, high = max(s for s in measured if s <= n), min((s for s in measured if s >= n), default=measured[-1])
        share = (n - low) / (high - low) if high > low else 0.0
        ends = [_decode_row(rows, s, rate) for s in (low, high)]
        decode[i] = ends[0] + (ends[1] - ends[0]) * share
        if n > measured[-1]:
            decode[i] *= n / measured[-1]
    return decode


def _stream_rate(rows: Mapping[tuple[int, ...], float]) -> float:
    """Time (s) per KV token if keys come from memory: from the largest measured products of batch and context."""
    large = sorted(rows, key=lambda at: at[0] * at[1])[-12:]
    return float(np.median([rows[at] / (at[0] * at[1]) for at in large]))


def _decode_row(rows: Mapping[tuple[int, ...], float], seqs: int, rate: float) -> Array:
    contexts = sorted(k for s, k in rows if s == seqs)
    times = np.array([rows[seqs, k] for k in contexts])
    at = np.array(CONTEXTS, dtype=float)
    inside = np.interp(at, contexts, increasing(without_spikes(times), 0))
    beyond = np.maximum(at - contexts[-1], 0.0) * seqs * rate
    return np.asarray(np.maximum(inside + beyond, at * seqs * rate))


# Attention surfaces from data-sheet rates, for layers that no kernel table has: MLA, indices, states.

LAUNCHES_S = 5e-6
"""Two small kernels per layer and step."""
KINDS_IN_WORDS = {
    "latent": "latent (MLA) attention",
    "index": "an index of keys",
    "compressed": "attention to compressed keys (CSA, HCA)",
    "state": "a state per sequence in place of attention (linear attention, Mamba or convolutions)",
}


def estimated_surfaces(profile: DeviceProfile, mixer: Mixer, element_bytes: float) -> Surfaces:
    """Surfaces of one layer: the longer of arithmetic and memory traffic. ``element_bytes``: of the KV cache."""
    flops_per_s = profile.bf16_flops_per_s * COMPUTE_SHARE
    bytes_per_s = profile.bandwidth_bytes_per_s * BANDWIDTH_SHARE
    seqs, contexts = np.array(SEQS, dtype=float)[:, None], np.array(CONTEXTS, dtype=float)[None, :]
    lengths = np.arange(MAX_CHUNK + 1, dtype=float)
    if mixer.kind == "state":
        state_s = 2.0 * mixer.state_bytes / bytes_per_s  # read and written
        prompt = lengths * (4.0 * mixer.state_bytes / 2 / flops_per_s)
        prompt[1:] += state_s
        context = np.zeros_like(lengths)
        decode = np.broadcast_to(seqs * state_s, (len(SEQS), len(CONTEXTS)))
    else:
        read_s = mixer.reads * element_bytes / bytes_per_s
        pair_s = pair_flops(mixer) / flops_per_s
        prompt, context = lengths**2 / 2 * pair_s, np.maximum(lengths * pair_s, read_s)
        decode = seqs * contexts * max(read_s, decode_flops(mixer) / flops_per_s)
    increment = np.broadcast_to(decode, (len(CHUNKS), len(BEFORE), len(SEQS), len(CONTEXTS)))
    alone = prompt + LAUNCHES_S
    alone[0] = 0.0
    return Surfaces(alone, context, prompt, context, decode + LAUNCHES_S, increment.copy())


def not_measured(mixer: Mixer, layers: int, device: str) -> RunWarning:
    """A warning that the times of a kind of layer are an estimate, with its direction."""
    what = KINDS_IN_WORDS[mixer.kind]
    return warning("layers-estimated", estimated=mixer.layers, layers=layers, what=what, device=device)
