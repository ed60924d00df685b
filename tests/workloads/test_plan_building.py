import itertools
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ebbench.errors import InputFileError, UnknownNameError, UsageError
from ebbench.records.plan import Plan
from ebbench.records.schema import PLAN
from ebbench.workloads import build_plan
from ebbench.workloads.planner import describe
from ebbench.workloads.spec import list_workloads, load_workload


def ipc(plan: Plan) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, plan.table.schema) as writer:
        writer.write_table(plan.table)
    return sink.getvalue().to_pybytes()


CASES = [
    ("sharegpt", "saturated", {}),
    ("wildchat", "saturated", {"num_prompts": 50}),
    ("balanced", "poisson", {"request_rate": 7.5}),
    ("sharegpt", "distribution-shift", {}),
    ("longbench", "day-curve", {"request_rate": 3}),
    ("decode-heavy", "bursts-on-off", {"request_rate": 3, "length_distribution": "gamma:4"}),
]


@pytest.mark.parametrize(("workload", "scenario", "more"), CASES)
def test_same_seed_same_bytes_other_seed_other_bytes(workload: str, scenario: str, more: dict[str, Any]) -> None:
    first = ipc(build_plan(workload, scenario, seed=11, **more))
    assert ipc(build_plan(workload, scenario, seed=11, **more)) == first
    assert ipc(build_plan(workload, scenario, seed=12, **more)) != first


def test_bytes_are_the_same_in_another_process() -> None:
    code = (
        "import hashlib, pyarrow as pa\n"
        "from ebbench.workloads import build_plan\n"
        "sink = pa.BufferOutputStream()\n"
        "table = build_plan('wildchat', num_prompts=40, seed=3, source='profile').table\n"
        "writer = pa.ipc.new_stream(sink, table.schema); writer.write_table(table); writer.close()\n"
        "print(hashlib.sha256(sink.getvalue()).hexdigest())"
    )
    hashes = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env).stdout
        for env in ({"PYTHONHASHSEED": "1", "PYTHONPATH": ":".join(sys.path)},
                    {"PYTHONHASHSEED": "2", "PYTHONPATH": ":".join(sys.path)})
    }  # fmt: skip
    assert len(hashes) == 1


@pytest.mark.parametrize("workload", list_workloads())
def test_every_workload_builds_a_plan_in_the_schema(workload: str) -> None:
    plan = build_plan(workload, num_prompts=60, seed=1)
    table = plan.table
    assert table.schema.equals(PLAN)
    table.validate(full=True)
    assert len(set(table["request_id"].to_pylist())) == len(plan)
    session = table["session"].to_numpy()
    assert session.max() + 1 == 60
    assert (np.diff(session) >= 0).all()
    assert min(table["input_tokens"].to_numpy().min(), table["output_tokens"].to_numpy().min()) >= 1
    assert sum(phase.sessions for phase in plan.phases) == 60
    assert plan.facts["source"] == "profile"
    assert plan.facts["seed"] == 1


def test_multi_turn_prompts_hold_their_history() -> None:
    table = build_plan("wildchat", num_prompts=30, seed=5, source="profile").table
    rows = table.to_pylist()
    for before, row in itertools.pairwise(rows):
        if row["session"] != before["session"]:
            assert row["turn"] == 0
            continue
        assert row["turn"] == before["turn"] + 1
        assert row["content"] == before["content"]
        assert row["input_tokens"] > before["input_tokens"] + before["output_tokens"]
    assert len({row["content"] for row in rows}) == 30


def test_multi_turn_arrivals_are_those_of_first_turns() -> None:
    table = build_plan("wildchat", "poisson", num_prompts=30, request_rate=2, source="profile").table
    for row in table.to_pylist():
        assert (row["arrival_ns"] is None) == (row["turn"] > 0)


def test_contents_of_two_seeds_share_nothing() -> None:
    one, two = (set(build_plan("balanced", seed=s, num_prompts=99).table["content"].to_pylist()) for s in (1, 2))
    assert len(one) == 99
    assert not one & two


def test_the_callers_lengths_replace_the_workloads() -> None:
    plan = build_plan("balanced", num_prompts=500, input_len=40, output_len=7, length_distribution="fixed")
    assert set(plan.table["input_tokens"].to_pylist()) == {40}
    assert set(plan.table["output_tokens"].to_pylist()) == {7}
    plan = build_plan("sharegpt", num_prompts=500, output_len=100)
    assert plan.facts["source_reason"] == "lengths were set"
    assert plan.table["output_tokens"].to_numpy().max() <= 150
    assert not plan.warnings


def test_an_unlimited_rate_needs_no_scenario_of_arrivals() -> None:
    asked: dict[str, Any] = {"request_rate": math.inf, "max_concurrency": 4, "num_prompts": 8}
    with pytest.raises(UsageError, match="releases all at once; leave out --scenario poisson"):
        build_plan("balanced", "poisson", **asked)
    assert len(build_plan("balanced", "saturated", **asked)) == 8


def test_requests_that_cannot_fit_are_refused_by_name_and_count() -> None:
    table = build_plan("balanced", num_prompts=200, seed=3).table
    total = table["input_tokens"].to_numpy() + table["output_tokens"].to_numpy()
    limit = int(np.median(total))
    first = table["request_id"][int(np.argmax(total > limit))].as_py()
    count = int((total > limit).sum())
    with pytest.raises(UsageError, match=f"request {first} .* and {count - 1} more of 200 .* {limit}"):
        build_plan("balanced", num_prompts=200, seed=3, max_model_len=limit)
    plan = build_plan("balanced", num_prompts=200, seed=3, max_model_len=limit, drop_too_long=True)
    assert len(plan) == 200 - count == sum(phase.sessions for phase in plan.phases)
    assert [str(each) for each in plan.warnings] == [
        f"{count} of 200 requests longer than max_model_len {limit} were dropped"
    ]
    assert plan.facts["requests"] == len(plan)


def test_dropping_leaves_the_other_arrivals_where_they_were() -> None:
    settings = {"num_prompts": 200, "seed": 3, "request_rate": 5}
    whole = build_plan("balanced", "poisson", **settings).table
    fits = (whole["input_tokens"].to_numpy() + whole["output_tokens"].to_numpy()) <= 1024
    cut = build_plan("balanced", "poisson", **settings, max_model_len=1024, drop_too_long=True).table
    assert cut["arrival_ns"].to_pylist() == whole.filter(pa.array(fits))["arrival_ns"].to_pylist()
    assert cut["session"].to_pylist() == list(range(len(cut)))


def test_dropping_in_conversations_keeps_the_turns_before() -> None:
    plan = build_plan("wildchat", num_prompts=40, seed=1, source="profile", max_model_len=1500, drop_too_long=True)
    turns: dict[int, list[int]] = {}
    for row in plan.table.to_pylist():
        turns.setdefault(row["session"], []).append(row["turn"])
        assert row["input_tokens"] + row["output_tokens"] <= 1500
    assert all(found == list(range(len(found))) for found in turns.values())


def test_nothing_that_fits_is_refused() -> None:
    with pytest.raises(UsageError, match="none of the"):
        build_plan("balanced", num_prompts=20, max_model_len=10, drop_too_long=True)


def test_unknown_workload_suggests() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'sharegpt'"):
        build_plan("sharegtp")
    with pytest.raises(UnknownNameError, match="log:FILE"):
        build_plan("qqq")


def test_the_error_on_a_file_given_as_workload_names_the_prefix(tmp_path: Path) -> None:
    path = tmp_path / "conversation.jsonl"
    path.write_text("{}")
    with pytest.raises(UsageError, match=f"write log:{path} to replay it, .* --source file:{path}"):
        build_plan(str(path))
    with pytest.raises(UnknownNameError):
        build_plan(str(tmp_path))


MINE = """
name = "mine"
description = "x"
num_prompts = 12
[profile.input]
family = "fixed"
mean = 30
[profile.output]
family = "geometric"
mean = 4
"""


def test_a_users_workload_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(MINE)
    plan = build_plan(str(path))
    assert len(plan) == 12
    assert set(plan.table["input_tokens"].to_pylist()) == {30}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("num_prompts", "num_promts"), r"mine.toml:4: unknown key 'num_promts'; did you mean 'num_prompts'\?"),
        (
            ("family = \"fixed\"", "familly = \"fixed\""),
            r"unknown key 'familly' in \[profile.input\]; did you mean 'family'",
        ),
        (("\"fixed\"", "\"fixt\""), "Invalid enum value 'fixt'"),
        (("mean = 30", "mean = -1"), "mean must be at least 1 token"),
        (("num_prompts = 12", ""), "missing required field 'num_prompts'"),
        (("num_prompts = 12", "num_prompts = 12 12"), r"mine.toml:4: is not valid TOML"),
        (("num_prompts = 12", "zzz = 12"), "unknown key 'zzz'; known: description, fitted, hub"),
    ],
)  # fmt: skip
def test_bad_workload_files_are_refused_in_one_line(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(MINE.replace(*change))
    with pytest.raises(InputFileError, match=message) as caught:
        load_workload(str(path))
    assert "\n" not in str(caught.value)


def test_missing_and_binary_workload_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match="No such file"):
        load_workload(str(tmp_path / "none.toml"))
    (tmp_path / "bin.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputFileError, match="not UTF-8"):
        load_workload(str(tmp_path / "bin.toml"))


def test_statistics_say_the_decode_share() -> None:
    found = describe(build_plan("decode-heavy", seed=1))
    assert found["decode_share"] == pytest.approx(1024 / 1152, abs=0.01)
    assert found["input_tokens"]["p50"] == pytest.approx(128, abs=4)
    found = describe(build_plan("balanced", "constant", request_rate=4, num_prompts=40))
    assert found["arrivals"]["sessions_per_s"] == pytest.approx(4)
    assert found["arrivals"]["gap_variation"] == pytest.approx(0, abs=1e-6)


def test_importing_is_light() -> None:
    code = (
        "import sys, ebbench.workloads\n"
        "heavy = {'datasets', 'numpy', 'pyarrow', 'httpx', 'transformers', 'tokenizers', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "ebbench.workloads.build_plan('sharegpt', source='profile')\n"
        "heavy = {'datasets', 'httpx', 'tokenizers', 'pandas'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
