"""Table 13 of the EB paper (appendix E.5): throughput over fixed theta, and the online controller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ebbench.analysis.documents import Column, Document, Section, Value, labels
from ebbench.papers.eb.table10_11 import BUDGET, REFILL_NOTE, SLOW, both_devices, sweep_cell
from ebbench.papers.protocols import ASYNC_SCHEDULING, VLLM
from ebbench.papers.published import EB_PAPER, MAIN_MODEL
from ebbench.papers.published import rows as published_rows
from ebbench.papers.table import PaperOptions, PaperTable, Published, mean_figure, pending
from ebbench.runs.store import RunStore
from ebbench.spec.run import RunSpec, simulated

THETAS = tuple(round(0.1 * i, 1) for i in range(1, 10))
GAMMA: Mapping[str, Any] = {"input_len": 128, "output_len": 512, "length_distribution": "gamma:4"}
BATCH = 256
_WORKLOADS = ("Gamma", "ShareGPT")


def _named(options: PaperOptions) -> list[tuple[str, str]]:
    named = [(str(theta), f"eb:theta={theta}") for theta in THETAS]
    named += [("adaptive", "eb"), ("adaptive, censored estimator", "eb:estimator=censored")]
    named += [(f"adaptive, correction={form}", f"eb:correction={form}") for form in ("off", "renewal")]
    return named + [(policy, policy) for policy in options.policies]


def _cells(options: PaperOptions) -> list[RunSpec]:
    return [
        cell
        for device in both_devices(options, "rtx-pro-6000")
        for name in _WORKLOADS
        for _, policy in _named(options)
        for cell in _repeats(options, device, name, policy)
    ]


def _repeats(options: PaperOptions, device: str, name: str, policy: str) -> list[RunSpec]:
    model, count = options.model(), options.num_prompts or 3000
    if name == "Gamma":
        return [sweep_cell(device, model, policy, BATCH, s, num_prompts=count, **GAMMA) for s in options.seed_range()]
    return [
        simulated(
            "sharegpt", policy, device, model, BATCH, BUDGET, vllm_version=VLLM, async_scheduling=ASYNC_SCHEDULING,
            num_prompts=count, seed=seed,
        )
        for seed in options.seed_range()
    ]  # fmt: skip


def _columns() -> tuple[Column, ...]:
    columns = labels("theta")
    for group in ("tokens/s", "% of peak"):
        columns += (
            Column("published", group=group),
            Column("ours", group=group, ours=True),
            Column(SLOW, group=group, ours=True),
        )
    return columns


def _section(options: PaperOptions, store: RunStore, name: str) -> Section:
    published: dict[str, float | None] = {
        row["theta"]: float(row["throughput_tokens_per_s"])
        for row in published_rows("table13_theta_sweep_tokens_per_s")
        if row["workload"] == name
    }
    named = _named(options)
    ours, slow = (
        {
            label: mean_figure(store, _repeats(options, d, name, policy), "total_token_throughput")
            for label, policy in named
        }
        for d in both_devices(options, "rtx-pro-6000")
    )
    rows = []
    for label, _ in named:
        rates: list[Value] = [column.get(label) for column in (published, ours, slow)]
        shares: list[Value] = [_share(column, label) for column in (published, ours, slow)]
        rows.append((label, *rates, *shares))
    return Section(name, _columns(), tuple(rows))


def _share(column: Mapping[str, float | None], label: str) -> float | None:
    """Per cent of the throughput at the best fixed theta."""
    peak = _peak([column.get(str(theta)) for theta in THETAS])
    value = column.get(label)
    return None if value is None or not peak else 100 * value / peak


def _peak(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return max(known) if len(known) == len(values) else None


def _document(options: PaperOptions, store: RunStore) -> Document:
    sections = tuple(_section(options, store, name) for name in _WORKLOADS)
    notes = (
        f"Published: {EB_PAPER}, table 13 (E.5): tokens/s over fixed theta, and the online controller; Qwen3-8B on RTX "
        "PRO 6000, 3,000 requests.",
        f"Batch size and the Gamma's parameters are not legible in our copy: N = {BATCH}, B = {BUDGET}, prompts and "
        f"answers gamma of shape 4 with means {GAMMA['input_len']} and {GAMMA['output_len']} are assumed; ShareGPT "
        "has its profile's lengths. Tokens/s count prompts and answers.",
        REFILL_NOTE,
        "The published correction (theorem 3.2) takes every request of a phase for a fresh one. With these answers "
        "that moves the adaptive threshold past the best one; correction=off leaves it out, correction=renewal (ours) "
        "counts the ages that requests have (docs/theory.md; `ebbench tables corrections`).",
        *pending(store, _cells(options)),
    )
    return Document("table13", "Table 13: sensitivity to the threshold", sections, notes)


TABLE13 = PaperTable(
    "table13", "throughput over theta and the online controller", _cells, _document,
    ("device", "model", "policy", "num_prompts", "seeds"), whole=False,
    published_on=Published(("rtx-pro-6000",), (MAIN_MODEL,)),
)  # fmt: skip
