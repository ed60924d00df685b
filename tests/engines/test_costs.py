"""Source of the controller's step costs where vLLM runs on this machine: a profile, a calibration or the GPU named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ebbench.cli.main import app
from ebbench.devices.base import Parallel
from ebbench.devices.loader import load_device
from ebbench.engines import machine
from ebbench.engines.base import check_fits
from ebbench.engines.costs import local_hardware, serving_costs
from ebbench.engines.sim import SimEngine
from ebbench.engines.vllm_command import hub_name, parse_parallel, parse_types
from ebbench.errors import InputFileError, UsageError
from ebbench.records.run import RunWriter
from ebbench.runs.conclude import RunContext, conclude
from ebbench.spec.server import EngineOptions
from ebbench.workloads import build_plan
from vllm_eb.calibration import Calibration, calibration_to_json
from vllm_eb.policy import parse_policy

MEASURED = Calibration(alpha_p=0.002, beta_p=3e-5, alpha_d=0.01, beta_d=5e-5, source="measured here")
NEEDS_COSTS = ["eb", "ebplus", "marginal"]
NEEDS_NONE = ["v1", "v0", "deferred:k=4", "eb:k=2", "eb:theta=0.1", "cadence:every=4"]


@pytest.fixture(params=["NVIDIA A10G", "Tesla T4", ""])
def unprofiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A machine with hardware that has no profile; the name it goes by."""
    gpus = (machine.Gpu(request.param, 81920, "580.1"),) if request.param else ()
    monkeypatch.setattr(machine, "visible_gpus", lambda: gpus)
    return request.param or "CPU"


@pytest.fixture
def calibration_file(tmp_path: Path) -> Path:
    path = tmp_path / "calibration.json"
    path.write_text(calibration_to_json(MEASURED), encoding="utf-8")
    return path


def here(*policies: str, **given: object):  # type: ignore[no-untyped-def]
    specs = [parse_policy(policy) for policy in policies]
    return local_hardware(specs, EngineOptions(), model="qwen3-8b", **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", NEEDS_COSTS)
def test_a_policy_that_needs_costs_is_refused_with_the_remedy(unprofiled: str, policy: str) -> None:
    with pytest.raises(UsageError) as refused:
        here("v1", policy)
    line = str(refused.value)
    assert "\n" not in line
    assert unprofiled in line
    assert "ebbench calibrate --model qwen3-8b" in line
    assert "--calibration" in line


@pytest.mark.parametrize("policy", NEEDS_NONE)
def test_a_policy_that_needs_no_costs_runs_without_a_profile(unprofiled: str, policy: str) -> None:
    device = here(policy)
    assert device.name.startswith(unprofiled)
    assert not device.costs_known


def test_a_calibration_goes_before_any_profile(unprofiled: str, calibration_file: Path) -> None:
    device = here("ebplus", calibration=calibration_file, device="h200")
    assert device.calibration == MEASURED
    assert device.costs_known
    assert device.name.startswith(unprofiled)
    assert not device.warnings


def test_costs_of_another_gpu_are_said(unprofiled: str) -> None:
    device = here("ebplus", device="h200")
    assert device.calibration == load_device("h200", "qwen3-8b").calibration
    assert device.name.startswith(unprofiled)
    assert any("h200" in warning for warning in map(str, device.warnings))


def test_a_gpu_with_a_profile_has_its_own_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "visible_gpus", lambda: (machine.Gpu("NVIDIA H200", 143771, "580.1"),))
    device = here("ebplus")
    assert device.name == "h200"
    assert device.calibration == load_device("h200", "qwen3-8b").calibration
    assert not device.warnings


def test_a_model_without_geometry_runs_where_no_costs_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "visible_gpus", lambda: (machine.Gpu("NVIDIA H200", 143771, "580.1"),))
    device = local_hardware([parse_policy("v1")], EngineOptions(), model="somebody/a-new-model")
    assert (device.name, device.model, device.costs_known) == ("NVIDIA H200", "somebody/a-new-model", False)
    with pytest.raises(UsageError, match="a-new-model"):
        local_hardware([parse_policy("ebplus")], EngineOptions(), model="somebody/a-new-model")


def test_a_model_without_a_profile_runs_where_no_costs_are_needed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(machine, "visible_gpus", lambda: (machine.Gpu("NVIDIA H200", 143771, "580.1"),))
    (tmp_path / "config.json").write_text('{"model_type": "brand_new"}', encoding="utf-8")
    device = local_hardware([parse_policy("v1")], EngineOptions(), model=str(tmp_path / "config.json"))
    assert (device.name, device.costs_known) == ("NVIDIA H200", False)
    with pytest.raises(UsageError, match="brand_new"):
        local_hardware([parse_policy("ebplus")], EngineOptions(), model=str(tmp_path / "config.json"))


@pytest.mark.parametrize(
    ("driver_name", "profile"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),  # slower memory, and half of it
        ("NVIDIA H100 PCIe", "h100-pcie"),  # less memory bandwidth and fewer multiprocessors than the one measured
        ("NVIDIA GeForce RTX 4090 D", None),
    ],
)
def test_profiles_go_by_the_names_of_the_driver(driver_name: str, profile: str | None) -> None:
    assert machine.gpu_profile(driver_name) == profile


def test_unknown_costs_are_not_stored_with_the_run(unprofiled: str, tmp_path: Path) -> None:
    plan = build_plan("balanced", num_prompts=4, source="profile", max_concurrency=2, input_len=8, output_len=4)
    result = SimEngine().run(plan, parse_policy("v1"), load_device("h200", "qwen3-8b"), EngineOptions(), None)
    device = here("v1")
    with RunWriter.create(tmp_path / "run") as writer:
        context = RunContext(plan, parse_policy("v1"), "vllm", device, EngineOptions(), 0)
        manifest = conclude(writer, context, result)[0].manifest
    assert manifest.device.startswith(unprofiled)
    assert (manifest.calibration, manifest.kv_capacity_tokens) == (None, None)
    assert manifest.options["max_num_seqs"] == EngineOptions().max_num_seqs


@pytest.mark.parametrize(
    ("reports", "tokens"),
    [
        ({"num_kv_blocks": 1000, "block_size": 16}, 16_000),
        ({"num_kv_blocks": 1000, "block_size": 16, "kv_cache_tokens": 9_000}, 9_000),  # sliding windows, or two ranks
        ({}, None),
    ],
)
def test_the_kv_cache_of_a_started_server_is_what_it_reports(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reports: dict[str, int], tokens: int | None
) -> None:
    """Not the estimate for the default version: the server has its own version, and options after ``--``."""
    monkeypatch.setattr(machine, "visible_gpus", lambda: (machine.Gpu("NVIDIA H200", 143771, "580.1"),))
    plan = build_plan("balanced", num_prompts=4, source="profile", max_concurrency=2, input_len=8, output_len=4)
    result = SimEngine().run(plan, parse_policy("v1"), load_device("h200", "qwen3-8b"), EngineOptions(), None)
    result = replace(result, facts={**result.facts, "server_reports": reports})
    with RunWriter.create(tmp_path / "run") as writer:
        context = RunContext(plan, parse_policy("v1"), "vllm", here("v1"), EngineOptions(), 0)
        assert conclude(writer, context, result)[0].manifest.kv_capacity_tokens == tokens


def test_a_request_above_the_estimate_is_not_refused_before_vllm_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options after ``--``, two GPUs for one, give vLLM more than one GPU is estimated to hold."""
    monkeypatch.setattr(machine, "visible_gpus", lambda: (machine.Gpu("NVIDIA H100 80GB HBM3", 81559, "580.1"),))
    device = local_hardware([parse_policy("v1")], EngineOptions(), model="qwen3-32b")
    plan = build_plan("balanced", num_prompts=1, source="profile", max_concurrency=1, input_len=40_000, output_len=500,
                      length_distribution="fixed", max_model_len=40_960)  # fmt: skip
    check_fits(plan, device, EngineOptions())
    assert load_device("h100", "qwen3-32b").kv_capacity_tokens < 40_500


def test_the_command_refuses_before_it_starts_anything(unprofiled: str, tmp_path: Path) -> None:
    words = ["run", "balanced", "--engine", "vllm", "-n", "10", "-o", str(tmp_path / "out")]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2
    assert "ebbench calibrate" in done.output
    assert not (tmp_path / "out").exists()


def test_a_calibration_that_would_be_ignored_is_refused(calibration_file: Path) -> None:
    done = CliRunner().invoke(app, ["run", "balanced", "--engine", "sim", "--calibration", str(calibration_file)])
    assert done.exit_code == 2
    assert "--engine vllm" in done.output


@pytest.mark.parametrize("text", ["{", json.dumps({"alpha_p": 1.0})])
def test_a_file_that_is_no_calibration(tmp_path: Path, text: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputFileError, match=r"broken\.json"):
        serving_costs([parse_policy("ebplus")], calibration=path, device=None, model="qwen3-8b")


def test_the_hub_knows_models_by_other_names() -> None:
    assert hub_name("qwen3-8b") == "Qwen/Qwen3-8B"
    assert hub_name("somebody/a-new-model") == "somebody/a-new-model"


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ((), Parallel()),
        (("--tensor-parallel-size", "4"), Parallel(tp=4)),
        (("-tp", "2", "--seed", "3"), Parallel(tp=2)),
        (("--tensor_parallel_size=8", "--enable-expert-parallel"), Parallel(tp=8, ep=8)),
        (("--data-parallel-size", "4", "--enable-expert-parallel"), Parallel(dp=4, ep=4)),
        (("--data-parallel-size", "4"), Parallel()),
    ],
)
def test_options_of_vllm_say_how_many_gpus_share_the_model(options: tuple[str, ...], shape: Parallel) -> None:
    assert parse_parallel(options) == shape


def test_costs_are_those_of_the_gpus_that_vllm_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were those of one GPU, and a model of several had none."""
    monkeypatch.setattr(machine, "visible_gpus", lambda: (machine.Gpu("NVIDIA H100 80GB HBM3", 81559, "580.1"),) * 4)
    alone, four = (here("ebplus", vllm_options=words).calibration for words in ((), ("--tensor-parallel-size", "4")))
    assert four == load_device("h100", "qwen3-8b", parallel=Parallel(tp=4)).calibration
    assert four.beta_p < 0.5 * alone.beta_p
    options, given = EngineOptions(), {"calibration": None, "device": None, "model": "llama-3.1-70b"}
    with pytest.raises(UsageError, match="-- --tensor-parallel-size N"):
        serving_costs([parse_policy("ebplus")], options, **given)  # type: ignore[arg-type]
    assert serving_costs([parse_policy("ebplus")], options, **given, vllm_options=("-tp", "4"))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="ebbench calibrate"):
        here("ebplus", vllm_options=("-pp", "2"))


@pytest.mark.parametrize(
    ("options", "types"),
    [
        ((), {}),
        (("--quantization", "fp8"), {"quantization": "fp8"}),
        (("-q", "awq", "--seed", "3"), {"quantization": "awq"}),
        (("--kv_cache_dtype=fp8_e4m3", "-tp", "2"), {"kv_cache_dtype": "fp8"}),
        (("--kv-cache-dtype", "auto"), {"kv_cache_dtype": "auto"}),
    ],
)
def test_options_of_vllm_say_in_which_types_it_computes(options: tuple[str, ...], types: dict[str, str]) -> None:
    assert parse_types(options) == types


def test_costs_are_those_of_the_types_that_vllm_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were those of 16 bits."""
    monkeypatch.setattr(machine, "visible_gpus", lambda: (machine.Gpu("NVIDIA H100 80GB HBM3", 81559, "580.1"),))
    words = ("--quantization", "fp8", "--kv-cache-dtype", "fp8")
    plain, small = (here("ebplus", vllm_options=given).calibration for given in ((), words))
    assert small == load_device("h100", "qwen3-8b", quantization="fp8", kv_cache_dtype="fp8").calibration
    assert small.beta_p < 0.8 * plain.beta_p
    with pytest.raises(UsageError, match="costs of awq weights are not known"):
        here("ebplus", vllm_options=("--quantization", "awq"))
    here("v1", vllm_options=("--quantization", "awq"))  # needs no costs


def test_an_emulated_gpu_has_the_types_of_the_config() -> None:
    words = ["serve", "qwen3-8b", "--emulate", "h100", "--print", "--", "--kv-cache-dtype", "fp8"]
    assert "types of its config.json" in CliRunner().invoke(app, words).stderr


def test_an_emulated_gpu_is_one() -> None:
    words = ["serve", "qwen3-8b", "--emulate", "h100", "--print", "--", "--tensor-parallel-size", "2"]
    assert "--emulate emulates one GPU" in CliRunner().invoke(app, words).stderr
