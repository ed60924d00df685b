"""Metrics against a slow reference in plain Python that follows the definitions of docs/metrics.md one by one."""

from __future__ import annotations

import itertools
import math
import statistics
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbench.analysis import metrics
from ebbench.analysis.columns import RequestColumns
from ebbench.analysis.metrics import Distribution, Metrics, Slo, Window, measure, samples_needed, steady_windows
from ebbench.records.plan import ClosedPhase
from ebbench.records.schema import SAME_TIME_NS
from tests.analysis.made_runs import MS, request, requests_table

TIMES = st.integers(0, 2_000 * MS)
STATUSES = st.sampled_from(["ok"] * 6 + ["failed", "timed_out", "cancelled", "never_sent"])


@st.composite
def rows(draw: Any) -> list[dict[str, Any]]:
    return [draw(row(number)) for number in range(draw(st.integers(1, 25)))]


@st.composite
def row(draw: Any, number: int) -> dict[str, Any]:
    status = draw(STATUSES)
    session = draw(st.integers(0, 9))
    phase = draw(st.sampled_from(["a", "b"]))
    intended = draw(TIMES)
    common = {"status": status, "session": session, "phase": phase}
    if status == "never_sent":
        absent = dict.fromkeys(("intended_ns", "sent_ns", "first_token_ns", "last_token_ns", "end_ns", "itl_ns"))
        return request(number, **common, **absent, output_tokens=0)
    gaps = draw(st.lists(st.just(0) | st.integers(0, 300 * MS), max_size=6))
    sent = intended + draw(st.integers(0, 20 * MS))
    first = sent + draw(st.integers(0, 500 * MS))
    times = {"intended_ns": intended, "sent_ns": sent, "first_token_ns": first, "last_token_ns": first + sum(gaps)}
    return request(
        number,
        **common,
        **times,
        end_ns=first + sum(gaps) if status != "cancelled" else None,
        input_tokens=draw(st.integers(1, 5000)),
        cached_tokens=draw(st.none() | st.integers(0, 1)),
        output_tokens=len(gaps) + 1,
        itl_ns=gaps,
        bundled_tokens=0 in gaps,
        preemptions=draw(st.integers(0, 2)),
    )


class Oracle:
    """The definitions, one after the other."""

    def __init__(self, table: list[dict[str, Any]], windows: list[tuple[int, int]], slo: Slo) -> None:
        ok = [r for r in table if r["status"] == "ok"]
        starts = [r["intended_ns"] for r in table if r["intended_ns"] is not None]
        self.duration = (max(r["last_token_ns"] for r in ok) - min(starts)) / 1e9 if ok else None
        self.ttft = [r["first_token_ns"] - r["intended_ns"] for r in ok]
        self.from_send = [r["first_token_ns"] - r["sent_ns"] for r in ok]
        self.e2el = [r["last_token_ns"] - r["intended_ns"] for r in ok]
        self.tpot = [
            (r["last_token_ns"] - r["first_token_ns"]) / len(self.after_first(r)) for r in ok if self.after_first(r)
        ]
        self.itl = [gap for r in ok if self.after_first(r) for gap in r["itl_ns"]]
        self.output = sum(r["output_tokens"] for r in ok)
        self.input = sum(r["input_tokens"] for r in ok)
        self.met = sum(self.meets(r, slo) for r in ok)
        self.met_tokens = sum(r["output_tokens"] for r in ok if self.meets(r, slo))
        reported = [r for r in ok if r["cached_tokens"] is not None]
        self.cached, self.reported = (sum(r[name] for r in reported) for name in ("cached_tokens", "input_tokens"))
        self.steady_outputs = 0
        for r in ok:
            time = r["first_token_ns"]
            for gap in [0, *r["itl_ns"]]:
                time += gap
                self.steady_outputs += any(a < time <= b for a, b in windows)
        self.steady_ends = sum(any(a < r["last_token_ns"] <= b for a, b in windows) for r in ok)
        self.steady_s = sum(b - a for a, b in windows) / 1e9

    @staticmethod
    def after_first(r: dict[str, Any]) -> list[int]:
        """The gaps of the tokens that came later than the first one."""
        gaps = r["itl_ns"]
        while gaps and gaps[0] < SAME_TIME_NS and r["bundled_tokens"]:
            gaps = gaps[1:]
        return gaps

    @classmethod
    def meets(cls, r: dict[str, Any], slo: Slo) -> bool:
        ttft = (r["first_token_ns"] - r["intended_ns"]) / MS
        e2el = (r["last_token_ns"] - r["intended_ns"]) / MS
        if slo.ttft is not None and ttft > slo.ttft:
            return False
        if slo.e2el is not None and e2el > slo.e2el:
            return False
        if slo.tpot is not None:
            if r["output_tokens"] < 2:
                return True
            later = cls.after_first(r)
            return bool(later) and (r["last_token_ns"] - r["first_token_ns"]) / len(later) / MS <= slo.tpot
        return True


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def check_distribution(found: Distribution, values: list[float]) -> None:
    assert found.count == len(values)
    if not values:
        assert all(value is None for _, value in found.items())
        return
    ms = [value / MS for value in values]
    assert found.mean == pytest.approx(statistics.fmean(ms))
    assert found.median == pytest.approx(statistics.median(ms))
    assert found.std == pytest.approx(statistics.pstdev(ms), abs=1e-9)
    for share, value in ((0.9, found.p90), (0.95, found.p95), (0.99, found.p99)):
        if len(ms) < samples_needed(share):
            assert value is None
        else:
            assert value == pytest.approx(percentile(ms, share))


@settings(max_examples=150, deadline=None)
@given(
    rows(),
    st.builds(
        Slo,
        st.none() | st.floats(1, 600),
        st.none() | st.floats(1, 300),
        st.none() | st.floats(1, 2000),
    ),
    st.lists(st.tuples(TIMES, TIMES).map(sorted), max_size=1),
)
def test_metrics_agree_with_the_oracle(table: list[dict[str, Any]], slo: Slo, spans: list[list[int]]) -> None:
    spans = [span for span in spans if span[1] > span[0]]
    windows = [Window("", span[0], span[1], 1.0) for span in spans]
    oracle = Oracle(table, [(span[0], span[1]) for span in spans], slo)
    found = measure(RequestColumns.of(requests_table(table)), slo=slo, windows=windows)
    assert found.planned == len(table) == sum(found.counts.values())
    assert found.completed == found.counts["ok"] == sum(r["status"] == "ok" for r in table)
    assert found.duration_s == (pytest.approx(oracle.duration) if oracle.duration is not None else None)
    assert (found.total_input_tokens, found.total_output_tokens) == (oracle.input, oracle.output)
    for name in ("ttft", "tpot", "itl", "e2el"):
        check_distribution(getattr(found, name), getattr(oracle, name))
    check_distribution(found.ttft_from_send, oracle.from_send)
    if oracle.duration:
        assert found.output_throughput == pytest.approx(oracle.output / oracle.duration)
        assert found.request_throughput == pytest.approx(found.completed / oracle.duration)
        total = (oracle.output + oracle.input) / oracle.duration
        assert found.total_token_throughput == pytest.approx(total)
        assert found.input_throughput == pytest.approx(total - found.output_throughput)
        if slo:
            assert found.request_goodput == pytest.approx(oracle.met / oracle.duration)
            assert found.token_goodput == pytest.approx(oracle.met_tokens / oracle.duration)
        if windows:
            assert found.steady is not None
            assert found.steady.output_throughput == pytest.approx(oracle.steady_outputs / oracle.steady_s)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(metrics, "_GAPS_AT_ONCE", 3)
                again = measure(RequestColumns.of(requests_table(table)), slo=slo, windows=windows).steady
            assert again is not None
            assert again.output_throughput == pytest.approx(found.steady.output_throughput)
            assert found.steady.request_throughput == pytest.approx(oracle.steady_ends / oracle.steady_s)
    assert found.slo_attainment == (pytest.approx(oracle.met / len(table)) if slo else None)
    assert found.cached_tokens == oracle.cached
    assert found.prefix_hit_rate == (pytest.approx(oracle.cached / oracle.reported) if oracle.reported else None)
    median_ns = statistics.median(oracle.tpot) if oracle.tpot else 0
    assert found.tokens_per_s_per_user == (pytest.approx(1e9 / median_ns) if median_ns else None)


def test_no_completion_gives_nulls_not_zeros() -> None:
    lost = request(0, status="failed", first_token_ns=None, last_token_ns=None, itl_ns=None, output_tokens=0)
    found = measure(RequestColumns.of(requests_table([lost])), slo=Slo(ttft=100))
    assert (found.completed, found.counts["failed"]) == (0, 1)
    assert found.duration_s is found.output_throughput is found.request_goodput is None
    assert found.ttft.mean is found.itl.median is None
    assert found.slo_attainment == 0.0


def test_partial_tokens_of_a_failed_request_count_nowhere() -> None:
    table = [request(0), request(1, status="failed", output_tokens=500, itl_ns=[1] * 499)]
    found = measure(RequestColumns.of(requests_table(table)))
    assert found.total_output_tokens == 2
    assert found.itl.count == 1


def test_a_request_of_one_token_has_no_tpot_and_meets_any_limit_on_it() -> None:
    single = request(0, output_tokens=1, itl_ns=[], last_token_ns=10 * MS, end_ns=10 * MS)
    found = measure(RequestColumns.of(requests_table([single])), slo=Slo(tpot=0.001))
    assert found.tpot.count == 0
    assert found.slo_attainment == 1.0


@pytest.mark.parametrize("gaps", [[0, 0], [0, SAME_TIME_NS - 1]])
def test_tokens_that_came_all_at_once_have_no_tpot_and_meet_no_limit(gaps: list[int]) -> None:
    at_once = request(0, output_tokens=3, itl_ns=gaps, bundled_tokens=True)
    found = measure(RequestColumns.of(requests_table([at_once])), slo=Slo(tpot=1000))
    assert (found.tpot.count, found.itl.count, found.slo_attainment) == (0, 0, 0.0)


def test_tpot_leaves_out_the_tokens_that_came_with_the_first() -> None:
    shape = {"output_tokens": 8, "first_token_ns": 10 * MS, "last_token_ns": 50 * MS, "bundled_tokens": True}
    found = measure(RequestColumns.of(requests_table([request(0, **shape, itl_ns=[0, 0, 0, 40 * MS, 0, 0, 0])])))
    assert found.tpot.median == 10.0
    assert found.itl.count == 7


def test_tpot_is_of_the_tokens_that_were_sent() -> None:
    shape = {"output_tokens": 900, "first_token_ns": 10 * MS, "last_token_ns": 50 * MS, "bundled_tokens": True}
    found = measure(RequestColumns.of(requests_table([request(0, **shape, itl_ns=[10 * MS] * 4)])), slo=Slo(tpot=9))
    assert (found.tpot.median, found.total_output_tokens, found.slo_attainment) == (10.0, 900, 0.0)
    alone = request(0, output_tokens=900, bundled_tokens=True, itl_ns=[])
    assert measure(RequestColumns.of(requests_table([alone])), slo=Slo(tpot=9)).slo_attainment == 1.0


@pytest.mark.parametrize(("tpot_ms", "share"), [(5.0, 1.0), (4.99, 0.0)])
def test_two_tokens_are_enough_for_a_tpot_limit(tpot_ms: float, share: float) -> None:
    found = measure(RequestColumns.of(requests_table([request(0)])), slo=Slo(tpot=tpot_ms))
    assert found.tpot.count == 1
    assert found.slo_attainment == share


def test_messages_carrying_several_tokens_share_them_in_the_window() -> None:
    # Ten tokens in two messages at 10 and 15 ms: five each, and only the second falls inside.
    table = [request(0, output_tokens=10, bundled_tokens=True)]
    window = Window("", 10 * MS, 20 * MS, 1.0)
    found = measure(RequestColumns.of(requests_table(table)), windows=[window])
    assert found.steady is not None
    assert found.steady.output_throughput == pytest.approx(5 / 0.01)
    assert found.bundled_requests == 1


@pytest.mark.parametrize(("share", "needed"), [(0.90, 64), (0.95, 130), (0.99, 662)])
def test_percentiles_need_samples_beyond_them_at_99_percent(share: float, needed: int) -> None:
    def risk(n: int) -> float:
        """Probability that at most one of n samples lies beyond the percentile."""
        return sum(math.comb(n, beyond) * (1 - share) ** beyond * share ** (n - beyond) for beyond in (0, 1))

    assert samples_needed(share) == needed
    assert risk(needed) <= 0.01 < risk(needed - 1)


def steady(table: list[dict[str, Any]], phases: list[ClosedPhase]) -> list[tuple[str, int, int]]:
    windows = steady_windows(RequestColumns.of(requests_table(table)), phases)
    return [(w.phase, w.start_ns, w.end_ns) for w in windows]


def naive_steady(table: list[dict[str, Any]], phase: ClosedPhase) -> tuple[int, int] | None:
    """The steady window by a loop over the times of all events."""
    sessions: dict[int, list[int]] = {}
    for r in table:
        span = sessions.setdefault(r["session"], [r["intended_ns"], r["end_ns"]])
        span[:] = [min(span[0], r["intended_ns"]), max(span[1], r["end_ns"])]
    instants = sorted({time for span in sessions.values() for time in span})
    target = 0.95 * phase.max_concurrency
    held = [
        (now, after)
        for now, after in itertools.pairwise(instants)
        if sum(a <= now < b for a, b in sessions.values()) >= target
    ]
    return (held[0][0], held[-1][1]) if held else None


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 50), st.integers(1, 40)), min_size=1, max_size=20),
    st.integers(1, 6),
)
def test_closed_loop_window_agrees_with_walking_every_instant(
    spans: list[tuple[int, int, int]], concurrency: int
) -> None:
    table = [
        request(i, session=s, intended_ns=a, first_token_ns=a, last_token_ns=a + d, end_ns=a + d, itl_ns=[d])
        for i, (s, a, d) in enumerate(spans)
    ]
    phase = ClosedPhase("all", len({s for s, _, _ in spans}), concurrency)
    expected = naive_steady(table, phase)
    assert steady(table, [phase]) == ([("all", *expected)] if expected else [])


def test_a_slot_freed_and_refilled_at_one_instant_is_no_dip() -> None:
    table = [request(i, intended_ns=(i // 2) * 15 * MS) for i in range(6)]
    assert steady(table, [ClosedPhase("all", 6, 2)]) == [("all", 0, 45 * MS)]


def test_a_concurrency_that_is_never_reached_has_no_window() -> None:
    assert steady([request(i) for i in range(9)], [ClosedPhase("all", 9, 10)]) == []
    assert steady([request(i) for i in range(10)], [ClosedPhase("all", 10, 10)]) == [("all", 0, 15 * MS)]


def test_each_phase_has_its_window_and_the_next_one_ends_it() -> None:
    early = [request(i, phase="low", intended_ns=i * 15 * MS) for i in range(3)]
    late = [request(10 + i, phase="high", intended_ns=45 * MS) for i in range(4)]
    found = steady(early + late, [ClosedPhase("low", 3, 1), ClosedPhase("high", 4, 4)])
    assert found == [("low", 0, 45 * MS), ("high", 45 * MS, 60 * MS)]


def test_open_loop_window_leaves_out_the_ramp_and_the_drain() -> None:
    # One arrival each 5 ms, each open 15 ms: three open from 10 ms on, the last arrival at 495 ms.
    table = [request(i, intended_ns=5 * MS * i) for i in range(100)]
    assert steady(table, []) == [("", 10 * MS, 495 * MS)]


def test_requests_that_never_started_give_no_steady_window() -> None:
    absent = dict.fromkeys(("intended_ns", "sent_ns", "first_token_ns", "last_token_ns", "end_ns", "itl_ns"))
    assert steady([request(0, status="never_sent", **absent)], []) == []


def test_an_unlimited_slo_asks_for_no_goodput() -> None:
    found: Metrics = measure(RequestColumns.of(requests_table([request(0)])))
    assert found.request_goodput is found.slo_attainment is None
