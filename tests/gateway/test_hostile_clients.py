"""Clients that break HTTP, or hold memory and time: each is refused in its own terms and the gateway goes on."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ebbench.gateway import serve
from ebbench.gateway.relay import dispatch_request
from ebbench.gateway.serve import MAX_HEAD_BYTES, LimitedProtocol
from tests.gateway.raw_servers import OK, RawServer, ask, behind_gateway, bytes_of, post, silence, status_of

pytest.importorskip("starlette")

CHUNKED = b"transfer-encoding: chunked"
LONG = b"a" * (MAX_HEAD_BYTES + 1)


def chunked(end: bytes = b"0\r\n\r\n", *headers: bytes) -> bytes:
    lines = [b"POST /v1/completions HTTP/1.1", b"host: x", CHUNKED, *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n2\r\n{}\r\n" + end


ASKED = [
    (post(host=b""), 400),
    (post(b"host: y"), 400),
    (b"POST /v1/completions HTTP/1.0\r\ncontent-length: 2\r\n\r\n{}", 200),
    (post(CHUNKED), 400),
    (post(b"content-length: 3"), 400),
    (chunked(b"0\r\n\r\n", b"transfer-encoding: gzip, chunked"), 400),
    (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", 501),
    (post(b"x: " + LONG), 431),
    (post(*(b"x%d: a" % i for i in range(20_000))), 431),
    (post(path=b"/" + LONG), 431),
    (chunked(b"0\r\nx: " + LONG * 4 + b"\r\n\r\n"), 431),
    (chunked(), 200),
    (b"CONNECT elsewhere:443 HTTP/1.1\r\nhost: x\r\n\r\n", 400),
    (b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n", 200),
    (post(body=b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}"), 200),
    (post(body=b'{"prompt":"a","max_tokens":-99999999999999999999999}'), 200),
]
"""What a client sends, and the status that it deserves."""


def test_each_request_gets_the_status_it_deserves() -> None:
    """One after the other, each with a plain request after it."""
    server = RawServer(bytes_of(OK))

    async def play(port: int) -> list[tuple[list[int], int]]:
        found = []
        for request_bytes, _ in ASKED:
            before = len(server.posts)
            statuses = [status_of(await ask(port, data)) for data in (request_bytes, post())]
            found.append((statuses, len(server.posts) - before))
        return found

    for (request_bytes, status), (statuses, posts) in zip(ASKED, behind_gateway(play, server), strict=True):
        assert statuses == [status, 200], request_bytes[:200]
        assert posts == 1 + (request_bytes.startswith(b"POST") and status == 200), request_bytes[:200]


def test_trailers_of_a_request_are_not_made_headers() -> None:
    server = RawServer(bytes_of(OK))
    behind_gateway(lambda port: ask(port, chunked(b"0\r\nx-data-parallel-rank: 7\r\n\r\n")), server)
    assert b"parallel" not in server.posts[0].lower()


def test_a_declared_body_above_the_limit_is_not_waited_for() -> None:
    server = RawServer(bytes_of(OK))
    request = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2000000\r\n\r\n"
    assert status_of(behind_gateway(lambda port: ask(port, request), server, max_body_mb=1.0)) == 413


def test_bodies_of_all_waiting_requests_are_bounded_together() -> None:
    server = RawServer(silence)

    async def play(port: int) -> list[int]:
        held = [asyncio.create_task(ask(port, post(body=b"x" * 900_000))) for _ in range(2)]
        while len(server.posts) < 2:
            await asyncio.sleep(0.01)
        refused = status_of(await ask(port, post(body=b"x" * 900_000)))
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)
        server.answer = bytes_of(OK)
        while (status := status_of(await ask(port, post(body=b"x" * 900_000)))) == 503:
            await asyncio.sleep(0.05)
        return [refused, status]

    assert behind_gateway(play, server, max_bodies_mb=2.0) == [503, 200]


def test_requests_that_queue_on_one_connection_are_bounded() -> None:
    server = RawServer(silence)
    assert status_of(behind_gateway(lambda port: ask(port, post() * 1000), server, max_wait_s=30.0)) == 0
    assert len(server.posts) <= 1


@pytest.mark.parametrize("sent", [b"GET / HT", b"GET / HTTP/1.1\r\nx: a", b"\r\n", post(body=b"x" * 99)[:-1]])
def test_a_request_that_does_not_go_on_is_ended(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "HEAD_LIMIT_S", 0.2)
    monkeypatch.setattr(serve, "STALL_LIMIT_S", 0.2)
    assert status_of(in_process(lambda port: ask(port, sent))) == 408


def test_a_connection_that_sends_nothing_is_closed_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    assert in_process(lambda port: ask(port, b""), keep_alive_s=1) == b""


def test_a_client_that_does_not_read_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "STALL_LIMIT_S", 0.2)

    async def write_on(writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(b"\r\n")
            await writer.drain()
            await asyncio.sleep(0.02)

    async def play(port: int) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(b"GET /endless HTTP/1.1\r\nhost: x\r\n\r\n")
        async with asyncio.timeout(60):
            with pytest.raises(ConnectionError):
                await write_on(writer)

    in_process(play)


def in_process(play: Any, keep_alive_s: int = 60) -> Any:
    """Run ``play`` with the port of an application in this process whose clients are limited as the gateway's are."""
    import uvicorn

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/endless":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while not gone.is_set():
                await asyncio.sleep(0)
                await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            return
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    config = uvicorn.Config(
        app, port=0, http=LimitedProtocol, lifespan="off", log_level="critical",
        timeout_keep_alive=keep_alive_s, timeout_graceful_shutdown=1,
    )  # fmt: skip
    server = uvicorn.Server(config)
    gone = asyncio.Event()

    async def run() -> Any:
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        try:
            return await play(server.servers[0].sockets[0].getsockname()[1])
        finally:
            gone.set()
            server.should_exit = True
            await serving

    return asyncio.run(run())


LOCAL = b"host: 127.0.0.1"


DRAINS = [
    (LOCAL, (), 200),
    (b"host: localhost:99", (b"origin: http://localhost:99",), 200),
    (b"host: [::1]:99", (), 200),
    (b"host: elsewhere.example", (), 403),
    (b"host: elsewhere.example", (b"origin: http://elsewhere.example",), 403),
    (b"host: [::1", (), 403),
    (LOCAL, (b"origin: http://elsewhere.example",), 403),
    (LOCAL, (b"origin: null",), 403),
    (LOCAL, (b"origin: http://127.0.0.1:99",), 403),
    (LOCAL, (b"x-forwarded-for: 127.0.0.1",), 403),
    (LOCAL, (b"forwarded: for=127.0.0.1",), 403),
]
"""Who asks for an upstream to be drained, as Host and further headers, and the status of the answer."""


def test_only_programs_of_this_machine_drain() -> None:
    server = RawServer(bytes_of(OK))

    async def play(port: int) -> list[int]:
        path = b"/gateway/drain?upstream=" + server.url.encode()
        asked = [post(*headers, path=path, host=host, body=b"") for host, headers, _ in DRAINS]
        return [status_of(await ask(port, data)) for data in asked]

    assert behind_gateway(play, server) == [status for *_, status in DRAINS]


def test_pages_of_other_origins_empty_no_cache() -> None:
    server = RawServer(bytes_of(OK))

    async def play(port: int) -> list[int]:
        path = b"/reset_prefix_cache"
        return [status_of(await ask(port, post(*h, path=path))) for h in ([b"origin: http://e.example"], [])]

    assert behind_gateway(play, server) == [403, 200]
    assert len(server.posts) == 1


@pytest.mark.parametrize("prompt", [b'"' + b"a" * 9_000_000 + b'"', b"[" + b"1," * 4_000_000 + b"1]"])
def test_a_prompt_of_any_size_is_estimated_in_bounded_work(prompt: bytes) -> None:
    request = dispatch_request(1, b'{"prompt":' + prompt + b"}", prefix=True)
    assert request.tokens >= 1_000_000
    assert len(request.prefix) <= 2048


def test_counts_of_a_client_do_not_decide_the_load_of_a_server() -> None:
    low, high = (dispatch_request(1, b'{"prompt":"a","max_tokens":%d}' % n, prefix=False) for n in (-9, 1 << 60))
    assert low.total_tokens == low.tokens
    assert high.total_tokens < 1 << 25
