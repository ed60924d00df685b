"""Several workloads in one plan: shares, settings, limits and priorities of classes, and what is refused."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from ebbench.cli.main import app
from ebbench.client.bodies import RequestBodies
from ebbench.client.session_plan import plan_sessions
from ebbench.errors import InputFileError, UsageError
from ebbench.fakeserver import FakeConfig, FakeServerProcess
from ebbench.records.manifest import plan_hash
from ebbench.records.plan import Plan
from ebbench.records.run import Run
from ebbench.spec.client import ClientOptions
from ebbench.workloads.mixture import Mixture, RequestClass, read_mixture
from ebbench.workloads.options import PlanOptions, is_recorded, mixture_parts
from ebbench.workloads.planner import make_plan

TWO = "chat=sharegpt:0.75 talk=wildchat:0.25"


def plan_of(workload: str, **options: Any) -> Plan:
    given = {"source": "profile", "num_prompts": 40, "max_concurrency": 4, **options}
    return make_plan(PlanOptions(workload, **given))


def classes_of_sessions(plan: Plan) -> dict[int, str]:
    return dict(zip(plan.table["session"].to_pylist(), plan.table["class"].to_pylist(), strict=True))


@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=5), st.integers(100, 2000))
@settings(max_examples=100, deadline=None)
def test_counts_of_classes_are_the_shares_to_the_nearest(shares: list[float], sessions: int) -> None:
    mixture = Mixture(tuple(RequestClass(f"c{n}", "sharegpt", share) for n, share in enumerate(shares)))
    exact = [sessions * share / sum(shares) for share in shares]
    if min(exact) < 1:
        return
    counts = mixture.counts(sessions)
    assert sum(counts) == sessions
    assert all(abs(count - wanted) < 1 for count, wanted in zip(counts, exact, strict=True))


def test_sessions_of_classes_are_interleaved_in_their_shares() -> None:
    classes = classes_of_sessions(plan_of(TWO))
    assert Counter(classes.values()) == {"chat": 30, "talk": 10}
    order = [classes[session] for session in sorted(classes)]
    assert order != sorted(order)


def test_each_class_has_its_own_requests_whole_and_in_order() -> None:
    plan = plan_of(TWO)
    talk = plan.table.filter(np.array(plan.table["class"].to_pylist()) == "talk")
    for session in set(talk["session"].to_pylist()):
        own = talk.filter(np.array(talk["session"].to_pylist()) == session)
        assert own["turn"].to_pylist() == list(range(own.num_rows))
        inputs, outputs = own["input_tokens"].to_pylist(), own["output_tokens"].to_pylist()
        assert all(later > before + made for before, made, later in zip(inputs, outputs, inputs[1:], strict=False))
        assert len(set(own["content"].to_pylist())) == 1
    contents = Counter(zip(plan.table["content"].to_pylist(), plan.table["session"].to_pylist(), strict=True))
    assert len({content for content, _ in contents}) == 40


def test_equal_seeds_give_equal_plans_and_others_do_not() -> None:
    assert plan_hash(plan_of(TWO)) == plan_hash(plan_of(TWO))
    assert plan_hash(plan_of(TWO)) != plan_hash(plan_of(TWO, seed=1))


def test_one_workload_in_two_classes_gives_other_requests() -> None:
    plan = plan_of("a=sharegpt:1 b=sharegpt:1")
    lengths: dict[str, list[int]] = {"a": [], "b": []}
    for name, tokens in zip(plan.table["class"].to_pylist(), plan.table["input_tokens"].to_pylist(), strict=True):
        lengths[name].append(tokens)
    assert lengths["a"] != lengths["b"]


def test_arrivals_are_those_of_the_whole_plan(tmp_path: Path) -> None:
    plan = plan_of(TWO, scenario="poisson", request_rate=5.0, max_concurrency=None)
    single = plan_of("sharegpt", scenario="poisson", request_rate=5.0, max_concurrency=None)
    first = plan.table["arrival_ns"].drop_null()
    assert first.to_pylist() == single.table["arrival_ns"].to_pylist()


def test_logs_in_classes_keep_their_prefixes_apart(tmp_path: Path) -> None:
    for name in "ab":
        rows = [{"timestamp": n, "input_length": 1200, "output_length": 5, "hash_ids": [1, 2, n + 3]} for n in range(6)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    workload = f"log:{tmp_path}/a.jsonl:2,log:{tmp_path}/b.jsonl:1"
    assert [part[0] for part in mixture_parts(workload)] == ["a", "b"]
    assert not is_recorded(workload)
    plan = plan_of(workload, source="auto", num_prompts=12)
    ids: dict[str, set[int]] = {"a": set(), "b": set()}
    for name, blocks in zip(plan.table["class"].to_pylist(), plan.table["hash_ids"].to_pylist(), strict=True):
        ids[name] |= set(blocks)
    assert not ids["a"] & ids["b"]
    # Each pass through a log has contents of its own: class a (8 of 12 sessions) is read twice.
    assert len(ids["b"]) == 2 + 4


FILE = """
name = "two"
num_prompts = 20
[classes.chat]
workload = "sharegpt"
share = 3
goodput = "ttft:5000 tpot:500"
priority = 0
[classes.talk]
workload = "wildchat"
share = 1
think_time = "0.5"
input_len = 50
goodput = "ttft:0.001"
"""


def test_a_file_gives_each_class_its_own_settings(tmp_path: Path) -> None:
    path = tmp_path / "two.toml"
    path.write_text(FILE.replace("priority = 0", ""))
    plan = plan_of(str(path), num_prompts=None)
    assert Counter(classes_of_sessions(plan).values()) == {"chat": 15, "talk": 5}
    pauses = dict.fromkeys(("chat", "talk"), 0)
    for name, pause in zip(plan.table["class"].to_pylist(), plan.table["pause_ns"].to_pylist(), strict=True):
        pauses[name] += pause or 0
    assert pauses["chat"] == 0 < pauses["talk"]


def test_limits_of_a_file_hold_and_options_replace_them(tmp_path: Path) -> None:
    path = tmp_path / "two.toml"
    path.write_text(FILE.replace("priority = 0", ""))
    run = ["run", str(path), "--source", "profile", "--policy", "v1", "-c", "4", "-q", "--json"]
    [own] = json.loads(CliRunner().invoke(app, [*run, "-o", str(tmp_path / "a")]).stdout)
    assert own["goodput_slo_ms"] == {"chat:ttft": 5000.0, "chat:tpot": 500.0, "talk:ttft": 0.001}
    assert (own["worst_class"], own["worst_class_attainment"]) == ("talk", 0.0)
    assert own["classes"]["chat"]["slo_attainment"] == 1.0
    changed = [*run, "-o", str(tmp_path / "b"), "--goodput", "talk:ttft:60000"]
    [other] = json.loads(CliRunner().invoke(app, changed).stdout)
    assert other["goodput_slo_ms"]["talk:ttft"] == 60000.0
    assert other["slo_attainment"] == 1.0


def test_class_and_priority_travel_to_a_server_and_into_its_run(tmp_path: Path) -> None:
    plan = plan_of(TWO, priorities="talk=7", with_text=False)
    sessions = plan_sessions(plan.table, plan.phases, plan.max_concurrency)
    bodies = RequestBodies("m", ClientOptions())
    sent = [json.loads(bodies.build(sessions.turn(row)))["priority"] for row in range(len(plan))]
    assert sent == [7 if name == "talk" else 0 for name in plan.table["class"].to_pylist()]
    with FakeServerProcess(FakeConfig(ttft_ms=1, itl_ms=0.1)) as server:
        run = [
            "run",
            TWO,
            "--engine",
            server.url,
            "--source",
            "profile",
            "-n",
            "8",
            "-c",
            "4",
            "-q",
            "--keep-prefix-cache",
        ]
        load = ["--priorities", "talk=7", "--lag-limit-ms", "60000", "-o", str(tmp_path / "run")]
        done = CliRunner().invoke(app, [*run, *load])
    assert done.exit_code == 0, done.output
    assert "--scheduling-policy priority" in " ".join(done.output.split())
    stored = Run.load(tmp_path / "run")
    by_id = dict(zip(stored.plan["request_id"].to_pylist(), stored.plan["class"].to_pylist(), strict=True))
    rows = zip(stored.requests["request_id"].to_pylist(), stored.requests["class"].to_pylist(), strict=True)
    assert all(by_id[name] == own for name, own in rows)
    assert set(by_id.values()) == {"chat", "talk"}
    assert sum(stored.table("classes")["planned"].to_pylist()) == stored.requests.num_rows


@pytest.mark.parametrize(
    ("workload", "options", "message"),
    [
        ("chat=sharegpt:0.6", {}, "two classes or more"),
        ("sharegpt:0.6 longbench", {}, "longbench has none"),
        ("sharegpt:1 sharegpt:1", {}, "two classes are named sharegpt"),
        ("ttft=sharegpt:1 longbench:1", {}, "'ttft' cannot name a class"),
        ("sharegpt:0 longbench:1", {}, "above 0"),
        ("a=sharegpt:1000 b=longbench:1", {}, "class b gets none"),
        ("a=sharegpt:1 b=longbench:1", {"think_time": "5"}, "class a: think time"),
        ("a=sharegpt:1 b=longbench:1", {"priorities": "c=1"}, "no request has the class 'c'; its classes are a, b"),
        ("a=sharegpt:1 b=longbench:1", {"priorities": "a"}, "class=number"),
        ("a=sharegpt:1 b=longbench:1", {"scenario": "trace"}, "recorded times"),
        ("sharegpt", {"priorities": "a=1"}, "no request has the class 'a'"),
    ],
)
def test_what_cannot_be_mixed_is_refused(workload: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan_of(workload, **options)


def test_a_server_that_does_not_schedule_by_priority_is_refused() -> None:
    run = ["run", TWO, "--source", "profile", "-n", "8", "-c", "2", "--priorities", "talk=1", "--policy", "v1"]
    done = CliRunner().invoke(app, run)
    assert done.exit_code == 2
    assert "add --scheduling-policy priority" in " ".join(done.output.split())


def test_a_priority_beyond_what_a_server_takes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "two.toml"
    path.write_text(FILE.replace("priority = 0", "priority = 99_999_999_999"))
    with pytest.raises(InputFileError, match="<= 999999999"):
        plan_of(str(path))


def test_results_of_a_class_have_its_priority(tmp_path: Path) -> None:
    load = ["--source", "profile", "-n", "8", "-c", "2", "--priorities", "talk=1", "--scheduling-policy", "priority"]
    run = ["run", TWO, *load, "--policy", "v1"]
    done = CliRunner().invoke(app, [*run, "-o", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    shown = " ".join(done.output.split())
    for words in ("priorities talk=1", "schedules by priority", "class priority policy"):
        assert words in shown
    stored = Run.load(tmp_path / "run").table("classes")
    assert stored.select(["class", "priority"]).to_pydict() == {"class": ["chat", "talk"], "priority": [0, 1]}
    [own] = json.loads(CliRunner().invoke(app, [*run, "--json", "-q"]).stdout)
    assert own["classes"]["talk"]["priority"] == 1


def test_single_workloads_are_no_mixtures(tmp_path: Path) -> None:
    assert read_mixture("sharegpt") is None
    assert mixture_parts("log:trace.csv") == mixture_parts("log:a:2024") == mixture_parts("trace:x 2.csv") == []
