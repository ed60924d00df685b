"""Step times and their parts in the EB paper: figures 1, 2 and 8 to 10, table 1 and the convexity index kappa (A.3)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ebbench.analysis.documents import Column, Section, Value, compared, comparison, labels
from ebbench.devices.base import CostModel, StepShape
from ebbench.devices.costs import TableCost, decode_shape, mixed_shape, prefill_shape
from ebbench.devices.describe import marginal_curve
from ebbench.devices.layers import MAX_SAMPLED, MAX_TOKENS
from ebbench.devices.profiles import find_profile
from ebbench.errors import UsageError
from ebbench.papers.options import PaperOptions
from ebbench.papers.published import gpu_title, pick, rows
from ebbench.papers.table import PaperFigure, PaperTable, Published, Sections, no_runs
from ebbench.render.figures import altair, colour, dash, lines, values
from ebbench.render.palette import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, STEPS, VERMILION
from ebbench.runs.store import RunStore

# Figure 1 of the EB paper: step time by batch composition, and the marginal cost of a token in a mixed batch.

CONTEXT_TOKENS = 512
FIGURE1_TOKENS = tuple(range(256, 4097, 256))
FIGURE1_SHARES = (0.0, 0.2, 0.5, 0.8, 1.0)
_SHARE_NAMES = ("prefill only", "20 % decode", "50 % decode", "80 % decode", "decode only")
_BATCHES = {"mixed batch": STEPS["mixed"], "decode only": STEPS["decode"], "prefill only": STEPS["prefill"]}
_SHARE_COLOURS = (BLACK, SKY, BLUE, ORANGE, VERMILION)
FIGURE1_MODEL = "qwen3-4b"
PUBLISHED_CROSSOVER = {"rtx-pro-6000": 0.20, "h200": 0.80}
"""Of Qwen3-4B; other models have none in figures."""
GPUS = tuple(PUBLISHED_CROSSOVER)
_WIDTH, _HEIGHT = 270, 180


def device_cost(device: str, model: str, eager: bool = False) -> CostModel:
    """The cost model of a device serving a model."""
    from ebbench.devices.loader import load_device

    return load_device(device, model, eager=eager).cost


def composed(tokens: int, share: float, context: int) -> StepShape:
    """A step of ``tokens`` tokens, of which the share ``share`` are decodes with ``context`` KV tokens each; 0 and 1
    are pure steps."""
    if share == 0.0:
        return prefill_shape(tokens)
    return decode_shape(tokens, context) if share == 1.0 else mixed_shape(tokens, share, context)


def step_ms(cost: CostModel, tokens: int, share: float, context: int) -> float:
    """Time (ms) of the step that :func:`composed` makes."""
    return 1e3 * cost.step_s(composed(tokens, share, context))


def _kind(prompts: int, decodes: int) -> str:
    return "mixed batch" if prompts and decodes else "prefill only" if prompts else "decode only"


def _scatter(
    step_rows: list[dict[str, Any]], titles: tuple[str, str], ends: tuple[float, float], domain: list[float], size: int
) -> Any:
    """Ours over published times (ms) by kind of batch, with the diagonal; ``titles`` of both axes."""
    alt, names = altair(), list(_BATCHES)
    scale = alt.Scale(type="log", domain=domain, nice=False)
    shape = alt.Shape("series:N", scale=alt.Scale(domain=names, range=["circle", "triangle-up", "square"]), title=None)
    points = alt.Chart(values(step_rows)).mark_point(size=size, opacity=0.75, filled=True)
    points = points.encode(
        x=alt.X("measured:Q", title=titles[0], scale=scale), y=alt.Y("ours:Q", title=titles[1], scale=scale),
        color=colour(names, list(_BATCHES.values())), shape=shape,
    )  # fmt: skip
    diagonal = values([{"x": end, "y": end} for end in ends])
    return alt.layer(alt.Chart(diagonal).mark_line(color=GREY).encode(x="x:Q", y="y:Q"), points)


def time_panel(device: str, model: str, title: str = "") -> Any:
    """Step time over tokens, one line per decode share."""
    alt, cost = altair(), device_cost(device, model)
    times = [
        {"tokens": tokens, "series": name, "value": step_ms(cost, tokens, share, CONTEXT_TOKENS)}
        for share, name in zip(FIGURE1_SHARES, _SHARE_NAMES, strict=True)
        for tokens in FIGURE1_TOKENS
    ]
    x, y = alt.X("tokens:Q", title="tokens in the step"), alt.Y("value:Q", title="step time, ms")
    chart = lines(times, x, y, _SHARE_NAMES, _SHARE_COLOURS, "batch")
    return chart.properties(width=_WIDTH, height=_HEIGHT, title=title or f"{gpu_title(device)}, {model}")


def _marginal_panel(device: str, model: str) -> Any:
    alt, names = altair(), list(_BATCHES)
    curve = marginal_curve(device_cost(device, model), CONTEXT_TOKENS)
    mixed = [
        {"r": r, "value": 1e6 * y, "series": "mixed batch"} for r, y in zip(curve.shares, curve.mixed_s, strict=True)
    ]
    flat = [
        {"value": 1e6 * curve.decode_s, "series": "decode only"},
        {"value": 1e6 * curve.prefill_s, "series": "prefill only"},
    ]
    x = alt.X("r:Q", title="decode share r of the batch", scale=alt.Scale(domain=[0, 1]), axis=alt.Axis(format="%"))
    y = alt.Y("value:Q", title="µs per further token")
    told_apart = names, list(_BATCHES.values()), "token in a"
    rules = alt.Chart(values(flat)).mark_rule(strokeWidth=1.6).encode(
        y="value:Q", color=colour(*told_apart), strokeDash=dash(names, "token in a"))  # fmt: skip
    layers = [lines(mixed, x, y, *told_apart, mark={"strokeWidth": 2.2}), rules]
    published = PUBLISHED_CROSSOVER.get(device) if model == FIGURE1_MODEL else None
    if published is not None:
        align, dx = ("left", 4) if published < 0.5 else ("right", -4)
        mark = alt.Chart(values([{"r": published}])).encode(x="r:Q")
        label = mark.mark_text(align=align, dx=dx, color="#555", fontSize=10, text="published crossover")
        layers += [mark.mark_rule(color=GREY, strokeDash=[2, 2]), label.encode(y=alt.value(10))]
    return alt.layer(*layers).properties(width=_WIDTH, height=_HEIGHT)


def _check_panel(model: str, device: str) -> Any:
    """Published and our step times for the same composition and context, pure and mixed steps."""
    cost = device_cost(device, model, eager=True)
    points: list[dict[str, Any]] = []
    for row in rows("eb_vllm/iteration_time_qwen3_4b"):
        decodes, prompts, prompt = (int(row[key]) for key in ("num_decode", "num_prefill", "prefill_tokens"))
        total = decodes + prompts * prompt
        ours = step_ms(cost, total, decodes / total, 32)
        points.append({"measured": float(row["mean_ms"]), "ours": ours, "series": _kind(prompts, decodes)})
    top = max(max(row["measured"], row["ours"]) for row in points)
    titles = "published step time, ms", f"ours on {gpu_title(device)}, ms"
    title = f"{model}, eager, 32 tokens of context"
    return _scatter(points, titles, (4, top), [4, 1.1 * top], 28).properties(width=_WIDTH, height=_HEIGHT, title=title)


def _chart1(options: PaperOptions, store: RunStore, published: bool) -> Any:
    alt = altair()
    model = options.model(FIGURE1_MODEL)
    devices = options.devices or GPUS
    times = alt.hconcat(*(time_panel(device, model) for device in devices))
    marginal = alt.hconcat(*(_marginal_panel(device, model) for device in devices))
    panels = [times, marginal]
    if published and model == FIGURE1_MODEL:
        panels.append(_check_panel(model, "h200"))
    return alt.vconcat(*panels).resolve_scale(color="independent", strokeDash="independent", shape="independent")


FIGURE1 = PaperFigure(
    "figure1", ("device", "model"), _chart1, published_on=Published(GPUS, (FIGURE1_MODEL,)), runs=no_runs
)


# Figures 2, 8, 9 and 10 of the EB paper (section 1, appendix A.2): where a step's time goes, by batch composition.

FURTHER_MODELS = ("gemma-3-1b-it", "qwen3-8b", "qwen3-30b-a3b")
KERNEL_TOKENS = 1024
KERNEL_SHARES = tuple(round(0.05 * i, 2) for i in range(21))
_PARTS = ("matrix products and small kernels", "attention", "head and sampling")
_PART_COLOURS = (BLUE, VERMILION, GREEN)
_KERNEL_HEIGHT = 170


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


def table_cost_of(device: str, model: str) -> TableCost:
    """The kernel-table cost model. Raises UsageError for a device that has none."""
    cost = device_cost(device, model)
    if not isinstance(cost, TableCost):
        raise UsageError(f"{device} has no kernel tables, so its steps have no parts to show")
    return cost


def _over_shares(
    by_share: list[dict[str, Any]], y: Any, names: Sequence[str], colours: Sequence[str], title: str | None = None
) -> list[Any]:
    """Lines over the mixed steps, and points for the pure ones, since time jumps between the two."""
    alt = altair()
    axis, scale, legend = alt.Axis(format="%"), alt.Scale(domain=[0, 1]), alt.Legend(symbolType="stroke")
    x = alt.X("r:Q", title="decode share of the step's tokens", axis=axis, scale=scale)
    mixed, pure = ([row for row in by_share if (0.0 < row["r"] < 1.0) is inside] for inside in (True, False))
    points = alt.Chart(values(pure)).mark_point(filled=True, size=36, opacity=1)
    hues = colour(names, colours, title, legend=legend)
    return [lines(mixed, x, y, names, colours, title, legend=legend), points.encode(x=x, y=y, color=hues)]


def _parts_panel(device: str, model: str) -> Any:
    alt = altair()
    cost = table_cost_of(device, model)
    by_share = [
        {"r": r, "value": 1e3 * part, "series": name}
        for r in KERNEL_SHARES
        for name, part in zip(_PARTS, step_parts(cost, composed(KERNEL_TOKENS, r, CONTEXT_TOKENS)), strict=True)
    ]
    y = alt.Y("value:Q", title="GPU time of a step, ms")
    layers = _over_shares(by_share, y, _PARTS, _PART_COLOURS)
    decode_ms = 1e3 * step_parts(cost, composed(KERNEL_TOKENS, 1.0, CONTEXT_TOKENS)).attention_s
    rule = alt.Chart(values([{"value": decode_ms}])).mark_rule(color=GREY, strokeDash=[2, 2]).encode(y=y)
    return alt.layer(rule, *layers).properties(
        width=_WIDTH, height=_KERNEL_HEIGHT, title=f"{gpu_title(device)}, {model}"
    )


def measured_attention(device: str) -> list[dict[str, Any]]:
    """One FlashAttention call in ms, as published for a GPU and as our tables have it, by kind of batch."""
    ((_, attention),) = table_cost_of(device, FIGURE1_MODEL).attention  # one kind of layer
    points = []
    for row in rows(f"eb_vllm/attention_kernel_{device.replace('-', '')}"):
        prompts, decodes = int(row["num_prefill"]), int(row["num_decode"])
        length = int(row["prefill_len"] or row["context_len"])
        ours = attention.step_s(((length, 0),) * prompts, decodes, decodes * length)
        points.append({"measured": float(row["time_ms"]), "ours": 1e3 * ours, "series": _kind(prompts, decodes)})
    return points


def _attention_panel(device: str) -> Any:
    titles = "published attention call, ms", "ours, ms"
    chart = _scatter(measured_attention(device), titles, (0.005, 100), [0.005, 100], 32)
    return chart.properties(width=_WIDTH, height=_KERNEL_HEIGHT, title=f"{gpu_title(device)}, one layer")


def _chart2(options: PaperOptions, store: RunStore, published: bool) -> Any:
    alt = altair()
    devices = options.devices or GPUS
    parts = alt.hconcat(*(_parts_panel(device, options.model(FIGURE1_MODEL)) for device in devices))
    printed = [device for device in devices if device in GPUS]
    if not published or not printed:
        return parts
    checks = alt.hconcat(*(_attention_panel(device) for device in printed))
    return alt.vconcat(parts, checks).resolve_scale(color="independent", strokeDash="independent", shape="independent")


def _crossing_panel(device: str, model: str) -> Any:
    crossover = marginal_curve(device_cost(device, model), CONTEXT_TOKENS).crossover
    crossing = "no crossover" if crossover is None else f"crossover at r = {crossover:.2f}"
    return time_panel(device, model, f"{gpu_title(device)}, {model}: {crossing}")


def _further_models(panel: Callable[[str, str], Any], options: PaperOptions, *_: object) -> Any:
    alt, devices = altair(), options.devices or GPUS
    models = options.models or FURTHER_MODELS
    return alt.vconcat(*(alt.hconcat(*(panel(device, model) for device in devices)) for model in models))


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
        step_rows: list[dict[str, Any]] = []
        for context, name in zip(CONTEXTS, names, strict=True):
            for r in KERNEL_SHARES:
                parts = step_parts(cost, composed(KERNEL_TOKENS, r, context))
                part_s = {"step": sum(parts), _PARTS[0]: parts.dense_s, _PARTS[1]: parts.attention_s}[title]
                step_rows.append({"r": r, "value": 1e3 * part_s, "series": name})
        y = alt.Y("value:Q", title="ms", scale=alt.Scale(domain=[0, 1.1 * max(row["value"] for row in step_rows)]))
        layers = _over_shares(step_rows, y, names, _CONTEXT_COLOURS, "context, tokens")
        if published and title == "attention":
            marks = values([{"r": r, "value": ms} for r, ms in PUBLISHED_ATTENTION_MS])
            cross = alt.Chart(marks).mark_point(shape="cross", filled=True, size=60, color=BLACK)
            layers.append(cross.encode(x="r:Q", y="value:Q"))
        panels.append(alt.layer(*layers).properties(width=200, height=_KERNEL_HEIGHT, title=title))
    return alt.hconcat(*panels, title=f"{gpu_title(device)}, {model}, {KERNEL_TOKENS:,} tokens in the step")


FIGURE2 = PaperFigure(
    "figure2", ("device", "model"), _chart2, published_on=Published(GPUS, (FIGURE1_MODEL,)), facts=globals(),
    runs=no_runs,
)  # fmt: skip
FIGURE8, FIGURE9 = (
    PaperFigure(name, ("device", "model"), partial(_further_models, panel), facts=globals(), runs=no_runs,
                published_on=Published(GPUS, FURTHER_MODELS))
    for name, panel in (("figure8", _crossing_panel), ("figure9", _parts_panel))
)  # fmt: skip
FIGURE10 = PaperFigure(
    "figure10", ("device", "model"), _chart10, published_on=Published(("h200",), (FIGURE1_MODEL,)), runs=no_runs
)


# The interference convexity index of the EB paper (appendix A.3): from published times and costs, and from ours.

KAPPA_TOKENS = 4096
KAPPA_SHARES = tuple(round(0.1 * i, 1) for i in range(11))


def convexity_index(shares: Sequence[float], times: Sequence[float], decode: float) -> float:
    """Quadratic coefficient of ``times`` over ``shares`` by least squares, over the time ``decode`` of a pure decode
    step."""
    return float(np.polyfit(np.asarray(shares, float), np.asarray(times, float), 2)[0] / decode)


def _indices(times: Mapping[float, float]) -> tuple[float, float]:
    """The index over mixed steps alone, and with both pure steps (shares 0 and 1) among the points."""
    mixed = {share: time for share, time in times.items() if 0.0 < share < 1.0}
    alone, together = (convexity_index(list(chosen), list(chosen.values()), times[1.0]) for chosen in (mixed, times))
    return alone, together


def _kappa_rows(options: PaperOptions) -> Iterator[tuple[Value, ...]]:
    """Of the published step times, of the published costs of mixed batches, and of ours."""
    times = {}
    for row in rows("eb_vllm/iteration_time_qwen3_4b"):
        decodes = int(row["num_decode"])
        if decodes + int(row["num_prefill"]) * int(row["prefill_tokens"]) == KAPPA_TOKENS:
            times[decodes / KAPPA_TOKENS] = float(row["mean_ms"])
    gpu = "Blackwell by name, H200 by slope"  # the published times' GPU is in doubt
    yield gpu, "qwen3-4b", "published step times, eager, context 32", *_indices(times)
    for row in rows("eb_vllm/beta_mb"):
        gpu = gpu_title("h200" if "H200" in row["device_name"] else "rtx-pro-6000")
        a, b, c = (float(row[f"{name}_s_per_token"]) for name in "abc")
        yield gpu, "qwen3-8b", "published cost of mixed batches, v1 runs", c / (a + b + c), None
    model, source = options.model(FIGURE1_MODEL), f"ours, context {CONTEXT_TOKENS}"
    for device in options.devices or GPUS:
        cost, gpu = table_cost_of(device, model), gpu_title(device)
        parts = {r: step_parts(cost, composed(KAPPA_TOKENS, r, CONTEXT_TOKENS)) for r in KAPPA_SHARES}
        yield gpu, model, f"{source}: kernels of a step", *_indices({r: sum(part) for r, part in parts.items()})
        yield gpu, model, f"{source}: attention alone", *_indices({r: part.attention_s for r, part in parts.items()})


def _kappa_sections(options: PaperOptions, _store: RunStore) -> Sections:
    columns = (
        *labels("GPU", "model", "from"),
        *(Column(name, group="index over", show="{:+.2f}".format) for name in ("mixed steps", "all steps")),
    )
    return [Section("", columns, tuple(_kappa_rows(options)))]


KAPPA = PaperTable(
    "kappa", ("device", "model"), _kappa_sections, published_on=Published(GPUS, (FIGURE1_MODEL,)),
    facts=globals(), runs=no_runs,
)  # fmt: skip


# Table 1 of the EB paper: the four GPUs' bandwidth and arithmetic, beside the device profiles. It needs no runs.

TABLE1_DEVICES = ("b300", "h200", "rtx-pro-6000", "l40s")


def _table1_sections(options: PaperOptions, _store: RunStore) -> Sections:
    columns = (*labels("GPU"), *(column for title in ("TB/s", "16-bit TFLOPS", "FLOP/B") for column in compared(title)))
    table = []
    for device in options.devices or TABLE1_DEVICES:
        profile, row = find_profile(device), list[Value]([gpu_title(device)])
        bandwidth, rate = profile.bandwidth_bytes_per_s, profile.bf16_flops_per_s
        for column, ours in (
            ("bandwidth_tb_per_s", bandwidth / 1e12), ("fp16_tflops", rate / 1e12), ("flop_per_byte", rate / bandwidth),
        ):  # fmt: skip
            row += comparison(pick("table1_gpus", column, gpu=gpu_title(device)), ours)
        table.append(tuple(row))
    return [Section("", columns, tuple(table))]


TABLE1 = PaperTable(
    "eb-table1", ("device",), _table1_sections, aliases=("table1", "1"),
    published_on=Published(TABLE1_DEVICES, ()), runs=no_runs,
)  # fmt: skip
