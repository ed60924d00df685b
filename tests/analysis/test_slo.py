"""Parsing of --goodput."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbench.analysis.slo import Slo, parse_slo, slo_from_limits
from ebbench.errors import UsageError

LIMITS = st.none() | st.floats(1e-3, 1e6)


@given(st.builds(Slo, LIMITS, LIMITS, LIMITS))
def test_limits_round_trip(slo: Slo) -> None:
    assert slo_from_limits(slo.limits()) == slo
    assert bool(slo) == bool(slo.limits())
    assert parse_slo(f"{name}:{value!r}" for name, value in slo.limits().items()) == slo


def test_pairs_may_share_a_text() -> None:
    assert parse_slo(["ttft:500,tpot:50 e2el:5e3"]) == Slo(500, 50, 5000)
    assert not parse_slo([])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ttfT:5", "unknown metric 'ttfT'; did you mean ttft?"),
        ("xyz:5", "write one of ttft, tpot, e2el"),
        ("ttft", "needs a limit in milliseconds, e.g. ttft:500"),
        ("ttft:", "needs a limit"),
        ("ttft:fast", "needs a limit"),
        ("ttft:-1", "needs a limit"),
        ("ttft:nan", "needs a limit"),
        ("ttft:inf", "needs a limit"),
        ("ttft:1 ttft:2", "ttft is given twice"),
    ],
)
def test_what_is_wrong_is_said(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message.replace("?", r"\?")):
        parse_slo([text])
