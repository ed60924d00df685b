"""The commit in a manifest: that of ebbench's own checkout, or none."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import ebbench
from ebbench.records.manifest import git_commit


def test_the_commit_of_a_checkout_is_found() -> None:
    top = Path(__file__).resolve().parents[2]
    commit = git_commit.__wrapped__()
    assert (commit is not None) == (top / ".git").exists()
    assert commit is None or len(commit.removesuffix("-dirty")) == 40


def test_an_installed_package_and_a_missing_git_give_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        assert git_commit.__wrapped__() is None
    inside = tmp_path / "project" / "site-packages" / "ebbench" / "__init__.py"
    author = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    for command in (("init", "-q"), (*author, "commit", "-q", "--allow-empty", "-m", "of another project")):
        inside.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["git", "-C", str(tmp_path / "project"), *command], check=True)
    monkeypatch.setattr(ebbench, "__file__", str(inside))
    assert git_commit.__wrapped__() is None


def test_uncommitted_changes_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        return subprocess.run(
            ["git", "-C", str(tmp_path), *identity, *words], check=True, capture_output=True
        ).stdout.decode()

    code = tmp_path / "ebbench" / "__init__.py"
    code.parent.mkdir()
    code.touch()
    monkeypatch.setattr(ebbench, "__file__", str(code))
    git("init", "-q")
    assert git_commit.__wrapped__() is None, "there is no commit yet"
    git("add", ".")
    git("commit", "-q", "-m", "first")
    (tmp_path / "notes").touch()
    commit = git("rev-parse", "HEAD").strip()
    assert git_commit.__wrapped__() == commit, "a file that was never added is no change"
    code.write_text("changed")
    assert git_commit.__wrapped__() == f"{commit}-dirty"
