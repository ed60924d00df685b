"""The fake server: its routes and its event loop."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import os
import signal
import socket
import ssl
import struct
import time
from collections.abc import Callable
from functools import partial
from typing import cast

import httptools
import msgspec
import uvloop

from ebbench.errors import RunError, UsageError
from ebbench.fakeserver.config import FakeConfig, Fault, pick
from ebbench.fakeserver.scheduled_response import (
    EVENT_STREAM,
    GenerationRequest,
    Ledger,
    LedgerEntry,
    Messages,
    ScheduledResponse,
    chunk,
    error_body,
    response,
)
from ebbench.process.alarm import Alarm, take_short_slices
from ebbench.process.child import allow_open_files, make_room_for_files

# HTTP/1.1 on one connection: httptools parses requests, the router responds.


class ServedConnection(asyncio.Protocol):
    """One client connection. Tokens are written directly to the socket, so that a recorded send is a real one.

    Under TLS they go through the transport, which encrypts them.
    """

    def __init__(self, router: FakeServer) -> None:
        self._router = router
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._fd, self._encrypted = -1, False
        self._url, self._body = b"", bytearray()
        self._received_ns = 0
        self.headers: dict[str, str] = {}
        self.response: ScheduledResponse | None = None
        self.byte_by_byte = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._transport, self._fd = cast(asyncio.Transport, transport), sock.fileno()
        self._encrypted = transport.get_extra_info("sslcontext") is not None
        self._router.connected(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the loop."""
        self._transport, self._fd = None, -1
        if self.response is not None:
            self.response.abandon()
        self._router.disconnected(self)

    def data_received(self, data: bytes) -> None:
        """Called by the loop."""
        self._received_ns = time.monotonic_ns()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:  # to HTTP/2, say; as in vLLM's server the body behind the headers is lost
            self.close()  # after the refusal of an empty body
        except httptools.HttpParserError as error:
            self.send(response(400, error_body(f"not HTTP: {error}", "BadRequestError", 400)))
            self.close()

    def on_url(self, url: bytes) -> None:
        """Called by the parser."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser."""
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        """Called by the parser."""
        self._body += body

    def on_message_complete(self) -> None:
        """Called by the parser."""
        method = self._parser.get_method().decode()
        path = httptools.parse_url(self._url).path.decode()
        body, self._url, self._body = bytes(self._body), b"", bytearray()
        self._router.handle(self, method, path, body, self._received_ns)
        self.headers = {}

    def send(self, data: bytes) -> None:
        """Write bytes to the socket at once, or queue what it does not take."""
        if self._transport is None or self._transport.is_closing():
            return
        if self.byte_by_byte:
            for index in range(len(data)):
                self._send(data[index : index + 1])
        else:
            self._send(data)

    def _send(self, data: bytes) -> None:
        assert self._transport is not None
        written = 0
        if not self._encrypted and self._transport.get_write_buffer_size() == 0:
            # The event loop reports a broken connection soon after, through connection_lost.
            with contextlib.suppress(OSError):
                written = os.write(self._fd, data)
        if written < len(data):
            self._transport.write(data[written:])

    def finished(self) -> None:
        """Mark the response complete."""
        self.response = None
        self.byte_by_byte = False

    def close(self) -> None:
        """Close after the queued bytes are sent."""
        if self._transport is not None:
            self._transport.close()

    def reset(self) -> None:
        """Close with a TCP reset."""
        if self._transport is not None:
            linger = struct.pack("ii", 1, 0)
            self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self._transport.abort()


# Timing wheel: one timer for thousands of streams.

TICK_NS = 250_000
_AT_ONCE = 32  # acts, about half a millisecond
Act = Callable[[], int]
"""Does what is due; returns when it is due next (monotonic ns), 0 for never."""


class TimerWheel:
    """Calls each ``act`` when it is due, at most a quarter of a millisecond late.

    Times are rounded up to ticks, which bounds the number of wake-ups. Where much is late, as on a machine with
    other work, requests are read and connections accepted in between: the event loop accepts one per turn.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._alarm = Alarm(loop, self._turn)
        self._ticks: list[int] = []
        self._due: dict[int, list[Act]] = {}

    def enter(self, act: Act, due_ns: int) -> None:
        """Schedule ``act`` for ``due_ns``."""
        if self._put(act, due_ns) == self._ticks[0]:
            self._alarm.set(self._ticks[0] * TICK_NS)

    def close(self) -> None:
        """Stop the timer."""
        self._alarm.close()

    def _put(self, act: Act, due_ns: int) -> int:
        tick = -(-due_ns // TICK_NS)
        acts = self._due.get(tick)
        if acts is None:
            self._due[tick] = [act]
            heapq.heappush(self._ticks, tick)
        else:
            acts.append(act)
        return tick

    def _turn(self) -> None:
        now_tick, done = time.monotonic_ns() // TICK_NS, 0
        while self._ticks and self._ticks[0] <= now_tick and done < _AT_ONCE:
            acts = self._due.pop(heapq.heappop(self._ticks))
            done += len(acts)
            for act in acts:
                due_ns = act()
                if due_ns:
                    self._put(act, due_ns)
        if self._ticks:
            self._alarm.set(self._ticks[0] * TICK_NS)


_CONNECTIONS = 65_536  # as far as the system lets
_REQUEST = msgspec.json.Decoder(GenerationRequest)
OWNER = "ebbench-fake-server"
"""Owner of the models it names, by which the client knows that nothing is computed."""


class FakeServer:
    """Responds to requests as configured and keeps the ledger."""

    def __init__(self, config: FakeConfig, loop: asyncio.AbstractEventLoop) -> None:
        self._config = config
        self._wheel = TimerWheel(loop)
        self._started_ns = time.monotonic_ns()
        self._connections: set[ServedConnection] = set()
        self._timing_ns = (round(config.ttft_ms * 1e6), round(config.itl_ms * 1e6))
        self._kill_after = min((f.after for f in config.faults if f.kind == "kill"), default=None)
        self._slots_free_ns = [0] * (config.max_running or 0)  # a heap; empty without max_running
        self.ledger = Ledger(config.keep_ledger)

    def connected(self, connection: ServedConnection) -> None:
        """Called when a connection is made."""
        self._connections.add(connection)

    def disconnected(self, connection: ServedConnection) -> None:
        """Called when a connection is lost."""
        self._connections.discard(connection)

    def handle(self, connection: ServedConnection, method: str, path: str, body: bytes, received_ns: int) -> None:
        """Route one request."""
        if path in ("/v1/completions", "/v1/chat/completions") and method == "POST":
            self._generate(connection, path, body, received_ns)
            return
        routes: dict[tuple[str, str], Callable[[], bytes]] = {
            ("GET", "/health"): self._health,
            ("GET", "/v1/models"): self._models,
            ("GET", "/metrics"): self._metrics,
            ("GET", "/ledger"): lambda: response(200, self.ledger.encode()),
            ("DELETE", "/ledger"): self._clear,
            ("POST", "/reset_prefix_cache"): self._reset_cache,
            ("POST", "/tokenize"): lambda: self._tokenize(body),
        }
        route = routes.get((method, path))
        missing = response(404, error_body(f"no route {method} {path}", "NotFoundError", 404))
        connection.send(route() if route else missing)

    def close(self) -> None:
        """Stop the timer."""
        self._wheel.close()

    def _generate(self, connection: ServedConnection, path: str, body: bytes, received_ns: int) -> None:
        try:
            request = _REQUEST.decode(body)
        except msgspec.DecodeError as error:
            connection.send(response(400, error_body(str(error), "BadRequestError", 400)))
            return
        limit = request.max_tokens or request.max_completion_tokens or self._config.default_tokens
        number = self.ledger.received + 1
        fault = pick(self._config.faults, number)
        entry = LedgerEntry(
            number=number,
            request_id=connection.headers.get("x-request-id", ""),
            path=path,
            received_ns=received_ns,
            prompt_tokens=request.prompt_tokens,
            max_tokens=limit,
            fault=fault.kind if fault else None,
        )
        if entry.prompt_tokens + limit > self._config.max_model_len:
            fault = Fault("status", code=400)
        if fault and self._refused(connection, entry, fault):
            return
        entry.started_ns = self._start_ns(entry)
        if not request.stream:
            self._answer_whole(connection, path, entry)
            return
        self._stream(connection, path, entry, fault, request)

    def _start_ns(self, entry: LedgerEntry) -> int:
        """When a slot is free for the response.

        The slot stays taken for the full length, even if a fault ends it early.
        """
        if not self._slots_free_ns:
            return entry.received_ns
        start_ns = max(entry.received_ns, self._slots_free_ns[0])
        ttft_ns, itl_ns = self._timing_ns
        heapq.heapreplace(self._slots_free_ns, start_ns + ttft_ns + (entry.max_tokens - 1) * itl_ns)
        return start_ns

    def _stream(
        self,
        connection: ServedConnection,
        path: str,
        entry: LedgerEntry,
        fault: Fault | None,
        request: GenerationRequest,
    ) -> None:
        kind = fault.kind if fault else ""
        chat = path.endswith("chat/completions")
        messages = Messages(f"cmpl-{entry.number}", self._config.model, chat, kind == "crlf")
        asked = request.stream_options or {}
        thinking = (self._config.thinking_tokens if chat else 0, self._config.thinking_field)
        usage, so_far = bool(asked.get("include_usage")), bool(asked.get("continuous_usage_stats"))
        response = ScheduledResponse(
            entry, connection, self.ledger, messages, self._timing_ns, fault, usage, so_far, thinking
        )
        connection.response, connection.byte_by_byte = response, kind == "split"
        if kind != "stall" or (fault and fault.after >= 0):
            connection.send(EVENT_STREAM + (chunk(messages.role()) if chat else b""))
            self._wheel.enter(partial(self._send_next, response), response.due_ns())

    def _send_next(self, response: ScheduledResponse) -> int:
        """Send the next message of a response; after the last one count it, for the fault ``kill``."""
        due_ns = response.act()
        if not due_ns and self._kill_after is not None and self.ledger.completed >= self._kill_after:
            os._exit(9)
        return due_ns

    def _refused(self, connection: ServedConnection, entry: LedgerEntry, fault: Fault) -> bool:
        """Respond with an error if the fault asks for one; returns whether it did."""
        status, message = fault.code, f"fault: status {fault.code}"
        if fault.kind == "echo-auth":
            status, message = 401, f"no access with {connection.headers.get('authorization', 'no key')}"
        elif fault.kind not in ("status", "refuse"):
            return False
        self.ledger.open(entry)
        self.ledger.close(entry, time.monotonic_ns(), fault.kind)
        if fault.kind == "refuse":
            connection.close()
            return True
        extra = {"retry-after": str(fault.retry_after)} if fault.retry_after is not None else None
        connection.send(response(status, error_body(message, "FakeFault", status), extra=extra))
        return True

    def _answer_whole(self, connection: ServedConnection, path: str, entry: LedgerEntry) -> None:
        """Answer without a stream, when the last token would be due."""
        self.ledger.open(entry)
        messages = Messages(f"cmpl-{entry.number}", self._config.model, path.endswith("chat/completions"), False)
        body = response(200, messages.whole(entry.max_tokens, "length", entry.prompt_tokens))
        ttft_ns, itl_ns = self._timing_ns
        due_ns = entry.started_ns + ttft_ns + (entry.max_tokens - 1) * itl_ns

        def act() -> int:
            entry.tokens = entry.max_tokens
            self.ledger.sent_tokens += entry.max_tokens
            self.ledger.close(entry, time.monotonic_ns(), "length")
            connection.send(body)
            return 0

        self._wheel.enter(act, due_ns)

    def _health(self) -> bytes:
        unready_ms = max((f.ms for f in self._config.faults if f.kind == "unready"), default=0.0)
        ready = time.monotonic_ns() - self._started_ns >= unready_ms * 1e6
        return response(200, b"") if ready else response(503, b"")

    def _models(self) -> bytes:
        names = (self._config.model, *self._config.further_models)
        about = {"object": "model", "owned_by": OWNER, "max_model_len": self._config.max_model_len}
        models = [{"id": name} | about for name in names]
        return response(200, msgspec.json.encode({"object": "list", "data": models}))

    def _clear(self) -> bytes:
        self.ledger.clear()
        return response(200, b"{}")

    def _reset_cache(self) -> bytes:
        self.ledger.cache_resets += 1
        return response(200, b"{}")

    def _tokenize(self, body: bytes) -> bytes:
        request = _REQUEST.decode(body)
        count = request.prompt_tokens
        return response(200, msgspec.json.encode({"count": count, "tokens": list(range(count))}))

    def _metrics(self) -> bytes:
        ledger = self.ledger
        running = sum(1 for c in self._connections if c.response is not None and c.response.active)
        values = {
            ("vllm:num_requests_running", "gauge"): running,
            ("vllm:num_requests_waiting", "gauge"): 0,
            ("vllm:prompt_tokens_total", "counter"): ledger.prompt_tokens,
            ("vllm:generation_tokens_total", "counter"): ledger.sent_tokens,
            ("vllm:request_success_total", "counter"): ledger.completed,
            ("fake:cache_resets_total", "counter"): ledger.cache_resets,
        }
        lines = [
            f'# TYPE {name} {kind}\n{name}{{model_name="{self._config.model}"}} {value}'
            for (name, kind), value in values.items()
        ]
        lines += self._config.metrics_lines
        return response(200, ("\n".join(lines) + "\n").encode(), "text/plain; version=0.0.4")


def _tls(config: FakeConfig) -> ssl.SSLContext | None:
    """TLS context with the server's certificate; None for plain http. Raises UsageError if it cannot be read."""
    if config.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    except OSError as error:
        problem = f"no certificate with its key in PEM form ({error.strerror or error})"
        raise UsageError(f"--ssl-certfile {config.ssl_certfile}: {problem}") from None
    return context


async def serve(config: FakeConfig, on_ready: Callable[[int], None]) -> Ledger:
    """Serve until SIGINT or SIGTERM; ``on_ready`` receives the port. Raises RunError if the port cannot be bound."""
    loop = asyncio.get_running_loop()
    server = FakeServer(config, loop)
    try:
        listener = await loop.create_server(
            lambda: ServedConnection(server), config.host, config.port, backlog=8192, ssl=_tls(config)
        )
    except OSError as error:
        raise RunError(
            f"cannot listen on {config.host}:{config.port}: {error.strerror}; choose another --port"
        ) from None
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    on_ready(listener.sockets[0].getsockname()[1])
    await stop.wait()
    listener.close()
    server.close()
    return server.ledger


def run(config: FakeConfig, on_ready: Callable[[int], None]) -> Ledger:
    """Run :func:`serve` on its own uvloop."""
    allow_open_files(_CONNECTIONS)
    make_room_for_files()
    take_short_slices()
    return uvloop.run(serve(config, on_ready))
