"""Runs the gateway under uvicorn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from ebbench.errors import RunError
from ebbench.gateway.app import Gateway, make_app
from ebbench.gateway.dispatch_queue import error_body
from ebbench.gateway.settings import GatewaySettings
from ebbench.process.child import allow_open_files, make_room_for_files

# uvicorn's HTTP protocol with limits on what one client can hold: memory for headers, and time in every state.
#
# uvicorn with httptools has no limit on headers and none on the time that a request takes to arrive or a response to
# be read; with h11 it has the first, at several times the cost per request.

MAX_HEAD_BYTES = 1 << 16  # of one request: line, headers, and whatever comes between two parts of a body
HEAD_LIMIT_S = 30.0  # from the first byte of a request, or the connection, to the end of its headers
STALL_LIMIT_S = 60.0  # between two parts of a body, and for a client to read on from a response
_TOO_LARGE = (431, f"headers larger than {MAX_HEAD_BYTES >> 10} KiB")
_PIPELINED = 16  # requests on a connection that wait for the response before them


class _RequestError(Exception):
    """The request is refused."""


class LimitedProtocol(HttpToolsProtocol):
    """One connection of a client."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._refusal: tuple[int, str] | None = None  # status and reason
        self._head_bytes = self._unparsed = 0
        self._in_body = False
        self._arrival: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Called by the loop."""
        super().connection_made(transport)
        self._expect(self.timeout_keep_alive)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the loop."""
        super().connection_lost(exc)
        self._expect(None)
        self.resume_writing()

    def data_received(self, data: bytes) -> None:
        """Called by the loop."""
        if self._refusal is not None:
            return
        if not self._unparsed and not self._in_body:
            self._expect(HEAD_LIMIT_S)
        self._unparsed += len(data)
        super().data_received(data)
        if self._unparsed > MAX_HEAD_BYTES and self._refusal is None:
            self._refusal = _TOO_LARGE
            self.send_400_response("")

    def send_400_response(self, msg: str) -> None:
        """Refuse the request; a response that has begun ends with its connection instead."""
        status, reason = self._refusal = self._refusal or (400, msg)
        begun = self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete
        if begun or self.pipeline:
            self.transport.abort()
            return
        body = error_body(reason, status)
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()

    def on_message_begin(self) -> None:
        """Called by the parser."""
        super().on_message_begin()
        self._head_bytes, self._in_body = 0, False

    def on_url(self, url: bytes) -> None:
        """Called by the parser."""
        self._count(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser, for trailers too; these are no headers."""
        self._count(name + value)
        if not self._in_body:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (hosts == 0 and self.parser.get_http_version() == "1.1"):
            self._refuse(400, f"{hosts} Host headers; HTTP/1.1 wants one")
        for name, value in self.headers:
            if name == b"transfer-encoding" and value.lower() != b"chunked":
                self._refuse(501, "transfer-encoding other than chunked")
        if len(self.pipeline) >= _PIPELINED:
            self._refuse(400, f"more than {_PIPELINED} requests wait on one connection")
        super().on_headers_complete()
        self._in_body, self._unparsed = True, 0
        self._expect(STALL_LIMIT_S)

    def on_body(self, body: bytes) -> None:
        """Called by the parser."""
        self._unparsed = 0
        self._expect(STALL_LIMIT_S)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Called by the parser."""
        self._unparsed, self._in_body = 0, False
        self._expect(None)
        super().on_message_complete()

    def pause_writing(self) -> None:
        """Called by the loop when the client does not read fast enough."""
        super().pause_writing()
        self._writing = self.loop.call_later(STALL_LIMIT_S, self.transport.abort)

    def resume_writing(self) -> None:
        """Called by the loop when the client has read on."""
        super().resume_writing()
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    def _expect(self, limit_s: float | None) -> None:
        """Close the connection unless the client goes on within ``limit_s``; None expects nothing."""
        if self._arrival is not None:
            self._arrival.cancel()
        self._arrival = None if limit_s is None else self.loop.call_later(limit_s, self._late, limit_s)

    def _late(self, limit_s: float) -> None:
        if not self._unparsed and not self._in_body:
            self.transport.close()  # no byte of a request has arrived, so a response would be taken for a later one's
        else:
            self._refusal = self._refusal or (408, f"the rest of the request did not arrive within {limit_s:g} s")
            self.send_400_response("")

    def _count(self, part: bytes) -> None:
        self._head_bytes += len(part)
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(*_TOO_LARGE)

    def _refuse(self, status: int, reason: str) -> None:
        self._refusal = (status, reason)
        raise _RequestError(reason)


_CONNECTIONS = 65_536  # of clients and to upstreams, as far as the system lets


def serve(settings: GatewaySettings, on_ready: Callable[[int], None]) -> None:
    """Check the upstreams, then serve until SIGTERM or SIGINT; ``on_ready`` receives the port.

    Raises UsageError and RunError before the first request is served. Open requests get ``drain_s`` seconds to end.
    """
    allow_open_files(_CONNECTIONS)
    make_room_for_files()
    uvloop.run(_serve(settings.checked(), on_ready))


async def _serve(settings: GatewaySettings, on_ready: Callable[[int], None]) -> None:
    gateway = Gateway(settings)
    try:
        await gateway.start()
    except BaseException:
        await gateway.close()
        raise
    config = uvicorn.Config(
        make_app(gateway),
        host=settings.host,
        port=settings.port,
        loop="none",
        http=LimitedProtocol,
        proxy_headers=False,  # who is on this machine is not for a header to say
        ws="none",
        log_level="critical",
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=60,
        timeout_graceful_shutdown=max(1, round(settings.drain_s)),
        backlog=4096,
    )
    server = _Server(config, on_ready)
    try:
        await server.serve()
    except SystemExit:
        raise RunError(
            f"cannot listen on {settings.host}:{settings.port}; is the port taken? Give another --port"
        ) from None
    finally:
        if not server.started:
            await gateway.close()
    if server.started:
        # Only a signal ends it. uvicorn raises that signal again as SIGINT, which a shell may have set to be ignored.
        raise KeyboardInterrupt


class _Server(uvicorn.Server):
    """uvicorn's server, which calls ``on_ready`` with the port once it listens."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[int], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        """uvicorn's start-up, then ``on_ready``."""
        await super().startup(sockets)  # type: ignore[arg-type]
        if self.started:
            self._on_ready(int(self.servers[0].sockets[0].getsockname()[1]))
