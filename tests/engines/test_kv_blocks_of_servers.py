"""A number of KV blocks means the same tokens on every build of vLLM."""

from __future__ import annotations

import pytest

from ebbench.engines import vllm_command
from ebbench.spec.server import EngineOptions


@pytest.mark.parametrize(
    ("cpu", "given"),
    [
        (False, ["--num-gpu-blocks-override", "2001"]),
        (True, ["--block-size", "32", "--num-gpu-blocks-override", "1001"]),
    ],
)
def test_blocks_of_the_cpu_build_are_larger_and_fewer(
    monkeypatch: pytest.MonkeyPatch, cpu: bool, given: list[str]
) -> None:
    monkeypatch.setattr(vllm_command, "cpu_build", lambda: cpu)
    arguments = vllm_command._option_arguments(EngineOptions(num_kv_blocks=2000, block_size=16), emulated=False)
    assert arguments[-len(given) :] == given
    assert ("--block-size" in arguments) is cpu
