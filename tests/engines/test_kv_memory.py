"""What vLLM prints when memory is missing at its start tells what to do."""

from __future__ import annotations

import pytest

from ebbench.engines.vllm_server import memory_remedy

PREFIX = "(EngineCore pid=22169) ValueError: "


@pytest.mark.parametrize(
    ("printed", "words"),
    [
        (
            "To serve at least one request with the model's max seq len (40960), (5.63 GiB KV cache is needed, which "
            "is larger than the available KV cache memory (4.0 GiB). Based on the available memory, the estimated "
            "maximum model length is 29120. Try increasing `gpu_memory_utilization`",
            (
                "40960",
                "--max-model-len TOKENS of at most 29120",
                "VLLM_CPU_KVCACHE_SPACE=6",
                "--gpu-memory-utilization",
            ),
        ),
        (
            "To serve at least one request with the model's max seq len (40960), (0.4 GiB KV cache is needed, which "
            "is larger than the available KV cache memory (0.1 GiB). Try increasing `gpu_memory_utilization`",
            ("--max-model-len TOKENS to vLLM", "VLLM_CPU_KVCACHE_SPACE=1"),
        ),
        ("No available memory for the cache blocks. Try increasing", ("VLLM_CPU_KVCACHE_SPACE=4",)),
        (
            "Available memory on node 0 (9.1/23.4 GiB) on startup is less than desired CPU memory utilization (0.9, "
            "21.06 GiB).",
            ("the 9.1 GiB that are free", "VLLM_CPU_KVCACHE_SPACE=4"),
        ),
        (
            "Available memory on node 0 (1.2/23.4 GiB) on kv cache allocation is less than requested memory for kv "
            "(4.0 GiB). Decrease",
            ("the 1.2 GiB that are free", "VLLM_CPU_KVCACHE_SPACE=1"),
        ),
    ],
    ids=["too small", "too small for any length", "none left", "not free", "not free any more"],
)
def test_the_remedy_names_options_with_values(printed: str, words: tuple[str, ...]) -> None:
    remedy = memory_remedy(f"Traceback\n  raise ValueError(\n{PREFIX}{printed}\nRuntimeError: Engine core failed\n")
    assert remedy is not None
    assert "\n" not in remedy
    for word in words:
        assert word in remedy


def test_other_failures_have_no_remedy() -> None:
    assert memory_remedy("ValueError: Unknown model architecture; GPU KV cache size: 4,194,176 tokens") is None
