"""The gateway's responses, metrics and errors, in front of fake servers whose ledgers are exact."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator

import httpx
import pytest

from ebbench.errors import EbbenchError, RunError, UsageError
from ebbench.fakeserver import FakeConfig, FakeServerProcess, parse_fault
from ebbench.gateway.process import GatewayProcess
from ebbench.gateway.settings import GatewaySettings
from tests.client.odd_server import OddServer, models, running
from tests.processes.process_tree import wait_until

pytest.importorskip("starlette")

BODY = {"model": "fake-model", "prompt": [1, 2, 3], "max_tokens": 8, "stream": True}


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[FakeServerProcess, FakeServerProcess]]:
    config = FakeConfig(ttft_ms=10, itl_ms=2)
    with FakeServerProcess(config) as one, FakeServerProcess(config) as two:
        yield one, two


def gateway(*urls: str, **settings: object) -> GatewayProcess:
    return GatewayProcess(GatewaySettings(upstreams=urls, **({"port": 0, "drain_s": 2.0} | settings)))  # type: ignore[arg-type]


def post(url: str, path: str = "/v1/completions", **extra: object) -> httpx.Response:
    return httpx.post(url + path, json=BODY | extra, timeout=120, trust_env=False)


@pytest.mark.parametrize(
    "dispatch", ["round-robin", "least-outstanding", "power-of-two", "prefix-affine", "iqr", "sbs"]
)
def test_streams_pass_byte_for_byte_under_every_policy(servers, dispatch: str) -> None:  # type: ignore[no-untyped-def]
    with gateway(*(s.url for s in servers), dispatch=dispatch) as front:
        for path in ("/v1/completions", "/v1/chat/completions"):
            extra = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {}
            for stream in (True, False):
                direct = post(servers[0].url, path, stream=stream, **extra)
                through = post(front.url, path, stream=stream, **extra)
                assert through.status_code == 200
                assert _anonymous(through.content) == _anonymous(direct.content)
                assert through.headers["content-type"] == direct.headers["content-type"]


def _anonymous(content: bytes) -> bytes:
    """Without the number the fake server counts its answers by."""
    import re

    return re.sub(rb'"cmpl-\d+"', b'"cmpl"', content)


def test_a_stream_arrives_as_it_is_sent_not_at_the_end() -> None:
    with FakeServerProcess(FakeConfig(ttft_ms=10, itl_ms=300)) as server, gateway(server.url) as front:
        with httpx.stream("POST", front.url + "/v1/completions", json=BODY, timeout=120, trust_env=False) as answer:
            times_ns = [time.monotonic_ns() for _ in answer.iter_raw()]
        (entry,) = server.ledger()
    # Buffered, nothing would come before the last token was written, 2.1 s after the first.
    assert times_ns[0] < entry.token_ns[-1]


def test_request_ids_survive_and_are_made_up_where_missing(servers) -> None:  # type: ignore[no-untyped-def]
    servers[0].clear_ledger()
    with gateway(servers[0].url) as front:
        named = httpx.post(
            front.url + "/v1/completions", json=BODY, headers={"x-request-id": "mine"}, timeout=120, trust_env=False
        )
        unnamed = post(front.url)
    assert named.headers["x-request-id"] == "mine"
    assert [entry.request_id for entry in servers[0].ledger()] == ["mine", unnamed.headers["x-request-id"]]
    assert len(unnamed.headers["x-request-id"]) == 32


def test_disconnecting_aborts_upstream() -> None:
    with FakeServerProcess(FakeConfig(ttft_ms=10, itl_ms=50)) as server, gateway(server.url) as front:
        with httpx.stream(
            "POST", front.url + "/v1/completions", json=BODY | {"max_tokens": 4000}, trust_env=False
        ) as answer:
            next(answer.iter_raw())
        _until(lambda: [e.outcome for e in server.ledger()] == ["disconnected"])
        assert server.ledger()[0].tokens < 4000
        _until(lambda: _metric(front.url, "ebbench_gateway_abandoned_total") == 1)
        assert httpx.get(front.url + "/gateway", timeout=120, trust_env=False).json()["upstreams"][0]["open"] == 0


def test_disconnecting_while_waiting_withdraws_the_request() -> None:
    with (
        FakeServerProcess(FakeConfig(ttft_ms=10, itl_ms=2)) as server,
        gateway(server.url, health_interval_s=60) as front,
    ):
        httpx.post(front.url + "/gateway/drain", params={"upstream": server.url}, timeout=120, trust_env=False)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(front.url + "/v1/completions", json=BODY, timeout=httpx.Timeout(30, read=0.3), trust_env=False)
        _until(lambda: httpx.get(front.url + "/gateway", timeout=120, trust_env=False).json()["waiting"] == 0)
        assert server.ledger() == []


def test_draining_sends_nothing_new_and_resuming_does(servers) -> None:  # type: ignore[no-untyped-def]
    one, two = servers
    with gateway(one.url, two.url, dispatch="round-robin") as front:
        state = httpx.post(
            front.url + "/gateway/drain", params={"upstream": one.url}, timeout=120, trust_env=False
        ).json()
        assert state == {"url": one.url, "state": "draining", "open": 0}
        one.clear_ledger()
        for _ in range(4):
            assert post(front.url).status_code == 200
        assert one.ledger() == []
        httpx.post(front.url + "/gateway/resume", params={"upstream": one.url}, timeout=120, trust_env=False)
        for _ in range(4):
            post(front.url)
        assert len(one.ledger()) == 2
        unknown = httpx.post(
            front.url + "/gateway/drain", params={"upstream": "http://x"}, timeout=120, trust_env=False
        )
        assert unknown.status_code == 404


def test_flow_control_answers_429_with_retry_after() -> None:
    policy = {"max_queue": 1, "chunk_tokens": 3, "dispatch": "sbs:bypass=off,overdraw=off"}
    with FakeServerProcess(FakeConfig(ttft_ms=1500, itl_ms=1)) as server, gateway(server.url, **policy) as front:
        answers = _together(front.url, 6)
    status = sorted(answer.status_code for answer in answers)
    assert status.count(429) >= 1
    assert status.count(200) >= 1
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["type"] == "rate_limit_error"


def test_a_body_above_the_limit_is_refused_with_413(servers) -> None:  # type: ignore[no-untyped-def]
    servers[0].clear_ledger()
    limit_bytes = 2000
    padding = limit_bytes - len(json.dumps(BODY | {"user": ""}, separators=(",", ":")))
    with gateway(servers[0].url, max_body_mb=limit_bytes / 1e6) as front:

        def sent(user: str) -> httpx.Response:
            content = json.dumps(BODY | {"user": user}, separators=(",", ":"))
            return httpx.post(front.url + "/v1/completions", content=content, timeout=120, trust_env=False)

        assert sent("x" * padding).status_code == 200
        refused = sent("x" * (padding + 1))
        assert _metric(front.url, 'ebbench_gateway_refused_total{status="413"}') == 1
    assert refused.status_code == 413
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", 413)
    assert "0.002 MB" in error["message"]
    assert len(servers[0].ledger()) == 1, "the upstream has seen the smaller one alone"


def test_upstream_refusals_pass_unchanged() -> None:
    fault = parse_fault("status:code=429,retry_after=7")
    with FakeServerProcess(FakeConfig(faults=(fault,))) as server, gateway(server.url) as front:
        answer = post(front.url)
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "7"


def test_data_parallel_ranks_are_chosen_by_header() -> None:
    seen: list[str] = []
    with _Listener(seen) as address, gateway(address, dp_ranks=2, dispatch="round-robin") as front:
        for _ in range(4):
            post(front.url)
        httpx.post(
            front.url + "/v1/completions",
            json=BODY,
            headers={"x-data-parallel-rank": "9"},
            timeout=120,
            trust_env=False,
        )
    assert seen == ["0", "1", "0", "1", "9"]


def test_prefix_caches_are_reset_everywhere(servers) -> None:  # type: ignore[no-untyped-def]
    def resets() -> list[float]:
        return [_metric(server.url, 'fake:cache_resets_total{model_name="fake-model"}') for server in servers]

    before = resets()
    with gateway(*(s.url for s in servers)) as front:
        assert httpx.post(front.url + "/reset_prefix_cache", timeout=120, trust_env=False).status_code == 200
    assert resets() == [count + 1 for count in before]


def test_metrics_count_what_happened(servers) -> None:  # type: ignore[no-untyped-def]
    one, two = servers
    with gateway(one.url, two.url, dispatch="sbs") as front:
        for _ in range(3):
            post(front.url)
        total = sum(
            _metric(front.url, f'ebbench_gateway_answers_total{{outcome="ok",upstream="{s.url}"}}') for s in servers
        )
        assert total == 3
        assert _metric(front.url, "ebbench_gateway_dispatch_wait_seconds_count") == 3
        assert _metric(front.url, "ebbench_gateway_waiting") == 0
        assert _metric(front.url, "ebbench_gateway_forward_seconds") > 0


def test_an_unreachable_upstream_is_refused_at_the_start(servers) -> None:  # type: ignore[no-untyped-def]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{probe.getsockname()[1]}"
    with (
        pytest.raises(RunError, match=f"upstream {nobody} does not answer"),
        gateway(servers[0].url, nobody, start_timeout_s=0.5),
    ):
        pass


def test_upstreams_of_different_models_are_refused(servers) -> None:  # type: ignore[no-untyped-def]
    mixed = r"serves fake-model and .* serves another"
    with FakeServerProcess(FakeConfig(model="another")) as other, pytest.raises(UsageError, match=mixed):
        gateway(servers[0].url, other.url).__enter__()


@pytest.mark.parametrize(
    ("settings", "why"),
    [({"dispatch": "sbss"}, "did you mean 'sbs'"), ({"dp_ranks": 0}, "--dp-ranks must be at least 1"),
     ({"signals": ("tcp://127.0.0.1:5", "tcp://127.0.0.1:6")}, "--signals once for each"),
     ({"upstreams": ("localhost:1",)}, "--upstream: 'localhost:1' is no server URL"),
     ({"upstreams": ("http://a", "http://a/v1/")}, "given twice"),
     ({"signals": ("nonsense",)}, "neither tcp")],
)  # fmt: skip
def test_bad_settings_are_refused(settings: dict[str, object], why: str) -> None:
    with pytest.raises(EbbenchError, match=why):
        GatewaySettings(**({"upstreams": ("http://127.0.0.1:1",)} | settings)).checked()  # type: ignore[arg-type]


def test_an_upstream_may_have_its_api_at_another_path_and_no_health_page() -> None:
    api = "/openai/v1/models?version=3"
    with running(OddServer(pages={api: models("m")})) as server:
        given = f"{server.url}/openai/v1/chat/completions?version=3"
        with gateway(given, health_interval_s=0.02) as front:
            wait_until(lambda: server.paths.count("/openai/health") > 4, "the gateway checks nothing")
            answer = httpx.post(f"{front.url}/v1/completions?stream=1", json={"max_tokens": 2})
            drained = httpx.post(f"{front.url}/gateway/drain", params={"upstream": given})
    assert answer.status_code == drained.status_code == 200
    assert "/openai/v1/completions?stream=1&version=3" in server.paths


def test_a_taken_port_is_refused(servers) -> None:  # type: ignore[no-untyped-def]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(RunError, match="is the port taken"), gateway(servers[0].url, port=taken.getsockname()[1]):
            pass


def test_stopping_lets_open_requests_end() -> None:
    with FakeServerProcess(FakeConfig(ttft_ms=10, itl_ms=60)) as server, gateway(server.url, drain_s=10.0) as front:
        with httpx.stream("POST", front.url + "/v1/completions", json=BODY, timeout=120, trust_env=False) as answer:
            chunks = answer.iter_raw()
            content = next(chunks)
            assert front.process is not None
            front.process.terminate()
            content += b"".join(chunks)
        assert content.endswith(b"data: [DONE]\n\n")
        assert front.process.wait(60) in (0, -15)


def _together(url: str, count: int) -> list[httpx.Response]:
    import asyncio

    async def all_of_them() -> list[httpx.Response]:
        async with httpx.AsyncClient(timeout=120, trust_env=False) as client:
            return await asyncio.gather(*(client.post(url + "/v1/completions", json=BODY) for _ in range(count)))

    return asyncio.run(all_of_them())


def _metric(url: str, name: str) -> float:
    for line in httpx.get(url + "/metrics", timeout=120, trust_env=False).text.splitlines():
        if line.startswith(name + " "):
            return float(line.rpartition(" ")[2])
    return 0.0


def _until(condition, timeout_s: float = 60.0) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)


class _Listener:
    """A server that keeps the rank each request names and answers it with an empty JSON object."""

    def __init__(self, seen: list[str]) -> None:
        self._seen = seen

    def __enter__(self) -> str:
        import threading
        from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

        seen = self._seen

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer({"data": [{"id": "m"}]})

            def do_POST(self) -> None:
                seen.append(self.headers.get("x-data-parallel-rank", ""))
                self.rfile.read(int(self.headers["content-length"]))
                self._answer({})

            def _answer(self, value: object) -> None:
                content = json.dumps(value).encode()
                self.send_response(200)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                """Quiet."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
