"""Device facts as rich tables, and the marginal-cost curves in the terminal or a file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from ebbench.devices.describe import DeviceFacts, MarginalCurve
from ebbench.errors import UsageError
from ebbench.render.tables import plain_table

BAR_CELLS = 44
PLOT_SUFFIXES = (".svg", ".png", ".html", ".json")


def listing(devices: Sequence[dict[str, Any]], models: Sequence[dict[str, Any]]) -> Iterator[RenderableType]:
    """The two tables of ``ebbench devices list``."""
    tables = (
        (devices, {"device": "{name}", "GPU": "{gpu}", "memory GB": "{memory_gb:.0f}",
                   "bandwidth TB/s": "{bandwidth_tb_per_s:.2f}", "mixed attention": "{mixed_attention}"}),
        (models, {"model": "{name}", "Hugging Face name": "{hf_id}", "parameters": "{parameters_b:.2f} B",
                  "weights GB": "{weights_gb:.1f}", "KV kB/token": "{kv_kb_per_token:.0f}"}),
    )  # fmt: skip
    for rows, columns in tables:
        # Names are wrapped, not cut: a user must be able to copy them.
        figures = [name for name in [*columns][2:] if name != "mixed attention"]
        table = plain_table(*columns, right=figures, overflow="fold")
        for row in rows:
            table.add_row(*(text.format(**row) for text in columns.values()))
        yield table
        yield ""


def _kv_per_sequence(facts: DeviceFacts) -> str:
    """What a sequence keeps in the KV cache."""
    model, windows = facts.model, dict[int, float]()
    for mixer in model.windows:
        held = mixer.layers * mixer.bytes_per_token(model.kv_dtype_bytes)
        windows[mixer.window] = windows.get(mixer.window, 0) + held
    bytes_of_all = model.kv_bytes_per_token - sum(windows.values())
    parts = [f"at {bytes_of_all / 1e3:.0f} kB per token"] if bytes_of_all or not windows else []
    parts += [f"{kept / 1e3:.0f} kB per token of the last {window:,}" for window, kept in windows.items()]
    layout = facts.device.kv_layout
    if model.own_pages and layout is not None:
        of_windows = [group for group in layout.groups if group.window]
        blocks = [sum(group.most(layout.longest, tokens) for group in of_windows) for tokens in (1, layout.in_flight)]
        decoding, computing = (count * layout.block_bytes / 1e6 for count in blocks)
        parts += [f"up to {decoding:,.0f} MB per sequence, and {computing:,.0f} MB while its prompt is computed"]
    states = f"{1 + facts.drafts} times " if facts.drafts else ""
    parts += [f"{states}{model.state_bytes / 1e6:.1f} MB per sequence"] if model.state_bytes else []
    return ", ".join(parts) if bytes_of_all else f"at {', '.join(parts)}"


def page(facts: DeviceFacts) -> Iterator[RenderableType]:
    """The parts of ``ebbench devices show``, from top to bottom."""
    device, model = facts.device, facts.model
    gpus = f"{facts.parallel.gpus} x " if not facts.parallel.single else ""
    yield Text(f"{gpus}{facts.profile.gpu} holding {model.hf_id}", style="bold")
    of_each = " of each" if gpus else ""
    of_which = ""
    if device.kv_layout is not None:
        of_which = f" in sequences of {device.kv_layout.longest:,}, as vLLM counts ({facts.kv_blocks:,} blocks)"
    yield (
        f"vLLM {facts.request.vllm} with {facts.request.memory_share:.0%} of "
        f"{facts.profile.memory_bytes / 1e9:.1f} GB{of_each}: weights {facts.gpu_weight_bytes / 1e9:.1f} GB, "
        f"set aside {facts.reserve_bytes / 1e9:.1f} GB, KV cache {facts.kv_cache_bytes / 1e9:.1f} GB "
        f"{_kv_per_sequence(facts)}: room for {device.kv_capacity_tokens:,} tokens{of_which}"
    )
    yield ""
    figures = ("tokens", "of them decodes", "ms", "µs/token", "against its parts run separately")
    table = plain_table("step", *figures, right=figures, overflow="fold")
    drafts = f" and {facts.drafts} drafted" if facts.drafts else ""
    table.title = f"Step times; each decode holds {facts.context_tokens} tokens of KV{drafts}"
    table.title_justify = "left"
    for row in facts.steps:
        apart = f"{row.step_s / row.parts_s:.2f} x" if row.parts_s else ""
        times = f"{row.step_s * 1e3:.2f}", f"{row.step_s / row.tokens * 1e6:.0f}"
        table.add_row(row.kind, f"{row.tokens}", f"{row.decode_seqs}", *times, apart)
    yield table
    yield ""
    yield from curve_lines(facts.curve)
    yield ""
    if facts.profile.links:
        known = "; ".join(f"{name} ({link.note})" for name, link in facts.profile.links.items())
        yield Text(f"links between GPUs, the usual one first: {known}", style="dim")
    yield Text(f"step times: {device.provenance}", style="dim")
    yield Text(f"controller: {device.calibration.source}", style="dim")
    for warning in device.warnings:
        yield Text(f"warning: {warning}", style="yellow")


def curve_lines(curve: MarginalCurve) -> Iterator[Text]:
    """Figure 1 of the paper: cost of one more token by decode share, and of one more token in a pure decode step."""
    yield Text(
        f"Cost of one more token in a mixed step, by decode share; {curve.context_tokens} tokens of KV per decode"
    )
    scale = BAR_CELLS / max(*curve.mixed_s, curve.decode_s)
    mark = round(curve.decode_s * scale)
    for share, cost in zip(curve.shares, curve.mixed_s, strict=True):
        if round(share * 100) % 10:
            continue
        cells = round(cost * scale)
        bar = "".join("█" if i < cells else " " for i in range(BAR_CELLS + 1))
        line = Text(f"  r = {share:.1f} ")
        line.append(bar[:mark], style="green")
        line.append("│", style="bold")
        line.append(bar[mark + 1 :], style="red")
        line.append(f" {cost * 1e6:4.0f} µs")
        yield line
    yield Text(f"  │ one more token in a pure decode step: {curve.decode_s * 1e6:.0f} µs")
    crossover = ": none; a token in a mixed step never costs more than in a decode step"
    if curve.crossover is not None:
        meaning = "above this share of decodes a mixed token costs more than a decode token"
        crossover = f" r = {curve.crossover:.2f}: {meaning}"
    yield Text(f"  crossover{crossover}", style="bold")


def draw(facts: DeviceFacts, path: Path) -> None:
    """Write the curves as a picture. Raises UsageError for an unknown suffix."""
    if path.suffix not in PLOT_SUFFIXES:
        raise UsageError(f"--plot {path}: write one of {', '.join(PLOT_SUFFIXES)}")
    from ebbench.render.figures import altair, save_chart

    alt, curve = altair(), facts.curve
    rows = [
        {"decode share r": share, "µs per token": cost * 1e6, "step": "mixed"}
        for share, cost in zip(curve.shares, curve.mixed_s, strict=True)
    ]
    rows += [{"decode share r": r, "µs per token": curve.decode_s * 1e6, "step": "pure decode"} for r in (0.0, 1.0)]
    title = f"{facts.profile.gpu}, {facts.device.model}, {curve.context_tokens} tokens of KV per decode"
    chart = alt.Chart(alt.InlineData(values=rows), title=title).mark_line()
    chart = chart.encode(x="decode share r:Q", y="µs per token:Q", color="step:N").properties(width=420, height=260)
    save_chart(chart, path)
