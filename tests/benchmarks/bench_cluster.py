"""Speed of the cluster simulator: simulated requests per CPU second.

    python tests/benchmarks/bench_cluster.py [INSTANCES ...]

Prints, for every number of instances, requests per second of CPU time (the fastest of three runs) and steps per
second, closed loop at 2,048 requests per instance, the project's default load. Tests nothing.
"""

from __future__ import annotations

import gc
import sys
import time

from ebbench.config.topology import parse_topology
from ebbench.devices.loader import load_device
from ebbench.engines.sim import SimEngine
from ebbench.spec.server import EngineOptions
from ebbench.workloads import build_plan
from vllm_eb.policy import parse_policy

OPTIONS = EngineOptions(max_num_seqs=1024, max_num_batched_tokens=8192)


def measure(instances: int, workload: str, policy: str, dispatch: str, repeats: int = 3) -> tuple[float, float]:
    """Requests and steps per second of CPU time."""
    device = load_device("rtx-pro-6000", "qwen3-8b")
    plan = build_plan(
        workload, num_prompts=4000 * instances, seed=0, max_concurrency=2048 * instances, source="profile"
    )
    engine = SimEngine(parse_topology(f"dp={instances}"), dispatch)
    best = (0.0, 0.0)
    for _ in range(repeats):
        gc.collect()
        start_s = time.process_time()
        result = engine.run(plan, parse_policy(policy), device, OPTIONS)
        spent_s = time.process_time() - start_s
        best = max(best, (len(plan) / spent_s, result.steps.num_rows / spent_s))
        del result
    return best


def main() -> None:
    """Measure and print."""
    sizes = [int(argument) for argument in sys.argv[1:]] or [1, 8, 32]
    print(f"{'instances':>9} {'workload':14} {'policy':8} {'dispatch':18} {'requests/s':>11} {'steps/s':>9}")
    for instances in sizes:
        for workload, policy, dispatch in (
            ("sharegpt", "v1", "round-robin"),
            ("sharegpt", "ebplus", "least-outstanding"),
            ("sharegpt", "v1", "sbs"),
            ("sharegpt", "v1", "sbs:bypass=off"),  # staggers replicas, too
        ):
            requests_s, steps_s = measure(instances, workload, policy, dispatch, repeats=3 if instances < 32 else 1)
            print(
                f"{instances:9} {workload:14} {policy:8} {dispatch:18} {requests_s:11,.0f} {steps_s:9,.0f}", flush=True
            )


if __name__ == "__main__":
    main()
