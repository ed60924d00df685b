"""Cells of several instances: a topology and a dispatch policy besides what a cell has, and what they do with both."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

import ebbench
from ebbench.config.topology import PoolSpec, TopologySpec, TransferSpec, parse_topology
from ebbench.devices.base import Device, StepShape
from ebbench.dispatch import parse_dispatch
from ebbench.engines.base import EngineOptions, EngineResult
from ebbench.engines.cluster import ClusterEngine
from ebbench.papers.cells import Cell
from vllm_eb.calibration import Calibration

DEEPSEEK = "deepseek-v3-on-h800"
_CODE = ("dispatch", "engines/cluster.py", "papers/cluster_cells.py", "papers/staggered")
_BEGIN = 1 / 3  # what is measured per pass begins after this share of the time in which requests are sent


@dataclass(frozen=True)
class ClusterCell(Cell):
    """A run on ``topology`` (short form, or a name of TOPOLOGIES) behind a dispatcher."""

    topology: str = "dp=1"
    dispatch: str = "least-outstanding"
    decode_dispatch: str = "least-outstanding"
    network_ms: float = 0.0
    async_scheduling: bool = True
    max_model_len: int = EngineOptions.max_model_len

    @property
    def options(self) -> EngineOptions:
        """Scheduler settings of an instance."""
        return replace(super().options, async_scheduling=self.async_scheduling, max_model_len=self.max_model_len)

    def key(self) -> str:
        """As of a cell, with the topology and the code of dispatchers."""
        text = f"{super().key()} {_code()} {msgspec.json.encode(self.spec()).decode()}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def spec(self) -> TopologySpec:
        """The topology. Raises UsageError."""
        spec = TOPOLOGIES.get(self.topology) or parse_topology(self.topology)
        return msgspec.structs.replace(spec, network_ms=self.network_ms)

    def load_device(self) -> Device:
        """A GPU holding a model, or a unit made by hand."""
        return deepseek_unit() if self.device == DEEPSEEK else super().load_device()

    def engine(self) -> ClusterEngine:
        """Several instances under one clock."""
        return ClusterEngine(self.spec(), parse_dispatch(self.dispatch), parse_dispatch(self.decode_dispatch))

    def further_figures(self, result: EngineResult) -> dict[str, Any]:
        """What a summary does not hold: waits, chunk utilisation, how busy each pool is, spread of KV."""
        return cluster_figures(result, self)


@cache
def _code() -> str:
    package = Path(ebbench.__file__).resolve().parent
    digest = hashlib.sha256()
    for root in (package / part for part in _CODE):
        for path in sorted(root.rglob("*")) if root.is_dir() else [root]:
            if path.suffix in (".py", ".toml"):
                digest.update(path.read_bytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class UnitCost:
    """A DP unit of DeepSeek-V3: linear in the tokens of a prefill, in sequences and KV tokens of a decode."""

    prefill_s: float
    prefill_token_s: float
    decode_s: float
    decode_seq_s: float
    kv_token_s: float

    def step_s(self, shape: StepShape) -> float:
        """Seconds; units prefill or decode, never both."""
        if not shape.decode_seqs:
            return self.prefill_s + self.prefill_token_s * sum(chunk for chunk, _ in shape.prefill)
        return self.decode_s + self.decode_seq_s * shape.decode_seqs + self.kv_token_s * shape.decode_kv_tokens


@cache
def deepseek_unit() -> Device:
    """One DP unit of the staggered paper's instances, as far as its figures tell.

    Prefill: table 1 gives two pairs of throughput and chunk utilisation with staggering on. Tokens of a pass (8 units x
    chunk x utilisation) over tokens a second (QPS x 1K) make 0.311 s a pass at a chunk of 3K and 0.456 s at 5K, if the
    figures are those of one instance: those of three would make passes longer than the published TTFT. The line through
    both is 94 ms + 71 us a token. Decode: estimates from the hardware. 38 GB of weights (FP8, 1/32 of the experts) and
    two exchanges a layer take 30 ms; 0.15 ms a sequence at 500 TFLOP/s; 50 ns a KV token for 70 KB read and 17 MFLOP.
    """
    cost = UnitCost(0.0935, 70.8e-6, 0.030, 0.15e-3, 50e-9)
    linear = Calibration(cost.prefill_s, cost.prefill_token_s, cost.decode_s, cost.decode_seq_s)
    return Device(DEEPSEEK, "deepseek-v3", cost, 1 << 20, linear, "from table 1 of Tian et al. and estimates")


_PREFILL = PoolSpec(instances=3, tp=4, dp=8, ep=32)
TOPOLOGIES = {
    "3p": TopologySpec(name="3p", replicas=_PREFILL),
    "3p1d-deepseek": TopologySpec(
        name="3p1d-deepseek", prefill=_PREFILL, decode=PoolSpec(dp=32, ep=32),
        transfer=TransferSpec(
            bandwidth_gb_per_s=45, store_gb=20, held_until="admission", backpressure=True, kv_bytes_per_token=70_272
        ),
    ),
    "1p1d-early": TopologySpec(
        name="1p1d-early", prefill=PoolSpec(), decode=PoolSpec(), transfer=TransferSpec(held_until="admission")
    ),
}  # fmt: skip
"""``3p`` is the staggered paper's prefill pool alone: where answers have one token, nothing reaches a decode unit.
``1p1d-early`` gives received KV up once it is in the cache."""


class _Passes:
    """Steps of one pool, their units put together to passes of an instance."""

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
        """Steps while requests are sent, the beginning left out."""
        begin_s, end_s = self.window_s
        inside: npt.NDArray[np.bool_] = (self.start_s >= begin_s) & (self.start_s <= end_s)
        return inside

    @property
    def _span_s(self) -> float:
        return self.window_s[1] - self.window_s[0]

    def busy(self) -> float:
        """Share of the time that an instance computes."""
        spent = float(self.seconds[self.first_of][self.steady[self.first_of]].sum())
        return spent / (self.pool.instances * self._span_s)

    def chunk_utilisation(self, chunk: int) -> float | None:
        """Prompt tokens over what the units' chunks had room for, per pass that computed some."""
        steady = self.steady
        tokens = np.bincount(self.number[steady], self.tokens[steady])
        passes = int((tokens > 0).sum())
        return float(tokens.sum()) / (passes * self.pool.dp * chunk) if passes else None

    def kv_spread(self) -> dict[str, float]:
        """KV tokens over the units of an instance: the mean over time of their mean and deviation; the peak."""
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
        """Tokens generated a second."""
        return float(self.decodes[self.steady].sum()) / self._span_s

    def decode_batch(self) -> float | None:
        """Sequences a unit decodes in a pass."""
        passes = len(np.unique(self.number[self.steady]))
        return float(self.decodes[self.steady].sum()) / (passes * self.pool.dp) if passes else None


def _window_s(result: EngineResult) -> tuple[float, float]:
    """From a third of the time in which requests are sent to its end; of the whole run where all are sent at once."""
    sent = np.asarray(result.requests["sent_ns"].drop_null())
    steps_end = float(np.asarray(result.steps["end_ns"]).max())
    last = float(sent.max()) if len(sent) else 0.0
    end = last if last > steps_end / 10 else steps_end
    return _BEGIN * end / 1e9, end / 1e9


def cluster_figures(result: EngineResult, cell: ClusterCell) -> dict[str, Any]:
    """Figures of a cluster's run by name; None where undefined. ``dead``: why a decode unit ended the run."""
    spec = cell.spec()
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
        chunk = pool.max_num_batched_tokens or cell.max_num_batched_tokens
        figures[f"{name}_busy"] = passes.busy()
        figures[f"{name}_chunk_utilisation"] = passes.chunk_utilisation(chunk)
        figures |= {f"{name}_{key}": value for key, value in passes.kv_spread().items()}
        figures[f"{name}_decode_rate"] = passes.decode_rate()
        figures[f"{name}_decode_batch"] = passes.decode_batch()
        first += pool.units
    return figures
