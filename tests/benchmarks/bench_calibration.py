"""Calibrates vLLM's CPU backend and compares its predictions with runs that were not used for the calibration.

    python tests/benchmarks/bench_calibration.py [--times 3] [--cpu-seconds]

Builds a small model with random weights and calibrates as `ebbench calibrate --engine vllm` does. Between the probes
the same engine serves requests of other lengths and concurrencies, closed loop; the simulator predicts each from the
written profile alone. One thread, wall time; with --cpu-seconds CPU time, which other processes change less. Each
repetition runs in a new process.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from itertools import cycle
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from ebbench.analysis.columns import RequestColumns
from ebbench.analysis.metrics import measure
from ebbench.calibration.command import SteppedRuns, write_profile
from ebbench.calibration.measure import ProbeGrid, cost_grid, fit
from ebbench.calibration.rounds import measure_steps, start
from ebbench.devices.loader import load_device
from ebbench.engines.setup import unknown_device
from ebbench.engines.sim import SimEngine
from ebbench.records.plan import Plan
from ebbench.spec.server import EngineOptions
from ebbench.workloads import build_plan
from tests.vllm import small_model
from vllm_eb.policy import parse_policy

GRID = ProbeGrid((32, 128, 512), (1, 8, 32), (32, 256), repeats=8)
RUNS = ((96, 48, 4), (96, 48, 16), (32, 96, 16), (256, 16, 16), (64, 64, 30))  # mean prompt, mean answer, concurrency
REQUESTS = 40


def main(folder: Path, *, cpu_seconds: bool) -> None:
    """Calibrate and run in turns, then print measured and predicted tokens/s."""
    model = str(small_model.build(folder / "model"))
    vllm = start(model, GRID)
    if cpu_seconds:
        vllm.clock = time.process_time
    runs = [SteppedRuns(vllm, _plan(*run)) for run in RUNS]
    for run in runs:
        run.run()
        run.seconds.clear()  # the first of its shapes warms up
    turns = cycle(runs)
    probed = measure_steps(vllm, GRID, lambda: next(turns).run())
    measured = fit(cost_grid(GRID, probed.seconds), "bench_calibration.py", GRID.points)
    measured = replace(measured, request_s=probed.request_s, drift=probed.drift)
    cal = measured.calibration
    print(f"prefill {cal.alpha_p * 1e3:.2f} ms + {cal.beta_p * 1e6:.1f} us per token, R2 {measured.prefill_r2:.3f}")
    print(f"decode {cal.alpha_d * 1e3:.2f} ms + {cal.beta_d * 1e6:.1f} us per sequence, R2 {measured.decode_r2:.3f}")
    print(f"mixed R2 {measured.mixed_r2:.3f}, request {measured.request_s * 1e3:.2f} ms, drift {measured.drift:.2f}")
    profile = write_profile(measured, unknown_device("this-cpu", model), model, folder / "profile")
    device = load_device(str(profile), model)
    options = EngineOptions(
        max_num_seqs=GRID.options.max_num_seqs, max_num_batched_tokens=GRID.budget_tokens,
        num_kv_blocks=vllm.kv_tokens // 16, enable_prefix_caching=False, async_scheduling=False,
    )  # fmt: skip
    print("| prompt | answer | concurrency | measured tokens/s | least to most | predicted | error |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    errors = []
    for (prompt, answer, concurrency), run in zip(RUNS, runs, strict=True):
        check = run.check(device, measured, GRID)
        assert check.measured_range is not None
        least, most = check.measured_range
        result = SimEngine().run(run.plan, parse_policy("v1"), device, options)
        predicted = measure(RequestColumns.of(result.requests)).total_token_throughput
        assert predicted is not None
        errors.append(predicted / check.measured_tokens_per_s - 1.0)
        print(
            f"| {prompt} | {answer} | {concurrency} | {check.measured_tokens_per_s:,.0f} | {least:,.0f} to {most:,.0f} "
            f"| {predicted:,.0f} | {errors[-1]:+.1%} |"
        )
    print(f"median absolute error {statistics.median(map(abs, errors)):.1%}, mean error {statistics.mean(errors):+.1%}")


def _plan(prompt: int, answer: int, concurrency: int) -> Plan:
    return build_plan(
        "balanced", num_prompts=REQUESTS, seed=3, source="profile", max_concurrency=concurrency, input_len=prompt,
        output_len=answer,
    )  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--cpu-seconds", action="store_true")
    asked = parser.parse_args()
    if asked.times > 1:
        for _ in range(asked.times):
            subprocess.run([sys.executable, __file__, *["--cpu-seconds"] * asked.cpu_seconds], check=True)
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary), cpu_seconds=asked.cpu_seconds)
