"""Upstreams that freeze, break off, or send what breaks HTTP: every client gets one answer, and no server two tries."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import httpx
import pytest

from ebbench.gateway.transport import StreamTransport, _UpstreamResponse
from tests.gateway.raw_servers import (
    OK,
    RawServer,
    ask,
    behind_gateway,
    bytes_of,
    head,
    post,
    reset,
    silence,
    status_of,
)

pytest.importorskip("starlette")

CHUNKED = b"transfer-encoding: chunked"


async def many(port: int) -> list[bytes]:
    return await asyncio.gather(*(ask(port, post()) for _ in range(10)))


def test_requests_at_a_frozen_upstream_go_to_another_one() -> None:
    frozen, healthy = RawServer(silence), RawServer(bytes_of(OK))

    async def play(port: int) -> list[bytes]:
        asking = asyncio.create_task(many(port))
        while not frozen.posts:
            await asyncio.sleep(0.01)
        frozen.frozen = True
        return await asking

    answers = behind_gateway(play, frozen, healthy, health_interval_s=0.1, health_timeout_s=0.3)
    assert [status_of(answer) for answer in answers] == [200] * 10
    assert frozen.posts
    assert len(healthy.posts) == 10


def test_a_silent_upstream_is_given_up_though_it_is_healthy() -> None:
    silent, healthy = RawServer(silence), RawServer(bytes_of(OK))
    answers = behind_gateway(many, silent, healthy, max_wait_s=1.0)
    assert [status_of(answer) for answer in answers] == [200] * 10


def test_a_client_of_a_silent_upstream_is_told() -> None:
    answer = behind_gateway(lambda port: ask(port, post()), RawServer(silence), max_wait_s=0.5)
    assert status_of(answer) == 504
    assert b"gave no answer: no byte within 0.5 s" in answer


def test_a_stream_that_falls_silent_ends_as_broken() -> None:
    async def falls_silent(writer: Any) -> bool:
        writer.write(head(b"200 OK", b"content-type: text/event-stream", CHUNKED) + b"9\r\ndata: a\n\n\r\n")
        return await silence(writer)

    answer = behind_gateway(lambda port: ask(port, post()), RawServer(falls_silent), max_wait_s=0.5)
    assert status_of(answer) == 200
    assert b"data: a\n\n" in answer
    assert b"broke off: no byte within 0.5 s" in answer
    assert not answer.endswith(b"0\r\n\r\n")


@pytest.mark.parametrize(("servers", "resends", "posts"), [(1, 1, [1]), (3, 1, [1, 1, 0]), (3, 0, [1, 0, 0])])
def test_a_request_that_breaks_servers_is_sent_to_few_and_once(servers: int, resends: int, posts: list[int]) -> None:
    fleet = [RawServer(reset) for _ in range(servers)]
    settings = {"resends": resends, "health_interval_s": 0.05, "dispatch": "round-robin"}

    async def play(port: int) -> bytes:
        answer = await ask(port, post())
        await asyncio.sleep(0.3)  # long enough for health checks to return an ejected server
        return answer

    assert status_of(behind_gateway(play, *fleet, **settings)) == 502
    assert sorted((len(server.posts) for server in fleet), reverse=True) == posts


def test_a_second_response_in_the_same_read_reaches_no_client() -> None:
    second = head(b"200 OK", b"content-length: 6", b"x-second: 1") + b"second"
    for first in (OK, head(b"200 OK", CHUNKED) + b"2\r\n{}\r\n0\r\n\r\n"):
        server = RawServer(bytes_of(first + second))

        async def play(port: int) -> list[bytes]:
            return [await ask(port, post()) for _ in range(3)]

        for answer in behind_gateway(play, server):
            assert status_of(answer) == 200
            assert b"second" not in answer
        assert len(server.posts) == 3


NO_ANSWERS = [
    head(b"200 OK", b"x: " + b"a" * 70_000, b"content-length: 2") + b"{}",
    head(b"103 Early Hints", b"link: " + b"a" * 30_000) * 3 + OK,
    head(b"200 OK", b"content-length: 2", b"content-length: 3") + b"{}",
    head(b"200 OK", b"content-length: 2", CHUNKED) + b"2\r\n{}\r\n0\r\n\r\n",
    head(b"200 OK", b"transfer-encoding: gzip") + b"{}",
    head(b"999 Odd", b"content-length: 2") + b"{}",
    head(b"099 Odd", b"content-length: 2") + b"{}",
    head(b"101 Switching Protocols", b"upgrade: x", b"connection: upgrade"),
    head(b"200 OK", b"x: a\rset-cookie: b", b"content-length: 2") + b"{}",
    b"no HTTP at all\r\n\r\n",
]
"""What an upstream answers that is not HTTP, or not whole: headers, lengths, codings, statuses, text."""


def test_what_is_no_http_answer_becomes_502() -> None:
    """One after the other, and each time the upstream's next answer passes."""
    server = RawServer(bytes_of(OK))

    async def play(port: int) -> list[list[int]]:
        found = []
        for answer in NO_ANSWERS:
            statuses = []
            for now in (answer, OK):
                server.answer = bytes_of(now)
                statuses.append(status_of(await ask(port, post())))
            found.append(statuses)
        return found

    assert behind_gateway(play, server, health_interval_s=0.1) == [[502, 200]] * len(NO_ANSWERS)


def test_headers_of_one_connection_are_not_passed_on() -> None:
    named = [b"connection: x-mine, keep-alive", b"x-mine: 1", b"keep-alive: timeout=3"]
    server = RawServer(bytes_of(head(b"200 OK", *named, b"proxy-authenticate: Basic", b"content-length: 2") + b"{}"))
    request = post(*named, b"proxy-authorization: Basic c2VjcmV0", b"authorization: Bearer k", b"te: trailers")
    answer = behind_gateway(lambda port: ask(port, request), server)
    for text in (answer.lower(), server.posts[0].lower()):
        for name in (b"x-mine", b"keep-alive", b"proxy-auth", b"\r\nte:"):
            assert name not in text
    assert b"authorization: Bearer k" in server.posts[0]


def test_trailers_of_a_response_are_not_made_headers() -> None:
    server = RawServer(bytes_of(head(b"200 OK", CHUNKED) + b"2\r\n{}\r\n0\r\nset-cookie: a=b\r\n\r\n"))
    answer = behind_gateway(lambda port: ask(port, post()), server)
    assert status_of(answer) == 200
    assert b"set-cookie" not in answer


@pytest.mark.parametrize("status", [b"204 No Content", b"304 Not Modified"])
def test_an_answer_without_a_body_keeps_the_clients_connection(status: bytes) -> None:
    async def play(port: int) -> bytes:
        return await ask(port, post() + post(b"connection: close"))

    answers = behind_gateway(play, RawServer(bytes_of(head(status, b"content-length: 2"))))
    assert answers.count(b"HTTP/1.1 " + status[:3]) == 2


def test_servers_that_want_a_key_can_be_fronted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EBBENCH_API_KEY", "k-1")
    server = RawServer(bytes_of(OK), key=b"k-1")
    with_key = behind_gateway(lambda port: ask(port, post(b"authorization: Bearer theirs")), server)
    assert status_of(with_key) == 200
    assert b"theirs" in server.posts[0]
    assert b"k-1" not in server.posts[0], "clients are not given the gateway's key"


def test_a_key_that_is_missing_is_named_in_the_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EBBENCH_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    from ebbench.errors import UsageError

    with pytest.raises(UsageError, match="refuses the API key; set EBBENCH_API_KEY"):
        behind_gateway(lambda port: ask(port, post()), RawServer(bytes_of(OK), key=b"k-1"))


@pytest.mark.parametrize(
    "answer",
    [bytes_of(OK), reset, bytes_of(head(b"200 OK", CHUNKED) + b"2\r\n{}", close=True), bytes_of(b"nonsense\r\n\r\n")],
    ids=["whole", "reset", "torn", "nonsense"],
)
def test_a_response_is_freed_when_it_ends(answer: Any) -> None:
    """The gateway runs no full collections: a reference cycle would stay until it ends."""

    async def play() -> int:
        listening = await asyncio.start_server(RawServer(answer), "127.0.0.1", 0)
        url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1/completions"
        transport = StreamTransport(5.0)
        for _ in range(20):
            try:
                response = await transport.handle_async_request(httpx.Request("POST", url, content=b"{}"))
                await response.aread()
            except httpx.TransportError as error:
                error.__traceback__ = None  # as the relay does
        await transport.aclose()
        listening.close()
        return sum(type(thing) is _UpstreamResponse for thing in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        assert asyncio.run(play()) <= 1
    finally:
        gc.enable()
