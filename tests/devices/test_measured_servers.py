"""What servers measured by others have shown about kernels, collectives, hosts and experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median

import numpy as np
import pytest

from ebbench.config.topology import parse_topology
from ebbench.devices.base import Device, Parallel, StepShape, quantised
from ebbench.devices.layers import PADDED, Collectives, continued, nearest, scaled_times, shapes_measured, step_arrays
from ebbench.devices.library import Origin, Rows, select
from ebbench.devices.loader import load_device
from ebbench.devices.profiles import find_model, find_profile
from ebbench.devices.surfaces import library_surfaces, lower_envelope, without_spikes
from ebbench.installation import bundled_dir
from ebbench.papers.fidelity.cases_servers import measured_servers
from ebbench.papers.fidelity.runs import run_cases
from ebbench.runs.execute import Task, make
from ebbench.spec.run import simulated

KB = 1024.0


def test_a_spike_goes_and_a_hump_or_the_last_value_stays() -> None:
    times = np.array([10.0, 10.0, 21.0, 10.0, 12.0, 11.0, 20.0])
    assert without_spikes(times).tolist() == [10.0, 10.0, 10.0, 10.0, 12.0, 11.0, 20.0]


def test_the_lower_envelope_rises_and_is_nowhere_above() -> None:
    assert lower_envelope(np.array([3.0, 9.0, 4.0, 5.0]), 0).tolist() == [3.0, 4.0, 4.0, 5.0]


def test_fp8_products_on_hopper_take_longer_for_32_tokens_than_for_64() -> None:
    """Servers show it: 24.7 ms per token with 16 open requests of 70B on one H200, 33.2 with 32, 37.4 with 64."""
    model = quantised(find_model("llama-3.1-70b"), "fp8", "fp8")
    arrays = step_arrays(find_profile("h200"), model)
    assert arrays is not None
    assert arrays.dense[32] > 1.1 * arrays.dense[16]
    assert arrays.dense[32] > 1.02 * arrays.dense[64]


def test_single_calls_that_took_too_long_are_no_part_of_a_step() -> None:
    """One FP8 product of 16 tokens took twice as long as those of 8 and of 32 on B200."""
    table = select("gemm", device="b200", dtype="fp8", n=8192, k=8192).to_pydict()
    measured = dict(zip(table["tokens"], table["time_us"], strict=True))
    assert measured[16] > 2 * max(measured[8], measured[32])
    model = quantised(find_model("llama-3.1-70b"), "fp8", "fp8")
    arrays = step_arrays(find_profile("b200"), model)
    assert arrays is not None
    assert arrays.dense[16] < 1.05 * arrays.dense[32]


def test_a_prompt_that_took_too_long_makes_no_longer_ones_slow() -> None:
    """Sparse attention of GLM-5.1, 128 tokens on one of eight B200: 3.7 ms, where 64 and 256 took 2.1."""
    lengths = (1, 16, 64, 128, 256, 512, 2048)
    times_s = dict.fromkeys(lengths, 2.1e-3) | {128: 3.7e-3}
    rows = Rows(
        decode={(seqs, context): 1e-3 for seqs in (1, 4096) for context in (16, 1024)},
        prompt={(1, length): time_s for length, time_s in times_s.items()},
        # Reading 16,384 cached tokens takes 0.5 ms, of which two calls of one length, too slow by 1 ms, say nothing.
        following={
            (chunk, cached): times_s[chunk] + 0.5e-3 * cached / 16_384 + (1e-3 if chunk == 256 else 0.0)
            for chunk in (64, 128, 256, 512, 2048)
            for cached in (4096, 16_384)
        },
        module=True,
        origin=Origin(True, "a test"),
    )
    surfaces = library_surfaces(rows)
    assert surfaces.first[[128, 256, 2048]] == pytest.approx([2.1e-3] * 3)
    cached_s = 16_384 * surfaces.first_context[[64, 512, 2048]]
    assert cached_s == pytest.approx([0.5e-3] * 3, rel=0.35)
    assert cached_s[0] == pytest.approx(0.5e-3)


def test_a_slow_call_of_one_token_makes_no_batch_slow() -> None:
    """Experts of gpt-oss-120b, one token on eight H200: 8.9 us, where 8 tokens take 6.8 and 192 take 8.0."""
    points, times = np.array([1.0, 8.0, 64.0, 192.0, 512.0]), np.array([8.9, 6.8, 7.2, 8.0, 9.1])
    assert continued(points, points, times).tolist() == [6.8, 6.8, 7.2, 8.0, 9.1]


def decode_ms(device: Device, seqs: int) -> float:
    return 1e3 * device.cost.step_s(StepShape((), seqs, seqs * 512, seqs))


def test_a_decode_is_padded_to_a_cuda_graph() -> None:
    """Experts of Qwen3.6-35B-A3B on one B300 (vLLM 0.20.1): 5.3 ms with 8 sequences, 6.9 to 7.3 with 9 to 16."""
    device = load_device("h200", "qwen3-30b-a3b")
    assert decode_ms(device, 9) > 1.03 * decode_ms(device, 8)
    assert decode_ms(device, 9) == pytest.approx(decode_ms(device, 16), rel=0.01)
    assert decode_ms(device, 256) < decode_ms(device, 257) == pytest.approx(decode_ms(device, 272), rel=0.02)
    assert [tokens for tokens in range(1, 513) if PADDED[tokens] == tokens][:6] == [1, 2, 4, 8, 16, 24]


def test_a_prompt_takes_at_least_the_launches_that_no_graph_holds() -> None:
    """Qwen3.6-35B-A3B takes 16 ms for 128 tokens on two, four and eight B300 (vLLM 0.20.1)."""
    config = str(bundled_dir("reference") / "kv_cache" / "models" / "qwen3.6-35b-a3b")
    device = load_device("b300", config, parallel=Parallel(tp=8))
    short, longer = (1e3 * device.cost.step_s(StepShape(((tokens, 0),), 0, 0, 1)) for tokens in (128, 256))
    assert 2 * decode_ms(device, 1) < short == longer < 16


@pytest.mark.parametrize("device", ["b200", "gb200", "gb300"])
@pytest.mark.parametrize("model", ["glm-5.1-fp8", "deepseek-v3"])
def test_no_step_takes_longer_than_a_much_larger_one(device: str, model: str) -> None:
    """FP8 products of one token took 306 us on GB200, those of 192 tokens 19: decodes four times as long as on B200."""
    stored = bundled_dir("reference") / "kv_cache" / "models" / model
    config = str(stored) if stored.is_dir() else "tests/benchmarks/deepseek-v3.json"
    cost = load_device(device, config, parallel=Parallel(tp=8)).cost
    decodes = [cost.step_s(StepShape((), seqs, seqs * 512, seqs)) for seqs in (1, 4, 16, 64, 256)]
    prompts = [cost.step_s(StepShape(((tokens, 0),), 0, 0, 1)) for tokens in (32, 128, 512, 2048, 8192)]
    for times in (decodes, prompts):
        assert all(smaller <= 1.05 * larger for smaller, larger in pairwise(times))
    assert decodes[0] < 0.021


@pytest.mark.parametrize(
    ("model", "tp", "code"),
    [("qwen3.6-35b-a3b", 1, "delta-rule-steps"), ("glm-5.1-fp8", 8, "sparse-latent-prompts")],
)
def test_what_is_known_of_a_kind_of_layer_is_said(model: str, tp: int, code: str) -> None:
    config = str(bundled_dir("reference") / "kv_cache" / "models" / model)
    assert code in caveats_of("b300", config, "0.32", 4, tp)
    assert code not in caveats_of("b300", "qwen3-30b-a3b", "0.32", 4, tp)


@pytest.mark.parametrize(("device", "kb"), [("a100", (8, 16, 32)), ("b200", (1024, 2048))])
def test_an_outlier_of_collectives_does_not_spread_to_larger_ones(device: str, kb: Sequence[int]) -> None:
    sizes = np.array(kb, dtype=float) * KB
    table = select("collective", device=device, operation="all_reduce", mode="graph", gpus=8).to_pydict()
    measured = dict(zip(table["bytes"], table["time_us"], strict=True))
    found = Collectives(find_profile(device), "nvlink", 8).all_reduce_s(np.ones_like(sizes), sizes)  # type: ignore[arg-type]
    assert (found * 1e6).tolist() == pytest.approx([measured[int(size)] for size in sizes], rel=0.02)


@pytest.mark.parametrize(("device", "as_16_bits"), [("h100", True), ("h200", True), ("b200", False)])
def test_decodes_over_an_fp8_cache_are_no_faster_on_hopper(device: str, as_16_bits: bool) -> None:
    step = StepShape((), 64, 64 * 8192, 64)
    costs = [
        load_device(device, "llama-3.1-70b", parallel=Parallel(tp=4), kv_cache_dtype=dtype).cost.step_s(step)
        for dtype in ("fp8", "auto")
    ]
    assert (costs[0] >= costs[1]) is as_16_bits


def test_the_host_costs_more_where_several_gpus_share_a_model() -> None:
    """On one GPU an H100's host is that of an H200; 38.5 us per sequence would saturate it at half its load."""
    one, several = (load_device("h100", "llama-3.1-8b", parallel=Parallel(tp=tp)).cost for tp in (1, 4))
    other = load_device("h200", "llama-3.1-8b").cost
    assert (one.host.step_s, one.host.sequence_s) == (other.host.step_s, other.host.sequence_s)  # type: ignore[attr-defined]
    assert several.host.step_s == pytest.approx(1.16e-3)  # type: ignore[attr-defined]
    assert several.host.sequence_s == pytest.approx(38.5e-6, rel=0.01)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("device", "dtype"), [("h200", "fp8_block"), ("h100", "bfloat16"), ("b200", "fp8_block")])
def test_experts_scaled_from_the_nearest_shape_are_near_their_own(device: str, dtype: str) -> None:
    """Each measured shape from the nearest of the others: no bias, a median error of at most 12 %."""
    profile, tokens, errors = find_profile(device), np.array([1.0, 8, 32, 128, 512, 2048]), []
    shapes = shapes_measured(device, dtype, 1, 1)
    for shape in shapes:
        other = nearest(shape, [one for one in shapes if one != shape])
        bits = 16.0 if dtype == "bfloat16" else 8.0
        ours = np.interp(tokens, *scaled_times(profile, shape, bits, other, dtype, (1, 1)))
        errors += list(ours / np.interp(tokens, *scaled_times(profile, shape, bits, shape, dtype, (1, 1))) - 1.0)
    assert len(shapes) > 10
    assert median(abs(error) for error in errors) < 0.12
    assert abs(median(errors)) < 0.05


@pytest.mark.parametrize(
    ("device", "model", "start", "most"),
    [
        ("h200", "llama-3.1-70b", "tp=1, 922 in, 922 out, c=32", 0.05),
        ("h100", "llama-3.1-70b", "tp=4, 922 in, 922 out, c=16", 0.08),
        ("h200", "gpt-oss-120b", "tp=2, 922 in, 922 out, c=16", 0.12),
        ("b200", "minimax-m2.5-tf32", "tp=4, 922 in, 922 out, c=32", 0.12),
        ("b200", "minimax-m2.5", "tp=2,ep=2, 922 in, 7373 out, c=16", 0.07),
        ("h100", "llama-3.1-8b", "tp=1, 203 in, 64 out, 61.79/s", 0.10),
    ],
)
def test_the_time_per_token_of_measured_servers(device: str, model: str, start: str, most: float) -> None:
    (case,) = (c for c in measured_servers() if (c.device, c.model) == (device, model) and c.name.startswith(start))
    (cell,) = (c for c in run_cases([case], 0, lambda _: None) if c.metric == "tpot_mean_ms")
    assert abs(cell.error) < most


@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen3-32b", "qwen3-30b-a3b"])
def test_runs_on_rtx_pro_6000_stay_as_near_as_they_were(model: str) -> None:
    """One GPU, tp = 2 and expert parallelism: TPOT within 4 %, TTFT within 13 %, nothing fitted."""
    (case,) = (c for c in measured_servers() if (c.device, c.model) == ("rtx-pro-6000", model))
    errors = {cell.metric: abs(cell.error) for cell in run_cases([case], 0, lambda _: None)}
    assert errors["tpot_mean_ms"] < 0.04
    assert errors["ttft_mean_s"] < 0.13  # 8.9 % too long before routers took time, then 11.8, padded 12.5
    assert errors["output_tokens_per_s"] < 0.04


@pytest.mark.parametrize(
    ("device", "model", "start", "most"),
    [
        ("h200", "llama-3.1-70b", "tp=4, 922 in, 922 out, c=16", 0.05),
        ("b200", "gpt-oss-120b", "tp=1, 922 in, 922 out, c=16", 0.20),
        ("b200", "minimax-m2.5-tf32", "tp=4, 922 in, 922 out, c=32", 0.10),
        ("h200", "minimax-m2.5", "tp=8,ep=8, 7373 in, 922 out, c=8", 0.05),
        ("h100", "llama-3.1-8b", "tp=1, 203 in, 64 out, 61.79/s", 0.25),
    ],
)
def test_the_time_to_first_token_of_measured_servers(device: str, model: str, start: str, most: float) -> None:
    (case,) = (c for c in measured_servers() if (c.device, c.model) == (device, model) and c.name.startswith(start))
    (cell,) = (c for c in run_cases([case], 0, lambda _: None) if c.metric == "ttft_mean_s")
    assert abs(cell.error) < most


@pytest.mark.parametrize(("version", "said"), [("0.11", True), ("0.18.2", True), ("0.22", False), (None, False)])
def test_what_a_version_does_not_set_is_said(version: str | None, said: bool) -> None:
    warnings = map(str, load_device("h100", "qwen3-8b", vllm_version=version).warnings)
    assert any("not its kernels, CUDA graphs and host" in text for text in warnings) is said


@pytest.mark.parametrize(("device", "said"), [("b200", True), ("h200", False)])
def test_gpt_oss_on_blackwell_says_its_activations(device: str, said: bool) -> None:
    warnings = map(str, load_device(device, "gpt-oss-120b").warnings)
    assert any("activations in MXFP8" in text for text in warnings) is said


def caveats_of(
    device: str, model: str, version: str, open_requests: int, tp: int = 1, prompt: int = 512, seqs: int = 8
) -> set[str]:
    """Codes of the caveats of a closed loop's run."""
    run = simulated(
        "balanced", "v1", device, model, seqs, 8192, topology=parse_topology(f"tp={tp}"),
        num_prompts=2 * open_requests, max_concurrency=open_requests, input_len=prompt, output_len=64,
        length_distribution="fixed",
    ).changed(vllm_version=version, front_end_ms=None)  # fmt: skip
    return {told["code"] for told in make(Task(run)).figures["warnings"]}


def test_each_run_of_a_process_says_what_its_own_version_is() -> None:
    for version in ("0.22", "0.18", "0.22"):
        assert ("older-vllm" in caveats_of("h200", "qwen3-8b", version, 4, 2)) is (version == "0.18")


@pytest.mark.parametrize(
    ("version", "open_requests", "said"), [("0.11", 64, True), ("0.11", 4, False), ("0.19", 64, False)]
)
def test_a_queue_before_an_older_server_is_said(version: str, open_requests: int, said: bool) -> None:
    assert ("older-vllm-queue" in caveats_of("h100", "qwen3-8b", version, open_requests, prompt=6000)) is said


@pytest.mark.parametrize(("prompt", "said"), [(128, True), (512, False)])
def test_a_queue_of_short_prompts_before_an_older_server_is_said(prompt: int, said: bool) -> None:
    codes = caveats_of("h100", "qwen3-8b", "0.11", 200, prompt=prompt)
    assert "older-vllm-queue" in codes
    assert ("older-vllm-short-prompts" in codes) is said


@pytest.mark.parametrize(("rate", "said"), [(2.0, False), (30.0, True)])
def test_an_open_loop_that_fills_all_seats_is_near_capacity(rate: float, said: bool) -> None:
    run = simulated(
        "balanced", "v1", "h200", "qwen3-8b", 8, 8192, scenario="poisson", request_rate=rate, num_prompts=40,
        input_len=256, output_len=64, length_distribution="fixed",
    )  # fmt: skip
    assert ("near-capacity" in {told["code"] for told in make(Task(run)).figures["warnings"]}) is said


@pytest.mark.parametrize(("blocks", "said"), [(1000, False), (200, True)])
def test_a_closed_loop_that_fills_the_kv_cache_is_near_capacity(blocks: int, said: bool) -> None:
    run = simulated(
        "balanced", "v1", "h200", "qwen3-8b", 8, 8192, num_prompts=16, max_concurrency=8, input_len=256, output_len=64,
        length_distribution="fixed",
    ).changed(num_kv_blocks=blocks)  # fmt: skip
    assert ("near-capacity" in {told["code"] for told in make(Task(run)).figures["warnings"]}) is said


@pytest.mark.parametrize(("tp", "said"), [(1, False), (4, True)])
def test_few_sequences_of_a_mixture_matter_on_four_gpus(tp: int, said: bool) -> None:
    assert ("experts-few-sequences" in caveats_of("h200", "gpt-oss-120b", "0.22", 2, tp)) is said


@pytest.mark.parametrize(("tp", "open_requests", "said"), [(8, 16, True), (8, 4, False), (4, 16, False), (4, 32, True)])
def test_a_jump_of_the_measured_all_reduce_is_said(tp: int, open_requests: int, said: bool) -> None:
    """Of 128 KB and more among eight B200, of 256 and more among four; 16 KB per sequence."""
    assert ("fused-all-reduce" in caveats_of("b200", "llama-3.1-70b", "0.22", open_requests, tp, seqs=64)) is said


@pytest.mark.parametrize(
    ("device", "open_requests", "said"), [("h200", 32, True), ("h200", 4, False), ("b200", 32, False)]
)
def test_experts_in_blocks_are_said_to_be_too_slow_with_many_sequences(
    device: str, open_requests: int, said: bool
) -> None:
    assert ("experts-in-blocks" in caveats_of(device, "minimax-m2.5", "0.22", open_requests, 4, seqs=64)) is said


def test_experts_of_older_versions_are_said_on_blackwell() -> None:
    assert "older-vllm-experts" in caveats_of("b200", "gpt-oss-120b", "0.13", 4)
    assert "older-vllm-experts" not in caveats_of("b200", "gpt-oss-120b", "0.22", 4)
    assert "older-vllm-experts" not in caveats_of("h200", "gpt-oss-120b", "0.13", 4)


def test_servers_of_h100_had_the_kv_cache_that_their_waiting_shows() -> None:
    """InferenceX, 70B on two H100: 32 requests of 7,373 tokens waited 6.5 s on average, so not all fitted at once."""
    cases = [c for c in measured_servers() if (c.device, c.model) == ("h100", "llama-3.1-70b")]
    (case,) = (c for c in cases if c.name == "tp=2, 7373 in, 922 out, c=32")
    cells = {cell.metric: cell for cell in run_cases([case], 0, lambda _: None)}
    assert cells["ttft_mean_s"].ours > 2.0
    assert abs(cells["tpot_mean_ms"].error) < 0.15


@pytest.mark.parametrize(("prompt", "said"), [(64, True), (12_000, False)])
def test_a_front_end_that_decides_the_first_token_is_said(prompt: int, said: bool) -> None:
    assert ("front-end-decides" in caveats_of("h100", "llama-3.1-8b", "0.22", 1, prompt=prompt)) is said


def test_a_request_that_waits_for_a_connection_has_not_been_sent() -> None:
    """Clients count from the send: with 8 connections and free seats none waits, however many requests are due."""
    case = next(case for case in measured_servers() if "254.49/s" in case.name)
    plan = {**case.protocol.plan, "max_concurrency": 8, "num_prompts": 300}
    cells = run_cases([replace(case, protocol=replace(case.protocol, plan=plan))], 0, lambda _: None)
    (ttft,) = (cell for cell in cells if cell.metric == "ttft_mean_s")
    assert ttft.scored
    assert ttft.ours < 0.04
