"""CPU time per streamed token by transport: the client's own, httpx, and httpx-aiohttp (if installed).

    python tests/benchmarks/bench_client_transports.py

All three read the same responses from the fake server through the same parser, in this process, on uvloop: concurrent
streams with one response each, short and long ones. The slope between the two is the cost of a token, the intercept
that of a request. Not a test; run it by hand on an idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import httpx
import uvloop

from ebbench.client.bodies import RequestBodies, Turn
from ebbench.client.dialects import DIALECTS
from ebbench.client.request_sender import ConnectionPool
from ebbench.client.response import StreamedResponse
from ebbench.fakeserver import FakeConfig, FakeServerProcess
from ebbench.network.connections import RequestHead
from ebbench.spec.client import ClientOptions

Ask = Callable[[str, bytes, StreamedResponse], Awaitable[None]]
Maker = Callable[[str], contextlib.AbstractAsyncContextManager[Ask]]
HEADERS = {"content-type": "application/json"}


@contextlib.asynccontextmanager
async def direct(url: str) -> AsyncIterator[Ask]:
    """The client's own wire: the answer's tap is called in the read callback."""
    pool = ConnectionPool(RequestHead.of("POST", f"{url}/v1/completions", HEADERS), None, 10.0)

    async def ask(request_id: str, body: bytes, answer: StreamedResponse) -> None:
        exchange = await pool.send(request_id, body, answer)
        await exchange.body()

    yield ask
    pool.close()


@contextlib.asynccontextmanager
async def through_httpx(url: str, transport: httpx.AsyncBaseTransport | None) -> AsyncIterator[Ask]:
    """An httpx client: one iteration for each read."""
    client = httpx.AsyncClient(transport=transport, timeout=None, limits=httpx.Limits(max_connections=None))

    async def ask(request_id: str, body: bytes, answer: StreamedResponse) -> None:
        headers = {**HEADERS, "x-request-id": request_id}
        async with client.stream("POST", f"{url}/v1/completions", content=body, headers=headers) as response:
            async for data in response.aiter_raw():
                answer.feed(data, time.monotonic_ns())

    async with client:
        yield ask


async def cpu_s(ask: Ask, streams: int, tokens: int) -> float:
    """CPU seconds of this process for ``streams`` answers of ``tokens`` tokens, all at once."""
    bodies = RequestBodies("fake-model", ClientOptions())
    answers = [StreamedResponse(DIALECTS["completions"], keep_text=False) for _ in range(streams)]
    requests = [bodies.build(Turn(i, str(i), 0, 100, tokens, i, None, None)) for i in range(streams)]
    before = time.process_time()
    await asyncio.gather(*(ask(str(i), r, a) for i, (r, a) in enumerate(zip(requests, answers, strict=True))))
    spent = time.process_time() - before
    assert all(len(a.times_ns) == tokens for a in answers)
    return spent


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=3, help="the best of so many is kept")
    asked = parser.parse_args()
    makers: dict[str, Maker] = {
        "direct": direct,
        "httpx": lambda url: through_httpx(url, None),
    }
    try:
        from httpx_aiohttp import AiohttpTransport

        makers["httpx-aiohttp"] = lambda url: through_httpx(url, AiohttpTransport())
    except ImportError:
        print("httpx-aiohttp is not installed")
    print(f"{'transport':<14} {'us per token':>12} {'us per request':>14}")
    with FakeServerProcess(FakeConfig(ttft_ms=50, itl_ms=20)) as server:

        async def measure(make: Maker, tokens: int) -> float:
            async with make(server.url) as ask:
                return await cpu_s(ask, asked.streams, tokens)

        for name, make in makers.items():
            short, long = (
                min(uvloop.run(measure(make, tokens)) for _ in range(asked.rounds)) for tokens in (5, asked.tokens)
            )
            token_us = 1e6 * (long - short) / (asked.tokens - 5) / asked.streams
            request_us = 1e6 * short / asked.streams - 5 * token_us
            print(f"{name:<14} {token_us:>12.1f} {request_us:>14.1f}", flush=True)


if __name__ == "__main__":
    main()
