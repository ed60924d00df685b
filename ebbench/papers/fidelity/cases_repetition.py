"""What the EB paper's authors measured when they repeated their H200 runs, as cases.

The numbers are those of two documents in weifang231/eb-vllm: PAPER_VS_KVAWARE_COMPARISON.md of 2026-05-16 (commit
57f20fc) and REPRODUCTION_REPORT.md (commit fec0663, runs of 2026-05-13 and 14: two GPUs, 32,768 tokens, the earlier
distribution shift). Settings, fixed before the first run of this group (2026-11-25):

- As the tables they repeat (:mod:`ebbench.papers.protocols`), with the lengths of the later document: ShareGPT has 292
  tokens out for both models.
- Their scheduler was a later one: a refill waits for free KV blocks, and its threshold has no lower bound but that of
  0.7 in the distribution shift. ``eb`` here is that policy.
- EB+ has the measured cost of mixed batches and a margin of 1e-5 from 2026-05-16 on. Before, it had neither: it never
  left mixed batches. A margin of 1e-4 has the same effect on H200.
- Concurrency shift: 500, 4,000 and 2,000 requests at 32, 2,048 and 500 open; each phase starts with a new server in
  ours.
- Two GPUs: 1,000 requests, as in table 19. 32,768 tokens: 32 requests, 8 open, vLLM's default B and N, thresholds of
  0.8.

Numbers that the paper prints from these runs are not here, since its tables have them (taken out after the first run:
throughput of the distribution shift of 2026-05-16 and of most of table 2, EB at c = 32). A row counts as fitted where a
constant was fitted on the printed row of the same case. Left out: ShareGPT and four further models with answers of
unknown length, WildChat (message lengths), B300, EB in figure 3 (its N is not clear), and the bests of a search over B
and N.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ebbench.papers.eb.disaggregation import FIXED_THRESHOLD, TWO, two_gpus
from ebbench.papers.fidelity.case import FIT_ROWS, GEMM_FACTOR_WORKLOAD, Case, Published, reference_rows
from ebbench.papers.protocols import (
    Protocol,
    ebplus_as_run,
    figure3_protocol,
    long_context_protocol,
    real_protocol,
    table3_protocol,
)
from ebbench.papers.published import best_sizes

FILE = "eb_repetition/h200.csv"
GROUP = "authors' repetition"
DEVICE = "h200"
SHIFT_REQUESTS = {"32": 500, "2048": 4000, "500": 2000}
MIXED_ONLY_MARGIN = 1e-4  # EB+ without the cost of mixed batches


def repetition() -> Iterator[Case]:
    """The runs, each with its published numbers."""
    by_case: dict[tuple[str, str, str], list[Published]] = {}
    for row in reference_rows(FILE):
        number = Published(row["metric"], float(row["value"]), GROUP)
        by_case.setdefault((row["case"], row["model"], row["scheduler"]), []).append(number)
    for (case, model, scheduler), published in by_case.items():
        yield Case(
            case, DEVICE, model, scheduler, _protocol(case, model, scheduler), tuple(published),
            fitted=_fitted(case, model), group=GROUP,
        )  # fmt: skip


def _fitted(case: str, model: str) -> bool:
    """Whether a constant was fitted on the printed row of this case."""
    gemm = (case, model) == ("table 2, LongBench", "qwen3-8b")
    figure = case == f"figure 3, {GEMM_FACTOR_WORKLOAD.replace('_', '-')}"
    return gemm or figure or case.removeprefix("table 3, ") in FIT_ROWS


def _protocol(case: str, model: str, scheduler: str) -> Protocol:
    table, _, detail = case.partition(", ")
    if table == "table 2":
        sizes = best_sizes(DEVICE, scheduler, detail.lower(), model)
        lengths_of = "qwen3-30b-a3b" if detail == "ShareGPT" else model
        return real_protocol(detail.lower(), lengths_of, scheduler, sizes)
    if table == "table 3":
        return replace(table3_protocol(detail, scheduler, DEVICE), policy=_later_policy(scheduler))
    if table == "figure 3":
        return figure3_protocol(detail, scheduler)
    if table == "concurrency shift":
        concurrency = detail.removeprefix("c=")
        whole = table3_protocol("concurrency_shift", scheduler, DEVICE)
        plan = {**whole.plan, "num_prompts": SHIFT_REQUESTS[concurrency], "max_concurrency": int(concurrency)}
        return replace(whole, plan=plan, policy=_later_policy(scheduler), concurrencies=())
    if table == "distribution shift":
        return _distribution_shift(scheduler, earlier=bool(detail))
    if table == "table 19":
        protocol = two_gpus(TWO[scheduler], DEVICE, int(detail.removeprefix("c=")))
        mixed = scheduler.startswith("ebplus")
        return replace(protocol, policy=_mixed_only(**FIXED_THRESHOLD)) if mixed else protocol
    policy = _mixed_only(**FIXED_THRESHOLD) if scheduler == "ebplus" else scheduler
    return long_context_protocol(policy, 32_768, 8, max_model_len=40_960)


def _later_policy(scheduler: str) -> str:
    """The policies of 2026-05-16."""
    return ebplus_as_run(DEVICE) if scheduler == "ebplus" else scheduler


def _mixed_only(**settings: float | bool) -> str:
    """EB+ before its costs were measured."""
    return ebplus_as_run(DEVICE, margin=MIXED_ONLY_MARGIN, **settings)


def _distribution_shift(scheduler: str, *, earlier: bool) -> Protocol:
    protocol = table3_protocol("distribution_shift", scheduler, DEVICE)
    return replace(protocol, policy=_mixed_only()) if earlier and scheduler == "ebplus" else protocol
