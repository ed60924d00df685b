"""What vLLM sets aside at its start, by version, against starts that others have printed."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest

from ebbench.config.declare import DEFAULT_VLLM
from ebbench.devices.base import EB_VLLM, SINGLE, STARTS, Parallel, start_up
from ebbench.devices.capacity import reserve_bytes, weight_bytes_per_gpu
from ebbench.devices.loader import load_device
from ebbench.devices.profiles import find_model, find_profile
from ebbench.errors import UsageError
from ebbench.papers.fidelity.cases_kv import MODELS, kv_cells, kv_gib
from ebbench.papers.fidelity.cases_kv import STARTS as TABLE
from ebbench.papers.published import rows

MODEL = find_model("qwen3-8b")


def kv(version: str, device: str = "h100", model: str = "qwen3-8b", **more: object) -> int:
    return load_device(device, model, vllm_version=version, **more).kv_capacity_tokens  # type: ignore[arg-type]


def test_starts_on_which_nothing_was_set_are_met() -> None:
    """Gemma 4 also profiles images."""
    held_out = [cell for cell in kv_cells() if not cell.fitted and cell.metric == "kv_gib"]
    assert len(held_out) == 13
    assert median(abs(cell.error) for cell in held_out) < 0.02
    assert all(abs(cell.error) < 0.045 for cell in kv_cells())
    assert all(abs(cell.error) < 0.03 for cell in held_out if cell.model not in ("gpt-oss-120b", "gemma-4-26b-a4b"))


def test_tokens_of_the_printed_memory_are_met() -> None:
    """Windows, states, latents with and without an index, drafters; the memory is printed with two digits."""
    cells = [cell for cell in kv_cells() if cell.metric == "kv_tokens"]
    assert len(cells) == 15
    assert median(abs(cell.error) for cell in cells) < 0.0005
    assert all(abs(cell.error) < 0.012 for cell in cells)
    assert sum(cell.ours == cell.published for cell in cells) >= 4


@pytest.mark.parametrize(("gpu", "version", "printed_gib"), [
    ("NVIDIA H100 SXM 80GB", "0.14.1", 64.38), ("NVIDIA H100 SXM 80GB", "0.10.1", 65.97),
    ("NVIDIA A100 SXM 80GB", "0.14.1", 65.97),
])  # fmt: skip
def test_kernels_for_mxfp4_make_experts_wider(gpu: str, version: str, printed_gib: float) -> None:
    """gpt-oss-120b: Triton's weights on Hopper since 0.12, and Marlin's (issues 33155 and 23278 of vLLM)."""
    loaded = weight_bytes_per_gpu(find_model("gpt-oss-120b"), SINGLE, gpu, start_up(version))
    assert loaded / 2**30 == pytest.approx(printed_gib, rel=0.005)


def test_what_is_not_divided_is_on_every_gpu() -> None:
    """GLM-5.1 in FP8 on eight H200: 89.39 GiB each in print, an eighth is 86.8."""
    model = find_model(str(MODELS / "glm-5.1-fp8"))
    loaded = weight_bytes_per_gpu(model, Parallel(tp=8), "NVIDIA H200 SXM", start_up("0.20"))
    assert loaded / 2**30 == pytest.approx(89.39, rel=0.01)
    assert model.weight_bytes / 8 / 2**30 < 87


def test_the_version_tells_starts_apart() -> None:
    """The same GPU and model under two versions (notes of one laboratory each)."""
    starts = {row["vllm"]: row for row in rows(TABLE) if row["model"] == "qwen3-14b"}
    assert kv_gib(starts["0.28.0"]) > kv_gib(starts["0.29.0"])
    assert kv("0.32", model="qwen3-32b") > 2 * kv("0.12", model="qwen3-32b")
    assert kv("0.10") > kv("0.12"), "FlashInfer's sampler needs less than one that sorts"


def test_a_version_is_read_by_its_release() -> None:
    assert start_up("0.25.1") is start_up("0.25") is start_up("0.28.1rc1")
    shares = [start_up(version).gpu_memory_utilization for version in ("0.12", "0.19.1", "0.20.0", DEFAULT_VLLM)]
    assert shares == [0.9, 0.9, 0.92, 0.92]
    assert [rules.since for rules in STARTS] == sorted(rules.since for rules in STARTS)
    assert start_up("0.8.5") is start_up("0.9") is STARTS[0]
    assert start_up("0.33.0") is STARTS[-1]


@pytest.mark.parametrize("version", ["0.7.3", "0.34", "1.0", "0.6.6.post1"])
def test_versions_whose_rules_are_unknown_are_refused(version: str) -> None:
    with pytest.raises(UsageError, match=r"is not known here, 0\.8 to 0\.33 are"):
        start_up(version)


@pytest.mark.parametrize("version", ["", "latest", "0", "v0.32", "0.32-cu130"])
def test_a_version_that_is_none_is_refused(version: str) -> None:
    with pytest.raises(UsageError, match=r"must be like 0\.32"):
        start_up(version)


def test_the_larger_of_step_and_sampling_counts() -> None:
    sorts = start_up("0.12")
    small = reserve_bytes(MODEL, sorts, 16, 8192)
    assert small == reserve_bytes(MODEL, sorts, 32, 8192), "few sequences: the step is larger"
    assert reserve_bytes(MODEL, sorts, 1024, 8192) > 3 * small
    assert reserve_bytes(MODEL, sorts, 1024, 512) == reserve_bytes(MODEL, sorts, 512, 512), "one token per sequence"


def test_several_gpus_divide_the_step_and_need_room_for_collectives() -> None:
    start = replace(start_up("0.12"), dense=replace(start_up("0.12").dense, logit_bytes=0.0))
    one, two, four = (reserve_bytes(MODEL, start, 256, 8192, parallel=Parallel(tp=tp)) for tp in (1, 2, 4))
    assert one - two < 0, "the collectives need more than half a step of 8,192 tokens"
    assert two > four


def test_experts_work_in_two_buffers_for_every_choice_of_a_token() -> None:
    """The hidden size is not divided, so more GPUs hardly help; ranks with shared experts compute the tokens of all."""
    model, start = (
        find_model("qwen3-30b-a3b"),
        replace(start_up("0.31"), experts=replace(start_up("0.31").experts, heads=0)),
    )

    def per_token(parallel: Parallel) -> float:
        large, small = (reserve_bytes(model, start, 1, tokens, parallel=parallel) for tokens in (16_384, 8192))
        return (large - small) / 8192 / model.dtype_bytes

    beside = 4 * model.hidden
    for tp in (1, 2, 4):
        columns = model.mixers[0].products[0].columns / tp
        assert per_token(Parallel(tp=tp)) == pytest.approx(8 * (2048 + 2048) + beside + columns)
    columns = model.mixers[0].products[0].columns
    assert per_token(Parallel(dp=4, ep=4)) == pytest.approx(4 * 8 * (2048 + 2048) + beside + columns)


def test_cuda_graphs_are_set_aside_by_versions_that_count_them() -> None:
    for version, counted in (("0.19", False), ("0.24", True), ("0.28", False), ("0.32", True)):
        start = start_up(version)
        saved = reserve_bytes(MODEL, start, 256, 2048) - reserve_bytes(MODEL, start, 256, 2048, eager=True)
        assert bool(saved) is counted
    assert kv("0.32", eager=True) > kv("0.32")


def test_mixtures_of_experts_changed_their_runner_later() -> None:
    dense, experts = (find_model(name) for name in ("qwen3-8b", "qwen3-30b-a3b"))
    assert start_up("0.26").dense != start_up("0.26").experts
    for model in (dense, experts):
        assert reserve_bytes(model, start_up("0.29"), 1024, 2048) < reserve_bytes(model, start_up("0.24"), 1024, 2048)


def test_the_share_of_the_memory_is_the_versions_unless_it_is_given() -> None:
    memory = find_profile("h100").memory_bytes
    more = (kv("0.32") - kv("0.32", gpu_memory_utilization=0.9)) * MODEL.kv_bytes_per_token
    assert more == pytest.approx(0.02 * memory, rel=0.01)


def test_the_authors_build_has_the_kv_cache_of_their_table() -> None:
    """About 448,000 tokens behind the paper's table 3 on the RTX PRO 6000, by its rates and TPOT."""
    held = kv(EB_VLLM, "rtx-pro-6000", max_num_seqs=1024, max_num_batched_tokens=14_336)
    assert held == pytest.approx(448_000, rel=0.01)
