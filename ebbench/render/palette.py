"""The colours of everything that is drawn: one colour per meaning, in figures and on the HTML page alike.

Okabe and Ito's palette, which colour-blind readers tell apart; its yellow is left out, it does not show on white paper.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vllm_eb.policy import PolicyError, policy_class

BLACK, ORANGE, SKY, GREEN, BLUE, VERMILION, PURPLE = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7",
)  # fmt: skip
GREY = "#8A8A8A"

SERIES = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY, BLACK)
"""For names that have no colour of their own, in this order."""

MODES: Mapping[str, str] = {"exclusive": SKY, "mixed": PURPLE}
STEPS: Mapping[str, str] = {"prefill": ORANGE, "decode": BLUE, "mixed": PURPLE}
"""Steps and batches by what they hold."""

QUEUE: Mapping[str, str] = {"running": BLUE, "waiting": VERMILION}
SIZES: Mapping[str, str] = {"N*": BLUE, "k*": VERMILION, "N_obs": GREEN}
SIDES: Mapping[str, str] = {
    "cost of mixing (left side)": VERMILION,
    "saving of mixing + margin (right side)": BLUE,
}
THROUGHPUT, KV, BOUNDARY = BLUE, GREEN, GREY

ON_DARK: Mapping[str, str] = {BLUE: "#4DA6E0", VERMILION: "#F08A4B", GREEN: "#3FC79A", BLACK: "#B0B8C0"}
"""What stands for a colour that is too dark on the dark page."""


def policy_colours(names: Sequence[str]) -> list[str]:
    """A colour per policy: that of its kind; what has none, or is a second of its kind, takes one that is free.

    ``names`` may go on behind the policy, as ``ebplus (rate 5/s)`` does, or be labels. Beyond the palette colours
    repeat.
    """
    own = [_own_colour(name) for name in names]
    free = [colour for colour in SERIES if colour not in own] or list(SERIES)
    found, used = list[str](), 0
    for colour in own:
        if colour is not None and colour not in found:
            found.append(colour)
        else:
            found.append(free[used % len(free)])
            used += 1
    return found


def _own_colour(name: str) -> str | None:
    """The colour of a policy's kind; None for a name that is no policy."""
    try:
        return policy_class(name.split(" ")[0].partition(":")[0]).colour
    except PolicyError:
        return None
