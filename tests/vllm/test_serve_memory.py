"""``ebbench serve`` with too little memory for the KV cache, on a real vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm.whole_command import ebbench

pytestmark = pytest.mark.vllm


def test_a_server_without_memory_for_its_kv_cache_says_what_to_do(small_model_folder: Path) -> None:
    options = ["--enforce-eager", "--max-model-len", "2048", "--kv-cache-memory-bytes", "4096"]
    done = ebbench("serve", small_model_folder, "--policy", "v1", "--port", 8124, "--", *options)
    assert done.returncode == 4
    assert "Traceback" in done.stderr  # what vLLM prints is shown, and the remedy after it
    remedy = done.stderr.strip().splitlines()[-1]
    assert "no memory is left for the KV cache" in remedy
    assert "VLLM_CPU_KVCACHE_SPACE=4" in remedy
