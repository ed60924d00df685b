"""Published measurements as cases: what was run, on what, and the numbers it gave.

Protocol facts behind the cases (the authors' published scripts, code and reports, weifang231/eb-vllm):

- 4,000 prompts, lengths uniform within 50 % of the mean, EOS ignored, gpu_memory_utilization 0.9, each scheduler at
  its own best (B, N) in table 2. Their vLLM is older than 0.14: no asynchronous scheduling.
- The memory-safe batch N* is computed in table 3's runs only; the scripts of table 2 and figure 3 leave it off.
- Their online threshold has a floor, 0.01 unless a script sets it. ``run_distribution_shift.sh`` sets 0.7 for EB and
  EB+. At c = 512 and 2048 no script says so, but EB's TTFT and TPOT at c = 512 (a fitted row) are those of 0.7 on
  both GPUs, and not those of Algorithm 1's own 0.34 and 0.20: an inference. EB+ shows no such floor.
- The shifts' prompts are cut to their mean, answers lie within 25 % of it (``generate_distribution_shift_dataset.py``).
  ``vllm bench serve`` shuffles a custom data set unless told not to, and the script does not: the three "phases" of
  the distribution shift were served as one mixture.
- ``concurrency_shift`` gives the mean of its phases' throughputs, each phase a benchmark of its own.
- ShareGPT's answers were as long as the model made them in the runs printed for Qwen3-8B: about 360 tokens (their
  reproduction report). The Qwen3-30B-A3B cells printed for H200 are those of their rerun with the data set's own
  lengths, 292 tokens on average; the ones for RTX PRO 6000 are taken to be the same.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ebbench.errors import DataError
from ebbench.resources import bundled_dir

DEVICES = {"RTX PRO 6000": "rtx-pro-6000", "H200": "h200"}
MODELS = {"Qwen3-8B": "qwen3-8b", "Qwen3-30B-A3B": "qwen3-30b-a3b"}
WORKLOADS = {"WildChat": "wildchat"}
FIT_ROWS = ("c=32", "c=512")
PAPER_THETA_FLOOR = 0.7
CLIENT_LIMIT = "the authors' client gave requests up after 120 s, and message lengths were not published"


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
    """One run to repeat.

    ``plan`` holds arguments of :func:`ebbench.workloads.build_plan`, and ``shuffle`` where the order is mixed.
    """

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
    group: str = ""
    concurrencies: tuple[int, ...] = ()  # not empty: one run each, metrics averaged over them


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
        shift = scenario == "concurrency_shift"
        yield Case(
            scenario,
            DEVICES[gpu],
            "qwen3-8b",
            scheduler,
            _table3_policy(scenario, scheduler),
            _table3_plan(scenario),
            2048 if "shift" in scenario else 1024,
            18_432 if "shift" in scenario else 14_336,
            tuple(published),
            fitted=scenario in FIT_ROWS,
            group="table 3",
            concurrencies=(32, 512, 1024, 256, 2048) if shift else (),
        )


def _table3_policy(scenario: str, scheduler: str) -> str:
    """The policy with the threshold's floor as far as it is known (module docstring)."""
    floored = {"eb": ("c=512", "c=2048", "distribution_shift"), "ebplus": ("distribution_shift",)}
    if scenario in floored.get(scheduler, ()):
        return f"{scheduler}:theta_min={PAPER_THETA_FLOOR}"
    return scheduler


def _table3_plan(scenario: str) -> dict[str, Any]:
    if scenario == "distribution_shift":
        file = bundled_dir("reference") / "scenarios" / "distribution-shift-run.toml"
        return {"workload": "balanced", "scenario": str(file), "shuffle": True}
    if scenario == "concurrency_shift":
        return {"workload": _workload_file("concurrency-shift-run"), "source": "profile"}
    concurrency = int(scenario.removeprefix("c="))
    return {"workload": "balanced", "output_len": 256, "num_prompts": 4000, "max_concurrency": concurrency}


def real_workloads() -> Iterator[Case]:
    """Real workloads at each scheduler's best (B, N): throughput of table 2, latencies of figure 5.

    Left out: v0, which was measured on a separate code base, and Gemma-3-1B-IT, of which table 2 has no
    throughput and figure 5's source marks its own readings as doubtful.
    """
    best = _best_settings()
    latency = {(r["gpu"], r["model"], r["workload"], r["method"]): r for r in _rows("eb_vllm/figure5_latency.csv")}
    for row in _rows("paper_tables/table2_throughput_rps.csv"):
        key = (row["gpu"], row["model"], row["workload"])
        note = CLIENT_LIMIT if row["workload"] == "WildChat" else ""
        for scheduler, method, policy in (("v1", "v1", "v1"), ("eb", "Ours", "eb:memory_safe=false")):
            read_off = latency[*key, method]
            published = (
                Published("requests_per_s", float(row[f"{scheduler}_rps"]), "table 2", not note, note),
                Published("ttft_mean_s", float(read_off["ttft_s"]), "figure 5", not note, note),
                Published("tpot_mean_ms", float(read_off["tpot_ms"]), "figure 5", not note, note),
            )
            seqs, tokens = best[*key, scheduler]
            yield Case(
                row["workload"], DEVICES[row["gpu"]], MODELS[row["model"]], scheduler, policy,
                _real_plan(row["workload"], MODELS[row["model"]]), seqs, tokens, published,
                group="table 2 and figure 5",
            )  # fmt: skip


def _real_plan(workload: str, model: str) -> dict[str, Any]:
    return {"workload": _run_workload(workload, model), "source": "profile", "max_concurrency": 2048}


def _run_workload(workload: str, model: str) -> str:
    """As it was run: answers forced in two workloads (the authors' scripts), by model in a third (their reports)."""
    sharegpt = "sharegpt-qwen3-8b" if model == "qwen3-8b" else "sharegpt-qwen3-30b"
    special = {"LongBench": "longbench-forced", "NuminaMath": "numinamath-forced", "ShareGPT": sharegpt}
    return _workload_file(special[workload]) if workload in special else WORKLOADS[workload]


def _workload_file(name: str) -> str:
    return str(bundled_dir("reference") / "workloads" / f"{name}.toml")


def _best_settings() -> dict[tuple[str, str, str, str], tuple[int, int]]:
    found: dict[tuple[str, str, str, str], dict[str, int]] = {}
    for row in _rows("paper_tables/table14_15_best_config_and_sensitivity.csv"):
        if row["metric"].startswith("max_num_"):
            key = (row["gpu"], row["model"], row["workload"], row["scheduler"])
            found.setdefault(key, {})[row["metric"]] = int(row["value"])
    return {key: (v["max_num_seqs"], v["max_num_batched_tokens"]) for key, v in found.items()}


def figure3() -> Iterator[Case]:
    """Fixed thresholds against the controller on H200 (figure 3): geometric answers, N = 1024."""
    budgets = {"decode_heavy": 16_384, "balanced": 14_336, "prefill_heavy": 18_432}
    for row in _rows("eb_vllm/figure3_validation_grid.csv"):
        workload = row["workload"]
        if row["method"] == "fixed_k_best":
            continue
        scheduler, policy = _figure3_policy(row)
        published = tuple(
            Published(metric, float(row[column]), "figure 3")
            for metric, column in (
                ("tokens_per_s", "throughput_tok_s"), ("tpot_mean_ms", "tpot_mean_ms"), ("tpot_p99_ms", "tpot_p99_ms"),
            )
        )  # fmt: skip
        file = _workload_file("figure3-" + workload.replace("_", "-"))
        plan = {"workload": file, "source": "profile", "max_concurrency": 2048}
        yield Case(
            workload, "h200", "qwen3-8b", scheduler, policy, plan, 1024, budgets[workload], published,
            group="figure 3",
        )  # fmt: skip
        if scheduler == "eb":
            plain = {**plan, "workload": workload.replace("_", "-")}
            unscored = tuple(Published(p.metric, p.value, p.source, False, UNIFORM) for p in published)
            yield Case(
                f"{workload}, uniform", "h200", "qwen3-8b", scheduler, policy, plain, 1024, budgets[workload],
                unscored, group="figure 3",
            )  # fmt: skip


UNIFORM = "the same point with uniform answers, which its published p99 fits"


def _figure3_policy(row: dict[str, str]) -> tuple[str, str]:
    """Scheduler shown and policy run. The scripts pass a fixed k as the share k / N."""
    if row["method"] == "v1":
        return "v1", "v1"
    if row["method"] == "ours":
        return "eb", "eb:memory_safe=false"
    return f"k={row['k']}", f"eb:theta={min(int(row['k']) / 1024, 0.99):.4g}"


def table13() -> Iterator[Case]:
    """Throughput over fixed thresholds (table 13); only its shape counts, since neither B nor N was published.

    Its Gamma workload is left out: the parameters did not survive.
    """
    seqs, tokens = _best_settings()["RTX PRO 6000", "Qwen3-8B", "ShareGPT", "eb"]
    for row in _rows("paper_tables/table13_theta_sweep_tokens_per_s.csv"):
        if row["workload"] != "ShareGPT":
            continue
        scheduler = "adaptive" if row["theta"] == "adaptive" else f"theta={row['theta']}"
        policy = "eb:memory_safe=false" if row["theta"] == "adaptive" else f"eb:theta={row['theta']}"
        note = "B and N were not published; compare the shape only"
        number = Published("tokens_per_s", float(row["throughput_tokens_per_s"]), "table 13", False, note)
        plan = {**_real_plan("ShareGPT", "qwen3-8b"), "num_prompts": 3000}
        yield Case(
            "ShareGPT thresholds", "rtx-pro-6000", "qwen3-8b", scheduler, policy, plan, seqs, tokens, (number,),
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
