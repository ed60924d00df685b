"""Workloads in the EB paper: tables 2, 4, 17, figures 4 to 6; grids over token budget B and batch size N: 14 to 16."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

from ebbench.analysis.documents import Column, Section, Value, average_row, comparison, labels, relative
from ebbench.analysis.sensitivity import Sensitivity, sensitivity
from ebbench.devices.costs import TableCost
from ebbench.devices.loader import DEFAULT_HOST, load_device
from ebbench.papers.options import PaperOptions
from ebbench.papers.protocols import protocol_cells, real_protocol, synthetic_protocol
from ebbench.papers.published import (
    GPUS,
    MAIN_MODEL,
    METRICS,
    MODELS,
    SYNTHETIC,
    WORKLOADS,
    best_sizes,
    gpu_title,
    model_title,
    pick,
)
from ebbench.papers.table import (
    PaperFigure,
    PaperTable,
    Published,
    Sections,
    beside,
    each,
    figure,
    policy_columns,
    policy_row,
)
from ebbench.render.figures import altair, values
from ebbench.render.palette import BLACK, policy_colours
from ebbench.runs.store import RunStore
from ebbench.spec.run import RunSpec
from ebbench.spec.server import DEFAULT_CLASS

# Tables 14 to 16: the grid over token budget B and batch size N, its best cell and its sensitivity metrics.

BUDGETS = (4096, 8192, 10240, 14336, 16384, 18432)
BATCHES = (256, 512, 1024, 1536, 2048)
SCHEDULERS = ("v0", "v1", "eb")
# Title, name in the reference table, our name, and the factor for our value.
_METRICS = (
    ("B", "max_num_batched_tokens", "best_budget", 1.0), ("N", "max_num_seqs", "best_size", 1.0),
    ("CV %", "cv_percent", "cv", 100.0), ("range", "range_ratio", "range_ratio", 1.0),
    ("B-Sens %", "b_sens_percent", "b_sens", 100.0), ("N-Sens %", "n_sens_percent", "n_sens", 100.0),
)  # fmt: skip
_SENSITIVITY = "table14_15_best_config_and_sensitivity"


def grid_cells(cell: RunSpec) -> list[RunSpec]:
    """The cell at every (B, N) of the published grid."""
    return [cell.changed(max_num_batched_tokens=b, max_num_seqs=n) for b in BUDGETS for n in BATCHES]


def real_cell(
    options: PaperOptions, device: str, model: str, workload: str, policy: str, sizes: tuple[int, int],
    weight: float = 1.0,
) -> RunSpec:  # fmt: skip
    """A cell of tables 2 and 14 to 16 at ``sizes`` (N, B), with the authors' lengths or those of table 9."""
    if workload in SYNTHETIC:
        protocol = synthetic_protocol(workload, policy, sizes)
    else:
        protocol = real_protocol(workload, model, policy, sizes)
        if options.outputs != "forced":
            protocol = replace(protocol, plan={**protocol.plan, "workload": workload})
    return protocol_cells(protocol, device, model, options.num_prompts, weight)[0]


def _rates(store: RunStore, cell: RunSpec) -> dict[tuple[int, int], float | None]:
    """Throughput over the grid by (B, N)."""
    at = {(c.server.max_num_batched_tokens, c.server.max_num_seqs): c for c in grid_cells(cell)}
    return {sizes: figure(store, cell, "request_throughput") for sizes, cell in at.items()}


def _swept(rates: Mapping[tuple[int, int], float | None]) -> Sensitivity | None:
    """The sensitivity of a complete grid; None while cells are missing."""
    known = {sizes: rate for sizes, rate in rates.items() if rate is not None}
    return sensitivity(known) if len(known) == len(rates) else None


def _base(options: PaperOptions, device: str, model: str, workload: str, scheduler: str) -> RunSpec:
    return real_cell(options, device, model, workload, scheduler, (256, 4096))


def _real_cells(device: str, options: PaperOptions) -> list[RunSpec]:
    """The cells of the chosen grids; by default only Qwen3-8B on ShareGPT, since all are 1,080 runs."""
    models, workloads = options.models or ("qwen3-8b",), options.workloads or ("sharegpt",)
    bases = [_base(options, device, m, w, s) for m in models for w in workloads for s in SCHEDULERS]
    return [cell for base in bases for cell in grid_cells(base)]


def _real_sections(device: str, options: PaperOptions, store: RunStore) -> Sections:
    columns = labels("workload", "model", "scheduler")
    for title, *_ in _METRICS:
        columns += beside(title)
    rows = []
    for workload in options.workloads or tuple(WORKLOADS):
        for model in options.models or tuple(MODELS):
            for scheduler in SCHEDULERS:
                swept = _swept(_rates(store, _base(options, device, model, workload, scheduler)))
                where = {"gpu": GPUS[device], "workload": WORKLOADS.get(workload, workload),
                         "model": model_title(model), "scheduler": scheduler}  # fmt: skip
                row: list[Value] = [where["workload"], where["model"], scheduler]
                for _, metric, name, scale in _METRICS:
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
                rates = _rates(store, _base(options, device, "qwen3-8b", workload, scheduler))
                swept = _swept(rates)
                loss = None if swept is None else relative(rates.get((int(b or 0), int(n or 0))), swept.best)
                best = _value(swept, "best_budget"), _value(swept, "best_size")
                rows.append((where["workload"], scheduler, b, best[0], n, best[1], loss))
        sections.append(Section(gpu_title(device), columns, tuple(rows)))
    return sections


_READS = ("model", "workload", "num_prompts", "outputs")
_PUBLISHED = Published(tuple(GPUS), tuple(MODELS))
TABLE14, TABLE15 = (
    PaperTable(name, _READS, partial(_real_sections, device), runs=partial(_real_cells, device), whole=False,
               published_on=_PUBLISHED, facts=globals())
    for name, device in zip(("table14", "table15"), GPUS, strict=True)
)  # fmt: skip
TABLE16 = PaperTable(
    "table16", ("device", "workload", "num_prompts"), _synthetic_document, runs=_synthetic_cells, whole=False,
    workloads=tuple(SYNTHETIC), published_on=_PUBLISHED,
)  # fmt: skip


# Policies on the EB paper's workloads: tables 2, 4 and 17, figures 4 to 6.

# Table 2 of the EB paper: requests/s on four real workloads, two models, two GPUs.

POLICIES = ("v0", "v1", "eb")
_MODELS2 = ("qwen3-8b", "qwen3-30b-a3b")
_WEIGHT = {"wildchat": 20.0, "numinamath": 10.0}


def table2_cell(options: PaperOptions, device: str, model: str, workload: str, policy: str) -> RunSpec:
    """The cell of one number, at the published best configuration."""
    sizes = best_sizes(device, policy, workload, model)
    return real_cell(options, device, model, workload, policy, sizes, _WEIGHT.get(workload, 1.0))


def _row2(options: PaperOptions, store: RunStore, device: str, model: str, workload: str) -> tuple[Value, ...]:
    where = {"gpu": gpu_title(device), "model": MODELS.get(model, model), "workload": WORKLOADS.get(workload, workload)}
    ours = {}
    for policy in (*POLICIES, *options.further(*POLICIES)):
        cell = table2_cell(options, device, model, workload, policy)
        best = _value(_swept(_rates(store, cell)), "best") if options.grid else None
        ours[policy] = best if options.grid else figure(store, cell, "request_throughput")
    published = {policy: pick("table2_throughput_rps", f"{policy}_rps", **where) for policy in POLICIES}
    return (model_title(model), where["workload"], *policy_row(published, ours, vs="v1"))


def _content2(options: PaperOptions, store: RunStore) -> Sections:
    columns = labels("model", "workload")
    columns += policy_columns(POLICIES, options.further(*POLICIES), vs_v1=True)
    sections = []
    for device in options.devices or GPUS:
        rows: list[tuple[Value, ...]] = []
        for model in options.models or _MODELS2:
            of_model = [_row2(options, store, device, model, name) for name in options.workloads or WORKLOADS]
            rows += [*of_model, average_row(of_model, columns, f"{model_title(model)}, average")]
        sections.append(Section(gpu_title(device), columns, tuple(rows)))
    return sections


TABLE2 = PaperTable(
    "table2", ("device", "model", "workload", "policy", "num_prompts", "grid", "outputs"), _content2,
    published_on=Published(tuple(GPUS), _MODELS2),
)  # fmt: skip


# Table 17 of the EB paper (appendix F.2): requests/s of Gemma-3-1B-IT on four real workloads, two GPUs.

MODEL17 = "gemma-3-1b-it"


def _section17(options: PaperOptions, store: RunStore, device: str) -> Section:
    columns, rows = labels("workload") + policy_columns(POLICIES), []
    for workload in options.workloads or WORKLOADS:
        cells = {p: table2_cell(options, device, MODEL17, workload, p) for p in POLICIES}
        served = {p: cell.changed(api_server=DEFAULT_CLASS) for p, cell in cells.items()}
        ours = {p: figure(store, cell, "request_throughput") for p, cell in served.items()}
        printed = {p: pick("table17_gemma_rps", p, gpu=gpu_title(device), workload=workload) for p in POLICIES}
        rows.append((WORKLOADS.get(workload, workload), *policy_row(printed, ours)))
    return Section(gpu_title(device), columns, (*rows, average_row(rows, columns, "Average")))


TABLE17 = PaperTable(
    "table17", ("device", "workload", "num_prompts", "outputs"),
    each(_section17, lambda options: product(options.devices or GPUS)), published_on=Published(tuple(GPUS), (MODEL17,)),
)  # fmt: skip


# Table 4 of the EB paper: WildChat on L40S and B300, the headline of 41.9 %.

DEVICES4 = ("b300", "l40s")
_MODEL4, _WORKLOAD4 = "qwen3-8b", "wildchat"
WHAT_IF_DEVICE = "l40s"
FACTORS = (1.0, 2.0, 4.0, 8.0)
_MEASURED_MIXED = ("rtx-pro-6000", "rtx-4090")
_CHUNK, _SEQS, _CONTEXT = 1024, 128, 1024


def _table4_cell(options: PaperOptions, device: str, policy: str) -> RunSpec:
    return table2_cell(options, device, options.model(_MODEL4), _WORKLOAD4, policy)


def _factors(options: PaperOptions) -> tuple[float, ...]:
    return FACTORS if WHAT_IF_DEVICE in (options.devices or DEVICES4) else ()


def _table4_rows(options: PaperOptions, store: RunStore, device: str) -> list[tuple[Value, ...]]:
    gpu, as_published = gpu_title(device), options.model(_MODEL4) == _MODEL4
    rows = []
    for column in ("rps", "ttft_s", "tpot_ms"):
        title, key, scale = METRICS[column]
        ours = {p: figure(store, _table4_cell(options, device, p), key, scale) for p in POLICIES}
        printed = {p: pick("table4_gpus_wildchat", column, gpu=gpu, scheduler=p) for p in POLICIES}
        rows.append((gpu, title, *policy_row(printed if as_published else dict.fromkeys(POLICIES), ours)))
    return rows


def _content4(options: PaperOptions, store: RunStore) -> Sections:
    rows = [row for device in options.devices or DEVICES4 for row in _table4_rows(options, store, device)]
    own = Section("", labels("GPU", "metric") + policy_columns(POLICIES), tuple(rows))
    return [own, _what_if(options, store)] if _factors(options) else [own]


def _what_if_notes(options: PaperOptions, _store: RunStore, _sections: Sections) -> Iterator[str]:
    if _factors(options):
        yield (
            "Factor: on what a mixed attention call costs beyond its pure parts; 1 is the RTX 4090's ratio as "
            "measured. Decode beside a prompt: attention time of 128 decodes of 1,024 tokens beside a prompt chunk of "
            "1,024, over their time alone; measured on the other two GPUs (the RTX PRO 6000's with its fitted factor "
            "of 1.37)."
        )


def _what_if(options: PaperOptions, store: RunStore) -> Section:
    """What the L40S's mixed attention would have to cost for the published gain."""
    columns = (
        *labels("GPU"), Column("factor"), Column("decode beside a prompt", show=lambda ratio: f"{ratio:.1f} x"),
        Column("v1 req/s", ours=True), Column("eb req/s", ours=True), Column("eb vs v1", "change", ours=True),
    )  # fmt: skip
    rows: list[tuple[Value, ...]] = []
    for factor in _factors(options):
        host = None if factor == 1.0 else replace(DEFAULT_HOST, mixed_excess=factor)
        cells = {p: replace(_table4_cell(options, WHAT_IF_DEVICE, p), host=host) for p in POLICIES[1:]}
        rates = {p: figure(store, cell, "request_throughput") for p, cell in cells.items()}
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
    "table4", ("device", "model", "num_prompts", "outputs"), _content4, findings=_what_if_notes,
    published_on=Published(DEVICES4, (_MODEL4,)),
)  # fmt: skip


# Figures 4, 5 and 6 of the EB paper: v0, v1 and EB(k*) on synthetic and real workloads, and on four more models.

_POLICY_TITLES = {"v0": "v0", "v1": "v1", "eb": "EB(k*)"}
_PUBLISHED_NAMES = {"v0": "v0", "v1": "v1", "eb": "Ours"}
MODELS6 = ("llama-3.1-8b", "mathstral-7b", "qwen2.5-coder-7b", "deepseek-r1-distill-qwen-7b")
Metric = tuple[str, str, str, float]
"""Our figure, the column of the published one, the axis title, the factor for ours."""


class Printed(NamedTuple):
    """Where published bars stand: the CSV, its column of what is along x, and what else a row must have."""

    table: str
    x: str
    where: Mapping[str, str]


def _bars(
    store: RunStore, xs: Mapping[str, str], cell: Callable[[str, str], RunSpec], metric: Metric,
    printed: Printed | None, title: str, *, log: bool, width: int,
) -> Any:  # fmt: skip
    """Bars of our results by policy, with a black tick for each published value; ``xs``: titles along x by what
    ``cell`` takes beside the policy."""
    key, column, unit, factor = metric
    alt = altair()
    ours: list[dict[str, Any]] = []
    published: list[dict[str, Any]] = []
    for at, x_title in xs.items():
        for policy in POLICIES:
            bar = {"x": x_title, "series": _POLICY_TITLES[policy]}
            if (value := figure(store, cell(at, policy), key, factor)) is not None:
                ours.append({**bar, "source": "ours", "value": value})
            if printed is None:
                continue
            where = {**printed.where, printed.x: x_title, "method": _PUBLISHED_NAMES[policy]}
            if (value := pick(f"eb_vllm/{printed.table}", column, **where)) is not None:
                published.append({**bar, "source": "published", "value": value})
    names = [_POLICY_TITLES[policy] for policy in POLICIES]
    marks = ["published"] if published else []
    scheme = alt.Scale(domain=[*names, *marks], range=[*policy_colours(POLICIES), BLACK][: len(names) + len(marks)])
    floor = min((row["value"] for row in (*ours, *published)), default=1.0) / 2
    scale = alt.Scale(type="log", domainMin=floor, nice=False) if log else alt.Scale()
    x = alt.X("x:N", sort=list(xs.values()), title=None, axis=alt.Axis(labelAngle=-20))
    offset = alt.XOffset("series:N", sort=names)
    bars = alt.Chart(values([{**row, "floor": floor if log else 0} for row in ours])).mark_bar()
    bars = bars.encode(
        x=x, xOffset=offset, y=alt.Y("value:Q", title=unit, scale=scale), y2="floor:Q",
        color=alt.Color("series:N", scale=scheme, sort=None, title=None),
    )  # fmt: skip
    ticks = alt.Chart(values([{**row, "mark": "published"} for row in published]))
    ticks = ticks.mark_tick(thickness=2.5, size=13, opacity=1).encode(
        x=x, xOffset=offset, y=alt.Y("value:Q", scale=scale),
        color=alt.Color("mark:N", scale=scheme, sort=None, title=None),
    )  # fmt: skip
    layers = [bars, ticks] if published else [bars]
    return alt.layer(*layers).properties(width=width, height=140, title=title)


# Figure 4: synthetic workloads.

_RATE: Metric = ("request_throughput", "rps", "requests/s", 1.0)
_TTFT: Metric = ("mean_ttft_ms", "ttft_s", "TTFT, s", 1e-3)
_TPOT: Metric = ("mean_tpot_ms", "tpot_ms", "TPOT, ms", 1.0)
_ITL: Metric = ("mean_itl_ms", "itl_s", "ITL, s", 1e-3)


def _cell4(options: PaperOptions, device: str, workload: str, policy: str) -> RunSpec:
    sizes = best_sizes(device, policy, workload, MAIN_MODEL)
    return real_cell(options, device, options.model(), workload, policy, sizes)


def _chart4(options: PaperOptions, store: RunStore, published: bool) -> Any:
    alt, lines = altair(), []
    for device in options.devices or GPUS:
        cell, gpu = partial(_cell4, options, device), gpu_title(device)
        printed = Printed("figure4_synthetic_e2e", "workload", {"gpu": gpu}) if published else None
        panels = [
            _bars(store, SYNTHETIC, cell, metric, printed, "" if at else gpu, log=False, width=190)
            for at, metric in enumerate((_RATE, _ITL, _TTFT))
        ]
        lines.append(alt.hconcat(*panels).resolve_scale(y="independent"))
    return alt.vconcat(*lines)


# Figure 5: latency on real workloads.


def _chart5(options: PaperOptions, store: RunStore, published: bool) -> Any:
    alt, lines = altair(), []
    xs = {workload: WORKLOADS.get(workload, workload) for workload in options.workloads or WORKLOADS}
    for metric in (_TTFT, _TPOT):
        for device in options.devices or GPUS:
            panels = []
            for model in options.models or _MODELS2:
                cell, where = partial(table2_cell, options, device, model), {"gpu": gpu_title(device)}
                printed = Printed("figure5_latency", "workload", where | {"model": model_title(model)})
                title = f"{gpu_title(device)}, {model_title(model)}"
                panels.append(
                    _bars(store, xs, cell, metric, printed if published else None, title, log=True, width=290)
                )
            lines.append(alt.hconcat(*panels))
    return alt.vconcat(*lines)


# Figure 6: four more models.


def _cell6(options: PaperOptions, model: str, policy: str) -> RunSpec:
    device = options.device()
    sizes = best_sizes(device, policy, "wildchat", MAIN_MODEL)
    return real_cell(options, device, model, "wildchat", policy, sizes, weight=20)


def _chart6(options: PaperOptions, store: RunStore, published: bool) -> Any:
    printed = Printed("figure6_models", "model", {"gpu": gpu_title(options.device())}) if published else None
    xs = {model: model for model in options.models or MODELS6}
    panels = [
        _bars(store, xs, partial(_cell6, options), metric, printed, "", log=False, width=230)
        for metric in (_RATE, _TTFT, _TPOT)
    ]
    return altair().hconcat(*panels).resolve_scale(y="independent")


FIGURE4 = PaperFigure(
    "figure4", ("device", "model", "num_prompts"), _chart4, published_on=Published(tuple(GPUS), (MAIN_MODEL,))
)
FIGURE5 = PaperFigure(
    "figure5", ("device", "model", "workload", "num_prompts", "outputs"), _chart5,
    published_on=Published(tuple(GPUS), tuple(MODELS)),
)  # fmt: skip
FIGURE6 = PaperFigure(
    "figure6", ("device", "model", "num_prompts", "outputs"), _chart6,
    published_on=Published(("rtx-pro-6000",), MODELS6),
)  # fmt: skip
