"""A calibration of vLLM's CPU backend, and what it predicts for runs it has not seen.

    python tests/benchmarks/bench_calibration.py [FOLDER]

Builds a small model with random weights, calibrates as `ebbench calibrate --engine vllm` does and serves requests of
other lengths and at other concurrencies in the same engine, closed loop; the simulator predicts each from the profile's
step times alone. Seconds are CPU seconds of this process (one thread): other work on the machine counts less.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "vllm"))

import small_model

from ebbench.analysis.calibrate import ProbeGrid, cost_grid, fit
from ebbench.analysis.calibrate_check import write_profile
from ebbench.analysis.calibrate_vllm import measure_steps, run_closed_loop, start
from ebbench.analysis.columns import RequestColumns
from ebbench.analysis.metrics import measure
from ebbench.cli.server import unknown_device
from ebbench.devices import load_device
from ebbench.engines.base import EngineOptions
from ebbench.engines.sim import SimEngine
from ebbench.workloads import build_plan
from vllm_eb.policy import parse_policy

GRID = ProbeGrid((32, 128, 512), (1, 8, 32), (32, 256), repeats=8)
RUNS = ((96, 48, 4), (96, 48, 16), (32, 96, 16), (256, 16, 16), (64, 64, 30))  # mean prompt, mean answer, concurrency
REQUESTS, REPEATS = 96, 3


def main(folder: Path) -> None:
    """Calibrate, then print measured and predicted tokens per CPU second."""
    model = str(small_model.build(folder / "model"))
    vllm = start(model, GRID)
    vllm.clock = time.process_time
    measured = fit(cost_grid(GRID, measure_steps(vllm, GRID)), "bench_calibration.py, CPU seconds", GRID.points)
    cal = measured.calibration
    print(f"prefill {cal.alpha_p * 1e3:.2f} ms + {cal.beta_p * 1e6:.1f} us a token, R2 {measured.prefill_r2:.3f}")
    print(f"decode {cal.alpha_d * 1e3:.2f} ms + {cal.beta_d * 1e6:.1f} us a sequence, R2 {measured.decode_r2:.3f}")
    profile = write_profile(measured, unknown_device("this-cpu", model), model, folder / "profile")
    device = load_device(str(profile), model)
    blocks = vllm.kv_tokens // 16
    options = EngineOptions(
        max_num_seqs=GRID.options.max_num_seqs, max_num_batched_tokens=GRID.budget_tokens, num_kv_blocks=blocks,
        enable_prefix_caching=False, async_scheduling=False,
    )  # fmt: skip
    print("| prompt | answer | concurrency | measured tokens/s | least to most | predicted | error |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    for prompt, answer, concurrency in RUNS:
        plan = build_plan(
            "balanced", num_prompts=REQUESTS, seed=3, source="profile", max_concurrency=concurrency, input_len=prompt,
            output_len=answer,
        )  # fmt: skip
        predicted = measure(
            RequestColumns.of(SimEngine().run(plan, parse_policy("v1"), device, options).requests)
        ).total_token_throughput
        assert predicted is not None
        lengths = list(
            zip(plan.table["input_tokens"].to_pylist(), plan.table["output_tokens"].to_pylist(), strict=True)
        )
        rates = sorted(sum(map(sum, lengths)) / run_closed_loop(vllm, lengths, concurrency) for _ in range(REPEATS))
        middle = rates[REPEATS // 2]
        print(
            f"| {prompt} | {answer} | {concurrency} | {middle:,.0f} | {rates[0]:,.0f} to {rates[-1]:,.0f} | "
            f"{predicted:,.0f} | {predicted / middle - 1:+.1%} |"
        )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
