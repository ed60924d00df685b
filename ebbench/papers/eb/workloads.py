"""Policies on the EB paper's workloads: tables 2, 4 and 17, figures 4 to 6."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

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
from ebbench.devices import load_device
from ebbench.devices.loader import DEFAULT_HOST
from ebbench.devices.table import TableCost
from ebbench.papers.eb.grid import best_of_grid, grid_cells, real_cell
from ebbench.papers.published import (
    EB_PAPER,
    GPUS,
    MAIN_MODEL,
    MODELS,
    SYNTHETIC,
    WORKLOADS,
    best_config,
    gpu_title,
    model_title,
    pick,
)
from ebbench.papers.table import PaperFigure, PaperOptions, PaperTable, Published, figure, pending
from ebbench.render.figures import altair, values
from ebbench.render.palette import BLACK, policy_colours
from ebbench.runs.store import RunStore
from ebbench.spec.run import RunSpec
from ebbench.spec.server import DEFAULT_CLASS

# Table 2 of the EB paper: requests/s on four real workloads, two models, two GPUs.

POLICIES = ("v0", "v1", "eb")
_MODELS2 = ("qwen3-8b", "qwen3-30b-a3b")
_WEIGHT = {"wildchat": 20.0, "numinamath": 10.0}
_NOTES2: tuple[str, ...] = (
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


def _devices2(options: PaperOptions) -> tuple[str, ...]:
    return options.devices or tuple(GPUS)


def _policies2(options: PaperOptions) -> tuple[str, ...]:
    return (*POLICIES, *(policy for policy in options.policies if policy not in POLICIES))


def table2_cell(options: PaperOptions, device: str, model: str, workload: str, policy: str) -> RunSpec:
    """The cell of one number, at the published best configuration."""
    tokens, seqs = best_config(device, policy, workload, model)
    return real_cell(options, device, model, workload, policy, (seqs, tokens), _WEIGHT.get(workload, 1.0))


def _keys2(options: PaperOptions, device: str) -> list[tuple[str, str, str]]:
    models, workloads = options.models or _MODELS2, options.workloads or tuple(WORKLOADS)
    return [(device, model, workload) for model in models for workload in workloads]


def _cells2(options: PaperOptions) -> list[RunSpec]:
    keys = [key for device in _devices2(options) for key in _keys2(options, device)]
    base = [table2_cell(options, *key, policy) for key in keys for policy in _policies2(options)]
    return [one for cell in base for one in grid_cells(cell)] if options.grid else base


def _rate2(options: PaperOptions, store: RunStore, cell: RunSpec) -> float | None:
    if options.grid:
        return best_of_grid(store, cell)
    return figure(store, cell, "request_throughput")


def _row2(options: PaperOptions, store: RunStore, device: str, model: str, workload: str) -> tuple[Value, ...]:
    where = {"gpu": gpu_title(device), "model": MODELS.get(model, model), "workload": WORKLOADS.get(workload, workload)}
    row: list[Value] = [model_title(model), where["workload"]]
    ours = {p: _rate2(options, store, table2_cell(options, device, model, workload, p)) for p in _policies2(options)}
    published = {p: pick("table2_throughput_rps", f"{p}_rps", **where) for p in POLICIES}
    for policy in POLICIES:
        row += comparison(published[policy], ours[policy])
    for policy in _policies2(options)[len(POLICIES) :]:
        row += [ours[policy], relative(ours[policy], ours["v1"])]
    gains = relative(published["eb"], published["v1"]), relative(ours["eb"], ours["v1"])
    return (*row, *gains)


def _columns2(options: PaperOptions) -> tuple[Column, ...]:
    columns = labels("model", "workload")
    for policy in POLICIES:
        columns += compared(policy)
    for policy in _policies2(options)[len(POLICIES) :]:
        columns += (Column("ours", group=policy, ours=True), Column("vs v1", "change", policy))
    return (*columns, Column("published", "change", "eb vs v1"), Column("ours", "change", "eb vs v1", True))


def _document2(options: PaperOptions, store: RunStore) -> Document:
    sections = []
    columns = _columns2(options)
    for device in _devices2(options):
        rows: list[tuple[Value, ...]] = []
        for model, keys in groupby(_keys2(options, device), key=lambda key: key[1]):
            of_model = [_row2(options, store, *key) for key in keys]
            rows += [*of_model, average_row(of_model, columns, f"{model_title(model)}, average")]
        sections.append(Section(gpu_title(device), columns, tuple(rows)))
    notes = (*_NOTES2, *pending(store, _cells2(options)))
    return Document("table2", "Table 2: requests/s on real workloads", tuple(sections), notes)


TABLE2 = PaperTable(
    "table2", "requests/s on real workloads", _cells2, _document2,
    ("device", "model", "workload", "policy", "num_prompts", "grid", "outputs"),
    published_on=Published(tuple(GPUS), _MODELS2),
)  # fmt: skip


# Table 17 of the EB paper (appendix F.2): requests/s of Gemma-3-1B-IT on four real workloads, two GPUs.

MODEL17 = "gemma-3-1b-it"
_NOTES17 = (
    f"Published: {EB_PAPER}, table 17. v0 in print comes from a separate, older engine; ours is v0's rule in the "
    "engine of the others.",
    "Ours: runs as in table 2, at the sizes published for Gemma (tables 14 and 15). WildChat's message lengths were "
    "not published: table 9's are taken. NuminaMath's printed rates do not fit answers of the scripts' 4,000 tokens.",
    "A model of 1B keeps vLLM's API server busy, which is therefore simulated in every run; its one constant was set "
    "on Qwen3-8B and ShareGPT (reports/fidelity/notes/api-server.md).",
)


def _cell17(options: PaperOptions, device: str, workload: str, policy: str) -> RunSpec:
    return table2_cell(options, device, MODEL17, workload, policy).changed(api_server=DEFAULT_CLASS)


def _workloads17(options: PaperOptions) -> tuple[str, ...]:
    return options.workloads or tuple(WORKLOADS)


def _cells17(options: PaperOptions) -> list[RunSpec]:
    devices = options.devices or tuple(GPUS)
    return [_cell17(options, d, w, p) for d in devices for w in _workloads17(options) for p in POLICIES]


def _row17(options: PaperOptions, store: RunStore, device: str, workload: str) -> tuple[Value, ...]:
    row: list[Value] = [WORKLOADS.get(workload, workload)]
    ours, printed = {}, {}
    for policy in POLICIES:
        ours[policy] = figure(store, _cell17(options, device, workload, policy), "request_throughput")
        printed[policy] = pick("table17_gemma_rps", policy, gpu=gpu_title(device), workload=workload)
        row += comparison(printed[policy], ours[policy])
    return (*row, relative(printed["eb"], printed["v1"]), relative(ours["eb"], ours["v1"]))


def _document17(options: PaperOptions, store: RunStore) -> Document:
    columns: tuple[Column, ...] = labels("workload")
    for policy in POLICIES:
        columns += compared(policy)
    columns += (Column("published", "change", "eb vs v1"), Column("ours", "change", "eb vs v1", True))
    sections = []
    for device in options.devices or tuple(GPUS):
        rows = [_row17(options, store, device, workload) for workload in _workloads17(options)]
        sections.append(Section(gpu_title(device), columns, (*rows, average_row(rows, columns, "Average"))))
    notes = (*_NOTES17, *pending(store, _cells17(options)))
    return Document("table17", "Table 17: requests/s of Gemma-3-1B-IT", tuple(sections), notes)


TABLE17 = PaperTable(
    "table17", "requests/s of Gemma-3-1B-IT", _cells17, _document17, ("device", "workload", "num_prompts", "outputs"),
    published_on=Published(tuple(GPUS), (MODEL17,)),
)  # fmt: skip


# Table 4 of the EB paper: WildChat on L40S and B300, the headline of 41.9 %.

DEVICES4 = ("b300", "l40s")
_MODEL4, _WORKLOAD4 = "qwen3-8b", "wildchat"
_TABLE4_METRICS = (
    ("rps", "requests/s", "request_throughput", 1.0),
    ("ttft_s", "TTFT s", "mean_ttft_ms", 1e-3),
    ("tpot_ms", "TPOT ms", "mean_tpot_ms", 1.0),
)
_NOTES4 = (
    f"Published: {EB_PAPER}, table 4: WildChat at concurrency 2048, each scheduler at its best of a grid; v0 does not "
    "run on B300. The model is not named in the paper; the authors' README has Qwen3-8B.",
    "Ours: engine sim at the sizes published for RTX PRO 6000 and Qwen3-8B (tables 14 and 15), settings as in table 2.",
    "The printed L40S cells of v1 and EB equal the prefill-heavy bars of the RTX PRO 6000 in figure 4 (10.36 and 14.7 "
    "requests/s, TTFT 132.5 and 92.2 s), although the lengths and the GPU differ.",
    "The headline of 41.9 % on L40S is not reproduced. Our L40S has no mixed attention of its own: it takes the ratio "
    "of mixed to pure decode measured on the RTX 4090.",
    "The printed L40S row does not fit our lengths (1,665 prompt and 194 answer tokens on average): at 14.7 requests/s "
    "their matrix products take 380 TFLOPS of 362, and by Little's law 14.7 x 0.138 s x 194 = 394 requests decode at "
    "once, of which the KV cache of 173,200 tokens holds 93. So prompts were shorter, or the model was smaller.",
)
_WHAT_IF_NOTES = (
    "Factor: on what a mixed attention call costs beyond its pure parts; 1 is the RTX 4090's ratio as measured. Decode "
    "beside a prompt: attention time of 128 decodes of 1,024 tokens beside a prompt chunk of 1,024, over their time "
    "alone; measured on the other two GPUs (the RTX PRO 6000's with its fitted factor of 1.37).",
)
WHAT_IF_DEVICE = "l40s"
FACTORS = (1.0, 2.0, 4.0, 8.0)
_MEASURED_MIXED = ("rtx-pro-6000", "rtx-4090")
_CHUNK, _SEQS, _CONTEXT = 1024, 128, 1024


def _table4_cell(options: PaperOptions, device: str, policy: str) -> RunSpec:
    return table2_cell(options, device, options.model(_MODEL4), _WORKLOAD4, policy)


def _with_factor(options: PaperOptions, policy: str, factor: float) -> RunSpec:
    """The cell on L40S with ``factor`` times the excess cost of mixed attention."""
    cell = _table4_cell(options, WHAT_IF_DEVICE, policy)
    return cell if factor == 1.0 else replace(cell, host=replace(DEFAULT_HOST, mixed_excess=factor))


def _factors(options: PaperOptions) -> tuple[float, ...]:
    return FACTORS if WHAT_IF_DEVICE in (options.devices or DEVICES4) else ()


def _table4_cells(options: PaperOptions) -> list[RunSpec]:
    own = [_table4_cell(options, device, policy) for device in options.devices or DEVICES4 for policy in POLICIES]
    return list(dict.fromkeys([*own, *(_with_factor(options, p, f) for f in _factors(options) for p in POLICIES[1:])]))


def _table4_rows(options: PaperOptions, store: RunStore, device: str) -> list[tuple[Value, ...]]:
    gpu = gpu_title(device)
    as_published = options.model(_MODEL4) == _MODEL4
    rows = []
    for column, title, key, scale in _TABLE4_METRICS:
        published, ours = {}, {}
        for policy in POLICIES:
            ours[policy] = figure(store, _table4_cell(options, device, policy), key, scale)
            printed = pick("table4_gpus_wildchat", column, gpu=gpu, scheduler=policy)
            published[policy] = printed if as_published else None
        row: list[Value] = [gpu, title]
        for policy in POLICIES:
            row += comparison(published[policy], ours[policy])
        rows.append((*row, relative(published["eb"], published["v1"]), relative(ours["eb"], ours["v1"])))
    return rows


def _document4(options: PaperOptions, store: RunStore) -> Document:
    columns = labels("GPU", "metric")
    for policy in POLICIES:
        columns += compared(policy)
    columns += (Column("published", "change", "eb vs v1"), Column("ours", "change", "eb vs v1", True))
    rows = [row for device in options.devices or DEVICES4 for row in _table4_rows(options, store, device)]
    sections = [Section("", columns, tuple(rows))]
    notes: tuple[str, ...] = _NOTES4
    if _factors(options):
        sections.append(_what_if(options, store))
        notes += _WHAT_IF_NOTES
    notes += pending(store, _table4_cells(options))
    return Document("table4", "Table 4: WildChat on further GPUs", tuple(sections), notes)


def _what_if(options: PaperOptions, store: RunStore) -> Section:
    """What the L40S's mixed attention would have to cost for the published gain."""
    columns = (
        *labels("GPU"), Column("factor"), Column("decode beside a prompt", show=lambda ratio: f"{ratio:.1f} x"),
        Column("v1 req/s", ours=True), Column("eb req/s", ours=True), Column("eb vs v1", "change", ours=True),
    )  # fmt: skip
    rows: list[tuple[Value, ...]] = []
    for factor in _factors(options):
        rates = {p: figure(store, _with_factor(options, p, factor), "request_throughput") for p in POLICIES[1:]}
        ratio = beside_a_prompt(WHAT_IF_DEVICE, options.model(_MODEL4), factor)
        gain = relative(rates["eb"], rates["v1"])
        rows.append((gpu_title(WHAT_IF_DEVICE), factor, ratio, rates["v1"], rates["eb"], gain))
    for device in _MEASURED_MIXED:
        rows.append((gpu_title(device), None, beside_a_prompt(device, options.model(_MODEL4)), None, None, None))
    return Section("What mixed attention would have to cost on L40S", columns, tuple(rows))


def beside_a_prompt(device: str, model: str, factor: float | None = None) -> float | None:
    """Attention time of decodes beside a prompt over their time alone, with ``factor`` instead of the device's own."""
    host = None if factor is None else replace(DEFAULT_HOST, mixed_excess=factor)
    cost = load_device(device, model, host=host, kv_tokens=_SEQS * _CONTEXT).cost
    if not isinstance(cost, TableCost):
        return None
    ((_, tables),) = cost.attention  # one kind of layer
    return float(tables.increment.at4(_CHUNK, 0, _SEQS, _CONTEXT) / tables.decode.at2(_SEQS, _CONTEXT))


TABLE4 = PaperTable(
    "table4", "WildChat on L40S and B300", _table4_cells, _document4, ("device", "model", "num_prompts", "outputs"),
    published_on=Published(DEVICES4, (_MODEL4,)),
)  # fmt: skip


# Figures 4, 5 and 6 of the EB paper: v0, v1 and EB(k*) on synthetic and real workloads, and on four more models.

_POLICY_TITLES = {"v0": "v0", "v1": "v1", "eb": "EB(k*)"}
_PUBLISHED_NAMES = {"v0": "v0", "v1": "v1", "eb": "Ours"}
_TABLE6 = "figure6_models"
MODELS6 = ("llama-3.1-8b", "mathstral-7b", "qwen2.5-coder-7b", "deepseek-r1-distill-qwen-7b")
Row = dict[str, Any]
Metric = tuple[str, str, str, float]
"""Our figure, the column of the published one, the axis title, the factor for ours."""


def _bars(
    data: Sequence[Row], x_order: Sequence[str], title: str, y_title: str | None, *, log: bool, width: int
) -> Any:
    """Bars of our results by policy, with a black tick for each published value."""
    alt = altair()
    names = [_POLICY_TITLES[policy] for policy in POLICIES]
    colours = policy_colours(POLICIES)
    ours = [row for row in data if row["source"] == "ours" and row["value"] is not None]
    published = [row for row in data if row["source"] == "published" and row["value"] is not None]
    marks = ["published"] if published else []
    scheme = alt.Scale(domain=[*names, *marks], range=[*colours, BLACK][: len(names) + len(marks)])
    known = [row["value"] for row in (*ours, *published)]
    floor = min(known, default=1.0) / 2
    scale = alt.Scale(type="log", domainMin=floor, nice=False) if log else alt.Scale()
    x = alt.X("x:N", sort=list(x_order), title=None, axis=alt.Axis(labelAngle=-20))
    offset = alt.XOffset("series:N", sort=names)
    bars = (
        alt.Chart(values([{**row, "floor": floor if log else 0} for row in ours]))
        .mark_bar()
        .encode(
            x=x, xOffset=offset, y=alt.Y("value:Q", title=y_title, scale=scale), y2="floor:Q",
            color=alt.Color("series:N", scale=scheme, sort=None, title=None),
        )
    )  # fmt: skip
    ticks = (
        alt.Chart(values([{**row, "mark": "published"} for row in published]))
        .mark_tick(thickness=2.5, size=13, opacity=1)
        .encode(
            x=x, xOffset=offset, y=alt.Y("value:Q", scale=scale),
            color=alt.Color("mark:N", scale=scheme, sort=None, title=None),
        )
    )  # fmt: skip
    layers = [bars, ticks] if published else [bars]
    return alt.layer(*layers).properties(width=width, height=140, title=title)


# Figure 4: synthetic workloads.

_METRICS4: tuple[Metric, ...] = (
    ("request_throughput", "rps", "requests/s", 1.0),
    ("mean_itl_ms", "itl_s", "ITL, s", 1e-3),
    ("mean_ttft_ms", "ttft_s", "TTFT, s", 1e-3),
)


def _cell4(options: PaperOptions, device: str, workload: str, policy: str) -> RunSpec:
    tokens, seqs = best_config(device, policy, workload, "qwen3-8b")
    model = options.model()
    return real_cell(options, device, model, workload, policy, (seqs, tokens))


def _cells4(options: PaperOptions) -> list[RunSpec]:
    return [_cell4(options, d, w, p) for d in options.devices or tuple(GPUS) for w in SYNTHETIC for p in POLICIES]


def _rows4(options: PaperOptions, store: RunStore, device: str, metric: Metric, *, published: bool) -> list[Row]:
    key, column, _, scale = metric
    found: list[Row] = []
    for workload, title in SYNTHETIC.items():
        for policy in POLICIES:
            where = {"gpu": gpu_title(device), "workload": title, "method": _PUBLISHED_NAMES[policy]}
            base = {"x": title, "series": _POLICY_TITLES[policy]}
            ours = figure(store, _cell4(options, device, workload, policy), key, scale)
            found.append({**base, "source": "ours", "value": ours})
            if published:
                printed = pick("figure4_synthetic_e2e", column, "eb_vllm", **where)
                found.append({**base, "source": "published", "value": printed})
    return found


def _chart4(options: PaperOptions, store: RunStore, published: bool) -> Any:
    alt = altair()
    lines = []
    for device in options.devices or tuple(GPUS):
        panels = [
            _bars(_rows4(options, store, device, metric, published=published), list(SYNTHETIC.values()),
                  "" if at else gpu_title(device), metric[2], log=False, width=190)
            for at, metric in enumerate(_METRICS4)
        ]  # fmt: skip
        lines.append(alt.hconcat(*panels).resolve_scale(y="independent"))
    return alt.vconcat(*lines)


# Figure 5: latency on real workloads.

_METRICS5 = (("mean_ttft_ms", "ttft_s", "TTFT, s", 1e-3), ("mean_tpot_ms", "tpot_ms", "TPOT, ms", 1.0))
_MODELS5 = ("qwen3-8b", "qwen3-30b-a3b")


def _cells5(options: PaperOptions) -> list[RunSpec]:
    return [
        table2_cell(options, device, model, workload, policy)
        for device in options.devices or tuple(GPUS)
        for model in options.models or _MODELS5
        for workload in options.workloads or tuple(WORKLOADS)
        for policy in POLICIES
    ]


def _rows5(
    options: PaperOptions, store: RunStore, device: str, model: str, metric: Metric, *, published: bool
) -> list[Row]:
    key, column, _, scale = metric
    found: list[Row] = []
    for workload in options.workloads or tuple(WORKLOADS):
        title = WORKLOADS.get(workload, workload)
        for policy in POLICIES:
            where = {"gpu": gpu_title(device), "model": model_title(model), "workload": title,
                     "method": _PUBLISHED_NAMES[policy]}  # fmt: skip
            base = {"x": title, "series": _POLICY_TITLES[policy]}
            ours = figure(store, table2_cell(options, device, model, workload, policy), key, scale)
            found.append({**base, "source": "ours", "value": ours})
            if published:
                printed = pick("figure5_latency", column, "eb_vllm", **where)
                found.append({**base, "source": "published", "value": printed})
    return found


def _chart5(options: PaperOptions, store: RunStore, published: bool) -> Any:
    alt = altair()
    order = [WORKLOADS.get(workload, workload) for workload in options.workloads or tuple(WORKLOADS)]
    lines = []
    for metric in _METRICS5:
        for device in options.devices or tuple(GPUS):
            panels = [
                _bars(_rows5(options, store, device, model, metric, published=published), order,
                      f"{gpu_title(device)}, {model_title(model)}", metric[2], log=True, width=290)
                for model in options.models or _MODELS5
            ]  # fmt: skip
            lines.append(alt.hconcat(*panels))
    return alt.vconcat(*lines)


# Figure 6: four more models.


def _cell6(options: PaperOptions, model: str, policy: str) -> RunSpec:
    device = options.device()
    tokens, seqs = best_config(device, policy, "wildchat", "qwen3-8b")
    return real_cell(options, device, model, "wildchat", policy, (seqs, tokens), weight=20)


def _cells6(options: PaperOptions) -> list[RunSpec]:
    return [_cell6(options, model, policy) for model in options.models or MODELS6 for policy in POLICIES]


_METRICS6: tuple[Metric, ...] = (
    ("request_throughput", "rps", "requests/s", 1.0),
    ("mean_ttft_ms", "ttft_s", "TTFT, s", 1e-3),
    ("mean_tpot_ms", "tpot_ms", "TPOT, ms", 1.0),
)


def _rows6(options: PaperOptions, store: RunStore, metric: Metric, *, published: bool) -> list[Row]:
    key, column, _, scale = metric
    gpu, found = gpu_title(options.device()), []
    for model in options.models or MODELS6:
        for policy in POLICIES:
            base = {"x": model, "series": _POLICY_TITLES[policy]}
            ours = figure(store, _cell6(options, model, policy), key, scale)
            found.append({**base, "source": "ours", "value": ours})
            if published:
                where = {"gpu": gpu, "model": model, "method": _PUBLISHED_NAMES[policy]}
                found.append({**base, "source": "published", "value": pick(_TABLE6, column, "eb_vllm", **where)})
    return found


def _chart6(options: PaperOptions, store: RunStore, published: bool) -> Any:
    alt = altair()
    models = options.models or MODELS6
    panels = [
        _bars(_rows6(options, store, metric, published=published), models, "", metric[2], log=False, width=230)
        for metric in _METRICS6
    ]
    return alt.hconcat(*panels).resolve_scale(y="independent")


FIGURE4 = PaperFigure(
    "figure4",
    "v0, v1 and EB(k*) on three synthetic workloads",
    _cells4,
    _chart4,
    "Bars: ours, each scheduler at its published best B and N (table 16; v0 takes EB's, another GPU the RTX PRO "
    "6000's). Black: published (eb-vllm).",
    ("device", "model", "num_prompts"),
    published_on=Published(tuple(GPUS), (MAIN_MODEL,)),
)
FIGURE5 = PaperFigure(
    "figure5",
    "TTFT and TPOT on four real workloads",
    _cells5,
    _chart5,
    "Bars: ours, the runs of table 2. Black: published (eb-vllm), read off log-scale bars by the authors: approximate.",
    ("device", "model", "workload", "num_prompts", "outputs"),
    published_on=Published(tuple(GPUS), tuple(MODELS)),
)
FIGURE6 = PaperFigure(
    "figure6",
    "four more models on WildChat",
    _cells6,
    _chart6,
    "Bars: ours, at the best B and N published for Qwen3-8B, which the authors' script takes for these models, too. "
    "Black: published (the numbers in the authors' plotting script, eb-vllm): EB(k*) has 8 to 17 % more requests/s and "
    "17 to 47 % less TPOT than v1.",
    ("device", "model", "num_prompts", "outputs"),
    published_on=Published(("rtx-pro-6000",), MODELS6),
)
