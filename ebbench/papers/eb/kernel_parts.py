"""Figures 2, 8, 9 and 10 of the EB paper (section 1, appendix A.2): where a step's time goes, by batch composition."""

from __future__ import annotations

from typing import Any, NamedTuple

from ebbench.devices.base import StepShape
from ebbench.devices.describe import marginal_curve
from ebbench.devices.layers import MAX_SAMPLED, MAX_TOKENS
from ebbench.devices.linear import decode_shape, mixed_shape, prefill_shape
from ebbench.devices.table import TableCost
from ebbench.errors import UsageError
from ebbench.papers.eb.figure01 import CONTEXT_TOKENS, FIGURE1_MODEL, device_cost, time_panel
from ebbench.papers.published import gpu_title, rows
from ebbench.papers.table import PaperFigure, PaperOptions, Published, no_cells
from ebbench.render.figures import altair, colour, dash, values
from ebbench.render.palette import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, STEPS, VERMILION
from ebbench.runs.store import RunStore

GPUS = ("rtx-pro-6000", "h200")
FURTHER_MODELS = ("gemma-3-1b-it", "qwen3-8b", "qwen3-30b-a3b")
TOKENS = 1024
SHARES = tuple(round(0.05 * i, 2) for i in range(21))
_PARTS = ("matrix products and small kernels", "attention", "head and sampling")
_COLOURS = (BLUE, VERMILION, GREEN)
_WIDTH, _HEIGHT = 270, 170


class StepParts(NamedTuple):
    """GPU time (s) of one step: everything by tokens, attention, everything by sampled sequences."""

    dense_s: float
    attention_s: float
    head_s: float


def step_parts(cost: TableCost, shape: StepShape) -> StepParts:
    """The parts of a step's GPU time."""
    tokens = shape.decode_seqs + sum(chunk for chunk, _ in shape.prefill)
    dense, head = cost.dense_s[min(tokens, MAX_TOKENS)], cost.head_s[min(shape.sampled_seqs, MAX_SAMPLED)]
    return StepParts(dense, cost.gpu_s(shape) - dense - head, head)


def composed(tokens: int, share: float, context: int) -> StepShape:
    """A step of ``tokens`` tokens, of which the share ``share`` are decodes; 0 and 1 are pure steps."""
    if share == 0.0:
        return prefill_shape(tokens)
    return decode_shape(tokens, context) if share == 1.0 else mixed_shape(tokens, share, context)


def table_cost_of(device: str, model: str) -> TableCost:
    """The kernel-table cost model. Raises UsageError for a device that has none."""
    cost = device_cost(device, model)
    if not isinstance(cost, TableCost):
        raise UsageError(f"{device} has no kernel tables, so its steps have no parts to show")
    return cost


def _share_axis(alt: Any) -> Any:
    axis, scale = alt.Axis(format="%"), alt.Scale(domain=[0, 1])
    return alt.X("r:Q", title="decode share of the step's tokens", axis=axis, scale=scale)


def _mixed_lines_and_pure_points(found: list[dict[str, Any]]) -> tuple[Any, Any]:
    """Lines over the mixed steps, and points for the pure ones, since time jumps between the two."""
    alt = altair()
    mixed = [row for row in found if 0.0 < row["r"] < 1.0]
    pure = [row for row in found if not 0.0 < row["r"] < 1.0]
    points = alt.Chart(values(pure)).mark_point(filled=True, size=36, opacity=1)
    return alt.Chart(values(mixed)).mark_line(strokeWidth=1.8), points


def _parts_panel(device: str, model: str) -> Any:
    alt = altair()
    cost = table_cost_of(device, model)
    found = [
        {"r": r, "value": 1e3 * part, "series": name}
        for r in SHARES
        for name, part in zip(_PARTS, step_parts(cost, composed(TOKENS, r, CONTEXT_TOKENS)), strict=True)
    ]
    y = alt.Y("value:Q", title="GPU time of a step, ms")
    chart = _mixed_lines_and_pure_points(found)
    hues = colour(_PARTS, _COLOURS, legend=alt.Legend(symbolType="stroke"))
    layers = [layer.encode(x=_share_axis(alt), y=y, color=hues) for layer in chart]
    layers[0] = layers[0].encode(strokeDash=dash(_PARTS))
    decode_ms = 1e3 * step_parts(cost, composed(TOKENS, 1.0, CONTEXT_TOKENS)).attention_s
    rule = alt.Chart(values([{"value": decode_ms}])).mark_rule(color=GREY, strokeDash=[2, 2]).encode(y=y)
    return alt.layer(rule, *layers).properties(width=_WIDTH, height=_HEIGHT, title=f"{gpu_title(device)}, {model}")


def measured_attention(device: str) -> list[dict[str, Any]]:
    """One FlashAttention call in ms, as published for a GPU and as our tables have it, by kind of batch."""
    ((_, attention),) = table_cost_of(device, FIGURE1_MODEL).attention  # one kind of layer
    found = []
    for row in rows(f"attention_kernel_{device.replace('-', '')}", "eb_vllm"):
        prompts, decodes = int(row["num_prefill"]), int(row["num_decode"])
        length = int(row["prefill_len"] or row["context_len"])
        ours = attention.step_s(((length, 0),) * prompts, decodes, decodes * length)
        kind = "mixed batch" if prompts and decodes else "prefill only" if prompts else "decode only"
        found.append({"measured": float(row["time_ms"]), "ours": 1e3 * ours, "series": kind})
    return found


def _attention_panel(device: str) -> Any:
    alt = altair()
    kinds = {"mixed batch": STEPS["mixed"], "decode only": STEPS["decode"], "prefill only": STEPS["prefill"]}
    names = tuple(kinds)
    scale = alt.Scale(type="log", domain=[0.005, 100], nice=False)
    shape = alt.Shape("series:N", scale=alt.Scale(domain=names, range=["circle", "triangle-up", "square"]), title=None)
    points = alt.Chart(values(measured_attention(device))).mark_point(size=32, opacity=0.75, filled=True)
    points = points.encode(
        x=alt.X("measured:Q", title="published attention call, ms", scale=scale),
        y=alt.Y("ours:Q", title="ours, ms", scale=scale),
        color=colour(names, tuple(kinds.values())),
        shape=shape,
    )
    ends = values([{"x": 0.005, "y": 0.005}, {"x": 100, "y": 100}])
    diagonal = alt.Chart(ends).mark_line(color=GREY).encode(x="x:Q", y="y:Q")
    return alt.layer(diagonal, points).properties(width=_WIDTH, height=_HEIGHT, title=f"{gpu_title(device)}, one layer")


def _chart2(options: PaperOptions, store: RunStore, published: bool) -> Any:
    alt = altair()
    devices = options.devices or GPUS
    parts = alt.hconcat(*(_parts_panel(device, options.model(FIGURE1_MODEL)) for device in devices))
    printed = [device for device in devices if device in GPUS]
    if not published or not printed:
        return parts
    checks = alt.hconcat(*(_attention_panel(device) for device in printed))
    return alt.vconcat(parts, checks).resolve_scale(color="independent", strokeDash="independent", shape="independent")


def _crossing_title(device: str, model: str) -> str:
    crossover = marginal_curve(device_cost(device, model), CONTEXT_TOKENS).crossover
    said = "no crossover" if crossover is None else f"crossover at r = {crossover:.2f}"
    return f"{gpu_title(device)}, {model}: {said}"


def _chart8(options: PaperOptions, store: RunStore, published: bool) -> Any:
    alt = altair()
    devices, models = options.devices or GPUS, options.models or FURTHER_MODELS
    lines = [alt.hconcat(*(time_panel(d, m, _crossing_title(d, m)) for d in devices)) for m in models]
    return alt.vconcat(*lines)


def _chart9(options: PaperOptions, store: RunStore, published: bool) -> Any:
    alt = altair()
    devices, models = options.devices or GPUS, options.models or FURTHER_MODELS
    return alt.vconcat(*(alt.hconcat(*(_parts_panel(device, model) for device in devices)) for model in models))


CONTEXTS = (64, 128, 256, 512, 1024)
PUBLISHED_ATTENTION_MS = ((0.8, 26.0), (0.8, 10.0))
"""Longest and shortest context of figure 10 at a decode share of 80 %, from the text."""
_CONTEXT_COLOURS = (SKY, GREEN, ORANGE, PURPLE, BLACK)


def _chart10(options: PaperOptions, store: RunStore, published: bool) -> Any:
    alt = altair()
    device, model = options.device("h200"), options.model(FIGURE1_MODEL)
    cost = table_cost_of(device, model)
    names = [f"{context:,}" for context in CONTEXTS]
    panels = []
    for title in ("step", *_PARTS[:2]):
        found: list[dict[str, Any]] = []
        for context, name in zip(CONTEXTS, names, strict=True):
            for r in SHARES:
                parts = step_parts(cost, composed(TOKENS, r, context))
                part_s = {"step": sum(parts), _PARTS[0]: parts.dense_s, _PARTS[1]: parts.attention_s}[title]
                found.append({"r": r, "value": 1e3 * part_s, "series": name})
        y = alt.Y("value:Q", title="ms", scale=alt.Scale(domain=[0, 1.1 * max(row["value"] for row in found)]))
        legend = alt.Legend(symbolType="stroke")
        hues = colour(names, _CONTEXT_COLOURS, "context, tokens", legend=legend)
        layers = [layer.encode(x=_share_axis(alt), y=y, color=hues) for layer in _mixed_lines_and_pure_points(found)]
        layers[0] = layers[0].encode(strokeDash=dash(names, "context, tokens"))
        if published and title == "attention":
            marks = values([{"r": r, "value": ms} for r, ms in PUBLISHED_ATTENTION_MS])
            cross = alt.Chart(marks).mark_point(shape="cross", filled=True, size=60, color=BLACK)
            layers.append(cross.encode(x="r:Q", y="value:Q"))
        panels.append(alt.layer(*layers).properties(width=200, height=_HEIGHT, title=title))
    return alt.hconcat(*panels, title=f"{gpu_title(device)}, {model}, {TOKENS:,} tokens in the step")


FIGURE2 = PaperFigure(
    "figure2",
    "GPU time by kernel over the decode share, and attention calls against published ones",
    no_cells,
    _chart2,
    f"Ours: the devices' kernel tables, {TOKENS:,} tokens in the step, decodes with {CONTEXT_TOKENS} tokens of "
    "context; points: steps of prompts or of decodes only; grey: attention of the latter. The paper's panels are "
    "not published as numbers; its text says that mixed attention passes pure decode's at a low decode share on the "
    "RTX PRO 6000 and near the end on H200. Bottom: 30 published FlashAttention calls per GPU (eb-vllm; 512 "
    "requests) against ours, on which nothing was fitted: decodes within 7 %; mixed calls 0.9 to 1.5 times as long "
    "on RTX PRO 6000, 0.4 to 1.1 times on H200, where their prefill calls also take twice as long as the tables' "
    "(FlashAttention 3).",
    ("device", "model"),
    published_on=Published(GPUS, (FIGURE1_MODEL,)),
)
FIGURE8 = PaperFigure(
    "figure8",
    "step time by batch composition of three more models",
    no_cells,
    _chart8,
    "Ours, as figure 1. Crossover: the decode share from which a token of a mixed batch costs more than one of a "
    "pure decode batch. In print Gemma-3-1B-IT has none on either GPU; here it has. The curves are not published as "
    "numbers.",
    ("device", "model"),
    published_on=Published(GPUS, FURTHER_MODELS),
)
FIGURE9 = PaperFigure(
    "figure9",
    "GPU time by kernel of three more models",
    no_cells,
    _chart9,
    f"Ours, as the top of figure 2 ({TOKENS:,} tokens, context {CONTEXT_TOKENS}); the experts of Qwen3-30B-A3B count "
    "as matrix products. The curves are not published as numbers; the text says that matrix products do not depend "
    "on the composition. Its growing 'Other' of Gemma on the RTX PRO 6000 is host work, which stands outside these "
    "parts.",
    ("device", "model"),
    published_on=Published(GPUS, FURTHER_MODELS),
)
FIGURE10 = PaperFigure(
    "figure10",
    "step, matrix products and attention over the decode share, by context",
    no_cells,
    _chart10,
    "Ours, GPU time without the host. Crosses: attention of the longest and the shortest context at a decode share of "
    "80 % in the text (26 and 10 ms). The paper's five contexts are not legible in our copy: these are assumed.",
    ("device", "model"),
    published_on=Published(("h200",), (FIGURE1_MODEL,)),
)
