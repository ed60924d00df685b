"""Table 4 of the EB paper: WildChat on L40S and B300, the headline of 41.9 %."""

from __future__ import annotations

from ebbench.analysis.documents import Column, Document, Section, Value, compared, comparison, labels, relative
from ebbench.papers.eb.table02 import table2_cell
from ebbench.papers.published import EB_PAPER, gpu_title, pick
from ebbench.papers.table import PaperOptions, PaperTable, figure, pending
from ebbench.runs.cell import Cell
from ebbench.runs.store import RunStore

DEVICES = ("b300", "l40s")
POLICIES = ("v0", "v1", "eb")
_MODEL, _WORKLOAD = "qwen3-8b", "wildchat"
_METRICS = (
    ("rps", "requests/s", "request_throughput", 1.0),
    ("ttft_s", "TTFT s", "mean_ttft_ms", 1e-3),
    ("tpot_ms", "TPOT ms", "mean_tpot_ms", 1.0),
)
_NOTES = (
    f"Published: {EB_PAPER}, table 4: WildChat at concurrency 2048, each scheduler at its best of a grid; v0 does not "
    "run on B300. The model is not named; Qwen3-8B is assumed.",
    "Ours: engine sim at the sizes published for RTX PRO 6000 and Qwen3-8B (tables 14 and 15), settings as in table 2.",
    "The printed L40S cells of v1 and EB equal the prefill-heavy bars of the RTX PRO 6000 in figure 4 (10.36 and 14.7 "
    "requests/s, TTFT 132.5 and 92.2 s), although the lengths and the GPU differ.",
    "The headline of 41.9 % on L40S is not reproduced. Our L40S has no mixed attention of its own: it takes the ratio "
    "of mixed to pure decode measured on the RTX 4090.",
)


def _cell(options: PaperOptions, device: str, policy: str) -> Cell:
    return table2_cell(options, device, options.model(_MODEL), _WORKLOAD, policy)


def _cells(options: PaperOptions) -> list[Cell]:
    return [_cell(options, device, policy) for device in options.devices or DEVICES for policy in POLICIES]


def _rows(options: PaperOptions, store: RunStore, device: str) -> list[tuple[Value, ...]]:
    gpu = gpu_title(device)
    as_published = options.model(_MODEL) == _MODEL
    rows = []
    for column, title, key, scale in _METRICS:
        published, ours = {}, {}
        for policy in POLICIES:
            ours[policy] = figure(store, _cell(options, device, policy), key, scale)
            printed = pick("table4_gpus_wildchat", column, gpu=gpu, scheduler=policy)
            published[policy] = printed if as_published else None
        row: list[Value] = [gpu, title]
        for policy in POLICIES:
            row += comparison(published[policy], ours[policy])
        rows.append((*row, relative(published["eb"], published["v1"]), relative(ours["eb"], ours["v1"])))
    return rows


def _document(options: PaperOptions, store: RunStore) -> Document:
    columns = labels("GPU", "metric")
    for policy in POLICIES:
        columns += compared(policy)
    columns += (Column("published", "change", "eb vs v1"), Column("ours", "change", "eb vs v1", True))
    rows = [row for device in options.devices or DEVICES for row in _rows(options, store, device)]
    notes = (*_NOTES, *pending(store, _cells(options)))
    return Document("table4", "Table 4: WildChat on further GPUs", (Section("", columns, tuple(rows)),), notes)


TABLE4 = PaperTable(
    "table4", "WildChat on L40S and B300", _cells, _document, ("device", "model", "num_prompts", "outputs")
)
