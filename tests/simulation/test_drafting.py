"""Speculative decoding in the simulator: what is said of a setting, what is drawn, and what a run then shows."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ebbench.spec.server
from ebbench.devices.base import Device, Parallel
from ebbench.devices.costs import decode_shape
from ebbench.devices.loader import load_device
from ebbench.engines.sim import SimEngine
from ebbench.errors import UsageError
from ebbench.foreign.documents import read_toml
from ebbench.records.plan import Plan
from ebbench.simulation.drafting import accepted_drafts
from ebbench.simulation.state import RequestState
from ebbench.spec.server import EngineOptions, Speculative, parse_speculative, published_acceptance
from ebbench.workloads import build_plan
from vllm_eb.policy import PolicyError, parse_policy
from vllm_eb.theory import Drafts, crossover, optimal_threshold

DEVICE = load_device("h200", "qwen3-8b")
QWEN = str(Path(__file__).parents[1] / "benchmarks" / "qwen3.5-397b-a17b.json")


@pytest.fixture(scope="module")
def plan() -> Plan:
    return build_plan("balanced", num_prompts=150, max_concurrency=48, input_len=200, output_len=120)


def options(speculative: str | None = None, **settings: object) -> EngineOptions:
    return EngineOptions(max_num_seqs=48, speculative=speculative, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("method=eagle3,tokens=2,acceptance=1.2,0.5", "position 1 must lie in"),
        ("method=eagle3,tokens=2,acceptance=0.5,-0.1", "position 2 must lie in"),
        ("method=eagle3,tokens=2,acceptance=nan", "position 1 must lie in"),
        ("method=eagle3,tokens=2,acceptance=0.8,0.6,0.4", "3 rates for 2 drafted tokens"),
        ("method=eagle3,tokens=2,acceptance=0.5,0.6", "cannot rise"),
        ("method=eagel3,tokens=2,acceptance=0.5", "eagle3"),
        ("method=medusa,tokens=2,acceptance=0.5", "not simulated"),
        ("method=extract_hidden_states,tokens=1,acceptance=0.5", "not simulated"),
        ("method=deepseek_mtp,tokens=1,acceptance=0.5", "not simulated; use mtp"),
        ("method=eagle3,acceptance=\u0660.\u0668", "rates in"),
        ("method=eagle3,acceptance=1_0e-1", "rates in"),
        ("tokens=2,acceptance=0.5", "name the method"),
        ("method=eagle3,tokens=2", "acceptance"),
        ("method=eagle3,tokens=0,acceptance=0.5", "from 1 to"),
        ("method=eagle3,tokens=2,tokens=3,acceptance=0.5", "twice"),
        ("method=eagle3,token=2,acceptance=0.5", "tokens"),
        ("method=eagle3,tokens=2,acceptance=high", "rates in"),
        ("method=eagle3,tokens=2,acceptance=high", "minimax-m3-eagle3"),
        ("method=eagle3,tokens=2,acceptance=/nowhere/rates.json", "/nowhere/rates.json"),
        ("3", "name=value"),
        ("method=eagle3,acceptance=0.5\n0.4", "0.5\\n0.4"),
        ("method=eagle3,tokens=2\n,acceptance=0.5\n0.4", "0.5\\n0.4"),
        ("tokens=\n2\n3", "name the method"),
    ],
)
def test_a_setting_that_cannot_be_is_one_line(text: str, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        options(text)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "rates"),
    [
        ("method=eagle3,tokens=3,acceptance=0.8", (0.8, 0.64, 0.512)),
        ("method=eagle3,tokens=3,acceptance=0.8,0.4", (0.8, 0.4, 0.2)),
        ("method=eagle3,acceptance=0.9,0.5", (0.9, 0.5)),
        ("method=eagle3,tokens=2,acceptance=0", (0.0, 0.0)),
        ("method=mtp,tokens=2,acceptance=deepseek-v3-mtp", (0.85, 0.7225)),
        ("method=eagle3,tokens=2,acceptance=minimax-m3-eagle3", (0.78, 0.6)),
    ],
)
def test_rates_that_are_left_out_continue_the_last_one(text: str, rates: tuple[float, ...]) -> None:
    assert parse_speculative(text).acceptance == pytest.approx(rates)


def test_published_acceptance_has_its_source() -> None:
    """All rates are readable, and each name says where they come from."""
    found = read_toml(Path(ebbench.spec.server.__file__).with_name("acceptance.toml"))
    assert set(found) == set(published_acceptance())
    for name, about in found.items():
        assert parse_speculative(f"method=eagle3,acceptance={name}").acceptance == tuple(about["rates"])
        assert about["source"]
        assert about["about"]


def test_a_model_without_mtp_layers_names_the_methods_that_it_has() -> None:
    with pytest.raises(UsageError, match="no layers for multi-token prediction"):
        load_device("h200", "qwen3-8b", speculative=parse_speculative("method=mtp,tokens=1,acceptance=0.8"))


def test_the_shares_of_accepted_drafts_are_the_rates(plan: Plan) -> None:
    speculative = parse_speculative("method=eagle3,tokens=3,acceptance=0.8,0.5,0.1")
    accepted = accepted_drafts(speculative, RequestState(plan), seed=0)
    shares = [float(np.mean(accepted > position)) for position in range(3)]
    assert shares == pytest.approx([0.8, 0.5, 0.1], abs=0.01)


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("policy", ["v1", "v0", "eb", "marginal"])
def test_every_answer_gets_its_tokens_whatever_is_accepted(plan: Plan, policy: str, asynchronous: bool) -> None:
    settings = options(
        "method=eagle3,tokens=3,acceptance=0.8,0.6,0.4", async_scheduling=asynchronous, num_kv_blocks=500
    )
    result = SimEngine().run(plan, parse_policy(policy), DEVICE, settings)
    requests = result.requests
    assert requests["output_tokens"].to_pylist() == plan.table["output_tokens"].to_pylist()
    for row in requests.select(["first_token_ns", "itl_ns", "last_token_ns"]).to_pylist():
        assert row["first_token_ns"] + sum(row["itl_ns"]) == row["last_token_ns"]
    counts = result.facts["speculative"]
    assert 1 + sum(counts["accepted"]) / counts["steps"] == pytest.approx(2.8, abs=0.1)


def test_all_accepted_takes_one_step_for_all_tokens_of_it(plan: Plan) -> None:
    alone = replace(plan, table=plan.table.slice(0, 1))
    result = SimEngine().run(alone, parse_policy("v1"), DEVICE, options("method=eagle3,tokens=3,acceptance=1"))
    steps = result.steps.filter(np.array(result.steps["decode_seqs"]) > 0)
    outputs = alone.table["output_tokens"][0].as_py()
    in_vain = 1  # asynchronous scheduling: a further step before the end is known
    assert -(-(outputs - 1) // 4) <= steps.num_rows <= -(-(outputs - 1) // 4) + in_vain


def test_drafts_of_which_none_is_accepted_only_take_time(plan: Plan) -> None:
    plain = SimEngine().run(plan, parse_policy("v1"), DEVICE, options())
    device = load_device("h200", "qwen3-8b", speculative=parse_speculative("method=eagle3,tokens=3,acceptance=0"))
    drafted = SimEngine().run(plan, parse_policy("v1"), device, options("method=eagle3,tokens=3,acceptance=0"))
    assert drafted.requests["end_ns"].to_numpy().max() > plain.requests["end_ns"].to_numpy().max()


def test_n_grams_are_scheduled_one_step_at_a_time() -> None:
    assert not options("method=ngram,tokens=2,acceptance=0.4").async_scheduling
    assert options("method=eagle3,tokens=2,acceptance=0.4").async_scheduling


def test_a_step_with_drafts_costs_less_than_a_step_per_token() -> None:
    drafting = load_device("h200", "qwen3-8b", speculative=parse_speculative("method=eagle3,tokens=3,acceptance=0.5"))
    for seqs in (1, 64, 256):
        plain_s = DEVICE.cost.step_s(decode_shape(seqs, 512))
        assert plain_s < drafting.cost.step_s(decode_shape(seqs, 512, drafts=3)) < 4 * plain_s


def drafted_on() -> list[Any]:
    """Drafted tokens, their acceptance, a device: of each two all pairs in `make test`, the rest in `make nightly`."""
    often = [(1, 0.3, "h200"), (1, 0.9, "rtx-pro-6000"), (3, 0.3, "rtx-pro-6000"), (3, 0.9, "h200"),
             (7, 0.3, "h200"), (7, 0.9, "rtx-pro-6000")]  # fmt: skip
    every = itertools.product((1, 3, 7), (0.3, 0.9), ("h200", "rtx-pro-6000"))
    return [pytest.param(*one, marks=[] if one in often else pytest.mark.nightly) for one in every]


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "rate", "gpu"), drafted_on())
def test_the_threshold_of_the_theory_is_within_two_per_cent_of_the_best(gpu: str, tokens: int, rate: float) -> None:
    speculative = parse_speculative(f"method=eagle3,tokens={tokens},acceptance={rate}")
    assert_theory_is_best(load_device(gpu, "qwen3-8b", speculative=speculative), speculative)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 3, 5])
def test_the_threshold_is_within_two_per_cent_where_layers_keep_states(tokens: int) -> None:
    """Qwen3.5 with its MTP layer on eight H200; rooflines stand for its recurrent layers."""
    rates = ",".join(map(str, published_acceptance()["qwen3.5-397b-a17b-mtp"][:tokens]))
    speculative = parse_speculative(f"method=mtp,acceptance={rates}")
    device = load_device("h200", QWEN, parallel=Parallel(tp=8), speculative=speculative, assume_kernels=True)
    assert_theory_is_best(device, speculative)


def assert_theory_is_best(device: Device, speculative: Speculative) -> None:
    """No fixed threshold serves 2 % more requests/s than that of the theory."""
    load = build_plan(
        "balanced",
        num_prompts=1200,
        max_concurrency=384,
        input_len=128,
        output_len=256,
        length_distribution="geometric",
    )
    settings = EngineOptions(max_num_seqs=192, speculative=speculative.text)
    mean = float(np.mean(load.table["output_tokens"]))
    costs = device.calibration
    theta = optimal_threshold(1 / mean, costs.alpha_p, costs.alpha_d, drafts=Drafts(speculative.acceptance)).theta0

    def requests_per_s(theta: float) -> float:
        """While requests are waiting."""
        result = SimEngine(figures_only=True).run(load, parse_policy(f"eb:theta={theta:.4f}"), device, settings)
        ends_ns = np.sort(result.requests["end_ns"].to_numpy())
        first, last = int(0.15 * len(ends_ns)), int(0.7 * len(ends_ns))
        return float((last - first) / (ends_ns[last] - ends_ns[first]) * 1e9)

    best = max(map(requests_per_s, (0.03, 0.06, 0.09, 0.13, 0.2, 0.35)))
    assert requests_per_s(theta) >= 0.98 * best


# What the policies estimate, against lengths and an acceptance that are known. Estimators count tokens, of which a step
# has several.


@pytest.fixture(scope="module")
def memoryless() -> Plan:
    """Answers of 80 tokens on average that end with the same probability after each token."""
    return build_plan(
        "balanced", num_prompts=6000, max_concurrency=256, input_len=100, output_len=80, length_distribution="geometric"
    )


def decided(plan: Plan, policy: str, speculative: str | None, kind: str) -> dict[str, list[float]]:
    """Values of the decisions of that kind while the batch is full: without the first five, and the drain."""
    drafts = None if speculative is None else parse_speculative(speculative)
    device = load_device("h200", "qwen3-8b", speculative=drafts)
    settings = EngineOptions(max_num_seqs=128, speculative=speculative)
    found = SimEngine().run(plan, parse_policy(policy), device, settings).decisions
    rows = [row for row in found.to_pylist() if row["kind"] == kind][5:50]
    return {name: [row[name] for row in rows] for name in rows[0]}


@pytest.mark.slow
@pytest.mark.parametrize("rates", [(0.3,), (0.9, 0.8, 0.7), (1.0,) * 5])
@pytest.mark.parametrize("policy", ["eb", "eb:estimator=censored", "ebplus"])
def test_the_hazard_and_the_lengths_are_per_token(memoryless: Plan, policy: str, rates: tuple[float, ...]) -> None:
    text = f"method=eagle3,acceptance={','.join(map(str, rates))}"
    found = decided(memoryless, policy, text, "update")
    mean = float(np.mean(memoryless.table["output_tokens"]))
    assert np.mean(found["p0"]) * mean == pytest.approx(1.0, abs=0.03)
    assert np.mean(found["mu_o"]) == pytest.approx(mean, rel=0.05)
    costs = load_device("h200", "qwen3-8b", speculative=parse_speculative(text)).calibration
    best = optimal_threshold(1 / mean, costs.alpha_p, costs.alpha_d, drafts=Drafts(rates))
    assert np.mean(found["theta0"]) == pytest.approx(best.theta0, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("rates", [(0.3,), (0.9, 0.8, 0.7)])
def test_both_sides_of_the_crossover_are_those_of_the_known_lengths(memoryless: Plan, rates: tuple[float, ...]) -> None:
    text = f"method=eagle3,acceptance={','.join(map(str, rates))}"
    found = decided(memoryless, "ebplus", text, "mode")
    costs = load_device("h200", "qwen3-8b", speculative=parse_speculative(text)).calibration
    mu_l, mu_o = (float(np.mean(memoryless.table[name])) for name in ("input_tokens", "output_tokens"))
    sides = [
        crossover(costs, mu_l=mu_l, mu_o=mu_o, n_obs=n_obs, theta0=theta0, drafts=Drafts(rates))
        for n_obs, theta0 in zip(found["n_obs"], found["theta0"], strict=True)
    ]
    scale = float(np.mean([abs(each.lhs) + abs(each.rhs) for each in sides]))
    assert np.mean(found["r"]) == pytest.approx(np.mean([each.r for each in sides]), rel=0.03)
    for name in ("lhs", "rhs"):
        assert np.mean(found[name]) == pytest.approx(np.mean([getattr(each, name) for each in sides]), abs=0.05 * scale)


@pytest.mark.slow
def test_drafts_change_nothing_of_an_estimated_length_distribution() -> None:
    """Answers that end the more probably the longer they are: the estimates are those of a server without drafts."""
    plan = build_plan("sharegpt", num_prompts=2000, max_concurrency=256, source="profile", with_text=False)
    text = "method=eagle3,acceptance=0.8,0.6,0.4"
    plain, drafted = (decided(plan, "eb:estimator=censored", given, "update") for given in (None, text))
    for name in ("p0", "mu_o"):
        assert np.mean(drafted[name]) == pytest.approx(np.mean(plain[name]), rel=0.05)


@pytest.mark.parametrize(
    ("speculative", "said"), [(None, "the server drafts no tokens"), ("method=ngram,acceptance=0.5", None)]
)
def test_draft_lengths_that_adapt_need_drafts(plan: Plan, speculative: str | None, said: str | None) -> None:
    device = load_device(
        "h200", "qwen3-8b", speculative=None if speculative is None else parse_speculative(speculative)
    )
    policy, settings = parse_policy("marginal:draft=adaptive"), options(speculative)
    if said is None:
        assert SimEngine().run(plan, policy, device, settings).facts["speculative"]["steps"]
        return
    with pytest.raises(PolicyError, match=said):
        SimEngine().run(plan, policy, device, settings)


def test_fewer_tokens_are_drafted_in_a_larger_batch() -> None:
    """All of them in a small batch, fewer in a full one, and more throughput than with all or none."""
    text = "method=eagle3,tokens=5,acceptance=qwen3-30b-a3b-eagle3"
    drafting = load_device("h200", "qwen3-8b", speculative=parse_speculative(text))

    def run(seqs: int, policy: str, device: Device, speculative: str | None) -> tuple[float, list[int]]:
        load = build_plan("balanced", num_prompts=12 * seqs + 300, max_concurrency=seqs, input_len=64, output_len=64)
        settings = EngineOptions(max_num_seqs=seqs, speculative=speculative)
        result = SimEngine(figures_only=True).run(load, parse_policy(policy), device, settings)
        drafted = result.facts.get("speculative", {}).get("drafted", [0])
        return float(result.requests["end_ns"].to_numpy().max()), drafted

    few_ns, few = run(2, "marginal:draft=adaptive", drafting, text)
    full_ns, full = run(128, "marginal:draft=adaptive", drafting, text)
    assert few[-1] / few[0] > full[-1] / full[0]
    assert full_ns < run(128, "marginal", drafting, text)[0]
    assert few_ns < run(2, "marginal", DEVICE, None)[0]
