"""Questions that are not measured: what makes a server ready, which model it serves, and limits on its answers."""

from __future__ import annotations

import asyncio
import gzip
import socket
import ssl
import time
import tracemalloc
from pathlib import Path

import pytest

from ebbench.client.server_queries import Served, ServerQueries, run_to_end
from ebbench.config.server_url import ServerUrl
from ebbench.errors import RunError, UsageError
from ebbench.spec.client import ClientOptions
from tests.client.client_runs import column, plan_of, run
from tests.client.odd_server import Answer, OddServer, models, reply, running
from tests.client.test_client_tls import certificates

__all__ = ["certificates"]
NO_KEY = reply("401 Unauthorized", b'{"error": {"message": "missing key"}}')
PAGE = reply("200 OK", b"<html><form>log in</form></html>", content_type="text/html")
HOST = "127.0.0.1"


def asked(server: OddServer, environ: dict[str, str] | None = None, **options: object) -> tuple[Served, list[str]]:
    """What ``ready`` and ``served`` make of the server, and the notes."""
    return asked_at(server.url, environ, **options)


def asked_at(url: str, environ: dict[str, str] | None = None, **options: object) -> tuple[Served, list[str]]:
    settings: dict[str, object] = {"ready_timeout_s": 0.3, **options}

    async def ask() -> tuple[Served, list[str]]:
        client = ClientOptions(**settings)  # type: ignore[arg-type]
        async with ServerQueries(ServerUrl.parse(url), client, environ or {}) as queries:
            await queries.ready()
            return await queries.served(), [str(note) for note in queries.notes]

    return run_to_end(ask)


@pytest.mark.parametrize(
    "health",
    [
        reply("204 No Content"),
        NO_KEY,
        reply("403 Forbidden", b"no route"),
        reply("404 Not Found"),
        reply("307 Temporary Redirect", location="/health/"),
        reply("501 Not Implemented"),
    ],
)
def test_a_server_that_lists_its_models_is_ready(health: bytes) -> None:
    with running(OddServer({"/health": health})) as server:
        assert asked(server) == (Served("m", None, names=frozenset({"m"})), [])


@pytest.mark.parametrize("status", ["500 Internal Server Error", "503 Service Unavailable"])
def test_a_health_that_stays_bad_is_said_and_does_not_decide(status: str) -> None:
    with running(OddServer({"/health": reply(status)})) as server:
        served, notes = asked(server)
    assert served.model == "m"
    assert notes == [
        f"The server's /health answers {status[:3]}; a request for one token was answered, so the run went on."
    ]


def test_a_health_that_never_answers_does_not_decide() -> None:
    async def silent(_: asyncio.StreamWriter) -> None:
        await asyncio.sleep(60)

    with running(OddServer({"/health": silent})) as server:
        _, notes = asked(server)
    assert "/health gives no answer within 1 s" in notes[0]


def test_a_loading_server_is_waited_for() -> None:
    begin_s = time.monotonic()

    async def loading(writer: asyncio.StreamWriter) -> None:
        writer.write(reply("200 OK" if time.monotonic() > begin_s + 1.0 else "503 Service Unavailable"))

    with running(OddServer({"/health": loading})) as server:
        _, notes = asked(server, ready_timeout_s=30.0)
    assert notes == []
    assert server.paths.count("/health") > 2


def test_a_missing_key_is_named_at_once() -> None:
    with running(OddServer({"/health": NO_KEY, "/v1/models": NO_KEY})) as server:
        with pytest.raises(RunError, match="/v1/models 401; set EBBENCH_API_KEY"):
            asked(server, ready_timeout_s=600.0)
        with pytest.raises(RunError, match="does not accept the key in OPENAI_API_KEY") as refused:
            asked(server, {"OPENAI_API_KEY": "k-123456789"}, ready_timeout_s=600.0)
        assert "k-123456789" not in str(refused.value)
        assert asked(server, model="m")[0].model == "m", "with a name there is nothing to ask for"


@pytest.mark.parametrize(
    ("page", "why"),
    [
        (PAGE, "answers with text/html, not JSON: a log-in page"),
        (reply("200 OK", b'{"data": [{"name": "m"}]}'), "lists no model with an id"),
        (reply("200 OK", b'{"data": [{"id": 7}, {"id": ""}, {"id": null}, {"id": ["m"]}, 3]}'), "no model with an id"),
        (reply("200 OK", b'{"data": {"m": 1}}'), "lists no model with an id"),
        (reply("200 OK", b"[]"), "no JSON object that lists models"),
        (reply("200 OK", b"[" * 100_000), "no JSON object that lists models"),
        (reply("200 OK", b"\xff\xfe"), "not JSON"),
        (reply("308 Permanent Redirect", location="/api/v1/models"), "points to /api/v1/models: give the URL"),
        (reply("404 Not Found"), "give the URL that precedes /completions"),
        (reply("500 Oh", b"\x1b[2Jgone"), r"answers 500 \(\\x1b\[2Jgone\)"),
        (reply("400 Bad Request", b"The plain HTTP request was sent to HTTPS port"), "400 .The plain HTTP request"),
    ],
)
def test_why_no_model_is_known_is_one_sentence(page: bytes, why: str) -> None:
    with running(OddServer({"/v1/models": page})) as server:
        with pytest.raises(RunError, match=why) as refused:
            asked(server)
        assert "name the model with --model" in str(refused.value)
        assert "\n" not in str(refused.value)
        assert asked(server, model="own")[0] == Served("own", None)


def test_fields_of_a_model_of_another_type_are_left_out() -> None:
    odd = b'{"data": [{"id": "m", "root": {}, "parent": [1], "max_model_len": true, "created": NaN}, {"id": "m"}]}'
    with running(OddServer({"/v1/models": reply("200 OK", odd)})) as server:
        assert asked(server)[0] == Served("m", None, names=frozenset({"m"}))


def test_a_thousand_models_are_not_all_listed() -> None:
    many = OddServer({"/v1/models": models(*(f"model-{i}" for i in range(1000)))})
    with running(many) as server, pytest.raises(UsageError, match="and 980 more; say which with") as refused:
        asked(server)
    assert len(str(refused.value)) < 500


def compressed_zeros() -> bytes:
    return reply("200 OK", gzip.compress(bytes(1 << 20), 1) * 300, content_encoding="gzip")  # gzip files put together


async def endless_body(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    while True:
        writer.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
        await writer.drain()


async def endless_headers(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        writer.write(b"x-more: " + b"y" * 4096 + b"\r\n")
        await writer.drain()


async def dripping(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n")
    while True:
        writer.write(b" ")
        await writer.drain()
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("answer", [endless_body, endless_headers, None])
def test_no_answer_fills_the_memory(answer: Answer | None) -> None:
    answer = answer or compressed_zeros()
    pages = dict.fromkeys(("/v1/models", "/metrics", "/reset_prefix_cache"), answer)
    if answer is not endless_headers:
        pages["/health"] = answer
    with running(OddServer(pages)) as server:
        tracemalloc.start()
        try:
            result = run(server.url, plan_of(2), model="m", metrics_interval_s=0.05, ready_timeout_s=0.3)
            peak_bytes = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert set(column(result, "status")) == {"ok"}
    assert peak_bytes < 100 << 20
    if answer is endless_body:
        assert "The server's /metrics is larger than 16,777,216 bytes and was not read." in map(str, result.warnings)


def test_an_answer_that_drips_does_not_outlast_its_time() -> None:
    with running(OddServer({"/v1/models": dripping, "/health": reply("404 Not Found")})) as server:
        begin_s = time.monotonic()
        with pytest.raises(RunError, match="is not ready after"):
            asked(server)
    assert time.monotonic() - begin_s < 9.0, "10 s is the limit of a question after the start"


def test_what_the_address_speaks_is_named(certificates: Path) -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificates / "server.pem", certificates / "server.key")
    with running(OddServer(tls=tls)) as server:
        with pytest.raises(RunError, match="it speaks TLS: write https://"):
            asked_at(server.url.replace("https:", "http:"))
        port = server.port
        with pytest.raises(RunError, match=r"certificate is for other names.*--insecure"):
            asked_at(f"https://localhost:{port}", ca_file=str(certificates / "ca.pem"))
    with running(OddServer()) as server, pytest.raises(RunError, match="it answers without TLS: write http://"):
        asked_at(server.url.replace("http:", "https:"))


def test_a_proxy_that_is_not_used_is_named() -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
    url, proxy = f"http://{HOST}:{port}", {"HTTP_PROXY": "http://proxy:3128"}
    with pytest.raises(RunError, match="HTTP_PROXY names a proxy, and ebbench uses none"):
        asked_at(url, proxy)
    for other in ({}, {"https_proxy": "http://proxy"}, proxy | {"no_proxy": f"a.example, {HOST}"}):
        with pytest.raises(RunError, match="is the server running there"):
            asked_at(url, other)


def test_requests_go_where_the_url_says() -> None:
    pages = {"/openai/v1/models?api-version=7": models("m")}
    with running(OddServer(pages)) as server:
        result = run(f"{server.url}/openai/v1?api-version=7", plan_of(1))
        assert column(result, "status") == ["ok"]
        assert server.paths.count("/openai/v1/completions?api-version=7") == 1
        with pytest.raises(UsageError, match="is the URL of chat: give --endpoint chat"):
            run(f"{server.url}/v1/chat/completions", plan_of(1))
        assert column(run(f"{server.url}/v1/chat/completions", plan_of(1), endpoint="chat"), "http_status") == [200]
