"""What the plugin costs, and how fast the emulated engine is. Prints; asserts nothing about time.

    python tests/benchmarks/bench_scheduler.py [--requests 1500] [--concurrency 512] [--rounds 3] [--policy eb ...]

Overhead: CPU time of ``schedule()`` under vLLM's own scheduler and under the plugin, on the same plan in the same
process, in turns (A B C C B A ...), so that a drift of the machine falls on all. ``with/without`` is the time of the
plugin's ``schedule()`` divided by the time of vLLM's ``schedule()`` that it calls, of the same calls: the cost of the
plugin, whatever batches a policy forms and whatever else the machine does. An empty step of vLLM's that the plugin
replaces counts as a cost of the plugin. The other ratios are to the run under vLLM's own scheduler and need an idle
machine: of the mean over all calls; of the mean time per scheduled sequence; and of the total. A policy that makes more
and smaller steps pays vLLM's fixed cost per call more often, which shows there.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from ebbench.devices import load_device
from ebbench.devices.base import Device
from ebbench.engines.base import EngineOptions
from ebbench.engines.emulated import EmulatedEngine
from ebbench.records.plan import Plan
from ebbench.workloads import build_plan
from vllm_eb.policy import parse_policy

MIXING = "ebplus:margin=1e9"  # no lead can be that large: stays in mixed batches
POLICIES = (
    "v0", "deferred:k=32", "eb", "ebplus", "marginal", "marginal:ttft=1,tpot=0.05", "cadence:every=4", "delayer",
    "ppas", "batchwait:iters=32,ratio=0.5", "slochunk:tpot=0.05",
)  # fmt: skip


@dataclass
class Timing:
    """CPU seconds of schedule() calls, and what they scheduled."""

    calls_s: list[float] = field(default_factory=list)
    inner_s: float = 0.0  # of vLLM's own schedule(), called by the plugin
    sequences: int = 0

    @property
    def mean_us(self) -> float:
        return statistics.fmean(self.calls_s) * 1e6

    @property
    def per_sequence_us(self) -> float:
        return sum(self.calls_s) / self.sequences * 1e6


@contextmanager
def timed_inside(timing: Timing) -> Iterator[None]:
    """Measure vLLM's own schedule(), also where the plugin calls it. One that raises is not counted."""
    original = Scheduler.schedule

    def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
        started = time.thread_time()
        output = original(self, *args, **kwargs)
        if output.total_num_scheduled_tokens:
            timing.inner_s += time.thread_time() - started
        return output

    Scheduler.schedule = timed
    try:
        yield
    finally:
        Scheduler.schedule = original


class TimedEngine(EmulatedEngine):
    """Measures schedule() as it is, without shortcuts."""

    def __init__(self, timing: Timing) -> None:
        super().__init__(shortcuts=False)
        self._timing = timing

    def prepare(self, core) -> None:  # type: ignore[no-untyped-def]
        schedule, timing = core.scheduler.schedule, self._timing

        def timed(*args, **kwargs):  # type: ignore[no-untyped-def]
            started = time.thread_time()
            output = schedule(*args, **kwargs)
            elapsed = time.thread_time() - started
            if output.total_num_scheduled_tokens:
                timing.calls_s.append(elapsed)
                timing.sequences += len(output.num_scheduled_tokens)
            return output

        core.scheduler.schedule = timed


def order(policies: list[str], rounds: int) -> Iterator[str]:
    for number in range(rounds):
        yield from policies if number % 2 == 0 else reversed(policies)


def overhead(plan: Plan, device: Device, options: EngineOptions, chosen: list[str], rounds: int) -> None:
    policies = ["v1", MIXING, *chosen]
    timings = {name: Timing() for name in policies}
    for name in order(policies, rounds):
        with timed_inside(timings[name]):
            TimedEngine(timings[name]).run(plan, parse_policy(name), device, options)
    own = timings["v1"]
    heads = f"{'calls':>8}{'with/without':>14}{'us/call':>10}{'ratio':>8}{'us/sequence':>13}{'ratio':>8}{'total':>8}"
    print(f"{'schedule()':34}{heads}")
    labels = {"v1": "vLLM's own (v1)", MIXING: "plugin, mixing"} | {name: f"plugin, {name}" for name in chosen}
    for name, label in labels.items():
        mine = timings[name]
        print(
            f"{label:34}{len(mine.calls_s):8}{sum(mine.calls_s) / mine.inner_s:14.3f}"
            f"{mine.mean_us:10.0f}{mine.mean_us / own.mean_us:8.3f}"
            f"{mine.per_sequence_us:13.2f}{mine.per_sequence_us / own.per_sequence_us:8.3f}"
            f"{sum(mine.calls_s) / sum(own.calls_s):8.3f}"
        )


def speed(concurrency: int, requests: int) -> None:
    plan = build_plan("sharegpt", num_prompts=requests, max_concurrency=concurrency, source="profile", with_text=False)
    device = load_device("rtx-pro-6000", "qwen3-8b", max_num_seqs=concurrency)
    for policy in ("v1", "ebplus"):
        wall, cpu = time.perf_counter(), time.process_time()
        result = EmulatedEngine().run(plan, parse_policy(policy), device, EngineOptions(max_num_seqs=concurrency))
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        virtual = max(result.requests["end_ns"].to_pylist()) / 1e9
        print(
            f"emulated, {policy}, {requests} requests at concurrency {concurrency}: {virtual:.1f} s of engine time in "
            f"{wall:.1f} s ({virtual / wall:.1f} times real time; {virtual / cpu:.1f} by CPU time)"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--concurrency", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--policy", nargs="+", default=list(POLICIES))
    parser.add_argument("--speed-requests", type=int, default=6000, help="0 leaves the speed measurement out")
    parser.add_argument("--speed-concurrency", type=int, default=2048)
    asked = parser.parse_args()
    plan = build_plan(
        "sharegpt", num_prompts=asked.requests, max_concurrency=asked.concurrency, source="profile", with_text=False
    )
    device = load_device("rtx-pro-6000", "qwen3-8b")
    options = EngineOptions(max_num_seqs=asked.concurrency)
    overhead(plan, device, options, asked.policy, asked.rounds)
    if asked.speed_requests:
        speed(asked.speed_concurrency, asked.speed_requests)


if __name__ == "__main__":
    main()
