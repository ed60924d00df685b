"""Fidelity of emulated devices: published and simulated figures, and scores against the project's targets.

Pure functions of :class:`PublishedFigure` objects, which :mod:`ebbench.papers.fidelity.runs` creates.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import isnan
from statistics import median

THROUGHPUT = ("tokens_per_s", "requests_per_s", "output_tokens_per_s")
SCHEDULERS = ("v1", "eb", "ebplus")  # compared with each other; fixed thresholds are not
GAP = 0.02  # smaller published differences do not define a winner
TIE = 1e-3  # smaller differences of ours are none: both wait for the same API server
GAIN_POINTS = 0.05

Key = tuple[str, str, str, str]


@dataclass(frozen=True)
class PublishedFigure:
    """One published number and ours. ``scheduler``: the policy that corresponds to the published one.

    ``fitted``: the cell belongs to a row on which constants were fitted. ``scored`` is False if the published value is
    doubtful or comes from another code base (``note`` gives the reason). A figure is NaN where the run ended without it
    (out of memory). ``caveats``: codes of the warnings that our run gives.
    """

    source: str
    device: str
    model: str
    case: str
    scheduler: str
    metric: str
    published: float
    ours: float
    fitted: bool = False
    scored: bool = True
    note: str = ""
    caveats: tuple[str, ...] = ()

    @property
    def error(self) -> float:
        """Relative error of our value."""
        return self.ours / self.published - 1.0

    @property
    def failed(self) -> bool:
        """Whether the published run or ours ended without the figure."""
        return isnan(self.published) or isnan(self.ours)

    @property
    def row(self) -> Key:
        """Cells of one row differ only in scheduler and metric."""
        return (self.source, self.device, self.model, self.case)


@dataclass(frozen=True)
class Score:
    """One target: the value reached, whether it meets the target, and the number of cells or comparisons."""

    name: str
    target: str
    reached: float
    count: int
    met: bool
    unit: str = "share"


@dataclass(frozen=True)
class Comparison:
    """Two schedulers in one row, by throughput."""

    row: Key
    first: str
    second: str
    published_gain: float  # second over first
    our_gain: float
    fitted: bool

    @property
    def decided(self) -> bool:
        """Whether the published difference is large enough to define a winner."""
        return abs(self.published_gain) > GAP

    @property
    def same_winner(self) -> bool:
        """Whether our difference has the same sign; where ours are equal there is no winner."""
        return self.published_gain * self.our_gain > 0 and abs(self.our_gain) > TIE


def comparisons(cells: Iterable[PublishedFigure]) -> list[Comparison]:
    """All pairs of v1, EB and EB+ within a row, by throughput; v1 is always the first of its pairs."""
    rows: dict[Key, dict[str, PublishedFigure]] = {}
    for cell in cells:
        if cell.metric in THROUGHPUT and cell.scored and cell.scheduler in SCHEDULERS:
            rows.setdefault(cell.row, {})[cell.scheduler] = cell
    pairs = []
    for row, by_scheduler in rows.items():
        names = sorted(by_scheduler, key=lambda name: (name != "v1", name))
        for first_name, second_name in combinations(names, 2):
            first, second = by_scheduler[first_name], by_scheduler[second_name]
            printed_gain, our_gain = second.published / first.published - 1.0, second.ours / first.ours - 1.0
            fitted = first.fitted or second.fitted
            pairs.append(Comparison(row, first_name, second_name, printed_gain, our_gain, fitted))
    return pairs


@dataclass(frozen=True)
class Decisions:
    """How often our figures name the faster one, of ``count`` pairs that differ with us by more than ``gap`` (a share).

    ``right``: those whose published difference has the same sign, whatever its size.
    """

    gap: float
    count: int
    right: int


def decisions(cells: Iterable[PublishedFigure], gaps: Sequence[float] = (0.02, 0.05, 0.1)) -> list[Decisions]:
    """How often the scheduler that is faster by more than ``gap`` with us is faster in print."""
    pairs = comparisons(cells)
    by_gap = []
    for gap in gaps:
        chosen = [pair for pair in pairs if abs(pair.our_gain) > gap]
        by_gap.append(Decisions(gap, len(chosen), sum(pair.published_gain * pair.our_gain > 0 for pair in chosen)))
    return by_gap


def scores(cells: Sequence[PublishedFigure]) -> list[Score]:
    """The three throughput targets, over all scored cells given."""
    pairs = comparisons(cells)
    decided = [pair for pair in pairs if pair.decided]
    gains = [pair for pair in pairs if pair.first == "v1"]
    close = [abs(pair.our_gain - pair.published_gain) <= GAIN_POINTS for pair in gains]
    errors = [abs(cell.error) for cell in cells if cell.scored and cell.metric in THROUGHPUT]
    kept = {
        ("same winner where the published gap exceeds 2 %", 0.95): [pair.same_winner for pair in decided],
        ("gain over v1 within 5 points", 0.80): close,
    }
    shares = ((name, least, sum(met) / len(met), len(met)) for (name, least), met in kept.items() if met)
    reached = [Score(name, f"at least {100 * least:.0f} %", x, count, x >= least) for name, least, x, count in shares]
    if errors:
        middle = median(errors)
        reached.append(Score("median error of throughput", "at most 8 %", middle, len(errors), middle <= 0.08))
    return reached


# Targets of the replayed run: metric -> largest relative error.
REPLAY_TARGETS = {"tpot_mean_ms": 0.01, "e2el_mean_s": 0.02, "ttft_mean_s": 0.05, "ttft_p99_s": 0.05}


def replay_scores(cells: Iterable[PublishedFigure]) -> list[Score]:
    """The targets of the replayed run, one per metric."""
    return [
        Score(f"replayed run, {cell.metric}", f"within {limit:.0%}", abs(cell.error), 1, abs(cell.error) <= limit)
        for cell in cells
        if (limit := REPLAY_TARGETS.get(cell.metric)) is not None and cell.scored
    ]
