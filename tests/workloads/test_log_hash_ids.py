"""Hash ids of logs: the size of their blocks, the prompts that they name, and the prefix cache that they fill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbench.devices.loader import load_device
from ebbench.engines.sim import SimEngine
from ebbench.records.plan import block_tokens, token_ids
from ebbench.spec.server import EngineOptions
from ebbench.traffic.spec import Replay
from ebbench.workloads import build_plan
from ebbench.workloads.log_report import repeated_prefixes
from ebbench.workloads.trace import read_trace, replayed
from vllm_eb.policy import parse_policy


def test_hash_ids_of_any_block_size(logs: Path) -> None:
    timed = build_plan(f"log:{logs / 'timed_trace.jsonl'}", time_unit="s")
    assert block_tokens(timed.table) == 16
    assert any("blocks of 16 tokens" in warning for warning in map(str, timed.warnings))
    weka = build_plan(f"log:{logs / 'weka.json'}").table
    assert block_tokens(weka) == 64
    ids = weka["hash_ids"].to_pylist()
    assert ids[4][:3] == ids[0]
    assert ids[1][0] == ids[0][0]
    assert ids[1][1] not in ids[0]
    assert block_tokens(build_plan(f"log:{logs / 'bailian.jsonl'}").table) == 16


def test_hash_ids_of_another_trace_file_mean_other_prompts(tmp_path: Path, logs: Path) -> None:
    one = json.loads((logs / "weka.json").read_text())
    path = tmp_path / "two.jsonl"
    path.write_text(json.dumps(one) + "\n" + json.dumps({**one, "id": "trace_0002"}) + "\n")
    ids = read_trace(path).requests.hash_ids
    assert ids is not None
    assert not set(ids[0].as_py()) & set(ids[5].as_py()) or len(set(map(str, ids.to_pylist()))) > 5


@settings(max_examples=60, deadline=None)
@given(
    size=st.sampled_from([16, 64, 128, 512]),
    blocks=st.lists(st.integers(1, 30), min_size=3, max_size=8),
    whole=st.booleans(),
)
def test_the_block_size_read_gives_every_prompt_its_ids(
    tmp_path_factory: pytest.TempPathFactory, size: int, blocks: list[int], whole: bool
) -> None:
    path = tmp_path_factory.mktemp("blocks") / "t.jsonl"
    rows: list[dict[str, Any]] = [
        {
            "timestamp": 1000 * at,
            "input_length": count * size if whole else (count - 1) * size + 1,
            "output_length": 3,
            "hash_ids": list(range(count)),
        }
        for at, count in enumerate(blocks)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = block_tokens(build_plan(f"log:{path}").table)
    for row in rows:
        assert found * (len(row["hash_ids"]) - 1) < row["input_length"]
    if whole and len(set(blocks)) > 1:
        assert found == size


def test_equal_hash_ids_give_equal_tokens_in_blocks_of_any_size() -> None:
    for size in (16, 64, 512):
        one = token_ids(1, [5, 6], 0, 3 * size, 1000, size)
        other = token_ids(2, [5, 7], 0, 3 * size, 1000, size)
        assert np.array_equal(one[:size], other[:size])
        assert not np.array_equal(one[size : 2 * size], other[size : 2 * size])
        assert not np.array_equal(one[2 * size :], other[2 * size :])


def test_the_simulated_cache_tells_small_blocks_apart(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    rows = [[1, 2, 3, 4], [1, 2, 8, 9], [1, 2, 3, 7], [5, 6, 10, 11]]
    path.write_text("".join(
        json.dumps({"timestamp": 20.5 * at, "input_length": 64, "output_length": 4, "hash_ids": ids}) + "\n"
        for at, ids in enumerate(rows)
    ))  # fmt: skip
    plan = build_plan(f"log:{path}", time_unit="s")
    assert block_tokens(plan.table) == 16
    options = EngineOptions(max_num_seqs=8, max_num_batched_tokens=2048)
    result = SimEngine().run(plan, parse_policy("v1"), load_device("h200", "qwen3-8b"), options, None)
    assert result.requests["cached_tokens"].to_pylist() == [0, 32, 48, 0]


LABELS = [
    [2**64 - 1, 2**64 - 2],
    [2**63, 5],
    [2**255 + 1, 2**255],
    [-(2**62), -2],
    ["a3f9", "b01c"],
    [2**63 - 1, 2**63 - 2],
]


@pytest.mark.parametrize("ids", LABELS)
def test_hash_ids_are_labels_of_any_size(tmp_path: Path, ids: list[Any]) -> None:
    path = tmp_path / "log.jsonl"
    rows = [ids, ids, [ids[0], 77], [1, 2]]
    path.write_text("".join(
        json.dumps({"timestamp": 400 * at, "input_length": 1024, "output_length": 4, "hash_ids": row}) + "\n"
        for at, row in enumerate(rows)
    ))  # fmt: skip
    trace = read_trace(path)
    assert trace.requests.hash_ids is not None
    found = trace.requests.hash_ids.to_pylist()
    assert found[0] == found[1]
    assert found[2][0] == found[0][0]
    assert len({one for row in found for one in row}) == 5
    assert repeated_prefixes(trace.requests)["repeated_share"] == pytest.approx(3 / 8)
    twice = replayed(trace.timed(), Replay(repeat=2)).hash_ids
    assert twice is not None
    assert not {one for row in twice.to_pylist()[4:] for one in row} & {one for row in found for one in row}


@pytest.mark.parametrize(
    ("rows", "share"),
    [
        ([(513, [1, 2]), (1024, [1, 2])], 512 / 1537),  # the first prompt's last block holds one token
        ([(1024, [1, 2]), (513, [1, 2])], 512 / 1537),
        ([(513, [1, 2]), (513, [1, 2])], 1 / 2),
        ([(1024, [1, 2]), (1024, [2, 1])], 0.0),  # the same blocks in another order are no prefix
        ([(1024, [1, 2]), (1024, [3, 2])], 0.0),
        ([(1024, [1, 2]), (512, [2])], 0.0),
    ],
)
def test_only_what_follows_the_same_blocks_is_repeated(
    tmp_path: Path, rows: list[tuple[int, list[int]]], share: float
) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text("".join(
        json.dumps({"timestamp": 400 * at, "input_length": tokens, "output_length": 4, "hash_ids": ids}) + "\n"
        for at, (tokens, ids) in enumerate(rows)
    ))  # fmt: skip
    assert repeated_prefixes(read_trace(path).requests)["repeated_share"] == pytest.approx(share)
