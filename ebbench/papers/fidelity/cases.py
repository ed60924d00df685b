"""Published measurements as cases: workload, device and results.

:mod:`ebbench.papers.protocols` has the protocols, :mod:`ebbench.papers.fidelity.case` what a case is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from ebbench.papers.eb.prefill_costs import TABLE6_MODELS, TABLE6_ROWS, table6_protocol
from ebbench.papers.eb.thresholds import BUDGET, TABLE13_BATCH
from ebbench.papers.fidelity.case import (
    DEVICES,
    FIT_ROWS,
    GEMM_FACTOR_ROW,
    GEMM_FACTOR_WORKLOAD,
    KV_SIZE_ROW,
    MODELS,
    Case,
    Published,
    reference_rows,
)
from ebbench.papers.fidelity.cases_gpustack import fused_sampler, gpustack
from ebbench.papers.fidelity.cases_repetition import repetition
from ebbench.papers.fidelity.cases_servers import server_cases
from ebbench.papers.protocols import (
    figure3_protocol,
    fixed_threshold,
    real_protocol,
    synthetic_protocol,
    table3_protocol,
)
from ebbench.papers.published import best_sizes
from ebbench.spec.server import OFF

CLIENT_LIMIT = "the authors' client gave requests up after 120 s, and message lengths were not published"


def all_cases() -> list[Case]:
    """All cases of the papers' tables and figures that a simulated device can repeat."""
    papers = [
        *table3(),
        *real_workloads(),
        *figure3(),
        *figure4(),
        *table13(),
        *table6(),
        *server_cases(),
        *repetition(),
    ]
    return [*papers, *gpustack(), *fused_sampler()]


WITHOUT = ", no API server"
"""Ends the source of cells that were made without the API server, whatever the tool's own answer has."""
SERVED = (
    "table 3", "table 2 and figure 5", "figure 3", "figure 4", "table 13", "table 17", "table 19", "table 20",
    "authors' repetition", "gpustack",
)  # fmt: skip


def engine_alone(cases: Iterable[Case]) -> Iterator[Case]:
    """The cases of groups measured from outside a server under many requests, again under a source of their own."""
    for case in cases:
        if case.group in SERVED:
            published = tuple(replace(figure, source=figure.source + WITHOUT) for figure in case.published)
            yield replace(case, published=published, api_server=OFF)


def table3() -> Iterator[Case]:
    """Traffic levels and non-stationary traffic (table 3), Qwen3-8B on both GPUs."""
    units = {"total_tokens_per_s": "tokens_per_s", "ttft_s": "ttft_mean_s", "tpot_ms": "tpot_mean_ms"}
    cells: dict[tuple[str, str, str], list[Published]] = {}
    for row in reference_rows("paper_tables/table3_traffic_and_nonstationary.csv"):
        for scheduler in ("v1", "eb", "ebplus"):
            number = Published(units[row["metric"]], float(row[scheduler]), "table 3")
            cells.setdefault((row["scenario"], row["gpu"], scheduler), []).append(number)
    for (scenario, gpu, scheduler), published in cells.items():
        yield Case(
            scenario, DEVICES[gpu], "qwen3-8b", scheduler, table3_protocol(scenario, scheduler, DEVICES[gpu]),
            tuple(published),
            fitted=scenario in FIT_ROWS or (scenario, gpu) == KV_SIZE_ROW, group="table 3",
        )  # fmt: skip


def real_workloads() -> Iterator[Case]:
    """Real workloads at each scheduler's best (B, N): throughput of table 2, latencies of figure 5.

    Left out: v0, which was measured with a separate code base, and Gemma-3-1B-IT, which has no throughput in table 2
    and whose values in figure 5 the source marks as doubtful.
    """
    latency = {
        (r["gpu"], r["model"], r["workload"], r["method"]): r for r in reference_rows("eb_vllm/figure5_latency.csv")
    }
    for row in reference_rows("paper_tables/table2_throughput_rps.csv"):
        key = (row["gpu"], row["model"], row["workload"])
        note = CLIENT_LIMIT if row["workload"] == "WildChat" else ""
        for scheduler, method in (("v1", "v1"), ("eb", "Ours")):
            read_off = latency[*key, method]
            published = (
                Published("requests_per_s", float(row[f"{scheduler}_rps"]), "table 2", not note, note),
                Published("ttft_mean_s", float(read_off["ttft_s"]), "figure 5", not note, note),
                Published("tpot_mean_ms", float(read_off["tpot_ms"]), "figure 5", not note, note),
            )
            name, model, device = row["workload"], MODELS[row["model"]], DEVICES[row["gpu"]]
            sizes = best_sizes(device, scheduler, name.lower(), model)
            yield Case(
                name, device, model, scheduler, real_protocol(name.lower(), model, scheduler, sizes), published,
                fitted=key == GEMM_FACTOR_ROW, group="table 2 and figure 5",
            )  # fmt: skip


def figure3() -> Iterator[Case]:
    """Fixed thresholds against the controller on H200 (figure 3): geometric output lengths, N = 1024."""
    for row in reference_rows("eb_vllm/figure3_validation_grid.csv"):
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
        name = workload.replace("_", "-")
        yield Case(
            workload, "h200", "qwen3-8b", scheduler, figure3_protocol(name, policy), published,
            fitted=workload == GEMM_FACTOR_WORKLOAD, group="figure 3",
        )  # fmt: skip
        if scheduler == "eb":
            unscored = tuple(Published(p.metric, p.value, p.source, False, UNIFORM) for p in published)
            plain = figure3_protocol(name, policy, uniform=True)
            yield Case(
                f"{workload}, uniform", "h200", "qwen3-8b", scheduler, plain, unscored,
                fitted=workload == GEMM_FACTOR_WORKLOAD, group="figure 3",
            )  # fmt: skip


UNIFORM = "the same point with uniform answers, which its published p99 fits"


def _figure3_policy(row: dict[str, str]) -> tuple[str, str]:
    """The scheduler's name in the report, and the policy to run."""
    if row["method"] == "v1":
        return "v1", "v1"
    if row["method"] == "ours":
        return "eb", "eb"
    return f"k={row['k']}", fixed_threshold(int(row["k"]))


def figure4() -> Iterator[Case]:
    """Synthetic mixes at each scheduler's best B and N (table 16), on both GPUs. v0 had a separate code base."""
    for row in reference_rows("eb_vllm/figure4_synthetic_e2e.csv"):
        scheduler = {"v1": "v1", "Ours": "eb"}.get(row["method"])
        if scheduler is None:
            continue
        device, name = DEVICES[row["gpu"]], row["workload"].lower()
        sizes = best_sizes(device, scheduler, name, "qwen3-8b")
        published = (
            Published("requests_per_s", float(row["rps"]), "figure 4"),
            Published("ttft_mean_s", float(row["ttft_s"]), "figure 4"),
            Published("itl_mean_ms", 1e3 * float(row["itl_s"]), "figure 4"),
        )
        yield Case(
            row["workload"], device, "qwen3-8b", scheduler, synthetic_protocol(name, scheduler, sizes),
            published, group="figure 4",
        )  # fmt: skip


def table13() -> Iterator[Case]:
    """Throughput over fixed thresholds (table 13); only its shape is compared, since B and N were not published.

    B and N are those of ``ebbench tables table13``: with table 2's N of 1,536 the KV cache decides when to refill, and
    every threshold gives the same figure. Its Gamma workload is left out: its parameters are not legible in our copy.
    """
    base = real_protocol("sharegpt", "qwen3-8b", "eb", (TABLE13_BATCH, BUDGET))
    for row in reference_rows("paper_tables/table13_theta_sweep_tokens_per_s.csv"):
        if row["workload"] != "ShareGPT":
            continue
        scheduler = "adaptive" if row["theta"] == "adaptive" else f"theta={row['theta']}"
        policy = base.policy if row["theta"] == "adaptive" else f"eb:theta={row['theta']}"
        note = "B and N were not published; compare the shape only"
        number = Published("tokens_per_s", float(row["throughput_tokens_per_s"]), "table 13", False, note)
        protocol = replace(base, policy=policy, plan={**base.plan, "num_prompts": 3000})
        yield Case("ShareGPT thresholds", "rtx-pro-6000", "qwen3-8b", scheduler, protocol, (number,), group="table 13")


def table6() -> Iterator[Case]:
    """Prompts of 131,071 tokens on one RTX PRO 6000 (table 6)."""
    for row in reference_rows(f"paper_tables/{TABLE6_ROWS}.csv"):
        if row["model"] not in TABLE6_MODELS:
            continue
        for scheduler in ("v1", "eb"):
            number = Published("tokens_per_s", float(row[scheduler]), "table 6")
            yield Case(
                "128K in, 64 out", "rtx-pro-6000", TABLE6_MODELS[row["model"]], scheduler,
                table6_protocol(scheduler, int(row["concurrency"])), (number,), group="table 6",
            )  # fmt: skip
