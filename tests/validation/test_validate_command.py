"""``ebbench validate`` end to end on an emulated device: resumption, the result's files, what is refused."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from ebbench.cli.main import app
from ebbench.records.manifest import Manifest
from ebbench.records.run import Run
from ebbench.runs import store
from ebbench.runs.pool import InProcess
from ebbench.spec.client import ClientOptions
from ebbench.validation import drive
from ebbench.validation.drive import command, validate
from ebbench.validation.machine import Call, write_manifest
from ebbench.validation.question import (
    WARMUP,
    MeasuringSchedule,
    PlannedRun,
    StepTimes,
    TimeBudget,
    ValidationQuestion,
    fitted_schedule,
    measured_cell,
    predicted_cell,
    validation_question,
)

REPORTS = Path(__file__).parents[2] / "reports" / "measured"
SMALL = [
    "--model", "qwen3-8b", "--engine", "sim", "--device", "rtx-pro-6000", "--tokens", "64,256,1024", "--seqs", "2,16",
    "--contexts", "64,256", "--loads", "4,12", "--input-len", "100", "--output-len", "40", "--rounds", "2",
]  # fmt: skip


def small(*words: object) -> list[object]:
    """The options of a small validation, with ``words`` in place of those that they name."""
    usual = zip(SMALL[::2], SMALL[1::2], strict=True)
    return [*(word for option, value in usual if option not in words for word in (option, value)), *words]


def invoke(*words: object) -> Result:
    return CliRunner().invoke(app, ["validate", *(str(word) for word in words)], env={"COLUMNS": "120"})


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    folder = tmp_path_factory.mktemp("validation") / "out"
    return invoke(*SMALL, "--policy", "v1", "--policy", "eb", "--json", "-o", folder), folder


@pytest.fixture(autouse=True)
def _few_processes(done: tuple[Result, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """After the command above, the same steps are not measured again, and no process is started to predict a run."""
    measured = drive.measure_step_times

    def measured_once(asked: ValidationQuestion, folder: Path, most_s: float) -> StepTimes:
        kept = done[1] / "steps" / folder.name
        same = command(asked, folder, most_s) == command(question(), folder, most_s)
        if same and kept.exists() and not folder.exists():
            shutil.copytree(kept, folder)
        return measured(asked, folder, most_s)

    monkeypatch.setattr(drive, "measure_step_times", measured_once)
    monkeypatch.setattr(store, "make_pool", lambda *_sizes: InProcess())


def test_every_setting_is_predicted_and_measured(done: tuple[Result, Path]) -> None:
    result, folder = done
    found = json.loads(result.stdout)
    assert result.exit_code == (5 if found["verdict"] == "undecided" else 0), result.stderr
    assert found["runs"]["measured"] == found["runs"]["planned"] == 2 * 2 * 2
    settings = {(one["policy"], one["load"], one["metric"]) for one in found["errors"]}
    assert len(settings) == 2 * 2 * 3
    # The device that is predicted from was measured on the device that is predicted: errors are a few per cent.
    assert max(abs(one["error"]) for one in found["errors"] if one["metric"] == "output_throughput") < 0.1
    assert json.loads((folder / "result.json").read_bytes()) == found
    assert found["sentence"] in (folder / "result.md").read_text()


def test_as_many_steps_are_measured_as_were_announced(done: tuple[Result, Path]) -> None:
    """The simulated engine counted those that fill and empty the batch, too: 405 where 76 had been announced."""
    result, folder = done
    (asked,) = re.findall(r"measure the times of up to (\d+) steps", result.stderr)
    assert re.findall(r"step times: (\d+) steps in", result.stderr) == [asked] * 2
    assert {one["steps"] for one in json.loads((folder / "result.json").read_bytes())["step_times"]} == {int(asked)}


def test_every_measurement_is_an_ordinary_run_directory(done: tuple[Result, Path]) -> None:
    _, folder = done
    manifests: dict[str, list[Manifest]] = {
        part: [Run.load(path.parent).manifest for path in sorted((folder / part).glob("*/manifest.json"))]
        for part in ("predicted", "measured")
    }
    assert len(manifests["measured"]) == 8
    assert {one.policy for one in manifests["measured"]} == {"v1", "eb"}
    plans = {part: sorted((one.policy, one.plan_hash) for one in found) for part, found in manifests.items()}
    assert plans["predicted"] == plans["measured"]
    assert all("ebbench calibrate" in one.device_provenance for one in manifests["predicted"])


def test_the_manifest_names_the_machine_and_every_call(done: tuple[Result, Path]) -> None:
    _, folder = done
    manifest = json.loads((folder / "manifest.json").read_bytes())
    assert manifest["question"]["model"] == "qwen3-8b"
    assert manifest["machine"]["versions"]["ebbench"]
    (call,) = manifest["calls"]
    assert call["began"] <= call["ended"]
    assert call["load_average"]


def test_a_continued_validation_shows_the_load_of_all_calls(tmp_path: Path) -> None:
    first, second = Call(["one"], 0, load_average=[0.5, 3.5]), Call(["two"], 0, load_average=[1.0])
    assert write_manifest(tmp_path, question(), first) == [0.5, 3.5]
    assert write_manifest(tmp_path, question(), second) == [0.5, 3.5, 1.0]


def question() -> ValidationQuestion:
    return validation_question({
        "model": "qwen3-8b", "engine": "sim", "device": "rtx-pro-6000", "tokens": "64,256,1024", "seqs": "2,16",
        "contexts": "64,256", "loads": (4, 12), "policy": ("v1", "eb"), "rounds": 2, "input_len": 100, "output_len": 40,
    })  # fmt: skip


def test_a_validation_that_was_stopped_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []
    whole = drive._measure_policy

    def interrupted(asked: ValidationQuestion, cells: list[object], *rest: object) -> None:
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(cells[0].policy)  # type: ignore[attr-defined]
        whole(asked, cells, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(drive, "_measure_policy", interrupted)
    with pytest.raises(KeyboardInterrupt):
        validate(question(), tmp_path, TimeBudget(600.0), lambda _text: None)
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.glob("measured/*/manifest.json")}
    assert len(stamps) == 4
    monkeypatch.setattr(drive, "_measure_policy", whole)
    said: list[str] = []
    outcomes = validate(question(), tmp_path, TimeBudget(600.0), said.append)
    assert "4 are measured already" in said[0]
    assert not any("step times" in text for text in said)  # both rounds' were measured before
    assert len(outcomes.observations) == outcomes.planned == 8
    assert not outcomes.stopped
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in stamps.items())


def test_a_finished_validation_is_shown_whole_whatever_the_time_limit(tmp_path: Path) -> None:
    once = validate(question(), tmp_path, TimeBudget(600.0), lambda _text: None)
    again = validate(question(), tmp_path, TimeBudget(-1.0), lambda _text: None)
    assert again == once
    assert len(again.observations) == again.planned


def test_nothing_is_started_that_would_not_end_in_time(tmp_path: Path) -> None:
    outcomes = validate(question(), tmp_path, TimeBudget(-1.0), lambda _text: None)
    assert outcomes.stopped
    assert outcomes.observations == ()


def test_step_times_are_measured_anew_in_each_round(done: tuple[Result, Path]) -> None:
    result, folder = done
    found = json.loads(result.stdout)
    assert [one["slowness"] for one in found["step_times"]] == [1.0, 1.0]  # in virtual time a device does not change
    assert "steps of later rounds took 1.00 times as long" in (folder / "result.md").read_text()
    assert sorted(path.name for path in (folder / "steps").iterdir()) == ["round-1", "round-2"]


def test_a_round_is_predicted_from_its_own_step_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is faster in the second round while its steps are measured: as fast as an H200."""
    steps = drive.measure_step_times

    def faster_later(asked: ValidationQuestion, folder: Path, most_s: float) -> StepTimes:
        faster = replace(asked, spec=asked.spec.changed(device="h200"))
        return steps(asked if folder.name == "round-1" else faster, folder, most_s)

    monkeypatch.setattr(drive, "measure_step_times", faster_later)
    outcomes = validate(question(), tmp_path, TimeBudget(600.0), lambda _text: None)
    ratios = {
        number: [
            float(one.predicted["output_throughput"] or 0) / float(one.measured["output_throughput"] or 1)
            for one in outcomes.observations
            if one.round == number
        ]
        for number in (0, 1)
    }
    assert ratios[0] == pytest.approx([1.0] * 4, rel=0.2)
    assert min(ratios[1]) > 1.3
    slowness = outcomes.steps[1].slowness(outcomes.steps[0])
    assert slowness is not None
    assert slowness < 0.75


def test_slowness_is_the_median_ratio_of_the_same_steps() -> None:
    first = StepTimes(Path("p"), Path("c"), 100, 8, 1.0, 10, 1.0, 1.0, None, 0.0, (0.01, 0.02, 0.04), 5.0, 9.0)
    assert replace(first, grid_s=(0.011, 0.022, 0.08)).slowness(first) == pytest.approx(1.1)
    assert replace(first, grid_s=(0.01, 0.02)).slowness(first) is None


def test_rounds_that_would_take_too_long_are_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a real vLLM, whose parts are replaced by an engine in virtual time that takes hours by its own account."""
    steps = drive.measure_step_times
    asked = question()
    limits_s = []

    def slow(_asked: ValidationQuestion, folder: Path, most_s: float) -> StepTimes:
        limits_s.append(most_s)
        return replace(steps(asked, folder, most_s), seconds=5000.0)

    monkeypatch.setattr(drive, "measure_step_times", slow)
    monkeypatch.setattr(drive._Rounds, "_too_late", lambda self, needed_s: self.budget.left_s < needed_s)
    outcomes = validate(asked, tmp_path, TimeBudget(4000.0), lambda _text: None)
    assert limits_s == [pytest.approx(4000 / 2 / 3, rel=0.01)]  # steps take a third of a round at most
    assert {one.round for one in outcomes.observations} == {0}
    assert len(outcomes.steps) == 1
    assert outcomes.stopped == "--max-time 4000 was reached"
    monkeypatch.setattr(drive, "server_start_s", lambda _question, _steps: 5000.0)
    again = validate(asked, tmp_path / "other", TimeBudget(4000.0), lambda _text: None)
    assert again.observations == ()
    assert "4000 was reached; a server's start and runs take 50" in again.stopped


def test_a_server_that_was_faster_than_expected_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first start of vLLM, which measures the steps, compiles; later ones take half as long."""
    left_s = iter([900.0, *[300.0] * 20])
    monkeypatch.setattr(drive, "server_start_s", lambda _question, _steps: 800.0)
    monkeypatch.setattr(drive._Rounds, "_too_late", lambda _self, needed_s: next(left_s) < needed_s)
    outcomes = validate(question(), tmp_path, TimeBudget(4000.0), lambda _text: None)
    assert len(outcomes.observations) == outcomes.planned


def test_settings_of_the_measurement_reach_its_runs() -> None:
    spec = question().spec.changed(
        engine="vllm", device=None, client=ClientOptions(lag_limit_ms=200.0), vllm_options=("--load-format", "dummy"),
        api_server="datacenter", async_scheduling=False,
    )  # fmt: skip
    asked = replace(question(), spec=spec)
    steps = StepTimes(Path("p.toml"), Path("c.json"), 10_000, 8, 1.0, 10, 1.0, 1.0, None, 0.0, (0.01,), 5.0, 9.0)
    schedule = MeasuringSchedule(2, (30, 50), (8.0, 8.0))
    real, simulated = (make(asked, steps, PlannedRun("eb", 1, 1), schedule) for make in (measured_cell, predicted_cell))
    assert real.client.given() == {"lag_limit_ms": 200.0}
    assert real.vllm_options == ("--load-format", "dummy")
    assert (real.calibration, simulated.device) == ("c.json", "p.toml")
    assert real.plan == simulated.plan
    # A policy has learned from the load before, which the same server served: its run and both warm-ups.
    assert (real.server.warmup, simulated.server.warmup) == (WARMUP, WARMUP + 30 + WARMUP)
    # Eager on a CPU: test_cpu_server.py. A real server has its own API server.
    same = replace(real.server, enforce_eager=False, api_server="datacenter", warmup=simulated.server.warmup)
    assert same == simulated.server
    first = predicted_cell(asked, steps, PlannedRun("eb", 0, 1), schedule)
    assert (first.server.warmup, first.plan.num_prompts) == (WARMUP, 30)
    again = predicted_cell(question(), steps, PlannedRun("eb", 1, 1), schedule)
    assert again.server.warmup == WARMUP  # every run of a rehearsal has an engine of its own
    assert (real.server.max_num_seqs, real.server.num_kv_blocks, real.server.async_scheduling) == (8, 593, False)


def test_requests_longer_than_the_measured_steps_fit(tmp_path: Path) -> None:
    """They did not where vLLM runs on a CPU, whose steps are short: said after minutes of measuring."""
    grid = ["--tokens", "32,128", "--seqs", "2,16", "--contexts", "32,256"]
    result = invoke(
        *small(*grid, "--input-len", 512, "--output-len", 128, "--loads", "4"), "--policy", "v1", "-o", tmp_path
    )
    assert "max_model_len" not in result.output
    assert result.exit_code in (0, 5), result.output


def test_predictions_of_a_real_vllm_have_an_api_server_unless_it_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    from ebbench.errors import UnknownNameError

    def asked(api_server: str | None) -> str:
        given = {} if api_server is None else {"api_server": api_server}
        return validation_question({"model": "qwen3-8b", "engine": "vllm", **given}).spec.server.api_server

    assert asked(None) == "datacenter"
    assert asked("off") == "off"
    with pytest.raises(UnknownNameError, match="auto"):
        asked("auto")


def test_nothing_is_predicted_from_other_step_times(tmp_path: Path) -> None:
    """A profile without step times of the model would give a roofline."""
    from ebbench.errors import RunError
    from ebbench.validation.drive import _check_device, stored_step_times

    validate(question(), tmp_path, TimeBudget(-1.0), lambda _text: None)
    steps = stored_step_times(tmp_path / "steps" / "round-1")
    run = measured_cell(question(), steps, PlannedRun("v1", 0, 0), MeasuringSchedule(1, (9, 9), ()))
    _check_device(replace(run, device=str(steps.profile)))
    with pytest.raises(RunError, match="no measured step times of qwen3-14b"):
        _check_device(replace(run, device=str(steps.profile), model="qwen3-14b"))


@pytest.mark.parametrize("left_s", [100.0, 400.0, 1200.0, 5000.0])
def test_a_schedule_fits_if_two_rounds_of_the_shortest_runs_do(left_s: float) -> None:
    rates, start_s, steps_s = (2.0, 5.0), 10.0, 30.0
    asked = question()
    found = fitted_schedule(asked, rates, start_s, left_s, steps_s)
    assert all(count >= 3 * load for count, load in zip(found.requests, asked.loads, strict=True))
    shortest = fitted_schedule(asked, rates, start_s, 0.0, steps_s)
    needed = shortest.rounds * len(asked.policies) * (start_s + shortest.server_s) + (shortest.rounds - 1) * steps_s
    if left_s >= needed:
        total = found.rounds * len(asked.policies) * (start_s + found.server_s) + (found.rounds - 1) * steps_s
        assert total <= left_s * 1.02  # requests are whole


def test_fewer_rounds_where_time_is_short() -> None:
    many = replace(question(), rounds=6)
    assert fitted_schedule(many, (2.0, 5.0), 30.0, 1e6, 40.0).rounds == 6
    assert fitted_schedule(many, (2.0, 5.0), 30.0, 100.0, 40.0).rounds == 2


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--loads", "0,4"], "--loads"),
        (["--loads", "four"], "--loads"),
        (["--rounds", "0"], "--rounds"),
        (["--max-time", "0"], "--max-time"),
        (["--policy", "v7"], "v7"),
        (["--engine", "gpu"], "gpu"),
        (["--seqs", "16,2"], "--seqs"),
        (["--", "--quantization", "fp8"], "does not start"),
        (["--api-server", "datacenter"], "neither side has one"),
    ],
)
def test_wrong_validate_options_are_refused_in_one_line(words: list[str], named: str, tmp_path: Path) -> None:
    result = invoke(*small("-o", tmp_path / "out", *words))
    assert result.exit_code == 2
    assert named in result.stderr
    assert result.stderr.strip().splitlines()[-1].startswith("error: ")


def test_more_rounds_continue_a_validation_and_fewer_are_refused(tmp_path: Path) -> None:
    words = ("--policy", "v1", "--loads", "4", "-o", tmp_path, "--json")
    once = small(*words)
    before = json.loads(invoke(*once).stdout)
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/*/manifest.json")}
    more = json.loads(invoke(*small(*words, "--rounds", 3)).stdout)
    assert (before["runs"]["measured"], more["runs"]["measured"], more["runs"]["planned"]) == (2, 3, 3)
    assert more["observations"][:2] == before["observations"]
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in stamps.items())
    fewer = invoke(*once)
    assert fewer.exit_code == 2
    assert "3 rounds; --rounds 2 is fewer" in fewer.stderr


def test_the_same_command_does_not_add_rounds_that_did_not_fit() -> None:
    cut = MeasuringSchedule(2, (9,), (8.0,), asked_rounds=3)
    assert cut.with_rounds(3) == cut
    assert cut.with_rounds(5) == MeasuringSchedule(4, (9,), (8.0,), asked_rounds=5)
    assert MeasuringSchedule(6, (9,), (8.0,)).with_rounds(10).rounds == 10


def test_a_question_is_stored_under_the_keys_of_earlier_versions() -> None:
    earlier = json.loads((REPORTS / "cpu-medium-qwen3" / "manifest.json").read_bytes())["question"]
    model = str(REPORTS / "configs" / "medium" / "config.json")
    asked = validation_question({
        "model": model, "tokens": "32,128,512", "seqs": "1,4,8,16", "contexts": "32,256", "loads": (4, 12),
        "rounds": 6, "run_time": 15.0, "vllm_options": ("--load-format", "dummy", "--skip-tokenizer-init"),
    })  # fmt: skip
    stored = json.loads(json.dumps(asked.stored))
    assert stored.pop("labels")["name"] is None
    assert earlier["grid"].items() <= stored["grid"].items()
    assert stored == {**earlier, "model": model, "grid": stored["grid"]}


def test_a_damaged_question_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "question.json").write_text("{")
    result = invoke(*SMALL, "-o", tmp_path)
    assert result.exit_code != 0
    assert "damaged" in result.stderr


def test_another_question_in_the_same_folder_is_refused(done: tuple[Result, Path]) -> None:
    _, folder = done
    result = invoke(*SMALL, "--policy", "v1", "-o", folder)
    assert result.exit_code == 2
    assert "--output" in result.stderr
