"""Figure 1 of the EB paper: step time by batch composition, and the marginal cost of a token in a mixed batch."""

from __future__ import annotations

from typing import Any

from ebbench.devices.base import CostModel
from ebbench.devices.describe import marginal_curve
from ebbench.devices.linear import decode_shape, mixed_shape, prefill_shape
from ebbench.papers.published import gpu_title, rows
from ebbench.papers.table import PaperFigure, PaperOptions, Published, no_cells
from ebbench.render.figures import altair, colour, dash, values
from ebbench.render.palette import BLACK, BLUE, GREY, ORANGE, SKY, STEPS, VERMILION
from ebbench.runs.store import RunStore

CONTEXT_TOKENS = 512
TOKENS = tuple(range(256, 4097, 256))
SHARES = (0.0, 0.2, 0.5, 0.8, 1.0)
_NAMES = ("prefill only", "20 % decode", "50 % decode", "80 % decode", "decode only")
_BATCHES = {"mixed batch": STEPS["mixed"], "decode only": STEPS["decode"], "prefill only": STEPS["prefill"]}
_COLOURS = (BLACK, SKY, BLUE, ORANGE, VERMILION)
FIGURE1_MODEL = "qwen3-4b"
PUBLISHED_CROSSOVER = {"rtx-pro-6000": 0.20, "h200": 0.80}
"""Of Qwen3-4B; other models have none in figures."""
DEVICES = tuple(PUBLISHED_CROSSOVER)
_WIDTH, _HEIGHT = 270, 180


def device_cost(device: str, model: str, eager: bool = False) -> CostModel:
    """The cost model of a device serving a model."""
    from ebbench.devices import load_device

    return load_device(device, model, eager=eager).cost


def step_ms(cost: CostModel, tokens: int, share: float, context: int) -> float:
    """Time (ms) of a step of ``tokens`` tokens, of which the share ``share`` are decodes with ``context`` KV tokens
    each."""
    if share == 0.0:
        return 1e3 * cost.step_s(prefill_shape(tokens))
    if share == 1.0:
        return 1e3 * cost.step_s(decode_shape(tokens, context))
    return 1e3 * cost.step_s(mixed_shape(tokens, share, context))


def _times(device: str, model: str) -> list[dict[str, Any]]:
    cost = device_cost(device, model)
    return [
        {"tokens": tokens, "series": name, "value": step_ms(cost, tokens, share, CONTEXT_TOKENS)}
        for share, name in zip(SHARES, _NAMES, strict=True)
        for tokens in TOKENS
    ]


def time_panel(device: str, model: str, title: str = "") -> Any:
    """Step time over tokens, one line per decode share."""
    alt = altair()
    lines = (
        alt.Chart(values(_times(device, model)))
        .mark_line(strokeWidth=1.8)
        .encode(
            x=alt.X("tokens:Q", title="tokens in the step"),
            y=alt.Y("value:Q", title="step time, ms"),
            color=colour(_NAMES, _COLOURS, "batch"),
            strokeDash=dash(_NAMES, "batch"),
        )
    )
    return lines.properties(width=_WIDTH, height=_HEIGHT, title=title or f"{gpu_title(device)}, {model}")


def _marginal_panel(device: str, model: str) -> Any:
    alt = altair()
    curve = marginal_curve(device_cost(device, model), CONTEXT_TOKENS)
    mixed = [{"r": r, "value": 1e6 * y} for r, y in zip(curve.shares, curve.mixed_s, strict=True)]
    flat = [
        {"value": 1e6 * curve.decode_s, "series": "decode only"},
        {"value": 1e6 * curve.prefill_s, "series": "prefill only"},
    ]
    names, colours = list(_BATCHES), list(_BATCHES.values())
    x = alt.X("r:Q", title="decode share r of the batch", scale=alt.Scale(domain=[0, 1]), axis=alt.Axis(format="%"))
    line = (
        alt.Chart(values([{**row, "series": "mixed batch"} for row in mixed]))
        .mark_line(strokeWidth=2.2)
        .encode(x=x, y=alt.Y("value:Q", title="µs per further token"), color=colour(names, colours, "token in a"),
                strokeDash=dash(names, "token in a"))
    )  # fmt: skip
    rules = (
        alt.Chart(values(flat))
        .mark_rule(strokeWidth=1.6)
        .encode(y="value:Q", color=colour(names, colours, "token in a"), strokeDash=dash(names, "token in a"))
    )
    layers = [line, rules]
    published = PUBLISHED_CROSSOVER.get(device) if model == FIGURE1_MODEL else None
    if published is not None:
        mark = values([{"r": published}])
        layers.append(alt.Chart(mark).mark_rule(color=GREY, strokeDash=[2, 2]).encode(x="r:Q"))
        label = alt.Chart(mark).mark_text(
            align="left" if published < 0.5 else "right",
            dx=4 if published < 0.5 else -4,
            color="#555",
            fontSize=10,
            text="published crossover",
        )
        layers.append(label.encode(x="r:Q", y=alt.value(10)))
    return alt.layer(*layers).properties(width=_WIDTH, height=_HEIGHT)


def _measured_rows(model: str, device: str) -> list[dict[str, Any]]:
    """Published and our step times for the same composition and context, pure and mixed steps."""
    cost, found = device_cost(device, model, eager=True), []
    for row in rows("iteration_time_qwen3_4b", "eb_vllm"):
        decodes, prompts, prompt = (int(row[key]) for key in ("num_decode", "num_prefill", "prefill_tokens"))
        total = decodes + prompts * prompt
        kind = "decode only" if not prompts else "prefill only" if not decodes else "mixed batch"
        ours = step_ms(cost, total, decodes / total, 32)
        found.append({"measured": float(row["mean_ms"]), "ours": ours, "series": kind})
    return found


def _check_panel(model: str, device: str) -> Any:
    alt = altair()
    names, colours = list(_BATCHES), list(_BATCHES.values())
    found = _measured_rows(model, device)
    top = max(max(row["measured"], row["ours"]) for row in found)
    scale = alt.Scale(type="log", domain=[4, 1.1 * top], nice=False)
    shape = alt.Shape(
        "series:N", scale=alt.Scale(domain=list(names), range=["circle", "triangle-up", "square"]), title=None
    )
    points = (
        alt.Chart(values(found))
        .mark_point(size=28, opacity=0.75, filled=True)
        .encode(
            x=alt.X("measured:Q", title="published step time, ms", scale=scale),
            y=alt.Y("ours:Q", title=f"ours on {gpu_title(device)}, ms", scale=scale),
            color=colour(names, colours),
            shape=shape,
        )
    )
    diagonal = (
        alt.Chart(values([{"x": 4, "y": 4}, {"x": top, "y": top}])).mark_line(color=GREY).encode(x="x:Q", y="y:Q")
    )
    return alt.layer(diagonal, points).properties(
        width=_WIDTH, height=_HEIGHT, title=f"{model}, eager, 32 tokens of context"
    )


def _chart(options: PaperOptions, store: RunStore, published: bool) -> Any:
    alt = altair()
    model = options.model(FIGURE1_MODEL)
    devices = options.devices or DEVICES
    times = alt.hconcat(*(time_panel(device, model) for device in devices))
    marginal = alt.hconcat(*(_marginal_panel(device, model) for device in devices))
    panels = [times, marginal]
    if published and model == FIGURE1_MODEL:
        panels.append(_check_panel(model, "h200"))
    return alt.vconcat(*panels).resolve_scale(color="independent", strokeDash="independent", shape="independent")


FIGURE1 = PaperFigure(
    "figure1",
    "step time and marginal cost by batch composition",
    no_cells,
    _chart,
    "Ours: the devices' cost models, decodes with 512 tokens of context. Grey: the decode share at which the paper "
    "sees a token of a mixed batch become dearer than one of a pure decode batch (20 % and 80 %, Qwen3-4B). Bottom: "
    "127 published step times of Qwen3-4B against ours on H200. Their file names no GPU; the README beside it says "
    "Blackwell, their slope says H200 (0.29 of the RTX PRO 6000's for a model twice the size).",
    ("device", "model"),
    published_on=Published(DEVICES, (FIGURE1_MODEL,)),
)
