"""Kernel times that the packaged tables lack, from aiconfigurator-core where it is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ebbench.devices import library
from ebbench.devices.base import Device, Parallel, StepShape
from ebbench.devices.costs import TableCost, measured_devices
from ebbench.devices.loader import load_device
from ebbench.devices.profiles import find_profile
from tests.devices.test_model_families import DEEPSEEK, DELTA, LLAMA, write

pytest.importorskip("aiconfigurator_core")

BLOCKS = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
NVFP4 = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
MIXTURE = {
    **LLAMA, "model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8, "hidden_size": 4096,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "moe_intermediate_size": 1408,
}  # fmt: skip
DECODES, PROMPTS = StepShape((), 32, 32 * 1024, 32), StepShape(((2048, 0),), 0, 0, 1)


def load(folder: Path, config: dict[str, Any], device: str = "h200", **options: Any) -> Device:
    return load_device(device, str(write(folder, config)), **options)


def estimates(device: Device) -> list[str]:
    return [text for text in map(str, device.warnings) if "roofline" in text]


def test_latent_attention_and_its_experts_are_measured_ones(tmp_path: Path) -> None:
    device = load(tmp_path, DEEPSEEK | BLOCKS, parallel=Parallel(tp=8))
    assert estimates(device) == []
    source = "aiconfigurator-core 0.12.0 (Apache-2.0): latent (MLA) attention of 61 layers (measured under vLLM 0.24.0)"
    assert source in device.provenance


@pytest.mark.usefixtures("without_library")
def test_without_the_library_the_caveat_names_the_remedy(tmp_path: Path) -> None:
    device = load(tmp_path, DEEPSEEK | BLOCKS, parallel=Parallel(tp=8), assume_kernels=True)
    assert len(estimates(device)) == 1
    assert [text for text in map(str, device.warnings) if "pip install 'ebbench[tables]'" in text] == [
        "aiconfigurator-core may have what was not measured here: pip install 'ebbench[tables]'"
    ]


def test_a_step_asks_the_library_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = load(tmp_path, DEEPSEEK | BLOCKS, parallel=Parallel(tp=8))
    monkeypatch.setattr(library.Kernel, "seconds", None)
    assert isinstance(device.cost, TableCost)
    assert device.cost.step_s(StepShape(((512, 128),), 33, 33 * 1111, 34)) > 0


def test_decodes_at_measured_points_take_what_was_measured(tmp_path: Path) -> None:
    device = load(tmp_path, DEEPSEEK | BLOCKS, parallel=Parallel(tp=8))
    model, cost = device.geometry, device.cost
    assert model is not None
    assert isinstance(cost, TableCost)
    ((layers, tables),) = cost.attention
    rows = library.mixer_rows(find_profile("h200"), model, model.mixers[0], model.sliced(8).mixers[0])
    assert rows is not None
    assert layers == 61
    for seqs, context in ((32, 1024), (256, 8192)):
        assert tables.step_s((), seqs, seqs * context) == pytest.approx(rows.decode[seqs, context], rel=1e-3)


def test_decodes_beside_a_prompt_read_a_modules_weights_once(tmp_path: Path) -> None:
    ((_, tables),) = load(tmp_path, DEEPSEEK | BLOCKS, parallel=Parallel(tp=8)).cost.attention  # type: ignore[attr-defined]
    alone, decodes = tables.step_s(((1024, 0),), 0, 0), tables.step_s((), 32, 32 * 1024)
    assert alone < tables.step_s(((1024, 0),), 32, 32 * 1024) < alone + decodes


def test_more_work_never_takes_less_time(tmp_path: Path) -> None:
    cost = load(tmp_path, DEEPSEEK | BLOCKS, parallel=Parallel(tp=8)).cost
    for grow in (
        [StepShape((), n, n * 1024, n) for n in (1, 8, 64, 512)],
        [StepShape((), 64, 64 * context, 64) for context in (128, 1024, 8192, 32_768)],
        [StepShape(((chunk, 0),), 0, 0, 1) for chunk in (16, 256, 2048, 8192)],
        [StepShape(((512, before),), 0, 0, 1) for before in (0, 2048, 16_384)],
    ):
        times = [cost.step_s(shape) for shape in grow]
        assert times == sorted(times)


def test_a_gated_delta_rule_costs_the_same_after_any_context(tmp_path: Path) -> None:
    device = load(tmp_path, {**LLAMA, **DELTA, "model_type": "qwen3_next", "num_experts": 0}, assume_kernels=True)
    assert isinstance(device.cost, TableCost)
    delta = next(tables for layers, tables in device.cost.attention if layers == 6)
    assert delta.step_s((), 64, 64 * 128) == pytest.approx(delta.step_s((), 64, 64 * 16_384))


def test_experts_of_another_shape_are_derived_with_a_caveat(tmp_path: Path) -> None:
    device = load(tmp_path, MIXTURE | NVFP4, "b200")
    derived = [text for text in map(str, device.warnings) if text.startswith("experts of")]
    assert derived == [f"experts of {device.model}: not measured as served on b200; derived from shapes measured under "
                       "vLLM 0.24.0"]  # fmt: skip


def test_types_without_kernels_on_a_gpu_are_said_to_be_others(tmp_path: Path) -> None:
    blackwell = load(tmp_path, MIXTURE | NVFP4 | {"moe_intermediate_size": 1536}, "b200")
    assert not [text for text in map(str, blackwell.warnings) if "as served" in text]
    hopper = load(tmp_path, MIXTURE | NVFP4 | {"moe_intermediate_size": 1536}, "h200")
    assert any(text.endswith("those in int4_wo") for text in map(str, hopper.warnings))
    assert hopper.cost.step_s(DECODES) > blackwell.cost.step_s(DECODES)


def test_a_time_by_the_data_sheet_is_not_taken_for_a_measured_one() -> None:
    unknown = {"kernel_source": "no_such_kernel", "phase": "generation", "d_model": 4096, "d_conv": 4,
               "num_k_heads": 16, "head_k_dim": 128, "num_v_heads": 32, "head_v_dim": 128,
               "mamba_ssm_dtype": "float32"}  # fmt: skip
    assert library._kernel(find_profile("h200"), [library._op("Gdn", unknown)]) is None


def test_what_the_packaged_tables_have_is_taken_from_them(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [("h200", "qwen3-8b"), ("rtx-pro-6000", "qwen3-32b"), ("b200", "llama-3.1-70b")]
    found = [load_device(*each, parallel=Parallel(tp=2)) for each in devices]
    monkeypatch.setattr(library, "installed", lambda: False)
    for device, each in zip(found, devices, strict=True):
        assert device.identity == ()
        assert device.cost.step_s(PROMPTS) == load_device(*each, parallel=Parallel(tp=2)).cost.step_s(PROMPTS)


def test_runs_with_and_without_the_library_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(write(tmp_path, DEEPSEEK | BLOCKS))
    device = load_device("h200", path, parallel=Parallel(tp=8))
    assert ("kernel_library", "aiconfigurator-core 0.12.0") in device.identity
    monkeypatch.setattr(library, "installed", lambda: False)
    without = load_device("h200", path, parallel=Parallel(tp=8), assume_kernels=True)
    assert "kernel_library" not in dict(without.identity)


def test_devices_that_only_the_library_measured_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {"gb200", "gb300", "h200", "rtx-4090"} <= {*measured_devices()}
    monkeypatch.setattr(library, "installed", lambda: False)
    assert {"h200", "rtx-4090"} <= {*measured_devices()}
    assert not {"gb200", "gb300"} & {*measured_devices()}
