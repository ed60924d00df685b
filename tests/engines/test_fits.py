"""What is refused before a run because it can never fit, and what is not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ebbench.cli.main import app
from ebbench.devices.loader import load_device
from ebbench.engines.base import check_fits
from ebbench.engines.setup import unknown_device
from ebbench.errors import UsageError
from ebbench.records.run import Run
from ebbench.spec.server import EngineOptions
from ebbench.workloads import build_plan

PLAN = build_plan("balanced", seed=0, num_prompts=20, input_len=600, output_len=100)


def test_hardware_whose_memory_is_unknown_is_not_refused() -> None:
    """On a CPU, or a GPU without a profile, vLLM itself checks what fits."""
    unknown = unknown_device("CPU", "a-model")
    check_fits(PLAN, unknown, EngineOptions())  # does not raise
    with pytest.raises(UsageError, match="max-model-len"):  # as it would where the memory is known and too small
        check_fits(PLAN, replace(unknown, kv_capacity_tokens=64), EngineOptions())


def test_known_memory_and_lengths_are_checked() -> None:
    device = load_device("h200", "qwen3-8b")
    check_fits(PLAN, device, EngineOptions())
    with pytest.raises(UsageError, match="num-kv-blocks"):
        check_fits(PLAN, device, EngineOptions(num_kv_blocks=4))
    with pytest.raises(UsageError, match="num-kv-blocks"):
        check_fits(PLAN, unknown_device("CPU", "a-model"), EngineOptions(num_kv_blocks=4))
    with pytest.raises(UsageError, match="max-model-len"):
        check_fits(PLAN, unknown_device("CPU", "a-model"), EngineOptions(max_model_len=100))


def test_a_server_without_a_limit_takes_as_many_tokens_as_positions() -> None:
    plan = build_plan("balanced", seed=0, num_prompts=5, input_len=33_000, output_len=100)
    device = load_device("h200", "mistral-7b")
    assert device.geometry is not None
    assert device.geometry.positions == 32_768
    with pytest.raises(UsageError, match=r"32,768 positions of mistral-7b.*--drop-too-long with --max-model-len 32768"):
        check_fits(plan, device, EngineOptions())
    check_fits(plan, device, EngineOptions(max_model_len=38_000))  # a caveat says that vLLM has to be told so
    check_fits(plan, load_device("h200", "qwen3-8b"), EngineOptions())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "a request of --max-model-len 40,960 tokens, and qwen3-32b on h100 holds 38,"),
        (("--max-model-len", "32768"), ""),
        (("--topology", "tp=2"), ""),
        (("--topology", "tp=2", "--max-model-len", "65536"), "65,536 is more than the 40,960 positions of qwen3-32b"),
        (("--num-kv-blocks", "1000"), ""),
    ],
)
def test_a_server_that_would_not_start_is_a_caveat(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    """vLLM wants room in its KV cache for one request of the greatest length, sent or not."""
    args = ["run", "sharegpt", "--source", "profile", "-n", "20", "-c", "4", "--policy", "v1", "-q", "--max-num-seqs"]
    args += ["64", "--device", "h100", "--model", "qwen3-32b", "-o", str(tmp_path / "run"), *words]
    assert CliRunner().invoke(app, args).exit_code == 0
    warnings = [str(each) for each in Run.load(tmp_path / "run").manifest.warnings]
    found = [text for text in warnings if "would not start" in text]
    assert len(found) == bool(said)
    assert all(said in text for text in found)


def test_a_caveat_is_said_once(tmp_path: Path) -> None:
    """The device has it, and the engine has it of its units."""
    args = ["run", "sharegpt", "--source", "profile", "-n", "20", "-c", "4", "--policy", "v1", "-q"]
    args += ["--device", "l40s", "--topology", "tp=2", "--no-async-scheduling", "-o", str(tmp_path / "run")]
    assert CliRunner().invoke(app, args).exit_code == 0
    said = [str(each) for each in Run.load(tmp_path / "run").manifest.warnings]
    assert len([text for text in said if "never fitted" in text]) == 1
    assert len(said) == len(set(said))
