"""Table 17 of the EB paper (appendix F.2): requests/s of Gemma-3-1B-IT on four real workloads, two GPUs."""

from __future__ import annotations

from ebbench.analysis.documents import (
    Column,
    Document,
    Section,
    Value,
    average_row,
    compared,
    comparison,
    labels,
    relative,
)  # fmt: skip
from ebbench.papers.eb.table02 import POLICIES, table2_cell
from ebbench.papers.published import EB_PAPER, GPUS, WORKLOADS, gpu_title, pick
from ebbench.papers.table import PaperOptions, PaperTable, Published, figure, pending
from ebbench.runs.store import RunStore
from ebbench.spec.run import RunSpec
from ebbench.spec.server import DEFAULT_CLASS

MODEL = "gemma-3-1b-it"
_NOTES = (
    f"Published: {EB_PAPER}, table 17. v0 in print comes from a separate, older engine; ours is v0's rule in the "
    "engine of the others.",
    "Ours: runs as in table 2, at the sizes published for Gemma (tables 14 and 15). WildChat's message lengths were "
    "not published: table 9's are taken. NuminaMath's printed rates do not fit answers of the scripts' 4,000 tokens.",
    "A model of 1B keeps vLLM's API server busy, which is therefore simulated in every run; its one constant was set "
    "on Qwen3-8B and ShareGPT (reports/fidelity/notes/api-server.md).",
)


def _cell(options: PaperOptions, device: str, workload: str, policy: str) -> RunSpec:
    return table2_cell(options, device, MODEL, workload, policy).changed(api_server=DEFAULT_CLASS)


def _workloads(options: PaperOptions) -> tuple[str, ...]:
    return options.workloads or tuple(WORKLOADS)


def _cells(options: PaperOptions) -> list[RunSpec]:
    devices = options.devices or tuple(GPUS)
    return [_cell(options, d, w, p) for d in devices for w in _workloads(options) for p in POLICIES]


def _row(options: PaperOptions, store: RunStore, device: str, workload: str) -> tuple[Value, ...]:
    row: list[Value] = [WORKLOADS.get(workload, workload)]
    ours, printed = {}, {}
    for policy in POLICIES:
        ours[policy] = figure(store, _cell(options, device, workload, policy), "request_throughput")
        printed[policy] = pick("table17_gemma_rps", policy, gpu=gpu_title(device), workload=workload)
        row += comparison(printed[policy], ours[policy])
    return (*row, relative(printed["eb"], printed["v1"]), relative(ours["eb"], ours["v1"]))


def _document(options: PaperOptions, store: RunStore) -> Document:
    columns: tuple[Column, ...] = labels("workload")
    for policy in POLICIES:
        columns += compared(policy)
    columns += (Column("published", "change", "eb vs v1"), Column("ours", "change", "eb vs v1", True))
    sections = []
    for device in options.devices or tuple(GPUS):
        rows = [_row(options, store, device, workload) for workload in _workloads(options)]
        sections.append(Section(gpu_title(device), columns, (*rows, average_row(rows, columns, "Average"))))
    notes = (*_NOTES, *pending(store, _cells(options)))
    return Document("table17", "Table 17: requests/s of Gemma-3-1B-IT", tuple(sections), notes)


TABLE17 = PaperTable(
    "table17", "requests/s of Gemma-3-1B-IT", _cells, _document, ("device", "workload", "num_prompts", "outputs"),
    published_on=Published(tuple(GPUS), (MODEL,)),
)  # fmt: skip
