"""Tables 5 and 7 and figure 7 of the EB paper (appendix A.1): how linear a prefill step's time is in its tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ebbench.analysis.documents import Column, Document, Section, Value, comparison, labels
from ebbench.devices import load_device
from ebbench.devices.base import CostModel
from ebbench.devices.layers import MAX_TOKENS
from ebbench.devices.linear import DECODE_CONTEXT_TOKENS, DECODE_SEQS, PREFILL_TOKENS, decode_shape, prefill_shape
from ebbench.devices.profiles import find_model
from ebbench.errors import UsageError
from ebbench.papers.eb.table06 import MODELS as MODELS_WITH_DEVICE
from ebbench.papers.published import EB_PAPER, gpu_title, rows
from ebbench.papers.table import PaperFigure, PaperOptions, PaperTable, Published, no_cells
from ebbench.render.figures import altair, colour, dash, values
from ebbench.render.palette import BLACK, BLUE, GREEN, ORANGE, PURPLE, VERMILION
from ebbench.runs.store import RunStore

DEVICE = "rtx-pro-6000"
_NAMES = (
    "Qwen3-4B", "Qwen3-8B", "Qwen3-14B", "Qwen3-30B-A3B", "Llama-3.2-1B", "Llama-3.1-8B", "Mistral-Nemo-12B",
)  # fmt: skip
MODELS: Mapping[str, str | None] = {name: MODELS_WITH_DEVICE.get(name) for name in _NAMES}
"""The tables' models; None: no device here."""
LIMITS = {5: (4_096, 8_192, 16_384), 7: (32_768, 65_536, 131_072)}
"""Longest prompt (tokens) of each row, by table; an assumption: the rows' labels are not legible in our copy."""
POINTS = 32
_TABLE = "table5_table7_prefill_r2"
_ASSUMED = (
    "The ranges are assumed: the rows' labels are not legible in our copy. The text says budgets of 2K to 8K tokens, "
    "up to 16K, and 128K at most in table 7; each range twice the one before fits that. Ours: least squares over 32 "
    "lengths evenly spaced up to the range's end, with the device's cost model in place of a GPU."
)
_MISSING = "Llama-3.2-1B has no device here."


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


def _published(table: int, row: int) -> Mapping[str, str]:
    return next(each for each in rows(_TABLE) if (each["table"], each["row"]) == (str(table), str(row)))


def _shown(value: float) -> str:
    return f"{value:.4f}"


def _fits(options: PaperOptions, table: int) -> Section:
    names = [name for name, model in MODELS.items() if not options.models or model in options.models]
    costs = {name: _cost(model) for name in names if (model := MODELS[name]) is not None}
    columns: tuple[Column, ...] = labels("model")
    for limit in LIMITS[table]:
        group = f"up to {limit:,} tokens"
        columns += (Column("published", group=group, show=_shown), Column("ours", group=group, ours=True, show=_shown))
    found = []
    for name in names:
        row: list[Value] = [name]
        for number, limit in enumerate(LIMITS[table], start=1):
            ours = prefill_r2(costs[name], limit) if name in costs else None
            row += comparison(float(_published(table, number)[name]), ours)[:2]
        found.append(tuple(row))
    return Section(f"R² of a line through prefill times, {gpu_title(DEVICE)}", columns, tuple(found))


def _calibrations(options: PaperOptions) -> Section:
    """The authors' own fits, over the lengths and batches that their calibration files name."""
    columns: tuple[Column, ...] = labels("GPU", "model")
    for group in ("prefill", "decode"):
        columns += (Column("published", group=group, show=_shown), Column("ours", group=group, ours=True, show=_shown))
    found = []
    for row in rows("calibration", "eb_vllm"):
        device = "h200" if "H200" in row["device_name"] else DEVICE
        model = find_model(row["model"].replace("Meta-Llama", "Llama")).name
        if options.models and model not in options.models:
            continue
        cost = _cost(model, device)
        prefill = r_squared(PREFILL_TOKENS, [cost.step_s(prefill_shape(n)) for n in PREFILL_TOKENS])
        context = DECODE_CONTEXT_TOKENS
        decode = r_squared(DECODE_SEQS, [cost.step_s(decode_shape(n, context)) for n in DECODE_SEQS])
        published = float(row["prefill_r2"]), float(row["decode_r2"])
        found.append((gpu_title(device), model, published[0], prefill, published[1], decode))
    return Section("R² of the authors' calibration files, 256 to 4,096 tokens", columns, tuple(found))


def _document5(options: PaperOptions, store: RunStore) -> Document:
    notes = (
        f"Published: {EB_PAPER}, table 5. {_ASSUMED}",
        "Decode: 16 to 1,024 sequences of 512 tokens; the authors' context is not stated.",
        _MISSING,
    )
    title = "Table 5: linearity of prefill times within practical budgets"
    return Document("table5", title, (_fits(options, 5), _calibrations(options)), notes)


def _document7(options: PaperOptions, store: RunStore) -> Document:
    notes = (
        f"Published: {EB_PAPER}, table 7: one step computes a prompt of up to 128K tokens. {_ASSUMED}",
        f"Step times here end at {MAX_TOKENS:,} tokens a step; rows beyond have none of ours.",
        _MISSING,
    )
    return Document("table7", "Table 7: linearity of prefill times beyond practice", (_fits(options, 7),), notes)


_PUBLISHED = Published((DEVICE,), tuple(model for model in MODELS.values() if model))
TABLE5 = PaperTable(
    "table5", "linearity of prefill times within budgets", no_cells, _document5, ("model",),
    published_on=_PUBLISHED,
)  # fmt: skip
TABLE7 = PaperTable(
    "table7", "linearity of prefill times up to 128K tokens", no_cells, _document7, ("model",),
    published_on=_PUBLISHED,
)  # fmt: skip

_COLOURS = (BLUE, VERMILION, GREEN, ORANGE, BLACK, PURPLE)
_TIMES = tuple(2048 * i for i in range(1, MAX_TOKENS // 2048 + 1))
_RANGES = (4096, 8192, 16_384, 32_768, 49_152, MAX_TOKENS)


def _chart(options: PaperOptions, store: RunStore, published: bool) -> Any:
    alt = altair()
    names = {name: model for name, model in MODELS.items() if model and model in (options.models or (model,))}
    if not names:
        raise UsageError(
            f"figure7 has none of {', '.join(options.models)}; it has {', '.join(filter(None, MODELS.values()))}"
        )
    costs = {name: _cost(model) for name, model in names.items()}
    times = [
        {"x": n, "value": cost.step_s(prefill_shape(n)), "series": name} for name, cost in costs.items() for n in _TIMES
    ]
    fits = [{"x": n, "value": prefill_r2(cost, n), "series": name} for name, cost in costs.items() for n in _RANGES]
    printed = [
        {"x": limit, "value": float(_published(table, number)[name]), "series": name}
        for table, limits in LIMITS.items()
        for number, limit in enumerate(limits, start=1)
        for name in costs
    ]
    hues = colour(list(names), _COLOURS[: len(names)])
    x = alt.X("x:Q", title="tokens in the step", scale=alt.Scale(domain=[0, MAX_TOKENS]))
    left = alt.Chart(values(times)).mark_line(strokeWidth=1.8)
    left = left.encode(x=x, y=alt.Y("value:Q", title="step time, s"), color=hues, strokeDash=dash(list(names)))
    far = alt.X("x:Q", title="fit up to this many tokens", scale=alt.Scale(domain=[0, LIMITS[7][-1]]))
    y = alt.Y("value:Q", title="R² of a line", scale=alt.Scale(zero=False))
    lines = alt.Chart(values(fits)).mark_line(strokeWidth=1.8)
    lines = lines.encode(x=far, y=y, color=hues, strokeDash=dash(list(names)))
    marks = alt.Chart(values(printed)).mark_point(shape="cross", filled=True, size=40).encode(x=far, y=y, color=hues)
    return alt.hconcat(
        left.properties(width=270, height=200, title=gpu_title(DEVICE)),
        alt.layer(lines, marks).properties(width=270, height=200, title="lines: ours; crosses: published"),
    )


FIGURE7 = PaperFigure(
    "figure7",
    "prefill time over a step's tokens, and R² of its linear fit",
    no_cells,
    _chart,
    "Lines: ours, up to the 65,536 tokens at which step times end here. Crosses: tables 5 and 7, at assumed ranges "
    "(their labels are not legible in our copy). The measured curves of the left panel are not published as numbers.",
    ("model",),
    published_on=_PUBLISHED,
)
