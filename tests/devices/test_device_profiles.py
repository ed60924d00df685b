"""Device profiles: what is refused, and what fits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ebbench.devices.base import EB_VLLM, Parallel, StepShape
from ebbench.devices.capacity import batch_limits
from ebbench.devices.describe import device_rows
from ebbench.devices.loader import load_device
from ebbench.devices.profiles import DATA, find_profile, list_devices, read_profile
from ebbench.errors import InputFileError, UnknownNameError, UsageError
from ebbench.runs.file import spec_of_file

GOOD = """
format = 1
name = "mine"
gpu = "a GPU"
memory_bytes = 48_000_000_000
bandwidth_bytes_per_s = 1e12
bf16_flops_per_s = 2e14
provenance = "a test"
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return path


def test_a_profile_from_a_file_is_a_device(tmp_path: Path) -> None:
    device = load_device(str(written(tmp_path, GOOD)), "qwen3-8b")
    assert device.name == "mine"
    assert "roofline" in str(device.warnings[0])


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("memory_bytes = 48_000_000_000", "memory_gb = 48", "memory_gb"),  # a unit that is not known
        ("memory_bytes = 48_000_000_000", "", "memory_bytes is missing"),  # a hole
        ("1e12", "-1e12", "bandwidth_bytes_per_s must be positive"),
        ("1e12", "1e-300", "bandwidth_bytes_per_s must be at least 1e.06"),
        ("48_000_000_000", "1e300", "memory_bytes must be at least 0 and at most 1e.18"),
        (
            "2e14",
            "2e14\nhost.default = {step_s = 1e300, sequence_s = 0}",
            "step_s must be at least 0 and at most 1e.08",
        ),
        ("2e14", '"fast"', "bf16_flops_per_s must be a number"),
        ("2e14", "nan", "bf16_flops_per_s"),
        ('"a test"', "3", "provenance must be text"),
        ("format = 1", "format = 9", "format must be 1"),
        ("2e14", "2e14\nhost.default = {step_s = -1e-3, sequence_s = 0}", "host.default.step_s"),
        ("2e14", "2e14\nhost.default = {step_ms = 1, sequence_s = 0}", "host.default.step_ms"),
        ("2e14", "2e14\nhost.default = {step_s = 1e-3}", "host.default.sequence_s is missing"),
        ("2e14", "2e14\nhost.default = {step_s = 0, sequence_s = 0, request_s = 1}", "default.request_s belongs to"),
        ("2e14", "2e14\nmax_num_seqs = 10.5", "max_num_seqs must be a whole number"),
        ("2e14", "2e14\ncalibration_names = 3", "calibration_names must be a list of names"),
        ("2e14", '2e14\nmixed_from = "rtx-4080"', "mixed_from: unknown device 'rtx-4080'"),
        ("2e14", '2e14\ncollectives_from = "rtx-4080"', "collectives_from: unknown device 'rtx-4080'"),
        ("2e14", "2e14\nsampler_bytes_per_logit = 11.0", "unknown field 'sampler_bytes_per_logit'"),
    ],
)
def test_bad_profile_is_refused_with_the_field(tmp_path: Path, old: str, new: str, named: str) -> None:
    with pytest.raises(InputFileError, match=named):
        read_profile(written(tmp_path, GOOD.replace(old, new)))


@pytest.mark.parametrize("share", [0.0, -0.5, 1.5])
def test_a_share_of_memory_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(UsageError, match="gpu_memory_utilization must be above 0 and at most 1"):
        load_device("h200", "qwen3-8b", gpu_memory_utilization=share)


def test_unknown_devices_and_cost_models_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'h200'"):
        load_device("h2000", "qwen3-8b")
    with pytest.raises(UnknownNameError, match="cost model"):
        load_device("h200", "qwen3-8b", cost="tabel")


def test_a_model_that_does_not_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(UsageError, match=r"qwen3-30b-a3b does not fit on l40s: weights 61\.1 GB"):
        load_device("l40s", "qwen3-30b-a3b")
    with pytest.raises(UsageError, match=r"\(80% of 84\.9 GB\).*where vLLM starts all the same.*--num-kv-blocks"):
        load_device("h100", "qwen3-32b", gpu_memory_utilization=0.8)


def test_a_reported_kv_cache_takes_the_place_of_the_estimate() -> None:
    device = load_device("h100", "qwen3-32b", gpu_memory_utilization=0.8, kv_tokens=100_000)
    assert device.kv_capacity_tokens == 100_000
    with pytest.raises(UsageError, match=r"does not fit on l40s: weights 61\.1 GB"):
        load_device("l40s", "qwen3-30b-a3b", kv_tokens=100_000)
    with pytest.raises(UsageError, match="gpu_memory_utilization must be"):
        load_device("h100", "qwen3-8b", gpu_memory_utilization=1.5, kv_tokens=100_000)


@pytest.mark.parametrize(
    ("device", "model", "warned"),
    [("h200", "qwen3-30b-a3b", True), ("h200", "qwen3-8b", False), ("b200", "qwen3-30b-a3b", False)],
)
def test_quantized_kernels_that_are_slower_than_16_bits_are_a_caveat(device: str, model: str, warned: bool) -> None:
    warnings = load_device(device, model, quantization="fp8").warnings
    assert any("take longer than in 16 bits" in str(warning) for warning in warnings) == warned
    assert not any("16 bits" in warning for warning in map(str, load_device(device, model).warnings))


@pytest.mark.parametrize(("block", "said"), [(None, True), ([128, 128], False)])
def test_so_they_are_where_the_models_own_config_says_fp8(tmp_path: Path, block: list[int] | None, said: bool) -> None:
    """Mixtral-8x7B: the kernels with one scale per tensor are slower than those in 16 bits, in blocks they are not."""
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "model_type": "mixtral", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
                "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 32000, "num_local_experts": 8,
                "num_experts_per_tok": 2, "quantization_config": {"quant_method": "fp8", "weight_block_size": block},
            }
        )
    )  # fmt: skip
    warnings = load_device("h100", str(tmp_path), parallel=Parallel(tp=2)).warnings
    assert any("with weights in FP8 some steps take longer than in 16 bits" in str(text) for text in warnings) == said


@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("a100", "the ratio of mixed to pure decode cost measured on the RTX 4090"), ("l40s", "on the RTX 4090"),
        ("h100", "fitted on the H200"), ("b200", "the sum of its parts"), ("h200", ""), ("rtx-pro-6000", ""),
        ("rtx-4090", ""),
    ],
)  # fmt: skip
def test_mixed_batches_that_were_not_measured_are_a_caveat(device: str, said: str) -> None:
    """They decide whether mixed or exclusive batches are faster."""
    found = [
        text for text in map(str, load_device(device, "qwen3-4b").warnings) if "attention of mixed batches" in text
    ]
    assert len(found) == bool(said)
    assert all(said in text for text in found)


@pytest.mark.parametrize(
    ("device", "model", "tp", "said"),
    [("h100", "llama-3.1-8b", 4, True), ("h100", "qwen3-32b", 2, False), ("h200", "llama-3.1-8b", 4, False)],
)
def test_a_doubtful_constant_of_the_host_is_a_caveat_where_it_decides(
    device: str, model: str, tp: int, said: bool
) -> None:
    warnings = load_device(device, model, parallel=Parallel(tp=tp)).warnings
    assert any("the host's 20.9 ms per step decide on h100" in str(text) for text in warnings) == said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"3.35e12": "2.0e12", "989e12": "756e12"}, "its bandwidth_bytes_per_s and bf16_flops_per_s are not used"),
        ({"3.35e12": "3.3e12"}, ""),  # within 2 %
        ({"3.35e12": "2.0e12", 'name = "h100"': 'name = "mine"'}, ""),  # a roofline by its own numbers
    ],
)
def test_a_device_file_with_a_bundled_name_says_its_unused_numbers(
    tmp_path: Path, changes: dict[str, str], said: str
) -> None:
    text = (DATA / "profiles" / "h100.toml").read_text(encoding="utf-8")
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new, 1)
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    found = [
        one
        for one in map(str, load_device(str(path), "llama-3.1-8b").warnings)
        if "the kernel tables of the bundled" in one
    ]
    assert len(found) == bool(said)
    assert all(said in one for one in found)


@pytest.mark.parametrize(("device", "options"), [("h200", {}), ("h200", {"eager": True}), ("b200", {})])
def test_steps_of_prompts_that_are_slower_than_16_bits_are_named_too(device: str, options: dict[str, bool]) -> None:
    """In eager mode the host decides the decodes of this small model, and quantised activations are launches more."""
    (said,) = (
        warning
        for warning in map(str, load_device(device, "gemma-3-1b-it", quantization="fp8", **options).warnings)  # type: ignore[arg-type]
        if "16 bits" in warning
    )
    assert "256 decodes" in said
    assert "2,048 prompt tokens" in said


@pytest.mark.parametrize(
    ("device", "model", "parallel", "said"),
    [
        ("l40s", "qwen3-8b", Parallel(tp=4), "longer on 4 l40s than on 2, since"),
        ("l40s", "qwen3-8b", Parallel(tp=2), ""),
        ("l40s", "llama-3.1-70b", Parallel(tp=4), ""),  # two do not hold it
        ("rtx-pro-6000", "qwen3-30b-a3b", Parallel(tp=2, ep=2), "longer on 2 rtx-pro-6000 than on 1, since"),
        ("h100", "qwen3-32b", Parallel(tp=8), ""),
        ("rtx-pro-6000", "deepseek-r1-distill-qwen-1.5b", Parallel(tp=6), ""),  # three cannot share its two KV heads
    ],
)
def test_gpus_whose_collectives_cost_more_than_they_save_are_a_caveat(
    device: str, model: str, parallel: Parallel, said: str
) -> None:
    found = [
        text
        for text in map(str, load_device(device, model, parallel=parallel).warnings)
        if "some steps take longer on" in text
    ]
    assert len(found) == bool(said)
    assert all(said in text for text in found)


def test_the_slower_steps_of_more_gpus_are_those_of_their_devices() -> None:
    (text,) = (
        text
        for text in map(str, load_device("l40s", "qwen3-8b", parallel=Parallel(tp=4)).warnings)
        if "some steps take" in text
    )
    prompts = StepShape(((2048, 0),), 0, 0, 1)
    four, two = (load_device("l40s", "qwen3-8b", parallel=Parallel(tp=tp)).cost.step_s(prompts) for tp in (4, 2))
    assert f"2,048 prompt tokens {four / two:.2f} times" in text
    assert four > 3 * two


def test_capacity_meets_the_measured_ones() -> None:
    """RTX 4090: 41,408 tokens, printed by vLLM 0.19 (LLMServingSim). RTX PRO 6000: about 448k behind table 3."""
    cases = [
        ("rtx-4090", "llama-3.1-8b", "0.19", 256, 2048, 41_408),
        ("rtx-pro-6000", "qwen3-8b", EB_VLLM, 1024, 14_336, 448_000),
    ]
    for device, model, version, seqs, tokens, measured in cases:
        ours = load_device(
            device, model, vllm_version=version, max_num_seqs=seqs, max_num_batched_tokens=tokens
        ).kv_capacity_tokens
        assert ours == pytest.approx(measured, rel=0.005)


def test_a_budget_beyond_the_tables_is_refused() -> None:
    with pytest.raises(UsageError, match="step times end at 65,536 tokens per step"):
        load_device("h200", "qwen3-8b", max_num_batched_tokens=65_537)


def test_several_gpus_by_roofline_are_refused_with_what_helps(tmp_path: Path) -> None:
    two = Parallel(tp=2)
    with pytest.raises(UsageError, match=r"2 GPUs as one unit was never checked; leave out --cost roofline, or"):
        load_device("h100", "qwen3-8b", cost="roofline", parallel=two)
    bare = tmp_path / "bare.toml"
    text = (DATA / "profiles" / "l40s.toml").read_text(encoding="utf-8").replace('name = "l40s"', 'name = "bare"')
    bare.write_text(text.replace('mixed_from = "rtx-4090"', ""), encoding="utf-8")
    with pytest.raises(UsageError, match=r"bare: a roofline of 2 GPUs .* use a device with kernel tables"):
        load_device(str(bare), "qwen3-8b", parallel=two)


def test_unfitted_constants_and_scaled_attention_are_warned_of(tmp_path: Path) -> None:
    assert any("was never fitted" in text for text in map(str, load_device("l40s", "qwen3-8b").warnings))
    assert not load_device("h200", "qwen3-8b").warnings
    odd = tmp_path / "config.json"
    odd.write_text(
        '{"model_type": "llama", "num_hidden_layers": 8, "hidden_size": 2048, "num_attention_heads": 18,'
        '"num_key_value_heads": 6, "head_dim": 96, "intermediate_size": 4096, "vocab_size": 32000}'
    )
    assert any(
        "attention of 18 query and 6 KV heads" in text for text in map(str, load_device("h200", str(odd)).warnings)
    )


def test_every_profile_loads_with_its_mixed_costs() -> None:
    for name in list_devices():
        profile = find_profile(name)
        assert profile.name == name
        assert not profile.mixed_from or profile.mixed_from in list_devices()
        assert not profile.collectives_from or set(profile.links) <= set(find_profile(profile.collectives_from).links)


def test_the_linear_cost_model_is_refused_without_a_calibration() -> None:
    with pytest.raises(UsageError, match="no linear calibration"):
        load_device("l40s", "qwen3-8b", cost="linear")


@pytest.mark.parametrize(
    ("device", "version", "limits"),
    [
        ("l40s", "0.32", (256, 2048)), ("a100", "0.32", (256, 2048)), ("rtx-4090", "0.32", (256, 2048)),
        ("h100", "0.32", (1024, 8192)), ("rtx-pro-6000", "0.32", (1024, 8192)), ("b200", "0.32", (1024, 16_384)),
        ("b200", "0.25.1", (1024, 8192)), ("gb300", "0.32", (1024, 16_384)),
    ],
)  # fmt: skip
def test_batch_limits_are_those_of_vllm_on_the_gpu(device: str, version: str, limits: tuple[int, int]) -> None:
    assert batch_limits(find_profile(device), version) == limits


@pytest.mark.parametrize(
    ("given", "limits"),
    [
        ({}, (256, 2048)),
        ({"max_num_batched_tokens": 128}, (128, 128)),  # vLLM: no more sequences than tokens
        ({"max_num_seqs": 64, "max_num_batched_tokens": 8192}, (64, 8192)),
        ({"device": "h200"}, (1024, 8192)),
    ],
)
def test_runs_have_the_limits_of_their_gpu_unless_they_state_others(
    given: dict[str, Any], limits: tuple[int, int]
) -> None:
    server = spec_of_file({"workload": "sharegpt", "device": "l40s", "policy": "v1", **given}).server
    assert (server.max_num_seqs, server.max_num_batched_tokens) == limits


def test_the_kv_cache_of_an_l40s_is_sized_with_its_own_limits() -> None:
    own = load_device("l40s", "qwen3-8b", vllm_version="0.12")
    other = load_device("l40s", "qwen3-8b", vllm_version="0.12", max_num_seqs=1024, max_num_batched_tokens=8192)
    assert own.kv_capacity_tokens > other.kv_capacity_tokens


def test_a_gpu_without_kernels_is_refused_unless_they_are_assumed() -> None:
    with pytest.raises(UsageError, match=r"not measured on l4, .*roofline.*`ebbench devices list`.*--assume-kernels"):
        load_device("l4", "qwen3-8b")
    assert next(row for row in device_rows() if row["name"] == "l4")["mixed_attention"] == "no kernels"
    assumed = load_device("l4", "qwen3-8b", assume_kernels=True)
    assert "roofline" in str(assumed.warnings[0])
    assert load_device("l4", "qwen3-8b", cost="roofline").cost == assumed.cost


def test_a_device_file_asks_for_a_roofline_by_the_rates_it_states(tmp_path: Path) -> None:
    text = (DATA / "profiles" / "l4.toml").read_text()
    (tmp_path / "mine.toml").write_text(text.replace('name = "l4"', 'name = "mine"'))
    assert "roofline" in str(load_device(str(tmp_path / "mine.toml"), "qwen3-8b").warnings[0])
