"""What is refused before a run because it can never fit, and what is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ebbench.devices import load_device
from ebbench.engines.base import EngineOptions
from ebbench.engines.checks import check_fits
from ebbench.engines.setup import unknown_device
from ebbench.errors import UsageError
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
