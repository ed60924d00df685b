"""Limits as users write them."""

from __future__ import annotations

import pytest

from ebbench.errors import UsageError
from ebbench.sizing.limits import parse_limits


def test_joint_limits_and_percentiles_become_requirements() -> None:
    limits = parse_limits(["ttft:2000 tpot:50", "ttft:p99:4000"], 0.9)
    assert [(each.name, each.share) for each in limits.requirements()] == [("ttft tpot", 0.9), ("ttft", 0.99)]
    assert [each.slo.limits() for each in limits.requirements()] == [{"ttft": 2000, "tpot": 50}, {"ttft": 4000}]


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
        (["tpot:p99:50 tpot:p99:50"], 0.95, "tpot:p99:50 is given twice; give it once"),
        (["ttft:p99:500", "ttft:p99:600"], 0.95, "where ttft:p99:500 is met, ttft:p99:600 is met too; leave one"),
        (["ttft:p99.0:600,ttft:p99:500"], 0.95, "where ttft:p99:500 is met, ttft:p99:600 is met too"),
        (["e2el:p50:600 e2el:p99:500"], 0.95, "where e2el:p99:500 is met, e2el:p50:600 is met too"),
        (["ttft:500 tpot:50", "ttft:p95:500"], 0.95, "where ttft:p95:500 is met, ttft:500 is met too"),
        (["ttft:500 tpot:50 ttft:p90:700"], 0.95, "where ttft:500 is met, ttft:p90:700 is met too"),
    ],
)
def test_wrong_limits_are_refused_with_the_reason(texts: list[str], attainment: float, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_limits(texts, attainment)


def test_limits_that_all_decide_are_taken() -> None:
    limits = parse_limits(["ttft:500 tpot:50", "ttft:p50:100", "ttft:p99:900", "tpot:p99:80"], 0.95)
    assert str(limits) == "ttft:500 tpot:50 for 95 % of the requests, ttft:p50:100, ttft:p99:900, tpot:p99:80"
