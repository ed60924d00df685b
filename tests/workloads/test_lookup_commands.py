import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from ebbench.cli import scenarios, workloads
from ebbench.errors import UnknownNameError, UsageError
from ebbench.traffic.spec import list_scenarios, load_scenario
from ebbench.workloads.spec import list_workloads


def call(app: typer.Typer, *arguments: str) -> str:
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"}, catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_lists_name_everything() -> None:
    assert [row["name"] for row in json.loads(call(workloads.app, "list", "--json"))] == list_workloads()
    assert [row["name"] for row in json.loads(call(scenarios.app, "list", "--json"))] == list_scenarios()
    for app, names in ((workloads.app, list_workloads()), (scenarios.app, list_scenarios())):
        text = call(app, "list")
        assert all(name in text for name in names)
    assert "log:FILE" in call(workloads.app, "list")


def test_show_workload_gives_statistics_and_the_decode_share() -> None:
    found = json.loads(call(workloads.app, "show", "sharegpt", "--json", "--seed", "1"))
    assert found["requests"] == 4000
    assert found["output_tokens"]["mean"] == pytest.approx(280, rel=0.03)
    share = found["output_tokens"]["mean"] / (found["output_tokens"]["mean"] + found["input_tokens"]["mean"])
    assert found["decode_share"] == pytest.approx(share)
    assert found["facts"]["source"] == "profile"
    text = call(workloads.app, "show", "sharegpt", "--seed", "1")
    assert f"{found['decode_share']:.3f}" in text
    assert "source: profile" in text
    assert "note: lengths come from the published statistics" in text


def test_show_conversations_and_traces(data: Path) -> None:
    text = call(workloads.app, "show", "wildchat", "--source", f"file:{data / 'wildchat.jsonl'}")
    assert "40 requests in 5 conversations" in text
    text = call(workloads.app, "show", f"trace:{data / 'azure.csv'}")
    assert "3 requests" in text
    assert "1.33 requests/s over 1.5 s" in text


@pytest.mark.parametrize("name", list_scenarios())
def test_every_bundled_scenario_can_be_shown(name: str) -> None:
    assert json.loads(call(scenarios.app, "show", name, "--json"))["name"] == name
    assert name in call(scenarios.app, "show", name)
    if load_scenario(name).loop == "open":
        assert name in call(scenarios.app, "show", name, "--request-rate", "20")


def test_show_scenario_says_phases_and_arrivals() -> None:
    text = call(scenarios.app, "show", "concurrency-shift")
    assert "256 at a time" in text
    assert "uniform(mean 512)" in text
    found = json.loads(call(scenarios.app, "show", "constant", "--request-rate", "8", "--json"))
    assert found["arrivals"]["sessions_per_s"] == pytest.approx(8)


LUNCH = """
name = "lunch"
description = "x"
loop = "open"
[[phases]]
name = "morning"
duration_s = 20
process = "poisson"
rate = 4
[[phases]]
name = "lunch"
duration_s = 20
process = "gamma"
burstiness = 0.5
rate = 12
level = 2
"""


@pytest.fixture
def lunch(tmp_path: Path) -> str:
    path = tmp_path / "lunch.toml"
    path.write_text(LUNCH)
    return str(path)


def test_show_scenario_says_the_rates_that_hold(lunch: str) -> None:
    assert "poisson at 4 sessions/s" in call(scenarios.app, "show", lunch)
    text = call(scenarios.app, "show", lunch, "--request-rate", "3")
    assert "poisson at 3 sessions/s" in text
    assert "gamma (burstiness 0.5) at 6 sessions/s" in text
    found = json.loads(call(scenarios.app, "show", lunch, "--request-rate", "3", "--json"))
    assert [phase["rate"] for phase in found["phases"]] == [3, 6]
    found = json.loads(call(scenarios.app, "show", "saturation-steps", "--saturation-rate", "10", "--json"))
    assert [phase["rate"] for phase in found["phases"]] == [5, 8, 9.5, 12, 5]


def test_show_scenario_lays_out_the_sessions_asked_for(lunch: str) -> None:
    found = json.loads(call(scenarios.app, "show", "distribution-shift", "-n", "7", "--json"))
    assert [phase["requests"] for phase in found["phases"]] == [3, 2, 2]
    found = json.loads(call(scenarios.app, "show", lunch, "-n", "3", "--json"))
    assert [phase["name"] for phase in found["phases"]] == ["morning"]
    assert found["arrivals"]["duration_s"] < 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("saturated", "--request-rate", "5"), "has no request rate"),
        (("saturated", "--saturation-rate", "5"), "leave out --saturation-rate"),
        (("poisson", "-n", "50"), "give --request-rate"),
        (("trace", "-n", "50"), "workloads show log:FILE"),
        (("LUNCH", "--request-rate", "0.0001"), "no session arrives in 40 s at this rate; raise --request-rate or dur"),
    ],
)
def test_show_scenario_refuses_what_run_refuses(lunch: str, arguments: tuple[str, ...], message: str) -> None:
    words = [lunch if word == "LUNCH" else word for word in arguments]
    with pytest.raises(UsageError, match=message):
        CliRunner().invoke(scenarios.app, ["show", *words], catch_exceptions=False)


def test_unknown_names_are_errors_of_ebbench() -> None:
    with pytest.raises(UnknownNameError):
        CliRunner().invoke(workloads.app, ["show", "nope"], catch_exceptions=False)
