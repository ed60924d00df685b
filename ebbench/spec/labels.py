"""What a run is called and what it measures: name, tags, note, commit, branch. Nothing here changes a result."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ebbench.config.declare import LABELS, declare, declared_in
from ebbench.errors import UsageError

MOST_LETTERS = 200
_UNPRINTED = re.compile(r"[\x00-\x1f\x7f]")


def read_tags(given: Sequence[str]) -> dict[str, Any]:
    """``--tag nightly --tag main``, or both after one: ``--tag nightly,main``."""
    tags = [tag.strip() for text in given for tag in text.split(",")]
    return {"tags": tuple(dict.fromkeys(tags))}


@dataclass(frozen=True)
class Labels:
    """Labels of the runs of a command. Raises UsageError for one that is empty or does not fit on a line."""

    name: str | None = declare(None, "Name of these runs, as `ebbench runs` and `trend` find them.", LABELS)
    tags: tuple[str, ...] = declare(
        (), "Tag of these runs; may be repeated.", LABELS, names=("--tag",), text=list[str], read=read_tags
    )
    note: str | None = declare(None, "What is special about these runs; shown by `ebbench runs show`.", LABELS)
    commit: str | None = declare(None, "Commit of what is measured. Default: that of the CI job.", LABELS)
    label: str | None = declare(
        None, "Branch or pull request of what is measured. Default: that of the CI job.", LABELS
    )

    def __post_init__(self) -> None:
        given = [("--name", self.name), ("--note", self.note), ("--commit", self.commit), ("--label", self.label)]
        for option, text in [*given, *(("--tag", tag) for tag in self.tags)]:
            if text is not None and not text.strip():
                raise UsageError(f"{option} is empty; give it a text, or leave it out")
            if text is not None and (_UNPRINTED.search(text) or len(text) > MOST_LETTERS):
                raise UsageError(f"{option} must be one line of at most {MOST_LETTERS} letters")

    def in_job(self, environ: Mapping[str, str]) -> Labels:
        """The same with commit and label of the CI job that runs this process, where they are not given."""
        job = job_of(environ)
        return replace(self, commit=self.commit or job.commit or None, label=self.label or job.label or None)


OF_LABELS = tuple(declared_in(Labels))
"""The names of these settings."""


# What common CI systems say of the job that they run. A pull request is named before its branch: a branch of a fork may
# have any name, `main` too.


class Job(NamedTuple):
    """Commit and branch or pull request of a CI job; empty where none is known."""

    commit: str = ""
    label: str = ""


class _System(NamedTuple):
    """Variables of a CI system. ``sign``: set in all of its jobs; ``request``: the number of a pull request, which some
    set to ``false`` or write at the end of a URL, after ``word``."""

    sign: str
    commit: str
    request: str
    branch: str
    word: str = "PR"


_SYSTEMS = (
    _System("GITLAB_CI", "CI_COMMIT_SHA", "CI_MERGE_REQUEST_IID", "CI_COMMIT_REF_NAME", "MR"),
    _System("BUILDKITE", "BUILDKITE_COMMIT", "BUILDKITE_PULL_REQUEST", "BUILDKITE_BRANCH"),
    _System("CIRCLECI", "CIRCLE_SHA1", "CIRCLE_PULL_REQUEST", "CIRCLE_BRANCH"),
    _System("TF_BUILD", "BUILD_SOURCEVERSION", "SYSTEM_PULLREQUEST_PULLREQUESTNUMBER", "BUILD_SOURCEBRANCHNAME"),
    _System("BITBUCKET_BUILD_NUMBER", "BITBUCKET_COMMIT", "BITBUCKET_PR_ID", "BITBUCKET_BRANCH"),
    _System("TRAVIS", "TRAVIS_COMMIT", "TRAVIS_PULL_REQUEST", "TRAVIS_BRANCH"),
    _System("DRONE", "DRONE_COMMIT_SHA", "DRONE_PULL_REQUEST", "DRONE_BRANCH"),
    _System("TEAMCITY_VERSION", "BUILD_VCS_NUMBER", "", ""),
    _System("JENKINS_URL", "GIT_COMMIT", "CHANGE_ID", "GIT_BRANCH"),
    _System("GITHUB_ACTIONS", "GITHUB_SHA", "", "GITHUB_REF_NAME"),
)
_GITHUB_REQUEST = re.compile(r"refs/pull/(\d+)/")


def job_of(environ: Mapping[str, str]) -> Job:
    """The CI job of this environment."""
    system = next((one for one in _SYSTEMS if environ.get(one.sign)), None)
    if system is None:
        return Job()
    number = re.search(r"(\d+)/?$", environ.get(system.request, ""))
    if system.sign == "GITHUB_ACTIONS":
        number = _GITHUB_REQUEST.match(environ.get("GITHUB_REF", ""))
    label = f"{system.word} {number[1]}" if number else environ.get(system.branch, "").removeprefix("origin/")
    commit = environ.get(system.commit, "")
    return Job("" if commit == "HEAD" else commit.strip(), label.strip())
