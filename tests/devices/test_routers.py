"""Routers of mixtures in 32 bits: what they take, and where vLLM has kernels of its own for them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ebbench.devices.base import Parallel, StepShape
from ebbench.devices.families import FAMILIES
from ebbench.devices.loader import load_device
from ebbench.devices.profiles import find_model
from ebbench.devices.routers import router_s

MINIMAX = find_model("minimax-m2.5")
TOKENS = np.array([1.0, 16.0, 32.0, 33.0, 64.0, 128.0, 1024.0, 7373.0, 65536.0])
IN_16_BITS = np.full_like(TOKENS, 8e-6)


def extra_us(router_dtype: str, device: str, vllm: str) -> dict[int, float]:
    """Microseconds by tokens that a router takes more than in 16 bits."""
    time = router_s(replace(MINIMAX, router_dtype=router_dtype), device, vllm, TOKENS, IN_16_BITS)
    return dict(zip(TOKENS.astype(int).tolist(), ((time - IN_16_BITS) * 1e6).tolist(), strict=True))


def test_a_router_in_16_bits_is_an_ordinary_product() -> None:
    assert set(extra_us("bfloat16", "h200", "0.18").values()) == {0.0}


def test_a_router_in_32_bits_takes_what_was_measured_on_servers() -> None:
    """vllm-project/vllm#41332, MiniMax-M2.5 on one B200: throughput with 32, 64 and 128 open requests before and after
    the router was in 16 bits, as time per layer of 62: 23, 36 and 34 us."""
    open_requests = {32: (1795.6, 1951.9), 64: (2582.4, 2834.3), 128: (3890.5, 4156.1)}
    ours = extra_us("float32", "b200", "0.20")
    for count, (before, after) in open_requests.items():
        measured_us = count * (1 / before - 1 / after) / MINIMAX.layers * 1e6
        assert ours[count] == pytest.approx(measured_us, rel=0.35)


def test_tensor_cores_make_a_router_faster_and_arithmetic_bounds_it() -> None:
    plain, tensor_cores = extra_us("float32", "h200", "0.18"), extra_us("tf32", "h200", "0.22")
    assert all(tensor_cores[count] < plain[count] / 2 for count in plain if count >= 32)
    growth = (plain[65536] - plain[7373]) * 1e-6 / (65536 - 7373)
    assert 2 * MINIMAX.hidden * MINIMAX.experts / growth == pytest.approx(67e12 * 0.7, rel=0.01)  # H200's data sheet


@pytest.mark.parametrize(
    ("device", "vllm", "few", "many"),
    [
        ("h200", "0.22", True, True),
        ("h200", "0.32", False, True),
        ("b200", "0.24", False, True),
        ("b200", "0.26", False, False),
        ("a100", "0.32", True, True),
    ],
)
def test_later_versions_have_kernels_of_their_own(device: str, vllm: str, few: bool, many: bool) -> None:
    """``few``, ``many``: whether 32 and 33 tokens take longer than in 16 bits."""
    extra = extra_us("float32", device, vllm)
    assert (extra[32] > 0, extra[33] > 0) == (few, many)


def test_a_step_has_one_router_per_layer_with_experts() -> None:
    step = StepShape((), 128, 128 * 1000, 128)
    wide, fast = (
        load_device("h200", model, parallel=Parallel(tp=8, ep=8), vllm_version="0.21").cost.step_s(step)
        for model in ("minimax-m2.5", "minimax-m2.5-tf32")
    )
    difference = extra_us("float32", "h200", "0.21")[128] - extra_us("tf32", "h200", "0.21")[128]
    assert (wide - fast) * 1e6 == pytest.approx(62 * difference, rel=0.05)


@pytest.mark.parametrize(
    ("model_type", "wide"),
    [
        ("minimax_m2", True), ("minimax_m3", True), ("glm4_moe", True), ("ernie4_5_moe", True), ("afmoe", True),
        ("hy_v3", True), ("step3p5", True), ("mimo_v2_flash", True), ("param2moe", True),
        ("qwen3_moe", False), ("deepseek_v3", False), ("gpt_oss", False), ("mixtral", False), ("glm4_moe_lite", False),
    ],
)  # fmt: skip
def test_families_have_the_router_that_vllm_gives_them(model_type: str, wide: bool) -> None:
    """vLLM 0.32's models/*.py: ``params_dtype=torch.float32`` of the gate."""
    assert FAMILIES[model_type].wide_router is wide


@pytest.mark.parametrize(("given", "dtype"), [({}, "bfloat16"), ({"router_dtype": "fp32"}, "float32")])
def test_a_config_may_ask_for_a_router_in_32_bits(given: dict[str, str], dtype: str, tmp_path: Path) -> None:
    config = {
        "model_type": "bailing_moe_v2", "num_hidden_layers": 4, "hidden_size": 1024, "num_attention_heads": 8,
        "num_key_value_heads": 2, "intermediate_size": 2048, "vocab_size": 32000, "num_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 512, "torch_dtype": "bfloat16", **given,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert find_model(str(tmp_path / "config.json")).router_dtype == dtype
