"""The fake server against plain HTTP: its timing, ledger, routes and faults."""

from __future__ import annotations

import asyncio
import socket
import time
from unittest.mock import Mock

import httpx
import msgspec
import pytest
import uvloop

from ebbench.errors import UnknownNameError, UsageError
from ebbench.fakeserver import FakeConfig, FakeServerProcess, Fault, parse_fault
from ebbench.fakeserver.config import KINDS
from ebbench.fakeserver.server import TICK_NS, ServedConnection, TimerWheel

ASK = {"model": "fake-model", "prompt": [1, 2, 3], "max_tokens": 4}


def test_faults_are_parsed_and_mistakes_explained() -> None:
    assert parse_fault("reset:every=10,after=5") == Fault("reset", every=10, after=5)
    assert parse_fault("status:code=429,rate=0.25") == Fault("status", code=429, rate=0.25)
    assert parse_fault("stall:after=-1").after == -1
    with pytest.raises(UnknownNameError, match="did you mean 'reset'"):
        parse_fault("resett")
    with pytest.raises(UnknownNameError, match="did you mean 'every'"):
        parse_fault("reset:evry=1")
    with pytest.raises(UsageError, match="whole number"):
        parse_fault("reset:after=x")
    with pytest.raises(UsageError, match="at least 1"):
        parse_fault("reset:every=0")
    for settings in ({"port": 70_000}, {"ttft_ms": -1.0}):
        with pytest.raises(UsageError):
            FakeConfig(**settings)


def test_faults_strike_the_requests_they_name() -> None:
    numbers = range(1, 10_001)
    assert [n for n in numbers if Fault("reset", request=7).affects(n)] == [7]
    assert [n for n in range(1, 10) if Fault("reset", every=3).affects(n)] == [3, 6, 9]
    assert all(Fault("reset").affects(n) for n in numbers)
    share = sum(Fault("reset", rate=0.2).affects(n) for n in numbers) / 10_000
    assert share == pytest.approx(0.2, abs=0.02)


def test_every_token_is_in_the_ledger_and_none_is_early() -> None:
    config = FakeConfig(ttft_ms=20, itl_ms=5)
    with FakeServerProcess(config) as server:
        headers = {"x-request-id": "mine"}
        response = httpx.post(f"{server.url}/v1/completions", json=ASK | {"stream": True}, headers=headers, timeout=60)
        (entry,) = server.ledger()
        server.clear_ledger()
        assert server.ledger() == []
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert events[-1] == "[DONE]"
    assert len(events) == 5  # four tokens and the end mark; usage only when asked for
    assert (entry.request_id, entry.number, entry.tokens, entry.outcome) == ("mine", 1, 4, "length")
    assert (entry.prompt_tokens, entry.max_tokens, len(entry.token_ns)) == (3, 4, 4)
    for index, sent_ns in enumerate(entry.token_ns):
        assert sent_ns >= entry.received_ns + 20_000_000 + index * 5_000_000
    assert entry.late_ns >= 0
    assert entry.done_ns is not None
    assert entry.done_ns >= entry.token_ns[-1]


def test_answers_without_streaming_and_other_routes() -> None:
    config = FakeConfig(ttft_ms=1, itl_ms=1, model="m</script>", max_model_len=99)
    with FakeServerProcess(config) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        whole = client.post("/v1/completions", json=ASK).json()
        chat = {"messages": [{"role": "user", "content": "one two"}], "max_completion_tokens": 3}
        said = client.post("/v1/chat/completions", json=chat).json()
        assert client.get("/health", timeout=60).status_code == 200
        (model,) = client.get("/v1/models").json()["data"]
        assert client.post("/tokenize", json={"prompt": "a b c"}).json()["count"] == 3
        assert client.post("/reset_prefix_cache").status_code == 200
        metrics = client.get("/metrics").text
        assert client.get("/nowhere").status_code == 404
        assert client.post("/v1/completions", content=b"{").status_code == 400
        assert client.post("/v1/completions", json=ASK | {"max_tokens": 97}).status_code == 400
    assert whole["choices"][0]["text"] == " a" * 4
    assert whole["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    assert said["choices"][0]["message"]["content"] == " a" * 3
    assert said["usage"]["prompt_tokens"] == 2
    assert (model["id"], model["max_model_len"]) == ("m</script>", 99)
    assert 'vllm:generation_tokens_total{model_name="m</script>"} 7' in metrics


def test_the_fake_server_listens_on_loopback_only_and_survives_garbage() -> None:
    with FakeServerProcess() as server:
        host, port = server.url.removeprefix("http://").split(":")
        assert host == "127.0.0.1"
        with socket.create_connection((host, int(port)), timeout=60) as raw:
            raw.sendall(b"\x16\x03\x01 not http\r\n\r\n")
            assert raw.recv(100).startswith(b"HTTP/1.1 400")
        assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200


def test_a_request_for_another_protocol_raises_nothing() -> None:
    """Java's client asks for HTTP/2 with its first request; vLLM's server loses the body behind such headers."""
    router = Mock()
    connection = ServedConnection(router)
    connection.data_received(b"POST /v1 HTTP/1.1\r\nContent-Length: 2\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n{}")
    assert router.handle.call_args.args[1:4] == ("POST", "/v1", b"")


def test_a_client_that_hangs_up_is_recorded() -> None:
    with FakeServerProcess(FakeConfig(ttft_ms=1, itl_ms=20)) as server:
        body = msgspec.json.encode(ASK | {"max_tokens": 1000, "stream": True})
        with httpx.stream("POST", f"{server.url}/v1/completions", content=body, timeout=60) as response:
            next(response.iter_raw())
        deadline = time.monotonic() + 60
        while (entry := server.ledger()[0]).outcome == "open" and time.monotonic() < deadline:
            time.sleep(0.01)
    assert entry.outcome == "disconnected"
    assert entry.tokens < 1000


def test_every_fault_has_a_description() -> None:
    assert all(text and not text.endswith(".") for text in KINDS.values())


def test_requests_are_read_between_items_that_are_late() -> None:
    async def main() -> list[int]:
        loop, acted, seen = asyncio.get_running_loop(), list[int](), list[int]()
        ours, theirs = socket.socketpair()
        theirs.send(b"a request")
        wheel, now_ns = TimerWheel(loop), time.monotonic_ns()

        def act() -> int:
            acted.append(1)
            return 0

        for place in range(1000):
            wheel.enter(act, now_ns - place * TICK_NS)
        loop.add_reader(ours, lambda: seen.append(len(acted)))
        while len(acted) < 1000:
            await asyncio.sleep(0)
        loop.remove_reader(ours)
        wheel.close()
        ours.close()
        theirs.close()
        return seen

    assert any(0 < number < 1000 for number in uvloop.run(main()))
