"""Runs of vLLM 0.8.5 on RTX 4090 published by IOG, repeated session by session (``reports/reference/iog``).

Settings, fixed before the first run of ours (2026-11-24); no constant was fitted on these rows:

- One server per model and number of GPUs gets the same 200 prompts five times, at 32, 16, 8, 4 and 1 requests/s; later
  passes find prompts in the prefix cache as far as it holds them. Passes begin after the one before has ended.
- Prompts arrive at the client's own times: vLLM's gaps with NumPy's generator, seed 42.
- Lengths are drawn (``reference:workloads/sharegpt-iog-200.toml``) and scaled to each run's totals; figures are means
  over ``SEEDS`` draws.
- ``vllm serve`` with its defaults of 0.8.5 on a GPU below 70 GiB: N = 256, B = 2048, 0.9 of the memory, prefix caching,
  no asynchronous scheduling, admission by the first chunk. 16-bit floats cost what bfloat16 does. The device's default
  link; no API server.
- Scored are throughput, and mean and median of TTFT and TPOT. Throughput at 1 and 4 requests/s is that of the arrivals
  for the most part and is not scored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from ebbench.devices.base import Device, Parallel
from ebbench.devices.loader import load_device
from ebbench.grouping import by_key
from ebbench.installation import REFERENCE
from ebbench.papers.fidelity.runs import latencies_of, simulated_requests, timed_plan
from ebbench.papers.fidelity.scores import PublishedFigure
from ebbench.papers.published import rows
from ebbench.records.plan import Plan
from ebbench.spec.server import EngineOptions
from ebbench.workloads import build_plan
from ebbench.workloads.requests import Floats

IOG = "iog/serving"
SOURCE = "IOG"
DEVICE, VLLM = "rtx-4090", "0.8.5"
MODELS = {
    "meta-llama/Meta-Llama-3-8B-Instruct": "llama-3.1-8b",  # the same geometry
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": "llama-3.1-8b",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": "deepseek-r1-distill-qwen-1.5b",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": "deepseek-r1-distill-qwen-7b",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-14B": "deepseek-r1-distill-qwen-14b",
}
SIZES = (256, 2048)  # N and B
SEEDS = (0, 1, 2)
PASS_S = 600.0  # between the beginnings of two passes
BY_ARRIVALS = (1, 4)
ARRIVALS_NOTE = "set by the arrivals for the most part"
Row = Mapping[str, str]


def iog_cells(seeds: Sequence[int] = SEEDS) -> list[PublishedFigure]:
    """Every published figure with ours."""
    return [cell for rows in sessions() for cell in session_cells(rows, seeds)]


def sessions() -> list[list[Row]]:
    """The runs of each server, in the order in which they were made."""
    return list(by_key(((row["model"], row["gpus"]), row) for row in rows(IOG)).values())


def session_cells(rows: Sequence[Row], seeds: Sequence[int] = SEEDS) -> list[PublishedFigure]:
    """The figures of one server: means over the draws of ``seeds``."""
    device = session_device(rows[0])
    draws = [session_figures(rows, device, seed) for seed in seeds]
    return [cell for i, row in enumerate(rows) for cell in _cells(row, device, [draw[i] for draw in draws])]


def session_device(row: Row) -> Device:
    """The GPUs of a server, with its KV cache."""
    seqs, budget = SIZES
    return load_device(
        DEVICE, MODELS[row["model"]], max_num_seqs=seqs, max_num_batched_tokens=budget, async_scheduling=False,
        parallel=Parallel(tp=int(row["gpus"])), vllm_version=VLLM,
    )  # fmt: skip


def session_figures(rows: Sequence[Row], device: Device, seed: int) -> list[dict[str, float]]:
    """Ours of each run of a server."""
    options = EngineOptions(
        *SIZES, max_model_len=4096, async_scheduling=False, scheduler_reserve_full_isl=False, vllm_version=VLLM
    )
    requests = simulated_requests(session_plan(rows, seed), device, options)
    by_row = []
    for row in rows:
        in_phase = requests.phase == row["rate"]
        figures = latencies_of(requests, in_phase)
        by_row.append({**figures, "requests_per_s": int(in_phase.sum()) / figures["duration_s"]})
    return by_row


def session_plan(rows: Sequence[Row], seed: int) -> Plan:
    """All passes of a server; a prompt has the same content in each."""
    drawn = build_plan(f"{REFERENCE}workloads/sharegpt-iog-200.toml", source="profile", seed=seed, with_text=False)
    inputs, outputs = (drawn.table[name].to_numpy().astype(float) for name in ("input_tokens", "output_tokens"))
    n = len(inputs)
    arrivals = [i * PASS_S + arrival_s(n, float(row["rate"])) for i, row in enumerate(rows)]
    return timed_plan(
        np.concatenate(arrivals),
        np.concatenate([_scaled(inputs, int(row["input_tokens"])) for row in rows]),
        np.concatenate([_scaled(outputs, int(row["output_tokens"])) for row in rows]),
        np.tile(np.arange(n) + 1, len(rows)),
        [row["rate"] for row in rows for _ in range(n)],
    )


def arrival_s(count: int, rate: float) -> Floats:
    """When vLLM 0.8.5's client sends its prompts (s): the first at once, gaps from NumPy's generator with seed 42."""
    gaps = np.random.RandomState(42).gamma(shape=1.0, scale=1.0 / rate, size=count - 1)
    return np.concatenate(([0.0], np.cumsum(gaps)))


def _scaled(tokens: Floats, total: int) -> Floats:
    scaled: Floats = np.maximum(1.0, np.rint(tokens * (total / tokens.sum())))
    return scaled


def _cells(row: Row, device: Device, draws: Sequence[Mapping[str, float]]) -> Iterable[PublishedFigure]:
    gpus = "1 GPU" if row["gpus"] == "1" else f"tp={row['gpus']}"
    case = f"{row['model'].partition('/')[2]}, {gpus}, {row['rate']}/s"
    published = {
        "requests_per_s": 200 / float(row["duration_s"]),
        "ttft_mean_s": float(row["ttft_mean_ms"]) / 1e3,
        "ttft_p50_s": float(row["ttft_p50_ms"]) / 1e3,
        "tpot_mean_ms": float(row["tpot_mean_ms"]),
        "tpot_p50_ms": float(row["tpot_p50_ms"]),
    }
    source = f"{SOURCE}, {gpus}"
    for metric, value in published.items():
        note = ARRIVALS_NOTE if metric == "requests_per_s" and int(row["rate"]) in BY_ARRIVALS else ""
        ours = float(np.mean([draw[metric] for draw in draws]))
        yield PublishedFigure(source, DEVICE, device.model, case, "v1", metric, value, ours, scored=not note, note=note)
