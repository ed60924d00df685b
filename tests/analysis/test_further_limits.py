"""Limits of the scheduler that were set are shown with a run; those that were not are left out."""

from __future__ import annotations

import pytest

from ebbench.analysis.environment import Machine, _further_limits


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, ""),
        ({"max_num_active_seqs": None, "long_prefill_token_threshold": 0, "scheduler_reserve_full_isl": True}, ""),
        ({"max_num_active_seqs": 64}, "at most 64 running"),
        (
            {"long_prefill_token_threshold": 512, "long_prefill_token_threshold_adaptive": True},
            "512 tokens of one prompt per step, adaptive",
        ),
        (
            {"max_num_queued_tokens": 16384, "scheduler_reserve_full_isl": False},
            "refuses from 16,384 queued prompt tokens on, admits by the first chunk",
        ),
    ],
)
def test_further_limits_in_words(options: dict[str, object], words: str) -> None:
    found = _further_limits(options)
    assert found == words
    shown = Machine(max_num_batched_tokens=8192, max_num_seqs=256, further=found).limits()
    assert shown == "B = 8,192 tokens per step, N = 256 sequences" + (f", {words}" if words else "")
