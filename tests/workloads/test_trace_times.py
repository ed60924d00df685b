"""The unit of a trace's times: the same trace in any unit gives the same plan or is refused, never at another rate."""

import datetime as dt
import json
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from ebbench.cli.main import app
from ebbench.errors import InputFileError, UnknownNameError, UsageError
from ebbench.workloads import build_plan
from ebbench.workloads.options import TIME_UNITS
from ebbench.workloads.recorded import (
    FEW_FRACTIONS,
    PLAUSIBLE_RATE,
    Stamp,
    StampColumn,
    Stamps,
    parse_stamp,
    read_time_unit,
    seconds_since_first,
)

EPOCH_MS = 1_715_299_200_000  # 10 May 2024


@st.composite
def recorded_ms(draw: st.DrawFn) -> list[int]:
    """Times of a serving trace in whole milliseconds from some moment of its first day, at a plausible mean rate."""
    gaps = draw(st.lists(st.integers(0, 60_000), min_size=1, max_size=40))
    times = np.cumsum([draw(st.integers(0, 86_400_000)), *gaps])
    span_s = (times[-1] - times[0]) / 1e3
    assume(span_s and PLAUSIBLE_RATE[0] <= len(gaps) / span_s < PLAUSIBLE_RATE[1])
    return [int(time) for time in times]


def written(times_ms: list[int], unit: str, *, epoch: bool, text: bool) -> list[Any]:
    """The times as a log in that unit writes them: whole where that is exact, else with a fraction."""
    values = [Decimal(time + (EPOCH_MS if epoch else 0)) * Decimal(TIME_UNITS[unit]) / 1000 for time in times_ms]
    plain = [int(value) if value == int(value) else float(value) for value in values]
    return [str(value) for value in plain] if text else plain


def fractions_of(times_ms: list[int]) -> float:
    return sum(time % 1000 > 0 for time in times_ms) / len(times_ms)


def iso(times_ms: list[int]) -> list[str]:
    return [(dt.datetime(2024, 5, 10) + dt.timedelta(milliseconds=time)).isoformat(sep=" ") for time in times_ms]


def collect_stamps(stamps: Sequence[Stamp]) -> Stamps:
    column = StampColumn()
    for stamp in stamps:
        column.append(stamp)
    return column.stamps()


def read(
    values: Sequence[Any], asked: str | None = None, whole_numbers_are: str | None = "ms"
) -> tuple[str, npt.NDArray[np.float64]]:
    stamps = collect_stamps([parse_stamp(value) for value in values])
    reading = read_time_unit(stamps, asked, whole_numbers_are=whole_numbers_are)
    return reading.unit, seconds_since_first(stamps, reading)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(
    times_ms=recorded_ms(), unit=st.sampled_from(list(TIME_UNITS)), epoch=st.booleans(), text=st.booleans(),
    whole_numbers_are=st.sampled_from(["ms", None]),
)  # fmt: skip
@example(times_ms=[1_500_000, 1_600_000], unit="us", epoch=False, text=False, whole_numbers_are="ms")
@example(times_ms=[0, 400, 2000], unit="s", epoch=False, text=False, whole_numbers_are="ms")
def test_every_unit_gives_the_same_times_or_is_refused(
    times_ms: list[int], unit: str, epoch: bool, text: bool, whole_numbers_are: str | None
) -> None:
    true_s = (np.array(times_ms) - times_ms[0]) / 1e3
    assume(unit != "s" or whole_numbers_are is None or not 0 < fractions_of(times_ms) <= FEW_FRACTIONS)
    values = written(times_ms, unit, epoch=epoch, text=text)
    assert read(values, asked=unit)[1] == pytest.approx(true_s, abs=1e-6)
    try:
        found, seconds = read(values, whole_numbers_are=whole_numbers_are)
    except UsageError:
        assert not epoch, "Unix times are known by their size"
        return
    assert found == unit
    assert seconds == pytest.approx(true_s, abs=1e-6)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(times_ms=recorded_ms())
def test_the_unit_of_times_is_recognised(times_ms: list[int]) -> None:
    true_s = (np.array(times_ms) - times_ms[0]) / 1e3
    assert read(times_ms)[0] == "ms"
    fractions = written(times_ms, "s", epoch=False, text=False)
    if any(isinstance(value, float) for value in fractions):
        assert read(fractions, whole_numbers_are=None)[0] == "s"
    assert read(iso(times_ms))[1] == pytest.approx(true_s, abs=1e-6)
    assert read(iso(times_ms))[0] == "iso"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([0, 1, 1, 2, 3, 3], r"whole numbers.*s: 1\.67 requests/s over 3 s; ms: 1,667 requests/s"),
        ([0, 400_000, 2_000_000], "us: 1 requests/s over 2 s"),
        ([0.0, 400.5, 2000.25, 12_000.5], r"numbers with fractions.*s: 0\.00025 requests/s"),
        ([0, 3_600_000], "ms: 0.000278 requests/s"),
    ],
)
def test_ambiguous_times_are_refused_with_their_readings(values: Sequence[Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read(values)


def test_one_moment_needs_no_unit() -> None:
    assert read([7, 7, 7])[1].tolist() == [0, 0, 0]
    assert read([1500])[1].tolist() == [0]


@pytest.mark.parametrize(
    "values", [["2024-05-10", 5], ["2024-05-10 00:00:01", "2024-05-10 00:00:02+00:00"]], ids=["kinds", "zones"]
)
def test_kinds_are_not_mixed(values: Sequence[Any]) -> None:
    with pytest.raises(ValueError, match="write all of them one way"):
        read(values)


@pytest.mark.parametrize("text", ["yesterday", "nan", "inf", ""])
def test_texts_that_are_not_times_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        parse_stamp(text)


def mooncake(path: Path, stamps: Sequence[object]) -> str:
    path.write_text(
        "".join(json.dumps({"timestamp": t, "input_length": 9 + i, "output_length": 3}) + "\n"
                for i, t in enumerate(stamps))
    )  # fmt: skip
    return f"trace:{path}"


def azure(path: Path, stamps: Sequence[object]) -> str:
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"{t},10,20\n" for t in stamps))
    return f"trace:{path}"


@pytest.mark.parametrize("write", [mooncake, azure])
def test_both_formats_give_one_plan_in_every_unit(
    tmp_path: Path, write: Callable[[Path, Sequence[object]], str]
) -> None:
    times_ms = [0, 400, 1250, 2000]
    plans = {
        "iso": build_plan(write(tmp_path / "iso", iso(times_ms))),
        "epoch ns": build_plan(write(tmp_path / "ns", written(times_ms, "ns", epoch=True, text=False))),
        "seconds": build_plan(write(tmp_path / "s", written(times_ms, "s", epoch=False, text=False))),
        "asked": build_plan(write(tmp_path / "us", [time * 1000 for time in times_ms]), time_unit="us"),
    }
    for name, plan in plans.items():
        assert plan.table["arrival_ns"].to_numpy() / 1e9 == pytest.approx([0, 0.4, 1.25, 2.0], abs=1e-6), name
        assert plan.facts["trace_requests_per_s"] == pytest.approx(1.5), name
        assert plan.facts["trace_span_s"] == pytest.approx(2.0), name
    assert [plan.facts["time_unit"] for plan in plans.values()] == ["iso", "ns", "s", "us"]


def test_a_csv_has_no_unit_for_whole_numbers(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"whole.csv: the unit .* --time-unit"):
        build_plan(azure(tmp_path / "whole.csv", [0, 400, 2000]))


def test_mixed_kinds_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match=r"mixed:2: some times are ISO"):
        build_plan(mooncake(tmp_path / "mixed", ["2024-05-10 00:00:00", 5]))
    with pytest.raises(InputFileError, match=r"none:1: timestamp 'noon' is neither"):
        build_plan(mooncake(tmp_path / "none", ["noon"]))


def test_a_unit_where_none_is_used_is_refused(tmp_path: Path) -> None:
    trace = mooncake(tmp_path / "t", [0, 1, 2, 3])
    for arguments in ({"workload": trace, "scenario": "saturated"}, {"workload": "balanced"}):
        with pytest.raises(UsageError, match="--time-unit is for recorded times"):
            build_plan(**arguments, time_unit="s")
    assert len(build_plan(trace, "saturated")) == 4  # lengths alone need no unit
    with pytest.raises(UnknownNameError, match="unknown time unit 'sec'"):
        build_plan(trace, time_unit="sec")
    with pytest.raises(UsageError, match="ISO 8601 text, which has no unit"):
        build_plan(mooncake(tmp_path / "iso", iso([0, 5])), time_unit="s")


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        app([*map(str, arguments)], standalone_mode=True)
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


@pytest.mark.parametrize(
    "command",
    [
        ("run", "--policy", "v1", "--device", "h200", "--model", "qwen3-8b", "--engine", "sim"),
        ("workloads", "show"),
        ("advise", "--policy", "v1", "--policy", "eb", "--seeds", "1", "--no-crossover"),
    ],
    ids=lambda command: command[0],
)
def test_commands_refuse_and_say(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    name, *options = command
    where = [name, *([options.pop(0)] if name == "workloads" else [])]
    trace = mooncake(tmp_path / "seconds.jsonl", [0, 1, 1, 2, 3, 3])
    code, out, err = call(capsys, *where, trace, *options)
    assert code == 2
    assert "seconds.jsonl: the unit" in err
    assert "--time-unit" in err
    code, out, err = call(capsys, *where, trace, *options, "--time-unit", "s")
    assert code == 0, err
    assert "6 requests over 3 s, 1.67 per second" in " ".join((out + err).split())


def test_a_sweep_refuses_before_its_first_cell(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    trace = mooncake(tmp_path / "seconds.jsonl", [0, 1, 1, 2, 3, 3])
    spec = tmp_path / "grid.toml"
    text = f'name = "units"\n[common]\nworkload = "{trace}"\n[grid]\npolicy = ["v1", "eb"]\n'
    spec.write_text(text)
    code, _, err = call(capsys, "sweep", spec, "--quiet")
    assert (code, "--time-unit" in err) == (2, True)
    spec.write_text(text.replace("[grid]", 'time_unit = "s"\n[grid]'))
    code, _, err = call(capsys, "sweep", spec, "--dry-run")
    assert (code, "1.67 per second" in err) == (0, True)


@pytest.mark.parametrize(
    ("values", "unit"),
    [
        ([*range(0, 600, 3), 600.5], "ms"),  # as seconds 0.33 requests/s, a thousandth
        ([*range(0, 20_000, 100), 20_000.25], "ms"),
        ([1.5 * i for i in range(20)], None),  # half of them whole: 0.7 requests/s or 700
        ([0.0371 * i for i in range(20)], "s"),  # 27 requests/s; as milliseconds 27,000
    ],
)
def test_fractions_do_not_change_the_unit_of_a_format(values: Sequence[Any], unit: str | None) -> None:
    if unit is None:
        with pytest.raises(UsageError, match="--time-unit"):
            read(values)
    else:
        assert read(values)[0] == unit


def test_few_fractions_say_what_the_other_unit_would_give() -> None:
    stamps = collect_stamps([parse_stamp(value) for value in [*range(0, 600, 3), 600.5]])
    reading = read_time_unit(stamps, whole_numbers_are="ms")
    assert (reading.unit, "--time-unit s would make it 0.333 per second" in reading.reason) == ("ms", True)
