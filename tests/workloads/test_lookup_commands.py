import json

import pytest
from typer.testing import CliRunner

from ebbench.cli import scenarios, workloads
from ebbench.errors import UnknownNameError
from ebbench.workloads import list_scenarios, list_workloads


def call(app, *arguments):
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"}, catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_lists_name_everything():
    assert [row["name"] for row in json.loads(call(workloads.app, "list", "--json"))] == list_workloads()
    assert [row["name"] for row in json.loads(call(scenarios.app, "list", "--json"))] == list_scenarios()
    for app, names in ((workloads.app, list_workloads()), (scenarios.app, list_scenarios())):
        text = call(app, "list")
        assert all(name in text for name in names)
    assert "trace:FILE" in call(workloads.app, "list")


def test_show_workload_gives_statistics_and_the_decode_share():
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


def test_show_conversations_and_traces(data):
    text = call(workloads.app, "show", "wildchat", "--source", f"file:{data / 'wildchat.jsonl'}")
    assert "40 requests in 5 conversations" in text
    text = call(workloads.app, "show", f"trace:{data / 'azure.csv'}")
    assert "3 requests" in text
    assert "1.33 sessions/s over 1.5 s" in text


@pytest.mark.parametrize("name", list_scenarios())
def test_show_every_scenario(name):
    assert json.loads(call(scenarios.app, "show", name, "--json"))["name"] == name
    assert name in call(scenarios.app, "show", name, "--request-rate", "20")


def test_show_scenario_says_phases_and_arrivals():
    text = call(scenarios.app, "show", "concurrency-shift")
    assert "256 at a time" in text
    assert "uniform(mean 512)" in text
    found = json.loads(call(scenarios.app, "show", "constant", "--request-rate", "8", "--json"))
    assert found["arrivals"]["sessions_per_s"] == pytest.approx(8)


def test_unknown_names_are_errors_of_ebbench():
    with pytest.raises(UnknownNameError):
        CliRunner().invoke(workloads.app, ["show", "nope"], catch_exceptions=False)
