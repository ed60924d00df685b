"""The search against a queue whose capacity is known: Poisson arrivals, one server, fixed service times (M/D/1)."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbench.sizing.drive import next_load, probes_left
from ebbench.sizing.estimate import (
    Estimate,
    MetCounts,
    Probe,
    Requirement,
    SearchSettings,
    bracket,
    estimate,
    supported,
)
from ebbench.sizing.prober import Pace

SERVICE_S, SHARE = 0.05, 0.95


def wait_within(rate: float, limit_s: float) -> float:
    """P(wait <= limit) in M/D/1 (Erlang 1909)."""
    busy = rate * SERVICE_S
    if busy >= 1:
        return 0.0
    terms = range(int(limit_s / SERVICE_S) + 1)
    gaps = [rate * (j * SERVICE_S - limit_s) for j in terms]
    return (1 - busy) * sum(gap**j / math.factorial(j) * math.exp(-gap) for j, gap in zip(terms, gaps, strict=True))


def true_capacity(limit_s: float) -> float:
    low, high = 1e-6, 1 / SERVICE_S
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if wait_within(middle, limit_s) >= SHARE else (low, middle)
    return low


def queue_probe(rate: float, seed: int, limit_s: float, customers: int = 5000) -> Probe:
    rng = np.random.default_rng([seed, int(rate * 1e6)])
    walk = np.concatenate([[0.0], np.cumsum(SERVICE_S - rng.exponential(1 / rate, customers - 1))])
    met = (walk - np.minimum.accumulate(walk) <= limit_s)[customers // 10 :]
    batches = tuple((int(part.sum()), len(part)) for part in np.array_split(met, 20))
    return Probe(rate, seed, (MetCounts(int(met.sum()), len(met), batches),))


def search_queue(trial: int, limit_s: float, customers: int = 5000, precision: float = 0.02) -> Estimate:
    search = SearchSettings((Requirement("ttft", SHARE),), start=5.0, precision=precision)
    probes: list[Probe] = []
    while len(probes) < 60 and (load := next_load(search, probes)) is not None:
        probes.append(queue_probe(load, 1000 * trial + len(probes), limit_s, customers))
    return estimate(search, probes)


def test_the_probes_left_are_about_those_that_follow() -> None:
    errors = []
    for trial in range(8):
        search = SearchSettings((Requirement("ttft", SHARE),), start=5.0, precision=0.02)
        probes: list[Probe] = []
        expected = []
        while (load := next_load(search, probes)) is not None:
            expected.append(probes_left(search, probes))
            probes.append(queue_probe(load, 1000 * trial + len(probes), 0.3))
        errors += [count - (len(probes) - done) for done, count in enumerate(expected)]
        assert min(expected) >= 1
    assert abs(np.median(errors)) <= 4


def test_the_pace_of_probes_tells_when_a_search_ends() -> None:
    pace = Pace(policies_left=1)
    assert pace.to_go == ""
    pace.ahead(5)
    pace.seconds += [10.0, 14.0]
    assert pace.to_go == ", search about 3 min to go"


@pytest.mark.parametrize("limit_s", [pytest.param(0.1, marks=pytest.mark.nightly), 0.3])
def test_the_interval_covers_the_truth_and_the_estimate_is_close(limit_s: float) -> None:
    truth = true_capacity(limit_s)
    found = [search_queue(trial, limit_s) for trial in range(100)]
    errors = [abs(each.capacity / truth - 1) for each in found if each.capacity is not None]
    assert len(errors) == 100
    assert float(np.median(errors)) < 0.01
    assert sum(error <= 0.02 for error in errors) >= 90
    assert sum(each.low <= truth <= each.high for each in found) >= 90


def test_the_interval_covers_the_truth_in_short_runs_too() -> None:
    """Waiting times are correlated over more than a twentieth of 1,000 customers: with batches of that length alone,
    167 of 200 intervals covered the truth."""
    truth = true_capacity(0.3)
    found = [search_queue(trial, 0.3, customers=1000, precision=0.04) for trial in range(200)]
    assert sum(each.low <= truth <= each.high for each in found) >= 180


def test_capacity_is_the_completion_rate_where_only_the_queue_limits() -> None:
    """Every request meets its limit at any load; the queue runs away above 20/s and completes 20/s then."""
    search = SearchSettings((Requirement("tpot", SHARE),), start=3.0)
    probes: list[Probe] = []
    rng = np.random.default_rng(1)
    while (load := next_load(search, probes)) is not None:
        over = load > 20
        served = 20 * float(rng.normal(1, 0.02)) if over else None
        probes.append(Probe(load, len(probes), (MetCounts(999, 1000),), runaway=over, served_per_s=served))
        assert len(probes) < 40
    found = estimate(search, probes)
    assert found.limited_by == "queue"
    assert found.capacity == pytest.approx(20, rel=0.03)
    assert found.low <= 20 <= found.high


def test_short_overloaded_runs_do_not_contradict_carried_loads() -> None:
    """13/s were carried; at 26/s hardly a request had ended when the last one was sent."""
    search = SearchSettings((Requirement("tpot", SHARE),), start=3.0)
    carried = [Probe(load, 0, (MetCounts(200, 200),)) for load in (3.3, 6.6, 13.3)]
    short = [Probe(load, 0, (MetCounts(190, 200),), runaway=True, served_per_s=0.5) for load in (26.6, 18.8, 18.8)]
    for count in (1, 2, 3):
        found = estimate(search, [*carried, *short[:count]])
        assert found.low == 13.3
        assert found.capacity is not None
        assert 13.3 <= found.capacity <= found.high == min(probe.load for probe in short[:count])


def test_a_vague_fit_does_not_reach_beyond_a_load_at_which_the_queue_grew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares of 100 and 99.8 % cross 95 % far above them, if anywhere."""
    search = SearchSettings((Requirement("tpot", SHARE),), start=3.0)
    carried = [Probe(load, 0, (MetCounts(1000, 1000),)) for load in (5.5, 10.9, 20.6, 21.1, 21.6)]
    over = [Probe(load, 0, (MetCounts(940, 1000),), runaway=True, served_per_s=21.5) for load in (21.6, 22.3, 25.7)]
    vague = Estimate(24.0, 15.1, 38.1, "tpot", fitted=True)
    monkeypatch.setattr("ebbench.sizing.estimate.fit_crossing", lambda *_: vague)
    found = estimate(search, [*carried, *over])
    assert found.capacity is not None
    assert 21 <= found.low <= found.capacity <= found.high <= 22.3
    assert estimate(search, [*carried, replace(over[0], runaway=False, load=25.0)]) == vague, "no queue grew"


def test_after_a_failed_probe_no_higher_load_is_tried() -> None:
    """Requests fail from 13/s on: the load is doubled into it once, and then stays below."""
    search = SearchSettings((Requirement("ttft", SHARE),), start=1.0)
    probes: list[Probe] = []
    while len(probes) < 20 and (load := next_load(search, probes)) is not None:
        failed = "60 of 100 requests failed" if load > 13 else ""
        probes.append(Probe(load, len(probes), (MetCounts(1000, 1000),), failed=failed))
    first = next(index for index, probe in enumerate(probes) if probe.failed)
    assert all(probe.load < probes[first].load for probe in probes[first + 1 :])
    found = estimate(search, probes)
    assert found.limited_by == "errors"
    assert found.low <= 13 <= found.high


def test_a_search_over_whole_loads_ends_between_two_neighbours() -> None:
    search = SearchSettings((Requirement("ttft", SHARE),), start=4.0, integer=True)
    probes: list[Probe] = []
    while len(probes) < 40 and (load := next_load(search, probes)) is not None:
        assert load == int(load)
        probes.append(Probe(load, len(probes), (MetCounts(1000 if load <= 7 else 300, 1000),)))
    found = estimate(search, probes)
    assert found.capacity is not None
    assert 7 <= found.capacity <= 8


def test_a_search_ends_where_even_the_lowest_load_misses_the_limits() -> None:
    search = SearchSettings((Requirement("ttft", SHARE),), start=4.0, integer=True)
    probes = [
        Probe(4.0, 0, (MetCounts(0, 100),)),
        Probe(2.0, 1, (MetCounts(0, 100),)),
        Probe(1.0, 2, (MetCounts(0, 100),)),
    ]
    assert next_load(search, probes) is None
    assert estimate(search, probes).capacity is None


@given(
    st.lists(st.tuples(st.floats(0.5, 50), st.integers(0, 100)), min_size=1, max_size=25),
    st.floats(0.5, 0.99),
)
@settings(max_examples=300)
def test_any_probes_give_an_ordered_bracket_and_a_next_load(pairs: list[tuple[float, int]], share: float) -> None:
    search = SearchSettings((Requirement("ttft", share),), start=1.0)
    probes = [Probe(load, seed, (MetCounts(met, 100),)) for seed, (load, met) in enumerate(pairs)]
    low, high = bracket(search, probes)
    assert low is None or high is None or low < high
    found = estimate(search, probes)
    assert found.capacity is None or found.low <= found.capacity <= found.high
    load = next_load(search, probes)
    assert load is None or (math.isfinite(load) and load > 0)


def test_a_limit_missed_below_the_rate_of_an_overloaded_system_decides() -> None:
    """The queue grows without bound above 20/s, but requests wait too long from 15/s on, and did so while it grew."""
    search = SearchSettings((Requirement("ttft", SHARE),), start=3.0)
    probes: list[Probe] = []
    while len(probes) < 40 and (load := next_load(search, probes)) is not None:
        met = 999 if load < 15 else 700 if load < 20 else 0
        probes.append(Probe(load, len(probes), (MetCounts(met, 1000),), runaway=load > 20, served_per_s=min(load, 20)))
    found = estimate(search, probes)
    assert found.limited_by == "ttft"
    assert found.low <= 15 <= found.high
    assert found.half_width <= search.precision
    assert len(probes) < 20


def test_a_step_ends_the_search_as_soon_as_both_sides_are_known() -> None:
    search = SearchSettings((Requirement("ttft", SHARE),), start=4.0)
    probes: list[Probe] = []
    while len(probes) < 40 and (load := next_load(search, probes)) is not None:
        probes.append(Probe(load, len(probes), (MetCounts(999 if load < 13 else 0, 1000),)))
    found = estimate(search, probes)
    assert found.low <= 13 <= found.high
    assert found.half_width <= search.precision
    assert len(probes) < 15


def test_errors_are_bracketed_with_few_failing_probes() -> None:
    search = SearchSettings((Requirement("ttft", SHARE),), start=1.0)
    probes: list[Probe] = []
    while len(probes) < 40 and (load := next_load(search, probes)) is not None:
        failed = "60 of 100 requests failed" if load > 13 else ""
        probes.append(Probe(load, len(probes), (MetCounts(1000, 1000),), failed=failed))
    assert estimate(search, probes).half_width <= search.precision
    assert sum(bool(probe.failed) for probe in probes) <= 5


def test_no_load_above_a_seen_overload_is_tried() -> None:
    search = SearchSettings((Requirement("tpot", SHARE),), start=13.0)
    probes: list[Probe] = []
    while len(probes) < 40 and (load := next_load(search, probes)) is not None:
        probes.append(Probe(load, 0, (MetCounts(999, 1000),), runaway=load > 22, served_per_s=min(load, 22.0)))
    first = next(probe for probe in probes if probe.runaway)
    assert max(probe.load for probe in probes) == first.load
    assert estimate(search, probes).capacity == pytest.approx(22, rel=0.03)


def test_a_closed_loop_ends_where_more_sessions_only_wait() -> None:
    search = SearchSettings((Requirement("tpot", SHARE),), start=4.0, integer=True)
    probes: list[Probe] = []
    while len(probes) < 40 and (load := next_load(search, probes)) is not None:
        probes.append(Probe(load, 0, (MetCounts(999, 1000),), served_per_s=min(load, 50.0)))
    assert max(probe.load for probe in probes) == 128
    found = estimate(search, probes)
    assert (found.limited_by, found.high) == ("queue", math.inf)


def test_a_share_just_below_the_required_one_at_any_load_ends_the_search() -> None:
    search = SearchSettings((Requirement("ttft", SHARE),), start=4.0)
    probes: list[Probe] = []
    while len(probes) < 40 and (load := next_load(search, probes)) is not None:
        probes.append(Probe(load, 0, (MetCounts(940, 1000),)))
    assert len(probes) < 15
    assert estimate(search, probes).capacity is None


def test_probes_that_contradict_each_other_widen_the_interval() -> None:
    """Between 9 and 12 some passed and some failed, all clearly: the answer is no narrower than that."""
    search = SearchSettings((Requirement("ttft", SHARE),), start=4.0)
    passed = {8: True, 9: True, 10: False, 10.5: True, 11: False, 11.5: True, 12: False, 14: False}
    probes = [Probe(load, 0, (MetCounts(999 if met else 0, 1000),)) for load, met in passed.items()]
    found = estimate(search, probes)
    assert found.low <= 9
    assert found.high >= 12


def plain(load: float, met: int, *, runaway: bool = False, failed: str = "") -> Probe:
    return Probe(load, 0, (MetCounts(met, 1000),), runaway=runaway, failed=failed, served_per_s=min(load, 20.0))


def test_without_a_fit_the_capacity_is_a_load_that_was_carried() -> None:
    search = SearchSettings((Requirement("ttft", SHARE),), start=4.0)
    probes = [plain(4, 999), plain(8, 999), plain(16, 999, runaway=True)]
    found = supported(search, estimate(search, probes), probes, [])
    assert (found.capacity, found.low, found.high) == (8, 8, 16)
    refused = [plain(4, 999), plain(8, 999), plain(9, 999, failed="12 of 100 requests failed")]
    assert supported(search, estimate(search, refused), refused, []).capacity == 8


def test_what_a_run_too_short_to_decide_clearly_missed_is_not_capacity() -> None:
    search = SearchSettings((Requirement("ttft", SHARE),), start=4.0)
    probes = [plain(load, met) for load, met in ((8, 990), (9, 980), (10, 965), (11, 958), (12, 935), (13, 800))]
    fitted = estimate(search, probes)
    assert fitted.fitted
    assert fitted.capacity == pytest.approx(11.3, rel=0.05)
    assert supported(search, fitted, probes, [plain(10.5, 945)]) == fitted, "by chance"
    found = supported(search, fitted, probes, [plain(10.5, 865)])
    assert (found.capacity, found.low, found.high, found.limited_by) == (10, 10, 10.5, "ttft")
    assert supported(search, fitted, probes, [plain(7, 865)]).capacity is None


def test_a_limit_on_waiting_is_missed_at_the_saturated_rate() -> None:
    """In runs of this length requests still kept it while the queue grew; in longer ones none would."""
    for metric, truth in (("ttft", 19.0), ("tpot", 20.0)):
        search = SearchSettings((Requirement(metric, SHARE),), start=3.0)
        probes: list[Probe] = []
        while len(probes) < 40 and (load := next_load(search, probes)) is not None:
            probes.append(plain(load, 999, runaway=load > 19))
        found = supported(search, estimate(search, probes), probes, [])
        assert found.limited_by == "queue"
        assert found.capacity == pytest.approx(truth, rel=0.025)
        assert metric == "tpot" or any(probe.load == found.capacity and not probe.runaway for probe in probes)


def test_loads_outside_a_bracket_are_not_repeated_for_a_vague_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """All requests kept their limits at 15/s and the queue grew at 17.2/s: neither has a share for the fit."""
    search = SearchSettings((Requirement("ttft", SHARE),), start=4.0)
    probes = [Probe(15.0, 0, (MetCounts(20, 20),)), Probe(17.2, 1, (MetCounts(15, 20),), runaway=True)]
    vague = Estimate(16.1, 13.7, 18.9, "ttft", fitted=True)
    monkeypatch.setattr("ebbench.sizing.estimate.fit_crossing", lambda *_: vague)
    monkeypatch.setattr("ebbench.sizing.drive.estimate", lambda *_: vague)
    load = next_load(search, probes)
    assert load == pytest.approx(math.sqrt(15 * 17.2))


def test_few_short_probes_do_not_end_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a burst was seen an interval is too narrow: of 61 simulated searches 65 % held the capacity, not 80 %."""
    search = SearchSettings((Requirement("ttft", SHARE),), start=4.0)
    probes = [plain(10.0, 960), plain(10.5, 940)]

    def ends(half: float, freedom: float, *, short: bool = True) -> bool:
        narrow = Estimate(10.2, 10.2 * (1 - half), 10.2 * (1 + half), "ttft", True, freedom)
        monkeypatch.setattr("ebbench.sizing.drive.estimate", lambda *_: narrow)
        return next_load(replace(search, short_probes=short), probes) is None

    assert ends(0.01, 5, short=False)
    assert not ends(0.01, 5)
    assert ends(0.01, 20)
    assert not ends(0.0199, 20), "an interval of 20 degrees of freedom is off by a sixth"


def test_a_narrow_bracket_of_unclear_shares_does_not_end_a_search() -> None:
    search = SearchSettings((Requirement("ttft", SHARE),), start=4.0)
    unclear = [plain(load, met) for load, met in ((10.0, 955), (10.0, 952), (10.2, 945), (10.2, 940))]
    assert next_load(search, unclear) is not None
    step = [plain(load, met) for load, met in ((10.0, 999), (10.0, 999), (10.2, 100), (10.2, 100))]
    assert next_load(search, step) is None


def test_after_a_first_overload_a_load_surely_carried_is_tried() -> None:
    search = SearchSettings((Requirement("tpot", SHARE),), start=80.0)
    assert next_load(search, [plain(80.0, 999, runaway=True)]) == pytest.approx(16.0)
    assert next_load(search, [plain(24.0, 100)]) == 12.0
