"""CONTRIBUTING.md: each of its changes is applied to a copy of the sources, and its commands are run there."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
SOURCES = ("ebbench", "patches", "workloads", "scenarios", "reports/reference")
FORMS = ("bug", "feature", "measurement")
WALKS = ("policy", "device", "model", "workload", "table")


def section(name: str) -> str:
    return PAGE.split(f"\n## Add a {name}\n")[1].split("\n## ")[0]


def block(language: str, text: str) -> str:
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return str(found)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The sources, and `ebbench` and `python` that run them."""
    for name in SOURCES:  # with their bytecode, where there is some: compiling takes longer than the walk
        shutil.copytree(ROOT / name, tmp_path / "tree" / name)
    shims = tmp_path / "shims"
    shims.mkdir()
    for name, words in (("ebbench", " -m ebbench"), ("python", "")):
        (shims / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)}{words} "$@"\n')
        (shims / name).chmod(0o755)
    return tmp_path / "tree"


def in_tree(tree: Path, *command: str, text: str | None = None) -> str:
    """Run a command on the copy, not on the sources it was made of."""
    environment = os.environ | {
        "PYTHONPATH": f"{tree}:{tree / 'patches'}",
        "PATH": f"{tree.parent / 'shims'}:{os.environ['PATH']}",
        "COLUMNS": "120",
    }
    done = subprocess.run(
        command, cwd=tree, env=environment, input=text, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("walk", WALKS)
def test_a_walk_works_as_written(walk: str, checkout: Path) -> None:
    commands, diff = block("bash", section(walk)), block("diff", section(walk))
    first = shlex.split(commands.splitlines()[0])
    before = subprocess.run(
        [sys.executable, "-m", *first], cwd=checkout, capture_output=True, check=False,
        env=os.environ | {"PYTHONPATH": f"{checkout}:{checkout / 'patches'}"},
    )  # fmt: skip
    assert before.returncode == 2, "without the change the command must be refused"
    in_tree(checkout, "git", "apply", "--whitespace=error-all", "-", text=diff)
    for command in commands.splitlines():
        assert in_tree(checkout, "bash", "-c", command)
    added = re.findall(r"^\+\+\+ b/(\S+\.py)$", diff, re.MULTILINE)
    if added:
        in_tree(checkout, sys.executable, "-m", "ruff", "check", "--config", str(ROOT / "pyproject.toml"), *added)


def test_a_policy_is_one_module_and_its_tests() -> None:
    changed = re.findall(r"^\+\+\+ b/(\S+)$", block("diff", section("policy")), re.MULTILINE)
    product = [path for path in changed if not path.startswith("tests/")]
    assert [str(Path(path).parent) for path in product] == ["patches/vllm_eb/policies"]
    assert len(changed) == 2


def test_the_page_has_these_walks_and_its_links_lead_somewhere() -> None:
    assert tuple(re.findall(r"^## Add a (\w+)$", PAGE, re.MULTILINE)) == WALKS
    for target in re.findall(r"\]\(([^)#:]+)\)", PAGE):
        assert (ROOT / target).exists(), target
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"`?make (?:\w+=\S+ )*(\w+)", PAGE):
        assert f"\n{target}:" in makefile, target


@pytest.mark.parametrize(
    ("schema", "paths"),
    [
        ("vendor.citation-file-format", ["CITATION.cff"]),
        ("vendor.github-issue-forms", [f".github/ISSUE_TEMPLATE/{name}.yml" for name in FORMS]),
        ("vendor.github-issue-config", [".github/ISSUE_TEMPLATE/config.yml"]),
    ],
)
def test_files_that_a_forge_reads_are_valid(schema: str, paths: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, *(str(ROOT / path) for path in paths)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
