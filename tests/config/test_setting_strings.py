"""Every ``kind:key=value`` string goes through one reader: same spellings, same refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ebbench.analysis.metrics import parse_slo
from ebbench.analysis.units import parse_margins
from ebbench.config.declare import (
    check_ranges,
    declare,
    named_settings,
    parse_values,
    setting,
    settings_of,
    split_kind,
)
from ebbench.config.topology import parse_topology
from ebbench.dispatch import parse_dispatch
from ebbench.errors import UnknownNameError, UsageError
from ebbench.fakeserver import parse_fault
from ebbench.sizing.limits import parse_limits
from ebbench.sizing.prices import parse_prices
from vllm_eb.policy import parse_policy
from vllm_eb.settings import GivenValueError

READERS: dict[str, Callable[[str], object]] = {
    "policy": parse_policy,
    "dispatch": parse_dispatch,
    "fault": parse_fault,
    "topology": parse_topology,
    "goodput": lambda text: parse_slo([text]),
    "limits": lambda text: parse_limits([text], 0.95),
    "margin": lambda text: parse_margins([text]),
    "price": lambda text: parse_prices([text]),
}


@dataclass(frozen=True)
class Made:
    """One setting of each type."""

    count: int = setting(1, "a count", unit="requests", at_least=1)
    share: float = setting(0.5, "a share", unit="share", above=0, below=1)
    wait_s: float | None = setting(None, "a time", unit="s", at_least=0, none="off", example=2)
    flag: bool = setting(False, "a switch")
    form: Literal["round", "square"] = setting("round", "a word")
    inner: tuple[int, ...] = ()  # no setting: not to be written


KNOWN = settings_of(Made)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "count": st.integers(1, 10**9),
            "share": st.floats(0.001, 0.999),
            "wait_s": st.none() | st.floats(0, 1e9),
            "flag": st.booleans(),
            "form": st.sampled_from(["round", "square"]),
        },
    ),
    st.sampled_from([",", " ", ", ", " , "]),
)
def test_settings_written_as_text_are_read_back(values: dict[str, object], between: str) -> None:
    def word(value: object) -> str:
        return "off" if value is None else str(value)

    text = between.join(f"{key}={word(value)}" for key, value in values.items())
    assert named_settings(text, KNOWN, "made") == values
    assert Made(**named_settings(text, KNOWN, "made")) == Made(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("cuont=2", "unknown setting of made 'cuont'; did you mean 'count'?"),
        ("inner=2", "known: count, flag, form, share, wait_s"),
        ("count=0", "made: 'count=0' is not valid; write a whole number of at least 1 (requests)"),
        ("count=2.5", "whole number"),
        ("count", "'count=' is not valid"),
        ("share=1", "strictly between 0 and 1 (share)"),
        ("share=nan", "strictly between 0 and 1 (share)"),
        ("wait_s=-1", "a number of at least 0 (seconds), or off, e.g. wait_s=2"),
        ("wait_s=inf", "seconds"),
        ("flag=maybe", "on or off"),
        ("form=oval", "one of round, square"),
        ("count=1,count=2", "count is given twice"),
    ],
)
def test_a_refused_setting_is_named_with_its_unit_and_range(text: str, says: str) -> None:
    with pytest.raises(UsageError) as refused:
        named_settings(text, KNOWN, "made")
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


# What users have written before there was one reader.
@pytest.mark.parametrize(
    ("reader", "text", "same"),
    [
        ("policy", "eb:kv_gate=TRUE", "eb:kv_gate=1"),
        ("policy", " eb:theta=.5, kv_gate=off ", "eb:theta=0.5,kv_gate=0"),
        ("policy", "deferred:k=+3", "deferred:k=3"),
        ("policy", "eb:", "eb"),
        ("dispatch", "sbs:packing=true", "sbs:packing=on"),
        ("dispatch", "iqr:multiplier=inf", "iqr:multiplier=1e999"),
        ("dispatch", "sbs:patience=off,", "sbs:patience=off"),
        ("fault", "stall:after=-1", "stall:after=-1,"),
        ("topology", "2P2D, tp=2", "2p2d,tp=2"),
        ("topology", "replicas=4", "dp=4"),
        ("goodput", "ttft:500,tpot:50 e2el:5e3", "ttft:500 tpot:50 e2el:5000"),
        ("limits", "ttft:p99:2000,tpot:50", "ttft:p99.0:2e3 tpot:50"),
        ("margin", "ttft:10, tpot:2", "tpot:2 ttft:10.0"),
        ("price", "h200 = 3.5", "h200=3.50"),
    ],
)
def test_spellings_that_were_accepted_still_are(reader: str, text: str, same: str) -> None:
    assert READERS[reader](text) == READERS[reader](same)


@pytest.mark.parametrize(
    ("reader", "text", "nearest"),
    [
        ("policy", "ebb", "eb"),
        ("policy", "eb:tetha=0.5", "theta"),
        ("dispatch", "round-robbin", "round-robin"),
        ("dispatch", "sbs:paking=off", "packing"),
        ("fault", "resett", "reset"),
        ("fault", "reset:evry=3", "every"),
        ("topology", "tpp=4", "tp"),
        ("goodput", "tftt:500", "ttft"),
        ("limits", "tftt:p99:500", "ttft"),
        ("margin", "tpto:3", "tpot"),
    ],
)
def test_a_mistyped_name_is_refused_in_one_line_with_the_nearest(reader: str, text: str, nearest: str) -> None:
    with pytest.raises((UnknownNameError, GivenValueError)) as refused:
        READERS[reader](text)
    assert f"did you mean {nearest!r}?" in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("reader", READERS)
@given(st.text(max_size=30))
@example(".")  # a module name of no parts
def test_any_text_is_read_or_refused_in_one_line(reader: str, text: str) -> None:
    refusal = None
    try:
        READERS[reader](text)
    except (UsageError, GivenValueError) as error:
        refusal = str(error)
    assert refusal is None or (refusal and len(refusal.splitlines()) == 1)


@pytest.mark.parametrize("text", ["32,128", " 32, 128 ", "32 128,"])
def test_an_option_may_take_several_values(text: str) -> None:
    assert parse_values("--tokens", text, KNOWN["count"]) == (32, 128)
    with pytest.raises(UsageError, match="--tokens: 'x' is not valid; write a whole number of at least 1"):
        parse_values("--tokens", f"{text} x", KNOWN["count"])


@dataclass(frozen=True)
class Given:
    """Fields of options."""

    wait_s: float | None = declare(1.0, above=0)
    drain_s: float = declare(1.0, at_least=0)
    workers: int = declare(1, at_least=1)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (Given(wait_s=0), "--wait must be above 0, not 0"),
        (Given(drain_s=math.nan), "--drain must be a finite number, not nan"),
        (Given(workers=0), "--workers must be at least 1, not 0"),
    ],
)
def test_a_field_out_of_range_is_refused_under_the_name_of_its_option(given: Given, says: str) -> None:
    check_ranges(Given(wait_s=None))
    with pytest.raises(UsageError, match=says):
        check_ranges(given)


def test_a_kind_is_what_stands_before_the_first_colon() -> None:
    assert split_kind(" sbs:packing=off,window=3") == ("sbs", "packing=off,window=3")
    assert split_kind("v1") == ("v1", "")
