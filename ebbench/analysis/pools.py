"""Figures of runs on several instances: waiting times, chunk utilisation, busy share, spread of KV tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ebbench.config.topology import PoolSpec, TopologySpec
from ebbench.engines.base import EngineResult

_BEGIN = 1 / 3  # figures per pass exclude this first share of the time in which requests are sent


class _Passes:
    """Steps of one pool. Steps that the units of an instance begin at the same time are one pass."""

    def __init__(self, result: EngineResult, first: int, pool: PoolSpec) -> None:
        self.window_s = _window_s(result)
        steps = result.steps
        unit = steps["instance"].to_numpy() - first
        mine = (unit >= 0) & (unit < pool.units)
        start = steps["start_ns"].to_numpy()[mine]
        self.unit, self.pool = unit[mine], pool
        self.seconds = (steps["end_ns"].to_numpy()[mine] - start) / 1e9
        self.tokens = steps["prefill_tokens"].to_numpy()[mine]
        self.decodes = steps["decode_seqs"].to_numpy()[mine]
        self.kv_tokens = steps["kv_blocks_used"].to_numpy()[mine].astype(float) * 16
        self.start_s = start / 1e9
        node = self.unit // pool.dp
        _, self.first_of, self.number = np.unique(
            np.stack([node, start]), axis=1, return_index=True, return_inverse=True
        )
        self.number = self.number.reshape(-1)

    @property
    def steady(self) -> npt.NDArray[np.bool_]:
        """Mask of steps while requests are sent, without the initial part."""
        begin_s, end_s = self.window_s
        inside: npt.NDArray[np.bool_] = (self.start_s >= begin_s) & (self.start_s <= end_s)
        return inside

    @property
    def _span_s(self) -> float:
        return self.window_s[1] - self.window_s[0]

    def busy(self) -> float:
        """Share of the time in which an instance computes."""
        spent = float(self.seconds[self.first_of][self.steady[self.first_of]].sum())
        return spent / (self.pool.instances * self._span_s)

    def chunk_utilisation(self, chunk: int) -> float | None:
        """Prompt tokens over the capacity of the units' chunks, per pass that computed prompts."""
        steady = self.steady
        tokens = np.bincount(self.number[steady], self.tokens[steady])
        passes = int((tokens > 0).sum())
        return float(tokens.sum()) / (passes * self.pool.dp * chunk) if passes else None

    def kv_spread(self) -> dict[str, float]:
        """KV tokens over the units of an instance: time averages of mean and deviation, and the peak."""
        steady = self.steady
        passes = np.unique(self.number[steady], return_inverse=True)[1]
        if not len(passes):
            return {}
        table = np.zeros((passes.max() + 1, self.pool.dp))
        table[passes, self.unit[steady] % self.pool.dp] = self.kv_tokens[steady]
        return {
            "kv_mean_tokens": float(table.mean()),
            "kv_std_tokens": float(table.std(axis=1).mean()),
            "kv_peak_tokens": float(table.max()),
        }

    def decode_rate(self) -> float:
        """Generated tokens per second."""
        return float(self.decodes[self.steady].sum()) / self._span_s

    def decode_batch(self) -> float | None:
        """Sequences that a unit decodes per pass."""
        passes = len(np.unique(self.number[self.steady]))
        return float(self.decodes[self.steady].sum()) / (passes * self.pool.dp) if passes else None


def _window_s(result: EngineResult) -> tuple[float, float]:
    """Start and end (s): the last two thirds of the time in which requests are sent; the whole run if all are sent at
    once."""
    sent = np.asarray(result.requests["sent_ns"].drop_null())
    steps_end = float(np.asarray(result.steps["end_ns"]).max())
    last = float(sent.max()) if len(sent) else 0.0
    end = last if last > steps_end / 10 else steps_end
    return _BEGIN * end / 1e9, end / 1e9


def pool_figures(result: EngineResult, spec: TopologySpec, max_num_batched_tokens: int) -> dict[str, Any]:
    """Figures of a cluster run by name; None if undefined. ``dead``: why a decode unit ended the run.

    ``max_num_batched_tokens``: token budget of instances for which the topology sets none.
    """
    figures: dict[str, Any] = {name: result.facts.get(name) for name in ("dispatch_wait_ms", "device_wait_ms")}
    figures["dead"] = result.invalid[0] if result.invalid else None
    figures["receive_store_peak_gb"] = result.facts.get("receive_store_peak_gb")
    if not result.steps.num_rows:
        return figures
    first = 0
    for name, pool in (("front", spec.pools[0]), ("decode", spec.decode)):
        if pool is None:
            continue
        passes = _Passes(result, first, pool)
        chunk = pool.max_num_batched_tokens or max_num_batched_tokens
        figures[f"{name}_busy"] = passes.busy()
        figures[f"{name}_chunk_utilisation"] = passes.chunk_utilisation(chunk)
        figures |= {f"{name}_{key}": value for key, value in passes.kv_spread().items()}
        figures[f"{name}_decode_rate"] = passes.decode_rate()
        figures[f"{name}_decode_batch"] = passes.decode_batch()
        first += pool.units
    return figures
