"""The grid over token budget B and batch size N: tables 14 to 16 of the EB paper."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from ebbench.analysis.documents import Column, Section, Value, comparison, labels
from ebbench.analysis.sensitivity import Sensitivity, sensitivity
from ebbench.papers.options import PaperOptions
from ebbench.papers.protocols import protocol_cells, real_protocol, synthetic_protocol
from ebbench.papers.published import (
    GPUS,
    MODELS,
    SYNTHETIC,
    WORKLOADS,
    gpu_title,
    model_title,
    pick,
)  # fmt: skip
from ebbench.papers.table import PaperTable, Published, Sections, beside, figure
from ebbench.runs.store import RunStore
from ebbench.spec.run import RunSpec

# Tables 14 to 16: the grid over token budget B and batch size N, its best cell and its sensitivity metrics.

BUDGETS = (4096, 8192, 10240, 14336, 16384, 18432)
BATCHES = (256, 512, 1024, 1536, 2048)
SCHEDULERS = ("v0", "v1", "eb")
# Name in the reference table, our name, and the factor for our value.
_METRICS = (
    ("max_num_batched_tokens", "best_budget", 1.0), ("max_num_seqs", "best_size", 1.0), ("cv_percent", "cv", 100.0),
    ("range_ratio", "range_ratio", 1.0), ("b_sens_percent", "b_sens", 100.0), ("n_sens_percent", "n_sens", 100.0),
)  # fmt: skip
_TITLES = ("B", "N", "CV %", "range", "B-Sens %", "N-Sens %")
_SENSITIVITY = "table14_15_best_config_and_sensitivity"


def grid_cells(cell: RunSpec) -> list[RunSpec]:
    """The cell at every (B, N) of the published grid."""
    return [cell.changed(max_num_batched_tokens=b, max_num_seqs=n) for b in BUDGETS for n in BATCHES]


def real_cell(
    options: PaperOptions,
    device: str,
    model: str,
    workload: str,
    policy: str,
    sizes: tuple[int, int],
    weight: float = 1.0,
) -> RunSpec:
    """A cell of tables 2 and 14 to 16 at ``sizes`` (N, B), with the authors' lengths or those of table 9."""
    if workload in SYNTHETIC:
        protocol = synthetic_protocol(workload, policy, sizes)
    else:
        protocol = real_protocol(workload, model, policy, sizes)
        if options.outputs != "forced":
            protocol = replace(protocol, plan={**protocol.plan, "workload": workload})
    return protocol_cells(protocol, device, model, options.num_prompts, weight)[0]


def grid_rates(store: RunStore, cell: RunSpec, key: str = "request_throughput") -> dict[tuple[int, int], float]:
    """Known throughputs over the grid."""
    rates = {}
    for grid_cell in grid_cells(cell):
        rate = figure(store, grid_cell, key)
        if rate is not None:
            rates[grid_cell.server.max_num_batched_tokens, grid_cell.server.max_num_seqs] = rate
    return rates


def best_of_grid(store: RunStore, cell: RunSpec) -> float | None:
    """Best throughput over a complete grid; None while cells are missing."""
    rates = grid_rates(store, cell)
    return max(rates.values()) if len(rates) == len(BUDGETS) * len(BATCHES) else None


def _base(options: PaperOptions, device: str, model: str, workload: str, scheduler: str) -> RunSpec:
    return real_cell(options, device, model, workload, scheduler, (256, 4096))


def _swept(options: PaperOptions, store: RunStore, *key: str) -> Sensitivity | None:
    rates = grid_rates(store, _base(options, *key))
    return sensitivity(rates) if len(rates) == len(BUDGETS) * len(BATCHES) else None


def _real_cells(device: str, options: PaperOptions) -> list[RunSpec]:
    """The cells of the chosen grids; by default only Qwen3-8B on ShareGPT, since all are 1,080 runs."""
    models, workloads = options.models or ("qwen3-8b",), options.workloads or ("sharegpt",)
    bases = [_base(options, device, m, w, s) for m in models for w in workloads for s in SCHEDULERS]
    return [cell for base in bases for cell in grid_cells(base)]


def _real_sections(device: str, options: PaperOptions, store: RunStore) -> Sections:
    columns = labels("workload", "model", "scheduler")
    for title in _TITLES:
        columns += beside(title)
    rows = []
    for workload in options.workloads or tuple(WORKLOADS):
        for model in options.models or tuple(MODELS):
            for scheduler in SCHEDULERS:
                swept = _swept(options, store, device, model, workload, scheduler)
                where = {"gpu": GPUS[device], "workload": WORKLOADS.get(workload, workload),
                         "model": model_title(model), "scheduler": scheduler}  # fmt: skip
                row: list[Value] = [where["workload"], where["model"], scheduler]
                for metric, name, scale in _METRICS:
                    published = pick(_SENSITIVITY, "value", metric=metric, **where)
                    row += comparison(published, _value(swept, name, scale))[:2]
                rows.append(tuple(row))
    return [Section("", columns, tuple(rows))]


def _value(swept: Sensitivity | None, name: str, scale: float = 1.0) -> float | None:
    value = None if swept is None else getattr(swept, name)
    return None if value is None else value * scale


_SYNTHETIC_SCHEDULERS = ("v1", "eb")


def _synthetic_cells(options: PaperOptions) -> list[RunSpec]:
    devices, workloads = options.devices or ("rtx-pro-6000",), options.workloads or tuple(SYNTHETIC)
    bases = [_base(options, d, "qwen3-8b", w, s) for d in devices for w in workloads for s in _SYNTHETIC_SCHEDULERS]
    return [cell for base in bases for cell in grid_cells(base)]


def _synthetic_document(options: PaperOptions, store: RunStore) -> Sections:
    columns = (
        *labels("workload", "scheduler"), *beside("B"), *beside("N"), Column("loss at published", "change", "ours"),
    )  # fmt: skip
    sections = []
    for device, prefix in (("rtx-pro-6000", "rtxpro6000"), ("h200", "h200")):
        rows = []
        for workload in options.workloads or tuple(SYNTHETIC):
            for scheduler in _SYNTHETIC_SCHEDULERS:
                where = {"workload": SYNTHETIC.get(workload, workload), "scheduler": scheduler}
                b, n = (pick("table16_synthetic_best_config", f"{prefix}_{w}", **where) for w in ("tokens", "seqs"))
                swept = _swept(options, store, device, "qwen3-8b", workload, scheduler)
                rates = grid_rates(store, _base(options, device, "qwen3-8b", workload, scheduler))
                rate_at_published = rates.get((int(b or 0), int(n or 0)), math.nan)
                loss = None if swept is None or math.isnan(rate_at_published) else rate_at_published / swept.best - 1
                best = _value(swept, "best_budget"), _value(swept, "best_size")
                rows.append((where["workload"], scheduler, b, best[0], n, best[1], loss))
        sections.append(Section(gpu_title(device), columns, tuple(rows)))
    return sections


_READS = ("model", "workload", "num_prompts", "outputs")
_PUBLISHED = Published(tuple(GPUS), tuple(MODELS))
TABLE14, TABLE15 = (
    PaperTable(name, partial(_real_cells, device), _READS, partial(_real_sections, device), whole=False,
               published_on=_PUBLISHED, facts=globals())
    for name, device in zip(("table14", "table15"), GPUS, strict=True)
)  # fmt: skip
TABLE16 = PaperTable(
    "table16", _synthetic_cells, ("device", "workload", "num_prompts"), _synthetic_document, whole=False,
    workloads=tuple(SYNTHETIC), published_on=_PUBLISHED,
)  # fmt: skip
