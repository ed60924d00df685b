"""Prefill pools of the staggered paper over the load: the runs, and interpolation between them."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np

from ebbench.config.topology import PoolSpec, TopologySpec, TransferSpec, parse_topology
from ebbench.papers.table import PaperOptions
from ebbench.runs.store import RunStore
from ebbench.spec.run import RunSpec, simulated

# Deployments of the staggered paper: a DP unit of DeepSeek-V3 on H800, and topologies of its instances.

MODEL = "deepseek-v3"
PREFILL_S, PREFILL_TOKEN_S, DECODE_S, DECODE_SEQ_S, KV_TOKEN_S = 0.0935, 70.8e-6, 0.030, 0.15e-3, 50e-9
UNIT = f"linear:{PREFILL_S},{PREFILL_TOKEN_S},{DECODE_S},{DECODE_SEQ_S},{1 << 20},{KV_TOKEN_S}"
"""One DP unit of the staggered paper's instances, as derived from its figures.

Prefill: table 1 gives two pairs of throughput and chunk utilisation with staggering on. Tokens per pass (8 units x
chunk x utilisation) over tokens/s (QPS x 1K) give 0.311 s per pass at a chunk of 3K and 0.456 s at 5K, if the figures
are those of one instance: those of three would give passes longer than the published TTFT. The line through both is 94
ms + 71 us per token. Decode: estimates from the hardware. 38 GB of weights (FP8, 1/32 of the experts) and two exchanges
per layer take 30 ms; 0.15 ms per sequence at 500 TFLOP/s; 50 ns per KV token for 70 KB read and 17 MFLOP.
"""

_PREFILL = PoolSpec(instances=3, tp=4, dp=8, ep=32)
TOPOLOGIES = {
    "3p": TopologySpec(name="3p", replicas=_PREFILL),
    "3p1d-deepseek": TopologySpec(
        name="3p1d-deepseek", prefill=_PREFILL, decode=PoolSpec(dp=32, ep=32),
        transfer=TransferSpec(
            bandwidth_gb_per_s=45, store_gb=20, held_until="admission", backpressure=True, kv_bytes_per_token=70_272
        ),
    ),
}  # fmt: skip
"""``3p`` is the staggered paper's prefill pool alone: with outputs of one token, no request reaches a decode unit."""


def deployed(topology: str, network_ms: float = 0.0) -> TopologySpec:
    """A topology by its name here or in short form, with this network delay to the instances. Raises UsageError."""
    spec = TOPOLOGIES.get(topology) or parse_topology(topology)
    return msgspec.structs.replace(spec, network_ms=network_ms)


def pass_s(chunk_tokens: int) -> float:
    """Duration (s) of a prefill pass of a unit with a full chunk."""
    return PREFILL_S + PREFILL_TOKEN_S * chunk_tokens


STAGGERED_PAPER = "Tian et al., Staggered Batch Scheduling, 2025"
REQUESTS = 12_000
NETWORK_MS = 0.5
AS_PUBLISHED = "sbs:bypass=off,sizing=off,overdraw=on,aged_cycles=off,lookahead=0"
"""Algorithms 1 and 2 to the letter: no bypass under light load, chunks may be exceeded, longest first in all cases, and
nothing is sent to an instance before the end of its pass is known."""
WITH_LOOKAHEAD = AS_PUBLISHED.replace(",lookahead=0", "")
"""The same with our extension ``lookahead``: until November 2026 this stood here as the published algorithms."""
IMMEDIATE = ("round-robin", "least-outstanding")
DISPATCH = (*IMMEDIATE, AS_PUBLISHED, WITH_LOOKAHEAD, "sbs")
TITLES = {AS_PUBLISHED: "sbs, to the letter", WITH_LOOKAHEAD: "with lookahead (ours)", "sbs": "sbs (ours)"}
"""Short names of the staggered policies in tables."""
SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.925, 0.95, 0.975, 1.0)
"""Offered load, as a share of the pool's throughput with full chunks."""


class Setup(NamedTuple):
    """Prompts, chunk size, and the TTFT limit that defines the peak load."""

    title: str
    workload: str
    mean_tokens: float
    chunk: int
    ttft_limit_s: float


SHORT_3K = Setup("0-3K prompts, chunk 3K", "reference:workloads/short-prompts.toml", 1000, 3072, 0.8)
SHORT_5K = Setup("0-3K prompts, chunk 5K", "reference:workloads/short-prompts.toml", 1000, 5120, 1.0)


# No limit is published for long prompts: as many full passes as table 1 allows at a chunk of 3K.
LONG_16K = Setup(
    "3K-64K prompts, chunk 16K",
    "reference:workloads/long-prompts.toml",
    6700,
    16384,
    0.8 * pass_s(16384) / pass_s(3072),
)


def capacity_rps(setup: Setup, topology: str = "3p") -> float:
    """Requests/s of the pool with full chunks and without waiting."""
    return deployed(topology).pools[0].units * setup.chunk / pass_s(setup.chunk) / setup.mean_tokens


def prefill_cell(options: PaperOptions, setup: Setup, dispatch: str, share: float, topology: str = "3p") -> RunSpec:
    """One load under one dispatch policy."""
    rate = round(share * capacity_rps(setup, topology), 3)
    return simulated(
        setup.workload, "v1", UNIT, MODEL, 1024, setup.chunk, scenario="poisson",
        topology=deployed(topology, NETWORK_MS), dispatch=dispatch,
        async_scheduling=False, num_prompts=options.num_prompts or REQUESTS, request_rate=rate, max_model_len=70_000,
    )  # fmt: skip


def prefill_cells(options: PaperOptions, setup: Setup) -> list[RunSpec]:
    """All loads under all policies."""
    return [prefill_cell(options, setup, dispatch, share) for dispatch in DISPATCH for share in SHARES]


class FiguresOverLoad:
    """Figures of one policy over the load, interpolated linearly between the runs."""

    def __init__(self, options: PaperOptions, store: RunStore, setup: Setup, dispatch: str) -> None:
        found = [(share, store.get(prefill_cell(options, setup, dispatch, share))) for share in SHARES]
        self._known = [(share, measured) for share, measured in found if measured is not None]
        self.complete = len(self._known) == len(SHARES)

    def at(self, key: str, share: float, scale: float = 1.0) -> float | None:
        """One figure at a load; None if runs are missing or the load is outside their range."""
        if not self.complete or not SHARES[0] <= share <= SHARES[-1]:
            return None
        values = [measured.get(key, scale) for _, measured in self._known]
        if any(value is None for value in values):
            return None
        return float(np.interp(share, SHARES, [float(value or 0) for value in values]))

    def peak(self, ttft_limit_s: float) -> float | None:
        """The highest load whose mean TTFT is within the limit."""
        if not self.complete:
            return None
        ttft_s = [measured.get("mean_ttft_ms", 1e-3) or 0.0 for _, measured in self._known]
        over = next((i for i, value in enumerate(ttft_s) if value > ttft_limit_s), None)
        if over is None or over == 0:
            return None
        below, above = ttft_s[over - 1], ttft_s[over]
        part = (ttft_limit_s - below) / (above - below)
        return SHARES[over - 1] + part * (SHARES[over] - SHARES[over - 1])
