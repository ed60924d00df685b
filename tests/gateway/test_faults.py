"""Upstreams that die and return during traffic: every request is accounted for."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter

import httpx
import pytest

from ebbench.client import drive
from ebbench.errors import RunError
from ebbench.fakeserver import FakeConfig, FakeServerProcess, parse_fault
from ebbench.gateway.process import GatewayProcess
from ebbench.gateway.settings import GatewaySettings
from ebbench.spec.client import ClientOptions
from ebbench.workloads import build_plan

pytest.importorskip("starlette")

BODY = {"model": "fake-model", "prompt": [1, 2, 3], "max_tokens": 20, "stream": True}


def front(*urls: str, dispatch: str = "least-outstanding", **settings: object) -> GatewayProcess:
    quick = {"port": 0, "health_interval_s": 0.1, "drain_s": 2.0, "dispatch": dispatch}
    return GatewayProcess(GatewaySettings(upstreams=urls, **(quick | settings)))  # type: ignore[arg-type]


def restarted(server: FakeServerProcess, config: FakeConfig) -> FakeServerProcess:
    """The same server again, on the same port."""
    port = int(server.url.rpartition(":")[2])
    deadline = time.monotonic() + 60
    while True:
        try:
            return FakeServerProcess(FakeConfig(**{**vars(config), "port": port})).__enter__()
        except RunError:
            assert time.monotonic() < deadline
            time.sleep(0.1)


def kill(server: FakeServerProcess) -> None:
    os.kill(server.pid, signal.SIGKILL)
    assert server.process is not None
    server.process.wait()


async def request(client: httpx.AsyncClient, url: str, number: int, answers: dict[int, tuple[str, bytes]]) -> None:
    content = b""
    try:
        async with client.stream(
            "POST", url + "/v1/completions", json=BODY, headers={"x-request-id": f"q{number}"}
        ) as answer:
            async for data in answer.aiter_raw():
                content += data
        whole = answer.status_code == 200 and content.endswith(b"data: [DONE]\n\n") and b'"error"' not in content
        answers[number] = ("ok" if whole else f"http {answer.status_code}", content)
    except httpx.TransportError as error:
        answers[number] = (type(error).__name__, content)


def answers_counted(page: str) -> dict[str, float]:
    """Answers by outcome, over all upstreams of the gateway's metrics page."""
    counted = {"ok": 0.0, "broken": 0.0}
    for line in page.splitlines():
        for outcome in counted:
            if line.startswith(f'ebbench_gateway_answers_total{{outcome="{outcome}"'):
                counted[outcome] += float(line.rpartition(" ")[2])
    return counted


def whole_answers(answers: dict[int, tuple[str, bytes]], at_most_broken: int) -> set[int]:
    """The numbers of the whole answers; the others, which are few, must say that they broke off."""
    assert sorted(answers) == list(range(240)), "every request ends, with a whole response or a broken one"
    ok = {number for number, (outcome, _) in answers.items() if outcome == "ok"}
    broken = set(answers) - ok
    assert len(broken) <= at_most_broken, "only responses that had begun when their server died may break"
    for number in broken:
        outcome, content = answers[number]
        assert outcome in ("RemoteProtocolError", "ReadError")
        assert content.count(b"data: ") >= 1
        assert b"broke off" in content
    assert len({answers[number][1].count(b'"text"') for number in ok}) == 1
    return ok


@pytest.mark.parametrize("dispatch", ["round-robin", "sbs"])
def test_no_request_is_lost_while_upstreams_are_killed_and_return(dispatch: str) -> None:
    config = FakeConfig(ttft_ms=60, itl_ms=5)
    first, second = FakeServerProcess(config).__enter__(), FakeServerProcess(config).__enter__()
    answers: dict[int, tuple[str, bytes]] = {}
    ledgers: Counter[str] = Counter()
    under_way: list[int] = []

    def account(server: FakeServerProcess) -> None:
        ledgers.update(entry.request_id for entry in server.ledger() if entry.outcome == "length")

    try:
        with front(first.url, second.url, dispatch=dispatch) as gateway:

            async def traffic() -> None:
                nonlocal first, second
                loop = asyncio.get_running_loop()
                async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
                    tasks = []
                    for number in range(240):
                        tasks.append(asyncio.create_task(request(client, gateway.url, number, answers)))
                        await asyncio.sleep(0.01)
                        if number == 60:
                            await loop.run_in_executor(None, account, first)
                            under_way.append(sum(not task.done() for task in tasks))
                            kill(first)
                        if number == 110:
                            first = await loop.run_in_executor(None, restarted, first, config)
                        if number == 150:
                            await loop.run_in_executor(None, account, second)
                            under_way.append(sum(not task.done() for task in tasks))
                            kill(second)
                        if number == 200:
                            second = await loop.run_in_executor(None, restarted, second, config)
                    await asyncio.gather(*tasks)

            asyncio.run(traffic())
            state = httpx.get(gateway.url + "/gateway", timeout=120, trust_env=False).json()
            page = httpx.get(gateway.url + "/metrics", timeout=120, trust_env=False).text
        account(first)
        account(second)
    finally:
        first.__exit__(None, None, None)
        second.__exit__(None, None, None)
    ok = whole_answers(answers, at_most_broken=sum(under_way))
    # By the servers' ledgers, each ok request was answered in full exactly once: the gateway does not repeat a request
    # whose answer has begun. Requests without an entry were answered by a killed server, whose last entries are lost.
    assert all(ledgers.get(f"q{number}", 1) == 1 for number in ok)
    assert all(upstream["state"] == "active" for upstream in state["upstreams"])
    assert all(upstream["ejections"] >= 1 for upstream in state["upstreams"])
    assert state["waiting"] == 0
    assert all(upstream["open"] == 0 for upstream in state["upstreams"])
    assert answers_counted(page) == {"ok": len(ok), "broken": len(answers) - len(ok)}


def test_an_upstream_that_dies_mid_stream_fails_only_its_own_requests() -> None:
    config = FakeConfig(ttft_ms=20, itl_ms=100)
    answers: dict[int, tuple[str, bytes]] = {}

    def all_begun(server: FakeServerProcess) -> None:
        deadline = time.monotonic() + 60
        while sum(entry.tokens > 0 for entry in server.ledger()) < 5 and time.monotonic() < deadline:
            time.sleep(0.02)

    with FakeServerProcess(config) as doomed, FakeServerProcess(config) as healthy:
        with front(doomed.url, healthy.url, dispatch="round-robin") as gateway:

            async def traffic() -> None:
                async with httpx.AsyncClient(timeout=120, trust_env=False) as client:
                    tasks = [asyncio.create_task(request(client, gateway.url, number, answers)) for number in range(10)]
                    await asyncio.get_running_loop().run_in_executor(None, all_begun, doomed)
                    kill(doomed)
                    await asyncio.gather(*tasks)

            asyncio.run(traffic())
        kept = {int(entry.request_id[1:]) for entry in healthy.ledger()}
    assert len(kept) == 5
    for number, (outcome, content) in answers.items():
        assert (outcome == "ok") is (number in kept)
        if number not in kept:
            assert b'"error":{"message":"upstream ' in content


def test_a_server_that_refuses_connections_is_passed_over_and_taken_out() -> None:
    config = FakeConfig(ttft_ms=5, itl_ms=1)
    with FakeServerProcess(config) as gone, FakeServerProcess(config) as here:
        with front(gone.url, here.url, dispatch="round-robin", health_interval_s=30.0) as gateway:
            kill(gone)
            for _ in range(6):
                answer = httpx.post(gateway.url + "/v1/completions", json=BODY, timeout=120, trust_env=False)
                assert answer.status_code == 200
            state = httpx.get(gateway.url + "/gateway", timeout=120, trust_env=False).json()
        assert [upstream["state"] for upstream in state["upstreams"]] == ["ejected", "active"]
        assert len(here.ledger()) == 6


def test_requests_wait_while_every_upstream_is_down() -> None:
    config = FakeConfig(ttft_ms=5, itl_ms=1)
    server = FakeServerProcess(config).__enter__()
    answers: dict[int, tuple[str, bytes]] = {}
    try:
        with front(server.url) as gateway:

            async def traffic() -> None:
                nonlocal server
                async with httpx.AsyncClient(timeout=120, trust_env=False) as client:
                    kill(server)
                    tasks = [asyncio.create_task(request(client, gateway.url, number, answers)) for number in range(5)]
                    await asyncio.sleep(0.5)
                    assert answers == {}
                    health = await client.get(gateway.url + "/health")
                    assert health.status_code == 503
                    server = await asyncio.get_running_loop().run_in_executor(None, restarted, server, config)
                    await asyncio.gather(*tasks)

            asyncio.run(traffic())
    finally:
        server.__exit__(None, None, None)
    assert [outcome for outcome, _ in answers.values()] == ["ok"] * 5


def test_no_request_waits_longer_than_max_wait() -> None:
    with (
        FakeServerProcess(FakeConfig()) as server,
        front(server.url, max_wait_s=0.3, health_interval_s=30.0) as gateway,
    ):
        httpx.post(gateway.url + "/gateway/drain", params={"upstream": server.url}, timeout=120, trust_env=False)
        answer = httpx.post(gateway.url + "/v1/completions", json=BODY, timeout=120, trust_env=False)
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"


@pytest.mark.parametrize("fault", ["reset:every=5,after=3", "close:every=5,after=3", "truncate:every=5,after=3"])
def test_the_load_generator_sees_the_same_failures_through_the_gateway(fault: str) -> None:
    plan = build_plan(
        "balanced", num_prompts=40, seed=0, max_concurrency=8, input_len=20, output_len=10, source="profile"
    )
    options = ClientOptions(workers=0, metrics_interval_s=None)
    config = FakeConfig(ttft_ms=5, itl_ms=1, faults=(parse_fault(fault),))
    counts = []
    for through in (False, True):
        with FakeServerProcess(config) as server:
            if through:
                with front(server.url, eject_after=1000) as gateway:
                    status = drive(gateway.url, plan, options).requests["status"].to_pylist()
            else:
                status = drive(server.url, plan, options).requests["status"].to_pylist()
            counts.append((status.count("ok"), status.count("failed")))
    assert counts[0] == counts[1]
    assert sum(counts[0]) == 40
    assert counts[0][1] == 8


@pytest.mark.parametrize("fault", ["split", "crlf", "bundle:tokens=3"])
def test_odd_framing_passes_unchanged(fault: str) -> None:
    config = FakeConfig(ttft_ms=5, itl_ms=1, faults=(parse_fault(fault),))
    with FakeServerProcess(config) as server, front(server.url) as gateway:
        urls = (server.url, gateway.url)
        contents = [
            httpx.post(url + "/v1/completions", json=BODY, timeout=120, trust_env=False).content for url in urls
        ]
    assert contents[0].replace(b"cmpl-1", b"cmpl-2") == contents[1]
