"""Simulated requests per second on one core, and the wall time of the commands a user types.

    python tests/benchmarks/bench_sim.py [CONFIG.json ...]

ShareGPT's lengths, saturated, concurrency 2,048, N = 1,024, B = 8,192. Prints the median and the extremes of several
runs; CPU seconds cover the engine's whole `run` with its tables, without start-up.

Before that, the time of a simulated step of models whose times come from `ebbench[tables]`, over that of one with
bundled tables: the least of several runs, in turns. The models are those of config.json files, on eight GPUs.
"""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from ebbench.devices.base import Parallel
from ebbench.devices.loader import load_device
from ebbench.engines.sim import SimEngine
from ebbench.spec.server import EngineOptions
from ebbench.workloads import build_plan
from vllm_eb.policy import parse_policy

RUNS = 7
BUNDLED = "qwen3-30b-a3b"
CONFIGS = ["tests/benchmarks/qwen3.5-397b-a17b.json", "tests/benchmarks/deepseek-v3.json"]
DEVICES = (
    ("rtx-pro-6000", "qwen3-8b", "linear"), ("rtx-pro-6000", "qwen3-8b", "auto"), ("h200", "qwen3-8b", "auto"),
    ("h200", "qwen3-30b-a3b", "auto"), ("l40s", "llama-3.1-8b", "auto"),
)  # fmt: skip
POLICIES = (
    "v1", "v1:budget=2048", "v0", "deferred:k=32", "eb:theta=0.7", "eb", "ebplus", "cadence:every=32,escape=off",
    "ppas",
    "delayer", "batchwait:iters=32,ratio=0.5", "slochunk:tpot=0.1", "marginal", "marginal:ttft=10,tpot=0.1",
)  # fmt: skip


def simulator() -> None:
    """Print requests per CPU second for each policy and device; ``auto`` is the kernel tables."""
    plan = build_plan("sharegpt", num_prompts=4000, seed=0, source="profile", max_concurrency=2048)
    options = EngineOptions(max_num_seqs=1024, max_num_batched_tokens=8192)
    print(f"{'device':36}{'policy':16}{'requests/s':>12}{'min':>10}{'max':>10}")
    for name, model, cost in DEVICES:
        device = load_device(name, model, cost=cost)
        label = f"{name} {model} {cost}"
        for policy in POLICIES:
            rates = []
            for _ in range(RUNS):
                start_s = time.process_time()
                SimEngine().run(plan, parse_policy(policy), device, options, None)
                rates.append(len(plan) / (time.process_time() - start_s))
            print(f"{label:36}{policy:16}{statistics.median(rates):12,.0f}{min(rates):10,.0f}{max(rates):10,.0f}")


def other_layers(configs: Sequence[str]) -> None:
    """Print CPU microseconds per step of each model by open requests, and their ratio to those of BUNDLED."""
    devices = {BUNDLED: load_device("h200", BUNDLED)}
    devices |= {name: load_device("h200", name, parallel=Parallel(tp=8)) for name in configs}
    options = EngineOptions(max_num_seqs=1024, max_num_batched_tokens=8192)
    print(f"{'model':44}{'open':>6}{'us/step':>10}{'ratio':>8}")
    for opened in (64, 256, 1024):
        plan = build_plan("sharegpt", num_prompts=1000, seed=0, source="profile", max_concurrency=opened)
        least_us = dict.fromkeys(devices, math.inf)
        for _ in range(RUNS):
            for name, device in devices.items():
                start_s = time.process_time()
                steps = SimEngine().run(plan, parse_policy("v1"), device, options, None).steps.num_rows
                least_us[name] = min(least_us[name], (time.process_time() - start_s) / steps * 1e6)
        for name, step_us in least_us.items():
            print(f"{name:44}{opened:6}{step_us:10.1f}{step_us / least_us[BUNDLED]:8.2f}")


def commands() -> None:
    """Print wall seconds of `ebbench --help` and of a run of 4,000 requests."""
    ebbench = str(Path(sys.executable).with_name("ebbench"))
    run = [ebbench, "run", "sharegpt", "--source", "profile", "--num-prompts", "4000", "--policy", "ebplus"]
    for name, command in (("ebbench --help", [ebbench, "--help"]), ("ebbench run, 4,000 requests", run)):
        seconds = []
        for _ in range(RUNS):
            with tempfile.TemporaryDirectory() as folder:
                where = ["--output-dir", f"{folder}/run"] if command is run else []
                start_s = time.perf_counter()
                subprocess.run([*command, *where], check=True, capture_output=True)
                seconds.append(time.perf_counter() - start_s)
        print(f"{name}: median {statistics.median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f})")


if __name__ == "__main__":
    other_layers(sys.argv[1:] or CONFIGS)
    simulator()
    commands()
