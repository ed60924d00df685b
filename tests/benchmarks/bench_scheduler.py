"""What the plugin costs, and how fast the emulated engine is. Prints; asserts nothing about time.

    python tests/benchmarks/bench_scheduler.py [--requests 1500] [--concurrency 512] [--rounds 3] [--policy eb ...]

Overhead: CPU time of ``schedule()``, on the same plan in the same process. ``with/without`` is the time of the plugin's
``schedule()`` divided by the time of vLLM's ``schedule()`` that it calls, of the same calls: the cost of the plugin,
whatever batches a policy forms and whatever else the machine does. An empty step of vLLM's that the plugin replaces
counts as a cost of the plugin. ``per sequence`` is to stock: every run under a policy has a run under vLLM's own
scheduler beside it, before it or after it in turns. The median of the ratios of the mean time per scheduled sequence is
printed, with the smallest and the largest one. It needs an idle machine: caches and other processes change it by
several hundredths. A policy that makes more and smaller steps pays vLLM's fixed cost per call more often, which shows
there.

``--count`` prints opcodes of Python instead of times, of vLLM and of the plugin per scheduled sequence. They are the
same in every run. They say nothing of what C code and caches cost. Slow: 150 requests, 128 at a time, are enough.
"""

from __future__ import annotations

import argparse
import statistics
import sys
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

STOCK = "v1"
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


@dataclass(frozen=True)
class Bench:
    """What every run shares."""

    plan: Plan
    device: Device
    options: EngineOptions

    def timing(self, policy: str) -> Timing:
        """The times of one run."""
        timing = Timing()
        with timed_inside(timing):
            TimedEngine(timing).run(self.plan, parse_policy(policy), self.device, self.options)
        return timing


def overhead(bench: Bench, chosen: list[str], rounds: int) -> None:
    bench.timing(STOCK)  # the first run of a process is slower
    print(
        f"{'schedule()':32}{'calls':>8}{'with/without':>14}{'us/call':>10}{'us/sequence':>13}  per sequence, to stock"
    )
    for policy in (STOCK, MIXING, *chosen):
        label = {STOCK: "vLLM's own (v1)", MIXING: "plugin, mixing"}.get(policy, f"plugin, {policy}")
        runs: list[Timing] = []
        ratios: list[float] = []
        for number in range(rounds):
            pair = [bench.timing(name) for name in ((STOCK, policy) if number % 2 == 0 else (policy, STOCK))]
            stock, mine = pair if number % 2 == 0 else reversed(pair)
            runs.append(mine)
            ratios.append(mine.per_sequence_us / stock.per_sequence_us)
        print(
            f"{label:32}{len(runs[0].calls_s):8}{statistics.median(sum(r.calls_s) / r.inner_s for r in runs):14.3f}"
            f"{statistics.median(r.mean_us for r in runs):10.0f}"
            f"{statistics.median(r.per_sequence_us for r in runs):13.2f}  "
            f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})",
            flush=True,
        )


class CountingEngine(EmulatedEngine):
    """Counts the opcodes of schedule(): of vLLM and of the plugin; and the sequences that it scheduled."""

    def __init__(self) -> None:
        super().__init__(shortcuts=False)
        self.vllm = self.plugin = self.sequences = 0

    def prepare(self, core) -> None:  # type: ignore[no-untyped-def]
        schedule = core.scheduler.schedule

        def of_plugin(_frame: Any, event: str, _value: object) -> Any:
            self.plugin += event == "opcode"
            return of_plugin

        def of_vllm(_frame: Any, event: str, _value: object) -> Any:
            self.vllm += event == "opcode"
            return of_vllm

        def called(frame: Any, _event: str, _value: object) -> Any:
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            return of_plugin if "vllm_eb" in frame.f_code.co_filename else of_vllm

        def counted(*args, **kwargs):  # type: ignore[no-untyped-def]
            sys.settrace(called)
            try:
                output = schedule(*args, **kwargs)
            finally:
                sys.settrace(None)
            self.sequences += len(output.num_scheduled_tokens)
            return output

        core.scheduler.schedule = counted


def opcodes(bench: Bench, chosen: list[str]) -> None:
    stock = 0.0
    print(f"{'opcodes per scheduled sequence':32}{'vLLM':>10}{'plugin':>10}{'with/without':>14}{'to stock':>10}")
    for policy in (STOCK, *chosen):
        engine = CountingEngine()
        engine.run(bench.plan, parse_policy(policy), bench.device, bench.options)
        whole = (engine.vllm + engine.plugin) / engine.sequences
        stock = stock or whole
        print(
            f"{policy:32}{engine.vllm / engine.sequences:10.1f}{engine.plugin / engine.sequences:10.1f}"
            f"{1.0 + engine.plugin / engine.vllm:14.4f}{whole / stock:10.4f}",
            flush=True,
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
    parser.add_argument("--count", action="store_true", help="opcodes instead of times")
    asked = parser.parse_args()
    plan = build_plan(
        "sharegpt", num_prompts=asked.requests, max_concurrency=asked.concurrency, source="profile", with_text=False
    )
    device = load_device("rtx-pro-6000", "qwen3-8b")
    bench = Bench(plan, device, EngineOptions(max_num_seqs=asked.concurrency))
    if asked.count:
        opcodes(bench, asked.policy)
        return
    overhead(bench, asked.policy, asked.rounds)
    if asked.speed_requests:
        speed(asked.speed_concurrency, asked.speed_requests)


if __name__ == "__main__":
    main()
