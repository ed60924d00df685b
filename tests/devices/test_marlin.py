"""Experts in MXFP4 by Marlin's kernels: gpt-oss's if asked for, before vLLM 0.12 always; other models' on Hopper."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from ebbench.cli.main import app
from ebbench.devices import library
from ebbench.devices.base import Parallel, StepShape, start_up
from ebbench.devices.capacity import weight_bytes_per_gpu
from ebbench.devices.layers import MARLIN_INT4, MARLIN_MXFP4, MXFP4, expert_times, marlin_times
from ebbench.devices.library import Shape, select
from ebbench.devices.loader import load_device
from ebbench.devices.profiles import find_model, find_profile
from ebbench.devices.surfaces import Array
from ebbench.engines.vllm_command import Emulation, Serving, parse_types, serve_arguments
from ebbench.errors import UsageError
from ebbench.spec.server import EngineOptions
from tests.devices.test_model_families import LLAMA, write
from vllm_eb.policy import parse_policy

pytest.importorskip("aiconfigurator_core")

GPT_OSS = Shape(2880, 2880, 128, 4)
PROMPTS, DECODES = StepShape(((8192, 0),), 0, 0, 1), StepShape((), 32, 32 * 1024, 32)
MIXTURE = {
    **LLAMA, "model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8, "hidden_size": 4096,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "moe_intermediate_size": 1536,
}  # fmt: skip
QUARK = {"quantization_config": {"quant_method": "mxfp4"}}


def times_s(device: str, tp: int, *, marlin: bool) -> tuple[Array, Array]:
    return expert_times(find_profile(device), find_model("gpt-oss-120b"), Parallel(tp=tp), marlin=marlin)[0]


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("device", ["h100", "h200"])
def test_prompts_are_slower_than_with_triton_and_decodes_as_fast(device: str, tp: int) -> None:
    tokens = np.array([16.0, 32, 64, 8192, 16384])
    ratio = np.interp(tokens, *times_s(device, tp, marlin=True)) / np.interp(tokens, *times_s(device, tp, marlin=False))
    assert ratio[:3] == pytest.approx(1.0, abs=0.25)
    assert (ratio[3:] > 1.8).all()


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_another_way_gives_the_same_times(tp: int) -> None:
    """gpt-oss's experts were measured with Marlin's kernels on the RTX PRO 6000, Kimi K2's there and on H200: with as
    many tokens per expert both are as much faster on H200."""
    h200, blackwell = find_profile("h200"), find_profile("rtx-pro-6000")
    here = marlin_times(h200, GPT_OSS, tp, 1)
    assert here is not None
    rows = select(
        "moe", device="rtx-pro-6000", dtype=MXFP4, hidden=2880, expert_intermediate=2880, experts=128,
        experts_per_token=4, tp=tp, ep=1,
    ).to_pydict()  # fmt: skip
    order = np.argsort(rows["tokens"])
    there_s = np.array(rows["time_us"])[order] * 1e-6
    tokens = np.array([2048.0, 4096, 8192, 16384])
    as_many = tokens * (GPT_OSS.per_token / GPT_OSS.experts) / (MARLIN_INT4.per_token / MARLIN_INT4.experts)
    kimi = [library.experts(gpu, MARLIN_INT4, "int4", tp, 1, derived=False) for gpu in (h200, blackwell)]
    assert kimi[0] is not None
    assert kimi[1] is not None
    faster = np.interp(as_many, *kimi[0][:2]) / np.interp(as_many, *kimi[1][:2])
    other_way = np.interp(tokens, np.array(rows["tokens"], float)[order], there_s) * faster
    assert np.interp(tokens, here.points, here.times) == pytest.approx(other_way, rel=0.1)


def test_experts_of_the_measured_shape_take_what_was_measured() -> None:
    h200 = find_profile("h200")
    scaled, measured = (
        marlin_times(h200, MARLIN_MXFP4, 8, 1),
        library.experts(h200, MARLIN_MXFP4, MXFP4, 8, 1, derived=False),
    )
    assert scaled is not None
    assert measured is not None
    assert scaled.times == pytest.approx(measured.times, rel=0.1)


def test_before_0_12_gpt_oss_has_them_on_hopper() -> None:
    def step_s(device: str, version: str, shape: StepShape) -> float:
        return load_device(device, "gpt-oss-120b", vllm_version=version, parallel=Parallel(tp=2)).cost.step_s(shape)

    assert step_s("h100", "0.11", PROMPTS) > 1.3 * step_s("h100", "0.12", PROMPTS)
    assert step_s("h100", "0.11", DECODES) == pytest.approx(step_s("h100", "0.12", DECODES), rel=0.1)
    for device in ("rtx-pro-6000", "b200"):  # Marlin's in both, and in neither
        assert step_s(device, "0.11", PROMPTS) == step_s(device, "0.12", PROMPTS)


def test_other_models_have_them_on_hopper_in_any_case(tmp_path: Path) -> None:
    config = str(write(tmp_path, MIXTURE | QUARK))
    auto, asked = (load_device("h200", config, moe_backend=backend) for backend in ("auto", "marlin"))
    assert auto.cost.step_s(PROMPTS) == asked.cost.step_s(PROMPTS)
    told = [str(text) for text in auto.warnings if "Marlin" in str(text)]
    assert len(told) == 1
    assert "8 of 128 experts of 4096 x 1536, Marlin's kernels) were not measured on h200: those of 16 of 896" in told[0]


def test_their_weights_are_padded_as_marlin_wants_them(tmp_path: Path) -> None:
    """192 columns of each of eight GPUs become 256; Triton's, gpt-oss's on Hopper, would stay."""
    model = find_model(str(write(tmp_path, MIXTURE | QUARK)))
    hopper, other = (
        weight_bytes_per_gpu(model, Parallel(tp=8), gpu, start_up()) for gpu in ("NVIDIA H200", "NVIDIA L40S")
    )
    assert hopper == other > model.experts_bytes / 8 * 256 / 192


@pytest.mark.usefixtures("without_library")
def test_without_the_library_the_run_says_what_is_too_fast() -> None:
    said = [str(text) for text in load_device("h200", "gpt-oss-120b", moe_backend="marlin").warnings]
    assert any("computed by Marlin's kernels on h200" in text and "up to 2 times faster" in text for text in said)
    assert any("pip install 'ebbench[tables]'" in text for text in said)
    assert not any("Marlin" in str(text) for text in load_device("h200", "gpt-oss-120b").warnings)


@pytest.mark.parametrize(
    ("model", "reason"),
    [("qwen3-8b", "qwen3-8b has no experts"), ("qwen3-30b-a3b", "qwen3-30b-a3b has experts in bfloat16")],
)
def test_experts_that_it_is_not_for_are_refused(model: str, reason: str) -> None:
    with pytest.raises(UsageError, match=rf"is for experts in MXFP4 or INT4: {reason}; leave it out$"):
        load_device("h200", model, moe_backend="marlin")


def test_a_plan_says_the_kernels_and_refuses_models_without_them() -> None:
    def plan(model: str) -> Result:
        words = ["plan", "balanced", "--input-len", "32", "--output-len", "8", "--model", model, "--device", "h200"]
        words += ["--instance", "tp=1", "--policy", "v1", "--goodput", "ttft:9000", "--request-rate", "1"]
        return CliRunner().invoke(app, [*words, "--moe-backend", "marlin", "--json"])

    assert json.loads(plan("gpt-oss-120b").stdout)["moe_backend"] == "marlin"
    refused = plan("qwen3-8b")
    assert refused.exit_code == 2
    assert "qwen3-8b has no experts" in " ".join(refused.output.split())


@pytest.mark.parametrize("command", [["devices", "show", "h200"], ["run", "sharegpt", "--device", "h200"]])
def test_other_words_are_refused(command: list[str]) -> None:
    done = CliRunner().invoke(app, [*command, "--model", "gpt-oss-120b", "--moe-backend", "triton"])
    assert done.exit_code == 2
    assert "'triton'" in done.output


def test_a_server_gets_the_option_and_an_emulated_one_its_times() -> None:
    def words(**settings: Any) -> list[str]:
        return serve_arguments(Serving("gpt-oss-120b", parse_policy("v1"), **settings))

    asked = EngineOptions(moe_backend="marlin")
    assert "--moe-backend marlin" in " ".join(words(options=asked))
    assert "--moe-backend" not in words(options=EngineOptions())
    emulated = words(options=asked, emulation=Emulation("h200", "gpt-oss-120b"))
    assert "--moe-backend" not in emulated
    assert '"moe_backend":"marlin"' in " ".join(emulated)


def test_costs_for_a_server_are_of_what_follows_the_dashes() -> None:
    assert parse_types(["--moe-backend", "marlin"]) == {"moe_backend": "marlin"}
    assert parse_types(["--moe-backend=triton", "--quantization", "fp8"]) == {"quantization": "fp8"}
