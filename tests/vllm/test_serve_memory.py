"""``ebbench serve`` with too little memory for the KV cache, on a real vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm.whole_command import ebbench

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("forking")]


def test_a_server_without_memory_for_one_request_says_what_to_do(small_model_folder: Path) -> None:
    options = ["--enforce-eager", "--max-model-len", "2048", "--kv-cache-memory-bytes", "100000"]
    done = ebbench("serve", small_model_folder, "--policy", "v1", "--port", 0, "--", *options)
    assert done.returncode == 4
    assert "Traceback" in done.stderr  # what vLLM prints is shown, and the remedy after it
    remedy = done.stderr.strip().splitlines()[-1]
    assert "one request of 2048 tokens" in remedy
    assert "--max-model-len TOKENS" in remedy
    assert "VLLM_CPU_KVCACHE_SPACE=1" in remedy
