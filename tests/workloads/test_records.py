"""The selection rules of the reference, on small files in the data sets' own schemas (invented text)."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ebbench.errors import InputFileError, UsageError
from ebbench.records.plan import Plan
from ebbench.workloads import build_plan
from ebbench.workloads.tokens import ByteEstimate, token_counter

FILES = {
    "sharegpt": "sharegpt.json",
    "longbench": "longbench.jsonl",
    "numinamath": "numinamath.jsonl",
    "wildchat": "wildchat.jsonl",
}


def rows(path: Path) -> list[Any]:
    text = path.read_text()
    return json.loads(text) if path.suffix == ".json" else [json.loads(line) for line in text.splitlines()]


def plan_of(data: Path, workload: str, **more: Any) -> Plan:
    return build_plan(workload, source=f"file:{data / FILES[workload]}", **more)


def tokens(text: str) -> int:
    return -(-len(text.encode()) // 4)


@pytest.mark.parametrize("workload", FILES)
@pytest.mark.parametrize("form", ["json", "jsonl", "parquet"])
def test_json_jsonl_and_parquet_give_the_same_plan(data: Path, tmp_path: Path, workload: str, form: str) -> None:
    path = tmp_path / f"copy.{form}"
    records = rows(data / FILES[workload])
    if form == "json":
        path.write_text(json.dumps(records))
    elif form == "jsonl":
        path.write_text("\n".join(map(json.dumps, records)))
    else:
        pq.write_table(pa.Table.from_pylist(records), path)
    assert build_plan(workload, source=f"file:{path}", seed=2).table.equals(plan_of(data, workload, seed=2).table)


def test_sharegpt_takes_human_gpt_pairs_in_order_each_its_own_prompt(data: Path) -> None:
    pairs = [
        (a["value"], b["value"])
        for row in rows(data / FILES["sharegpt"])
        for a, b in zip(row["conversations"], row["conversations"][1:], strict=False)
        if (a["from"], b["from"]) == ("human", "gpt") and a["value"] and b["value"]
    ]
    plan = plan_of(data, "sharegpt")
    table = plan.table
    assert table["prompt"].to_pylist() == [human for human, _ in pairs]
    assert table["input_tokens"].to_pylist() == [tokens(human) for human, _ in pairs]
    assert table["output_tokens"].to_pylist() == [min(500, tokens(gpt)) for _, gpt in pairs]
    assert set(table["turn"].to_pylist()) == {0}
    assert max(table["output_tokens"].to_pylist()) == 500
    first = plan_of(data, "sharegpt", num_prompts=5).table
    assert first["prompt"].to_pylist() == [human for human, _ in pairs[:5]]


def test_longbench_cuts_contexts_between_1000_and_4000_tokens(data: Path) -> None:
    records = rows(data / FILES["longbench"])
    table = plan_of(data, "longbench", seed=6).table
    long_enough = [row for row in records if tokens(row["context"]) + tokens(row["input"]) >= 1000]
    assert len(table) == len(long_enough) == len(records) - 1
    for row, prompt in zip(long_enough, table["prompt"].to_pylist(), strict=True):
        assert prompt.endswith("\n\n" + row["input"])
        assert row["context"].startswith(prompt.removesuffix("\n\n" + row["input"]))
    inputs = table["input_tokens"].to_numpy()
    assert inputs.min() >= 1000
    assert inputs.max() <= 4000
    assert set(table["output_tokens"].to_pylist()) == {20}
    other = plan_of(data, "longbench", seed=7).table
    assert len(other) == len(table)
    assert not (other["input_tokens"].to_numpy() == inputs).all()


def test_numinamath_asks_to_think_step_by_step(data: Path) -> None:
    records = rows(data / FILES["numinamath"])
    table = plan_of(data, "numinamath").table
    assert len(table) == len(records)
    for row, prompt, output in zip(
        records, table["prompt"].to_pylist(), table["output_tokens"].to_pylist(), strict=True
    ):
        assert prompt.startswith(row["problem"])
        assert "step by step" in prompt[len(row["problem"]) :].lower()
        assert output == min(4000, tokens(row["solution"]))


def test_wildchat_replays_conversations_of_six_to_twelve_rounds(data: Path) -> None:
    records = [row for row in rows(data / FILES["wildchat"]) if row["turn"] >= 6]
    plan = plan_of(data, "wildchat")
    table = plan.table.to_pylist()
    rounds = np.bincount([row["session"] for row in table])
    assert rounds.tolist() == [min(12, row["turn"]) for row in records]
    assert rounds.max() == 12
    for before, row in itertools.pairwise(table):
        said = records[row["session"]]["conversation"]
        answer = said[2 * row["turn"] + 1]["content"]
        assert row["output_tokens"] == min(256, tokens(answer))
        assert row["prompt"].rstrip().endswith(said[2 * row["turn"]]["content"].rstrip())
        if row["turn"]:
            previous = said[2 * row["turn"] - 1]["content"]
            cut = before["prompt"] + previous.encode()[: 4 * 256].decode(errors="ignore")
            assert row["prompt"].startswith(cut)
            assert row["input_tokens"] > before["input_tokens"] + before["output_tokens"]
    # Rounding up each message separately adds at most a token each.
    for row in table:
        assert 0 <= row["input_tokens"] - tokens(row["prompt"]) <= 2 * row["turn"] + 1


def test_text_can_be_left_out(data: Path) -> None:
    for workload in FILES:
        with_text, without = plan_of(data, workload), plan_of(data, workload, with_text=False)
        assert without.table["prompt"].null_count == len(without)
        assert without.table.drop(["prompt"]).equals(with_text.table.drop(["prompt"]))


def test_facts_and_warnings_say_how_tokens_were_counted(data: Path) -> None:
    plan = plan_of(data, "numinamath")
    assert plan.facts["source"] == f"file:{data / FILES['numinamath']}"
    assert "estimated" in plan.facts["token_counts"]
    assert any("--tokenizer" in warning for warning in map(str, plan.warnings))


def test_fewer_records_than_phases_ask_for(data: Path) -> None:
    plan = plan_of(data, "sharegpt", scenario="saturated", num_prompts=1000)
    assert plan.phases[0].sessions == len(plan) < 1000
    assert any(f"holds {len(plan)} sessions where the plan takes 1,000" in text for text in map(str, plan.warnings))


BROKEN = {
    "sharegpt": ({"conversations": [{"from": "human", "text": "x"}]}, "missing required field 'value'"),
    "longbench": ({"context": "x", "input": "y", "answers": "z"}, "Expected 'array'"),
    "numinamath": ({"problem": "x"}, "missing required field 'solution'"),
    "wildchat": ({"conversation": "x"}, "Expected 'array'"),
}


@pytest.mark.parametrize("workload", FILES)
def test_wrong_schemas_name_file_line_and_what_was_expected(data: Path, tmp_path: Path, workload: str) -> None:
    record, message = BROKEN[workload]
    good = json.dumps(rows(data / FILES[workload])[1])
    path = tmp_path / "bad.jsonl"
    path.write_text(f"{good}\n\n{json.dumps(record)}\n")
    with pytest.raises(InputFileError, match=message) as caught:
        build_plan(workload, source=f"file:{path}")
    assert caught.value.line == 3
    assert f"record 2 is not in the {workload} schema" in str(caught.value)
    assert "expected {" in str(caught.value)


def test_a_file_without_admissible_records_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "short.jsonl"
    path.write_text(json.dumps({"conversation": [{"role": "user", "content": "x"}]}) + "\n")
    with pytest.raises(InputFileError, match="no wildchat record that passes the selection rules"):
        build_plan("wildchat", source=f"file:{path}")


def test_lone_surrogates_and_empty_texts_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "odd.json"
    said = [
        ("human", "\ud83d half"),
        ("gpt", "fine \udc00"),
        ("human", ""),
        ("gpt", "x"),
        ("human", "ok"),
        ("gpt", "ok"),
    ]
    path.write_text(json.dumps([{"conversations": [{"from": who, "value": text} for who, text in said]}]))
    table = build_plan("sharegpt", source=f"file:{path}").table
    assert table["prompt"].to_pylist() == ["? half", "ok"]


def test_byte_estimate_counts_and_cuts_alike() -> None:
    estimate = ByteEstimate()
    texts = ["", "a", "abcd", "abcde", "磨坊主数石头", "é" * 9]
    assert estimate.count(texts).tolist() == [0, 1, 1, 2, 5, 5]
    for text in texts:
        for size in range(6):
            assert estimate.count([estimate.cut(text, size)])[0] <= size
            assert text.startswith(estimate.cut(text, size))


@pytest.fixture
def words(tmp_path: Path) -> Path:
    tokenizers = pytest.importorskip("tokenizers")  # optional: comes with vLLM and transformers
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    (tmp_path / "words").mkdir()
    tokenizer.save(str(tmp_path / "words" / "tokenizer.json"))
    return tmp_path / "words"


def test_a_tokenizer_counts_and_cuts(data: Path, words: Path) -> None:
    counter = token_counter(str(words))
    assert counter.count(["one two  three", ""]).tolist() == [3, 0]
    assert counter.cut("one two  three", 2) == "one two"
    assert counter.cut("one two", 5) == "one two"
    plan = plan_of(data, "longbench", tokenizer=str(words / "tokenizer.json"))
    assert plan.facts["token_counts"].startswith("tokenizer ")
    assert not any("estimated" in warning for warning in map(str, plan.warnings))
    split = pytest.importorskip("tokenizers").pre_tokenizers.Whitespace()
    for prompt, size in zip(plan.table["prompt"].to_pylist(), plan.table["input_tokens"].to_pylist(), strict=True):
        assert len(split.pre_tokenize_str(prompt)) == size


def test_a_file_that_is_not_a_tokenizer_is_refused(tmp_path: Path, data: Path) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(UsageError, match=r"not a tokenizer\.json"):
        plan_of(data, "sharegpt", tokenizer=str(tmp_path / "bad.json"))
