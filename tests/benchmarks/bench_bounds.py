"""Upper bounds of the share of a burst of requests that any scheduler can serve within its targets.

    python tests/benchmarks/bench_bounds.py

Uses the settings of ``bench_policies.py`` in which no policy is ten points above faithful ``ebplus``. Many requests
arrive at once there; the part that the device can compute within the TTFT target limits the attainment of the run, even
if all other requests are in time. Three bounds from the device model, with the shortest prompts first:

- prompts only: only prefill steps, of the token budget or a half, quarter or eighth of it, until the TTFT target has
  passed. No scheduler can exceed it.
- with memory: as above, and the admitted prompts fit the KV cache. Only schedulers whose responses end within those
  seconds can exceed it.
- with decodes: each started response also gets one token per TPOT target, in the same step or a separate one, whichever
  is faster. Only schedulers that let responses fall behind and catch up, and so must know their lengths, can exceed it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ebbench.devices.base import Device, StepShape
from ebbench.devices.loader import load_device
from ebbench.spec.server import EngineOptions
from ebbench.workloads import build_plan
from tests.benchmarks.policy_cells import LARGE, LENGTHS, MIDDLE, TPOT_S, TTFT_S


@dataclass(frozen=True)
class Wave:
    """``prompts`` come at once, in a run of ``total`` requests."""

    name: str
    prompts: list[int]
    total: int
    options: EngineOptions


def waves() -> Iterator[Wave]:
    """512 requests at the start of a closed loop; what the shift from 256 to 2,048 adds."""
    plan = build_plan(**LENGTHS, num_prompts=4000, max_concurrency=512, seed=0)
    lengths = np.asarray(plan.table["input_tokens"])
    yield Wave("c=512", sorted(lengths[:512].tolist()), len(lengths), MIDDLE)
    plan = build_plan("balanced", "concurrency-shift", seed=0)
    lengths = np.asarray(plan.table["input_tokens"])
    last = np.asarray(plan.table["phase"]) == plan.table["phase"][-1].as_py()
    yield Wave("concurrency-shift", sorted(lengths[last][: 2048 - 256].tolist()), len(lengths), LARGE)


def prompts_only(device: Device, wave: Wave, *, memory: bool) -> int:
    """Prompts computed within the TTFT target by prefill steps alone, of the size that computes most."""
    budget = wave.options.max_num_batched_tokens
    held = device.kv_capacity_tokens if memory else sum(wave.prompts)
    fitting = int(np.searchsorted(np.cumsum(wave.prompts), held, side="right"))
    return max(_prefilled(device, wave.prompts[:fitting], budget // part) for part in (1, 2, 4, 8))


def _prefilled(device: Device, prompts: list[int], budget: int) -> int:
    left_s, done = TTFT_S, 0
    for step in _steps(prompts, budget):
        while step and device.cost.step_s(StepShape(tuple(step), 0, 0, len(step))) > left_s:
            step = step[:-1]  # the last step computes what there is time for
        if not step:
            break
        left_s -= device.cost.step_s(StepShape(tuple(step), 0, 0, len(step)))
        done += len(step)
    return done


def _steps(prompts: list[int], budget: int) -> Iterator[list[tuple[int, int]]]:
    """Whole prompts, as many a step as the budget holds."""
    step: list[tuple[int, int]] = []
    for tokens in prompts:
        if step and sum(chunk for chunk, _ in step) + tokens > budget:
            yield step
            step = []
        step.append((tokens, 0))
    if step:
        yield step


def no_request_behind(device: Device, wave: Wave) -> int:
    """Prompts computed within the TTFT target while every answer begun gets a token per TPOT target."""
    now_s, seqs, kv_tokens, waiting = 0.0, 0, 0, wave.prompts
    while waiting:
        held = device.kv_capacity_tokens - kv_tokens - seqs
        count = _largest(device, wave.options.max_num_batched_tokens, held, waiting, seqs, kv_tokens)
        if count == 0:
            break
        taken, waiting = waiting[:count], waiting[count:]
        now_s += _step_s(device, taken, seqs, kv_tokens)
        if now_s > TTFT_S:
            break
        kv_tokens += sum(taken) + seqs
        seqs += count
    return seqs


def _largest(device: Device, budget: int, held: int, waiting: list[int], seqs: int, kv_tokens: int) -> int:
    """Number of waiting requests that fit the memory and, with one token for each running answer, one TPOT target."""
    count = 0
    while count < len(waiting):
        some = waiting[: count + 1]
        if sum(some) > min(budget, held) or _step_s(device, some, seqs, kv_tokens) > TPOT_S:
            break
        count += 1
    return count


def _step_s(device: Device, prompts: list[int], seqs: int, kv_tokens: int) -> float:
    """Seconds for these prompts and a token for each of ``seqs`` answers, mixed or one after the other."""
    prefill = tuple((tokens, 0) for tokens in prompts)
    alone = device.cost.step_s(StepShape(prefill, 0, 0, len(prefill)))
    if not seqs:
        return alone
    mixed = device.cost.step_s(StepShape(prefill, seqs, kv_tokens, seqs + len(prefill)))
    return min(mixed, alone + device.cost.step_s(StepShape((), seqs, kv_tokens, seqs)))


def main() -> None:
    """Print a Markdown table."""
    names = ("prompts only", "the memory, too", "nobody behind")
    print("| setting | requests at once | " + " | ".join(f"{n}: in time | attained at most" for n in names) + " |")
    print("|---|---:|" + "---:|" * 2 * len(names))
    for wave in waves():
        cells = (
            (("rtx-pro-6000", "qwen3-8b"),)
            if wave.name == "c=512"
            else (("h200", "qwen3-8b"), ("h200", "qwen3-30b-a3b"))
        )
        for name, model in cells:
            device = load_device(name, model)
            counts = (
                prompts_only(device, wave, memory=False),
                prompts_only(device, wave, memory=True),
                no_request_behind(device, wave),
            )
            shares = (1.0 - (len(wave.prompts) - count) / wave.total for count in counts)
            entries = " | ".join(f"{c:,} | {s:.1%}" for c, s in zip(counts, shares, strict=True))
            print(f"| {wave.name}, {model} on {name} | {len(wave.prompts):,} | {entries} |")


if __name__ == "__main__":
    main()
