"""Who answered, and what the server knew already: other models than asked for, prompts that it met before."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ebbench.client.dialects import DIALECTS
from ebbench.client.load_generator import drive
from ebbench.client.prefix_cache import MOST_LINES, note_prompts, prompts_key, record_path
from ebbench.client.response import LONGEST_MODEL, MOST_MODELS, StreamedResponse
from ebbench.client.verdict import other_models_warning
from ebbench.records.plan import Plan
from ebbench.records.warnings import OTHER_MODEL
from ebbench.spec.client import ClientOptions
from ebbench.workloads import build_plan


@contextmanager
def server(models: tuple[Any, ...] = (), flushes: int = 404) -> Iterator[tuple[str, list[str]]]:
    """A server whose answers name ``models`` in turns, and that answers /flush_cache with the status ``flushes``.

    Yields its URL and the paths that were requested.
    """
    paths: list[str] = []
    started: list[Any] = []
    ready = threading.Event()

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                length = next((int(h[15:]) for h in head if h.lower().startswith("content-length:")), 0)
                body = await reader.readexactly(length)
                path = head[0].split(" ")[1]
                writer.write(_reply(path, body, paths, models, flushes))
                paths.append(path)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def serve() -> None:
        listening = await asyncio.start_server(client, "127.0.0.1", 0)
        stop = asyncio.Event()
        started.extend([listening.sockets[0].getsockname()[1], asyncio.get_running_loop(), stop])
        ready.set()
        await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    ready.wait()
    yield f"http://127.0.0.1:{started[0]}", paths
    started[1].call_soon_threadsafe(started[2].set)
    thread.join()


def _reply(path: str, body: bytes, paths: list[str], models: tuple[Any, ...], flushes: int) -> bytes:
    if path == "/health":
        return b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
    if path == "/flush_cache":
        return f"HTTP/1.1 {flushes} X\r\ncontent-length: 0\r\n\r\n".encode()
    if path != "/v1/completions":
        return b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"
    number = sum(each == path for each in paths)
    named = {"model": models[number % len(models)]} if models else {}
    tokens = json.loads(body)["max_tokens"]
    choices = [[{"text": "a", "finish_reason": "length" if i == tokens - 1 else None}] for i in range(tokens)]
    events = [{"choices": choice, **named} for choice in choices]
    events.append({"choices": [], "usage": {"prompt_tokens": 8, "completion_tokens": tokens}, **named})
    text = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
    head = f"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: {len(text)}\r\n\r\n"
    return head.encode() + text


def plan(seed: int = 1, prompts: int = 8) -> Plan:
    return build_plan(
        "balanced", "saturated", seed=seed, num_prompts=prompts, max_concurrency=2, input_len=8, output_len=3
    )


def run(url: str, made: Plan | None = None) -> Any:
    return drive(url, made or plan(), ClientOptions(workers=1, model="big", power=False))


def test_answers_from_a_fallback_model_are_counted_and_warned_of() -> None:
    with server(("big", "small")) as (url, _):
        done = run(url)
    assert done.facts["other_models"] == {"small": 4}
    (said,) = [str(each) for each in done.warnings if each.code == OTHER_MODEL]
    assert said.startswith("4 of 8 answers did not come from 'big' alone, as asked for: 4 from 'small'")


def test_a_server_that_always_names_another_model_is_no_mixture() -> None:
    with server(("big-2026-01",)) as (url, _):
        done = run(url)
    (said,) = [str(each) for each in done.warnings if each.code == OTHER_MODEL]
    assert said.startswith("every answer names 'big-2026-01' as its model, not 'big' as asked for")


@pytest.mark.parametrize("models", [(), ("big",), (7,), (None,), ({"id": "x"},)])
def test_the_model_asked_for_or_none_is_no_reason_to_warn(models: tuple[Any, ...]) -> None:
    """A name of another type is no name; it does not fail the answer."""
    with server(models) as (url, _):
        done = run(url)
    assert "other_models" not in done.facts
    assert done.requests["status"].to_pylist() == ["ok"] * 8


def test_names_that_never_repeat_are_bounded() -> None:
    with server(tuple(f"model-{number}" for number in range(60))) as (url, _):
        done = run(url, plan(prompts=60))
    assert len(done.facts["other_models"]) == 21
    assert done.facts["other_models"]["others"] == 40


def test_a_base_model_that_answers_for_an_adapter_is_said() -> None:
    said = str(other_models_warning({"base": 45}, "base", 68))
    assert said.startswith("45 of 68 answers to requests for an adapter name 'base' itself")
    assert "did not come from" not in said


def test_a_model_that_changes_within_an_answer_is_kept_by_its_names() -> None:
    streamed = StreamedResponse(DIALECTS["completions"], keep_text=False)
    for name in ("a", "a", "b", "x" * 500, "c", "d", "e"):
        streamed.feed(b'data: {"model": "%s", "choices": [{"text": "t"}]}\n\n' % name.encode(), 1)
    assert len(streamed.models) == MOST_MODELS
    assert streamed.models[:3] == ["a", "b", "x" * LONGEST_MODEL]
    assert "3 of 3 answers did not come" in str(other_models_warning({"a and b": 3}, "a", 3))


def test_hostile_names_stay_on_one_line() -> None:
    said = str(other_models_warning({"x\n::error::\x1b[31m": 2}, "a", 4))
    assert "error" in said
    assert "\n" not in said
    assert "\x1b" not in said


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path


def met(done: Any) -> list[str]:
    return [text for text in map(str, done.warnings) if "were sent to this server before" in text]


def test_prompts_that_a_server_met_before_are_warned_of(state: Path) -> None:
    with server() as (url, paths):
        assert not met(run(url))
        (said,) = met(run(url))
        assert said.startswith("100 % of these prompts were sent to this server before")
        assert "it reports no hits" in said
        (half,) = met(run(url, plan(prompts=16)))
        assert half.startswith("50 %"), "more prompts of the seed, or another load, begin with the same ones"
        assert not met(run(url, plan(seed=2)))
    assert paths.count("/reset_prefix_cache") == paths.count("/flush_cache") == 4
    assert record_path({"XDG_STATE_HOME": str(state)}).exists()


def test_a_cache_that_flush_cache_empties_is_no_reason_to_warn(state: Path) -> None:
    with server(flushes=200) as (url, _):
        assert run(url).facts["prefix_cache_reset"] is True
        assert not met(run(url))
    assert list(state.iterdir()) == []


def test_the_record_is_bounded_and_survives_damage_and_a_read_only_home(state: Path) -> None:
    environ = {"XDG_STATE_HOME": str(state)}
    path = record_path(environ)
    path.parent.mkdir(parents=True)
    path.write_bytes(b'\xff{"server": 1}\n[]\n' * MOST_LINES)
    table = plan().table
    assert note_prompts("http://s", "m", table, environ) is None
    assert path.read_bytes().count(b"\n") <= MOST_LINES + 1
    again = note_prompts("http://s", "m", table, environ)
    assert again is not None
    assert again.share == 1.0
    assert note_prompts("http://s", "other", table, environ) is None
    assert note_prompts("http://s", "m", table, {"XDG_STATE_HOME": "/proc/nowhere"}) is None


def test_prompts_are_the_seeds_whatever_the_load() -> None:
    few, many = plan(prompts=8), plan(prompts=40)
    assert prompts_key(few.table)[0] == prompts_key(many.table)[0] != prompts_key(plan(seed=2).table)[0]
    assert (prompts_key(few.table)[1], prompts_key(many.table)[1]) == (8, 40)
