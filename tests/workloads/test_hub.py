"""The hub source, through ``datasets``, against a local server with the hub's protocol.

In a process of its own, since the libraries read ``HF_ENDPOINT`` when they are imported.
"""

import io
import json
import os
import random
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.workloads.mini_hub import MiniHub

SHAREGPT_FILE = "ShareGPT_V3_unfiltered_cleaned_split.json"
ASK = """
import json, sys
from ebbench.errors import EbbenchError
from ebbench.workloads import build_plan
for arguments in json.loads(sys.argv[1]):
    try:
        plan = build_plan(**arguments)
        told = [str(each) for each in plan.warnings]
        print(json.dumps({"facts": dict(plan.facts), "warnings": told, "table": plan.table.to_pylist()}))
    except EbbenchError as error:
        print(json.dumps({"error": str(error), "exit_code": error.exit_code}))
"""


Ask = Callable[..., list[Any]]


@pytest.fixture
def ask(tmp_path: Path) -> Ask:
    """Build plans in a process whose hub is ``endpoint``."""

    def run(endpoint: str, *requests: dict[str, Any], **more: str) -> list[Any]:
        environ = {
            **os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hf"), "NO_PROXY": "127.0.0.1",
            "XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": ":".join(sys.path), **more,
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-c", ASK, json.dumps(requests)], env=environ, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    return run


def sharegpt(n: int) -> bytes:
    """As published: one JSON array over many lines."""
    records = [
        {
            "id": f"x{i}",
            "conversations": [{"from": "human", "value": f"ask {i}"}, {"from": "gpt", "value": "so " * 900}],
        }
        for i in range(n)
    ]
    return json.dumps(records, indent=2).encode()


def parquet(records: list[dict[str, Any]]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(records), sink, row_group_size=50)
    return sink.getvalue()


def test_sharegpt_streams_only_the_first_records_of_a_json_array(ask: Ask) -> None:
    content = sharegpt(9000)
    with MiniHub({"anon8231489123/ShareGPT_Vicuna_unfiltered": {SHAREGPT_FILE: content}}) as hub:
        options = {"workload": "sharegpt", "num_prompts": 40}
        first, again = ask(hub.endpoint, options, {**options, "num_prompts": 30})
        requests = list(hub.requests)
    assert first["facts"]["source"] == "hub"
    assert [row["prompt"] for row in first["table"]] == [f"ask {i}" for i in range(40)]
    assert {row["output_tokens"] for row in first["table"]} == {500}
    assert 0 < hub.sent[SHAREGPT_FILE] < len(content) / 2
    # The second plan, of fewer prompts, comes from what was kept.
    assert "read before and kept in" in again["facts"]["source_reason"]
    assert [row["prompt"] for row in again["table"]] == [f"ask {i}" for i in range(30)]
    assert sum("/resolve/" in request for request in requests) == 1


def test_a_cached_data_set_is_used_when_the_hub_is_unreachable(ask: Ask) -> None:
    options = {"workload": "sharegpt", "num_prompts": 20, "source": "hub"}
    with MiniHub({"anon8231489123/ShareGPT_Vicuna_unfiltered": {SHAREGPT_FILE: sharegpt(60)}}) as hub:
        (online,) = ask(hub.endpoint, options)
        endpoint = hub.endpoint
    offline, more = ask(endpoint, options, {**options, "num_prompts": 21})
    assert offline["table"] == online["table"]
    assert more["exit_code"] == 4
    assert "cannot be reached" in more["error"]
    (forbidden,) = ask(endpoint, options, HF_HUB_OFFLINE="1")
    assert forbidden["table"] == online["table"]


def test_a_data_set_smaller_than_asked_is_taken_whole_and_remembered(ask: Ask) -> None:
    options = {"workload": "sharegpt", "num_prompts": 100}
    with MiniHub({"anon8231489123/ShareGPT_Vicuna_unfiltered": {SHAREGPT_FILE: sharegpt(7)}}) as hub:
        first, again = ask(hub.endpoint, options, options)
    assert len(first["table"]) == len(again["table"]) == 7
    assert any("holds 7 sessions where the plan takes 100" in warning for warning in first["warnings"])
    assert "read before" in again["facts"]["source_reason"]


def test_numinamath_and_wildchat_through_parquet(ask: Ask, data: Path) -> None:
    numina = [{**json.loads(line), "n": i} for i, line in enumerate((data / "numinamath.jsonl").open())]
    wild = [json.loads(line) for line in (data / "wildchat.jsonl").open()]
    repositories = {
        "AI-MO/NuminaMath-CoT": {
            "README.md": b"---\nlicense: apache-2.0\n---\n",
            "data/train-00000-of-00002.parquet": parquet(numina[:6]),
            "data/train-00001-of-00002.parquet": parquet(numina[6:]),
        },
        "allenai/WildChat-1M": {"data/train-00000-of-00001.parquet": parquet(wild)},
    }
    with MiniHub(repositories) as hub:
        found = ask(
            hub.endpoint,
            {"workload": "numinamath", "num_prompts": 8},
            {"workload": "numinamath", "num_prompts": 8, "source": f"file:{data / 'numinamath.jsonl'}"},
            {"workload": "wildchat", "num_prompts": 4},
            {"workload": "wildchat", "num_prompts": 4, "source": f"file:{data / 'wildchat.jsonl'}"},
        )
    assert [plan["facts"]["source"].partition(":")[0] for plan in found] == ["hub", "file", "hub", "file"]
    assert found[0]["table"] == found[1]["table"]
    assert found[2]["table"] == found[3]["table"]


def test_longbench_reads_single_files_out_of_the_archive(ask: Ask) -> None:
    noise = random.Random(1)
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        # The archive is larger than what streaming reads ahead (5 MiB), and the first task lies in front.
        for task, rows in (("narrativeqa", 30), ("qasper", 30), ("samsum", 6000)):
            records = [
                {"input": f"{task} {i}?", "context": noise.randbytes(3000).hex(), "answers": ["so"], "length": 1}
                for i in range(rows)
            ]
            file.writestr(f"data/{task}.jsonl", "\n".join(map(json.dumps, records)))
    content = archive.getvalue()
    with MiniHub({"zai-org/LongBench": {"data.zip": content}}) as hub:
        (plan,) = ask(hub.endpoint, {"workload": "longbench", "num_prompts": 50})
    assert plan["facts"]["source"] == "hub"
    asked = [row["prompt"].rpartition("\n\n")[2] for row in plan["table"]]
    assert asked == [f"narrativeqa {i}?" for i in range(30)] + [f"qasper {i}?" for i in range(20)]
    assert hub.sent["data.zip"] > 0


def test_without_the_data_set_the_profile_is_used(ask: Ask) -> None:
    with MiniHub({}) as hub:
        auto, strict = ask(
            hub.endpoint, {"workload": "wildchat", "num_prompts": 3}, {"workload": "wildchat", "source": "hub"}
        )
    assert auto["facts"]["source"] == "profile"
    assert "answered 404 for allenai/WildChat-1M" in auto["facts"]["source_reason"]
    assert strict["exit_code"] == 4


def test_a_hub_whose_file_is_missing_or_wrong(ask: Ask) -> None:
    name = "anon8231489123/ShareGPT_Vicuna_unfiltered"
    requests = {"workload": "sharegpt", "num_prompts": 3}, {"workload": "sharegpt", "source": "hub"}
    for files, reason in (
        ({"other.json": b"[]"}, "cannot be read"),
        ({SHAREGPT_FILE: b'[{"a": 1}]'}, "not as expected"),
    ):
        with MiniHub({name: files}) as hub:
            auto, strict = ask(hub.endpoint, *requests)
        assert auto["facts"]["source"] == "profile"
        assert reason in auto["facts"]["source_reason"]
        assert strict["exit_code"] == 4
        assert "\n" not in strict["error"]
