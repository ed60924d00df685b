"""Limits as users write them."""

from __future__ import annotations

import pytest

from ebbench.capacity.limits import parse_limits
from ebbench.errors import UsageError


def test_joint_limits_and_percentiles_become_requirements() -> None:
    limits = parse_limits(["ttft:2000 tpot:50", "ttft:p99:4000"], 0.9)
    assert [(each.name, each.share) for each in limits.requirements()] == [("ttft tpot", 0.9), ("ttft", 0.99)]
    assert [slo.limits() for slo in limits.slos()] == [{"ttft": 2000, "tpot": 50}, {"ttft": 4000}]


@pytest.mark.parametrize(
    ("texts", "attainment", "words"),
    [
        ([], 0.95, "latency limits are missing: give --goodput"),
        (["ttft:2000"], 1.0, "between 0 and 1"),
        (["ttft:2000"], 0.0, "between 0 and 1"),
        (["ttf:p99:2000"], 0.95, "did you mean 'ttft'"),
        (["ttft:99:2000"], 0.95, "percentile"),
        (["ttft:p100:2000"], 0.95, "percentile"),
        (["ttft:pnan:2000"], 0.95, "percentile"),
        (["ttft:p99:-5"], 0.95, "milliseconds"),
        (["ttft:p99:inf"], 0.95, "milliseconds"),
        (["tpot:p99:50 tpot:p99:50"], 0.95, "twice"),
    ],
)
def test_wrong_limits_are_refused_with_the_reason(texts: list[str], attainment: float, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_limits(texts, attainment)
