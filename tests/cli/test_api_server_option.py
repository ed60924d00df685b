"""``--api-server`` on the command line: when it is simulated, what is shown and compared, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from ebbench.analysis.environment import differences, machine_of_run, run_environment
from ebbench.cli.main import app
from ebbench.errors import EbbenchError, UsageError
from ebbench.records.run import Run, find_runs

STORED = Path(__file__).parents[1] / "data" / "stored"
SMALL = ("run", "sharegpt", "--source", "profile", "-n", "40", "-c", "16", "--policy", "v1", "--device", "h200")


def run(folder: Path, *options: str) -> str:
    arguments = [*SMALL, "--engine", "sim", "--output-dir", str(folder), *options]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_header_json_and_comparison_say_that_it_is_on(tmp_path: Path) -> None:
    assert "API server" not in run(tmp_path / "off", "--quiet")
    assert "API server datacenter x 2" in run(
        tmp_path / "two", "--quiet", "--api-server", "datacenter", "--api-server-count", "2"
    )
    (shown,) = json.loads(run(tmp_path / "one", "--json", "--api-server", "datacenter"))
    assert shown["api_server"] == "datacenter"
    compared = CliRunner().invoke(app, ["compare", str(tmp_path / "off"), str(tmp_path / "one")], standalone_mode=False)
    assert isinstance(compared.exception, EbbenchError)
    assert "api_server" in str(compared.exception)


BUSY = (
    "run", "sharegpt", "--source", "profile", "--device", "h200", "--model", "gemma-3-1b-it", "-n", "200", "-c", "28",
    "--json", "--engine", "sim",
)  # fmt: skip
"""v1 without the API server would keep it busy for 86 % of the time; exclusive batches that wait long, for 46 %."""
SLOW = "eb:theta=0.9"


def simulated(folder: Path, *options: str) -> tuple[dict[str, str | None], str]:
    """The API server of each policy's run as its JSON names it, and the warnings about it."""
    result = CliRunner().invoke(app, [*BUSY, "--output-dir", str(folder), *options], catch_exceptions=False)
    assert result.exit_code == 0
    shown = json.loads(result.stdout)
    assert len(list(find_runs([folder]))) == len(shown)  # runs without it that were made first are not kept
    said = [f"{one['policy']}: {warning['text']}" for one in shown for warning in one["warnings"]]
    return {one["policy"]: one["api_server"] for one in shown}, "\n".join(line for line in said if "API server" in line)


def test_each_run_has_it_if_it_would_be_busy_there(tmp_path: Path) -> None:
    found, said = simulated(tmp_path / "both", "--policy", SLOW, "--policy", "v1")
    assert found == {SLOW: None, "v1": "datacenter"}
    (line,) = said.splitlines()
    assert line.startswith("v1: These requests and answers would keep 0.88 processes of vLLM's API server busy")
    assert line.endswith("so it is simulated. More processes: --api-server-count; none: --api-server off.")
    compared = CliRunner().invoke(app, ["compare", *map(str, (tmp_path / "both").iterdir())])
    assert compared.exit_code == 0, compared.output
    assert "v1: These requests and answers would keep" in " ".join(compared.output.split())


def test_the_figures_are_those_of_asking_for_it(tmp_path: Path) -> None:
    runs = {}
    for name, options in {"auto": (), "asked": ("--api-server", "datacenter"), "off": ("--api-server", "off")}.items():
        simulated(tmp_path / name, "--policy", "v1", "--quiet", *options)
        runs[name] = Run.load(tmp_path / name)
    assert runs["auto"].requests.equals(runs["asked"].requests)
    assert not runs["auto"].requests.equals(runs["off"].requests)
    assert [run.manifest.facts["api_server"] for run in runs.values()] == ["datacenter", "datacenter", "off"]
    assert [run.manifest.options["api_server"] for run in runs.values()] == ["auto", "datacenter", "off"]


def test_a_run_that_does_not_keep_it_busy_is_the_one_without_it(tmp_path: Path) -> None:
    for name in ("auto", "off"):
        simulated(tmp_path / name, "--policy", SLOW, "--api-server", name)
    auto, off = (Run.load(tmp_path / name) for name in ("auto", "off"))
    assert auto.requests.equals(off.requests)


def test_runs_that_differ_in_what_auto_simulated_are_comparable() -> None:
    manifest = Run.load(STORED / "http_run").manifest
    asked = [
        replace(manifest, options={"api_server": name}, facts={**manifest.facts, "api_server": made})
        for name, made in (("auto", "off"), ("auto", "datacenter"), ("off", "off"), ("datacenter", "datacenter"))
    ]
    quiet, busy, off, always = map(run_environment, asked)
    assert quiet == busy
    for stated, name in ((off, "off"), (always, "datacenter")):
        assert list(map(str, differences(busy, stated))) == [f"options.api_server: auto against {name}"]
    assert [machine_of_run(one).api_server for one in asked] == ["", "datacenter", "", "datacenter"]


def test_off_of_earlier_versions_may_have_been_the_rule_of_auto() -> None:
    manifest = Run.load(STORED / "http_run").manifest
    earlier = replace(manifest, options={"api_server": "off"})
    auto = replace(manifest, options={"api_server": "auto"}, facts={**manifest.facts, "api_server": "datacenter"})
    assert run_environment(earlier) == run_environment(auto) == run_environment(replace(manifest, options={}))


def test_a_number_of_processes_simulates_them(tmp_path: Path) -> None:
    found, said = simulated(tmp_path / "two", "--policy", SLOW, "--api-server-count", "2")
    assert found == {SLOW: "datacenter x 2"}
    assert not said


@pytest.mark.parametrize("engine", ["http://127.0.0.1:9", "vllm"])
@pytest.mark.parametrize(
    "option", [("--api-server", "datacenter"), ("--api-server-count", "2"), ("--front-end-ms", "5")]
)
def test_engines_with_a_real_one_refuse(engine: str, option: tuple[str, str], tmp_path: Path) -> None:
    arguments = [*SMALL, "--engine", engine, "--output-dir", str(tmp_path / "run"), *option]
    result = CliRunner().invoke(app, arguments, standalone_mode=False)
    assert isinstance(result.exception, UsageError)
    assert "real one" in str(result.exception)
    assert " ".join(option) in str(result.exception)


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        (("--api-server", "datacentre"), "datacenter"),
        (("--api-server", "off", "--api-server-count", "2"), "--api-server datacenter"),
    ],
)
def test_a_wrong_api_server_setting_is_refused_with_the_nearest_right_one(
    options: tuple[str, ...], remedy: str, tmp_path: Path
) -> None:
    arguments = [*SMALL, "--engine", "sim", "--output-dir", str(tmp_path / "run"), *options]
    result = CliRunner().invoke(app, arguments, standalone_mode=False)
    assert isinstance(result.exception, UsageError)
    assert remedy in str(result.exception)
