"""Which caveats are of the device, and how those of several runs are said once."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

import ebbench
from ebbench.analysis.validity import by_settings, of_device, told_once
from ebbench.records.warnings import RunWarning, _texts, warning

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
    assert tuple(map(str, of_device(engine, WARNINGS))) == found


def told(said: Sequence[Sequence[str | RunWarning]], runs: Sequence[Mapping[str, str]] = CELLS) -> list[str]:
    warnings = [[RunWarning("", message=text) if isinstance(text, str) else text for text in texts] for texts in said]
    return told_once(warnings, by_settings(runs, lambda name, values: f"{name}={values}", "cells"))


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


def unfitted(device: str, step_ms: float) -> RunWarning:
    return warning("host-unfitted", device=device, step_s=step_ms / 1e3, sequence_s=5e-6)


def test_numbers_are_merged_into_a_range_but_not_those_in_names() -> None:
    ranged = told([[unfitted("h200", step_ms)] for step_ms in (3, 2, 2.5)], CELLS[:3])
    assert ranged == ["the host's time per step on h200 was never fitted: 2 to 3 ms and 5 us per sequence are taken"]
    names = told([[unfitted(device, 2)] for device in ("h100", "h200")], [CELLS[2], CELLS[4]])
    assert [line.partition(" was ")[0] for line in names] == [
        "device=h100: the host's time per step on h100",
        "device=h200: the host's time per step on h200",
    ]


def test_numbers_that_look_alike_are_no_range() -> None:
    shares = [[warning("short-steady-window", share=share, option="log", asked=9)] for share in (0.412, 0.414)]
    (line,) = told(shares, CELLS[:2])
    assert line.startswith("Only 41 % of the run is steady")


def test_nested_numbers_have_ranges_and_other_keys_are_another_caveat() -> None:
    slower = [
        warning("fewer-gpus-faster", device="l40s", gpus=gpus, fewer=gpus // 2, times=times)
        for gpus, times in ((4, {"decodes": 1.25}), (8, {"decodes": 1.5}), (8, {"prompts": 1.1}))
    ]
    both, prompts = told([[each] for each in slower], CELLS[:3])
    assert "some steps take longer on 4 to 8 l40s than on 2 to 4" in both
    assert "decodes 1.25 to 1.50 times" in both
    assert "prompts 1.10 times" in prompts


def test_every_caveat_that_the_code_names_has_a_sentence() -> None:
    sources = [path.read_text(encoding="utf-8") for path in Path(ebbench.__file__).parent.rglob("*.py")]
    named = {code for text in sources for code in re.findall(r'\bwarning\(\s*"([a-z0-9-]+)"', text)}
    sentences, ways_out = _texts()
    assert "cut-off" in named
    assert named | ways_out.keys() <= sentences.keys()
