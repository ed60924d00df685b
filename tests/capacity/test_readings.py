"""What a capacity search concludes from the probes it has read: which decide, which is nearest, what limits."""

from __future__ import annotations

import math
from dataclasses import replace

import pyarrow as pa
import pytest

from ebbench.devices.loader import load_device
from ebbench.engines.sim import SimEngine
from ebbench.records.plan import ClosedPhase
from ebbench.records.schema import STEPS
from ebbench.records.warnings import Fact, fact
from ebbench.sizing.drive import SearchConfig, SearchOutcome, _too_short, judged
from ebbench.sizing.estimate import Estimate, MetCounts, Probe, fit_crossing
from ebbench.sizing.limits import parse_limits
from ebbench.sizing.probe import ProbeReading, ProbeTables, least_limits_ms, read_measured
from ebbench.sizing.sentences import ENDS, nothing_usable
from ebbench.spec.server import EngineOptions
from ebbench.workloads import build_plan
from tests.analysis.made_runs import MS, request, requests_table
from vllm_eb.policy import parse_policy

READING = ProbeReading(
    probe=Probe(10.0, 0, (MetCounts(99, 100),)), run_dir="", short=False, correlation=0.0, sessions=100, invalid="",
    mean_open=4.0, requests_per_session=1.0, completed_sessions_per_s=1.0, attainment=1.0, shares={},
    goodput_requests_per_s=1.0, goodput_tokens_per_s=100.0, output_tokens_per_s=100.0, ttft_ms=20.0, tpot_ms=10.0,
    ttft_high_ms=30.0, tpot_high_ms=12.0, memory_full=0.0,
)  # fmt: skip


def at(load: float, *, runaway: bool = False, failed: str = "", **fields: object) -> ProbeReading:
    probe = replace(READING.probe, load=load, runaway=runaway, failed=failed)
    return replace(READING, probe=probe, **fields)  # type: ignore[arg-type]


def outcome(
    *readings: ProbeReading, capacity: float | None = 10.0, limited_by: str = "ttft", refused: Fact | None = None
) -> SearchOutcome:
    alone = at(0.5)
    return SearchOutcome(Estimate(capacity, 9.0, 11.0, limited_by, True), readings, alone, refused=refused)


@pytest.mark.parametrize(
    ("probe", "over"),
    [
        (Probe(1.0, 0, (MetCounts(50, 100), MetCounts(100, 100))), False),
        (Probe(1.0, 0, (MetCounts(100, 100), MetCounts(49, 100))), True),
        (Probe(1.0, 0, (MetCounts(100, 100),), runaway=True), True),
        (Probe(1.0, 0, (MetCounts(100, 100),), failed="2 requests failed"), True),
    ],
    ids=["half met", "fewer than half met one limit", "queue grows", "requests failed"],
)
def test_a_short_probe_decides_only_where_its_load_is_clearly_too_high(probe: Probe, over: bool) -> None:
    assert replace(READING, probe=probe).clearly_over is over


def test_the_nearest_reading_is_nearest_by_ratio_with_a_bounded_queue() -> None:
    unusable = (at(10.0, runaway=True), at(10.1, failed="x"), at(9.9, short=True), at(10.2, invalid="late"))
    assert outcome(*unusable, at(5.5), at(18.0)).nearest.probe.load == 18.0  # 10 / 5.5 is more than 18 / 10
    assert outcome(*unusable).nearest.probe.load == 0.5  # requests one at a time


def test_a_probe_that_missed_its_limits_is_not_shown_for_the_capacity() -> None:
    assert outcome(at(10.0, met=False), at(9.5), at(10.4, met=False)).nearest.probe.load == 9.5


def test_a_search_stops_where_longer_runs_cannot_be_had() -> None:
    """A data set whose texts are sent holds 60 sessions; each try at this load has the same."""
    search = SearchConfig(parse_limits(["ttft:300"], 0.95), False, sessions=100, seconds=0.0, precision=0.02, seed=0)
    once = [at(7.0, sessions=200), at(10.0, short=True, sessions=60, asked=100)]
    assert _too_short(search, once) is None
    assert _too_short(search, [*once, at(10.0, short=True, sessions=60, asked=100)]) is None, "no more were asked for"
    again = _too_short(search, [*once, at(10.0, short=True, sessions=60, asked=200)])
    assert again is not None
    assert again.worded(ENDS) == "a probe at 10/s that is too short to decide with all 60 sessions that there are"
    assert "longer source" in nothing_usable(again)
    late = nothing_usable(fact("invalid", probes=3, last="the client fell behind; use more --workers"))
    assert late.endswith("use more --workers)"), "a larger budget would not help"
    assert "took all of --max-time 60;" in nothing_usable(fact("max_time", limit_s=60.0), probed=False)
    longest = _too_short(search, [*once, at(10.0, short=True, sessions=1600)])
    assert longest is not None
    assert longest.worded(ENDS).endswith("with 1,600 sessions")
    assert _too_short(search, [*once, at(10.0, sessions=60)]) is None


def test_runs_in_which_the_queue_changed_too_slowly_are_short() -> None:
    search = SearchConfig(parse_limits(["ttft:300"], 0.95), False, sessions=100, seconds=0.0, precision=0.02, seed=0)
    slow, other, far = at(10.0, correlation=0.9), at(10.3, sessions=199), at(14.0)
    assert [each.short for each in judged(search, [slow, other, far])] == [True, True, False]
    assert [each.short for each in judged(search, [slow, at(10.3, sessions=200)])] == [True, False]


def test_without_a_capacity_the_lowest_usable_load_is_the_nearest_reading() -> None:
    assert outcome(at(3.0), at(2.0), at(1.0, short=True), capacity=None).nearest.probe.load == 2.0


def test_the_limit_that_the_fewest_requests_meet_at_capacity_limits() -> None:
    below = at(8.0, shares={"ttft:300": 0.99, "tpot:30": 0.5})
    above = at(12.0, shares={"ttft:300": 0.7, "tpot:30": 0.9})
    far = at(20.0, shares={"ttft:300": 0.6, "tpot:30": 0.1})
    assert outcome(below, above, far, limited_by="ttft tpot").limited_by == "ttft"
    assert outcome(below, replace(above, memory_full=0.6), far, limited_by="ttft tpot").limited_by == "memory"
    assert outcome(below, replace(above, memory_full=0.5), far, limited_by="ttft tpot").limited_by == "ttft"
    carried = at(10.0, shares={"ttft:300": 1.0, "tpot:30": 1.0})
    missed = replace(above, met=False)
    by = outcome(below, carried, missed, far, limited_by="ttft tpot").limited_by
    assert by == "ttft", "nothing is missed at 10/s, the capacity"
    assert outcome(below, above, limited_by="queue").limited_by == "queue"
    assert outcome(below, above, refused=fact("limits_missed_alone")).limited_by == "limits"


def test_a_search_has_decided_once_it_has_a_capacity_or_an_upper_bound() -> None:
    assert outcome(at(1.0)).decided
    assert SearchOutcome(Estimate(None, 0.0, 4.0, "ttft", False), (), READING).decided
    assert not SearchOutcome(Estimate(None, 0.0, math.inf, "not reached", False), (), READING).decided


@pytest.mark.parametrize(("rate", "requests", "short"), [(60.0, 200, True), (30.0, 200, True), (30.0, 3200, False)])
def test_a_queue_that_grows_while_the_batch_fills_does_not_decide(rate: float, requests: int, short: bool) -> None:
    """An RTX PRO 6000 carries 21.7 requests/s here; 200 are sent before more than a few have ended."""
    lengths = {"input_len": 512, "output_len": 128, "length_distribution": "fixed"}
    plan = build_plan("balanced", "poisson", seed=0, num_prompts=requests, request_rate=rate, **lengths)
    device = load_device("rtx-pro-6000", "qwen3-8b")
    result = SimEngine().run(plan, parse_policy("v1"), device, EngineOptions())
    tables = ProbeTables(result.requests, result.steps, plan.phases, 0)
    found = read_measured(tables, rate, parse_limits(["ttft:2000 tpot:80"], 0.95))
    assert found.probe.runaway
    assert found.short == short


def alone(rows: list[dict[str, object]]) -> tuple[pa.Table, list[ClosedPhase]]:
    """Requests one after the other, a second apart."""
    table = [
        request(number, intended_ns=number * 1000 * MS, **_later(row, number * 1000 * MS))
        for number, row in enumerate(rows)
    ]
    return requests_table(table), [ClosedPhase("all", len(rows), 1)]


def _later(row: dict[str, object], by_ns: int) -> dict[str, object]:
    return {
        name: value + by_ns if isinstance(value, int) and name.endswith("_ns") else value for name, value in row.items()
    }


def took(ttft_ms: int, tpot_ms: int, **more: object) -> dict[str, object]:
    """A request of two tokens."""
    last = (ttft_ms + tpot_ms) * MS
    return {"first_token_ns": ttft_ms * MS, "last_token_ns": last, "end_ns": last, "itl_ns": [tpot_ms * MS]} | more


def share_meeting(limits_ms: dict[str, float], table: pa.Table, phases: list[ClosedPhase]) -> float:
    texts = [f"{name}:{value}" for name, value in limits_ms.items() if value > 0]
    return read_measured(ProbeTables(table, STEPS.empty_table(), phases, 0), 1.0, parse_limits(texts, 0.9)).attainment


def test_the_least_limits_are_met_together_by_the_share_that_must() -> None:
    """A tenth of the requests is slow to its first token, another tenth slow per token."""
    rows = [took(90, 5), took(10, 80), *(took(10 + n, 5 + n) for n in range(8))] * 10
    table, phases = alone(rows)
    least = least_limits_ms(table, phases, parse_limits(["ttft:1", "tpot:1"], 0.9), 0)
    assert share_meeting(least, table, phases) >= 0.9
    below = {name: value - 1 for name, value in least.items()}
    assert share_meeting(below, table, phases) < 0.9
    assert least["ttft"] > 20 or least["tpot"] > 20  # the 90th percentile of each alone is 17 and 12 ms


def test_answers_of_one_token_are_no_reason_to_refuse_a_limit_on_tpot() -> None:
    short = took(10, 0, output_tokens=1, itl_ns=[])
    table, phases = alone([took(10, 20), short, short] * 20)
    assert share_meeting({"ttft": 10.0, "tpot": 20.0}, table, phases) == 1.0
    assert least_limits_ms(table, phases, parse_limits(["tpot:1"], 0.5), 0)["tpot"] == 0
    assert least_limits_ms(table, phases, parse_limits(["tpot:1"], 0.95), 0)["tpot"] == 20


def test_a_figure_that_too_many_answers_lack_has_no_least_limit() -> None:
    at_once = took(10, 0, output_tokens=9, itl_ns=[0] * 8, bundled_tokens=True)
    table, phases = alone([took(10, 20), at_once] * 20)
    least = least_limits_ms(table, phases, parse_limits(["ttft:1", "tpot:1"], 0.95), 0)
    assert least == {"ttft": 10.0, "tpot": math.inf}


SERVER = SearchConfig(
    parse_limits(["ttft:300"], 0.95), False, sessions=300, seconds=30.0, precision=0.02, seed=0, real_time=True,
    coarse=1 / 3,
)  # fmt: skip


def test_of_many_probes_of_a_server_one_may_seem_too_short_by_chance() -> None:
    by_chance = [at(10.0, sessions=300, asked=300, correlation=share) for share in (0.1, 0.2, 0.55, 0.0)]
    assert not any(each.short for each in judged(SERVER, by_chance))
    slow = [at(10.0, sessions=300, asked=300, correlation=share) for share in (0.6, 0.5, 0.7, 0.6)]
    assert all(each.short for each in judged(SERVER, slow))
    assert not any(each.short for each in judged(SERVER, slow, patient=False))


def test_a_coarse_probe_decides_only_where_it_is_clear_and_is_not_fitted() -> None:
    def with_share(met: int, sessions: int) -> ProbeReading:
        reading = at(10.0, sessions=sessions, asked=sessions)
        return replace(reading, probe=replace(reading.probe, counts=(MetCounts(met, sessions),)))

    clear, unclear, failing, whole = judged(
        SERVER, [with_share(*each) for each in ((100, 100), (96, 100), (80, 100))]
    ) + (judged(SERVER, [with_share(288, 300)]))
    assert [clear.short, unclear.short, failing.short, whole.short] == [False, True, False, False]
    assert [each.probe.coarse for each in (clear, unclear, failing, whole)] == [True, True, True, False]
    full = [
        Probe(load, 0, (MetCounts(met, 300),))
        for load, met in ((9, 295), (9.5, 290), (10, 285), (10.5, 280), (11, 270))
    ]
    found = fit_crossing(SERVER.limits.requirements()[0], 0, full, 10.0)
    assert found is not None
    assert fit_crossing(SERVER.limits.requirements()[0], 0, [*full, failing.probe], 10.0) == found
