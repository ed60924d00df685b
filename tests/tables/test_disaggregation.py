"""Tables 19 and 20 are run as the authors' scripts say."""

from __future__ import annotations

import pytest

from ebbench.papers.eb.disaggregation import FOUR, MIXES, TWO, PolicyOnTopology, four_gpus, replicas, two_gpus
from ebbench.papers.protocols import EBPLUS_MARGIN_S_PER_TOKEN, ebplus_as_run, protocol_cells
from ebbench.runs.execute import Task, make
from ebbench.runs.prepare import plan_of
from vllm_eb.policies.ebplus import EbPlus
from vllm_eb.policy import parse_policy

MEANS = {"prefill-heavy": (1024, 128), "balanced": (512, 512), "decode-heavy": (128, 1024)}


@pytest.mark.parametrize("mix", MIXES)
def test_prompts_have_one_length_and_outputs_vary_by_a_quarter(mix: str) -> None:
    prompt, output = MEANS[mix]
    (cell,) = protocol_cells(four_gpus(FOUR["v1_dp4"], "h200", mix, 128), "h200", "qwen3-8b")
    requests = plan_of(cell).table
    assert len(requests) == 2000
    assert set(requests["input_tokens"].to_pylist()) == {prompt}
    lengths = requests["output_tokens"].to_pylist()
    assert 0.75 * output <= min(lengths) < 0.77 * output
    assert 1.23 * output < max(lengths) <= 1.25 * output


@pytest.mark.parametrize(("concurrency", "requests"), [(64, 1000), (512, 1000), (2048, 4000)])
def test_two_gpus_serve_as_many_requests_as_the_script(concurrency: int, requests: int) -> None:
    assert two_gpus(TWO["v1_dp2"], "h200", concurrency).plan["num_prompts"] == requests


def test_disaggregated_servers_have_the_defaults_of_vllm() -> None:
    ranks, pools = (four_gpus(FOUR[name], "h200", "balanced", 128) for name in ("v1_dp4", "2p2d"))
    assert (ranks.max_num_batched_tokens, ranks.max_num_seqs, ranks.warmup) == (8192, 1024, 0)
    assert (pools.max_num_batched_tokens, pools.max_num_seqs) == (40_960, 1024)
    assert pools.topology is not None
    assert [pool.gpu_memory_utilization for pool in pools.topology.pools] == [0.8, 0.8]
    assert {pools.dispatch, pools.decode_dispatch, ranks.dispatch} == {"round-robin"}
    assert ranks.decode_dispatch is None


@pytest.mark.parametrize("device", ["h200", "rtx-pro-6000"])
@pytest.mark.parametrize("setting", [TWO["ebplus_dp2"], FOUR["ebplus_dp4"]])
def test_ebplus_has_the_threshold_and_margin_of_the_published_runs(setting: PolicyOnTopology, device: str) -> None:
    run = two_gpus(setting, device, 64) if setting in TWO.values() else four_gpus(setting, device, "balanced", 128)
    policy = parse_policy(run.policy)
    assert isinstance(policy, EbPlus)
    assert (policy.theta_min, policy.initial_theta, policy.memory_safe) == (0.8, 0.8, False)
    assert policy.crossover_theta == "used"
    assert policy.margin == EBPLUS_MARGIN_S_PER_TOKEN.get(device)
    assert parse_policy(ebplus_as_run(device)) == parse_policy(ebplus_as_run(device, theta_min=0.01))


@pytest.mark.parametrize("mix", ["prefill-heavy", "balanced"])
def test_marginal_in_lockstep_is_faster_than_v1_on_equal_prompts(mix: str) -> None:
    """Prompts of 512 and 1,024 tokens end with its steps of 1,024, so that none is half computed between them."""
    rates = []
    for policy in ("v1", "marginal"):
        protocol = four_gpus(replicas(policy, 4, policy), "h200", mix, 256)
        figures = make(Task(protocol_cells(protocol, "h200", "qwen3-8b", 600)[0], None)).figures
        rates.append(figures["total_token_throughput"])
    assert rates[1] > rates[0]
