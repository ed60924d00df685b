"""Random scenes through the real scheduler under every policy; thousands of them: ``make fuzz``."""

from __future__ import annotations

import pytest

from tests.vllm.scenes import FUZZED, ours

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SCENES = 25


@pytest.mark.parametrize("policy", FUZZED)
def test_what_must_hold_holds_after_every_step_of_random_scenes(policy: str) -> None:
    wrong = {seed: found for seed in range(SCENES) if (found := ours(policy, seed))}
    assert wrong == {}
