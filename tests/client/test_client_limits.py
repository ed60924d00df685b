"""Limits: of this machine on connections, and of the client on what a server sends that is no event stream."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import resource
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebbench.client.dialects import DIALECTS
from ebbench.client.request_sender import BODY_S
from ebbench.client.response import BODY_LIMIT, transport_failure
from ebbench.errors import UsageError
from ebbench.fakeserver import FakeConfig, FakeServerProcess
from ebbench.network.connections import ConnectError
from ebbench.process.child import OTHER_FILES, allow_open_files
from tests.client.client_runs import column, plan_of, run
from tests.client.odd_server import Answer, OddServer, completion, reply, running
from tests.gate.gate_data import invoke


@pytest.fixture
def soft_limit() -> Iterator[None]:
    """100 open files as the soft limit."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("soft_limit")
def test_the_soft_limit_is_raised_to_what_the_load_needs() -> None:
    with FakeServerProcess(FakeConfig(ttft_ms=300, itl_ms=1)) as server:
        result = run(server.url, plan_of(160, concurrency=160), workers=1)
    assert set(column(result, "status")) == {"ok"}
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 160 + OTHER_FILES


@pytest.mark.usefixtures("soft_limit")
def test_a_limit_is_never_lowered() -> None:
    assert allow_open_files(10) == 100
    assert allow_open_files(150) == 150


def test_what_the_hard_limit_cannot_hold_is_refused_with_the_number() -> None:
    words = ["run", "balanced", "--engine", "", "-n", "300", "-c", "200", "--lag-limit-ms", "60000", "-q"]
    with FakeServerProcess(FakeConfig(ttft_ms=1, itl_ms=1)) as server:
        words[3] = server.url
        command = ["bash", "-c", 'ulimit -n 128; exec "$@"', "-", sys.executable, "-m", "ebbench", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "200 requests open at a time need 264 open files" in done.stderr
    assert "the hard limit is 128" in done.stderr
    assert "--workers 4" in done.stderr


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EADDRNOTAVAIL])
@pytest.mark.parametrize("plain", [True, False])
def test_limits_of_this_machine_are_not_the_servers_fault(number: int, plain: bool) -> None:
    error = ConnectError("no")
    error.__cause__ = (
        OSError(number, "x") if plain else OSError(f"Multiple exceptions: [Errno {number}] x, [Errno 111] y")
    )
    assert transport_failure(error) == "client_limit"
    assert transport_failure(ConnectError("refused")) == "connect_error"


async def endless(writer: asyncio.StreamWriter, head: bytes, piece: bytes) -> None:
    writer.write(head)
    while True:
        writer.write(piece)
        await writer.drain()


async def endless_refusal(writer: asyncio.StreamWriter) -> None:
    await endless(
        writer, b"HTTP/1.1 500 Oh\r\ntransfer-encoding: chunked\r\n\r\n", b"8000\r\n" + b"e" * 32768 + b"\r\n"
    )


async def endless_page(writer: asyncio.StreamWriter) -> None:
    await endless(writer, b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\n\r\n", b"<p>" * 10_000)


async def endless_header(writer: asyncio.StreamWriter) -> None:
    await endless(writer, b"HTTP/1.1 200 OK\r\nx-long: ", b"h" * 32768)


async def endless_hints(writer: asyncio.StreamWriter) -> None:
    await endless(writer, b"", b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n" * 500)


async def endless_trailer(writer: asyncio.StreamWriter) -> None:
    unfinished = completion(2).removesuffix(b"data: [DONE]\n\n")  # else the answer ends there, whatever follows
    events = b"%x\r\n%b\r\n0\r\n" % (len(unfinished), unfinished)
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    await endless(writer, head + events + b"x-trailer: ", b"t" * 32768)


@pytest.mark.parametrize("transport", ["direct", "httpx"])
@pytest.mark.parametrize(
    ("answer", "error_class"),
    [
        (endless_refusal, "http_500"),
        (endless_page, "not_a_stream"),
        (endless_header, "connection_closed"),
        (endless_hints, "connection_closed"),
        (endless_trailer, "connection_closed"),
    ],
)
def test_no_refusal_fills_the_memory(answer: Answer, error_class: str, transport: str) -> None:
    if transport == "httpx" and answer is endless_hints:
        pytest.skip("httpx reads interim responses without end; only requests that are not timed go through it")
    with running(OddServer(post=answer)) as server:
        tracemalloc.start()
        try:
            result = run(server.url, plan_of(4, output_tokens=2), transport=transport, idle_timeout_s=20.0)
            peak_bytes = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert set(column(result, "error_class")) == {error_class}
    assert max(len(body) for body in column(result, "error_body")) <= BODY_LIMIT
    assert peak_bytes < 60 << 20


@pytest.mark.parametrize("transport", ["direct", "httpx"])
def test_a_refusal_that_drips_is_cut(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def dripping(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 503 Later\r\ncontent-length: 100000\r\n\r\n")
        while True:
            writer.write(b"no ")
            await writer.drain()
            await asyncio.sleep(0.05)

    assert BODY_S == 10.0
    monkeypatch.setattr("ebbench.client.request_sender.BODY_S", 0.5)
    with running(OddServer(post=dripping)) as server:
        result = run(server.url, plan_of(1), transport=transport)
    assert column(result, "error_class") == ["http_503"]
    assert column(result, "error_body")[0].startswith("no no ")


@pytest.mark.parametrize("transport", ["direct", "httpx"])
def test_a_key_is_hidden_before_the_message_is_cut(transport: str) -> None:
    key = "sk-" + "0123456789abcdef" * 4
    body = b"x" * (BODY_LIMIT - 20) + key.encode() * 3
    with running(OddServer(post=reply("400 Bad Request", body))) as server:
        result = run(server.url, plan_of(1), {"OPENAI_API_KEY": key}, transport=transport)
    (text,) = column(result, "error_body")
    assert "[hidden]" in text
    assert "sk-" not in text


@pytest.mark.parametrize("transport", ["direct", "httpx"])
@pytest.mark.parametrize("media_type", ["Text/Event-Stream; charset=UTF-8", "text/event-stream ;x=1"])
def test_a_media_type_in_another_case_is_a_stream(media_type: str, transport: str) -> None:
    with running(OddServer(post=reply("200 OK", completion(6), content_type=media_type))) as server:
        result = run(server.url, plan_of(2), transport=transport)
    assert column(result, "status") == ["ok", "ok"]
    assert not DIALECTS["completions"].takes("text/event-streams")


def test_a_close_after_the_client_gave_up_leaves_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    async def stalls(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + completion(6)[:150])
        await writer.drain()
        await asyncio.sleep(1.0)
        writer.close()

    with running(OddServer(post=stalls)) as server:
        result = run(server.url, plan_of(2, concurrency=2), idle_timeout_s=0.4)
    assert column(result, "error_class") == ["idle_timeout"] * 2
    assert [record.message for record in caplog.records if "Exception in callback" in record.message] == []


def test_fields_of_a_request_can_be_renamed_and_left_out() -> None:
    with running(OddServer()) as server:
        run(server.url, plan_of(1), endpoint="chat", max_tokens_field="max_tokens")
        run(server.url, plan_of(1), extra_body={"temperature": None, "stream_options": None, "top_p": 0.5})
        with pytest.raises(UsageError, match="--max-tokens-field 'prompt'"):
            run(server.url, plan_of(1), max_tokens_field="prompt")
    chat, plain = server.bodies
    assert (chat["max_tokens"], "max_completion_tokens" in chat) == (6, False)
    assert {"temperature", "stream_options"}.isdisjoint(plain)
    assert plain["top_p"] == 0.5


def test_an_export_overwrites_nothing(tmp_path: Path) -> None:
    (tmp_path / "kept.json").write_text("{}")
    words = ("--save-as-vllm", str(tmp_path / "kept.json"), "-o", str(tmp_path / "run"))
    done = invoke("run", "balanced", "--engine", "http://127.0.0.1:1", "-n", "2", *words)
    assert done.exit_code == 2
    assert "kept.json exists; give another file or remove it" in " ".join(done.stderr.split())
    assert json.loads((tmp_path / "kept.json").read_text()) == {}
    assert os.listdir(tmp_path) == ["kept.json"]  # noqa: PTH208
