"""The plot of the policy matrix: gain over v1 by setting, one panel per device and model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ebbench.render import figures
from ebbench.render.palette import policy_colours
from tests.benchmarks.policy_cells import BATCHWAIT, BUDGETS, MARGINAL
from tests.benchmarks.policy_results import Outcomes

SHOWN: dict[str, tuple[str, ...]] = {
    "v1, best budget": BUDGETS,
    "ppas": ("ppas",),
    "delayer": ("delayer",),
    "batchwait": (BATCHWAIT,),
    "eb": ("eb",),
    "marginal": (MARGINAL,),
}
SHAPES = ("circle", "square", "diamond", "triangle-up", "cross", "triangle-down")


def draw(
    cells: Mapping[str, Outcomes], columns: Sequence[tuple[str, str]], rows: Sequence[str], stem: Path
) -> list[Path]:
    """Write the plot as SVG and PNG; returns the paths. ``cells``: outcomes by cell, ``device model setting``."""
    points: list[dict[str, Any]] = []
    for device, model in columns:
        for row in rows:
            found = cells.get(f"{device} {model} {row}")
            if found is None:
                continue
            for title, policies in SHOWN.items():
                rate = max(found[name].tokens_per_s for name in policies)
                if title.startswith("v1"):
                    rate = max(rate, found["v1"].tokens_per_s)
                percent = 100 * (rate / found["v1"].tokens_per_s - 1)
                points.append({"panel": f"{model}, {device}", "setting": row, "series": title, "gain": percent})
    alt = figures.altair()
    names = list(SHOWN)
    colours = policy_colours(["v1", *names[1:]])
    shape = alt.Shape("series:N", scale=alt.Scale(domain=names, range=list(SHAPES)), sort=names, title=None)
    chart = (
        alt.Chart(figures.values(points))
        .mark_point(filled=True, size=55, opacity=0.85)
        .encode(
            x=alt.X("gain:Q", title="throughput over v1, %"),
            y=alt.Y("setting:N", sort=list(rows), title=None),
            color=figures.colour(names, colours),
            shape=shape,
        )
        .properties(width=230, height=300)
        .facet(facet=alt.Facet("panel:N", title=None, sort=[f"{m}, {d}" for d, m in columns]), columns=3)
        .resolve_scale(x="independent")
    )
    return figures.save(chart, stem, ("svg", "png"))
