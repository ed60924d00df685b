"""Hazard tests on lengths whose hazard is known, and the command on each kind of input."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from ebbench.cli.main import app
from ebbench.errors import InputFileError, UsageError
from ebbench.hazard import analyse_lengths, read_lengths, trend_tests
from ebbench.runs.store import Measured

DATA = Path(__file__).resolve().parents[1] / "data"


def invoke(*args: str) -> Result:
    return CliRunner().invoke(app, list(args), env={"COLUMNS": "120"})


def test_geometric_lengths_show_no_trend() -> None:
    """One test at 5 % errs once in twenty; calling the hazard rising takes both, so forty draws give few."""
    rising = 0
    for seed in range(40):
        tests = trend_tests(np.random.default_rng(seed).geometric(1 / 60, 3000))
        assert tests is not None
        rising += tests.rising
    assert rising <= 4


@pytest.mark.parametrize("shape", [2.0, 6.0])
def test_gamma_lengths_of_shape_above_one_rise(shape: float) -> None:
    lengths = np.ceil(np.random.default_rng(1).gamma(shape, 100 / shape, 4000)).astype(int)
    tests = trend_tests(lengths)
    assert tests is not None
    assert tests.rising
    assert tests.verdict.startswith("increasing")


def test_mixtures_of_short_and_long_answers_fall() -> None:
    rng = np.random.default_rng(2)
    lengths = np.concatenate([rng.geometric(1 / 8, 2000), rng.geometric(1 / 120, 2000)])
    tests = trend_tests(lengths)
    assert tests is not None
    assert tests.verdict.startswith("decreasing")


def test_a_length_limit_is_no_rising_hazard() -> None:
    """Constant hazard, answers cut at 60: without knowing of the cut the last point alone would make it rise."""
    lengths = np.minimum(np.random.default_rng(3).geometric(1 / 60, 4000), 60)
    found = analyse_lengths(lengths)
    assert found.limit == 60
    assert found.censored_samples == (lengths == 60).sum()
    assert found.t_reliable == 59
    assert found.tests is not None
    assert not found.tests.rising
    assert found.censored is not None
    assert found.censored.p0 == pytest.approx(1 / 60, rel=0.06)


def test_the_binned_hazard_counts_completions_over_tokens_at_risk() -> None:
    found = analyse_lengths(np.random.default_rng(4).geometric(1 / 50, 20_000))
    _, rate = found.binned(10)
    np.testing.assert_allclose(rate, 1 / 50, rtol=0.08)


@pytest.mark.parametrize("lengths", [[2] * 100, [3, 3, 4]])
def test_too_few_lengths_are_not_tested(lengths: list[int]) -> None:
    assert trend_tests(lengths) is None


def test_lengths_come_from_numbers_traces_workloads_and_runs(tmp_path: Path, shift_run: Measured) -> None:
    numbers = tmp_path / "lengths.csv"
    numbers.write_text("tokens\n5\n7\n\n9\n")
    assert read_lengths(str(numbers)).output_tokens.tolist() == [5, 7, 9]
    trace = read_lengths(str(DATA / "azure.csv"))
    assert trace.output_tokens.tolist() == read_lengths(f"trace:{DATA / 'azure.csv'}").output_tokens.tolist()
    assert len(read_lengths("balanced", num_prompts=30, source="profile").output_tokens) == 30
    run = read_lengths(str(shift_run.path))
    assert len(run.output_tokens) == 300
    assert run.mean_input == pytest.approx(220, rel=0.1)


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("5\n7\nseven\n")
    with pytest.raises(InputFileError, match=r"lengths\.txt:3: expected an output length"):
        read_lengths(str(path))
    path.write_text("\n")
    with pytest.raises(UsageError, match="is empty"):
        read_lengths(str(path))


def test_answers_of_one_length_have_no_trend_and_no_fit() -> None:
    found = analyse_lengths([512] * 50)
    assert (found.tests, found.published, found.censored) == (None, None, None)
    said = invoke("hazard", "balanced", "--length-distribution", "fixed", "-n", "50")
    assert "every response has 512 tokens: there is no trend to test and no hazard to fit" in said.output
    assert "theta*" not in said.output
    assert analyse_lengths([3, 3, 4]).untested == "too few different lengths to test for a trend"


def test_options_without_effect_on_finished_answers_are_refused(tmp_path: Path, shift_run: Measured) -> None:
    numbers = tmp_path / "lengths.txt"
    numbers.write_text("5\n7\n9\n")
    for option in ({"num_prompts": 2}, {"source": "hub"}, {"seed": 3}, {"output_len": 9}):
        for what in (numbers, shift_run.path):
            with pytest.raises(UsageError, match=f"leave out --{next(iter(option)).replace('_', '-')}"):
                read_lengths(str(what), **option)
    with pytest.raises(UsageError, match="a trace is its own source; leave out --source profile"):
        read_lengths(str(DATA / "azure.csv"), source="profile")
    assert len(read_lengths(str(DATA / "azure.csv"), num_prompts=2).output_tokens) == 2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("balanced", "-n", "0"), "--num-prompts must be at least 1"),
        (("balanced", "--max-num-seqs", "0"), "--max-num-seqs must be at least 1"),
        (("balanced", "--run"), "without --experiment this command does not use --run"),
        (("--experiment", "ifr", "--json"), "--experiment ifr (`ebbench tables e3`) does not use --json"),
        (("--experiment", "ifr", "--plot", "a.svg"), "does not use --plot"),
        (("balanced", "--experiment", "ifr"), "does not use WHAT"),
    ],
)
def test_options_that_would_do_nothing_are_refused(args: tuple[str, ...], message: str, tmp_path: Path) -> None:
    done = invoke("hazard", *args)
    assert done.exit_code == 2
    assert message in done.output


def test_the_command_says_it_in_words_and_in_json(tmp_path: Path) -> None:
    args = ("hazard", "sharegpt", "--source", "profile", "-n", "1500")
    said = invoke(*args)
    assert said.exit_code == 0, said.output
    assert "increasing failure rate (IFR)" in said.output
    assert "cut at 500 tokens" in said.output
    found = json.loads(invoke(*args, "--json").stdout)
    assert found["tests"]["tau"] > 0
    assert found["thresholds"]["censored"]["theta_star"] >= found["thresholds"]["censored"]["theta0"]
    assert len(found["t"]) == len(found["h"]) == 500


def test_the_command_needs_something_to_look_at() -> None:
    assert invoke("hazard").exit_code == 2
    assert invoke("hazard", "--experiment", "iffr").exit_code == 2
    assert "ifr" in invoke("hazard", "--experiment", "iffr").output


@pytest.mark.parametrize(("shape", "verdict"), [(1.0, "no"), (4.0, "yes")])
def test_table_9_tests_a_copy_of_the_data_set(tmp_path: Path, shape: float, verdict: str) -> None:
    """Records in the data set's own format decide, not the profile, whose hazard rises whatever the data set's does."""
    words = np.ceil(np.random.default_rng(5).gamma(shape, 60 / shape, 3000)).astype(int)
    records = [
        {"id": str(i), "conversations": [{"from": "human", "value": "how far is the harbour from here " * 3},
                                         {"from": "gpt", "value": "one " * int(count)}]}
        for i, count in enumerate(words)
    ]  # fmt: skip
    path = tmp_path / "copy.json"
    path.write_text(json.dumps(records))
    args = ("tables", "9", "--workload", "sharegpt", "--source", f"file:{path}", "--num-prompts", "3000", "-f", "csv")
    made = invoke(*args)
    assert made.exit_code == 0, made.output
    lines = made.output.splitlines()
    assert f"file:{path}" in lines[1]
    assert lines[1].rstrip().endswith(f",{verdict}")


def test_one_file_does_not_stand_for_several_data_sets() -> None:
    said = invoke("tables", "9", "--source", f"file:{DATA / 'sharegpt.json'}")
    assert said.exit_code != 0
    assert "name it with one --workload" in said.output


def test_a_verdict_on_a_profile_is_said_to_be_one() -> None:
    drawn = invoke("hazard", "sharegpt", "--source", "profile", "-n", "400").output
    read = invoke("hazard", "sharegpt", "--source", f"file:{DATA / 'sharegpt.json'}").output
    told = "tests the profile's shape, not the data set"
    assert told in " ".join(drawn.split())
    assert told not in " ".join(read.split())
