"""The project's own CI: the workflow is valid, and asks for nothing that the Makefile and pyproject do not have."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import LONGEST

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"
NIGHTLY = WORKFLOW.with_name("nightly.yml")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SUPPORTED = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["project"]["classifiers"]))


def jobs() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))["jobs"]
    return found


def schema_check(path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_workflow_is_valid_and_a_wrong_one_is_not(tmp_path: Path) -> None:
    pytest.importorskip("check_jsonschema")
    for path in (WORKFLOW, NIGHTLY):
        done = schema_check(path)
        assert done.returncode == 0, done.stdout
    wrong = tmp_path / "ci.yml"
    wrong.write_text(WORKFLOW.read_text(encoding="utf-8").replace("runs-on:", "runs_on:"), encoding="utf-8")
    assert schema_check(wrong).returncode == 1


def test_every_make_target_that_ci_calls_is_in_the_makefile() -> None:
    called = {
        target
        for job in jobs().values()
        for step in job["steps"]
        for target in re.findall(r"^\s*make (\w+)", step.get("run", ""), re.MULTILINE)
    }
    assert {"lint", "fast", "coverage", "vllm", "docs"} <= called
    assert [target for target in called if not re.search(rf"^{target}:", MAKEFILE, re.MULTILINE)] == []


def test_every_target_of_the_nightly_workflow_is_one_of_make_nightly() -> None:
    matrix = yaml.safe_load(NIGHTLY.read_text(encoding="utf-8"))["jobs"]["vllm"]["strategy"]["matrix"]
    made = re.search(r"^nightly: (.*)$", MAKEFILE, re.MULTILINE)
    assert made is not None
    assert matrix["target"] == made[1].split()


def test_ci_runs_the_fast_tests_on_every_python_that_the_package_names() -> None:
    assert SUPPORTED
    assert jobs()["fast"]["strategy"]["matrix"]["python"] == SUPPORTED
    assert PROJECT["project"]["requires-python"] == f">={SUPPORTED[0]}"


def test_a_commit_is_checked_by_the_tools_of_make_lint() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    hooks = {hook["entry"].removeprefix(".venv-test/bin/") for repo in config["repos"] for hook in repo["hooks"]}
    made_of = MAKEFILE.split("\nlint: ")[1].split("\n")[0].split()
    recipes = [MAKEFILE.split(f"\n{target}:")[1].split("\n\n")[0] for target in made_of]
    linted = set(re.findall(r"\$\(TEST\)/bin/([\w-]+(?: \w+)?)", "\n".join(recipes)))
    assert {hook.removesuffix(" --fix") for hook in hooks} == linted


def test_the_files_that_are_begun_first_are_there() -> None:
    """A name that nothing has would silently put its file last again, with one process busy and the others idle."""
    assert len(set(LONGEST)) == len(LONGEST)
    assert [name for name in LONGEST if not (ROOT / name).is_file()] == []


def test_make_test_runs_what_the_parts_run() -> None:
    """One session of all tests, of which `make unit` and `make vllm` are the two halves."""
    chosen = dict(re.findall(r"^(tests|unit|vllm):.*\n\t\$\(PYTEST\) -m \"([^\"]*)\"", MAKEFILE, re.MULTILINE))
    assert chosen == {"tests": "not nightly", "unit": "not vllm", "vllm": "vllm and not nightly"}
    assert re.search(r"^test:\n(\t.*\n)*\t\$\(MAKE\) tests\n", MAKEFILE, re.MULTILINE)


def test_collecting_the_tests_does_not_import_vllm() -> None:
    """Every run of pytest in the repository would wait for it, five seconds per process, also `make fast`."""
    code = (
        "import sys, pytest\n"
        "status = pytest.main(['--collect-only', '-p', 'no:xdist', 'tests/vllm', 'tests/vllm_eb', 'tests/devices'])\n"
        "print(int(status), [name for name in ('vllm', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] in ("0 []", "5 []"), done.stdout + done.stderr  # 5: no vLLM, nothing collected


@pytest.mark.parametrize(
    ("tests", "code", "shown"),
    [
        ("def test_second(): assert tried(2)", 0, "1 failed beside others"),
        ("def test_second(): assert tried(2)\ndef test_never(): assert tried(9)", 2, "2 failed beside others"),
        ("\n".join(f"def test_{one}(): assert tried(99)" for one in range(11)), 2, "11 failed beside others"),
        ("def test_first(): assert tried(1)", 0, "1 passed"),
    ],
    ids=["one passes alone", "one fails again", "too many", "none fails"],
)
def test_what_fails_runs_once_more_alone(tests: str, code: int, shown: str, tmp_path: Path) -> None:
    """The recipe of ``make tests`` on a project of one file, with this interpreter as its environment."""
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\naddopts = '-q'\n")
    helper = """
import pathlib

def tried(passes_at):
    count = pathlib.Path("count")
    count.write_text((count.read_text() if count.exists() else "") + "x")
    return len(count.read_text()) >= passes_at
"""
    (tmp_path / "test_one.py").write_text(f"{helper}\n{tests}\n")
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    python = tmp_path / "venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    for stamp in (".stamp-dev", ".stamp"):
        (tmp_path / "venv" / stamp).touch()
    command = ["make", "-f", str(ROOT / "Makefile"), "tests", "TEST=venv", "JOBS=1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    assert shown in done.stdout
    again = 1 if code == 0 and "beside" in shown else 2 if "2 failed" in shown else 0
    assert len((tmp_path / "count").read_text()) == tests.count("def") + again
