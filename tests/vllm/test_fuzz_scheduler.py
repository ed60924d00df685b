"""Random scenes through the real scheduler under every policy; thousands of them: ``make fuzz``."""

from __future__ import annotations

import pytest

from tests.vllm.scenes import DRAWN, FUZZED, ours

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SCENES = {**dict.fromkeys(FUZZED, 6), **dict.fromkeys(DRAWN, 6)}  # 120 in all; 1,000 in `make nightly`


@pytest.mark.parametrize("policy", SCENES)
def test_invariants_hold_after_every_step_of_random_scenes(policy: str) -> None:
    wrong = {seed: found for seed in range(SCENES[policy]) if (found := ours(policy, seed))}
    assert wrong == {}
