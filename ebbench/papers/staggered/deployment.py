"""Deployments of the staggered paper: a DP unit of DeepSeek-V3 on H800, and topologies of its instances."""

from __future__ import annotations

import msgspec

from ebbench.config.topology import PoolSpec, TopologySpec, TransferSpec, parse_topology

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
