"""Published measurements as cases: workload, device and results.

:mod:`ebbench.papers.protocols` has the protocols, :mod:`ebbench.papers.fidelity.case` what a case is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import product

from ebbench.grouping import by_key
from ebbench.papers.eb.disaggregation import FIXED_THRESHOLD, TWO, two_gpus
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
)
from ebbench.papers.fidelity.cases_servers import gpustack, published_number, server_cases
from ebbench.papers.protocols import (
    Protocol,
    ebplus_as_run,
    figure3_protocol,
    fixed_threshold,
    long_context_protocol,
    real_protocol,
    synthetic_protocol,
    table3_protocol,
)
from ebbench.papers.published import best_sizes, rows
from ebbench.spec.server import OFF

CLIENT_LIMIT = "the authors' client gave requests up after 120 s, and message lengths were not published"


def all_cases() -> list[Case]:
    """All cases of the papers' tables and figures that a simulated device can repeat."""
    papers = [*table3(), *real_workloads(), *figure3(), *figure4(), *table13(), *table6()]
    return [*papers, *server_cases(), *repetition(), *gpustack()]


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
    printed = rows("paper_tables/table3_traffic_and_nonstationary")
    cells = by_key(
        ((row["scenario"], row["gpu"], scheduler), published_number(row["metric"], row[scheduler], "table 3"))
        for row, scheduler in product(printed, ("v1", "eb", "ebplus"))
    )
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
    latency = {(r["gpu"], r["model"], r["workload"], r["method"]): r for r in rows("eb_vllm/figure5_latency")}
    for row in rows("paper_tables/table2_throughput_rps"):
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
    for row in rows("eb_vllm/figure3_validation_grid"):
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


def _figure3_policy(row: Mapping[str, str]) -> tuple[str, str]:
    """The scheduler's name in the report, and the policy to run."""
    if row["method"] == "v1":
        return "v1", "v1"
    if row["method"] == "ours":
        return "eb", "eb"
    return f"k={row['k']}", fixed_threshold(int(row["k"]))


def figure4() -> Iterator[Case]:
    """Synthetic mixes at each scheduler's best B and N (table 16), on both GPUs. v0 had a separate code base."""
    for row in rows("eb_vllm/figure4_synthetic_e2e"):
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
    for row in rows("paper_tables/table13_theta_sweep_tokens_per_s"):
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
    for row in rows(f"paper_tables/{TABLE6_ROWS}"):
        if row["model"] not in TABLE6_MODELS:
            continue
        for scheduler in ("v1", "eb"):
            number = Published("tokens_per_s", float(row[scheduler]), "table 6")
            yield Case(
                "128K in, 64 out", "rtx-pro-6000", TABLE6_MODELS[row["model"]], scheduler,
                table6_protocol(scheduler, int(row["concurrency"])), (number,), group="table 6",
            )  # fmt: skip


# What the EB paper's authors measured when they repeated their H200 runs, as cases.
#
# The numbers are those of two documents in weifang231/eb-vllm: PAPER_VS_KVAWARE_COMPARISON.md of 2026-05-16 (commit
# 57f20fc) and REPRODUCTION_REPORT.md (commit fec0663, runs of 2026-05-13 and 14: two GPUs, 32,768 tokens, the earlier
# distribution shift). Settings, fixed before the first run of this group (2026-11-25):
#
# - As the tables they repeat (:mod:`ebbench.papers.protocols`), with the lengths of the later document: ShareGPT has
#   292 tokens out for both models.
# - Their scheduler was a later one: a refill waits for free KV blocks, and its threshold has no lower bound but that of
#   0.7 in the distribution shift. ``eb`` here is that policy.
# - EB+ has the measured cost of mixed batches and a margin of 1e-5 from 2026-05-16 on. Before, it had neither: it never
#   left mixed batches. A margin of 1e-4 has the same effect on H200.
# - Concurrency shift: 500, 4,000 and 2,000 requests at 32, 2,048 and 500 open; each phase starts with a new server in
#   ours.
# - Two GPUs: 1,000 requests, as in table 19. 32,768 tokens: 32 requests, 8 open, vLLM's default B and N, thresholds of
#   0.8.
#
# Numbers that the paper prints from these runs are not here, since its tables have them (taken out after the first run:
# throughput of the distribution shift of 2026-05-16 and of most of table 2, EB at c = 32). A row counts as fitted where
# a constant was fitted on the printed row of the same case. Left out: ShareGPT and four further models with answers of
# unknown length, WildChat (message lengths), B300, EB in figure 3 (its N is not clear), and the bests of a search over
# B and N.

REPETITION = "eb_repetition/h200"
REPETITION_GROUP = "authors' repetition"
DEVICE = "h200"
SHIFT_REQUESTS = {"32": 500, "2048": 4000, "500": 2000}
MIXED_ONLY_MARGIN = 1e-4  # EB+ without the cost of mixed batches


def repetition() -> Iterator[Case]:
    """The runs, each with its published numbers."""
    by_case = by_key(
        ((row["case"], row["model"], row["scheduler"]), Published(row["metric"], float(row["value"]), REPETITION_GROUP))
        for row in rows(REPETITION)
    )
    for (case, model, scheduler), published in by_case.items():
        yield Case(
            case, DEVICE, model, scheduler, _protocol(case, model, scheduler), tuple(published),
            fitted=_fitted(case, model), group=REPETITION_GROUP,
        )  # fmt: skip


def _fitted(case: str, model: str) -> bool:
    """Whether a constant was fitted on the printed row of this case."""
    gemm = (case, model) == ("table 2, LongBench", "qwen3-8b")
    figure = case == f"figure 3, {GEMM_FACTOR_WORKLOAD.replace('_', '-')}"
    return gemm or figure or case.removeprefix("table 3, ") in FIT_ROWS


def _protocol(case: str, model: str, scheduler: str) -> Protocol:
    table, _, detail = case.partition(", ")
    later = ebplus_as_run(DEVICE) if scheduler == "ebplus" else scheduler  # the policies of 2026-05-16
    if table == "table 2":
        sizes = best_sizes(DEVICE, scheduler, detail.lower(), model)
        lengths_of = "qwen3-30b-a3b" if detail == "ShareGPT" else model
        return real_protocol(detail.lower(), lengths_of, scheduler, sizes)
    if table == "table 3":
        return replace(table3_protocol(detail, scheduler, DEVICE), policy=later)
    if table == "figure 3":
        return figure3_protocol(detail, scheduler)
    if table == "concurrency shift":
        concurrency = detail.removeprefix("c=")
        whole = table3_protocol("concurrency_shift", scheduler, DEVICE)
        plan = {**whole.plan, "num_prompts": SHIFT_REQUESTS[concurrency], "max_concurrency": int(concurrency)}
        return replace(whole, plan=plan, policy=later, concurrencies=())
    if table == "distribution shift":
        protocol, earlier = table3_protocol("distribution_shift", scheduler, DEVICE), bool(detail)
        return replace(protocol, policy=_mixed_only()) if earlier and scheduler == "ebplus" else protocol
    if table == "table 19":
        protocol = two_gpus(TWO[scheduler], DEVICE, int(detail.removeprefix("c=")))
        mixed = scheduler.startswith("ebplus")
        return replace(protocol, policy=_mixed_only(**FIXED_THRESHOLD)) if mixed else protocol
    policy = _mixed_only(**FIXED_THRESHOLD) if scheduler == "ebplus" else scheduler
    return long_context_protocol(policy, 32_768, 8, max_model_len=40_960)


def _mixed_only(**settings: float | bool) -> str:
    """EB+ before its costs were measured."""
    return ebplus_as_run(DEVICE, margin=MIXED_ONLY_MARGIN, **settings)
