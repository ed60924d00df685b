"""Bodies of requests in the gateway's memory, within limits."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from ebbench.gateway.refusals import Receive, RefusedError, Scope


class ClientLeftError(Exception):
    """The client has closed its connection."""


@dataclass
class Body:
    """A body; ``data`` is dropped once no further server can need it."""

    data: bytes
    held_bytes: int


class Bodies:
    """Reads bodies: each at most ``one_bytes`` long, all that wait for an answer at most ``all_bytes``."""

    def __init__(self, one_bytes: float, all_bytes: float) -> None:
        self._one_bytes, self._all_bytes = one_bytes, all_bytes
        self.held_bytes = 0

    @asynccontextmanager
    async def read(self, scope: Scope, receive: Receive) -> AsyncIterator[Body]:
        """The whole body. Raises RefusedError above a limit, ClientLeftError."""
        body = Body(b"", 0)
        try:
            declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
            self._check(int(declared), 0)
            parts = [part async for part in self._parts(receive, body)]
            body.data = parts[0] if len(parts) == 1 else b"".join(parts)
            yield body
        finally:
            self.drop(body)

    def drop(self, body: Body) -> None:
        """Free the memory of a body that is not sent again."""
        self.held_bytes -= body.held_bytes
        body.data, body.held_bytes = b"", 0

    async def _parts(self, receive: Receive, body: Body) -> AsyncIterator[bytes]:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientLeftError
            part = message.get("body", b"")
            body.held_bytes += len(part)
            self.held_bytes += len(part)
            self._check(body.held_bytes, self.held_bytes)
            yield part
            if not message.get("more_body"):
                return

    def _check(self, one_bytes: int, all_bytes: int) -> None:
        if one_bytes > self._one_bytes:
            raise RefusedError(f"the body is larger than {self._one_bytes / 1e6:g} MB", 413)
        if all_bytes > self._all_bytes:
            raise RefusedError(f"requests of {self._all_bytes / 1e6:g} MB wait already", 503, 1)
