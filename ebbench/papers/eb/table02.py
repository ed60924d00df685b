"""Table 2 of the EB paper: requests/s on four real workloads, two models, two GPUs."""

from __future__ import annotations

from itertools import groupby

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
from ebbench.papers.eb.table14_16 import best_of_grid, grid_cells, real_cell
from ebbench.papers.published import EB_PAPER, GPUS, MODELS, WORKLOADS, best_config, gpu_title, model_title, pick
from ebbench.papers.table import PaperOptions, PaperTable, Published, figure, pending
from ebbench.runs.store import RunStore
from ebbench.spec.run import RunSpec

POLICIES = ("v0", "v1", "eb")
_MODELS = ("qwen3-8b", "qwen3-30b-a3b")
_WEIGHT = {"wildchat": 20.0, "numinamath": 10.0}
_NOTES: tuple[str, ...] = (
    f"Published: {EB_PAPER}, table 2; requests/s over the whole run, 4,000 prompts (WildChat: 3,000 conversations) at "
    "concurrency 2048.",
    "Ours: engine sim, each scheduler at its published best token budget B and batch size N (tables 14, 15); --grid "
    "searches them instead. Lengths drawn from profiles fitted to table 9, not from the data sets.",
    "Run as `ebbench fidelity` does, by what the authors' scripts and reports say (ebbench/papers/protocols.py): 20 "
    "warm-up requests first, answers forced to the scripts' limits (LongBench 20, NuminaMath 4,000 tokens), ShareGPT's "
    "of 360 tokens on average, 292 for Qwen3-30B-A3B, WildChat's at most 256; EB without the memory-safe batch; no "
    "asynchronous scheduling. The published rates fit these lengths by Little's law, and not the means of table 9 "
    "(NuminaMath v1 on RTX PRO 6000: 256 sequences / (0.73 requests/s x 81.75 ms) = 4,290 tokens). --outputs profile "
    "takes table 9.",
    "v0 in print comes from a separate, older engine (vLLM's v0 code base), with its own costs per step; ours is v0's "
    "rule in the engine of the others. So in print v0 lies far below EB on H200, and here beside it.",
    "ShareGPT on H200 keeps vLLM's API server busy, which is not simulated here. With it, requests/s are within 8 % of "
    "print (its one constant was set there): reports/fidelity/table-2-and-figure-5.md.",
    "WildChat compares other traffic: its message lengths were not published, and the authors' client gave requests up "
    "after 120 s, which ours does not.",
)


def _devices(options: PaperOptions) -> tuple[str, ...]:
    return options.devices or tuple(GPUS)


def _policies(options: PaperOptions) -> tuple[str, ...]:
    return (*POLICIES, *(policy for policy in options.policies if policy not in POLICIES))


def table2_cell(options: PaperOptions, device: str, model: str, workload: str, policy: str) -> RunSpec:
    """The cell of one number, at the published best configuration."""
    tokens, seqs = best_config(device, policy, workload, model)
    return real_cell(options, device, model, workload, policy, (seqs, tokens), _WEIGHT.get(workload, 1.0))


def _keys(options: PaperOptions, device: str) -> list[tuple[str, str, str]]:
    models, workloads = options.models or _MODELS, options.workloads or tuple(WORKLOADS)
    return [(device, model, workload) for model in models for workload in workloads]


def _cells(options: PaperOptions) -> list[RunSpec]:
    keys = [key for device in _devices(options) for key in _keys(options, device)]
    base = [table2_cell(options, *key, policy) for key in keys for policy in _policies(options)]
    return [one for cell in base for one in grid_cells(cell)] if options.grid else base


def _rate(options: PaperOptions, store: RunStore, cell: RunSpec) -> float | None:
    if options.grid:
        return best_of_grid(store, cell)
    return figure(store, cell, "request_throughput")


def _row(options: PaperOptions, store: RunStore, device: str, model: str, workload: str) -> tuple[Value, ...]:
    where = {"gpu": gpu_title(device), "model": MODELS.get(model, model), "workload": WORKLOADS.get(workload, workload)}
    row: list[Value] = [model_title(model), where["workload"]]
    ours = {p: _rate(options, store, table2_cell(options, device, model, workload, p)) for p in _policies(options)}
    published = {p: pick("table2_throughput_rps", f"{p}_rps", **where) for p in POLICIES}
    for policy in POLICIES:
        row += comparison(published[policy], ours[policy])
    for policy in _policies(options)[len(POLICIES) :]:
        row += [ours[policy], relative(ours[policy], ours["v1"])]
    gains = relative(published["eb"], published["v1"]), relative(ours["eb"], ours["v1"])
    return (*row, *gains)


def _columns(options: PaperOptions) -> tuple[Column, ...]:
    columns = labels("model", "workload")
    for policy in POLICIES:
        columns += compared(policy)
    for policy in _policies(options)[len(POLICIES) :]:
        columns += (Column("ours", group=policy, ours=True), Column("vs v1", "change", policy))
    return (*columns, Column("published", "change", "eb vs v1"), Column("ours", "change", "eb vs v1", True))


def _document(options: PaperOptions, store: RunStore) -> Document:
    sections = []
    columns = _columns(options)
    for device in _devices(options):
        rows: list[tuple[Value, ...]] = []
        for model, keys in groupby(_keys(options, device), key=lambda key: key[1]):
            of_model = [_row(options, store, *key) for key in keys]
            rows += [*of_model, average_row(of_model, columns, f"{model_title(model)}, average")]
        sections.append(Section(gpu_title(device), columns, tuple(rows)))
    notes = (*_NOTES, *pending(store, _cells(options)))
    return Document("table2", "Table 2: requests/s on real workloads", tuple(sections), notes)


TABLE2 = PaperTable(
    "table2", "requests/s on real workloads", _cells, _document,
    ("device", "model", "workload", "policy", "num_prompts", "grid", "outputs"),
    published_on=Published(tuple(GPUS), _MODELS),
)  # fmt: skip
