"""HTTP/1.1 on one connection: httptools parses requests, the router responds."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import time
from typing import Protocol, cast

import httptools

from ebbench.fakeserver.http_messages import error_body, response
from ebbench.fakeserver.scheduled_response import ScheduledResponse


class Router(Protocol):
    """Handles requests."""

    def handle(self, connection: ServedConnection, method: str, path: str, body: bytes, received_ns: int) -> None:
        """Respond to the request through ``connection``."""
        ...

    def connected(self, connection: ServedConnection) -> None:
        """Called when a connection is made."""
        ...

    def disconnected(self, connection: ServedConnection) -> None:
        """Called when a connection is lost."""
        ...


class ServedConnection(asyncio.Protocol):
    """One client connection. Tokens are written directly to the socket, so that a recorded send is a real one.

    Under TLS they go through the transport, which encrypts them.
    """

    def __init__(self, router: Router) -> None:
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
