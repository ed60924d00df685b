"""``ebbench plan``: its result equals that of an exhaustive search."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table
from typer.testing import CliRunner

from ebbench.cli.main import app
from ebbench.config.topology import PoolSpec, TopologySpec
from ebbench.errors import InputFileError, UsageError
from ebbench.records.plan import Plan
from ebbench.records.warnings import fact
from ebbench.render.figures import save_plot
from ebbench.runs.pool import InProcess
from ebbench.sizing.chart import frontiers
from ebbench.sizing.choose import Costed, DeploymentChoice, DeploymentPlan, choose, on_frontiers
from ebbench.sizing.deployments import (
    WITHIN,
    Bound,
    Candidate,
    Demand,
    Deployment,
    Level,
    Stress,
    bound,
    candidate_of,
    run_of,
    size,
    stress,
)
from ebbench.sizing.estimate import Probe
from ebbench.sizing.limits import parse_limits
from ebbench.sizing.plan_sentences import REFUSALS, parts
from ebbench.sizing.prices import check_prices, parse_prices, sources
from ebbench.sizing.probe import ProbeReading
from ebbench.spec.run import RunSpec, simulated

LIMITS = parse_limits(["ttft:1500 tpot:40"], 0.95)
READING = ProbeReading(
    probe=Probe(1.0, 0, ()), run_dir="", short=False, correlation=0.0, sessions=100, invalid="", mean_open=4.0,
    requests_per_session=1.0, completed_sessions_per_s=1.0, attainment=1.0, shares={}, goodput_requests_per_s=1.0,
    goodput_tokens_per_s=100.0, output_tokens_per_s=100.0, ttft_ms=20.0, tpot_ms=10.0, ttft_high_ms=30.0,
    tpot_high_ms=12.0, memory_full=0.0,
)  # fmt: skip
PRICES = {"h200": 3.5, "l40s": 0.9, "rtx-4090": 0.4}


def on(device: str, *, tp: int = 1) -> RunSpec:
    spec = simulated("sharegpt", "v1", device, "qwen3-8b", 32, 8192, "poisson", max_model_len=8192, redraw=True)
    return spec.changed(topology=TopologySpec(replicas=PoolSpec(tp=tp)) if tp > 1 else None)


def demand(rate: float = 12.0, limits: str = "", sessions: int = 300, headroom: float = 0.0, spare: int = 0) -> Demand:
    return Demand(parse_limits([limits], 0.95) if limits else LIMITS, rate, sessions, headroom, spare)


RUNS = [on(device) for device in PRICES] + [on("h200", tp=2)]
SMALL = run_of(Candidate("l40s", 1, "v1", 8192, 64), RUNS[0])


def planned(
    choice: DeploymentChoice, prices: dict[str, float] | None = None, headroom: float = 0.0, spare: int = 0
) -> DeploymentPlan:
    return DeploymentPlan(choice, demand(headroom=headroom, spare=spare), RUNS[0], prices or {})


def test_a_model_that_needs_several_gpus_has_them() -> None:
    """141 GB of weights: not on one H100, but on two."""
    found = choose(
        demand(2.0, "ttft:4000 tpot:80"), [on("h100", tp=tp).changed(model="llama-3.1-70b") for tp in (1, 2)],
        {}, InProcess(),
    )  # fmt: skip
    assert [each.deployment.candidate.tp for each in found.carrying] == [2]
    [(candidate, reason)] = found.refused
    assert candidate.tp == 1
    assert "does not fit on h100: weights 141.1 GB" in reason.worded(REFUSALS)


@pytest.mark.parametrize(
    "change", [{"vllm_version": "0.12"}, pytest.param({"gpu_memory_utilization": 0.85}, marks=pytest.mark.nightly)]
)
def test_a_smaller_kv_cache_carries_less(change: dict[str, object]) -> None:
    """Qwen3-32B leaves one H100 a tenth of its memory."""
    large = on("h100").changed(model="qwen3-32b", max_num_seqs=512)
    assert bound(large.changed(**change)).saturated_per_s < 0.9 * bound(large).saturated_per_s


def test_deployments_left_out_cost_more_than_the_one_chosen() -> None:
    found = choose(demand(), RUNS, PRICES, InProcess())
    assert len(found.carrying) + len(found.refused) + len(found.pruned) == len(RUNS)
    costs = {}
    for run in RUNS:
        replicas = size(demand(), run, bound(run).first(demand()), 200).replicas
        candidate = candidate_of(run)
        costs[candidate] = replicas * PRICES[candidate.device] if replicas else float("inf")
    assert found.pruned
    assert min(costs.values()) == min(costs[each.deployment.candidate] for each in found.carrying)
    assert all(costs[candidate] > WITHIN * min(costs.values()) for candidate in found.pruned)


def test_the_saturated_rate_bounds_what_any_load_within_limits_completes() -> None:
    most = bound(on("l40s")).saturated_per_s
    fewest = bound(on("l40s")).fewest(demand())
    deployment = size(demand(), on("l40s"), 1, 200)
    assert deployment.replicas >= fewest
    assert deployment.reading is not None
    assert deployment.reading.completed_sessions_per_s <= 1.05 * most


@pytest.mark.parametrize("too_many", [1, *(pytest.param(count, marks=pytest.mark.nightly) for count in (0, 2))])
def test_a_deployment_has_the_fewest_replicas_that_meet_the_limits(too_many: int) -> None:
    """One replica with a random stream of its own needs four; a dispatcher that knows the loads needs three."""
    load = demand(20.0, sessions=300)
    fewest = bound(SMALL).first(load)
    sized = size(load, SMALL, fewest, 200).replicas
    replicas, found = stress(load, SMALL, sized + too_many, fewest)
    assert (fewest, sized, replicas) == (3, 4, 3)
    assert found.at_rate.attainment >= 0.95
    assert found.lost is not None
    assert found.lost.overloaded


def test_every_deployment_that_could_be_the_cheapest_is_simulated_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fifth, sized at the highest cost, needs half of its replicas behind a dispatcher."""
    candidates = [Candidate("h200", 1, "v1", budget, 32) for budget in range(32, 37)]
    sized = {each: Deployment(each, 10 + at, READING, None, 10) for at, each in enumerate(candidates)}
    last = candidates[-1]
    sized[last] = replace(sized[last], fewest=7)
    stresses = Stress(Level(1.0, False), Level(1.0, False), None, 20.0, 10.0)
    module = "ebbench.sizing.choose"
    monkeypatch.setattr(f"{module}.bound", lambda run: Bound(candidate_of(run), 10.0))
    monkeypatch.setattr(f"{module}.size", lambda _load, run, *_: sized[candidate_of(run)])
    monkeypatch.setattr(f"{module}.stress", lambda _load, _run, replicas, fewest: (min(replicas, fewest), stresses))
    first, *others = choose(
        demand(), [run_of(candidate, RUNS[0]) for candidate in candidates], {}, InProcess()
    ).carrying
    assert (first.deployment.candidate, first.deployment.replicas) == (last, 7)
    assert first.deployment.reading is not None
    assert first.deployment.reading.output_tokens_per_s == READING.output_tokens_per_s * 14 / 7, (
        "the same tokens on fewer"
    )
    assert [each.deployment.replicas for each in others] == [10, 10, 10, 13]
    assert [each.stress is None for each in others] == [False, False, False, True]


def test_with_shared_prefixes_no_smaller_loop_beats_the_saturated_rate() -> None:
    """With 128 conversations open the KV cache holds few of their prefixes; with 64 open one instance serves more."""
    run = on("l40s").changed(workload="wildchat", max_model_len=32768, max_num_seqs=64)
    load = demand(0.4, "e2el:600000")
    deployment = size(load, run, 1, 2)
    assert deployment.replicas == 1
    assert bound(run).first(load) == 1


def test_a_lower_bound_counts_whole_replicas() -> None:
    at = Bound(Candidate("h200", 1, "v1", 8192, 64), saturated_per_s=10.0)
    ten, more, most = (demand(rate) for rate in (10.0, 10.1, 10.6))
    assert (at.fewest(ten), at.fewest(most), at.first(more), at.first(ten)) == (1, 2, 2, 1)


@pytest.mark.parametrize(
    ("headroom", "spare", "replicas"),
    [(0.0, 0, 3), (0.2, 0, 3), (0.21, 0, 4), (0.0, 1, 4), (0.0, 2, 5), (0.7, 1, 5)],
)
def test_headroom_and_spare_replicas_are_carried_by_all_and_by_those_left(
    headroom: float, spare: int, replicas: int
) -> None:
    """25/s with at most 10/s per replica."""
    each = demand(25.0, headroom=headroom, spare=spare)
    assert each.replicas_for(10.0) == replicas
    assert each.share_of(replicas) <= 10.0
    assert replicas - 1 == spare or each.share_of(replicas - 1) > 10.0


def test_a_spare_replica_is_one_more_and_headroom_is_carried_whole() -> None:
    replicas, found = stress(demand(20.0, sessions=300, spare=1), SMALL, 4, 1)
    assert replicas == 4
    assert found.lost is not None
    assert found.lost.met
    replicas, found = stress(demand(20.0, sessions=300, headroom=0.4), SMALL, 3, 1)
    assert replicas == 4
    assert found.with_headroom.met


def test_what_misses_the_limits_behind_a_dispatcher_is_no_deployment(monkeypatch: pytest.MonkeyPatch) -> None:
    missed = Level(0.76, overloaded=False, met=False)
    monkeypatch.setattr("ebbench.sizing.choose.bound", lambda run: Bound(candidate_of(run), 10.0))
    monkeypatch.setattr(
        "ebbench.sizing.choose.size", lambda _load, run, *_: Deployment(candidate_of(run), 4, READING, None, 4)
    )
    monkeypatch.setattr(
        "ebbench.sizing.choose.stress",
        lambda _load, _run, replicas, _fewest: (replicas + 3, Stress(missed, missed, None, 1.0, 1.0)),
    )
    found = choose(demand(), [on("h200")], {}, InProcess())
    assert found.carrying == ()
    assert [reason.worded(REFUSALS) for _, reason in found.refused] == [
        "7 replicas behind a dispatcher still miss the limits, not sized"
    ]


def test_a_run_that_is_too_short_to_decide_meets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def short(_: Demand, _run: RunSpec, plan: Plan, *__: object) -> ProbeReading:
        sizes.append(len(plan))
        return replace(READING, short=True)

    monkeypatch.setattr("ebbench.sizing.deployments._run", short)
    monkeypatch.setattr("ebbench.sizing.deployments._missed_alone", lambda *_: None)
    assert size(demand(), on("h200"), 1, 2).replicas == 0
    assert sizes == [300, 600, 1200, 2400, 4800] * 2


def test_limits_missed_by_a_lone_request_refuse_the_candidate() -> None:
    deployment = size(demand(limits="tpot:3"), on("l40s"), 1, 100)
    assert deployment.replicas == 0
    assert deployment.refused is not None
    assert deployment.refused.code == "missed_alone"
    assert "even one request at a time (tpot" in deployment.refused.worded(REFUSALS)


def test_a_model_that_does_not_fit_is_refused_with_the_reason() -> None:
    found = bound(on("rtx-4090").changed(model="qwen3-32b"))
    assert found.refused


@pytest.mark.parametrize("text", ["h200=-1", "h200=0", "h200=nan", "h200=inf", "h200=", "no-such-file.toml"])
def test_a_price_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_prices([text])


def test_prices_come_from_files_and_options(tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    path.write_text('currency = "EUR"\nas_of = "2026-11-01"\n[gpu_hour]\nh200 = 3.5\nl40s = 0.9\n')
    assert parse_prices([str(path), "l40s=1.1"]) == {"h200": 3.5, "l40s": 1.1}
    assert sources([str(path), "l40s=1.1"]) == "EUR as of 2026-11-01"
    path.write_text("[gpu_hour]\nh200 = 3.5\n")
    assert sources([str(path)]) == sources(["l40s=1.1"]) == ""
    path.write_text("[gpu_hour]\nh200 = -3.5\n")
    with pytest.raises(InputFileError, match="h200"):
        parse_prices([str(path)])
    path.write_text("[gpu_hours]\nh200 = 3.5\n")
    with pytest.raises(InputFileError, match="gpu_hour"):
        parse_prices([str(path)])


def test_costs_compare_only_where_all_devices_have_a_price() -> None:
    assert check_prices([], ["h200", "l40s"]) == {}
    with pytest.raises(UsageError, match="l40s"):
        check_prices(["h200=3.5"], ["h200", "l40s"])


def test_a_price_of_a_device_not_searched_is_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"h20.*did you mean 'h200'"):
        check_prices(["h200=3.5", "h20=3"], ["h200"])
    path = tmp_path / "prices.toml"
    path.write_text("[gpu_hour]\nh200 = 3.5\nl40s = 0.9\n")
    assert check_prices([str(path)], ["h200"]) == {"h200": 3.5}  # a file may price more than one search uses
    path.write_text("[gpu_hour]\nh200 = 3.5\nl40 = 0.9\n")
    with pytest.raises(UsageError, match="l40"):
        check_prices([str(path)], ["h200"])


def test_the_command_prints_one_object() -> None:
    options = "--request-rate 40 --input-len 200 --output-len 30 --goodput ttft:1500 tpot:40 --device h200 --tp 1"
    more = "--device l40s --policy v1 --max-num-seqs 32 --price h200=3.5 --price l40s=0.9 --workers 1 -q --json"
    done = CliRunner().invoke(app, ["plan", "balanced", *options.split(), *more.split()])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    first = found["deployments"][0]
    assert first["cost_per_hour"] == min(each["cost_per_hour"] for each in found["deployments"])
    assert first["gpus"] == first["tp"] * first["replicas"]
    assert first["cost_per_1000_requests"] == pytest.approx(1000 * first["cost_per_hour"] / 3600 / 40, rel=1e-6)


def test_what_a_plan_estimates_is_said_and_fp8_halves_the_time_per_token() -> None:
    load = "balanced --input-len 300 --output-len 40 --request-rate 10"
    options = "--goodput ttft:4000 tpot:200 --device l40s --tp 1 --policy v1 --max-num-seqs 32 --workers 1 -q"
    tpot_ms = []
    for types in ("", "--quantization fp8 --kv-cache-dtype fp8"):
        arguments = f"plan {load} {options} {types}".split()
        found = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
        tpot_ms.append(found["deployments"][0]["median_tpot_ms"])
        printed = " ".join(CliRunner().invoke(app, arguments).output.split())
        assert ("weights in fp8, KV cache in fp8" in printed) is bool(types)
        for text in (" ".join(said["text"] for said in found["deployments"][0]["caveats"]), printed):
            assert "not measured on l40s" in text
            assert re.search(r"mixed steps take \d+ % of this run's time", text)
            assert "never fitted" not in text  # the host's guessed constants change no step by 2 %
    assert tpot_ms[1] < 0.65 * tpot_ms[0]


def test_a_mistyped_device_is_refused_before_anything_runs() -> None:
    options = "--request-rate 20 --goodput ttft:1500 --device h20"
    done = CliRunner().invoke(app, ["plan", "sharegpt", *options.split()])
    assert done.exit_code == 2
    assert "h200" in done.output


def costed(device: str, cost: float, ttft_ms: float, tpot_ms: float, tokens_per_s: float) -> Costed:
    reading = replace(READING, ttft_ms=ttft_ms, tpot_ms=tpot_ms, output_tokens_per_s=tokens_per_s)
    return Costed(Deployment(Candidate(device, 1, "v1", 8192, 64), 1, reading), cost)


def test_the_tables_fit_80_columns() -> None:
    over = Stress(Level(1.0, False), Level(0.99, False), Level(0.5, True), 451.0, 24.4)
    rows = [
        replace(costed("rtx-pro-6000", 123.45, 12345, 127, 5000), stress=over),
        replace(costed("l40s", 130, 20, 6, 1400), stress=over),
    ]
    rows = [replace(row, deployment=replace(row.deployment, replicas=12)) for row in rows]
    text = StringIO()
    console = Console(file=text, width=80)
    for part in parts(planned(DeploymentChoice(tuple(rows)), {"rtx-pro-6000": 1.8, "l40s": 0.9})):
        if isinstance(part, Table):
            console.print(part)
    for words in ("x1.2", "lost", "over", "123.45", "12 x tp1", "1,000 req", "output tok"):
        assert words in text.getvalue()


@pytest.mark.parametrize("lost", [Level(0.5, True), Level(0.5, False), None])
def test_over_is_explained_where_the_table_has_it(lost: Level | None) -> None:
    stress = Stress(Level(1.0, False), Level(0.99, False), lost, 451.0, 24.4)
    found = DeploymentChoice((replace(costed("h200", 1.0, 20.0, 10.0, 100.0), stress=stress),))
    explained = any(isinstance(part, str) and part.startswith("over:") for part in parts(planned(found)))
    assert explained is (lost is not None and lost.overloaded)


@pytest.mark.parametrize(("budget", "seqs", "named"), [(8192, 64, False), (8192, 32, True), (2048, 64, True)])
def test_deployments_are_named_with_budget_and_sequences_if_they_differ(budget: int, seqs: int, named: bool) -> None:
    one, other = costed("h200", 1.0, 20.0, 10.0, 100.0), costed("l40s", 2.0, 20.0, 10.0, 100.0)
    candidate = replace(other.deployment.candidate, max_num_batched_tokens=budget, max_num_seqs=seqs)
    other = replace(other, deployment=replace(other.deployment, candidate=candidate))
    text = StringIO()
    for part in parts(planned(DeploymentChoice((one, other)))):
        if isinstance(part, Table):
            Console(file=text, width=200).print(part)
    assert text.getvalue().count("B=8192 N=64") == (2 if named else 0)  # in both tables
    assert text.getvalue().count(f"B={budget} N={seqs}") == (2 if named else 0)


@pytest.mark.parametrize(("replicas", "gpus"), [(1, "1 GPU."), (3, "3 GPUs.")])
def test_the_cheapest_deployment_is_named_with_its_number_of_gpus(replicas: int, gpus: str) -> None:
    one = costed("h200", 1.0, 20.0, 10.0, 100.0)
    found = DeploymentChoice((replace(one, deployment=replace(one.deployment, replicas=replicas)),))
    [sentence] = [part for part in parts(planned(found)) if isinstance(part, str) and part.startswith("Cheapest")]
    assert sentence.endswith(gpus)


@given(
    st.lists(
        st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=8
    )
)
def test_both_frontiers_hold_every_deployment_that_no_other_beats(figures: list[tuple[int, int, int, int]]) -> None:
    found = on_frontiers([costed(str(place), *map(float, each)) for place, each in enumerate(figures)])

    def beaten(own: tuple[float, ...], others: list[tuple[float, ...]]) -> bool:
        return any(all(a <= b for a, b in zip(other, own, strict=True)) and other != own for other in others)

    costs = [(each.cost, each.ttft_ms, each.tpot_ms) for each in found]
    speeds = [(-each.tokens_per_s_per_user, -each.tokens_per_s_per_gpu) for each in found]
    assert [each.frontier for each in found] == [not beaten(own, [*costs]) for own in costs]
    assert [each.efficient for each in found] == [not beaten(own, [*speeds]) for own in speeds]
    assert any(each.frontier for each in found)
    assert any(each.efficient for each in found)


def test_the_plot_has_cost_over_latency_and_throughput_over_speed(tmp_path: Path) -> None:
    found = on_frontiers([costed("h200", 3.5, 20, 6, 5000), costed("l40s", 3.6, 70, 29, 1400)])
    save_plot(frontiers(planned(DeploymentChoice(tuple(found)), PRICES)), tmp_path / "frontier.svg")
    text = (tmp_path / "frontier.svg").read_text()
    for title in ("median TTFT (ms)", "median TPOT (ms)", "cost per hour", "output tokens/s per GPU"):
        assert title in text


def test_candidates_left_out_are_counted_by_reason() -> None:
    reason = fact("cannot_run", error="no room")
    found = DeploymentChoice((), refused=((candidate_of(RUNS[0]), reason), (candidate_of(RUNS[0]), reason)))
    assert parts(planned(found))[-1] == "2 candidates left out: no room (h200 tp1)."


def test_candidates_left_out_are_named_with_their_policies() -> None:
    def of(device: str, tp: int, policy: str) -> Candidate:
        return Candidate(device, tp, policy, 8192, 64)

    dear = [of("h100", tp, policy) for tp in (1, 2) for policy in ("v1", "eb")] + [of("h200", 2, "eb")]
    kept = [costed("l40s", 1.0, 20.0, 10.0, 100.0)]
    kept.append(replace(kept[0], deployment=replace(kept[0].deployment, candidate=of("h200", 2, "v1"))))
    said = parts(planned(DeploymentChoice(tuple(kept), pruned=tuple(dear))))
    assert "than 1.5 times the cheapest (h100 tp1 tp2, h200 tp2 (eb))." in str(said[-1])


@pytest.mark.parametrize(
    ("headroom", "lost", "said"),
    [
        (Level(1.0, False), Level(0.97, False), ""),
        (
            Level(0.81, False, met=False), Level(0.3, True, met=False),
            "It misses the limits at 120 % of the rate (81 % met) and with one replica lost (the queue grows without "
            "bound): --headroom 0.2 --spare 1 size for that; 4 replicas keep them with one lost.",
        ),
        (
            Level(0.99, False), None,
            "It misses the limits without its only replica: --spare 1 sizes for that; 4 replicas keep them with one "
            "lost.",
        ),
    ],
)  # fmt: skip
def test_under_what_more_the_cheapest_fails_is_said_with_the_options(
    headroom: Level, lost: Level | None, said: str
) -> None:
    one = costed("h200", 1.0, 20.0, 10.0, 100.0)
    one = replace(one, deployment=replace(one.deployment, replicas=3))
    one = replace(one, stress=Stress(Level(1.0, False), headroom, lost, 20.0, 10.0))
    lines = [str(part) for part in parts(planned(DeploymentChoice((one,)))) if "It misses" in str(part)]
    assert lines == ([said] if said else [])
    sized = planned(DeploymentChoice((one,)), headroom=0.2, spare=1)
    [line] = [str(part) for part in parts(sized) if "Cheapest" in str(part)]
    assert "carries 120 % of this rate, and this rate with one replica lost: 3 x h200" in line


@pytest.mark.parametrize("option", [("--headroom", "20"), ("--headroom", "-0.1"), ("--spare", "-1")])
def test_headroom_in_per_cent_and_negative_spares_are_refused(option: tuple[str, str]) -> None:
    options = "--source profile --request-rate 2 --goodput ttft:1500 --device h200"
    done = CliRunner().invoke(app, ["plan", "sharegpt", *options.split(), *option])
    assert done.exit_code == 2
    assert option[0] in done.output
