"""Published measurements as cases: what was run, on what, and the numbers it gave.

Protocol facts behind the cases (the authors' published scripts, weifang231/eb-vllm): 4,000 prompts, lengths uniform
within 50 % of the mean, EOS ignored, gpu_memory_utilization 0.9, each scheduler at its own best (B, N) in table 2.
Their vLLM is older than 0.14: no asynchronous scheduling, so host time adds to every step.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ebbench.errors import DataError
from ebbench.resources import bundled_dir

DEVICES = {"RTX PRO 6000": "rtx-pro-6000", "H200": "h200"}
MODELS = {"Qwen3-8B": "qwen3-8b", "Qwen3-30B-A3B": "qwen3-30b-a3b", "Gemma-3-1B-IT": "gemma-3-1b-it"}
WORKLOADS = {"ShareGPT": "sharegpt", "LongBench": "longbench", "WildChat": "wildchat", "NuminaMath": "numinamath"}
FIT_ROWS = ("c=32", "c=512")
OTHER_CODE = "v0 was measured on a separate vLLM v0 code base"
DOUBTFUL = "the source marks its Gemma-3-1B-IT readings as doubtful"


@dataclass(frozen=True)
class Published:
    """A published number: metric name (unit in it), value, and whether it counts."""

    metric: str
    value: float
    source: str
    scored: bool = True
    note: str = ""


@dataclass(frozen=True)
class Case:
    """One run to repeat. ``plan`` holds arguments of :func:`ebbench.workloads.build_plan`."""

    name: str
    device: str
    model: str
    scheduler: str
    policy: str
    plan: Mapping[str, Any]
    max_num_seqs: int
    max_num_batched_tokens: int
    published: tuple[Published, ...]
    fitted: bool = False
    group: str = field(default="")


def all_cases() -> list[Case]:
    """Every case of the papers' tables and figures that a simulated device can repeat."""
    return [*table3(), *real_workloads(), *figure3(), *table13()]


def table3() -> Iterator[Case]:
    """Traffic levels and non-stationary traffic (table 3), Qwen3-8B on both GPUs."""
    units = {"total_tokens_per_s": "tokens_per_s", "ttft_s": "ttft_mean_s", "tpot_ms": "tpot_mean_ms"}
    cells: dict[tuple[str, str, str], list[Published]] = {}
    for row in _rows("paper_tables/table3_traffic_and_nonstationary.csv"):
        for scheduler in ("v1", "eb", "ebplus"):
            number = Published(units[row["metric"]], float(row[scheduler]), "table 3")
            cells.setdefault((row["scenario"], row["gpu"], scheduler), []).append(number)
    for (scenario, gpu, scheduler), published in cells.items():
        plan, seqs, tokens = _table3_plan(scenario)
        yield Case(
            scenario, DEVICES[gpu], "qwen3-8b", scheduler, scheduler, plan, seqs, tokens, tuple(published),
            fitted=scenario in FIT_ROWS, group="table 3",
        )  # fmt: skip


def _table3_plan(scenario: str) -> tuple[dict[str, Any], int, int]:
    if scenario == "distribution_shift":
        return {"workload": "balanced", "scenario": "distribution-shift"}, 2048, 18_432
    if scenario == "concurrency_shift":
        return {"workload": "balanced", "scenario": "concurrency-shift"}, 1024, 14_336
    concurrency = int(scenario.removeprefix("c="))
    return (
        {"workload": "balanced", "num_prompts": 4000, "max_concurrency": concurrency, "output_len": 256},
        1024,
        14_336,
    )


def real_workloads() -> Iterator[Case]:
    """Real workloads at each scheduler's best (B, N): throughput of table 2, latencies of figure 5."""
    best = _best_settings()
    rps = {(r["gpu"], r["model"], r["workload"]): r for r in _rows("paper_tables/table2_throughput_rps.csv")}
    latency: dict[tuple[str, str, str, str], dict[str, str]] = {
        (r["gpu"], r["model"], r["workload"], {"Ours": "eb"}.get(r["method"], r["method"])): r
        for r in _rows("eb_vllm/figure5_latency.csv")
    }
    for (gpu, model, workload, scheduler), read_off in latency.items():
        seqs, tokens = best[gpu, model, workload, scheduler]
        published = list(_latencies(read_off, model, scheduler))
        if (gpu, model, workload) in rps:
            value = float(rps[gpu, model, workload][f"{scheduler}_rps"])
            other = scheduler == "v0"
            published.append(
                Published("requests_per_s", value, "table 2", scored=not other, note=OTHER_CODE if other else "")
            )
        yield Case(
            workload, DEVICES[gpu], MODELS[model], scheduler, scheduler, _real_plan(workload), seqs, tokens,
            tuple(published), group="table 2 and figure 5",
        )  # fmt: skip


def _latencies(row: Mapping[str, str], model: str, scheduler: str) -> Iterator[Published]:
    note = OTHER_CODE if scheduler == "v0" else DOUBTFUL if model.startswith("Gemma") else ""
    for column, metric in (("ttft_s", "ttft_mean_s"), ("tpot_ms", "tpot_mean_ms")):
        yield Published(metric, float(row[column]), "figure 5", scored=not note, note=note)


def _real_plan(workload: str) -> dict[str, Any]:
    """Lengths from the published profiles; two workloads were run with forced answers (the authors' scripts)."""
    plan: dict[str, Any] = {"workload": WORKLOADS[workload], "source": "profile", "max_concurrency": 2048}
    forced = {"LongBench": 20, "NuminaMath": 4000}.get(workload)
    return plan | ({"forced_output": forced} if forced else {})


def _best_settings() -> dict[tuple[str, str, str, str], tuple[int, int]]:
    found: dict[tuple[str, str, str, str], dict[str, int]] = {}
    for row in _rows("paper_tables/table14_15_best_config_and_sensitivity.csv"):
        if row["metric"].startswith("max_num_"):
            key = (row["gpu"], row["model"], row["workload"], row["scheduler"])
            found.setdefault(key, {})[row["metric"]] = int(row["value"])
    return {key: (v["max_num_seqs"], v["max_num_batched_tokens"]) for key, v in found.items()}


def figure3() -> Iterator[Case]:
    """Fixed thresholds against the controller on H200 (figure 3): geometric answers, N = 1024."""
    shapes = {"decode_heavy": (16_384, 128, 1024), "balanced": (14_336, 512, 512), "prefill_heavy": (18_432, 1024, 128)}
    for row in _rows("eb_vllm/figure3_validation_grid.csv"):
        if row["method"] == "fixed_k_best":
            continue
        tokens, prompt, answer = shapes[row["workload"]]
        scheduler = {"v1": "v1", "ours": "eb"}.get(row["method"], f"eb:k={row['k']}")
        published = [Published("tokens_per_s", float(row["throughput_tok_s"]), "figure 3")]
        published.append(Published("tpot_mean_ms", float(row["tpot_mean_ms"]), "figure 3"))
        published.append(Published("tpot_p99_ms", float(row["tpot_p99_ms"]), "figure 3"))
        plan = {
            "workload": row["workload"].replace("_", "-"),
            "num_prompts": 4000,
            "max_concurrency": 2048,
            "input_len": prompt,
            "output_len": answer,
            "length_distribution": "geometric",
            "uniform_input": True,
        }
        yield Case(
            row["workload"], "h200", "qwen3-8b", scheduler, scheduler, plan, 1024, tokens, tuple(published),
            group="figure 3",
        )  # fmt: skip


def table13() -> Iterator[Case]:
    """Throughput over fixed thresholds (table 13). Its Gamma workload's parameters did not survive: left out."""
    seqs, tokens = _best_settings()["RTX PRO 6000", "Qwen3-8B", "ShareGPT", "eb"]
    for row in _rows("paper_tables/table13_theta_sweep_tokens_per_s.csv"):
        if row["workload"] != "ShareGPT":
            continue
        policy = "eb" if row["theta"] == "adaptive" else f"eb:theta={row['theta']}"
        number = Published("tokens_per_s", float(row["throughput_tokens_per_s"]), "table 13")
        plan = {"workload": "sharegpt", "source": "profile", "num_prompts": 3000, "max_concurrency": 2048}
        yield Case(
            "ShareGPT, threshold sweep", "rtx-pro-6000", "qwen3-8b", policy, policy, plan, seqs, tokens, (number,),
            group="table 13",
        )  # fmt: skip


def reference_rows(name: str) -> list[dict[str, str]]:
    """Rows of a bundled reference CSV. Raises DataError when it is missing."""
    return _rows(name)


def _rows(name: str) -> list[dict[str, str]]:
    path = bundled_dir("reference") / name
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))
    except OSError as error:
        raise DataError(f"{path}: reference data cannot be read ({error.strerror}); reinstall ebbench") from None
