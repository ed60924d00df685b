"""A figure over commits: points of a history, changes in it, and whether the newest point is worse.

A series is one policy in one environment, on one server, under one load and one set of limits. A point is a commit, or
one measurement of a server whose commit nobody stated. A change is shown if the gate's test (``verdict.py``) fails the
runs after it against those before it, or these against those: the pairs nearest to it, of the same plan where both
sides have it. Where its place was searched for, the level is shared among all places at which it could have been found.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from statistics import fmean
from typing import Literal

from ebbench.analysis.statistics import EXACT_PAIRS, PairedInterval, paired_t
from ebbench.analysis.units import GateUnit, gate_unit, is_higher_better
from ebbench.analysis.verdict import (
    GATED,
    Judged,
    Pair,
    Rules,
    gated_by_default,
    judge,
    pairs_needed,
    without_copies,
)
from ebbench.errors import DataError
from ebbench.grouping import by_key
from ebbench.records.manifest import Manifest, RunLabels
from ebbench.records.run import Run, slug

NEXT_MEASUREMENT_S = 6 * 3600
"""A run that begins so long after the one before it belongs to another measurement of a server."""


@dataclass(frozen=True, order=True)
class SeriesKind:
    """The values that all points of a series share."""

    policy: str
    environment: str
    server: str
    load: str
    limits: str

    @classmethod
    def of(cls, unit: GateUnit) -> SeriesKind:
        """The kind of series that a run belongs to."""
        return cls(unit.policy, unit.configuration_hash, unit.server, unit.load, unit.slo)

    @property
    def name(self) -> str:
        """A unique file stem."""
        shared = "\n".join((self.environment, *filter(None, (self.server,)), self.load, self.limits))
        return f"{slug(self.policy)}-{hashlib.sha256(shared.encode()).hexdigest()[:12]}"


@dataclass(frozen=True)
class Member:
    """A run of a series. ``stated``: its commit was given by the user or the CI job."""

    commit: str
    unit: GateUnit
    labels: RunLabels = RunLabels()  # noqa: RUF009 - frozen
    stated: bool = False

    @classmethod
    def of(cls, manifest: Manifest, unit: GateUnit) -> Member:
        """The point of a history that a run's manifest and unit give.

        Without a stated commit it is that of ebbench, which holds simulator and plugin; of a server its own version.
        """
        stated = manifest.labels.commit
        if stated or manifest.engine == "endpoint":
            return cls(stated or str(manifest.facts.get("server_version") or ""), unit, manifest.labels, bool(stated))
        return cls(manifest.git_commit or f"ebbench-{manifest.versions.get('ebbench', '')}", unit, manifest.labels)


@dataclass(frozen=True)
class Point:
    """The runs of one commit, or of one measurement, in order of time."""

    members: tuple[Member, ...]

    @property
    def commit(self) -> str:
        """The commit."""
        return self.members[0].commit

    @property
    def units(self) -> list[GateUnit]:
        """The runs."""
        return [member.unit for member in self.members]

    @cached_property
    def independent(self) -> list[GateUnit]:
        """The runs in virtual time; in real time one unit with their geometric means, of the plans of all."""
        first, *others = self.units
        if first.virtual or not others:
            return self.units
        means = {name: None if (interval := self.figure(name)) is None else interval.mean for name in first.figures}
        plans = "".join(sorted(unit.plan_hash for unit in self.units))
        return [replace(first, figures=means, plan_hash=plans)]

    @property
    def begun_ns(self) -> int:
        """When the first run began."""
        return self.members[0].unit.anchor_unix_ns

    @property
    def begun(self) -> str:
        """Start of the first run in UTC, to the minute."""
        return datetime.fromtimestamp(self.begun_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M")

    @property
    def label(self) -> str:
        """Branch or pull request, else the name of the runs; empty without either."""
        return next((text for member in self.members for text in (member.labels.label, member.labels.name) if text), "")

    def figure(self, name: str) -> PairedInterval | None:
        """Geometric mean over the runs with its t interval (infinite for one run); None if a run lacks the figure."""
        values = [unit.figures[name] for unit in self.units]
        if any(value is None or value <= 0 for value in values):
            return None
        interval = paired_t([math.log(value) for value in values if value])
        return PairedInterval(*map(math.exp, (interval.mean, interval.low, interval.high)))


def series_points(runs: Sequence[Run]) -> dict[SeriesKind, list[Point]]:
    """The series of the valid runs, points in order of time. Raises DataError without any, and for a damaged run."""
    members = (Member.of(run.manifest, gate_unit(run)) for run in runs if run.manifest.valid)
    groups = by_key((SeriesKind.of(member.unit), member) for member in members)
    if not groups:
        raise DataError("no valid run to make a history of")
    return {kind: points_by_commit(groups[kind]) for kind in sorted(groups)}


def points_by_commit(members: Sequence[Member]) -> list[Point]:
    """Commits with their runs, in order of time; of a server, and of what is measured twice, measurements."""
    rows: list[list[Member]] = []
    for member in sorted(members, key=lambda measured: measured.unit.anchor_unix_ns):
        same = [row for row in rows if row[0].commit == member.commit]
        if member.unit.virtual and not member.unit.server and same:
            same[0].append(member)
        elif same and (same[-1] is rows[-1] or member.stated) and _same_measurement(same[-1], member):
            same[-1].append(member)
        else:
            rows.append([member])
    return [Point(tuple(row)) for row in rows]


def _same_measurement(row: Sequence[Member], member: Member) -> bool:
    """Whether a run in real time belongs to the same measurement as earlier ones of its commit."""
    pause_s = (member.unit.anchor_unix_ns - row[-1].unit.anchor_unix_ns) / 1e9
    soon = pause_s < NEXT_MEASUREMENT_S or member.stated or not member.unit.server
    asked = (member.unit.seed, member.unit.plan_hash)
    return soon and all(asked != (earlier.unit.seed, earlier.unit.plan_hash) for earlier in row)


# Changes.

Direction = Literal["worse", "better"]
DEFAULT_RULES = Rules()


@dataclass(frozen=True)
class Change:
    """A change between the points ``place - 1`` and ``place``; ``judged`` is of the worse side against the other."""

    place: int
    direction: Direction
    judged: Judged

    @property
    def bounds(self) -> tuple[float, float, float]:
        """How much more of the figure there is after the change, as a share, and the 95 % interval of it."""
        rises = is_higher_better(self.judged.figure) == (self.direction == "better")
        losses = (self.judged.loss, self.judged.low, self.judged.high)
        if rises:
            return losses
        grown, least, most = (1 / (1 + loss) - 1 if math.isfinite(loss) else -1.0 for loss in losses)
        return grown, most, least


Alert = Literal["", "worse", "doubt"]


@dataclass(frozen=True)
class Trend:
    """One figure of a series. ``newest``: the last point that has it against those since the last change; None without
    two.

    ``alert``: ``worse`` if that point fails, or if the last change was for the worse; ``doubt`` if that point is worse
    than all since the last change, by more than the margin, but has too few runs to show it.
    """

    kind: SeriesKind
    figure: str
    points: tuple[Point, ...]
    values: tuple[PairedInterval | None, ...]
    changes: tuple[Change, ...] = ()
    newest: Judged | None = None
    alert: Alert = ""

    @property
    def judged(self) -> list[int]:
        """The places of the points that have the figure."""
        return [place for place, value in enumerate(self.values) if value is not None]


def trend_of(kind: SeriesKind, points: Sequence[Point], figure: str, rules: Rules = DEFAULT_RULES) -> Trend:
    """The trend of one figure. Points that lack it are left out of the tests."""
    own = {name: share for name, share in rules.margin.items() if name == figure}
    rules = replace(rules, gated=(figure,), margin=own)
    values = tuple(point.figure(figure) for point in points)
    known = [place for place, value in enumerate(values) if value is not None]
    known_points = [points[place] for place in known]
    changes = [replace(change, place=known[change.place]) for change in _changes(known_points, 0, figure, rules)]
    begin = changes[-1].place if changes else 0
    since = [points[place] for place in known if place >= begin]
    newest = _judged(since[:-1], since[-1:], figure, rules) if len(since) > 1 else None
    alert: Alert = "worse" if changes and changes[-1].direction == "worse" else ""
    if newest is not None and newest.outcome == "fail":
        alert = "worse"
    elif not alert and newest is not None:
        sign = -1.0 if is_higher_better(figure) else 1.0
        *earlier, last = [sign * level for level in _levels(since, figure)]
        if last > max(earlier) and last - fmean(earlier) >= math.log1p(rules.margin_of(figure)):
            alert = "doubt"
    return Trend(kind, figure, tuple(points), values, tuple(changes), newest, alert)


def _judged(before: Sequence[Point], after: Sequence[Point], figure: str, rules: Rules) -> Judged | None:
    """The gate's judgement on a figure of the runs after against those before; None if nothing can be paired."""
    pairs = nearest_pairs(before, after)
    judged = _entry(pairs, figure, rules)
    few = len(pairs) < pairs_needed(rules, 1)
    return replace(judged, outcome="inconclusive") if judged is not None and few else judged


def _entry(pairs: Sequence[Pair], figure: str, rules: Rules) -> Judged | None:
    judged = judge(pairs, rules, with_detectable=False).judged if pairs else ()
    return next((entry for entry in judged if entry.figure == figure), None)


def nearest_pairs(before: Sequence[Point], after: Sequence[Point]) -> list[Pair]:
    """Pairs of a run after and one before, those nearest in time first, each run in one pair, without copies.

    Runs of the same plan are paired; runs of plans that only one side has, with each other. In real time a point counts
    once, with its means: its runs share what the machine was like that night. At most as many pairs as the exact test
    takes.
    """
    old = [unit for point in reversed(before) for unit in reversed(point.independent)]
    new = [unit for point in after for unit in point.independent]
    shared = {unit.plan_hash for unit in old} & {unit.plan_hash for unit in new}
    waiting = by_key((unit.plan_hash if unit.plan_hash in shared else "", unit) for unit in old)
    pairs = []
    for unit in new:
        if mates := waiting.get(unit.plan_hash if unit.plan_hash in shared else ""):
            pairs.append(Pair(mates.pop(0), unit))
    return without_copies(pairs)[:EXACT_PAIRS]


def _changes(points: Sequence[Point], first: int, figure: str, rules: Rules) -> list[Change]:
    """The changes between these points, ``first`` of which is the place of the first one in the series."""
    change = _change(points, figure, rules)
    if change is None:
        return []
    place = change.place
    before, after = (
        _changes(points[:place], first, figure, rules),
        _changes(points[place:], first + place, figure, rules),
    )
    return [*before, replace(change, place=first + place), *after]


def _change(points: Sequence[Point], figure: str, rules: Rules) -> Change | None:
    """The change between any of these points that stands out most, if it is shown."""
    sides = {place: nearest_pairs(points[:place], points[place:]) for place in range(1, len(points))}
    fewest = pairs_needed(replace(rules, alpha=rules.alpha / 2), 1)
    tested = {place: pairs for place, pairs in sides.items() if len(pairs) >= fewest}
    if not tested:
        return None
    levels = _levels(points, figure)

    def standing_out(at: int) -> float:  # difference of the means in its standard errors, but for a factor
        return abs(fmean(levels[at:]) - fmean(levels[:at])) * math.sqrt(at * (len(levels) - at) / len(levels))

    place = max(tested, key=standing_out)
    # In virtual time the same plan gives the same figure whenever it is run, so that no night is worse by chance.
    exact = all(pair.candidate.virtual and pair.candidate.lengths == pair.baseline.lengths for pair in tested[place])
    shared = replace(rules, alpha=rules.alpha / 2 / (1 if exact else len(tested)))  # it may rise or fall
    if len(tested[place]) < pairs_needed(shared, 1):
        return None
    turned = [Pair(pair.candidate, pair.baseline) for pair in tested[place]]
    sides_judged: Mapping[Direction, Sequence[Pair]] = {"worse": tested[place], "better": turned}
    for direction, pairs in sides_judged.items():
        entry = _entry(pairs, figure, shared)
        if entry is not None and entry.outcome == "fail":
            return Change(place, direction, entry)
    return None


def _levels(points: Sequence[Point], figure: str) -> list[float]:
    """Log of the figure of each point; against the mean of its plan where every plan was run more than once."""
    logs = [[(unit.plan_hash, math.log(unit.figures[figure] or 1.0)) for unit in point.independent] for point in points]
    plans = by_key(pair for point in logs for pair in point)
    repeated = all(len(values) > 1 for values in plans.values())
    means: Mapping[str, float] = {plan: fmean(values) for plan, values in plans.items()} if repeated else {}
    return [fmean(value - means.get(plan, 0.0) for plan, value in point) for point in logs]


def trends_of(runs: Sequence[Run], rules: Rules = DEFAULT_RULES) -> list[list[Trend]]:
    """Per series, those that began first in front, the trends of the gated figures.

    Raises DataError if no run is valid.
    """
    trends = []
    for kind, points in sorted(series_points(runs).items(), key=lambda item: item[1][0].begun_ns):
        units = [unit for point in points for unit in point.units]
        figures = rules.gated if rules.gated != GATED else gated_by_default(units)
        trends.append([trend_of(kind, points, figure, rules) for figure in figures])
    return trends
