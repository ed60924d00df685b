"""`marginal` on data-parallel ranks that make every pass together, over settings that its rule was not made on.

    python -m tests.benchmarks.bench_lockstep [--workers 2] [--requests 800] [--seed 11]

Dense ranks and ranks that share experts, two to eight, on three GPUs; synthetic mixes with prompts of one length and of
many, and three data sets. Prints the change in throughput against v1, and where `marginal` is more than 2 % below the
best of the others.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from itertools import product

from ebbench.installation import REFERENCE
from ebbench.papers.eb.disaggregation import BALANCED
from ebbench.runs.execute import Task, make
from ebbench.runs.pool import make_pool, values
from ebbench.spec.run import RunSpec, simulated

ONE_LENGTH = {
    f"{mix}, one prompt length": f"{REFERENCE}workloads/disaggregation-{mix}.toml"
    for mix in ("prefill-heavy", "balanced", "decode-heavy")
}
WORKLOADS: Mapping[str, str] = {
    **ONE_LENGTH, "512/256, one prompt length": f"{REFERENCE}workloads/concurrency-shift-run.toml",
    **{name: name for name in ("prefill-heavy", "balanced", "sharegpt", "longbench", "wildchat")},
}  # fmt: skip
RANKS = (
    ("h200", "qwen3-8b", "dp=2,lockstep=on", 64),
    ("rtx-pro-6000", "qwen3-8b", "dp=4,lockstep=on", 256),
    ("h200", "qwen3-8b", "dp=8,lockstep=on", 1024),
    ("h200", "qwen3-30b-a3b", "tp=1,dp=4,ep=4", 256),
    ("rtx-pro-6000", "qwen3-30b-a3b", "tp=1,dp=2,ep=2", 128),
    ("l40s", "qwen3-8b", "dp=4,lockstep=on", 128),
)
OTHERS = ("v1", "cadence:every=16,escape=off", "delayer", "ebplus")
BEHIND = 0.02


def rate(job: tuple[RunSpec, int]) -> tuple[int, float]:
    """The job's number and its tokens/s."""
    cell, number = job
    return number, float(make(Task(cell, None)).figures["total_token_throughput"])


def main() -> None:
    """Run all settings and print them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--requests", type=int, default=800)
    parser.add_argument("--seed", type=int, default=11)
    given = parser.parse_args()
    keys = list(product(RANKS, WORKLOADS, ("marginal", *OTHERS)))
    jobs = []
    for number, ((device, model, topology, open_requests), workload, policy) in enumerate(keys):
        cell = simulated(
            WORKLOADS[workload], policy, device, model, 1024, 8192, topology=topology, dispatch=BALANCED,
            num_prompts=given.requests, max_concurrency=open_requests, async_scheduling=False, seed=given.seed,
        )  # fmt: skip
        jobs.append((cell, number))
    rates = {keys[number]: found for number, found in values(make_pool(given.workers, len(jobs)), rate, jobs)}
    behind = 0
    for ranks, workload in product(RANKS, WORKLOADS):
        v1 = rates[ranks, workload, "v1"]
        gains = {name: rates[ranks, workload, name] / v1 - 1 for name in ("marginal", *OTHERS)}
        late = 1 + gains["marginal"] < (1 - BEHIND) * (1 + max(gains[name] for name in OTHERS))
        behind += late
        shown = ", ".join(f"{name.partition(':')[0]} {gain:+.1%}" for name, gain in gains.items() if name != "v1")
        print(f"{' '.join(map(str, ranks))}, {workload}: {shown}{'  <- behind' if late else ''}", flush=True)
    print(f"marginal more than {BEHIND:.0%} below the best in {behind} of {len(RANKS) * len(WORKLOADS)}")


if __name__ == "__main__":
    main()
