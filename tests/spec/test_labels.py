"""Labels of runs: given, taken from the CI job, stored, and no part of a result's key."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ebbench.errors import UsageError
from ebbench.records.manifest import RunLabels
from ebbench.records.run import Run, read_manifest
from ebbench.runs.key import result_key
from ebbench.spec.run import Job, Labels, ci_job, make_spec, simulated
from tests.gate.gate_data import invoke

SPEC = simulated("balanced", "v1", "h200", "qwen3-8b", 64, 2048, num_prompts=8)
SMALL = ("run", "balanced", "--policy", "v1", "--num-prompts", "8", "--max-concurrency", "4", "--quiet")


def test_labels_are_no_part_of_the_key() -> None:
    named = SPEC.changed(name="before", tags=("nightly",), commit="c0ffee")
    assert named.labels.name == "before"
    assert named == SPEC
    assert result_key(named) == result_key(SPEC)


@pytest.mark.parametrize(
    ("environ", "job"),
    [
        ({}, Job()),
        ({"GITHUB_ACTIONS": "true", "GITHUB_SHA": "a1", "GITHUB_REF_NAME": "main"}, Job("a1", "main")),
        (
            {"GITHUB_ACTIONS": "true", "GITHUB_SHA": "a1", "GITHUB_REF": "refs/pull/31/merge", "GITHUB_REF_NAME": "x"},
            Job("a1", "PR 31"),
        ),
        ({"GITLAB_CI": "1", "CI_COMMIT_SHA": "b2", "CI_COMMIT_REF_NAME": "dev"}, Job("b2", "dev")),
        ({"GITLAB_CI": "1", "CI_COMMIT_SHA": "b2", "CI_MERGE_REQUEST_IID": "7"}, Job("b2", "MR 7")),
        ({"JENKINS_URL": "http://ci", "GIT_COMMIT": "c3", "GIT_BRANCH": "origin/main"}, Job("c3", "main")),
        ({"JENKINS_URL": "http://ci", "GIT_COMMIT": "c3", "CHANGE_ID": "5"}, Job("c3", "PR 5")),
        (
            {"BUILDKITE": "true", "BUILDKITE_COMMIT": "HEAD", "BUILDKITE_PULL_REQUEST": "false",
             "BUILDKITE_BRANCH": "main"},
            Job("", "main"),
        ),
        (
            {"CIRCLECI": "true", "CIRCLE_SHA1": "d4", "CIRCLE_PULL_REQUEST": "https://example.org/o/r/pull/12"},
            Job("d4", "PR 12"),
        ),
        ({"TF_BUILD": "True", "BUILD_SOURCEVERSION": "e5", "BUILD_SOURCEBRANCHNAME": "main"}, Job("e5", "main")),
    ],
)  # fmt: skip
def test_commit_and_branch_of_a_ci_job(environ: dict[str, str], job: Job) -> None:
    assert ci_job(environ) == job


def test_what_is_given_counts_before_the_job() -> None:
    environ = {"GITLAB_CI": "1", "CI_COMMIT_SHA": "b2", "CI_COMMIT_REF_NAME": "dev"}
    assert Labels(commit="mine").in_job(environ) == Labels(commit="mine", label="dev")


@pytest.mark.parametrize(
    "labels", [{"name": " "}, {"tags": ("",)}, {"note": "two\nlines"}, {"name": "x" * 300}, {"name": ".."}]
)
def test_a_label_is_one_line_of_text(labels: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="--"):
        make_spec({"workload": "balanced", **labels})


def test_a_run_stores_its_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITLAB_CI", "1")
    monkeypatch.setenv("CI_COMMIT_SHA", "b2")
    labels = ("--name", "first", "--tag", "nightly,gpu", "--tag", "main", "--note", "a try")
    done = invoke(*SMALL, *labels, "--output-dir", tmp_path / "run")
    assert done.exit_code == 0, done.output
    assert Run.load(tmp_path / "run").manifest.labels == RunLabels("first", ("nightly", "gpu", "main"), "a try", "b2")


def test_a_run_without_labels_stays_readable(tmp_path: Path) -> None:
    assert invoke(*SMALL, "--output-dir", tmp_path / "run").exit_code == 0
    path = tmp_path / "run" / "manifest.json"
    older = json.loads(path.read_text())
    del older["labels"]
    path.write_text(json.dumps(older))
    assert read_manifest(tmp_path / "run").labels == RunLabels()


def test_a_dry_run_writes_labels_that_a_file_gives_back(tmp_path: Path) -> None:
    written = invoke(*SMALL, "--name", "first", "--tag", "nightly", "--dry-run").stdout
    (tmp_path / "run.toml").write_text(written)
    done = invoke("run", tmp_path / "run.toml", "--quiet", "--output-dir", tmp_path / "run")
    assert done.exit_code == 0, done.output
    assert read_manifest(tmp_path / "run").labels == RunLabels("first", ("nightly",))


def test_runs_of_a_sweep_have_its_name_and_the_labels(tmp_path: Path) -> None:
    (tmp_path / "sweep.toml").write_text(
        'name = "small"\nkeep_runs = true\n[grid]\nseed = [0, 1]\n[common]\nworkload = "balanced"\nnum_prompts = 8\n'
    )
    done = invoke("sweep", tmp_path / "sweep.toml", "-o", tmp_path / "out", "--tag", "nightly", "--quiet")
    assert done.exit_code == 0, done.output
    found = [read_manifest(path.parent).labels for path in (tmp_path / "out").glob("cells/*/manifest.json")]
    assert found == [RunLabels("small", ("nightly",))] * 2


def test_an_unlabelled_spec_takes_none_of_another() -> None:
    assert replace(SPEC, labels=Labels(name="x")).labels != SPEC.labels
