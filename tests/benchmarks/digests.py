"""Digests of the simulator's tables over many small runs: shows whether a change of the code changed a result.

    python tests/benchmarks/digests.py --check tests/benchmarks/digests.json     # exit code 1 if a table differs
    python tests/benchmarks/digests.py --write tests/benchmarks/digests.json     # after an intended change

The runs cover every policy, device, topology, scenario and dispatch policy, asynchronous scheduling and prefix caching
on and off, and KV caches that are too small. They are chosen by seeded random numbers, so they are the same every time.
Digests are valid for one machine and one version of numpy: others may round floats differently.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import random
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from ebbench.config.topology import parse_topology
from ebbench.devices.loader import load_device
from ebbench.engines.base import EngineResult
from ebbench.engines.sim import SimEngine
from ebbench.papers.protocols import VLLM
from ebbench.spec.server import EngineOptions
from ebbench.workloads import build_plan
from vllm_eb.policy import parse_policy

DATA = Path(__file__).parents[1] / "data"
TABLES = ("requests", "steps", "decisions")
RUNS_PER_POLICY = 15

GEMMA_GROUPS = 7
"""Layers of gemma-3-1b-it share a pool of blocks in so many groups: a request takes as many times the blocks."""
SOON = "update_every=10,min_samples=5"  # small runs have few completions
POLICIES = (
    "v1",
    "v0",
    "cadence:every=4",
    "cadence:every=16",
    "deferred:k=3",
    "deferred:k=16",
    "eb:theta=0.5",
    "eb:k=4",
    f"eb:{SOON}",
    f"eb:{SOON},estimator=censored,memory_form=paper",
    f"ebplus:{SOON}",
    f"ebplus:{SOON},margin=-1,sticky=-1",
    "marginal:update_every=10",
    "marginal:mix=off",
    "marginal:ttft=0.5,tpot=0.03,update_every=10",
)
DEVICES = (
    ("rtx-pro-6000", "qwen3-8b"),
    ("h200", "qwen3-8b"),
    ("h200", "qwen3-30b-a3b"),
    ("l40s", "llama-3.1-8b"),
    ("h100", "qwen3-14b"),
    ("b300", "qwen3-32b"),
    ("rtx-4090", "gemma-3-1b-it"),
)
CLOSED = ("saturated", "traffic-32")
# With several phases, of which the last two bring their own lengths.
SHIFTING = ("concurrency-ramp", "concurrency-shift", "distribution-shift")
OPEN = ("poisson", "gamma", "constant", "ramp", "day-curve", "bursts-gamma", "bursts-on-off", "saturation-steps")
TRACES = ("trace", "trace-repeat")
LENGTHS = (
    {"workload": "sharegpt"},
    {"workload": "balanced"},
    {"workload": "prefill-heavy"},
    {"workload": "wildchat"},
    {"workload": "balanced", "input_len": 40, "output_len": 90},
    {"workload": "balanced", "input_len": 200, "output_len": 2},
    {"workload": "balanced", "input_len": 100, "output_len": 1, "length_distribution": "fixed"},
)
POOLS = ("1p1d", "2p1d", "1p2d,tp=2")
REPLICAS = ("dp=2", "dp=3", "tp=1,dp=2,ep=2", "dp=2,tp=2")
DISPATCH = (
    "round-robin", "least-outstanding", "power-of-two", "prefix-affine", "iqr", "sbs", "sbs:packing=off",
    "sbs:bypass=off,sizing=off,overdraw=on,aged_cycles=off",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One simulated run; ``plan`` and ``options`` are arguments of build_plan and EngineOptions."""

    policy: str
    device: tuple[str, str]
    plan: dict[str, Any]
    options: dict[str, Any]
    topology: str | None = None
    dispatch: str = ""

    @property
    def name(self) -> str:
        """All settings in one line: the key of the digests."""
        return json.dumps(
            [self.policy, *self.device, self.plan, self.options, self.topology, self.dispatch], sort_keys=True
        )

    def run(self) -> EngineResult:
        """Simulate it."""
        options = EngineOptions(**{"front_end_ms": 0.0, **self.options})
        arguments = dict(self.plan)
        workload = arguments.pop("workload").replace("DATA", str(DATA))
        source = "auto" if workload.startswith("trace:") else "profile"
        plan = build_plan(workload, arguments.pop("scenario"), source=source, with_text=False, **arguments)
        device = load_device(
            *self.device,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            async_scheduling=options.async_scheduling,
            eager=options.enforce_eager,
            vllm_version=VLLM,
        )
        policy = parse_policy(self.policy)
        if self.topology is None:
            return SimEngine().run(plan, policy, device, options, None)
        engine = SimEngine(parse_topology(self.topology), self.dispatch)
        return engine.run(plan, policy, device, options, None)


def cases() -> list[Case]:
    """All runs, in a fixed order; each once."""
    found = [*_single_instances(), *_clusters(), *_front_ends()]
    return list({case.name: case for case in found}.values())


def _single_instances() -> Iterator[Case]:
    for policy in POLICIES:
        for number in range(RUNS_PER_POLICY):
            dice = random.Random(f"{policy} {number}")
            plan = _plan(dice, number)
            device, options = DEVICES[number % len(DEVICES)], _options(dice, plan, warmup=True)
            if "num_kv_blocks" in options and device[1] == "gemma-3-1b-it":
                options["num_kv_blocks"] *= GEMMA_GROUPS
            yield Case(policy, device, plan, options)


def _clusters() -> Iterator[Case]:
    for number, dispatch in enumerate(DISPATCH * 4):
        dice = random.Random(f"{dispatch} {number}")
        topology = (REPLICAS * 2 + POOLS)[number % 11]
        policy = "v1" if topology in POOLS else dice.choice(POLICIES)
        device = ("h200", "qwen3-30b-a3b") if "ep=" in topology else ("h200", "qwen3-8b")
        plan = _plan(dice, number)
        yield Case(policy, device, plan, _options(dice, plan, warmup=False), topology, dispatch)


def _front_ends() -> Iterator[Case]:
    """Requests that enter later than they are sent; all other cases have none."""
    for number, topology in enumerate((None, None, None, "dp=2", "1p1d", "tp=1,dp=2,ep=2")):
        dice = random.Random(f"front end {number}")
        plan = _plan(dice, number)
        options = _options(dice, plan, warmup=topology is None) | {"front_end_ms": 13.0}
        device = ("h200", "qwen3-30b-a3b" if topology and "ep=" in topology else "qwen3-8b")
        yield Case("v1", device, plan, options, topology, DISPATCH[1] if topology else "")


def _plan(dice: random.Random, number: int) -> dict[str, Any]:
    seed = {"seed": dice.randrange(1000)}
    kind = number % 6
    if kind == 5:
        recorded = dice.choice(("azure.csv", "mooncake.jsonl"))
        return {
            "workload": f"trace:DATA/{recorded}",
            "scenario": dice.choice(TRACES),
            "speed": dice.choice((1, 9)),
        } | seed
    lengths = {} if kind == 4 else dice.choice(LENGTHS)
    plan: dict[str, Any] = {"workload": "balanced"} | lengths | seed | {"max_model_len": 2000, "drop_too_long": True}
    plan["num_prompts"] = 30 if plan["workload"] == "wildchat" else dice.choice((60, 120))
    if kind == 4:
        return plan | {"scenario": dice.choice(SHIFTING)}
    if kind % 2:
        return plan | {"scenario": dice.choice(OPEN), "request_rate": dice.choice((5.0, 40.0))}
    return plan | {"scenario": dice.choice(CLOSED), "max_concurrency": dice.choice((6, 24, 100))}


def _options(dice: random.Random, plan: dict[str, Any], *, warmup: bool) -> dict[str, Any]:
    options: dict[str, Any] = {
        "max_num_seqs": dice.choice((4, 16, 64)),
        "max_num_batched_tokens": dice.choice((256, 2048)),
        "enable_prefix_caching": dice.random() < 0.6,
        "async_scheduling": dice.random() < 0.6,
        "long_prefill_token_threshold": dice.choice((0, 0, 100)),
        "enforce_eager": dice.random() < 0.2,
    }
    if dice.random() < 0.5:
        # Of 16 tokens; the least holds little more than the longest request.
        options["num_kv_blocks"] = dice.choice((130, 200, 500) if "num_prompts" in plan else (310, 500))
    if warmup and dice.random() < 0.2:
        options["warmup"] = 8
    return options


def digest(table: pa.Table) -> str:
    """SHA-256 over names, types and values, the first 16 digits; independent of chunks and of what nulls hide."""
    found = hashlib.sha256()
    for name in table.column_names:
        column = table[name]
        found.update(f"{name} {column.type}".encode())
        found.update(msgspec.msgpack.encode(column.to_pylist()))
    return found.hexdigest()[:16]


def digests_of(case: Case) -> dict[str, str]:
    """Digests of the run's tables."""
    result = case.run()
    return {name: digest(getattr(result, name)) for name in TABLES}


def all_digests(jobs: int) -> dict[str, dict[str, str]]:
    """Digests of every case by its name, computed by ``jobs`` processes."""
    every = cases()
    if jobs == 1:
        return {case.name: digests_of(case) for case in every}
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        found = pool.map(digests_of, every, chunksize=8)
        return {case.name: digests for case, digests in zip(every, found, strict=True)}


def differences(old: dict[str, dict[str, str]], new: dict[str, dict[str, str]]) -> list[str]:
    """One line per run whose tables are not as before."""
    lines = [f"no longer run: {name}" for name in old if name not in new]
    for name, digests in new.items():
        if name not in old:
            lines.append(f"new: {name}")
        elif digests != old[name]:
            what = [key for key in sorted(digests.keys() | old[name].keys()) if digests.get(key) != old[name].get(key)]
            lines.append(f"{', '.join(what)} differ: {name}")
    return lines


def main() -> int:
    """Write digests, or compare them with those of a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", type=Path, metavar="FILE", help="Write the digests of the code as it is.")
    what.add_argument("--check", type=Path, metavar="FILE", help="Compare with digests written before.")
    parser.add_argument("--jobs", type=int, default=2, help="Processes side by side (default: 2).")
    options = parser.parse_args()
    digests = all_digests(options.jobs)
    if options.write is not None:
        options.write.write_text(json.dumps(digests, indent=0, sort_keys=True) + "\n", encoding="utf-8")
        print(f"digests of {len(digests)} runs written to {options.write}")
        return 0
    lines = differences(json.loads(options.check.read_text(encoding="utf-8")), digests)
    print(*lines, f"{len(lines)} of {len(digests)} runs differ", sep="\n")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
