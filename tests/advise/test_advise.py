"""``ebbench advise``: the simulated runs of the candidates, and the printed advice."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import convert
from typer.testing import CliRunner, Result

from ebbench.advice import sentences
from ebbench.advice.candidates import alike, default_budgets, default_policies, plan_arguments
from ebbench.advice.choice import AdviceQuestion, ExpectedLoad, own_budget
from ebbench.advice.simulate import concurrency_cells, tuning_cells
from ebbench.analysis.metrics import Slo
from ebbench.cli.main import app
from ebbench.records.manifest import plan_hash
from ebbench.records.plan import ClosedPhase, Plan
from ebbench.records.warnings import Fact
from ebbench.spec.run import simulated
from ebbench.spec.server import version_defaults
from ebbench.workloads import build_plan


def test_targets_are_handed_to_the_policy_that_takes_them() -> None:
    without = default_policies(Slo(), (8192,), 1024)
    assert without[0] == "v1"
    assert {"cadence:every=16", "batchwait:iters=32,ratio=0.5", "delayer", "ppas", "eb", "ebplus", "marginal"} < {
        *without
    }
    assert {*default_policies(Slo(ttft=10_000, tpot=100), (8192,), 1024)} - {*without} == {
        "marginal:ttft=10,tpot=0.1",
        "slochunk:tpot=0.1",
    }


@pytest.mark.parametrize(
    ("tokens", "seqs", "budgets"),
    [(8192, 1024, {2048, 4096}), (16384, 4096, {4096, 8192}), (2048, 64, set())],
)
def test_budgets_below_the_only_one_are_tried(tokens: int, seqs: int, budgets: set[int]) -> None:
    tried = default_policies(Slo(), (tokens,), seqs)
    assert {own_budget(name) for name in tried} == budgets | {None}


def test_default_policies_set_no_budget_where_several_are_tried() -> None:
    assert default_budgets(1024) == (8192, 2048, 4096, 16384)
    assert default_budgets(20_000) == (20_000,)
    assert all(own_budget(name) is None for name in default_policies(Slo(), default_budgets(1024), 1024))


def invoke(*args: str) -> Result:
    return CliRunner().invoke(app, list(args), env={"COLUMNS": "140"})


def test_policies_with_targets_are_tried_with_the_limits_of_their_kind() -> None:
    plain = default_policies(Slo(), (8192,), 1024)
    assert plain[0] == "v1"
    assert plain[-2:] == ("v1:budget=2048", "v1:budget=4096")
    assert set(default_policies(Slo(ttft=500, e2el=9000), (8192,), 1024)) - set(plain) == {"marginal:ttft=0.5"}
    targets = set(default_policies(Slo(ttft=500, tpot=50), (8192,), 1024)) - set(plain)
    assert targets == {"marginal:ttft=0.5,tpot=0.05", "slochunk:tpot=0.05"}
    assert not any("budget" in policy for policy in default_policies(Slo(), (2048, 8192), 1024))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("advice")


def changed(options: Sequence[str], **values: str) -> list[str]:
    """The options with other values for those named, with underscores: ``input_len="3000"``."""
    found = list(options)
    for name, value in values.items():
        found[found.index("--" + name.replace("_", "-")) + 1] = value
    return found


SMALL = (
    *("balanced", "--input-len", "200", "--output-len", "60", "-n", "150", "-c", "64", "--seeds", "2"),
    *("--max-num-seqs", "64", "--max-num-batched-tokens", "2048", "--no-crossover", "--workers", "1", "-q"),
)


def test_the_command_says_what_to_run_and_why(runs: Path) -> None:
    done = invoke("advise", *SMALL, "--runs", str(runs))
    assert done.exit_code == 0, done.output
    assert done.output.count("Run ") == 1
    for word in ("Parameters", "Theory", "Simulation, which decides", "Keep in mind", "devices show rtx-pro-6000"):
        assert word in done.output
    assert "2 seeds" in done.output
    assert "do not fill" not in done.output
    assert "150 requests are 2.3 per open one" in " ".join(done.output.split())


def test_advice_names_the_vllm_option_that_does_what_the_policy_does() -> None:
    question = AdviceQuestion(simulated("balanced", "v1", "h200", "qwen3-8b", 8, 64), 1, Slo(), ("v1",))
    option = {"cadence:every=4": "--prefill-schedule-interval 4", "v1:budget=64": "--max-num-batched-tokens 64 does"}
    for policy in (*option, "marginal", "v1", "cadence:every=4,escape=off"):
        chosen = SimpleNamespace(policy=policy, max_num_batched_tokens=64)
        lines = sentences.parameters(SimpleNamespace(question=question, theory=None, tuning=None, chosen=chosen))  # type: ignore[arg-type]
        assert [line for line in lines if "without the plugin" in line] == [
            line for line in lines if policy in option and option[policy] in line
        ]
        assert any("without the plugin" in line for line in lines) == (policy in option)


def test_too_few_requests_to_fill_the_load_are_said(runs: Path) -> None:
    few = [*SMALL]
    few[few.index("-n") + 1] = "40"
    said = " ".join(invoke("advise", *few, "--runs", str(runs)).output.split())
    assert "40 requests do not fill the 64 that the load allows" in said
    assert "--num-prompts 640" in said


def test_the_tables_fit_80_columns(runs: Path) -> None:
    args = ["advise", *SMALL, "--runs", str(runs), "--goodput", "ttft:300", "tpot:40"]
    done = CliRunner().invoke(app, args, env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.output
    assert "…" not in done.output
    assert "marginal:ttft=0.3," in done.output
    assert max(map(len, done.output.splitlines())) <= 80


def advice_of(theory: float | None, eb: float) -> Any:
    """The parts of an Advice that decide its agreement: gain of EB over v1 in theory and in simulation."""
    scores = [
        SimpleNamespace(policy=name, tokens_per_s=rate, at_reference=True)
        for name, rate in (("v1", 100.0), ("eb", 100 * (1 + eb)))
    ]
    return SimpleNamespace(scores=scores, theory=SimpleNamespace(gain=theory, exclusive=(theory or 1) > 0))


@pytest.mark.parametrize(
    ("theory", "eb", "verdict", "explained"),
    [
        (0.90, 0.001, "expects exclusive batches to win (+90.0 % for EB over v1 in tokens/s); in simulation", True),
        (0.40, 0.38, "agree that exclusive batches win: EB over v1 in tokens/s is +38.0 %", False),
        (0.90, 0.01, "agree that exclusive batches win: EB over v1 in tokens/s is +1.0 % in simulation", True),
        (-0.20, -0.18, "agree that mixed batches win", False),
        (0.40, -0.10, "disagree, and the simulation", False),
        (None, 0.10, "is +10.0 % in simulation.", False),
    ],
)  # fmt: skip
def test_agreement_says_which_mode_and_why_the_gains_differ(
    theory: float | None, eb: float, verdict: str, explained: bool
) -> None:
    line = sentences.agreement(advice_of(theory, eb))
    assert verdict in line
    assert ("fills and drains" in line) == explained


def test_advise_json_holds_theory_and_simulation(runs: Path) -> None:
    found = json.loads(invoke("advise", *SMALL, "--runs", str(runs), "--json").stdout)
    assert found["policy"] in {row["policy"] for row in found["scores"]}
    objectives = [row["objective"] for row in found["scores"]]
    assert objectives == sorted(objectives, reverse=True)
    assert found["theory"]["n_star"] <= 64
    v1 = next(row for row in found["scores"] if row["policy"] == "v1")
    assert v1["gain"]["mean"] == pytest.approx(0.0)
    assert found["load"]["concurrency"] == 64


def test_goodput_decides_where_targets_are_given(runs: Path) -> None:
    args = ("advise", *SMALL, "--runs", str(runs), "--goodput", "ttft:300", "tpot:40", "--json")
    found = json.loads(invoke(*args).stdout)
    assert found["objective"] == "goodput"
    for row in found["scores"]:
        assert 0 <= row["attainment"] <= 1
        assert row["objective"] <= row["tokens_per_s"]


def test_the_share_of_a_tuned_budget_is_said(runs: Path) -> None:
    small = changed(SMALL, input_len="3000", output_len="30", max_num_batched_tokens="8192")
    policies = ("-p", "v1", "-p", "v1:budget=2048", "-p", "marginal")
    args = ("advise", *small, *policies, "--runs", str(runs))
    found = json.loads(invoke(*args, "--json").stdout)
    gains = {row["policy"]: row["gain"]["mean"] for row in found["scores"]}
    assert found["tuned_budget"]["max_num_batched_tokens"] == 2048
    best = max(gains.values())
    assert found["tuned_budget"]["share_of_gain"] == pytest.approx(max(gains["v1:budget=2048"], 0) / best)
    assert "token budget alone" in invoke(*args).stdout


def test_policies_and_budgets_are_searched_together(runs: Path) -> None:
    """Long prompts in a small batch: a smaller budget makes vLLM's own scheduler as good as any policy."""
    load = changed(SMALL, input_len="3000", output_len="30", max_num_batched_tokens="8192")
    args = ("advise", *load, "--max-num-batched-tokens", "512", "-p", "v1", "-p", "marginal", "--runs", str(runs))
    found = json.loads(invoke(*args, "--json").stdout)
    tried = {(row["policy"], row["max_num_batched_tokens"]) for row in found["scores"] + found["dropped"]}
    assert tried == {(policy, budget) for policy in ("v1", "marginal") for budget in (8192, 512)}
    assert found["compared_with"] == {"policy": "v1", "max_num_batched_tokens": 8192}
    v1 = next(row for row in found["scores"] if (row["policy"], row["max_num_batched_tokens"]) == ("v1", 8192))
    assert v1["gain"]["mean"] == pytest.approx(0.0)
    said = " ".join(invoke(*args).output.split())
    assert f"--max-num-seqs 64 --max-num-batched-tokens {found['max_num_batched_tokens']}" in said
    assert "token budget alone" in said


def test_tuning_tries_other_settings_with_the_chosen_policy(runs: Path) -> None:
    found = json.loads(invoke("advise", *SMALL, "--runs", str(runs), "--tune", "--json").stdout)
    assert found["tuning"]["tried"] == 13
    assert found["tuning"]["gain"] >= 0.0


QUICK = ("--input-len", "200", "--output-len", "60", "-n", "60", "--no-crossover", "--workers", "1", "-q")


def quick(runs: Path, *args: str) -> dict[str, Any]:
    """The JSON of an ``advise`` call on v1 and EB with few requests."""
    done = invoke(
        "advise", *args, "-p", "v1", "-p", "eb", "--no-crossover", "--workers", "1", "--runs", str(runs), "--json"
    )
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Forty requests, four a second, of growing length."""
    path = tmp_path / "trace.csv"
    rows = [f"2023-11-16 18:17:{i // 4:02d}.{i % 4 * 25}00000,{100 + 10 * i},{10 + i}" for i in range(40)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    return f"trace:{path}"


def test_a_replayed_trace_is_one_run_however_many_seeds(runs: Path, trace: str) -> None:
    """Its plans differ only in token contents, which the simulator ignores: copies would give a width of 0."""
    found = quick(runs, trace, "--seeds", "3")
    assert (found["seeds"], found["seeds_alike"]) == (1, True)
    assert all(len(row["values"]) == 1 for row in found["scores"])
    assert found["reason"]["code"] != "ahead_of_all"
    said = " ".join(
        invoke("advise", trace, *QUICK[4:], "--seeds", "3", "-p", "v1", "-p", "eb", "--runs", str(runs)).output.split()
    )
    assert "Every seed gives the same requests at the same times" in said
    assert "which decides (one seed)" in said
    assert "lengths from file:/" in said


def test_all_rows_of_a_log_are_used_up_to_a_limit_that_is_said(
    runs: Path, trace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--max-num-batched-tokens", "8192", "--seeds", "2")
    whole = quick(runs, trace, *options)
    assert plan_arguments(trace, None, {})["num_prompts"] == 40
    assert not any("sessions are taken" in note for note in whole["notes"])
    assert whole["seeds"] == 1
    monkeypatch.setattr("ebbench.advice.candidates.MOST_OF_A_LOG", 20)
    part = quick(runs, trace, *options)
    assert "20 of the log's 40 sessions are taken, from a place that the seed draws" in part["notes"]
    assert part["seeds"] == 2


def test_where_arrivals_set_the_throughput_it_is_said_to_tell_nothing(runs: Path, tmp_path: Path) -> None:
    rows = "".join(f"2023-11-16 18:{i // 60:02d}:{i % 60:02d}.0000000,{100 + i % 7},{5 + i % 3}\n" for i in range(300))
    (tmp_path / "calm.csv").write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}")
    trace = f"log:{tmp_path / 'calm.csv'}"
    options = ("--policy", "v1", "--policy", "eb", "--no-crossover", "--runs", str(runs), "-q")
    said = " ".join(invoke("advise", trace, *options).output.split())
    assert "Run v1 with --max-num-batched-tokens 8192; 2,048 to 16,384 make no difference. Why:" in said
    assert "All candidates keep up with the arrivals, so tokens/s cannot tell them apart: --goodput" in said


def test_seeds_that_differ_in_anything_stay_several(runs: Path, trace: str) -> None:
    found = quick(runs, trace, "--seeds", "2", "-n", "30", "-s", "poisson", "--request-rate", "20")
    assert (found["seeds"], found["seeds_alike"]) == (2, False)


def test_plans_are_alike_when_only_the_seed_of_their_contents_differs() -> None:
    def plan(seed: int, distribution: str = "fixed") -> Plan:
        return build_plan(
            "balanced", num_prompts=9, source="profile", seed=seed, max_concurrency=4, length_distribution=distribution
        )

    assert alike(plan(0), plan(1))
    assert plan_hash(plan(0)) != plan_hash(plan(1))
    assert not alike(plan(0), plan(0, "uniform"))
    assert not alike(plan(0), replace(plan(0), phases=(ClosedPhase("saturated", 9, 5),)))
    mixed = plan(0).table["content"].to_pylist()
    mixed[1] = mixed[0]  # two requests with the same prompt
    table = plan(0).table
    at = table.schema.get_field_index("content")
    assert not alike(plan(0), replace(plan(0), table=table.set_column(at, table.schema.field(at), [mixed])))


def test_advice_says_that_it_rests_on_one_seed(runs: Path) -> None:
    reason = quick(runs, "balanced", *QUICK[:6], "-c", "16", "--seeds", "1")["reason"]
    assert "(one seed" in convert(reason, Fact).worded(sentences.REASONS)


def test_targets_that_no_request_meets_do_not_decide(runs: Path) -> None:
    load = ("balanced", *QUICK[:6], "-c", "16", "--seeds", "2")
    found = quick(runs, *load, "--goodput", "ttft:1", "tpot:1")
    assert found["policy"] == "v1"
    assert found["reason"] == {"code": "none_in_targets", "values": {}}


def test_the_load_of_an_open_loop_is_what_its_run_had_open(runs: Path) -> None:
    """In an open loop the mean number of open requests is below their total."""
    found = quick(runs, "balanced", *QUICK[:6], "--request-rate", "10", "--seeds", "1")
    v1 = next(row for row in found["scores"] if row["policy"] == "v1")
    stay_s = (v1["ttft_ms"] + 60 * v1["tpot_ms"]) / 1e3
    assert found["load"]["concurrency"] == pytest.approx(10 * stay_s, rel=0.3)
    assert found["load"]["open_loop"]
    capped = quick(runs, "balanced", *QUICK[:6], "--request-rate", "10", "-c", "3", "--seeds", "1")
    assert capped["load"]["concurrency"] == 3


def test_a_rate_alone_means_poisson_arrivals_as_in_run(runs: Path) -> None:
    load = ("balanced", *QUICK[:6], "--request-rate", "10", "-c", "32", "--seeds", "1")
    assert quick(runs, *load)["scores"] == quick(runs, *load, "-s", "poisson")["scores"]


def test_longer_requests_are_dropped_when_asked(runs: Path) -> None:
    load = ("balanced", *QUICK[:6], "-c", "16", "--seeds", "1", "--max-model-len", "260")
    found = quick(runs, *load, "--drop-too-long")
    assert found["load"]["mu_l"] < 200
    (note,) = found["notes"]
    assert "of 60 requests longer than max_model_len 260 were dropped" in note
    refused = invoke("advise", *load, "--runs", str(runs))
    assert (refused.exit_code, "drop them with --drop-too-long" in refused.stderr) == (2, True)


def test_a_small_batch_still_has_two_points_to_compare() -> None:
    question = AdviceQuestion(simulated("balanced", "v1", "h200", "qwen3-8b", 4, 64, num_prompts=9), 1, Slo(), ("v1",))
    load = ExpectedLoad(mu_l=512, mu_o=256, p0=1 / 256, eta=0.0, concurrency=2048)
    assert sorted(concurrency_cells(question, load)) == [16, 32]


def test_tuning_leaves_out_batches_the_threshold_does_not_fit() -> None:
    spec = simulated("balanced", "v1", "h200", "qwen3-8b", 1024, 8192, num_prompts=9)
    question = AdviceQuestion(spec, 1, Slo(), ("v1",))
    assert {cell.server.max_num_seqs for cell in tuning_cells(question, "eb:k=600")} == {1024, 2048}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("sharegtp",), "did you mean 'sharegpt'"),
        (("balanced", "--device", "h20"), "did you mean 'h200'"),
        (("balanced", "--model", "qwen3-8"), "did you mean 'qwen3-8b'"),
        (("balanced", "-s", "poison"), "did you mean 'poisson'"),
        (("balanced", "--source", "profil"), "did you mean 'profile'"),
        (("trace:nowhere.csv",), "nowhere.csv: cannot be read: No such file"),
        (("balanced", "--max-num-batched-tokens", "512"), "512 is below --max-num-seqs 1024, which vLLM refuses"),
        (("balanced", "-p", "eb:k=2000"), "k exceeds --max-num-seqs 1024"),
        (("balanced", "--max-num-seqs", "0"), "--max-num-seqs must be at least 1"),
        (("balanced", "--input-len", "39000"), "drop them with --drop-too-long"),
        (("balanced", "--seeds", "0"), "--seeds must be at least 1"),
        (("balanced", "--goodput", "ttf:5"), "did you mean 'ttft'"),
        (("balanced", "-p", "ebb"), "did you mean 'eb'"),
    ],
)
def test_mistakes_are_answered_with_the_remedy(args: tuple[str, ...], message: str, tmp_path: Path) -> None:
    done = invoke("advise", *args, "--runs", str(tmp_path), "-q", "-n", "20", "--no-crossover", "--workers", "1")
    assert done.exit_code == 2
    assert message in " ".join((done.output, str(done.exception)))
    assert not list(tmp_path.iterdir()), "nothing has been run"


@pytest.mark.parametrize(
    ("options", "gain"),
    [
        (("--gpu-memory-utilization", "0.85"), (0.2, 0.8)),
        (("--vllm-version", "0.12"), (0.4, 0.95)),
        (("--quantization", "fp8"), (1.3, 3.0)),
        (("--kv-cache-dtype", "fp8"), (1.01, 1.9)),
        (("--tp", "2"), (1.3, 4.0)),
        (("--tp", "2", "--link", "nvlink"), (1.3, 4.0)),
    ],
)  # fmt: skip
def test_the_server_is_the_one_asked_for(runs: Path, options: tuple[str, ...], gain: tuple[float, float]) -> None:
    """Qwen3-32B on one H100, short of KV cache: what gives it less serves less, what gives it more serves more."""
    args = ["sharegpt", "--device", "h100", "--model", "qwen3-32b", "-n", "250", "--seeds", "1"]
    args += ["--max-num-batched-tokens", "8192"]
    plain, found = quick(runs, *args), quick(runs, *args, *options)
    least, most = gain
    assert least < found["scores"][0]["tokens_per_s"] / plain["scores"][0]["tokens_per_s"] < most
    implied = version_defaults(found["server"].get("vllm_version"))
    assert len(found["server"].keys() - implied.keys()) == len(options) // 2
    said = invoke("advise", *args, *options, "-p", "v1", "-p", "eb", "--no-crossover", "-q", "--runs", str(runs))
    assert f"devices show h100 --model qwen3-32b {' '.join(options)}`" in " ".join(said.output.split())


def test_a_model_of_several_gpus_is_refused_with_what_the_command_has(runs: Path) -> None:
    args = ("advise", "sharegpt", "--device", "h100", "--model", "llama-3.1-70b", "-n", "10", "--runs", str(runs))
    assert "more GPUs (--tp N;" in invoke(*args).output
    assert "give --tp too" in invoke(*args, "--link", "nvlink").output
