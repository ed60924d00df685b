"""Texts of prompts and answers in logs: what counts as tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ebbench.workloads.recorded import answer_text, joined_text
from ebbench.workloads.trace import read_trace

CALL = {"id": "call_1", "type": "function", "function": {"name": "read_file", "arguments": '{"path": "a.py"}'}}


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("plain", ["plain"]),
        ({"choices": [{"message": {"content": "first"}}, {"message": {"content": "second"}}]}, ["first"]),
        ({"choices": [{"message": {"content": None, "tool_calls": [CALL]}}]}, ["read_file", '{"path": "a.py"}']),
        ({"content": "so", "reasoning_content": "hm", "tool_calls": [CALL]}, ["hm", "so", "read_file"]),
        ({"content": None, "function_call": {"name": "old", "arguments": "{}"}}, ["old", "{}"]),
        ({"content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}, ["one", "two"]),
        (
            {"output": [{"type": "function_call", "name": "find", "arguments": "{}"}, {"content": [{"text": "done"}]}]},
            ["find", "{}", "done"],
        ),
        (
            {"content": [{"type": "thinking", "thinking": "hm"}, {"type": "tool_use", "name": "f", "input": {"a": 1}}]},
            ["hm", "f", '{"a": 1}'],
        ),
        ({"choices": [], "message": {}}, []),
        ({"id": "only"}, []),
    ],
)
def test_an_answer_is_its_thinking_its_text_and_its_tool_calls(answer: Any, words: list[str]) -> None:
    found = answer_text(answer)
    places = [found.find(word) for word in words]
    assert -1 not in places
    assert places == sorted(places)
    assert bool(found) == bool(words)


def test_tool_calls_are_part_of_a_prompt() -> None:
    messages = [{"role": "user", "content": "go"}, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    assert joined_text(messages) == 'user: go\nassistant: read_file\n{"path": "a.py"}'


def test_a_log_whose_answers_are_tool_calls_has_lengths(tmp_path: Path) -> None:
    path = tmp_path / "agent.jsonl"
    messages = [{"role": "user", "content": "go on " * 20}]
    response = {"choices": [{"message": {"role": "assistant", "content": None, "tool_calls": [CALL]}}]}
    rows = [{"created": 1_767_225_600 + at, "request": {"messages": messages}, "response": response} for at in range(5)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    requests = read_trace(path).requests
    assert len(requests) == 5
    assert (requests.output_tokens == -(-len('read_file\n{"path": "a.py"}') // 4)).all()


def test_prompts_with_images_are_said_to_be_counted_without_them(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    parts = [
        {"type": "text", "text": "what is it?"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}},
    ]
    row = {"messages": [{"role": "user", "content": parts}], "response": "a cat"}
    path.write_text(json.dumps(row) + "\n")
    assert "texts-only" in [warning.code for warning in read_trace(path).requests.warnings]
    path.write_text(json.dumps(row | {"prompt_tokens": 900}) + "\n")
    assert "texts-only" not in [warning.code for warning in read_trace(path).requests.warnings]
