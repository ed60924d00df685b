"""Parsing of --goodput."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbench.analysis.metrics import Slo, parse_slo, slo_from_limits
from ebbench.errors import UsageError

LIMITS = st.none() | st.floats(1e-3, 1e6)


@given(st.builds(Slo, LIMITS, LIMITS, LIMITS))
def test_limits_round_trip(slo: Slo) -> None:
    assert slo_from_limits(slo.limits()) == slo
    assert bool(slo) == bool(slo.limits())
    assert parse_slo(f"{name}:{value!r}" for name, value in slo.limits().items()) == slo


def test_several_limits_may_share_a_text() -> None:
    assert parse_slo(["ttft:500,tpot:50 e2el:5e3"]) == Slo(500, 50, 5000)
    assert not parse_slo([])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ttfT:5", "'ttfT'; did you mean 'ttft'?"),
        ("xyz:5", "known: e2el, tpot, ttfat, ttft"),
        ("ttft", "a number above 0 (milliseconds), e.g. ttft:500"),
        ("ttft:", "above 0 (milliseconds)"),
        ("ttft:fast", "above 0 (milliseconds)"),
        ("ttft:-1", "above 0 (milliseconds)"),
        ("ttft:nan", "above 0 (milliseconds)"),
        ("ttft:inf", "above 0 (milliseconds)"),
        ("ttft:1 ttft:2", "ttft is given twice"),
        ("tpot:9 ttft:p99:500", "ttft:p99:500 limits a percentile, which only capacity and plan do"),
    ],
)
def test_an_slo_that_cannot_be_parsed_is_refused_with_the_reason(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        parse_slo([text])
