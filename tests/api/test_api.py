"""``import ebbench as eb``: the same runs as the command's, results that show themselves, errors with a remedy."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import ebbench as eb
from ebbench import api
from ebbench.cli import main
from ebbench.fakeserver.process import FakeServerProcess
from ebbench.spec.run import named_as_keys

SMALL: dict[str, Any] = {
    "source": "profile",
    "num_prompts": 60,
    "max_concurrency": 16,
    "max_num_seqs": 8,
    "device": "h200",
}
POLICIES = ["v1", "ebplus"]


@pytest.fixture(scope="module")
def runs() -> eb.Runs:
    return eb.run("sharegpt", policies=POLICIES, **SMALL)


def in_new_process(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_loads_nothing_else() -> None:
    loaded = in_new_process("import ebbench, json, sys; print(json.dumps([m for m in sys.modules if 'ebbench' in m]))")
    assert json.loads(loaded) == ["ebbench"]


def test_no_module_has_the_name_of_a_function() -> None:
    code = (
        "import pkgutil, ebbench as eb; print([n for _, n, _ in pkgutil.iter_modules(eb.__path__) if n in eb.__all__])"
    )
    assert in_new_process(code).strip() == "[]", "a module of this name would replace the function"


def test_every_name_is_there_and_no_other() -> None:
    assert vars(eb)["__all__"] == api.__all__
    assert set(api.__all__) <= set(dir(eb))
    assert all(getattr(eb, name) is getattr(api, name) for name in api.__all__)
    assert not hasattr(eb, "rnu")


def test_figures_are_those_of_the_command(runs: eb.Runs, tmp_path: Path) -> None:
    words = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    words += [f"--policy={policy}" for policy in POLICIES]
    done = CliRunner().invoke(main.app, ["run", "sharegpt", *words, "--output-dir", str(tmp_path / "runs"), "--json"])
    expected = json.loads(done.stdout)
    assert done.exit_code == 0
    for result, row in zip(runs, expected, strict=True):
        figures = json.loads(json.dumps(result.figures))
        assert {**figures, "run_dir": ""} == {**row, "run_dir": ""}


def test_runs_are_a_sequence_with_policies(runs: eb.Runs) -> None:
    assert runs.policies == ("v1", "ebplus")
    assert [len(runs), len(runs["ebplus"]), len(runs[:1])] == [2, 1, 1]
    assert runs["ebplus"][0] is runs[1]
    with pytest.raises(eb.UnknownNameError, match="'ebplus'"):
        runs["ebplu"]


def test_tables_have_a_row_per_run_and_per_request(runs: eb.Runs) -> None:
    assert runs.to_arrow().num_rows == 2
    requests = runs.requests()
    assert requests.num_rows == 120
    assert requests.column_names[:2] == ["policy", "seed"]
    assert runs.to_pandas()["policy"].tolist() == POLICIES


def test_tables_have_a_row_per_session_and_per_class(runs: eb.Runs) -> None:
    assert runs.sessions().num_rows == runs.classes().num_rows == 0
    given = {**SMALL, "num_prompts": 12, "goodput": "chat:ttft:9000"}
    mixed = eb.run("chat=sharegpt:0.5 talk=wildchat:0.5", policies=["v1"], **given)
    sessions, classes = mixed.sessions(), mixed.classes()
    assert sessions.num_rows == 12
    assert classes["class"].to_pylist() == ["chat", "talk"]
    assert sum(classes["planned"].to_pylist()) == mixed.requests().num_rows == sum(sessions["turns"].to_pylist())
    assert sessions.column_names[:2] == classes.column_names[:2] == ["policy", "seed"]


def test_they_show_themselves_as_text_and_html(runs: eb.Runs) -> None:
    assert "qwen3-8b on h200" in str(runs)
    assert repr(runs) == "<Runs: 2 of sharegpt, v1, ebplus>"
    assert repr(runs[1]).startswith("<RunResult: sharegpt under ebplus on ")
    html = runs._repr_html_()
    assert "<table>" in html
    assert "data:image/svg+xml;base64," in html


def test_remedies_name_keywords_not_options() -> None:
    html = eb.run("sharegpt", policies="v1", **SMALL)._repr_html_()
    assert "num_prompts" in html
    assert "--num-prompts" not in html
    with pytest.raises(eb.UsageError, match=r"^max_num_seqs must be at least 1, not 0$"):
        eb.run("sharegpt", **{**SMALL, "max_num_seqs": 0})


def test_commands_in_remedies_keep_their_options() -> None:
    said = named_as_keys("give --max-num-seqs, or run `ebbench calibrate --model m` with --no-prefix-caching")
    assert said == "give max_num_seqs, or run `ebbench calibrate --model m` with enable_prefix_caching=False"


def test_output_dir_keeps_the_runs(tmp_path: Path) -> None:
    made = eb.run("sharegpt", policies=POLICIES, output_dir=tmp_path / "runs", **SMALL)
    again = eb.load(tmp_path / "runs")
    assert [one.figures for one in again["v1"]] == [one.figures for one in made["v1"]]
    with pytest.raises(eb.UsageError, match="exists; give another output_dir"):
        eb.run("sharegpt", policies=POLICIES, output_dir=tmp_path / "runs", **SMALL)


def test_runs_without_output_dir_are_gone_at_the_end_unless_saved(tmp_path: Path) -> None:
    code = f"""
import ebbench as eb
runs = eb.run("sharegpt", policies="v1", **{SMALL!r})
print(runs[0].run.path, runs[0].run.path.exists())
runs.save({str(tmp_path / "kept")!r})
"""
    place, exists = in_new_process(code).split()
    assert exists == "True"
    assert not Path(place).exists()
    assert len(eb.load(tmp_path / "kept")) == 1


def test_a_file_runs_with_keywords_on_top(tmp_path: Path) -> None:
    file = tmp_path / "bench.toml"
    file.write_text('workload = "balanced"\npolicy = "v1"\nnum_prompts = 30\nseed = 1\nmax_concurrency = 8\n')
    [result] = eb.run(str(file), seed=5)
    assert (result.summary.workload, result.summary.seed, result.summary.metrics.planned) == ("balanced", 5, 30)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_promts": 3}, "did you mean 'num_prompts'"),
        ({"polices": ["v1"]}, "did you mean 'policies'"),
        ({"num_prompts": "many"}, "num_prompts: expected int"),
        ({"policies": ["v7"]}, "unknown policy 'v7'"),
        ({"policies": []}, "policy is an empty list"),
        ({"policies": ["v1"], "policy": "v1"}, "one setting"),
        ({"repeats": 0}, "repeats must be at least 1"),
        ({"enable_prefix_caching": False, "cache_hit_rate": 0.5}, "leave out enable_prefix_caching=False"),
    ],
)
def test_what_cannot_be_is_refused_with_a_remedy(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(eb.UsageError, match=message):
        eb.run("sharegpt", **settings)


@pytest.mark.parametrize("name", ["device", "tp", "policies", "max_num_seqs"])
def test_a_plan_refuses_an_empty_list_of_alternatives(name: str) -> None:
    settings: dict[str, Any] = {name: []}
    with pytest.raises(eb.UsageError, match="is an empty list"):
        eb.plan("sharegpt", request_rate=5.0, goodput="ttft:900", **settings)


def test_the_load_of_a_search_is_not_a_setting() -> None:
    with pytest.raises(eb.UsageError, match="request_rate is not a setting of this function"):
        eb.capacity("sharegpt", goodput="ttft:300", request_rate=3.0)


def test_keywords_are_listed_for_completion_and_help() -> None:
    assert {"policies", "device", "request_rate", "output_dir"} <= inspect.signature(eb.run).parameters.keys()
    assert "request_rate" not in inspect.signature(eb.capacity).parameters
    assert inspect.signature(eb.plan_async).parameters.keys() == inspect.signature(eb.plan).parameters.keys()
    assert "num_prompts: " in str(eb.run.__doc__)


def test_progress_goes_to_a_function_and_nowhere_else(capfd: pytest.CaptureFixture[str]) -> None:
    events: list[eb.ProgressEvent] = []
    eb.run("sharegpt", policies="v1", progress=events.append, **SMALL)
    assert (events[-1].done, events[-1].total) == (60, 60)
    assert events[-1].snapshot is not None
    assert "60/60" in str(events[-1])
    assert capfd.readouterr() == ("", "")


def test_progress_true_prints_as_the_command_does(capfd: pytest.CaptureFixture[str]) -> None:
    eb.run("sharegpt", policies="v1", progress=True, **SMALL)
    assert "v1: 60 requests" in capfd.readouterr().err


def test_a_server_that_is_down_is_an_error() -> None:
    with pytest.raises(eb.RunError, match="is the server running there"):
        eb.run("sharegpt", engine="http://127.0.0.1:9", ready_timeout_s=0)


def test_an_invalid_run_is_returned_with_a_warning() -> None:
    with FakeServerProcess() as server, pytest.warns(UserWarning, match="INVALID run of v1"):
        runs = eb.run(
            "sharegpt", engine=server.url, source="profile", num_prompts=5, output_len=4, request_rate=50,
            lag_limit_ms=1e-9,
        )  # fmt: skip
    assert not runs.valid
    assert repr(runs).endswith("INVALID>")


def test_runs_of_two_policies_are_compared(runs: eb.Runs) -> None:
    compared = eb.compare(runs)
    assert {row["policy"] for row in compared.to_arrow().to_pylist()} == {"ebplus"}
    assert "ebplus against v1" in str(compared)
    assert "<table>" in compared._repr_html_()
    assert eb.compare(runs["v1"], runs[1]).to_dict()["baseline"] == "v1"


def test_capacity_is_that_of_the_command_and_keeps_no_probes() -> None:
    found = eb.capacity(
        "balanced", goodput="ttft:500 tpot:50", policies="v1", num_prompts=60, max_num_seqs=16, max_probes=4
    )
    [row] = found.to_arrow().to_pylist()
    assert row["capacity_requests_per_s"] == found["v1"]["capacity_requests_per_s"] > 0
    assert found.curves().num_rows == 4
    assert "sess/s" in str(found)
    assert "data:image/svg+xml" in found._repr_html_()
    assert found.directory is None
    assert not Path(found.rows[0]["nearest_run_dir"]).exists()


@pytest.mark.usefixtures("fewer_sessions")
def test_a_plan_names_the_cheapest_deployment() -> None:
    found = eb.plan(
        "balanced",
        request_rate=1,
        goodput="ttft:5000 tpot:200",
        device="h200",
        tp=1,
        policies="v1",
        max_num_seqs=16,
        workers=1,
    )
    assert found.best is not None
    assert found.to_arrow().to_pylist()[0]["replicas"] == found.best.deployment.replicas
    assert "Cheapest that carries this rate" in str(found)
    assert "<pre" in found._repr_html_()
