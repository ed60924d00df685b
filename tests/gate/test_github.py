"""The action and the example workflows: valid, and their shell steps do what they say."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from ebbench import __version__
from ebbench.analysis.summary import summarise
from ebbench.records.run import Run
from tests.gate import gate_data
from tests.gate.gate_data import SMALL, invoke

pytestmark = pytest.mark.usefixtures("warm")

GITHUB = Path(__file__).resolve().parents[2] / ".github"
ACTION = GITHUB / "actions" / "gate" / "action.yml"
EXAMPLES = sorted((GITHUB / "workflow-examples").glob("*.yml"))
GATES = [path for path in EXAMPLES if path.name.startswith("gate-")]
WORKFLOWS = [*EXAMPLES, *sorted((GITHUB / "workflows").glob("*.yml"))]
SHORT = """
name = "short"
description = "Answers of 24 tokens, so that a server in real time takes a second"
num_prompts = 12
[profile.input]
family = "uniform"
mean = 32
[profile.output]
family = "uniform"
mean = 24
"""


def step(document: dict[str, Any], name: str) -> dict[str, Any]:
    """A step of the only job."""
    (job,) = document["jobs"].values()
    (found,) = [each for each in job["steps"] if each.get("name") == name]
    return dict(found)


def shim(path: Path) -> None:
    """`ebbench` of this installation under another path.

    Its HTTP client may fall far behind its schedule: these tests are about workflows, and the machine may be busy.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    patient = 'case "$*" in *--lag-limit-ms*) ;; run*http://*) set -- "$@" --lag-limit-ms 60000 ;; esac'
    path.write_text(f'#!/bin/sh\n{patient}\nexec {gate_data.PYTHON} -m ebbench "$@"\n')
    path.chmod(0o755)


def bash(script: str, place: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """As GitHub runs a step: bash -eo pipefail."""
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script],
        cwd=place, env=os.environ | environment, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip


def gate_step(place: Path, baseline: Path, candidate: Path, **changes: str) -> tuple[int, str, str]:
    """Run the action's step; returns its exit code, its output file and its stdout."""
    document = yaml.safe_load(ACTION.read_text())
    install, judge = document["runs"]["steps"]
    inputs = {name: value.get("default", "") for name, value in document["inputs"].items()}
    inputs |= {
        "baseline": str(baseline),
        "candidate": str(candidate),
        "ebbench": str(place / "bin" / "ebbench"),
    } | changes
    shim(place / "bin" / "ebbench")
    output, summary, installed = place / "output", place / "summary.md", place / "installed"
    bash(install["run"], place, GITHUB_OUTPUT=str(installed), EBBENCH=inputs["ebbench"], SOURCE=str(place))
    (line,) = installed.read_text().splitlines()
    inputs["program"] = line.removeprefix("program=")
    environment = {name: inputs[value.split()[1].split(".")[-1]] for name, value in judge["env"].items()}
    done = bash(judge["run"], place, GITHUB_OUTPUT=str(output), GITHUB_STEP_SUMMARY=str(summary), **environment)
    installed.unlink()
    return done.returncode, output.read_text(), summary.read_text() + done.stdout if summary.exists() else done.stdout


def test_the_action_passes_and_writes_its_outputs(measured: Path, tmp_path: Path) -> None:
    code, output, shown = gate_step(tmp_path, measured / "v1", measured / "copy", margin="3 ttft:10")
    assert (code, output) == (0, "outcome=pass\n")
    assert "✅ PASS" in shown
    assert (tmp_path / "ebbench-gate.xml").exists()


def test_the_action_fails_on_a_regression(measured: Path, tmp_path: Path) -> None:
    code, output, shown = gate_step(tmp_path, measured / "v1", measured / "v0")
    assert (code, output) == (1, "outcome=fail\n")
    assert "❌ FAIL" in shown


def test_inconclusive_fails_or_warns_as_asked(measured: Path, tmp_path: Path) -> None:
    sides = [measured / name / "v1-seed0" for name in ("v1", "copy")]
    code, output, _ = gate_step(tmp_path, *sides)
    assert (code, output) == (5, "outcome=inconclusive\n")
    (tmp_path / "output").unlink()
    code, output, shown = gate_step(tmp_path, *sides, inconclusive="warn")
    assert (code, output) == (0, "outcome=inconclusive\n")
    assert "::warning" in shown


def test_runs_of_different_environments_are_an_error_unless_allowed(measured: Path, tmp_path: Path) -> None:
    invoke(*SMALL, "--policy", "v1", "--max-num-seqs", "512", "--output-dir", tmp_path / "other")
    one = measured / "v1" / "v1-seed0"
    code, output, _ = gate_step(tmp_path, one, tmp_path / "other")
    assert (code, output) == (3, "outcome=error\n")
    (tmp_path / "output").unlink()
    assert gate_step(tmp_path, one, tmp_path / "other", allow="options")[0] == 5


def test_names_cannot_inject_commands(measured: Path, tmp_path: Path) -> None:
    hostile = tmp_path / '$(touch injected) "; touch injected; "'
    code, _, _ = gate_step(tmp_path, hostile, measured / "v1")
    assert code == 3
    assert not (tmp_path / "injected").exists()


@pytest.mark.parametrize("path", [ACTION, *WORKFLOWS], ids=lambda path: path.name)
def test_files_are_valid_and_never_paste_inputs_into_scripts(path: Path) -> None:
    schema = "vendor.github-actions" if path == ACTION else "vendor.github-workflows"
    checked = subprocess.run(
        [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, str(path)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stdout
    document = yaml.safe_load(path.read_text())
    jobs = [document["runs"]] if "runs" in document else document["jobs"].values()
    for each in (step for job in jobs for step in job["steps"]):
        assert "${{" not in each.get("run", "")
        if "run" in each:
            assert subprocess.run(["bash", "-n", "-c", each["run"]], check=False).returncode == 0
    if "runs" not in document:
        assert document["permissions"] == {"contents": "read"}


@pytest.mark.parametrize("path", GATES, ids=lambda path: path.name)
def test_examples_gate_the_users_code_with_a_fixed_ebbench(path: Path) -> None:
    """The sides are the user's two branches; ebbench comes from its own repository at a version."""
    steps = step_list(yaml.safe_load(path.read_text()))
    checkouts = {each["with"]["path"]: each["with"] for each in steps if "checkout" in each.get("uses", "")}
    assert set(checkouts) == {"baseline", "candidate", "ebbench"}
    assert checkouts["ebbench"]["repository"] == "${{ env.EBBENCH_REPOSITORY }}"
    assert checkouts["ebbench"]["ref"] == "${{ env.EBBENCH_REF }}"
    assert yaml.safe_load(path.read_text())["env"]["EBBENCH_REF"] == f"v{__version__}"
    assert all("repository" not in checkouts[side] for side in ("baseline", "candidate"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_a_copied_example_fails_first_and_names_its_variable(path: Path, tmp_path: Path) -> None:
    """No address in it looks real and fails: the one that is missing is asked for before any checkout."""
    document = yaml.safe_load(path.read_text())
    assert document["env"]["EBBENCH_REPOSITORY"] == ""
    check = step_list(document)[0]
    unset, given = (bash(check["run"], tmp_path, EBBENCH_REPOSITORY=name) for name in ("", "someone/ebbench"))
    assert (unset.returncode, given.returncode) == (1, 0)
    assert "::error::set EBBENCH_REPOSITORY" in unset.stdout


def test_ci_runs_what_the_makefile_has() -> None:
    document = yaml.safe_load((GITHUB / "workflows" / "ci.yml").read_text())
    makefile = (GITHUB.parent / "Makefile").read_text()
    targets = set(re.findall(r"^(\w+):", makefile, re.MULTILINE))
    called = {
        word for job in document["jobs"].values() for each in job["steps"]
        for word in re.findall(r"^make (\w+)", each.get("run", ""), re.MULTILINE)
    }  # fmt: skip
    assert called == {"lint", "fast", "coverage", "vllm", "docs", "lowest"} <= targets
    declared = set(re.findall(r"Python :: (3\.\d+)", (GITHUB.parent / "pyproject.toml").read_text()))
    assert set(document["jobs"]["fast"]["strategy"]["matrix"]["python"]) == declared


def step_list(document: dict[str, Any]) -> list[dict[str, Any]]:
    (job,) = document["jobs"].values()
    return list(job["steps"])


def test_the_emulated_example_measures_what_it_gates(tmp_path: Path) -> None:
    """Its own steps, on the quicker simulator and with fewer requests."""
    document = yaml.safe_load((GITHUB / "workflow-examples" / "gate-emulated.yml").read_text())
    for side in ("baseline", "candidate"):
        shim(tmp_path / f"venv-{side}" / "bin" / "ebbench")
    quick = document["env"] | {"ENGINE": "sim", "PROMPTS": "48", "CONCURRENCY": "16"}
    done = bash(step(document, "measure")["run"], tmp_path, **quick)
    assert done.returncode == 0, done.stderr
    gate = gate_inputs(document)
    assert (tmp_path / gate["ebbench"]).exists()
    code, output, _ = gate_step(tmp_path, tmp_path / gate["baseline"], tmp_path / gate["candidate"])
    assert (code, output) == (0, "outcome=pass\n")


def gate_inputs(document: dict[str, Any]) -> dict[str, str]:
    """What the example gives the action, all of it inputs of the action."""
    gate = step(document, "gate")
    assert gate["uses"] == "./ebbench/.github/actions/gate"
    assert set(gate["with"]) <= set(yaml.safe_load(ACTION.read_text())["inputs"])
    return {name: str(value) for name, value in gate["with"].items()}


def test_the_gpu_example_interleaves_two_installations(tmp_path: Path) -> None:
    document = yaml.safe_load((GITHUB / "workflow-examples" / "gate-gpu.yml").read_text())
    for side in ("baseline", "candidate"):
        shim(tmp_path / f"venv-{side}" / "bin" / "ebbench")
    quick = document["env"] | {
        "ENGINE": "sim", "MODEL": "qwen3-8b", "PROMPTS": "32", "CONCURRENCY": "8", "MAX_PAIRS": "1",
    }  # fmt: skip
    done = bash(step(document, "measure in turns and gate")["run"], tmp_path, **quick)
    assert done.returncode == 5, done.stderr
    assert "1 pair where the test needs 6" in done.stdout
    assert sorted(path.name for path in (tmp_path / "runs").glob("*/pair-*")) == ["pair-001", "pair-001"]


def test_the_server_example_starts_measures_and_stops_each_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's server is a server of known latencies here, three times as slow in the candidate's branch."""
    document = yaml.safe_load((GITHUB / "workflow-examples" / "gate-server.yml").read_text())
    shim(tmp_path / "venv-ebbench" / "bin" / "ebbench")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for side, itl_ms in (("baseline", 10), ("candidate", 30)):
        start = tmp_path / side / "start-server.sh"
        start.parent.mkdir()
        start.write_text(
            f"#!/bin/sh\nexec {tmp_path}/venv-ebbench/bin/ebbench fake-server --port $PORT --itl-ms {itl_ms}\n"
        )
        start.chmod(0o755)
    assert bash(step(document, "how one side is measured")["run"], tmp_path).returncode == 0
    (tmp_path / "short.toml").write_text(SHORT)
    quick = document["env"] | {"PORT": str(port), "WORKLOAD": "short.toml", "PROMPTS": "12", "CONCURRENCY": "4"}
    for name, value in quick.items():
        monkeypatch.setenv(name, value)
    inputs = gate_inputs(document)
    commands = {name: inputs[name] for name in ("baseline-command", "candidate-command", "margin")}
    code, output, shown = gate_step(
        tmp_path, tmp_path / "baseline-runs", tmp_path / "candidate-runs", **commands, **{"max-pairs": "2"}
    )
    assert (code, output) == (5, "outcome=inconclusive\n"), shown
    runs = [Run.load(tmp_path / f"{side}-runs" / "pair-002") for side in ("baseline", "candidate")]
    tpot = [summarise(run).metrics.tpot.median for run in runs]
    assert tpot[0] is not None
    assert tpot[1] is not None
    assert tpot[1] > 1.5 * tpot[0]
    with socket.socket() as gone:
        assert gone.connect_ex(("127.0.0.1", port)) != 0, "a server was left running"


@pytest.mark.nightly
def test_the_nightly_example_measures_and_follows_the_figures(tmp_path: Path) -> None:
    """Its own steps, three nights: the third with a server that is three times as slow."""
    document = yaml.safe_load((GITHUB / "workflow-examples" / "nightly-trend.yml").read_text())
    shim(tmp_path / "venv-ebbench" / "bin" / "ebbench")
    (tmp_path / "server").mkdir()
    (tmp_path / "short.toml").write_text(SHORT)
    start = tmp_path / "server" / "start-server.sh"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for night, itl_ms in enumerate((10, 10, 30)):
        start.write_text(
            f"#!/bin/sh\nexec {tmp_path}/venv-ebbench/bin/ebbench fake-server --port $PORT --itl-ms {itl_ms}\n"
        )
        start.chmod(0o755)
        job = {
            "GITHUB_ACTIONS": "true", "GITHUB_SHA": f"{night}" * 40, "GITHUB_REF": f"refs/pull/{night}/merge",
            "GITHUB_RUN_ID": str(night), "GITHUB_RUN_ATTEMPT": "1", "GITHUB_ENV": str(tmp_path / "env"),
            "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"), "PORT": str(port), "WORKLOAD": "short.toml",
            "PROMPTS": "12", "CONCURRENCY": "4",
        }  # fmt: skip
        environment = document["env"] | job
        done = bash(step(document, "measure")["run"], tmp_path, **environment)
        assert done.returncode == 0, done.stderr
        done = bash(step(document, "trend")["run"], tmp_path, **environment)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "env").read_text().splitlines() == ["ANSWER=0", "ANSWER=0", "ANSWER=5"]
    comment = (tmp_path / "comment.md").read_text()
    assert "PR 2" in comment
    assert "cannot show it" in comment
    assert (tmp_path / "trend.png").exists()
    assert len(list((tmp_path / "history").glob("*/*/manifest.json"))) == 9


@pytest.mark.parametrize(
    ("before", "refuses", "asked"),
    [
        ("https://h/r/pull/31#issuecomment-77", "nothing", "api --silent -X PATCH repos/o/r/issues/comments/77 -F"),
        ("", "nothing", "pr comment 31 --body-file"),
        ("", "*", "pr comment 31 --body-file"),
    ],
    ids=["again", "first", "fork"],
)
def test_the_nightly_example_comments_on_its_pull_request(
    tmp_path: Path, before: str, refuses: str, asked: str
) -> None:
    """Its own step: it edits the comment that has its mark, wherever that stands, or writes one."""
    document = yaml.safe_load((GITHUB / "workflow-examples" / "nightly-trend.yml").read_text())
    comment = step(document, "comment on the pull request")
    assert comment["env"]["NUMBER"] == "${{ github.event.pull_request.number }}"
    program = tmp_path / "bin" / "gh"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/bash\ncase "$*" in {refuses}) exit 1; esac\n'
        f'if [ "$2" = view ]; then echo "{before}"; else echo "$@" > ../asked; fi\n'
    )
    program.chmod(0o755)
    (tmp_path / "server").mkdir()
    (tmp_path / "comment.md").write_text("trend\n")
    environment = {
        "PATH": f"{program.parent}:{os.environ['PATH']}", "NUMBER": "31", "MARK": "<!-- mine -->",
        "GITHUB_REPOSITORY": "o/r",
    }  # fmt: skip
    done = bash(comment["run"], tmp_path, **environment)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "comment.md").read_text() == "trend\n\n<!-- mine -->\n"
    assert ("::warning::no comment on pull request 31" in done.stdout) == (refuses == "*")
    if refuses == "nothing":
        assert (tmp_path / "asked").read_text().startswith(asked)


def test_the_action_installs_itself_where_no_program_is_named(tmp_path: Path) -> None:
    """pip is asked for the source the action lies in, at the version the workflow names."""
    (install, _) = yaml.safe_load(ACTION.read_text())["runs"]["steps"]
    assert install["env"]["SOURCE"] == "${{ github.action_path }}/../../.."
    assert (ACTION.parent / ".." / ".." / ".." / "pyproject.toml").exists()
    fake = tmp_path / "bin" / "python3"
    fake.parent.mkdir()
    fake.write_text(
        '#!/bin/sh\nmkdir -p "$3/bin"; printf \'#!/bin/sh\\necho "$@" > %s/asked\\n\' "$PWD" '
        '> "$3/bin/python"; chmod +x "$3/bin/python"\n'
    )
    fake.chmod(0o755)
    done = bash(
        install["run"], tmp_path, PATH=f"{fake.parent}:{os.environ['PATH']}", GITHUB_OUTPUT=str(tmp_path / "output"),
        RUNNER_TEMP=str(tmp_path / "temp"), EBBENCH="", SOURCE="/checkout",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "asked").read_text().split()[-2:] == ["--quiet", "/checkout"]
    assert (tmp_path / "output").read_text() == f"program={tmp_path}/temp/ebbench/bin/ebbench\n"
