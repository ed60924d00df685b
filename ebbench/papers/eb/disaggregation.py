"""How the EB paper's tables 19 and 20 were run: data-parallel servers, and prefill with decode pools.

Facts of the authors' scripts (weifang231/eb-vllm, reproduce/disagg: run_2gpu_comparison.sh, run_4gpu_comparison.sh,
their ``paper_sweep`` wrappers, disagg_multi_proxy.py):

- Four GPUs: 2,000 requests per setting (also in the paper). Two GPUs: 1,000, the script's default, which the authors'
  own repetition at 64 open has too; with 2,048 open 4,000 are taken, as in all their other runs at that concurrency,
  since 1,000 do not fill it and the printed mean TTFT is longer than 2,000 would allow. (A wrapper of later date has
  2,000 everywhere.) None to warm up; prompts of the mean length, outputs within 25 % of the mean.
- Data parallelism is one ``vllm serve --data-parallel-size``. No script sets B or N, so they are vLLM's defaults.
- Pools take 0.8 of the memory on both sides, and a proxy sends requests to the servers of each in turn. On four GPUs
  chunked prefill is off, for which vLLM raises B to the model's length. The rest of a decode server's memory receives
  KV; beyond ``kv_buffer_size`` (20 GB) the connector uses the host's memory, which is not modelled.
- EB+ has a fixed threshold of 0.8 and no memory-safe N (the first version of the scripts; a later one has Algorithm 1).
  They set neither the cost of mixed batches nor the margin. Without them EB+ never leaves mixed batches, and with 2,048
  open requests on RTX PRO 6000 it did; so both are taken to be those of table 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ebbench.config.topology import PoolSpec, TopologySpec, TransferSpec, parse_topology
from ebbench.papers.protocols import FIXED_THETA, SERVER_BUDGET, SERVER_SEQS, Protocol, ebplus_as_run
from ebbench.resources import REFERENCE

BALANCED = "round-robin"
"""Dispatch to data-parallel ranks. vLLM's front end balances by counts up to 100 ms old (v1/engine/coordinator.py) and
counts what it has sent since, so requests that come within a step or two are spread evenly."""
UNCHUNKED_BUDGET = 40_960
"""vLLM's B for Qwen3-8B without chunked prefill: the model's length."""
POOL_UTILIZATION = 0.8
REQUESTS19 = {64: 1000, 512: 1000, 2048: 4000}
"""Requests by number of open ones."""
REQUESTS20 = 2000
CONCURRENCY20 = (128, 256, 512)
MIXES = ("prefill-heavy", "balanced", "decode-heavy")
FIXED_THRESHOLD = {"theta_min": FIXED_THETA, "initial_theta": FIXED_THETA, "memory_safe": False}


@dataclass(frozen=True)
class PolicyOnTopology:
    """A setting: a topology, the policy of its instances, their token budget, and the dispatch to them.

    ``policy`` "ebplus" is EB+ as these tables' scripts set it.
    """

    title: str
    topology: TopologySpec
    policy: str
    budget: int = SERVER_BUDGET

    def protocol(self, device: str, plan: dict[str, Any]) -> Protocol:
        """The protocol of a run with these arguments of the plan."""
        policy = ebplus_as_run(device, **FIXED_THRESHOLD) if self.policy == "ebplus" else self.policy
        pooled = self.topology.disaggregated
        return Protocol(
            policy, plan | {"source": "profile"}, SERVER_SEQS, self.budget, warmup=0,
            topology=self.topology, dispatch=BALANCED, decode_dispatch=BALANCED if pooled else None,
        )  # fmt: skip


def replicas(title: str, ranks: int, policy: str) -> PolicyOnTopology:
    """A policy on the ranks of one data-parallel server.

    A vLLM without asynchronous scheduling is 0.13 or older, whose ranks of a dense model agree on every forward pass.
    """
    return PolicyOnTopology(title, parse_topology(f"dp={ranks},lockstep=on"), policy)


def _pools(prefill: int, decode: int, transfer: TransferSpec | None = None) -> TopologySpec:
    return TopologySpec(
        name=f"{prefill}p{decode}d",
        prefill=PoolSpec(instances=prefill, gpu_memory_utilization=POOL_UTILIZATION),
        decode=PoolSpec(instances=decode, gpu_memory_utilization=POOL_UTILIZATION),
        transfer=transfer or TransferSpec(),
    )


def _four(prefill: int, decode: int) -> PolicyOnTopology:
    topology = _pools(prefill, decode)
    return PolicyOnTopology(f"{prefill}P+{decode}D", topology, "v1", UNCHUNKED_BUDGET)


TWO = {
    "v1_dp2": replicas("v1, DP=2", 2, "v1"),
    "ebplus_dp2": replicas("EB+, DP=2", 2, "ebplus"),
    "disagg_1p1d": PolicyOnTopology("1P+1D", _pools(1, 1), "v1"),
}
EARLY = PolicyOnTopology("1P+1D, copies dropped early", _pools(1, 1, TransferSpec(held_until="admission")), "v1")
"""Frees received KV once it is in the cache; not in the paper."""
FOUR = {
    "v1_dp4": replicas("v1, DP=4", 4, "v1"),
    "ebplus_dp4": replicas("EB+, DP=4", 4, "ebplus"),
    "1p3d": _four(1, 3),
    "2p2d": _four(2, 2),
    "3p1d": _four(3, 1),
}


def two_gpus(setting: PolicyOnTopology, device: str, concurrency: int) -> Protocol:
    """A run of table 19: prompts of 512 tokens, outputs of 256 on average."""
    workload = f"{REFERENCE}workloads/concurrency-shift-run.toml"
    count = REQUESTS19[concurrency]
    return setting.protocol(device, {"workload": workload, "num_prompts": count, "max_concurrency": concurrency})


def four_gpus(setting: PolicyOnTopology, device: str, mix: str, concurrency: int) -> Protocol:
    """A run of table 20."""
    workload = f"{REFERENCE}workloads/disaggregation-{mix}.toml"
    plan = {"workload": workload, "num_prompts": REQUESTS20, "max_concurrency": concurrency}
    return setting.protocol(device, plan)
