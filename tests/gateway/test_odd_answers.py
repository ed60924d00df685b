"""Responses without a body, and streams cut inside an event, from a server that writes raw bytes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from ebbench.client.stream_messages import SseSplitter
from ebbench.gateway.process import GatewayProcess
from ebbench.gateway.relay import MAX_LINE_BYTES, LineBuffer
from ebbench.gateway.settings import GatewaySettings
from ebbench.gateway.transport import StreamTransport

pytest.importorskip("starlette")

MODELS = b'{"data":[{"id":"m"}]}'
WHOLE = b'data: {"choices":[{"text":"a"}]}\n\n'
EVENTS = b"content-type: text/event-stream"
CHUNKED = b"transfer-encoding: chunked"


def head(status: bytes, *headers: bytes) -> bytes:
    return b"\r\n".join([b"HTTP/1.1 " + status, *headers]) + b"\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Server:
    """Answers GET with its model, HEAD and POST with ``parts``, one a read; after a POST it closes the connection."""

    def __init__(self, *parts: bytes, idle_s: float = 5.0) -> None:
        self._parts, self._idle_s = parts, idle_s

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError, TimeoutError):
            await self._serve(reader, writer)
        writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            request = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), self._idle_s)
            if request.startswith(b"GET"):
                writer.write(head(b"200 OK", b"content-length: %d" % len(MODELS)) + MODELS)
                continue
            for part in self._parts:
                writer.write(part)
                await asyncio.sleep(0.02)
            if request.startswith(b"POST"):
                return


def scenario(server: Server, play: Callable[[str], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        listening = await asyncio.start_server(server, "127.0.0.1", 0)
        try:
            return await play(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}")
        finally:
            listening.close()

    return asyncio.run(run())


def through_gateway(
    server: Server, play: Callable[[httpx.AsyncClient], Awaitable[Any]], health_interval_s: float = 60.0
) -> Any:
    """By default no health check runs meanwhile: it would reinstate an upstream that was wrongly marked as failed."""

    async def run(url: str) -> Any:
        settings = GatewaySettings(upstreams=(url,), port=0, drain_s=2.0, health_interval_s=health_interval_s)
        gateway = GatewayProcess(settings)
        await asyncio.to_thread(gateway.__enter__)
        try:
            async with httpx.AsyncClient(base_url=gateway.url, timeout=120, trust_env=False) as client:
                return await play(client)
        finally:
            await asyncio.to_thread(gateway.stop)

    return scenario(server, run)


@pytest.mark.parametrize(
    "parts",
    [
        (head(b"200 OK", b"content-length: 21"),),
        (head(b"405 Method Not Allowed", b"content-length: 31"),),
        (head(b"200 OK", CHUNKED),),
        (head(b"200 OK"),),
        (head(b"200 OK", b"content-length: 0"),),
        (head(b"103 Early Hints") + head(b"200 OK", b"content-length: 21"),),
        (head(b"200 OK", b"content-length: 21") + MODELS,),  # a server that sends the body all the same
        (head(b"200 OK", CHUNKED) + chunk(MODELS) + chunk(b""),),
        (head(b"200 OK", b"content-length: 21"), MODELS),
    ],
)
def test_the_answer_to_a_head_request_ends_with_its_headers(parts: tuple[bytes, ...]) -> None:
    async def play(url: str) -> None:
        transport = StreamTransport(5.0)
        async with asyncio.timeout(10):  # the server would hold the connection for longer
            for method, body in (("HEAD", b""), ("GET", MODELS)) * 3:
                response = await transport.handle_async_request(httpx.Request(method, url + "/v1/models"))
                assert await response.aread() == body
                assert response.status_code in (200, 405)
        await transport.aclose()

    scenario(Server(*parts, idle_s=60.0), play)


@pytest.mark.parametrize("status", [b"200 OK", b"405 Method Not Allowed"])
def test_head_requests_do_not_take_an_upstream_out(status: bytes) -> None:
    async def play(client: httpx.AsyncClient) -> None:
        for _ in range(3):
            answer = await client.head("/v1/models")
            assert answer.status_code == int(status[:3])
            assert answer.headers["content-length"] == "31"
        await asyncio.sleep(0.3)  # the server closes its idle connections
        (upstream,) = (await client.get("/gateway")).json()["upstreams"]
        assert (upstream["state"], upstream["open"], upstream["ejections"]) == ("active", 0, 0)

    through_gateway(Server(head(status, b"content-length: 31"), idle_s=0.1), play)


async def stream(client: httpx.AsyncClient) -> bytes:
    """The bytes of a stream that arrived before its connection broke."""
    content = b""
    async with client.stream("POST", "/v1/completions", content=b"{}") as answer:
        try:
            async for data in answer.aiter_raw():
                content += data
        except httpx.RemoteProtocolError:
            return content
    raise AssertionError("it did not break")


@pytest.mark.parametrize(
    ("torn", "kept"),
    [
        (b"", 0),
        (b"d", 0),
        (b'data: {"choices":[{"text":"b","fin', 0),
        (b'data: {"choices":[{"text":"b"}]}', 0),  # without the end of its line, the event may be incomplete
        (b'data: {"choices":[{"text":"b"}]}\n', 1),
        (b'data: {"choices":[{"text":"b"}]}\r\n', 1),
        (b'data: {"choices":[{"text":"b"}]}\r\n\r', 1),
    ],
)
def test_the_error_of_a_torn_stream_is_an_event_of_its_own(torn: bytes, kept: int) -> None:
    server = Server(head(b"200 OK", EVENTS, CHUNKED), chunk(WHOLE), *([chunk(torn)] if torn else []))
    *events, error = (json.loads(event.data) for event in SseSplitter().feed(through_gateway(server, stream)))
    assert [event["choices"][0]["text"] for event in events] == ["a", "b"][: 1 + kept]
    assert "connection closed in the middle of the answer" in error["error"]["message"]


def test_a_torn_event_too_large_to_be_held_is_ended_before_the_error() -> None:
    torn = b"data: " + b"x" * 2 * MAX_LINE_BYTES
    server = Server(head(b"200 OK", EVENTS, CHUNKED), chunk(WHOLE), chunk(torn))
    first, large, error = (event.data for event in SseSplitter().feed(through_gateway(server, stream)))
    assert first == WHOLE[6:-2]
    assert len(large) > MAX_LINE_BYTES
    assert set(large) == set(b"x")
    assert json.loads(error)["error"]["code"] == 502


def test_a_broken_response_that_is_not_a_stream_is_passed_unchanged() -> None:
    server = Server(head(b"200 OK", b"content-type: application/json", b"content-length: 99"), b'{"choi')
    assert through_gateway(server, stream) == b'{"choi'


def test_a_stream_that_ends_without_a_line_end_is_passed_to_its_last_byte() -> None:
    async def play(client: httpx.AsyncClient) -> bytes:
        return (await client.post("/v1/completions", content=b"{}")).content

    content = WHOLE + b"data: [DONE]"
    server = Server(head(b"200 OK", EVENTS, CHUNKED), chunk(content), chunk(b""))
    assert through_gateway(server, play) == content


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100, 1000])
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
def test_lines_are_passed_whole_and_unchanged(line_end: bytes, size: int) -> None:
    content = line_end.join([b"data: one", b"", b": a comment", b"data: two", b"", b"data: the last"])
    lines = LineBuffer()
    passed = [lines.feed(content[start : start + size]) for start in range(0, len(content), size)]
    assert all(part.endswith((b"\n", b"\r")) for part in passed if part)
    assert lines.rest() == b"data: the last"
    assert b"".join(passed) + b"data: the last" == content


def test_a_line_that_never_ends_does_not_fill_the_memory() -> None:
    lines = LineBuffer()
    passed = sum(len(lines.feed(b"x" * 1000)) for _ in range(1000))
    rest = len(lines.rest())
    assert passed + rest == 1_000_000
    assert rest <= MAX_LINE_BYTES


def test_upstreams_that_pass_health_checks_and_answer_nothing_give_502() -> None:
    async def play(client: httpx.AsyncClient) -> httpx.Response:
        return await client.post("/v1/completions", json={"prompt": "a"})

    answer = through_gateway(Server(), play, health_interval_s=0.05)
    assert answer.status_code == 502
    assert answer.json()["error"]["message"].endswith("gave no answer: connection closed before any answer")
