"""Long prompts in the EB paper: how linear their times are (tables 5, 7, figure 7); 128K tokens in, 64 out (6)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import product
from typing import Any

import numpy as np

from ebbench.analysis.documents import Column, Section, Value, comparison, labels, relative
from ebbench.config.topology import DECODE_UTILIZATION, PoolSpec
from ebbench.devices.base import CostModel, Device
from ebbench.devices.costs import DECODE_CONTEXT_TOKENS, DECODE_SEQS, PREFILL_TOKENS, decode_shape, prefill_shape
from ebbench.devices.layers import MAX_TOKENS
from ebbench.devices.loader import load_device, unit_device
from ebbench.devices.profiles import find_model
from ebbench.errors import UsageError
from ebbench.papers.eb.disaggregation import value_or_oom
from ebbench.papers.options import PaperOptions
from ebbench.papers.protocols import ASYNC_SCHEDULING, VLLM, Protocol, long_context_protocol, protocol_cells
from ebbench.papers.published import GPUS, gpu_title, model_title, rows
from ebbench.papers.table import (
    PaperFigure,
    PaperTable,
    Published,
    Sections,
    beside,
    each,
    figure,
    no_runs,
    ours,
    policy_columns,
    policy_row,
)
from ebbench.render.figures import altair, colour, lines, values
from ebbench.render.palette import BLACK, BLUE, GREEN, ORANGE, PURPLE, VERMILION
from ebbench.runs.store import RunStore
from ebbench.spec.run import RunSpec, simulated

# Table 6 of the EB paper (appendix A.1): 128K tokens in, 64 out, seven models on one RTX PRO 6000.

TABLE6_ROWS = "table6_128k_tokens_per_s"
DEVICE = "rtx-pro-6000"
TABLE6_MODELS: Mapping[str, str] = {
    "Qwen3-4B": "qwen3-4b", "Qwen3-8B": "qwen3-8b", "Qwen3-14B": "qwen3-14b", "Qwen3-30B-A3B": "qwen3-30b-a3b",
    "Llama-3.1-8B": "llama-3.1-8b", "Mistral-Nemo-12B": "mistral-nemo",
}  # fmt: skip
"""The table's models that have a device here, by their printed names; Llama-3.2-1B has none."""
TABLE6_POLICIES = ("v1", "eb")


def table6_protocol(policy: str, concurrency: int) -> Protocol:
    """A cell: 16 requests, as many open as fit on the GPU without running out of memory (printed)."""
    return long_context_protocol(policy, 131_071, concurrency, max_model_len=163_840)


def _table6_section(options: PaperOptions, store: RunStore, device: str) -> Section:
    further = options.further(*TABLE6_POLICIES)
    columns = (*labels("model"), Column("open requests"), *policy_columns(TABLE6_POLICIES, further, "eb over v1"))
    lines = []
    for row in rows(TABLE6_ROWS):
        model, most_open = TABLE6_MODELS.get(row["model"]), int(row["concurrency"])
        if model is None or model not in (options.models or (model,)):
            continue
        protocols = {policy: table6_protocol(policy, most_open) for policy in (*TABLE6_POLICIES, *further)}
        cells = {
            p: protocol_cells(protocol, device, model, options.num_prompts)[0] for p, protocol in protocols.items()
        }
        rates = {policy: figure(store, cell, "total_token_throughput") for policy, cell in cells.items()}
        printed = {policy: float(row[policy]) if device == DEVICE else None for policy in TABLE6_POLICIES}
        lines.append((row["model"], most_open, *policy_row(printed, rates)))
    return Section(gpu_title(device), columns, tuple(lines))


TABLE6 = PaperTable(
    "table6", ("device", "model", "policy", "num_prompts"),
    each(_table6_section, lambda options: product(options.devices or (DEVICE,))), whole=False,
    published_on=Published((DEVICE,), tuple(TABLE6_MODELS.values())),
)  # fmt: skip


# Tables 5 and 7 and figure 7 of the EB paper (appendix A.1): how linear a prefill step's time is in its tokens.

_NAMES = (
    "Qwen3-4B", "Qwen3-8B", "Qwen3-14B", "Qwen3-30B-A3B", "Llama-3.2-1B", "Llama-3.1-8B", "Mistral-Nemo-12B",
)  # fmt: skip
LINEAR_MODELS: Mapping[str, str | None] = {name: TABLE6_MODELS.get(name) for name in _NAMES}
"""The tables' models; None: no device here."""
LIMITS = {5: (4_096, 8_192, 16_384), 7: (32_768, 65_536, 131_072)}
"""Longest prompt (tokens) of each row, by table; an assumption: the rows' labels are not legible in our copy."""
POINTS = 32
_TABLE = "table5_table7_prefill_r2"


def r_squared(x: Sequence[float], y: Sequence[float]) -> float:
    """The share of the variance of ``y`` that its best line over ``x`` explains."""
    return float(np.corrcoef(np.asarray(x, float), np.asarray(y, float))[0, 1] ** 2)


def prefill_r2(cost: CostModel, limit: int) -> float | None:
    """R² of a line through step times of single prompts of up to ``limit`` tokens; None beyond the longest step."""
    if limit > MAX_TOKENS:
        return None
    lengths = [limit * i // POINTS for i in range(1, POINTS + 1)]
    return r_squared(lengths, [cost.step_s(prefill_shape(n)) for n in lengths])


def _cost(model: str, device: str = DEVICE) -> CostModel:
    return load_device(device, model, async_scheduling=False).cost


def _printed_r2(table: int, row: int) -> Mapping[str, str]:
    return next(printed for printed in rows(_TABLE) if (printed["table"], printed["row"]) == (str(table), str(row)))


def _fits(options: PaperOptions, table: int) -> Section:
    names = [name for name, model in LINEAR_MODELS.items() if not options.models or model in options.models]
    costs = {name: _cost(model) for name in names if (model := LINEAR_MODELS[name]) is not None}
    columns: tuple[Column, ...] = labels("model")
    for limit in LIMITS[table]:
        columns += beside(f"up to {limit:,} tokens", show="{:.4f}".format)
    lines = []
    for name in names:
        row: list[Value] = [name]
        for number, limit in enumerate(LIMITS[table], start=1):
            ours = prefill_r2(costs[name], limit) if name in costs else None
            row += comparison(float(_printed_r2(table, number)[name]), ours)[:2]
        lines.append(tuple(row))
    return Section(f"R² of a line through prefill times, {gpu_title(DEVICE)}", columns, tuple(lines))


def _calibrations(options: PaperOptions) -> Section:
    """The authors' own fits, over the lengths and batches that their calibration files name."""
    columns = labels("GPU", "model") + beside("prefill", show="{:.4f}".format) + beside("decode", show="{:.4f}".format)
    lines = []
    for row in rows("eb_vllm/calibration"):
        device = "h200" if "H200" in row["device_name"] else DEVICE
        model = find_model(row["model"].replace("Meta-Llama", "Llama")).name
        if options.models and model not in options.models:
            continue
        cost = _cost(model, device)
        prefill = r_squared(PREFILL_TOKENS, [cost.step_s(prefill_shape(n)) for n in PREFILL_TOKENS])
        context = DECODE_CONTEXT_TOKENS
        decode = r_squared(DECODE_SEQS, [cost.step_s(decode_shape(n, context)) for n in DECODE_SEQS])
        published = float(row["prefill_r2"]), float(row["decode_r2"])
        lines.append((gpu_title(device), model, published[0], prefill, published[1], decode))
    return Section("R² of the authors' calibration files, 256 to 4,096 tokens", columns, tuple(lines))


_LINEAR_PUBLISHED = Published((DEVICE,), tuple(model for model in LINEAR_MODELS.values() if model))
TABLE5 = PaperTable(
    "table5", ("model",), lambda options, _store: (_fits(options, 5), _calibrations(options)),
    published_on=_LINEAR_PUBLISHED, runs=no_runs,
)  # fmt: skip
TABLE7 = PaperTable(
    "table7", ("model",), lambda options, _store: [_fits(options, 7)], published_on=_LINEAR_PUBLISHED, facts=globals(),
    runs=no_runs,
)  # fmt: skip

_MODEL_COLOURS = (BLUE, VERMILION, GREEN, ORANGE, BLACK, PURPLE)
_TIMES = tuple(2048 * i for i in range(1, MAX_TOKENS // 2048 + 1))
_RANGES = (4096, 8192, 16_384, 32_768, 49_152, MAX_TOKENS)


def _chart7(options: PaperOptions, store: RunStore, published: bool) -> Any:
    alt = altair()
    names = {name: model for name, model in LINEAR_MODELS.items() if model and model in (options.models or (model,))}
    if not names:
        raise UsageError(
            f"figure7 has none of {', '.join(options.models)}; it has {', '.join(filter(None, LINEAR_MODELS.values()))}"
        )
    costs = {name: _cost(model) for name, model in names.items()}
    times = [
        {"x": n, "value": cost.step_s(prefill_shape(n)), "series": name} for name, cost in costs.items() for n in _TIMES
    ]
    fits = [{"x": n, "value": prefill_r2(cost, n), "series": name} for name, cost in costs.items() for n in _RANGES]
    printed = [
        {"x": limit, "value": float(_printed_r2(table, number)[name]), "series": name}
        for table, limits in LIMITS.items()
        for number, limit in enumerate(limits, start=1)
        for name in costs
    ]
    hues = list(names), _MODEL_COLOURS[: len(names)]
    x = alt.X("x:Q", title="tokens in the step", scale=alt.Scale(domain=[0, MAX_TOKENS]))
    left = lines(times, x, alt.Y("value:Q", title="step time, s"), *hues)
    far = alt.X("x:Q", title="fit up to this many tokens", scale=alt.Scale(domain=[0, LIMITS[7][-1]]))
    y = alt.Y("value:Q", title="R² of a line", scale=alt.Scale(zero=False))
    marks = alt.Chart(values(printed)).mark_point(shape="cross", filled=True, size=40)
    right = alt.layer(lines(fits, far, y, *hues), marks.encode(x=far, y=y, color=colour(*hues)))
    return alt.hconcat(
        left.properties(width=270, height=200, title=gpu_title(DEVICE)),
        right.properties(width=270, height=200, title="lines: ours; crosses: published"),
    )


FIGURE7 = PaperFigure("figure7", ("model",), _chart7, published_on=_LINEAR_PUBLISHED, runs=no_runs)


# 128K tokens in, 64 out, on two GPUs at the concurrency that fits into memory; table 6 of the EB paper has one GPU.

INPUT, OUTPUT = 131_072, 64
BUDGET, SEQS = 8192, 256
LONG_MODELS = ("qwen3-4b", "qwen3-8b", "qwen3-14b", "qwen3-30b-a3b", "llama-3.1-8b")
_LONG_KINDS = {"v1": ("dp=2", "v1"), "eb": ("dp=2", "eb"), "ebplus": ("dp=2", "ebplus"), "1P+1D": ("1p1d", "v1")}
_LONG_METRICS = {
    "out tok/s": ("output_throughput", 1.0),
    "TTFT s": ("mean_ttft_ms", 1e-3),
    "TPOT ms": ("mean_tpot_ms", 1.0),
}


@cache
def _loaded(device: str, model: str) -> Device:
    return load_device(device, model, max_num_seqs=SEQS, max_num_batched_tokens=BUDGET, vllm_version=VLLM)


@cache
def concurrency(device: str, model: str) -> int | None:
    """Number of requests that one GPU's KV cache holds; None if it holds none."""
    try:
        return _loaded(device, model).kv_capacity_tokens // (INPUT + OUTPUT) or None
    except UsageError:
        return None


@cache
def _fits_decode(device: str, model: str) -> bool:
    """Whether a decode GPU, which reserves memory for received KV, holds one request."""
    try:
        unit = unit_device(_loaded(device, model), PoolSpec(), DECODE_UTILIZATION, SEQS, BUDGET)
    except UsageError:
        return False
    return unit.device.kv_capacity_tokens >= INPUT + OUTPUT


def _long_cell(options: PaperOptions, device: str, model: str, kind: str) -> RunSpec | None:
    most_open, (topology, policy) = concurrency(device, model), _LONG_KINDS[kind]
    if most_open is None or (topology == "1p1d" and not _fits_decode(device, model)):
        return None
    return simulated(
        "balanced", policy, device, model, SEQS, BUDGET, topology=topology, num_prompts=options.num_prompts or 120,
        max_concurrency=2 * most_open, input_len=INPUT, output_len=OUTPUT, length_distribution="fixed",
        max_model_len=INPUT + OUTPUT, async_scheduling=ASYNC_SCHEDULING, vllm_version=VLLM,
    )  # fmt: skip


def _long_section(options: PaperOptions, store: RunStore, device: str) -> Section:
    columns = (*labels("model"), Column("requests per GPU"))
    for name in _LONG_METRICS:
        columns += ours(*_LONG_KINDS, group=name)
    columns += (Column("eb vs v1", "change", ours=True), Column("ebplus vs v1", "change", ours=True))
    lines = []
    for model in options.models or LONG_MODELS:
        cells = {kind: _long_cell(options, device, model, kind) for kind in _LONG_KINDS}
        row: list[Value] = [model_title(model), concurrency(device, model)]
        for key, scale in _LONG_METRICS.values():
            by_kind = {k: None if cell is None else store.get(cell) for k, cell in cells.items()}
            row += ["does not fit" if cells[k] is None else value_or_oom(by_kind[k], key, scale) for k in cells]
        rates = dict(zip(cells, row[2:], strict=False))
        lines.append((*row, relative(rates["eb"], rates["v1"]), relative(rates["ebplus"], rates["v1"])))
    return Section(f"{gpu_title(device)}, two GPUs", columns, tuple(lines))


def _long_findings(_options: PaperOptions, _store: RunStore, sections: Sections) -> Iterator[str]:
    """On how many models EB is ahead of v1, and by how much."""
    for section in sections:
        changes = [value for row in section.rows if isinstance(value := row[-2], float)]
        if changes:
            ahead = sum(change > 0 for change in changes)
            yield (
                f"{section.title}: EB has more throughput than v1 on {ahead} of {len(changes)} models, by "
                f"{100 * min(changes):+.1f} to {100 * max(changes):+.1f} %. Exclusive steps halve the time per token, "
                "which here is nearly all prompts of others, and double the wait for the first; prompts are almost all "
                "of the work, so throughput hardly depends on how steps are put together. Pools halve it: the decode "
                "GPU has next to nothing to do."
            )


LONG_CONTEXT = PaperTable(
    "long-context", ("device", "model", "num_prompts"),
    each(_long_section, lambda options: product(dict.fromkeys(options.devices or GPUS))), findings=_long_findings,
    whole=False, published_on=Published(tuple(GPUS), LONG_MODELS), facts=globals(),
)  # fmt: skip
