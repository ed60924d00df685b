"""`ebbench run` and `show` by their command lines, on a synthetic engine and on the simulator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import ebbench.engines.setup
from ebbench.cli.main import app
from ebbench.errors import RunError
from ebbench.records.plan import ClosedPhase, Plan
from ebbench.records.run import Run
from ebbench.runs import prepare
from ebbench.spec.server import is_server
from ebbench.workloads import planner
from ebbench.workloads.options import PlanOptions
from tests.analysis.made_runs import MadeEngine, device_of, plan_of

VLLM_KEYS = [
    "completed", "failed", "duration", "total_input_tokens", "total_output_tokens", "request_throughput",
    "output_throughput", "total_token_throughput", "request_goodput",
    *(f"{s}_{m}_ms" for s in ("mean", "median", "std", "p90", "p95", "p99") for m in ("ttft", "tpot", "itl", "e2el")),
]  # fmt: skip
OWN_KEYS = ["policy", "engine", "device", "model", "workload", "scenario", "seed", "run_dir", "valid", "warnings"]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> MadeEngine:
    """A made-up engine, device and workload; the working directory is empty."""
    made = MadeEngine()
    monkeypatch.chdir(tmp_path)
    sentence = "engine: made up, asked for {}"
    monkeypatch.setattr(ebbench.engines.setup, "select_engine", lambda name: (made, sentence.format(name)))
    of_cell = prepare.device_of
    monkeypatch.setattr(prepare, "device_of", lambda cell, *_: of_cell(cell) if is_server(cell.engine) else device_of())

    def build(asked: PlanOptions) -> Plan:
        shifts = asked.scenario == "concurrency-shift"
        phases = [ClosedPhase("low", 60, 8), ClosedPhase("high", 40, 20)] if shifts else None
        return plan_of(asked.num_prompts or 100, seed=asked.seed, phases=phases)

    # Not build_plan: a module that is first imported in one of these tests would keep the replacement.
    monkeypatch.setattr(planner, "make_plan", build)
    return made


def invoke(*args: str, columns: int = 120) -> Result:
    return CliRunner().invoke(app, list(args), env={"COLUMNS": str(columns)})


def test_a_run_ends_with_table_winner_reasons_and_caveats(engine: MadeEngine) -> None:
    done = invoke("run", "made-up", "--policy", "v1", "--policy", "ebplus")
    assert done.exit_code == 0, done.output
    text = " ".join(done.stdout.split())
    assert "ebplus is ahead: 733 output tokens/s over the whole run, +100.0 % over v1 (366)" in text
    assert "Crossover: a token costs 40 µs more in a mixed batch (left side)" in text
    assert "exclusive ahead in 2 of 3 evaluations" in text
    assert "Mode: exclusive batches 80.0 % of the time" in text
    assert "k* = 5 of N* = 8" in text
    assert "lengths from profile" in text
    assert "lengths are made up" in text
    assert "too few for p99, which takes 662" in text
    assert "engine: made up, asked for auto" in done.stderr
    assert "v1, run 1 of 2: 100/100" in done.stderr


def test_without_policy_ebplus_runs_beside_v1_and_that_is_said(engine: MadeEngine) -> None:
    done = invoke("run", "made-up")
    assert engine.runs == ["v1", "ebplus"]
    assert "running ebplus, and v1 as its baseline" in done.stderr


def test_json_is_one_list_with_the_fixed_keys(engine: MadeEngine) -> None:
    done = invoke("run", "made-up", "-p", "v1", "-p", "ebplus", "--json", "--goodput", "ttft:500", "tpot:15")
    summaries = json.loads(done.stdout)
    assert [summary["policy"] for summary in summaries] == ["v1", "ebplus"]
    for summary in summaries:
        assert not set(VLLM_KEYS + OWN_KEYS) - set(summary)
        assert (summary["completed"], summary["failed"], summary["planned"]) == (100, 0, 100)
        assert summary["p99_ttft_ms"] is None
        assert Path(summary["run_dir"], "manifest.json").exists()
        assert summary["valid"] is True
    assert [summary["slo_attainment"] for summary in summaries] == [0.0, 1.0]
    assert summaries[0]["mean_tpot_ms"] == pytest.approx(20)


def test_runs_are_stored_under_the_directory_asked_for(engine: MadeEngine, tmp_path: Path) -> None:
    invoke("run", "made-up", "-p", "v1", "-o", "one")
    assert Run.load(tmp_path / "one").manifest.policy == "v1"
    invoke("run", "made-up", "-p", "eb:theta=0.5", "-p", "v1", "-o", "many")
    assert sorted(p.name for p in (tmp_path / "many").iterdir()) == ["eb-theta-0.5", "v1"]
    again = invoke("run", "made-up", "-o", "one")
    assert again.exit_code == 2
    assert "output directory one exists" in again.stderr


def test_two_commands_do_not_mix_their_runs_in_one_directory(
    engine: MadeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other command makes the directory while this one still reads its workload."""
    build = planner.make_plan

    def overtaken(asked: PlanOptions) -> Plan:
        (tmp_path / "out" / "v1").mkdir(parents=True)
        return build(asked)

    monkeypatch.setattr(planner, "make_plan", overtaken)
    late = invoke("run", "made-up", "-p", "v1", "-p", "eb", "-o", "out")
    assert late.exit_code == 2
    assert "output directory out exists" in late.stderr
    assert engine.runs == []
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["v1"]


def test_default_directories_name_workload_and_policy(engine: MadeEngine, tmp_path: Path) -> None:
    invoke("run", "made-up", "-p", "v1", "-p", "eb:k=5")
    names = sorted(p.name for p in (tmp_path / "runs").iterdir())
    assert [name.split("Z-")[1] for name in names] == ["made-up-eb-k-5", "made-up-v1"] or [
        name.split("Z-")[1] for name in names
    ] == ["made-up-v1", "made-up-eb-k-5"]


def test_every_policy_sees_the_same_plan(engine: MadeEngine, tmp_path: Path) -> None:
    invoke("run", "made-up", "-o", "both", "--seed", "7")
    first, second = (Run.load(tmp_path / "both" / name) for name in ("v1", "ebplus"))
    assert first.manifest.plan_hash == second.manifest.plan_hash
    assert first.manifest.seed == 7
    assert first.plan.equals(second.plan)


def test_repeats_pair_seeds_and_show_the_spread(engine: MadeEngine, tmp_path: Path) -> None:
    done = invoke("run", "made-up", "--repeats", "3", "--seed", "5", "-o", "out", "--json")
    v1, ebplus = json.loads(done.stdout)
    assert v1["seeds"] == ebplus["seeds"] == [5, 6, 7]
    assert [r["seed"] for r in v1["repeats"]] == [5, 6, 7]
    assert v1["completed"] == 300
    assert v1["spread"]["output_throughput"] == pytest.approx(0, abs=1e-9)
    assert engine.runs == ["v1", "ebplus", "ebplus", "v1", "v1", "ebplus"]
    assert len(list((tmp_path / "out").iterdir())) == 6
    text = invoke("run", "made-up", "--repeats", "2").stdout
    assert "±" not in text
    assert "2 repeats that agree in every figure: no spread" in " ".join(text.split())


def test_phases_are_shown_each(engine: MadeEngine) -> None:
    text = invoke("run", "made-up", "-s", "concurrency-shift").stdout
    assert "By phase" in text
    assert "low" in text
    assert "high" in text


@pytest.mark.parametrize("columns", [80, 120])
def test_no_line_is_wider_than_the_terminal(engine: MadeEngine, columns: int) -> None:
    done = invoke(
        "run", "made-up", "-p", "v1", "-p", "ebplus:margin=1e-05,estimator=censored", "-s", "concurrency-shift",
            "--goodput",
        "ttft:500", "tpot:15", columns=columns,
    )  # fmt: skip
    assert done.exit_code == 0
    assert max(len(line) for line in done.stdout.splitlines()) <= columns
    header = next(line for line in done.stdout.splitlines() if "median" in line)
    assert header.split()[0] == "policy"  # the table's columns did not wrap


def test_an_interrupted_run_is_kept_shown_and_130(
    engine: MadeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.stop_after = 40
    done = invoke("run", "made-up", "-p", "v1", "-p", "ebplus", "-o", "out")
    assert done.exit_code == 130
    assert engine.runs == ["v1"]
    assert "INVALID" in done.stdout
    assert "40 of 100 completed; 60 never sent" in done.stdout
    assert done.stderr.endswith("error: interrupted; kept 1 run\n")
    kept = Run.load(tmp_path / "out" / "v1").manifest
    assert (kept.interrupted, kept.valid) == (True, False)


def test_ctrl_c_in_an_engine_that_keeps_nothing_keeps_the_runs_before(
    engine: MadeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = engine.run

    def run(plan: Any, policy: Any, *rest: Any) -> Any:
        if policy.kind == "ebplus":
            raise KeyboardInterrupt
        return whole(plan, policy, *rest)

    monkeypatch.setattr(engine, "run", run)
    done = invoke("run", "made-up", "-o", "out", "--json")
    assert done.exit_code == 130
    assert [summary["policy"] for summary in json.loads(done.stdout)] == ["v1"]
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["v1"]


def test_a_policy_that_cannot_run_does_not_hide_the_one_before(
    engine: MadeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = engine.run

    def run(plan: Any, policy: Any, *rest: Any) -> Any:
        if policy.kind == "ebplus":
            raise RunError("the server died")
        return whole(plan, policy, *rest)

    monkeypatch.setattr(engine, "run", run)
    done = invoke("run", "made-up", "--json")
    assert done.exit_code == 4
    assert done.stderr.endswith("error: the server died\n")
    assert [summary["policy"] for summary in json.loads(done.stdout)] == ["v1"]


def test_failures_make_the_run_invalid_and_exit_4(engine: MadeEngine, tmp_path: Path) -> None:
    engine.fail_from = 90
    done = invoke("run", "made-up", "-p", "v1", "-o", "out")
    assert done.exit_code == 4
    assert "10 of 100 requests failed or timed out, more than 1%" in done.stderr
    assert "90 of 100 completed; 10 failed" in done.stdout
    assert Run.load(tmp_path / "out").manifest.valid is False


def test_when_every_request_fails_the_metrics_are_null(engine: MadeEngine) -> None:
    engine.fail_from = 0
    done = invoke("run", "made-up", "-p", "v1", "--json")
    assert done.exit_code == 4
    [summary] = json.loads(done.stdout)
    assert (summary["completed"], summary["failed"]) == (0, 100)
    assert summary["output_throughput"] is summary["mean_ttft_ms"] is summary["duration"] is None
    assert "every request failed" in done.stderr
    assert "No policy completed a request" in invoke("run", "made-up", "-p", "v1").stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--policy", "ebb"], "unknown policy 'ebb'; did you mean 'eb'?"),
        (["--policy", "eb:theta=1.5"], "write a number strictly between 0 and 1"),
        (["--policy", "eb:thta=0.5"], "did you mean 'theta'"),
        (["--policy", "deferred"], "write deferred:k=32"),
        (["--policy", "v1", "--policy", "v1"], "policy v1 is given twice"),
        (["--policy", "eb:k=2000"], "k exceeds --max-num-seqs 1024"),
        (["--max-num-seqs", "0"], "--max-num-seqs must be at least 1, not 0"),
        (["--max-num-batched-tokens", "0"], "--max-num-batched-tokens must be at least 1"),
        (
            ["--max-num-seqs", "1024", "--max-num-batched-tokens", "512"],
            "below --max-num-seqs 1024, which vLLM refuses; raise it to 1024",
        ),
        (["--num-prompts", "0"], "--num-prompts must be at least 1 and at most 50,000,000, not 0"),
        (["--max-concurrency", "-3"], "--max-concurrency must be at least 1, not -3"),
        (["--request-rate", "0"], "--request-rate must be above 0, not 0"),
        (["--repeats", "0"], "--repeats must be at least 1"),
        (["--duration", "1e12"], "--duration must be above 0 and at most 1e+08, not 1e+12"),
        (["--warmup", "2000000000"], "--warmup must be 0 or more requests, at most 1,000,000"),
        (["--num-kv-blocks", "5"], "needs 120 KV tokens but --num-kv-blocks holds 80, so it cannot run"),
        (["--goodput", "tftt:500"], "unknown metric of --goodput 'tftt'; did you mean 'ttft'?"),
        (["--goodput", "ttft"], "write a number above 0 (milliseconds), e.g. ttft:500"),
        (["--goodput", "ttft:0"], "(milliseconds)"),
        (["--goodput", "ttft:1", "ttft:2"], "ttft is given twice"),
        *(
            ([option, "99999999999999999999"], f"{option} must be")
            for option in (
                "--num-kv-blocks",
                "--replicas",
                "--front-end-ms",
                "--max-model-len",
                "--max-concurrency",
                "--input-len",
                "--thinking-len",
                "--prefix-groups",
                "--num-prompts",
                "--seed",
                "--max-num-active-seqs",
            )
        ),
        (["--api-server", "datacenter", "--api-server-count", "99999999999999999999"], "--api-server-count must be"),
        (["--topology", "dp=20000"], "at most 10,000 units are simulated, not 20,000"),
        (["--topology", "1p99999999999999999999d"], "at most 10,000 units"),
        (["--policy", "eb:update_every=99999999999999999999"], "and at most 2,147,483,647"),
    ],
)
def test_impossible_settings_are_refused_in_one_line(
    engine: MadeEngine, tmp_path: Path, args: list[str], message: str
) -> None:
    done = invoke("run", "made-up", *args)
    assert done.exit_code == 2, done.output
    error = done.stderr.splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error
    assert not engine.runs
    assert not (tmp_path / "runs").exists()


def test_show_prints_the_same_from_the_directory_alone(engine: MadeEngine) -> None:
    shown_first = invoke("run", "made-up", "-o", "out", "-p", "v1", "-p", "ebplus").stdout
    shown = invoke("show", "out/v1", "out/ebplus")
    assert shown.exit_code == 0
    assert shown.stdout == shown_first
    assert invoke("show", "out").stdout.count("is ahead") == 1


def test_show_json_and_other_limits(engine: MadeEngine) -> None:
    invoke("run", "made-up", "-o", "out")
    summaries = json.loads(invoke("show", "out", "--json", "--goodput", "tpot:15").stdout)
    assert {s["policy"]: s["slo_attainment"] for s in summaries} == {"v1": 0.0, "ebplus": 1.0}


def test_show_names_no_winner_of_runs_that_do_not_compare(engine: MadeEngine) -> None:
    invoke("run", "made-up", "-p", "v1", "-o", "a", "-n", "50")
    invoke("run", "made-up", "-p", "ebplus", "-o", "b", "-n", "60")
    done = invoke("show", "a", "b")
    assert done.exit_code == 0
    assert "No winner: these runs differ in sessions, so their figures do not compare." in " ".join(done.stdout.split())
    assert "wins" not in done.stdout
    invoke("report", "a", "b", "-o", "r.html")
    assert "No winner: these runs differ in sessions" in Path("r.html").read_text()


def test_show_refuses_what_is_no_run(engine: MadeEngine, tmp_path: Path) -> None:
    assert invoke("show", "nowhere").exit_code == 3
    (tmp_path / "empty").mkdir()
    done = invoke("show", "empty")
    assert done.exit_code == 3
    assert "manifest.json: missing; not a run directory" in done.stderr


def test_show_names_a_damaged_run_and_prints_the_others(engine: MadeEngine) -> None:
    invoke("run", "made-up", "-o", "out", "-p", "v1", "-p", "ebplus")
    Path("out/v1/steps.parquet").write_bytes(b"half a fi")
    done = invoke("show", "out")
    assert done.exit_code == 3
    assert "left out: out/v1/steps.parquet" in done.stderr
    assert "ebplus" in done.stdout
    as_json = invoke("show", "out", "--json")
    assert as_json.exit_code == 3
    assert [s["policy"] for s in json.loads(as_json.stdout)] == ["ebplus"]
    Path("out/ebplus/manifest.json").unlink()
    Path("out/ebplus/requests.parquet").unlink()
    assert invoke("show", "out/v1", "out/ebplus").exit_code == 3


def test_a_server_runs_one_policy_as_a_label(engine: MadeEngine) -> None:
    url = "http://127.0.0.1:9"
    done = invoke("run", "made-up", "--engine", url, "-p", "v1", "-p", "eb")
    assert done.exit_code == 2
    assert "give one --policy, as a label" in done.stderr
    done = invoke("run", "made-up", "--engine", url, "-n", "20", "--json")
    [summary] = json.loads(done.stdout)
    assert (summary["policy"], summary["device"], summary["model"]) == ("v1", "unknown", "unknown")
    assert any("only the label" in warning["text"] for warning in summary["warnings"])
    manifest = Run.load(Path(summary["run_dir"])).manifest
    assert (manifest.options, manifest.calibration, manifest.kv_capacity_tokens) == ({}, None, None)


def test_markup_in_names_is_printed_as_text(engine: MadeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    hostile = replace(device_of(), model="[red]../x[/red]</script>")
    monkeypatch.setattr(prepare, "device_of", lambda *_: hostile)
    assert "[red]../x[/red]</script>" in invoke("run", "made-up").stdout


class TestOnTheSimulator:
    """The real plan, device and engine."""

    @pytest.fixture(autouse=True)
    def _empty_directory(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.chdir(tmp_path)

    def test_run_compares_three_policies_on_sharegpt(self) -> None:
        done = invoke(
            "run", "sharegpt", "--source", "profile", "-n", "300", "-c", "200", "--max-num-seqs", "128", "-p", "v1",
            "-p", "eb", "-p", "ebplus", "--engine", "sim",
        )  # fmt: skip
        assert done.exit_code == 0, done.output
        assert "lengths from profile" in done.stdout
        assert "Refill: when the requests waiting are" in done.stdout
        assert "k* = " in done.stdout
        assert done.stdout.count("Time: ") == 3

    def test_the_same_command_gives_the_same_numbers(self) -> None:
        args = ("run", "balanced", "-n", "100", "-c", "32", "-p", "ebplus", "--engine", "sim", "--json")
        first, second = (json.loads(invoke(*args).stdout)[0] for _ in range(2))
        first.pop("run_dir"), second.pop("run_dir")
        assert first == second

    def test_a_request_longer_than_the_model_takes(self) -> None:
        done = invoke("run", "balanced", "-n", "50", "--max-model-len", "300", "--engine", "sim")
        assert done.exit_code == 2
        assert "--drop-too-long" in done.stderr
        kept = invoke("run", "balanced", "-n", "50", "--max-model-len", "800", "--drop-too-long", "--engine", "sim")
        assert kept.exit_code == 0
        assert "were dropped" in " ".join(kept.stdout.split())

    def test_a_request_that_can_never_fit(self) -> None:
        done = invoke("run", "balanced", "-n", "50", "--num-kv-blocks", "8", "--engine", "sim")
        assert done.exit_code == 2
        assert "cannot run; drop longer ones with --max-model-len 128 --drop-too-long" in done.stderr

    @pytest.mark.parametrize(
        ("args", "message"),
        [
            (["sharegtp"], "did you mean 'sharegpt'"),
            (["sharegpt", "--device", "rtx-pro-600"], "did you mean 'rtx-pro-6000'"),
            (["sharegpt", "--model", "qwen3-8"], "did you mean 'qwen3-8b'"),
            (["sharegpt", "--engine", "simm"], "did you mean 'sim'"),
            (["sharegpt", "--source", "profile", "--scenario", "saturate"], "did you mean 'saturated'"),
        ],
    )
    def test_unknown_names_get_a_suggestion(self, args: list[str], message: str) -> None:
        done = invoke("run", *args)
        assert done.exit_code == 2
        assert message in done.stderr.splitlines()[-1]
