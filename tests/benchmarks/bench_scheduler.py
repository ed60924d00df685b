"""What the plugin costs, and how fast the emulated engine is. Prints; asserts nothing about time.

    python tests/benchmarks/bench_scheduler.py [--requests 1500] [--concurrency 512] [--rounds 3] [--policy eb ...]
        [--fit | --count] [--speculative method=eagle,acceptance=0.7,0.5,0.3 [--updates]]

Overhead: CPU time of ``schedule()``, on the same plan in the same process. ``with/without`` is the time of the plugin's
``schedule()`` divided by the time of vLLM's ``schedule()`` that it calls, of the same calls: the cost of the plugin,
whatever batches a policy forms and whatever else the machine does. An empty step of vLLM's that the plugin replaces
counts as a cost of the plugin. ``per sequence`` is to stock: every run under a policy has a run under vLLM's own
scheduler beside it, before it or after it in turns. The median of the ratios of the mean time per scheduled sequence is
printed, with the smallest and the largest one. It needs an idle machine: caches and other processes change it by
several hundredths. A policy that makes more and smaller steps pays vLLM's fixed cost per call more often, which shows
there.

``--fit`` separates what a policy's steps cost from what the plugin costs. Under vLLM's own scheduler, with the given
concurrency, half and a quarter of it, the times of single calls are fitted by least squares as ``fixed + sequences x +
admitted prompts x``. That tells what vLLM's code would take for the steps that a policy makes (``predicted``). Medians
over the pairs of runs, with the smallest and the largest.
``measured`` is divided by it, both relative to the same quotient of stock's run at that concurrency. The two runs of a
pair take turns on one processor, some steps each, so that other load on the machine affects both. Each has a process of
its own: where two classes of schedulers take turns in one, Python's specialised bytecode fits neither.
Every run of a policy makes the same steps, so ``by step`` takes the median of each step over the runs before adding
them up: what disturbs a run now and then is left out, of stock's steps as of the policy's. Its interval is the middle
95 % of what rounds drawn with replacement would give.

``--count`` prints opcodes of Python instead of times, of vLLM and of the plugin per scheduled sequence. They are the
same in every run. They say nothing of what C code and caches cost. Slow: 150 requests, 128 at a time, are enough.

``--speculative``: the emulated server drafts tokens. ``--updates``: ``update_from_output()``, where the plugin counts
what became of them, is added to ``schedule()``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.v1.core.sched.scheduler import Scheduler

from ebbench.devices.base import Device
from ebbench.devices.loader import load_device
from ebbench.engines.emulated import EmulatedEngine
from ebbench.records.plan import Plan
from ebbench.spec.server import EngineOptions, parse_speculative
from ebbench.workloads import build_plan
from vllm_eb.policy import parse_policy

Floats = NDArray[np.float64]

STOCK = "v1"
MIXING = "ebplus:margin=1e9"  # no lead can be that large: stays in mixed batches
POLICIES = (
    "v0", "deferred:k=32", "eb", "ebplus", "marginal", "marginal:ttft=1,tpot=0.05", "cadence:every=4", "delayer",
    "ppas", "batchwait:iters=32,ratio=0.5", "slochunk:tpot=0.05",
)  # fmt: skip
RESAMPLES = 1000
FORK = multiprocessing.get_context("fork")  # what vLLM takes seconds to import is there already
ADAPTIVE = "marginal:draft=adaptive"  # only with drafts


@dataclass
class Timing:
    """CPU seconds of schedule() calls, and what they scheduled. ``updates``: of update_from_output() too."""

    updates: bool = False
    calls_s: list[float] = field(default_factory=list)
    updates_s: float = 0.0
    inner_s: float = 0.0  # of vLLM's own methods, called by the plugin
    sequences: int = 0

    @property
    def outer_s(self) -> float:
        return sum(self.calls_s) + self.updates_s

    @property
    def mean_us(self) -> float:
        return statistics.fmean(self.calls_s) * 1e6

    @property
    def per_sequence_us(self) -> float:
        return self.outer_s / self.sequences * 1e6


@contextmanager
def timed_inside(timing: Timing) -> Iterator[None]:
    """Measure vLLM's own methods, also where the plugin calls them. A schedule() that raises is not counted."""
    original, update = Scheduler.schedule, Scheduler.update_from_output

    def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
        started = time.thread_time()
        output = original(self, *args, **kwargs)
        if output.total_num_scheduled_tokens:
            timing.inner_s += time.thread_time() - started
        return output

    def updating(self: Any, *args: Any, **kwargs: Any) -> Any:
        started = time.thread_time()
        output = update(self, *args, **kwargs)
        timing.inner_s += time.thread_time() - started
        return output

    Scheduler.schedule = timed
    if timing.updates:
        Scheduler.update_from_output = updating
    try:
        yield
    finally:
        Scheduler.schedule, Scheduler.update_from_output = original, update


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

        def updating(*args, **kwargs):  # type: ignore[no-untyped-def]
            started = time.thread_time()
            output = update(*args, **kwargs)
            timing.updates_s += time.thread_time() - started
            return output

        core.scheduler.schedule = timed
        if timing.updates:
            update, core.scheduler.update_from_output = core.scheduler.update_from_output, updating


@dataclass(frozen=True)
class Bench:
    """What every run shares."""

    plan: Plan
    device: Device
    options: EngineOptions
    updates: bool = False

    def timing(self, policy: str) -> Timing:
        """The times of one run."""
        timing = Timing(self.updates)
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
            f"{label:32}{len(runs[0].calls_s):8}{statistics.median(r.outer_s / r.inner_s for r in runs):14.3f}"
            f"{statistics.median(r.mean_us for r in runs):10.0f}"
            f"{statistics.median(r.per_sequence_us for r in runs):13.2f}  "
            f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})",
            flush=True,
        )


class TurnTakers:
    """Two processes of which one runs at a time; each hands over after ``STEPS`` steps, and at its end."""

    STEPS = 16

    def __init__(self) -> None:
        self._turns = (FORK.Semaphore(1), FORK.Semaphore(0))
        self._ended = FORK.RawArray("b", 2)

    def begin(self, number: int) -> None:
        """Wait for the first turn."""
        self._turns[number].acquire()

    def step_done(self, number: int, steps: int) -> None:
        """Hand over if it is time, and wait for the next turn."""
        if steps % self.STEPS == 0 and not self._ended[1 - number]:
            self._turns[1 - number].release()
            self._turns[number].acquire()

    def end(self, number: int) -> None:
        """Hand over and do not wait: the run of this process has ended."""
        self._ended[number] = 1
        self._turns[1 - number].release()


class StepTimingEngine(EmulatedEngine):
    """Keeps time (s), sequences and admitted prompts of every schedule() call that scheduled anything."""

    def __init__(self, number: int, turns: TurnTakers, updates: bool) -> None:
        super().__init__(shortcuts=False)
        self._number, self._turns, self._updates = number, turns, updates
        self.calls: list[tuple[float, int, int]] = []
        self._pending_s = 0.0  # of empty calls and updates, which count to the next call

    def prepare(self, core) -> None:  # type: ignore[no-untyped-def]
        schedule, calls = core.scheduler.schedule, self.calls

        def timed(*args, **kwargs):  # type: ignore[no-untyped-def]
            self._turns.step_done(self._number, len(calls) + 1)
            started = time.thread_time()
            output = schedule(*args, **kwargs)
            self._pending_s += time.thread_time() - started
            if output.total_num_scheduled_tokens:
                admitted = len(output.scheduled_new_reqs) + len(output.scheduled_cached_reqs.resumed_req_ids)
                calls.append((self._pending_s, len(output.num_scheduled_tokens), admitted))
                self._pending_s = 0.0
            return output

        def updating(*args, **kwargs):  # type: ignore[no-untyped-def]
            started = time.thread_time()
            output = update(*args, **kwargs)
            self._pending_s += time.thread_time() - started
            return output

        core.scheduler.schedule = timed
        if self._updates:
            update, core.scheduler.update_from_output = core.scheduler.update_from_output, updating


@dataclass(frozen=True)
class Calls:
    """Of every call: ``seconds`` and ``shapes`` (one, sequences, admitted prompts)."""

    seconds: Floats
    shapes: Floats

    @property
    def per_sequence_s(self) -> float:
        """Seconds per scheduled sequence."""
        return float(self.seconds.sum() / self.shapes[:, 1].sum())


def ratio_by_step(pairs: list[tuple[Calls, Calls]]) -> tuple[float, float, float]:
    """Policy's time per sequence over stock's, by the median of each step over the rounds; ends of its 95 % interval.

    Raises RuntimeError if two runs of one policy differ in their steps.
    """
    for calls in zip(*pairs, strict=True):
        if any(not np.array_equal(one.shapes, calls[0].shapes) for one in calls):
            raise RuntimeError("two runs under one policy made different steps")
    stock, mine = (np.array([calls.seconds for calls in runs]) for runs in zip(*pairs, strict=True))
    of_sequences = pairs[0][0].shapes[:, 1].sum() / pairs[0][1].shapes[:, 1].sum()

    def ratio(rounds: Any) -> float:
        return float(np.median(mine[rounds], axis=0).sum() / np.median(stock[rounds], axis=0).sum() * of_sequences)

    drawn = np.random.default_rng(0).integers(len(pairs), size=(RESAMPLES, len(pairs)))
    low, high = np.quantile([ratio(rounds) for rounds in drawn], (0.025, 0.975))
    return ratio(slice(None)), float(low), float(high)


def pair_of(bench: Bench, policies: tuple[str, str]) -> list[Calls]:
    """The calls of two runs that take turns, each in a process of its own and after another run that warms it up."""
    turns, (results, send) = TurnTakers(), FORK.Pipe(duplex=False)

    def run(number: int) -> None:
        turns.begin(number)
        try:
            for _ in range(2):
                engine = StepTimingEngine(number, turns, bench.updates)
                engine.run(bench.plan, parse_policy(policies[number]), bench.device, bench.options)
        finally:
            turns.end(number)
        rows = np.array(engine.calls, np.float64)
        send.send((number, Calls(rows[:, 0], np.column_stack([np.ones(len(rows)), rows[:, 1:]]))))

    processes = [FORK.Process(target=run, args=(number,)) for number in range(2)]
    for process in processes:
        process.start()
    send.close()  # of this process: a child that fails then ends recv()
    found = dict(results.recv() for _ in processes)
    for process in processes:
        process.join()
    return [found[0], found[1]]


def fitted(chosen: list[str], rounds: int, bench: Bench, smaller: list[Bench]) -> None:
    """Print the fit of stock's calls (also at ``smaller`` loads), each policy's time against it."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    few = [pair_of(less, (STOCK, STOCK))[0] for less in smaller]
    print(f"{'schedule()':32}{'calls':>14}{'fixed us':>10}{'us/seq.':>9}{'us/prompt':>11}  ", end="")
    print("per sequence, to stock; predicted; measured/predicted (smallest to largest); by step (95 %)")
    for policy in (STOCK, *chosen):
        pairs = []
        for number in range(rounds):
            order = (STOCK, policy) if number % 2 == 0 else (policy, STOCK)
            first, second = pair_of(bench, order)
            pairs.append((first, second) if number % 2 == 0 else (second, first))
        ratios, predicted, costs = [], [], []
        for stock, mine in pairs:
            known = [*few, stock]
            shapes, seconds = np.vstack([one.shapes for one in known]), np.concatenate([one.seconds for one in known])
            sequences = shapes[:, 1]  # relative errors count, or calls with many sequences would decide alone
            cost = np.linalg.lstsq(shapes / sequences[:, None], seconds / sequences, rcond=None)[0]
            expected = [float((one.shapes @ cost).sum() / one.shapes[:, 1].sum()) for one in (stock, mine)]
            costs.append(cost * 1e6)
            ratios.append(mine.per_sequence_s / stock.per_sequence_s)
            predicted.append(expected[1] / expected[0])
        left = [ratio / expected for ratio, expected in zip(ratios, predicted, strict=True)]
        fixed, per_sequence, per_prompt = np.median(costs, axis=0)
        stock, mine = pairs[0]
        print(
            f"{policy:32}{f'{len(mine.seconds)} ({len(stock.seconds)})':>14}"
            f"{fixed:10.1f}{per_sequence:9.2f}{per_prompt:11.1f}  "
            f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}); "
            f"{statistics.median(predicted):.3f}; "
            f"{statistics.median(left):.3f} ({min(left):.3f} to {max(left):.3f}); "
            "{:.3f} ({:.3f} to {:.3f})".format(*ratio_by_step(pairs)),
            flush=True,
        )


class CountingEngine(EmulatedEngine):
    """Counts the opcodes of schedule(): of vLLM and of the plugin; and the sequences that it scheduled.

    ``updates``: of update_from_output() too.
    """

    def __init__(self, updates: bool) -> None:
        super().__init__(shortcuts=False)
        self._updates = updates
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

        def traced(method: Any, *args: Any, **kwargs: Any) -> Any:
            sys.settrace(called)
            try:
                return method(*args, **kwargs)
            finally:
                sys.settrace(None)

        def counted(*args, **kwargs):  # type: ignore[no-untyped-def]
            output = traced(schedule, *args, **kwargs)
            self.sequences += len(output.num_scheduled_tokens)
            return output

        core.scheduler.schedule = counted
        if self._updates:
            core.scheduler.update_from_output = partial(traced, core.scheduler.update_from_output)


def opcodes(bench: Bench, chosen: list[str]) -> None:
    stock = 0.0
    print(f"{'opcodes per scheduled sequence':32}{'vLLM':>10}{'plugin':>10}{'with/without':>14}{'to stock':>10}")
    for policy in (STOCK, *chosen):
        engine = CountingEngine(bench.updates)
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


def bench_at(requests: int, concurrency: int, speculative: str | None = None, *, updates: bool = False) -> Bench:
    """A closed loop of ``concurrency`` clients."""
    plan = build_plan("sharegpt", num_prompts=requests, max_concurrency=concurrency, source="profile", with_text=False)
    drafts = None if speculative is None else parse_speculative(speculative)
    device = load_device("rtx-pro-6000", "qwen3-8b", speculative=drafts)
    return Bench(plan, device, EngineOptions(max_num_seqs=concurrency, speculative=speculative), updates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--concurrency", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--policy", nargs="+", help="default: one of each kind")
    parser.add_argument("--speed-requests", type=int, default=6000, help="0 leaves the speed measurement out")
    parser.add_argument("--speed-concurrency", type=int, default=2048)
    parser.add_argument("--speculative", help="as of `ebbench run`")
    parser.add_argument("--updates", action="store_true", help="update_from_output() too")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--count", action="store_true", help="opcodes instead of times")
    kind.add_argument("--fit", action="store_true", help="times against what stock would take for the same steps")
    asked = parser.parse_args()
    asked.policy = asked.policy or [*POLICIES, *([ADAPTIVE] if asked.speculative else [])]
    make = partial(bench_at, asked.requests, speculative=asked.speculative, updates=asked.updates)
    bench = make(asked.concurrency)
    if asked.fit:
        fitted(asked.policy, asked.rounds, bench, [make(asked.concurrency // 4), make(asked.concurrency // 2)])
        return
    if asked.count:
        opcodes(bench, asked.policy)
        return
    overhead(bench, asked.policy, asked.rounds)
    if asked.speed_requests:
        speed(asked.speed_concurrency, asked.speed_requests)


if __name__ == "__main__":
    main()
