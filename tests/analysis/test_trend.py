"""Figures over commits: points, changes by the gate's test, and alerts."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from ebbench.analysis.trend import Member, Point, SeriesKind, Trend, nearest_pairs, points_by_commit, trend_of
from ebbench.records.manifest import RunLabels
from ebbench.report.trend import sentences
from tests.gate.gate_data import unit

DAY_NS = 86_400 * 10**9
KIND = SeriesKind("v1", "e", "", "load", "")


def member(
    commit: str, day: float, ttft: float = 100.0, *, seed: int = 0, stated: bool = True, **more: object
) -> Member:
    found = replace(unit(seed, ttft=ttft), anchor_unix_ns=int(day * DAY_NS), **more)  # type: ignore[arg-type]
    return Member(commit, found, RunLabels(commit=commit), stated)


def nights(ttft: Sequence[float], **more: object) -> list[Point]:
    """One run a night, each of another commit."""
    return points_by_commit([member(f"c{place}", place, value, **more) for place, value in enumerate(ttft)])  # type: ignore[arg-type]


def trend(points: Sequence[Point]) -> Trend:
    return trend_of(KIND, points, "median_ttft_ms")


def noisy(count: int, level: float, seed: int) -> list[float]:
    source = random.Random(seed)
    return [level * math.exp(source.gauss(0, 0.01)) for _ in range(count)]


def test_a_slower_half_is_a_change_at_its_commit() -> None:
    found = trend(nights([*noisy(10, 100, 1), *noisy(12, 110, 2)]))
    [change] = found.changes
    assert (change.place, change.direction, found.alert) == (10, "worse", "worse")
    grown, low, high = change.bounds
    assert low < 0.10 < high
    assert grown == pytest.approx(0.10, abs=0.02)


def test_a_faster_half_is_a_change_for_the_better() -> None:
    found = trend(nights([*noisy(10, 110, 1), *noisy(12, 100, 2)]))
    [change] = found.changes
    assert (change.place, change.direction, found.alert) == (10, "better", "")
    assert change.bounds[0] == pytest.approx(100 / 110 - 1, abs=0.02)


def test_a_change_that_was_mended_is_no_alert() -> None:
    found = trend(nights([*noisy(14, 100, 1), *noisy(14, 115, 2), *noisy(14, 100, 3)]))
    assert [change.direction for change in found.changes] == ["worse", "better"]
    assert found.alert == ""


def test_equal_nights_have_no_change() -> None:
    histories = [trend(nights(noisy(16, 100, seed))) for seed in range(20)]
    assert sum(bool(found.changes) for found in histories) <= 2
    assert sum(found.alert == "worse" for found in histories) <= 2


def test_a_single_slow_night_is_a_doubt() -> None:
    found = trend(nights([*noisy(10, 100, 1), 120.0]))
    assert (found.changes, found.alert) == ((), "doubt")
    assert found.newest is not None
    assert found.newest.outcome == "inconclusive"


def test_runs_of_one_real_night_count_once() -> None:
    """They share what the machine was like; five slow runs of one night are no five nights."""
    runs = [member(f"c{day}", day + seed / 100, 100.0 + (20 if day == 7 else 0), seed=seed)
            for day in range(8) for seed in range(6)]  # fmt: skip
    points = points_by_commit(runs)
    assert [len(point.members) for point in points] == [6] * 8
    assert len(nearest_pairs(points[:7], points[7:])) == 1
    assert trend(points).alert == "doubt"


def test_simulated_seeds_show_a_change_of_one_commit() -> None:
    """Virtual time repeats exactly, so that the seeds of a commit are compared with those of the one before."""

    def commit(day: int, factor: float) -> list[Member]:
        return [member(f"c{day}", day + seed / 100, factor * (100 + 5 * seed), seed=seed, virtual=True,
                       lengths=f"plan {seed}") for seed in range(6)]  # fmt: skip

    found = trend(points_by_commit([*commit(0, 1.0), *commit(1, 1.0), *commit(2, 1.08)]))
    assert [(change.place, change.direction) for change in found.changes] == [(2, "worse")]
    assert found.alert == "worse"
    assert trend(points_by_commit([*commit(0, 1.0), *commit(1, 1.0)])).changes == ()


def test_two_measurements_of_a_seed_are_two_points() -> None:
    twice = points_by_commit([member("a", 0, seed=0), member("a", 0.01, seed=1), member("a", 0.02, seed=0)])
    assert [[one.unit.seed for one in point.members] for point in twice] == [[0, 1], [0]]
    unstated = [member("", day, stated=False, server="http://host") for day in (0, 0.1, 3)]
    seeds = [replace(one, unit=replace(one.unit, seed=place)) for place, one in enumerate(unstated)]
    assert [len(point.members) for point in points_by_commit(seeds)] == [2, 1]


def test_a_point_has_the_mean_of_its_runs_and_an_interval() -> None:
    [point] = points_by_commit(
        [member("a", seed / 100, 100.0 * factor, seed=seed) for seed, factor in enumerate((0.9, 1, 1.1))]
    )
    found = point.figure("median_ttft_ms")
    assert found is not None
    assert found.low < found.mean < found.high
    assert found.mean == pytest.approx(100 * (0.9 * 1.1) ** (1 / 3))
    single = Point((member("a", 0, 100.0),)).figure("median_ttft_ms")
    assert single is not None
    assert math.isinf(single.high)


def test_points_without_the_figure_are_left_out_of_tests() -> None:
    points = nights([*noisy(10, 100, 1), *noisy(12, 110, 2)])
    lacking = replace(points[3].members[0], unit=replace(points[3].units[0], figures={}))
    hole = [*points[:3], Point((replace(lacking, unit=replace(lacking.unit, figures=dict.fromkeys(
        points[0].units[0].figures))),)), *points[4:]]  # fmt: skip
    found = trend(hole)
    assert found.values[3] is None
    assert [change.place for change in found.changes] == [10]
    assert sentences([found], "v1")[-1].startswith(
        "v1: TTFT median: not judged in 1 of 22 points, where it is undefined"
    )


def test_the_newest_point_is_the_last_that_has_the_figure() -> None:
    """The sentence named the last point of all, which had no such figure."""
    *earlier, last = nights([100, 101, 100, 101, 100, 120, 100])
    without = replace(last.members[0], unit=replace(last.units[0], figures=dict.fromkeys(last.units[0].figures)))
    told = sentences([trend([*earlier, Point((without,))])], "v1")
    assert told[0].startswith("v1: TTFT median: the newest point (c5, 1970-01-06) is ")
    nothing = trend([Point((without,))] * 3)
    assert (nothing.newest, nothing.alert) == (None, "")
    assert "not judged in 3 of 3 points" in sentences([nothing], "v1")[-1]
