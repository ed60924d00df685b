"""The HTML report: one self-contained file with tables, charts and the library that draws them; no network access."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from ebbench import __version__
from ebbench.errors import RunError
from ebbench.installation import need
from ebbench.records import files
from ebbench.render import palette
from ebbench.render.figures import altair, ms_axis
from ebbench.render.palette import policy_colours
from ebbench.report.page_data import Page

HEIGHT = 110
LATENCIES = {
    "ttft": "time to first token (logarithmic)",
    "tpot": "time per output token (logarithmic)",
    "itl": "inter-token latency (logarithmic)",
    "e2el": "end-to-end latency (logarithmic)",
}
_SYMBOL_PX, _CHARACTER_PX = 32.0, 6.0


def specs(policies: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """Vega-Lite specifications by chart name; legends are sized for the names of ``policies``."""
    return dict(_specs(max(map(len, policies), default=0)))


@cache
def _specs(longest: int) -> dict[str, dict[str, Any]]:
    charts = {f"cdf_{name}": _cdf(name, title, longest) for name, title in LATENCIES.items()}
    charts |= {"timeline": _timeline(), "steps": _steps(), "surface": _surface()}
    charts |= {"classes": _classes(), "sessions": _sessions()}
    return {name: chart.to_dict(validate=False) | {"background": None} for name, chart in charts.items()}


def _cdf(name: str, title: str, longest_name: int) -> Any:
    alt = altair()
    columns = alt.ExprRef(f"max(1, floor(width / {_SYMBOL_PX + _CHARACTER_PX * longest_name:g}))")
    legend = alt.Legend(orient="top", symbolLimit=0, labelLimit=240, columns=columns)
    picked = alt.selection_point(fields=["policy"], bind="legend", name=f"picked_{name}")
    base = alt.Chart(alt.NamedData(f"cdf_{name}")).encode(
        x=alt.X("ms:Q", title=title, scale=alt.Scale(type="log", nice=False), axis=ms_axis()),
        y=alt.Y("share:Q", title="share of samples", axis=alt.Axis(format="%"), scale=alt.Scale(domain=[0, 1])),
        color=alt.Color("policy:N", title=None, legend=legend),
        detail="run:N",
    )
    lines = base.mark_line(clip=True, strokeWidth=1.6).encode(
        opacity=alt.condition(picked, alt.value(1), alt.value(0.15))
    )
    tooltip = ["run:N", alt.Tooltip("ms:Q", format=",.4~r"), alt.Tooltip("share:Q", format=".1%")]
    return (lines.add_params(picked) + _hover(base, tooltip)).properties(width="container", height=220)


def _hover(base: Any, tooltip: list[Any]) -> Any:
    """Invisible points that carry the tooltips: a line mark has only one tooltip."""
    return base.mark_point(opacity=0, filled=True, size=90, clip=True).encode(tooltip=tooltip)


def _timeline() -> Any:
    """Panels over one time axis; dragging in the first selects the steps shown in the chart below."""
    alt = altair()
    panels = [
        _modes(alt),
        _lines(alt, "throughput", "tokens/s, prompts and answers", {"": palette.THROUGHPUT}),
        _lines(alt, "queue", "requests", palette.QUEUE),
        _lines(alt, "sizes", "sequences: limit N*, k* idle slots at a refill, N_obs observed",
               palette.SIZES, step=True),
        _lines(alt, "open", "open requests", palette.OPEN, step=True),
        _lines(alt, "rate", "requests per second", palette.RATE),
        _lines(alt, "ttft", "time to first token by start of the request, ms", None),
        _lines(alt, "kv", "KV blocks used, %", {"": palette.KV}),
        _lines(alt, "sides", "crossover, µs per token", palette.SIDES),
    ]  # fmt: skip
    stacked = alt.vconcat(*panels, spacing=12).resolve_scale(color="independent", strokeDash="independent")
    return stacked.add_params(*_set_by_page("from_s", "to_s", "zoomed"))


def _set_by_page(*names: str) -> list[Any]:
    return [altair().param(name=name, value=0) for name in names]


def _panel(alt: Any, title: str, height: int, *layers: Any) -> Any:
    """Layers over one time axis, with a rule at the start of each phase of the scenario."""
    starts = (
        alt.Chart(alt.NamedData("phases"))
        .mark_rule(strokeDash=[4, 3], color=palette.BOUNDARY)
        .encode(x="t:Q", tooltip=[alt.Tooltip("label:N", title="phase"), alt.Tooltip("t:Q", title="from s")])
    )
    return alt.layer(*layers, starts, title=_title(alt, title)).properties(height=height)


def _time(alt: Any) -> Any:
    seconds = alt.Axis(labelFlush=True, labelExpr="datum.label + ' s'")
    return alt.X("t:Q", title=None, scale=alt.Scale(nice=False, zero=True), axis=seconds)


def _modes(alt: Any) -> Any:
    colours = alt.Scale(domain=list(palette.MODES), range=list(palette.MODES.values()))
    spans = alt.Chart(alt.NamedData("modes")).mark_rect()
    spans = spans.encode(
        x=_time(alt), x2="t2:Q", color=alt.Color("series:N", title=None, scale=colours, legend=_legend(alt)),
        tooltip=["series:N", alt.Tooltip("t:Q", title="from s"), alt.Tooltip("t2:Q", title="to s")],
    )  # fmt: skip
    # The time range is set by dragging or by the page's buttons, so it is drawn from the parameters and not by the
    # brush.
    unseen = alt.BrushConfig(fillOpacity=0, strokeOpacity=0)
    brush = alt.selection_interval(encodings=["x"], name="brush", mark=unseen, translate=False, zoom=False)
    window = (
        alt.Chart(alt.NamedData("window"))
        .mark_rect(fill="#000", fillOpacity=0.2, stroke="#000", strokeWidth=1.5, opacity=alt.expr("zoomed ? 1 : 0"))
        .encode(x=alt.XDatum(alt.expr("from_s"), type="quantitative"), x2=alt.X2Datum(alt.expr("to_s")))
    )
    names = (
        alt.Chart(alt.NamedData("phases"))
        .mark_text(align="left", baseline="middle", dx=4, fontWeight="bold", limit=alt.expr("datum.room"), color="#000")
        .encode(x="t:Q", y=alt.value(18), text="shown:N")
    )
    return _panel(alt, "mode of the scheduler", 36, spans.add_params(brush), window, names)


def _lines(alt: Any, data: str, title: str, colours: Mapping[str, str] | None, *, step: bool = False) -> Any:
    """``colours`` None: the page brings names and colours with the rows."""
    single = colours is not None and len(colours) == 1
    tooltip = [alt.Tooltip("t:Q", title="s", format=",.2f"), alt.Tooltip("value:Q", format=",.4~r")]
    base = alt.Chart(alt.NamedData(data)).encode(
        x=_time(alt), y=alt.Y("value:Q", title=None, axis=alt.Axis(tickCount=4))
    )
    mark = {"strokeWidth": 1.3, "interpolate": "step-after"} if step else {"strokeWidth": 1.3}
    if single and colours is not None:
        return _panel(alt, title, HEIGHT, base.mark_line(color=colours[""], **mark), _hover(base, tooltip))
    columns = 1 if data == "sides" else 3  # long names below each other, so that they fit on a phone
    known = {} if colours is None else {"domain": list(colours)}
    scale = alt.Scale(range=list(colours.values() if colours is not None else palette.SERIES), **known)
    named = base.encode(color=alt.Color("series:N", title=None, scale=scale, legend=_legend(alt, columns=columns)))
    return _panel(alt, title, HEIGHT, named.mark_line(**mark), _hover(named, ["series:N", *tooltip]))


def _legend(alt: Any, **options: Any) -> Any:
    return alt.Legend(orient="top", offset=4, symbolLimit=0, labelLimit=0, **options)


def _steps() -> Any:
    """The single steps of the selected time range: start, duration, kind."""
    alt = altair()
    colours = alt.Scale(domain=list(palette.STEPS), range=list(palette.STEPS.values()))
    chosen = alt.Scale(nice=False, zero=False, domainMin=alt.expr("from_s"), domainMax=alt.expr("to_s"))
    return (
        alt.Chart(alt.NamedData("steps"), title=_title(alt, "time of each step, ms"))
        .transform_filter("datum.t2 >= from_s && datum.t <= to_s")
        .mark_rect(clip=True, opacity=0.85, stroke="#000", strokeOpacity=0.5, strokeWidth=alt.expr("few ? 0.7 : 0"))
        .encode(
            x=alt.X("t:Q", title="time, s", scale=chosen),
            x2="t2:Q",
            y=alt.Y("ms:Q", title=None, axis=alt.Axis(tickCount=4)),
            y2=alt.datum(0),
            color=alt.Color("phase:N", title=None, scale=colours, legend=_legend(alt, symbolStrokeWidth=0)),
            tooltip=[
                alt.Tooltip("phase:N", title="kind"), alt.Tooltip("t:Q", title="start s", format=",.4f"),
                alt.Tooltip("ms:Q", format=",.3f"), alt.Tooltip("prefill_tokens:Q", title="prompt tokens"),
                alt.Tooltip("decode_seqs:Q", title="sequences decoding"), alt.Tooltip("waiting:Q", title="waiting"),
            ],
        )
        .properties(height=170)
        .add_params(*_set_by_page("from_s", "to_s", "few"))
    )  # fmt: skip


def _surface() -> Any:
    alt = altair()
    chosen = alt.param(name="phase_shown", value="all")
    met = alt.Legend(format="%", orient="top", titleLimit=0, gradientLength=160)
    return (
        alt.Chart(alt.NamedData("surface"))
        .transform_filter("datum.phase === phase_shown")
        .mark_rect()
        .encode(
            x=alt.X("tpot:O", title="TPOT limit", axis=ms_axis(labelAngle=-45)),
            y=alt.Y("ttft:O", title="TTFT limit", sort="descending", axis=ms_axis()),
            color=alt.Color("met:Q", title="requests within both limits", legend=met,
                            scale=alt.Scale(scheme="viridis", domain=[0, 1])),
            tooltip=[alt.Tooltip("ttft:O", title="TTFT ≤ ms"), alt.Tooltip("tpot:O", title="TPOT ≤ ms"),
                     alt.Tooltip("met:Q", format=".1%")],
        )
        .properties(width="container", height=300)
        .add_params(chosen)
    )  # fmt: skip


def _classes() -> Any:
    alt = altair()
    legend = alt.Legend(orient="top", symbolLimit=0, labelLimit=240)
    base = alt.Chart(alt.NamedData("classes")).mark_line(clip=True, strokeWidth=1.6)
    base = base.encode(
        x=alt.X("ms:Q", title=None, scale=alt.Scale(type="log", nice=False), axis=ms_axis()),
        y=alt.Y("share:Q", title="share of requests", axis=alt.Axis(format="%")),
        color=alt.Color("class:N", title=None, scale=alt.Scale(range=list(palette.SERIES)), legend=legend),
        strokeDash=alt.StrokeDash("latency:N", title=None, legend=alt.Legend(orient="top")),
        tooltip=["class:N", "latency:N", alt.Tooltip("ms:Q", format=",.4~r"), alt.Tooltip("share:Q", format=".1%")],
    )
    return base.properties(width="container", height=240)


def _sessions() -> Any:
    """One point per session of the chosen run: when it began, and how long it took."""
    alt = altair()
    return (
        alt.Chart(alt.NamedData("sessions"))
        .mark_point(filled=True, opacity=0.6)
        .encode(
            x=alt.X("t:Q", title="start, s", scale=alt.Scale(zero=True, nice=False)),
            y=alt.Y("s:Q", title="time to complete, s"),
            size=alt.Size("turns:Q", title="requests", legend=alt.Legend(orient="top"),
                          scale=alt.Scale(range=[12, 160])),
            color=alt.Color("model:Q", title="share of the time in the model",
                            legend=alt.Legend(format="%", orient="top", titleLimit=0, gradientLength=140),
                            scale=alt.Scale(scheme="viridis", domain=[0, 1])),
            tooltip=["session:N", "class:N", alt.Tooltip("t:Q", title="start s", format=",.2f"),
                     alt.Tooltip("s:Q", title="complete after s", format=",.2f"),
                     alt.Tooltip("turns:Q", title="requests"),
                     alt.Tooltip("model:Q", title="in the model", format=".0%"),
                     alt.Tooltip("tools:Q", title="with tools", format=".0%")],
        )
        .properties(width="container", height=260)
    )  # fmt: skip


def _title(alt: Any, text: str) -> Any:
    return alt.TitleParams(text, anchor="start", frame="group", fontSize=11, fontWeight="normal", offset=2)


_PARTS = Path(__file__).parent / "page"


def render(page: Page) -> str:
    """The text of the file.

    Names are escaped in HTML and JSON; its content security policy allows only these scripts.
    """
    jinja2 = need("jinja2", "the HTML report")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_PARTS), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    scripts = [library(), (_PARTS / "page.js").read_text(encoding="utf-8")]
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts)
    text: str = environment.get_template("page.html.j2").render(
        page=asdict(page),
        present={name for name in ("classes", "sessions") if any(run[name] for run in page.runs)},
        charts=[f"cdf_{name}" for name in LATENCIES],
        data={
            "specs": specs(page.policies) | {f"search{i}": search.chart for i, search in enumerate(page.searches)},
            "shared": page.shared,
            "runs": page.runs,
            "labels": page.labels,
            "policies": page.policies,
            "colours": policy_colours(page.policies),
            "on_dark": palette.ON_DARK,
        },
        style=(_PARTS / "page.css").read_text(encoding="utf-8"),
        scripts=scripts,
        policy=(
            f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
            "base-uri 'none'; form-action 'none'"
        ),
        version=__version__,
    )
    return text


@cache
def library() -> str:
    """Vega, Vega-Lite and Vega-Embed in one script, safe inside a script element.

    Making it takes half of the time of a page, so it is kept in the user's cache.
    """
    vl_convert = need("vl_convert", "the HTML report")
    kept = files.user_cache() / f"vega-{vl_convert.__version__}.js"
    if not (bundle := _whole(kept)):
        bundle = str(vl_convert.javascript_bundle())
        with suppress(RunError):  # a home that cannot be written costs time, not the page
            files.write_text(f"{_digest(bundle)}\n{bundle}", kept)
    return bundle.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _whole(path: Path) -> str:
    """A kept text after the line with its digest; empty if there is none, or another text than was written."""
    digest = text = ""
    with suppress(OSError, UnicodeDecodeError):
        digest, _, text = path.read_bytes().decode().partition("\n")
    return text if digest == _digest(text) else ""


def _digest(text: str) -> str:
    return f"// sha256 {hashlib.sha256(text.encode()).hexdigest()}"


def write(page: Page, path: Path) -> None:
    """Write the file. Raises RunError if that fails."""
    files.write_text(str(render(page)), path)
