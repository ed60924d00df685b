"""The tables of the fidelity report as sections of a document."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isnan
from statistics import median

from ebbench.analysis.documents import Column, Section, Value, labels
from ebbench.devices.profiles import find_profile, list_devices
from ebbench.papers.fidelity.pages import page_of
from ebbench.papers.fidelity.scoreboard import FIGURES, Row
from ebbench.papers.fidelity.scores import Decisions, PublishedFigure, Score, comparisons


def _share(value: float) -> str:
    return f"{value:.1%}"


def _signed(value: float) -> str:
    return f"{value:+.1%}"


def _digits(value: float) -> str:
    return f"{value:.4g}"


def _known(value: float) -> float | None:
    """None for NaN: a run that ended without the figure."""
    return None if isnan(value) else value


def _number(name: str, show: Callable[[float], str], *, ours: bool = False) -> Column:
    return Column(name, show=show, ours=ours)


def front(rows: Iterable[Row], before: Mapping[str, Row]) -> Section:
    """One row per source and device, with a link to the source's page and what was fitted on it."""
    columns = (*labels("source", "device", "fitted on it"), *_figures())
    found = tuple(
        (
            f"[{row.source}]({page_of(row.source).slug}.md)",
            row.device,
            f"{page_of(row.source).constants} ({row.fitted} cells)" if row.fitted else "nothing",
            *_values(row, before),
        )
        for row in rows
    )
    return Section("", columns, found)


def errors(rows: Iterable[Row], before: Mapping[str, Row]) -> Section:
    """One row per source and device of a page."""
    columns = (*labels("source", "device"), Column("fitted"), *_figures())
    return Section("", columns, tuple((row.source, row.device, row.fitted, *_values(row, before)) for row in rows))


def _figures() -> tuple[Column, ...]:
    return tuple(Column(name) for name in ("cells", *FIGURES, "direction right"))


def _values(row: Row, before: Mapping[str, Row]) -> tuple[Value, ...]:
    """A median that differs from ``before`` is followed by the old one in brackets."""
    old = before.get(row.key)
    found = (_errors(row.errors.get(name), old.errors.get(name) if old else None) for name in FIGURES)
    return (row.count, *found, "" if row.direction is None else f"{row.direction:.0%}")


def _errors(now: tuple[float, float] | None, before: tuple[float, float] | None) -> str:
    if now is None:
        return ""
    changed = before is not None and abs(now[0] - before[0]) >= 0.0005
    was = f" (was {before[0]:.1%})" if changed and before is not None else ""
    return f"{now[0]:.1%}{was}, {now[1]:.1%}"


def targets(groups: Mapping[str, Sequence[Score]]) -> Section:
    """The targets and whether they are met, per group of cells."""
    columns = (*labels("cells", "score", "target"), _number("reached", _share), Column("count"), *labels("met"))
    rows = tuple(
        (name, score.name, score.target, score.reached, score.count, "yes" if score.met else "no")
        for name, found in groups.items()
        for score in found
    )
    return Section("", columns, rows)


def decided(groups: Mapping[str, Sequence[Decisions]]) -> Section:
    """How often a difference that we predict has the sign of the published one, per group of cells."""
    columns = (*labels("cells", "ours differ by more than"), Column("pairs"), Column("same direction in print"))
    rows = tuple(
        (name, f"{one.gap:.0%}", one.count, one.right) for name, found in groups.items() for one in found if one.count
    )
    return Section("", columns, rows)


def constants() -> Section:
    """The constants of each device, with their source."""
    columns = (
        *labels("device"),
        _number("host per step", lambda value: f"{value * 1e3:.2f} ms"),
        _number("host per sequence", lambda value: f"{value * 1e6:.1f} us"),
        _number("mixed excess x", lambda value: f"{value:.2f}"),
        *labels("source"),
    )
    rows = tuple(
        (f"{name} ({model})", host.step_s, host.sequence_s, host.mixed_excess, host.source)
        for name in list_devices()
        for model, host in find_profile(name).host.items()
    )
    return Section("", columns, rows)


def published_and_ours(cells: Iterable[PublishedFigure]) -> Section:
    """One row per published figure, with ours."""
    columns = (
        *labels("device", "model", "case", "scheduler", "metric"),
        _number("published", _digits),
        _number("ours", _digits, ours=True),
        _number("error", _signed),
        *labels(""),
    )
    rows = tuple(
        (
            cell.device, cell.model, cell.case, cell.scheduler, cell.metric, _known(cell.published), _known(cell.ours),
            _known(cell.error),
            "fitted" if cell.fitted else "" if cell.scored else f"unscored: {cell.note}",
        )
        for cell in cells
    )  # fmt: skip
    return Section("", columns, rows)


def gains(cells: Iterable[PublishedFigure]) -> Section:
    """One row per pair of schedulers: published gain, our gain, and whether the winner is the same."""
    columns = (
        *labels("device", "model", "case", "pair"),
        _number("published gain", _signed),
        _number("our gain", _signed, ours=True),
        *labels(""),
    )
    rows = []
    for pair in comparisons(cells):
        _, device, model, case = pair.row
        verdict = "too close" if not pair.decided else "same winner" if pair.same_winner else "**other winner**"
        name = f"{pair.second} over {pair.first}"
        rows.append((device, model, case, name, pair.published_gain, pair.our_gain, verdict))
    return Section("", columns, tuple(rows))


def step_times(cells: Iterable[PublishedFigure]) -> Section:
    """One row per device, model and kind of step; the Parquet file has the single cells."""
    errors: dict[tuple[str, str, str, str], list[float]] = {}
    for cell in cells:
        errors.setdefault((cell.device, cell.model, cell.case.split()[0], cell.note), []).append(cell.error)
    columns = (
        *labels("device", "model", "step"),
        *(_number(name, _signed) for name in ("median error", "from", "to")),
        *labels(""),
    )
    rows = tuple(
        (device, model, kind, median(found), min(found), max(found), note)
        for (device, model, kind, note), found in errors.items()
    )
    return Section("", columns, rows)
