import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbench.cli.main import app
from ebbench.errors import InputFileError, UnknownNameError, UsageError
from ebbench.records.plan import ClosedPhase, Plan
from ebbench.traffic.spec import Load, apportion, list_scenarios, load_scenario, make_schedule
from ebbench.workloads import build_plan
from ebbench.workloads.options import scenario_meant


def arrivals_s(plan: Plan) -> npt.NDArray[np.float64]:
    return plan.table["arrival_ns"].to_numpy() / 1e9


@pytest.mark.parametrize("name", list_scenarios())
def test_every_bundled_scenario_builds_a_plan(name: str, tmp_path: Path) -> None:
    spec = load_scenario(name)
    assert spec.name == name
    if spec.loop == "trace":
        return  # tests/workloads/test_trace.py
    plan = build_plan("balanced", name, num_prompts=500, request_rate=50 if spec.loop == "open" else None)
    assert plan.closed_loop == (spec.loop == "closed")
    assert len(plan) == 500
    assert set(plan.table["phase"].to_pylist()) <= {phase.name for phase in spec.phases}


def test_distribution_shift_has_the_published_phases() -> None:
    plan = build_plan("sharegpt", "distribution-shift", seed=4)
    assert plan.phases == tuple(ClosedPhase(name, 2000, 2048) for name in ("1024/128", "512/512", "128/1024"))
    for index, (mean_in, mean_out) in enumerate([(1024, 128), (512, 512), (128, 1024)]):
        part = plan.table.slice(2000 * index, 2000)
        for column, mean in (("input_tokens", mean_in), ("output_tokens", mean_out)):
            values = part[column].to_numpy()
            assert values.min() >= mean / 2
            assert values.max() <= mean * 1.5
            assert values.mean() == pytest.approx(mean, rel=0.03)  # four standard errors
    assert plan.facts["source"] == "scenario"


def test_concurrency_shift_has_the_published_phases() -> None:
    plan = build_plan("sharegpt", "concurrency-shift")
    assert [(phase.sessions, phase.max_concurrency) for phase in plan.phases] == [
        (2000, c) for c in (32, 512, 1024, 256, 2048)
    ]
    assert plan.table["input_tokens"].to_numpy().mean() == pytest.approx(512, rel=0.02)
    assert plan.table["output_tokens"].to_numpy().mean() == pytest.approx(256, rel=0.02)
    assert len(plan) == 10_000


def test_num_prompts_scales_phases_in_proportion() -> None:
    plan = build_plan("sharegpt", "distribution-shift", num_prompts=100)
    assert [phase.sessions for phase in plan.phases] == [34, 33, 33]


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=8), st.integers(0, 10_000))
def test_apportion_gives_everything_and_stays_within_one(weights: list[float], total: int) -> None:
    counts = apportion(weights, total)
    assert sum(counts) == total
    assert all(abs(c - w * total / sum(weights)) <= 1 + 1e-6 for c, w in zip(counts, weights, strict=True))


def test_rates_as_shares_of_saturation() -> None:
    plan = build_plan("balanced", "saturation-steps", saturation_rate=100, seed=2)
    times, phase = arrivals_s(plan), np.array(plan.table["phase"].to_pylist())
    for index, (name, share) in enumerate([("50 %", 0.5), ("80 %", 0.8), ("95 %", 0.95), ("120 %", 1.2)]):
        inside = times[phase == name]
        assert inside.min() >= 60 * index
        assert inside.max() < 60 * (index + 1)
        assert len(inside) == pytest.approx(6000 * share, rel=0.06)
    assert times[phase == "50 % again"].min() >= 240


def test_num_prompts_cuts_timed_phases_at_the_end() -> None:
    whole = build_plan("balanced", "saturation-steps", saturation_rate=20, seed=2)
    cut = build_plan("balanced", "saturation-steps", saturation_rate=20, seed=2, num_prompts=700)
    assert cut.table["arrival_ns"].equals(whole.table["arrival_ns"].slice(0, 700))


def test_num_prompts_bounds_what_is_drawn_at_any_rate() -> None:
    whole = build_plan("balanced", "saturation-steps", request_rate=100, seed=2)
    cut = build_plan("balanced", "saturation-steps", request_rate=100, seed=2, num_prompts=4000)
    assert cut.table["arrival_ns"].equals(whole.table["arrival_ns"].slice(0, 4000))
    assert cut.table["phase"].equals(whole.table["phase"].slice(0, 4000))
    assert len(build_plan("balanced", "saturation-steps", request_rate=1e300, num_prompts=20)) == 20


def test_arrivals_do_not_depend_on_contents() -> None:
    one = build_plan("balanced", "poisson", request_rate=10, num_prompts=300, seed=1)
    other = build_plan("decode-heavy", "poisson", request_rate=10, num_prompts=300, seed=1)
    assert one.table["arrival_ns"].equals(other.table["arrival_ns"])
    assert not one.table["input_tokens"].equals(other.table["input_tokens"])


def test_caller_sets_the_burstiness() -> None:
    gaps = np.diff(arrivals_s(build_plan("balanced", "gamma", request_rate=9, num_prompts=20_000, burstiness=16)))
    assert gaps.std() / gaps.mean() == pytest.approx(0.25, rel=0.05)


def test_open_loop_with_a_cap() -> None:
    plan = build_plan("balanced", "poisson", request_rate=10, num_prompts=30, max_concurrency=4)
    assert plan.max_concurrency == 4
    assert not plan.closed_loop


def test_closed_loop_with_the_callers_concurrency() -> None:
    plan = build_plan("balanced", "saturated", num_prompts=30, max_concurrency=4)
    assert plan.phases == (ClosedPhase("saturated", 30, 4),)
    assert plan.max_concurrency is None
    assert plan.table["arrival_ns"].null_count == 30


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scenario": "poisson"}, "give --request-rate"),
        ({"scenario": "ramp"}, "--saturation-rate"),
        ({"scenario": "saturated", "request_rate": 3.0}, "has no request rate"),
        ({"scenario": "concurrency-shift", "max_concurrency": 3}, "leave out --max-concurrency"),
        ({"scenario": "distribution-shift", "input_len": 3}, "brings its own lengths"),
        ({"scenario": "poisson", "request_rate": 3, "burstiness": 0.5}, "no gamma gaps"),
        ({"burstiness": 0.5}, "burstiness shapes the gaps"),
        ({"scenario": "trace"}, "needs a workload log:FILE"),
        ({"scenario": "poisson", "request_rate": 3, "speed": 2}, "speed scales recorded times"),
        ({"scenario": "poisson", "request_rate": -1}, "--request-rate must be above 0"),
        ({"scenario": "poisson", "request_rate": float("nan")}, "--request-rate must be a finite number"),
        ({"scenario": "gamma", "request_rate": 3, "burstiness": float("inf")}, "--burstiness must be a finite number"),
        ({"saturation_rate": 5}, "no share of saturation; leave out --saturation-rate"),
        ({"scenario": "poisson", "request_rate": 3, "saturation_rate": 5}, "both set the rate"),
        ({"scenario": "distribution-shift", "source": "file:/x.json"}, "leave out --source file:/x.json"),
        ({"scenario": "distribution-shift", "tokenizer": "words"}, "'distribution-shift' has none, leave it out"),
        (
            {"scenario": "saturation-steps", "request_rate": 1e-6},
            "no session arrives in 300 s at this rate; raise --req",
        ),
        ({"scenario": "saturation-steps", "request_rate": 1e9}, "3e\\+10 arrivals, more than 10,000,000; give --num"),
        ({"num_prompts": 0}, "--num-prompts must be at least 1"),
        ({"seed": -1}, "--seed must be at least 0 and at most 9,223,372,036,854,775,807, not -1"),
        (
            {"seed": 2**63},
            "--seed must be at least 0 and at most 9,223,372,036,854,775,807, not 9,223,372,036,854,775,808",
        ),
        ({"num_prompts": 2**31}, "--num-prompts must be at least 1 and at most 50,000,000, not 2,147,483,648"),
    ],
)
def test_contradicting_scenario_options_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        build_plan("balanced", **arguments)
    assert "\n" not in str(caught.value)


def test_unknown_scenario_suggests() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'saturated'"):
        load_scenario("saturatd")


def own(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return str(path)


def test_a_users_scenario_file(tmp_path: Path) -> None:
    path = own(
        tmp_path,
        """
name = "mine"
description = "two levels"
loop = "open"
max_concurrency = 9
[[phases]]
name = "low"
process = "constant"
rate = 2
requests = 10
[[phases]]
name = "high"
process = "constant"
rate = 20
requests = 30
""",
    )
    plan = build_plan("balanced", path)
    times = arrivals_s(plan)
    assert times[:10] == pytest.approx(np.arange(1, 11) / 2)
    assert times[10:] == pytest.approx(5 + np.arange(1, 31) / 20)
    assert plan.max_concurrency == 9
    assert plan.table["phase"].to_pylist() == ["low"] * 10 + ["high"] * 30


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('[[phases]]\nname="a"\nmax_concurency=3', r"mine.toml:6: unknown key 'max_concurency'.*'max_concurrency'"),
        ('[[phases]]\nname="a"\nmax_concurrency=0', "max_concurrency must be positive"),
        ('[[phases]]\nname="a"\nprocess="poisson"', "needs max_concurrency"),
        ('[[phases]]\nname="a"\nmax_concurrency=2\n[[phases]]\nname="b"\nmax_concurrency=2', "needs requests"),
        ('[[phases]]\nname="a"\nmax_concurrency=2\ninput={family="fixed", mean=3}', "both input and output"),
        ("", "needs at least one"),
        ('[[phases]\nname="a"', "is not valid TOML"),
        ('[[phases]]\nname="a"\nmax_concurrency="x"', "Expected `int"),
        ('[[phases]]\nname="a"\nmax_concurrency=2\nrate=3', "'a' of a closed loop has no rate"),
        ('[[phases]]\nname="a"\nmax_concurrency=2\nlevel=2', "has no level"),
        ('[[phases]]\nname="a"\nmax_concurrency=2\nburstiness=0.5', "has no burstiness"),
        ('[[phases]]\nname="a"\nmax_concurrency=2\nshare=0.5', "has no share"),
        ('[[phases]]\nname="a"\nmax_concurrency=2\ncurve={levels=[1, 2]}', "has no curve"),
        ('max_concurrency=2\n[[phases]]\nname="a"\nmax_concurrency=2', "phases of a closed loop set"),
        (
            '[[phases]]\nname="a"\nmax_concurrency=2\nrequests=3\n[[phases]]\nname="b"\nmax_concurrency=2\nrequests=3\n'
            'input={family="fixed", mean=3}\noutput={family="fixed", mean=3}',
            "either all phases bring their own",
        ),
    ],
)
def test_bad_scenario_files_are_refused_in_one_line(tmp_path: Path, body: str, message: str) -> None:
    assert_refused(tmp_path, "closed", body, message)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("rate=3\nburstiness=0.2", "burstiness shapes gamma gaps; write process = 'gamma'"),
        ("rate=3\nshare=0.5", "rate or share, not both"),
        ("rate=inf", "rate must be finite, not inf"),
        ("rate=3\nduration_s=inf", "duration_s must be finite, not inf"),
        ("rate=nan", "rate must be positive, not nan"),
        ("rate=3\ncurve={levels=[1, inf]}", "curve levels must be finite"),
        ("rate=3\ncurve={levels=[1, nan]}", "curve levels must be finite"),
        ("rate=3\ncurve={levels=[0, 0]}", "not all zero"),
        ("rate=3\ncurve={levels=[1, 2], period_s=inf}", "period_s must be finite, not inf"),
        ("rate=3\ngaps=[1]\nroots=[1]\ncentres=[0.5]", "as many curve.widths"),
        (
            "rate=3\ngaps=[1]\nroots=[1, 1]\ncentres=[0.5]\ncurve={levels=[1, 2], widths=[2, 1]}",
            "roots and centres are those of the same steps",
        ),
    ],
)
def test_bad_open_phases_are_refused_in_one_line(tmp_path: Path, body: str, message: str) -> None:
    assert_refused(tmp_path, "open", f'[[phases]]\nname="a"\nprocess="poisson"\n{body}', message)


@pytest.mark.parametrize("key", ["speed", "start_s", "duration_s"])
def test_a_replay_is_finite(tmp_path: Path, key: str) -> None:
    assert_refused(tmp_path, "trace", f"[replay]\n{key}=inf", "finite")


def assert_refused(tmp_path: Path, loop: str, body: str, message: str) -> None:
    path = own(tmp_path, f'name = "mine"\ndescription = "x"\nloop = "{loop}"\n{body}\n')
    with pytest.raises(InputFileError, match=message.replace("`", "'")) as caught:
        load_scenario(path)
    assert "\n" not in str(caught.value)
    assert "mine.toml" in str(caught.value)


def test_trace_scenarios_have_no_phases(tmp_path: Path) -> None:
    text = 'name="m"\ndescription="x"\nloop="trace"\n[[phases]]\nname="a"\nmax_concurrency=1'
    with pytest.raises(InputFileError, match="no phases"):
        load_scenario(own(tmp_path, text))


def test_schedule_says_sessions_per_phase() -> None:
    schedule = make_schedule(load_scenario("distribution-shift"), Load(), 7, 4000, 0)
    assert schedule.sizes == (3, 2, 2)
    assert schedule.phase_of_session.tolist() == [0, 0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    "scenario", ["distribution-shift", "concurrency-shift", "ramp", "day-curve", "saturation-steps"]
)
def test_every_scenario_builds_a_plan_of_one_prompt(scenario: str) -> None:
    rate = 5.0 if load_scenario(scenario).loop == "open" else None
    plan = build_plan("balanced", scenario, num_prompts=1, request_rate=rate)
    assert len(plan) == 1
    assert sum(phase.sessions for phase in plan.phases) == (0 if rate else 1)


def test_an_infinite_rate_opens_everything_at_once() -> None:
    assert scenario_meant("balanced", None, math.inf, None) == "saturated"
    plan = build_plan("balanced", "saturated", request_rate=math.inf, num_prompts=30)
    assert [(phase.sessions, phase.max_concurrency) for phase in plan.phases] == [(30, 30)]
    assert plan.facts["all_at_once"] is True
    assert "request_rate" not in plan.facts
    capped = build_plan("balanced", "saturated", request_rate=math.inf, num_prompts=30, max_concurrency=4)
    assert capped.phases[0].max_concurrency == 4
    assert capped.table.equals(plan.table)
    with pytest.raises(UsageError, match="leave out --scenario poisson"):
        build_plan("balanced", "poisson", request_rate=math.inf, num_prompts=30)
    with pytest.raises(UsageError, match="leave out --request-rate inf"):
        build_plan("balanced", "concurrency-shift", request_rate=math.inf)


def test_runs_say_what_an_infinite_rate_means(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    common = ["run", "balanced", "--engine", "sim", "-p", "v1", "-n", "8", "--request-rate", "inf", "--json"]
    for more, said in (([], "all 8 sessions are released at once"), (["-c", "2"], "one of the 2 open at a time")):
        with pytest.raises(SystemExit) as ended:
            app([*common, *more, "-o", str(tmp_path / f"run{len(more)}")], standalone_mode=True)
        assert not ended.value.code
        assert said in capsys.readouterr().err
