"""Models and devices by content: what carries the name of another is not taken for it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ebbench.devices.base import Device
from ebbench.devices.loader import load_device
from ebbench.devices.profiles import find_model, has_bundled_shape, list_models
from ebbench.runs.key import result_key
from ebbench.runs.store import RunStore
from ebbench.spec.run import RunSpec
from ebbench.spec.server import EngineOptions
from ebbench.workloads.options import PlanOptions
from tests.gate.gate_data import SMALL, invoke

SHAPE = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128, "hidden_size": 4096,
    "intermediate_size": 12288, "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8,
    "max_position_embeddings": 40960, "tie_word_embeddings": False, "vocab_size": 151936, "torch_dtype": "bfloat16",
    "_name_or_path": "Qwen/Qwen3-8B",
}  # fmt: skip
DEVICE = """format = 1
name = "ours"
gpu = "Some GPU"
memory_bytes = 150_000_000_000
bandwidth_bytes_per_s = {bandwidth}
bf16_flops_per_s = 900e12
provenance = "data sheet"
{more}
[host.default]
step_s = 0.4e-3
sequence_s = 8e-6
"""


def model(folder: Path, **changes: Any) -> str:
    """A folder with the configuration of Qwen3-8B, or a changed one under the same name."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE | changes))
    return str(folder)


def identity(loaded: Device) -> dict[str, str]:
    """What a run records of a device."""
    return dict(loaded.identity)


def device(path: Path, bandwidth: float = 4.8e12, more: str = "") -> str:
    """A device file of the name ``ours``."""
    path.write_text(DEVICE.format(bandwidth=bandwidth, more=more))
    return str(path)


def test_a_published_calibration_is_for_the_published_shape_only(tmp_path: Path) -> None:
    whole = load_device("h200", model(tmp_path / "whole"))
    pruned = load_device("h200", model(tmp_path / "pruned", num_hidden_layers=18))
    published = load_device("h200", "qwen3-8b").calibration
    assert (whole.calibration.alpha_d, whole.calibration.beta_d) == (published.alpha_d, published.beta_d)
    assert pruned.calibration.source.startswith("fitted to")
    assert pruned.calibration.beta_p < 0.6 * published.beta_p
    (said,) = [text for text in map(str, pruned.warnings) if "another shape" in text]
    assert "4.72B parameters" in said
    assert not any("another shape" in text for text in map(str, whole.warnings))


@pytest.mark.parametrize("name", list_models())
def test_bundled_models_are_themselves_in_any_type(name: str) -> None:
    found = find_model(name)
    assert has_bundled_shape(found)
    assert has_bundled_shape(replace(found, kv_dtype="fp8", positions=1, note="x"))
    assert not has_bundled_shape(replace(found, layers=found.layers - 1))
    assert not has_bundled_shape(replace(found, name="own", hf_id="own/own"))


def test_bundled_names_need_no_identity_and_own_ones_have_theirs(tmp_path: Path) -> None:
    assert identity(load_device("h200", "qwen3-8b")) == {}
    assert identity(load_device("h200", model(tmp_path / "same"))) == {}
    found = identity(load_device(device(tmp_path / "a.toml"), model(tmp_path / "small", num_hidden_layers=18)))
    assert found["model_shape"].startswith("18 layers of 4,096, 4.72B parameters; ")
    assert found["device_profile"].startswith("4.8 TB/s, 900 TFLOPS, 150 GB; ")


def test_types_are_of_the_model_unless_options_chose_them(tmp_path: Path) -> None:
    """Weights published in FP8 under the name of the 16-bit model are another model; --quantization is an option."""
    quantised = {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}
    assert "fp8" in identity(load_device("h200", model(tmp_path / "fp8", **quantised)))["model_shape"]
    assert identity(load_device("h200", "qwen3-8b", quantization="fp8", kv_cache_dtype="fp8")) == {}
    assert identity(load_device("h200", "gpt-oss-120b")) == {}


def test_the_same_numbers_in_other_files_are_the_same_device(tmp_path: Path) -> None:
    first = identity(load_device(device(tmp_path / "a.toml"), "qwen3-8b"))
    copy = Path(device(tmp_path / "b.toml"))
    copy.write_text("# a comment\n" + copy.read_text().replace("data sheet", "another data sheet"))
    assert identity(load_device(str(copy), "qwen3-8b")) == first
    assert identity(load_device(device(tmp_path / "c.toml", 4.7e12), "qwen3-8b")) != first
    assert identity(load_device("linear:1e-3,1e-5,1e-3,1e-5,9000", "m")) != identity(
        load_device("linear:2e-3,1e-5,1e-3,1e-5,9000", "m")
    )
    assert identity(load_device("h200", "qwen3-8b", cost="roofline")) == {"device_profile": "cost roofline"}


def test_runs_of_one_name_and_other_content_do_not_compare(tmp_path: Path) -> None:
    sides: dict[str, list[tuple[str, ...]]] = {
        "models": [("--device", "h200", "--model", model(tmp_path / f"m{layers}", num_hidden_layers=layers))
                   for layers in (36, 18)],
        "devices": [("--device", device(tmp_path / f"{speed}.toml", speed)) for speed in (4.8e12, 2.4e12)],
    }  # fmt: skip
    for name, options in sides.items():
        for side, given in zip("bc", options, strict=True):
            done = invoke(*SMALL, "-p", "v1", *given, "-o", tmp_path / name / side)
            assert done.exit_code == 0, done.output
        for command in ("gate", "compare"):
            done = invoke(command, tmp_path / name / "b", tmp_path / name / "c")
            assert done.exit_code == 3
            assert f"{name.removesuffix('s')}: " in done.stderr
            assert ("18 layers" if name == "models" else "(2.4 TB/s") in done.stderr
        shown = " ".join(invoke("show", tmp_path / name / "b", tmp_path / name / "c").stdout.split())
        assert f"No winner: these runs differ in {name.removesuffix('s')}" in shown


def test_a_cell_is_keyed_by_model_folder_and_measured_step_times(tmp_path: Path) -> None:
    folder = Path(model(tmp_path / "m"))
    (tmp_path / "costs.json").write_text("{}")
    file = device(tmp_path / "d.toml", more='[measured]\nm = "costs.json"\n')

    def key() -> str:
        return result_key(RunSpec(PlanOptions("balanced"), device=file, model=str(folder)))

    keys = [key()]
    (folder / "config.json").write_text(json.dumps(SHAPE | {"num_hidden_layers": 30}))
    keys.append(key())
    (tmp_path / "costs.json").write_text("{ }")
    keys.append(key())
    assert len(set(keys)) == 3


@pytest.mark.parametrize(
    ("more", "unused"),
    [
        ("gemm_factor = 1.1", "its gemm_factor is not used"),
        ('calibration_names = ["NVIDIA H200"]', "its bandwidth_bytes_per_s, bf16_flops_per_s and host are not used"),
        ("", ""),
    ],
)
def test_a_number_of_a_device_file_that_is_not_used_is_said(tmp_path: Path, more: str, unused: str) -> None:
    found = [str(each) for each in load_device(device(tmp_path / "d.toml", more=more), "qwen3-8b").warnings]
    assert [text for text in found if "not used" in text] == [text for text in found if unused and unused in text]
    assert bool(unused) == any("not used" in text for text in found)


def test_a_run_of_an_own_device_is_not_the_bundled_devices(tmp_path: Path) -> None:
    own = Path(device(tmp_path / "d.toml", 2.4e12))
    own.write_text(own.read_text().replace('name = "ours"', 'name = "h200"'))
    for name, given in (("own", str(own)), ("bundled", "h200")):
        done = invoke(*SMALL, "-p", "v1", "--device", given, "--model", "qwen3-8b", "-o", tmp_path / name)
        assert done.exit_code == 0, done.output
    plan = PlanOptions(
        "balanced", source="profile", num_prompts=64, max_concurrency=16, input_len=64, output_len=16, with_text=False
    )
    limits = EngineOptions(max_num_seqs=1024, max_num_batched_tokens=8192)
    cell = RunSpec(plan, device="h200", model="qwen3-8b", server=limits)
    assert RunStore(tmp_path / "a", [tmp_path / "bundled"]).get(cell) is not None
    assert RunStore(tmp_path / "b", [tmp_path / "own"]).get(cell) is None
