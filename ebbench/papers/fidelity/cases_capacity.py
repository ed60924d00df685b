"""Capacity of Qwen3-32B on one GPU as published by Systalyze (``reports/reference/systalyze``).

Settings, fixed before the first run of ours (2026-11-24); no constant was fitted on these rows:

- vLLM 0.27.1 with its defaults: N = 1,024, B = 8,192, 0.92 of the memory, asynchronous scheduling, a prompt is admitted
  when all of it fits; no prefix caching; no API server.
- 512 requests with the published lengths in their order arrive as a Poisson process. Figures are means over ``SEEDS``
  draws of it, since the client's is not known.
- Rates are the published multiples of the reference rate: 1.1, which is beyond both capacities, and 1.65 for
  confirmation. The larger throughput counts. 0.3 is the lightest rate, whose tail is taken off the duration.
- Scored are both capacities: requests/s without that tail, and output tokens/s of the whole run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from ebbench.devices.base import Device
from ebbench.devices.loader import load_device
from ebbench.papers.fidelity.case import DEVICES
from ebbench.papers.fidelity.runs import simulated_requests, timed_plan
from ebbench.papers.fidelity.scores import PublishedFigure
from ebbench.papers.published import rows
from ebbench.spec.server import EngineOptions

CAPACITY, LENGTHS = "systalyze/capacity", "systalyze/lengths"
SOURCE = "Systalyze, capacity"
MODELS = {"Qwen3-32B": "qwen3-32b"}
SIZES = (1024, 8192)  # N and B
MAX_MODEL_LEN = 12_288
LIGHTEST, BEYOND = 0.3, (1.1, 1.65)  # multiples of the reference rate
SEEDS = (0, 1, 2)
Row = Mapping[str, str]


def capacity_cells() -> list[PublishedFigure]:
    """Every published capacity with ours."""
    return [cell for row in rows(CAPACITY) for cell in row_cells(row)]


def row_cells(row: Row) -> Iterator[PublishedFigure]:
    """The two capacities of one GPU."""
    device = served(row)
    by_seed = [capacity(row, device, seed) for seed in SEEDS]
    for metric, column in (
        ("requests_per_s", "capacity_requests_per_s"), ("output_tokens_per_s", "capacity_output_tokens_per_s"),
    ):  # fmt: skip
        ours = float(np.mean([rates[metric] for rates in by_seed]))
        yield PublishedFigure(
            SOURCE, DEVICES[row["gpu"]], device.model, "prompts of 4,400 tokens", "v1", metric, float(row[column]), ours
        )


def served(row: Row) -> Device:
    """The GPU of a row with its KV cache."""
    seqs, budget = SIZES
    return load_device(
        DEVICES[row["gpu"]], MODELS[row["model"]], max_num_seqs=seqs, max_num_batched_tokens=budget,
        vllm_version=row["vllm"],
    )  # fmt: skip


def capacity(row: Row, device: Device, seed: int) -> dict[str, float]:
    """Capacity in requests/s and output tokens/s, by the source's rule."""
    reference = float(row["reference_requests_per_s"])
    tail_s = rate_figures(row, device, LIGHTEST * reference, seed)["tail_s"]
    runs = [rate_figures(row, device, ratio * reference, seed) for ratio in BEYOND]
    best = max(runs, key=lambda run: run["output_tokens_per_s"])
    return {
        "requests_per_s": int(row["requests"]) / (best["duration_s"] - tail_s),
        "output_tokens_per_s": best["output_tokens_per_s"],
    }


def rate_figures(row: Row, device: Device, rate: float, seed: int) -> dict[str, float]:
    """Duration from the first arrival to the last token (s), the part of it after the last arrival, output tokens/s."""
    options = EngineOptions(*SIZES, max_model_len=MAX_MODEL_LEN, enable_prefix_caching=False, vllm_version=row["vllm"])
    lengths = rows(LENGTHS)
    n = int(row["requests"])
    inputs, outputs = (
        np.array([float(lengths[i % len(lengths)][name]) for i in range(n)])
        for name in ("prompt_tokens", "output_tokens")
    )
    gaps = np.random.default_rng(seed).exponential(1.0 / rate, n - 1)
    arrival_s = np.concatenate(([0.0], np.cumsum(gaps)))
    plan = timed_plan(arrival_s, inputs, outputs, np.arange(n) + 1, ["load"] * n)
    requests = simulated_requests(plan, device, options)
    duration_s = float(requests.last_token.max()) / 1e9
    return {
        "duration_s": duration_s,
        "tail_s": duration_s - float(arrival_s[-1]),
        "output_tokens_per_s": float(requests.output_tokens.sum()) / duration_s,
    }
