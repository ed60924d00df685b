"""Calibration: shapes of the probes, recovery of known step times, and the profile used as a device."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pytest
from typer.testing import CliRunner

from ebbench.calibration.measure import ProbeGrid, calibrate, cost_grid, fit, probe_plan, r_squared, step_medians
from ebbench.cli.main import app
from ebbench.devices.base import StepShape
from ebbench.devices.gridcost import GridCost, measured_calibration
from ebbench.devices.loader import load_device
from ebbench.engines.sim import SimEngine
from ebbench.errors import DataError, EbbenchError, InputFileError, UnknownNameError, UsageError
from ebbench.records.schema import STEPS
from vllm_eb.calibration import CostGrid

GRID = ProbeGrid((64, 256, 1024), (2, 16, 64), (64, 512), repeats=4)


def test_measured_times_are_those_of_the_device() -> None:
    """On the simulator a probe's step is known exactly: decodes up to the drift of their context."""
    device = load_device("h200", "qwen3-8b", max_num_seqs=65)
    measured = calibrate(SimEngine(), device, GRID, "test")
    grid = measured.calibration.grid
    assert grid is not None
    for x, seconds in zip(GRID.tokens, grid.prefill, strict=True):
        assert seconds == pytest.approx(device.cost.step_s(StepShape(((x, 0),), 0, 0, 1)), rel=0.02)
    for n, row in zip(GRID.seqs, grid.decode, strict=True):
        for c, seconds in zip(GRID.contexts, row, strict=True):
            assert seconds == pytest.approx(device.cost.step_s(StepShape((), n, n * c, n)), rel=0.05)
    for x, rows in zip(GRID.tokens, grid.mixed, strict=True):
        for n, row in zip(GRID.seqs, rows, strict=True):
            for c, seconds in zip(GRID.contexts, row, strict=True):
                exact = device.cost.step_s(StepShape(((x, 0),), n, n * c, n + 1))
                assert seconds == pytest.approx(exact, rel=0.05)
    assert measured.prefill_r2 > 0.95


def test_every_probe_drains_before_the_next() -> None:
    plan, shapes = probe_plan(GRID)
    assert len(shapes) == len(plan) == sum(phase.sessions for phase in plan.phases)
    kinds = [next(shapes[r] for r, p in _members(plan) if p == phase.name) for phase in plan.phases]
    for before, after in pairwise(kinds):
        assert before[1] == 0 or after == (0, 0, 0)  # a single request follows the decodes


def _members(plan):  # type: ignore[no-untyped-def]
    return zip(plan.table["request_id"].to_pylist(), plan.table["phase"].to_pylist(), strict=True)


def step(start_ms: float, end_ms: float, ids: list[str], tokens: int, decodes: int) -> dict[str, object]:
    row = dict.fromkeys(STEPS.names)
    row |= {"start_ns": int(start_ms * 1e6), "end_ns": int(end_ms * 1e6), "request_ids": ids}
    row |= {"prefill_tokens": tokens, "decode_seqs": decodes}
    for field in STEPS:
        if row[field.name] is None and not field.nullable:
            row[field.name] = [] if pa.types.is_list(field.type) else "x" if pa.types.is_string(field.type) else 0
    return row


def test_host_time_between_steps_counts_and_other_shapes_do_not() -> None:
    shapes = {"a": (0, 2, 8), "b": (0, 2, 8), "p": (16, 0, 0), "q": (32, 0, 0)}
    rows = [
        step(0, 10, ["p"], 16, 0),
        step(20, 30, ["a", "b"], 8, 1),  # still filling
        step(31, 41, ["a", "b"], 0, 2),  # 11 ms after the last end
        step(43, 53, ["a", "b"], 0, 2),  # 12
        step(54, 64, ["a", "b"], 0, 2),  # 11
        step(90, 91, ["a", "p"], 0, 2),  # two probes in one step: not counted
    ]
    found = step_medians(pa.Table.from_pylist(rows, schema=STEPS), shapes)
    assert found == pytest.approx({(0, 2, 8): 0.011, (16, 0, 0): 0.011})


def test_a_point_that_was_never_measured_is_named() -> None:
    with pytest.raises(DataError, match="no step of 64 prompt tokens and 0 decodes"):
        cost_grid(GRID, {})


def linear_machine(
    tokens: tuple[int, ...], seqs: tuple[int, ...], decode_s: float, mixed_s: float, a: float, b: float
) -> CostGrid:
    """2 ms + 50 us per prompt token; ``decode_s`` + 0.1 ms per sequence; ``mixed_s`` + (a + b r) per token if mixed."""
    return CostGrid(
        tokens, seqs, (50, 100),
        tuple(2e-3 + 5e-5 * x for x in tokens),
        tuple((decode_s + 1e-4 * n,) * 2 for n in seqs),
        tuple(tuple((mixed_s + (a + b * (n / (n + x))) * (n + x),) * 2 for n in seqs) for x in tokens),
    )  # fmt: skip


def test_linear_fit_recovers_a_linear_machine() -> None:
    grid = linear_machine((100, 200, 400), (10, 20, 40), decode_s=8e-3, mixed_s=2e-3, a=6e-5, b=1e-4)
    measured = fit(grid, "made up", 1)
    cal = measured.calibration
    assert (cal.alpha_p, cal.beta_p) == pytest.approx((2e-3, 5e-5))
    assert (cal.alpha_d, cal.beta_d) == pytest.approx((8e-3, 1e-4))
    assert cal.mixed is not None
    assert (cal.mixed.a, cal.mixed.b, cal.mixed.c) == pytest.approx((6e-5, 1e-4, 0.0), abs=1e-9)
    assert (measured.prefill_r2, measured.decode_r2, measured.mixed_r2) == pytest.approx((1.0, 1.0, 1.0))


def test_r_squared_of_perfect_and_flat_fits() -> None:
    assert r_squared([1, 2, 3], [1, 2, 3]) == 1.0
    assert r_squared([1, 2, 3], [2, 2, 2]) == 0.0
    assert r_squared([5, 5], [4, 6]) == 1.0


def test_command_writes_a_profile_that_is_a_device(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    arguments = ["calibrate", "--engine", "sim", "--device", "l40s", "--model", "qwen3-4b", "--output-dir", str(folder)]
    sizes = [
        "--tokens",
        "64,512",
        "--seqs",
        "4,32",
        "--contexts",
        "64,256",
        "--repeats",
        "3",
        "--check",
        "24",
        "--json",
    ]
    result = CliRunner().invoke(app, [*arguments, *sizes], catch_exceptions=False)
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    check = document["check"]
    assert check["predicted_tokens_per_s"] == pytest.approx(check["measured_tokens_per_s"], rel=0.15)
    device = load_device(str(folder / "profile.toml"), "qwen3-4b")
    assert isinstance(device.cost, GridCost)
    assert device.calibration.beta_d == document["calibration"]["beta_d"]
    assert not device.warnings
    again = CliRunner().invoke(app, [*arguments, *sizes], standalone_mode=False)
    assert isinstance(again.exception, UsageError)


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        (["--engine", "magic"], UnknownNameError),
        (["--engine", "sim", "--tokens", "64"], UsageError),
        (["--engine", "sim", "--seqs", "8,4"], UsageError),
        (["--engine", "sim", "--contexts", "a,b"], UsageError),
        (["--engine", "sim", "--max-time", "9"], UsageError),
        (["--max-time", "0"], UsageError),
        (["--max-time", "nan"], UsageError),
    ],
)
def test_bad_usage_is_one_clear_error(arguments: list[str], kind: type[EbbenchError], tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["calibrate", "--output-dir", str(tmp_path), *arguments], standalone_mode=False)
    assert isinstance(result.exception, kind)


@pytest.mark.parametrize(
    "given", ["--max-time 9", "--repeats 3", "--check 0", "--engine sim", "--tokens 64,512", "-- --dtype float32"]
)
def test_nothing_that_says_how_to_measure_stands_beside_measured_steps(given: str, tmp_path: Path) -> None:
    words = ["calibrate", "--steps", "steps.json", "--json", "--output-dir", str(tmp_path), *given.split()]
    result = CliRunner().invoke(app, words, standalone_mode=False)
    assert str(result.exception).startswith("--steps does not use ")


def test_a_damaged_calibration_is_refused_with_the_field(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    path.write_text('{"alpha_p": 1e-3, "beta_p": -1, "alpha_d": 1e-3, "beta_d": 1e-5}')
    with pytest.raises(InputFileError, match="beta_p must not be negative"):
        measured_calibration(path)
    path.write_text('{"alpha_p": 1e300, "beta_p": 1e-5, "alpha_d": 1e-3, "beta_d": 1e-5}')
    with pytest.raises(InputFileError, match="alpha_p must be at most"):
        measured_calibration(path)
    path.write_text('{"alpha_p": 1e-3, "beta_p": 1e-5, "alpha_d": 1e-3, "beta_d": 1e-5}')
    with pytest.raises(InputFileError, match="grid is missing"):
        measured_calibration(path)
    with pytest.raises(InputFileError, match="cannot be read"):
        measured_calibration(tmp_path / "none.json")


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.usefixtures("forking")
def test_a_real_vllm_is_calibrated_on_the_cpu(tmp_path: Path) -> None:
    """A process of its own: vLLM leaves threads and settings behind."""
    from tests.vllm.small_model import build
    from tests.vllm.whole_command import ebbench

    model = build(tmp_path / "model")
    command = ["calibrate", "--engine", "vllm", "--model", model]
    sizes = ["--tokens", "16,64", "--seqs", "1,4", "--contexts", "32,64", "--repeats", "3", "--check", "12", "--json"]
    done = ebbench(*command, *sizes, "--output-dir", tmp_path / "out")
    assert done.returncode == 0, done.stderr[-2000:]
    document = json.loads(done.stdout)
    grid = document["calibration"]["grid"]
    assert [len(grid["prefill"]), len(grid["decode"]), len(grid["mixed"])] == [2, 2, 2]
    assert document["calibration"]["alpha_d"] > 0  # whatever this machine's times are: thresholds need a fixed cost
    assert document["check"]["predicted_tokens_per_s"] > 0
    assert load_device(str(tmp_path / "out" / "profile.toml"), str(model)).calibration.grid is not None


def test_batches_that_the_memory_cannot_hold_are_left_out_and_said(tmp_path: Path) -> None:
    """The default grid asks for 512 decodes of 1,024 tokens, more than this GPU holds."""
    arguments = ["calibrate", "--engine", "sim", "--device", "rtx-pro-6000", "--check", "0", "--output-dir", "made"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    assert "left out: 512 sequences of 1024 tokens" in result.stderr
    assert (tmp_path / "made" / "profile.toml").exists()


def test_a_grid_that_fits_is_kept_and_one_that_cannot_fit_is_refused() -> None:
    assert GRID.fitting(GRID.kv_tokens(64)) == GRID
    assert GRID.fitting(GRID.kv_tokens(64) - 1).seqs == (2, 16)
    with pytest.raises(UsageError, match="16 sequences of 512 tokens need room for"):
        GRID.fitting(GRID.kv_tokens(16) - 1)


def test_a_mixed_step_has_a_fixed_cost_of_its_own() -> None:
    """On a small machine a mixed step costs the host more than a step with one prompt, at any number of tokens."""
    grid = linear_machine((32, 128, 512), (1, 8, 32), decode_s=3e-3, mixed_s=3.5e-3, a=5e-5, b=6e-5)
    measured = fit(grid, "made up", 1)
    cal = measured.calibration
    assert cal.mixed is not None
    assert (cal.alpha_mb, cal.mixed.a, cal.mixed.b) == pytest.approx((3.5e-3, 5e-5, 6e-5))
    assert measured.mixed_r2 == pytest.approx(1.0)
