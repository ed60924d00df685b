"""``ebbench init``: every file that it writes is understood as it is, and with each of its comments made a setting."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ebbench.cli import init, main
from ebbench.config.declare import DEFAULT_DEVICE, DEFAULT_MODEL
from ebbench.foreign.documents import load_toml
from ebbench.runs.file import RUN_FILE, SEARCH_FILE, asked_for, jobs
from ebbench.sizing.command import capacity_search
from ebbench.spec.run import known_settings
from ebbench.sweep.spec import load_sweep

JOBS = jobs()
RUNS = [name for name, job in JOBS.items() if job.command == "run"]


def written(job: str, folder: Path) -> Path:
    path = folder / f"{job}.toml"
    done = CliRunner().invoke(main.app, ["init", job, str(path)])
    assert done.exit_code == 0, done.output
    assert f"run it: ebbench {JOBS[job].command} {path}" in done.output
    return path


def test_the_command_names_every_job() -> None:
    assert tuple(JOBS) == init.JOBS
    assert {job.chosen.get("model", DEFAULT_MODEL) for job in JOBS.values()} == {DEFAULT_MODEL}
    assert {job.chosen.get("device", DEFAULT_DEVICE) for job in JOBS.values()} == {DEFAULT_DEVICE}


@pytest.mark.parametrize("job", RUNS)
def test_a_file_of_a_run_can_be_run(job: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(main.app, ["run", str(written(job, tmp_path)), "--dry-run"])
    assert done.exit_code == 0, done.output
    understood = tomllib.loads(done.stdout)
    defaults = {key: known_settings()[key].default for key in JOBS[job].chosen if key in known_settings()}
    said = {key: understood.get(key, defaults.get(key)) for key in JOBS[job].chosen if key != "vllm_options"}
    assert said == {key: value for key, value in JOBS[job].chosen.items() if key != "vllm_options"}


def test_a_file_of_a_search_says_what_is_searched(tmp_path: Path) -> None:
    search = capacity_search(asked_for(str(written("capacity", tmp_path)), {"precision": 0.1}, SEARCH_FILE))
    assert (str(search.limits).startswith("ttft:500 tpot:50"), search.precision) == (True, 0.1)
    assert [policy.name for policy in search.series.policies] == ["v1", "ebplus"]


def test_a_file_of_a_sweep_is_a_grid(tmp_path: Path) -> None:
    assert len(load_sweep(written("sweep", tmp_path)).cells) == 8


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "names no workload"),
        ('policy = ["v1"]', "names no workload"),
        ('worklod = "sharegpt"', "did you mean 'workload'"),
        ('[grid]\npolicy = ["v1"]', "run it with `ebbench sweep`"),
        ('name = "mine"\ndescription = "x"', "num_prompts"),
    ],
    ids=["empty", "no workload", "a slip", "a sweep", "a workload"],
)
def test_what_a_file_lacks_is_said_of_the_file_that_it_is(text: str, told: str, tmp_path: Path) -> None:
    """A file of settings without a workload was read as one that describes a workload: its keys were unknown."""
    path = tmp_path / "bench.toml"
    path.write_text(text)
    done = CliRunner().invoke(main.app, ["run", str(path)])
    assert (done.exit_code, told in str(done.exception)) == (2, True) or told in done.output, done.output


def test_a_file_that_no_command_would_take_is_not_written(tmp_path: Path) -> None:
    done = CliRunner().invoke(main.app, ["init", "simulation", str(tmp_path / "bench")])
    assert done.exit_code != 0
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("job", [name for name in JOBS if name != "sweep"])
def test_every_comment_is_a_setting_with_its_default_and_help(job: str, tmp_path: Path) -> None:
    path = written(job, tmp_path)
    lines = path.read_text(encoding="utf-8").splitlines()
    comments = [line for line in lines if re.match(r"# \w+ =", line)]
    assert all(re.search(r"  # \S", line) for line in comments)
    assert not [line for line in lines if re.search(r"(^|\s)--\w", line)], "options have another spelling in files"
    path.write_text("\n".join(line.removeprefix("# ") if re.match(r"# \w+ = [^ #]", line) else line for line in lines))
    load_toml(path, SEARCH_FILE if job == "capacity" else RUN_FILE)


def test_settings_without_a_meaning_for_the_job_are_left_out(tmp_path: Path) -> None:
    server = written("server", tmp_path).read_text(encoding="utf-8")
    assert "connect_timeout_s" in server
    assert "max_num_seqs" not in server
    assert "connect_timeout_s" not in written("simulation", tmp_path).read_text(encoding="utf-8")
    assert "request_rate" not in written("capacity", tmp_path).read_text(encoding="utf-8")


def test_a_file_is_not_overwritten_and_a_job_must_exist(tmp_path: Path) -> None:
    path = written("server", tmp_path)
    again = CliRunner().invoke(main.app, ["init", "server", str(path)])
    assert (again.exit_code, "exists; give another file" in again.output) == (2, True)
    unknown = CliRunner().invoke(main.app, ["init", "srver", str(tmp_path / "other.toml")])
    assert (unknown.exit_code, "did you mean 'server'" in unknown.output) == (2, True)
    assert not (tmp_path / "other.toml").exists()
