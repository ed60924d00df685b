"""Which caveats are of the device, and how those of several runs are said once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from ebbench.analysis.validity import by_settings, of_device, told_once
from ebbench.records.warnings import RunWarning

WARNINGS = (
    RunWarning("plan", message="lengths are made up"),
    RunWarning("device", message="a roofline"),
    RunWarning("engine", message="images take no time"),
    RunWarning("few-requests", message="too few.", remedy="Use more."),
)
CELLS = [{"device": device, "dtype": dtype} for device in ("a100", "h100", "h200") for dtype in ("auto", "fp8")]


@pytest.mark.parametrize(
    ("engine", "found"),
    [("sim", ("a roofline", "images take no time")), ("emulated", ("a roofline", "images take no time")),
     ("vllm", ("a roofline",)), ("endpoint", ("a roofline",))],
)  # fmt: skip
def test_caveats_are_of_a_simulated_device_or_of_a_real_client(engine: str, found: tuple[str, ...]) -> None:
    assert of_device(engine, WARNINGS) == found


def told(said: Sequence[Sequence[str]], runs: Sequence[Mapping[str, str]] = CELLS) -> list[str]:
    return told_once(said, by_settings(runs, lambda name, values: f"{name}={values}", "cells"))


@pytest.mark.parametrize(
    ("places", "owner"),
    [
        ((0, 1, 2, 3, 4, 5), ""),
        ((0, 1), "device=a100: "),
        ((3, 5), "device=h100 or h200, dtype=fp8: "),
        ((1, 3, 5), "dtype=fp8: "),
        ((0, 1, 3), "3 of 6 cells: "),  # no choice of a device and a type has exactly these
        ((0, 3), "2 of 6 cells: "),
        ((0, 1, 2, 4), "4 of 6 cells: "),  # every device and both types, but not all of them
    ],
)
def test_a_caveat_is_said_once_of_the_settings_that_have_it(places: tuple[int, ...], owner: str) -> None:
    assert told([["odd"] if place in places else [] for place in range(6)]) == [f"{owner}odd"]


def test_settings_that_go_without_saying_are_not_named() -> None:
    pairs = [{"device": "a100", "model": "small"}, {"device": "h200", "model": "large"}]
    assert told([["odd"], []], pairs) == ["device=a100: odd"]


def test_numbers_are_merged_into_a_range_but_not_those_in_names() -> None:
    sizes = ["it holds 1,024 tokens", "it holds 512 tokens", "it holds 2,048.5 tokens"]
    assert told([[text] for text in sizes], CELLS[:3]) == ["it holds 512 to 2,048.5 tokens"]
    names = ["never fitted on h100, 2 ms", "never fitted on h200, 2 ms"]
    assert told([[text] for text in names], [CELLS[2], CELLS[4]]) == [
        "device=h100: never fitted on h100, 2 ms",
        "device=h200: never fitted on h200, 2 ms",
    ]
