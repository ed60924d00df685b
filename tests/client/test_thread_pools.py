"""Servers that serve few connections at a time: the client's own idle connections must not keep requests waiting."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import numpy as np
import pyarrow as pa
import pytest

from ebbench.client.load_generator import DriveResult, slow_first_uses
from ebbench.errors import UsageError
from tests.client.client_runs import column, plan_of, run
from tests.client.odd_server import OddServer, completion, models, reply, running, streamed

SECONDS = 1_000_000_000


class ThreadPoolServer:
    """Each thread serves one connection until the client closes it, or until it has been idle for 5 s."""

    def __init__(self, threads: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.accepted = 0
        self._threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.accepted += 1
            connection.settimeout(5)
            try:
                with connection, connection.makefile("rb") as lines:
                    while request := lines.readline():
                        length = 0
                        while (line := lines.readline()) not in (b"\r\n", b""):
                            name, _, value = line.partition(b":")
                            length = int(value) if name.lower() == b"content-length" else length
                        self._answer(connection, request, lines.read(length))
            except OSError:
                continue

    def _answer(self, connection: socket.socket, request: bytes, body: bytes) -> None:
        if request.startswith(b"GET"):
            connection.sendall(models("m") if b"models" in request else reply("200 OK"))
        elif b"completions" in request:
            time.sleep(0.04)
            events = completion(json.loads(body)["max_tokens"])
            connection.sendall(reply("200 OK", events, content_type="text/event-stream"))
        else:
            connection.sendall(reply("404 Not Found"))

    def close(self) -> None:
        """Accept no further connection."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@contextmanager
def pool(threads: int) -> Iterator[ThreadPoolServer]:
    with closing(ThreadPoolServer(threads)) as server:
        yield server


def poisson_ms(rate: float, requests: int) -> list[float]:
    gaps = np.random.default_rng(7).exponential(1e3 / rate, requests)
    return [float(ms) for ms in np.cumsum(gaps)]


def waits_s(result: DriveResult) -> list[float]:
    pairs = zip(column(result, "first_byte_ns"), column(result, "sent_ns"), strict=True)
    return sorted((first - sent) / SECONDS for first, sent in pairs)


@pytest.mark.parametrize("threads", [8, 3, 1])
def test_no_request_waits_for_an_idle_connection(threads: int) -> None:
    plan = plan_of(60, concurrency=None, arrivals_ms=poisson_ms(14, 60), output_tokens=2)
    with pool(threads) as server:
        result = run(server.url, plan, metrics_interval_s=0.5)
    assert set(column(result, "status")) == {"ok"}
    # Kept connections would hold threads for up to 5 s, and requests behind them for as long as others come.
    assert waits_s(result)[-1] < (4.0 if threads == 1 else 2.0)


def test_connections_are_kept_although_some_answers_take_long() -> None:
    """Quick answers overtake the slow ones, as short prompts overtake long ones."""
    asked = itertools.count()

    async def answer(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.7 if next(asked) % 8 == 0 else 0.02)
        writer.write(streamed(2))

    plan = plan_of(160, concurrency=None, arrivals_ms=poisson_ms(40, 160), output_tokens=2)
    with running(OddServer(post=answer)) as server:
        result = run(server.url, plan)
    assert set(column(result, "status")) == {"ok"}
    counts = result.facts["client_connections"]
    assert counts["opened"] < 80, counts


def test_a_connection_per_request_serves_a_single_thread() -> None:
    plan = plan_of(12, concurrency=3, output_tokens=2)
    with pool(1) as server:
        before = server.accepted
        result = run(server.url, plan, connections="per-request")
        opened = server.accepted - before
    assert set(column(result, "status")) == {"ok"}
    assert opened >= 12
    assert result.facts["client_connections"]["opened"] == 12


@pytest.mark.parametrize("connections", ["ahead", "on-demand"])
def test_no_more_connections_are_held_than_requests_need(connections: str) -> None:
    with pool(16) as server:
        result = run(
            server.url,
            plan_of(30, concurrency=None, arrivals_ms=[100.0 * i for i in range(30)], output_tokens=2),
            connections=connections,
        )
    counts = result.facts["client_connections"]
    spare = 1 if connections == "ahead" else 0
    assert counts["most_held"] <= counts["most_used"] + spare


def test_a_server_that_refuses_spare_connections_is_left_alone() -> None:
    class Limited(OddServer):
        """Serves two connections at a time and closes any other at once."""

        served = refused = 0

        async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if self.served >= 2:
                self.refused += 1
                writer.transport.abort()
                return
            self.served += 1
            try:
                await super().serve(reader, writer)
            finally:
                self.served -= 1

    server = Limited()
    with running(server):
        plan = plan_of(40, concurrency=2, arrivals_ms=[25.0 * i for i in range(40)], output_tokens=2)
        result = run(server.url, plan, metrics_interval_s=None)
    assert set(column(result, "status")) == {"ok"}
    assert server.refused <= 3, "of those opened ahead"


def test_an_unknown_way_to_connect_is_refused() -> None:
    with pytest.raises(UsageError, match="unknown --connections 'never'; known: ahead, on-demand, per-request"):
        run("http://127.0.0.1:1", plan_of(1), connections="never")


def requests_of(times_s: list[tuple[float, float | None]]) -> pa.Table:
    """Requests with these times of sending and of the first byte."""
    sent = [round(sent * SECONDS) for sent, _ in times_s]
    first = [None if begun is None else round(begun * SECONDS) for _, begun in times_s]
    end = [round(300 * SECONDS)] * len(times_s)
    columns = {"sent_ns": sent, "first_byte_ns": first, "end_ns": end}
    return pa.table({name: pa.array(values, pa.int64()) for name, values in columns.items()})


def test_first_requests_that_others_overtake_are_said() -> None:
    quick = [(0.1 * i, 0.1 * i + 0.02) for i in range(100)]
    slow: list[tuple[float, float | None]] = [(1.0, 5.0), (2.0, 6.0), (3.0, None)]
    table = requests_of([*quick, *slow])
    (warning,) = map(str, slow_first_uses(table, [100, 101, 102]))
    assert warning.startswith("3 requests that were the first on their connection waited up to 3e+02 s (median 4 s)")
    assert "--connections per-request" in warning
    assert slow_first_uses(table, [0, 1, 2]) == (), "the slow ones were on used connections"
    assert slow_first_uses(table, [100]) == (), "too few"


def test_a_first_wave_behind_a_queue_is_no_fault_of_connections() -> None:
    wave = [(0.0004 * i, 0.2 * (i + 1)) for i in range(64)]
    later = [(0.2 * (i + 1), 0.2 * (i + 65)) for i in range(64)]
    assert slow_first_uses(requests_of([*wave, *later]), range(64)) == ()


def test_a_priority_that_overtakes_all_alike_is_no_fault_of_connections() -> None:
    quick = [(0.1 * i, 0.1 * i + 0.02) for i in range(100)]
    starved = [(0.3 * i, 0.3 * i + 2.0) for i in range(20)]
    assert slow_first_uses(requests_of([*quick, *starved]), range(0, 120, 5)) == ()
