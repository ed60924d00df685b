"""Pool of connections to one HTTP server: idle ones are kept, and some are opened before they are needed.

Used by the load generator and the gateway with their own protocols. Opening a connection in a busy event loop delays a
request by milliseconds, hence the reserve. Errors are httpx's.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Generic, NamedTuple, TypeVar, cast

import httpx

from ebbench.errors import UsageError

IDLE_LIMIT_S = 2.0
"""A connection idle for longer is not used again: a request sent while the server closes it gets no response.

uvicorn, and with it vLLM and SGLang, closes a connection that was idle for 5 s. The price is a new connection: a round
trip, with TLS two.
"""
CA_VARIABLES = ("SSL_CERT_FILE", "SSL_CERT_DIR")
"""Environment variables that name certificate authorities to trust; the first takes precedence."""


def tls_context(
    verify: bool = True, ca_file: str | None = None, environ: Mapping[str, str] = os.environ
) -> ssl.SSLContext:
    """TLS context that trusts ``ca_file`` (PEM), else SSL_CERT_FILE or SSL_CERT_DIR, else the certificates of httpx.

    ``verify`` False trusts every server. Raises UsageError for a file without certificates.
    """
    if not verify:
        return httpx.create_ssl_context(verify=False)
    named = [("--ca-file", ca_file), *((name, environ.get(name)) for name in CA_VARIABLES)]
    source, path = next(((name, value) for name, value in named if value), ("", ""))
    if not path:
        return httpx.create_ssl_context(trust_env=False)
    try:
        if source == "SSL_CERT_DIR":
            return ssl.create_default_context(capath=path)
        return ssl.create_default_context(cafile=path)
    except OSError as error:  # ssl.SSLError too: the file has no certificate
        raise UsageError(f"{source} {path}: no certificates in PEM form ({error.strerror or error})") from None


class BaseConnection(asyncio.Protocol):
    """A connection that can be kept in a pool."""

    def __init__(self) -> None:
        self.idle_since_ns = 0
        self.transport: asyncio.Transport | None = None

    @property
    def usable(self) -> bool:
        """Whether the connection is open."""
        return self.transport is not None and not self.transport.is_closing()

    def abort(self) -> None:
        """Close at once."""
        if self.transport is not None:
            self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        self.transport = cast(asyncio.Transport, transport)


class Address(NamedTuple):
    """Host, port and TLS of a server."""

    host: str
    port: int
    secure: bool

    @classmethod
    def of(cls, url: httpx.URL) -> Address:
        """The address in a URL."""
        secure = url.scheme == "https"
        return cls(url.host, url.port or (443 if secure else 80), secure)


W = TypeVar("W", bound=BaseConnection)


class Connections(Generic[W]):
    """Keep-alive connections to one server, unlimited in number.

    ``make`` builds the protocol of a connection. A connection idle for ``idle_limit_ns`` is closed. ``reserve`` (may be
    changed) is the number of idle connections kept open once requests are sent.
    """

    def __init__(
        self,
        address: Address,
        make: Callable[[Connections[W]], W],
        *,
        tls: ssl.SSLContext | None,
        connect_timeout_s: float,
        idle_limit_ns: int,
        reserve: int = 0,
    ) -> None:
        self.reserve = reserve
        self.refill: asyncio.Task[None] | None = None
        self._address, self._make, self._tls = address, make, tls
        self._connect_timeout_s, self._idle_limit_ns = connect_timeout_s, idle_limit_ns
        self._idle: deque[W] = deque()  # most recently used last

    def take(self) -> W | None:
        """The most recently used idle connection that is not too old, or None. The others age and are closed."""
        found = None
        while self._idle and found is None:
            connection = self._idle.pop()
            if self._fresh(connection):
                found = connection
            else:
                connection.abort()
        if len(self._idle) < self.reserve and self.refill is None:
            self.refill = asyncio.create_task(self._open_reserve())
        return found

    def give(self, connection: W) -> None:
        """Return an idle connection to the pool."""
        connection.idle_since_ns = time.monotonic_ns()
        self._idle.append(connection)

    async def connect(self) -> W:
        """Open a connection. Raises ConnectTimeout, ConnectError."""
        secure = self._address.secure
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: self._make(self),
                    self._address.host,
                    self._address.port,
                    ssl=self._tls if secure else None,
                    server_hostname=self._address.host if secure else None,
                )
        except TimeoutError:
            raise httpx.ConnectTimeout(f"no connection within {self._connect_timeout_s:g} s") from None
        except (OSError, ssl.SSLError) as error:
            raise httpx.ConnectError(str(error)) from error
        return connection

    def close(self) -> None:
        """Close the idle connections and open no further ones in advance."""
        self.reserve = 0
        if self.refill is not None:
            self.refill.cancel()
        for connection in self._idle:
            connection.abort()
        self._idle.clear()

    def _fresh(self, connection: W) -> bool:
        return connection.usable and time.monotonic_ns() - connection.idle_since_ns < self._idle_limit_ns

    async def _open_reserve(self) -> None:
        try:
            while self._idle and not self._fresh(self._idle[0]):
                self._idle.popleft().abort()
            while len(self._idle) < self.reserve:
                self.give(await self.connect())
        except httpx.TransportError:
            pass  # the request that needs the connection will report the error
        finally:
            self.refill = None
