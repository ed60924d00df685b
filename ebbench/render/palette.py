"""Colours of figures and the HTML page: one colour per meaning.

The palette of Okabe and Ito, which colour-blind readers can distinguish, without its yellow, which is too light on
white.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

BLACK, ORANGE, SKY, GREEN, BLUE, VERMILION, PURPLE = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7",
)  # fmt: skip
GREY = "#8A8A8A"

POLICIES: Mapping[str, str] = {
    "v1": BLUE, "v0": ORANGE, "cadence": SKY, "eb": VERMILION, "ebplus": GREEN, "deferred": PURPLE, "marginal": BLACK,
    "delayer": "#882255", "batchwait": "#999933", "slochunk": "#661100", "ppas": "#332288",
}  # fmt: skip
"""Colours of the built-in policies, by kind."""

SERIES = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY, BLACK)
"""Colours for names without one of their own, in this order."""

MODES: Mapping[str, str] = {"exclusive": SKY, "mixed": PURPLE}
STEPS: Mapping[str, str] = {"prefill": ORANGE, "decode": BLUE, "mixed": PURPLE}
"""Colours of steps and batches by content."""

QUEUE: Mapping[str, str] = {"running": BLUE, "waiting": VERMILION}
SIZES: Mapping[str, str] = {"N*": BLUE, "k*": VERMILION, "N_obs": GREEN}
SIDES: Mapping[str, str] = {
    "cost of mixing (left side)": VERMILION,
    "saving of mixing + margin (right side)": BLUE,
}
OPEN: Mapping[str, str] = {"waiting for a first token": VERMILION, "being answered": BLUE}
RATE: Mapping[str, str] = {"sent": BLUE, "completed": GREEN, "failed": VERMILION}
TTFT: Mapping[str, str] = {"median": BLUE, "p90": VERMILION}
THROUGHPUT, KV, BOUNDARY = BLUE, GREEN, GREY

ON_DARK: Mapping[str, str] = {BLUE: "#4DA6E0", VERMILION: "#F08A4B", GREEN: "#3FC79A", BLACK: "#B0B8C0"}
"""Replacements for colours that are too dark on the dark page."""


def ttft_colours(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Colours of the series in ``rows``: those of TTFT, and one for the median of each class."""
    others = [name for name in dict.fromkeys(row["series"] for row in rows) if name not in TTFT]
    free = [colour for colour in SERIES if colour not in TTFT.values()]
    return {**TTFT, **{name: free[place % len(free)] for place, name in enumerate(others)}}


def policy_colours(names: Sequence[str]) -> list[str]:
    """A colour per policy: that of its kind, or an unused one if it has none or another policy has taken it.

    Names may have a suffix, as in ``ebplus (rate 5/s)``, or be labels. Colours repeat if there are more names than
    colours.
    """
    own = [POLICIES.get(name.split(" ")[0].partition(":")[0]) for name in names]
    free = [colour for colour in SERIES if colour not in own] or list(SERIES)
    colours, used = list[str](), 0
    for colour in own:
        if colour is not None and colour not in colours:
            colours.append(colour)
        else:
            colours.append(free[used % len(free)])
            used += 1
    return colours
