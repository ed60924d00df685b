"""The page's charts as Vega-Lite, by Altair. Data comes from the page by name; nothing is fetched."""

from __future__ import annotations

from typing import Any

from ebbench.render.figures import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, altair

HEIGHT = 110
PHASES = {"prefill": ORANGE, "decode": BLUE, "mixed": PURPLE}
MODES = {"exclusive": SKY, "mixed": GREY}
LATENCIES = {
    "ttft": "time to first token, ms",
    "tpot": "time per output token, ms",
    "itl": "inter-token latency, ms",
    "e2el": "end-to-end latency, ms",
}


def specs() -> dict[str, dict[str, Any]]:
    """Vega-Lite specifications by chart name."""
    charts = {f"cdf_{name}": _cdf(name, title) for name, title in LATENCIES.items()}
    charts |= {"timeline": _timeline(), "surface": _surface()}
    return {name: chart.to_dict(validate=False) | {"background": None} for name, chart in charts.items()}


def _cdf(name: str, title: str) -> Any:
    alt = altair()
    picked = alt.selection_point(fields=["policy"], bind="legend", name=f"picked_{name}")
    return (
        alt.Chart(alt.NamedData(f"cdf_{name}"))
        .mark_line(clip=True, strokeWidth=1.6)
        .encode(
            x=alt.X("ms:Q", title=title, scale=alt.Scale(type="log", nice=False)),
            y=alt.Y("share:Q", title="share of samples", axis=alt.Axis(format="%"), scale=alt.Scale(domain=[0, 1])),
            color=alt.Color("policy:N", title=None, legend=alt.Legend(orient="top", symbolLimit=0, labelLimit=0)),
            detail="run:N",
            opacity=alt.condition(picked, alt.value(1), alt.value(0.15)),
            tooltip=[
                alt.Tooltip("run:N"),
                alt.Tooltip("ms:Q", format=",.4~g"),
                alt.Tooltip("share:Q", format=".1%"),
            ],
        )
        .properties(width="container", height=220)
        .add_params(picked)
    )


def _timeline() -> Any:
    """Panels over one axis of time; a brush on the first chooses the steps shown in the last."""
    alt = altair()
    brush = alt.selection_interval(encodings=["x"], name="brush")
    panels = [
        _modes(alt).add_params(brush),
        _lines(alt, "throughput", "tokens/s, prompts and answers", None),
        _lines(alt, "queue", "requests", {"running": BLUE, "waiting": VERMILION}),
        _lines(alt, "sizes", "slots: k and N", None, step=True),
        _lines(alt, "kv", "KV blocks used, %", {"KV": GREEN}),
        _lines(alt, "sides", "crossover, µs a token", None),
        _steps(alt, brush),
    ]
    return alt.vconcat(*panels, spacing=14).resolve_scale(color="independent", strokeDash="independent")


def _time(alt: Any, title: str | None = None) -> Any:
    return alt.X("t:Q", title=title, scale=alt.Scale(nice=False, zero=True))


def _modes(alt: Any) -> Any:
    colours = alt.Scale(domain=list(MODES), range=list(MODES.values()))
    return (
        alt.Chart(alt.NamedData("modes"), title=_title(alt, "mode (drag here to zoom into the steps below)"))
        .mark_rect()
        .encode(
            x=_time(alt),
            x2="t2:Q",
            color=alt.Color("series:N", title=None, scale=colours, legend=alt.Legend(orient="top")),
            tooltip=["series:N", alt.Tooltip("t:Q", title="from s"), alt.Tooltip("t2:Q", title="to s")],
        )
        .properties(height=36)
    )


def _lines(alt: Any, data: str, title: str, colours: dict[str, str] | None, *, step: bool = False) -> Any:
    scale = alt.Scale(domain=list(colours), range=list(colours.values())) if colours else alt.Undefined
    single = data == "throughput"
    hidden = single or (colours is not None and len(colours) == 1)
    columns = 1 if data == "sides" else 3  # long names, one below the other, so that a phone holds them
    legend = None if hidden else alt.Legend(orient="top", symbolLimit=0, labelLimit=0, columns=columns)
    mark = {"interpolate": "step-after"} if step else {}
    encoding: dict[str, Any] = {
        "x": _time(alt),
        "y": alt.Y("value:Q", title=None, axis=alt.Axis(tickCount=4)),
        "tooltip": [alt.Tooltip("t:Q", title="s", format=",.2f"), alt.Tooltip("value:Q", format=",.4~g")],
    }
    if not single:
        encoding["color"] = alt.Color("series:N", title=None, scale=scale, legend=legend)
        encoding["tooltip"] = ["series:N", *encoding["tooltip"]]
    chart = alt.Chart(alt.NamedData(data), title=_title(alt, title)).mark_line(strokeWidth=1.3, **mark)
    return chart.encode(**encoding).properties(height=HEIGHT)


def _steps(alt: Any, brush: Any) -> Any:
    """Single steps: when, how long, of which kind."""
    scale = alt.Scale(domain=list(PHASES), range=list(PHASES.values()))
    return (
        alt.Chart(alt.NamedData("steps"), title=_title(alt, "steps: start to end, height is their time in ms"))
        .transform_filter(brush)
        .mark_rect(clip=True)
        .encode(
            x=alt.X("t:Q", title="time, s", scale=alt.Scale(nice=False, zero=False, domain=brush)),
            x2="t2:Q",
            y=alt.Y("ms:Q", title=None, axis=alt.Axis(tickCount=4)),
            color=alt.Color("phase:N", title=None, scale=scale, legend=alt.Legend(orient="top")),
            tooltip=[
                "phase:N", alt.Tooltip("t:Q", title="start s", format=",.4f"), alt.Tooltip("ms:Q", format=",.3f"),
                "prefill_tokens:Q", "decode_seqs:Q", "waiting:Q",
            ],
        )
        .properties(height=150)
    )  # fmt: skip


def _surface() -> Any:
    alt = altair()
    chosen = alt.param(name="phase_shown", value="all")
    return (
        alt.Chart(alt.NamedData("surface"))
        .transform_filter("datum.phase === phase_shown")
        .mark_rect()
        .encode(
            x=alt.X("tpot:O", title="TPOT limit, ms", axis=alt.Axis(labelAngle=-45, labelOverlap=True)),
            y=alt.Y("ttft:O", title="TTFT limit, ms", sort="descending"),
            color=alt.Color("met:Q", title="met", scale=alt.Scale(scheme="viridis", domain=[0, 1]),
                            legend=alt.Legend(format="%", orient="top")),
            tooltip=[alt.Tooltip("ttft:O", title="TTFT ≤ ms"), alt.Tooltip("tpot:O", title="TPOT ≤ ms"),
                     alt.Tooltip("met:Q", format=".1%")],
        )
        .properties(width="container", height=300)
        .add_params(chosen)
    )  # fmt: skip


def _title(alt: Any, text: str) -> Any:
    return alt.TitleParams(text, anchor="start", fontSize=11, fontWeight="normal", offset=2)
