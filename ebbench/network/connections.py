"""Pool of connections to one HTTP server: idle ones are kept, and some are opened before they are needed.

Used by the load generator and the gateway, each with exchanges of its own. Opening a connection in a busy event loop
delays a request by milliseconds, hence the reserve.
"""

from __future__ import annotations

import asyncio
import os
import select
import ssl
import time
from collections import deque
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple, Protocol, cast
from urllib.parse import quote, urlsplit

from ebbench import __version__
from ebbench.errors import UsageError

IDLE_LIMIT_S = 1.5
"""A connection idle for longer is not used again: a request sent while the server closes it gets no response.

uvicorn, and with it vLLM and SGLang, closes a connection that was idle for 5 s, gunicorn one for 2 s. The price is a
new connection: a round trip, with TLS two.
"""
_CLOSED_SOON_NS = 5_000_000
_BEHIND_NS = 100_000_000
"""A server that does not keep connections closes them right behind the answer, on a busy machine so much later.

llama.cpp does after a streamed answer, although its headers say keep-alive; a request sent meanwhile gets no response.
"""
_STARVED_NS = 50_000_000  # shorter waits are no sign of a server without a free thread
_TIMES_HELPED = 3
CA_VARIABLES = ("SSL_CERT_FILE", "SSL_CERT_DIR")
"""Environment variables that name certificate authorities to trust; the first takes precedence."""


def tls_context(
    verify: bool = True, ca_file: str | None = None, environ: Mapping[str, str] = os.environ
) -> ssl.SSLContext:
    """TLS context that trusts ``ca_file`` (PEM), else SSL_CERT_FILE or SSL_CERT_DIR, else the certificates of httpx.

    ``verify`` False trusts every server. Raises UsageError for a file without certificates.
    """
    import httpx

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


class TransportError(Exception):
    """An exchange that failed below HTTP. ``error_class``: how such requests are counted."""

    error_class = "client_error"


class ConnectError(TransportError):
    """No connection; the server has not seen the request."""

    error_class = "connect_error"


class ConnectTimeoutError(TransportError):
    """No connection in time; the server has not seen the request."""

    error_class = "connect_timeout"


class IdleTimeoutError(TransportError):
    """The server was silent for too long."""

    error_class = "idle_timeout"


class ResetError(TransportError):
    """The connection broke while it was written or read."""

    error_class = "connection_reset"


class ProtocolError(TransportError):
    """The connection was closed early, or carried something that is not HTTP."""

    error_class = "connection_closed"


class Exchange(Protocol):
    """One request and its response: what a connection passes the bytes to."""

    def received(self, data: bytes) -> None:
        """Bytes from the server."""
        ...

    def lost(self, exc: Exception | None) -> None:
        """The connection is closed before the exchange is complete."""
        ...


class Connection(asyncio.Protocol):
    """A connection that can be kept in a pool, with at most one open exchange.

    ``answered``: whether a response has begun on it; ``aborted``: whether it was closed here. Times are monotonic ns.
    """

    def __init__(self, connections: Connections) -> None:
        self.idle_since_ns = self.used_since_ns = self.answered_ns = 0
        self.answered = self.aborted = False
        self.transport: asyncio.Transport | None = None
        self._connections = connections
        self._exchange: Exchange | None = None
        self._readable: select.poll | None = None

    def begin(self, exchange: Exchange, request: Sequence[bytes]) -> None:
        """Send the pieces of a request; what comes from now on belongs to its exchange. Raises ConnectError."""
        if self.transport is None:
            raise ConnectError("the connection was closed at once")
        # The protocol stays the same: exchanging it makes uvloop stop and start to read, four system calls a request.
        self._exchange = exchange
        self.transport.writelines(request)

    @property
    def usable(self) -> bool:
        """Whether the connection is open."""
        return self.transport is not None and not self.transport.is_closing()

    @property
    def hung_up(self) -> bool:
        """Whether it is closed, or the server's close has come, which a busy event loop has not read yet.

        An idle connection has nothing else to read; with TLS it may have session tickets, so that this is unknown.
        """
        if self.transport is None or self.transport.is_closing():
            return True
        if self.transport.get_extra_info("sslcontext") is not None:
            return False
        if self._readable is None:
            self._readable = select.poll()
            self._readable.register(self.transport.get_extra_info("socket"), select.POLLIN)
        return bool(self._readable.poll(0))

    def abort(self) -> None:
        """Close at once."""
        self.aborted = True
        if self.transport is not None:
            self.transport.abort()

    def complete(self, keep_alive: bool) -> None:
        """Return the connection to the pool after a response, or close it if the server or the pool does.

        Its exchange receives no further bytes.
        """
        self._exchange = None
        self.begun()
        if keep_alive and self.usable and self._connections.keeps(self):
            self._connections.give(self)
        else:
            self.abort()

    def begun(self) -> None:
        """Note that a response has begun."""
        self._connections.answered(self, first=not self.answered)
        self.answered, self.answered_ns = True, time.monotonic_ns()

    def closed_behind_answer(self) -> bool:
        """Whether the server closed it right behind an answer, while it was idle or instead of answering again."""
        if not self.answered or self.aborted:
            return False
        idle = self.used_since_ns < self.idle_since_ns
        used_ns = time.monotonic_ns() if idle else self.used_since_ns
        return (idle or self.answered_ns < used_ns) and used_ns - self.idle_since_ns < _BEHIND_NS

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Called by the loop. Bytes outside an exchange break the protocol: close the connection."""
        if self._exchange is None:
            self.abort()
        else:
            self._exchange.received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the loop."""
        self.transport = None
        self._connections.lost(self)
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.lost(exc)


_PORTS = {False: 80, True: 443}
_IN_PATH, _IN_QUERY = "/%:@!$&'()*+,;=~", "/%:@!$&'()*+,;=~?"
"""Characters that stay as they are in the path and the query of a URL."""


class Address(NamedTuple):
    """Host, port and TLS of a server."""

    host: str
    port: int
    secure: bool

    @classmethod
    def of(cls, url: str) -> Address:
        """The address in a URL. Raises UsageError for a host that cannot be looked up."""
        parts = urlsplit(url)
        secure = parts.scheme == "https"
        try:
            host = (parts.hostname or "").encode("idna").decode()
        except UnicodeError as error:
            raise UsageError(f"{url}: {parts.hostname!r} is no name of a host ({error})") from None
        return cls(host, parts.port or _PORTS[secure], secure)


class RequestHead(NamedTuple):
    """Where every request of a client goes, and what its text begins with: request line and headers, no last line."""

    address: Address
    text: bytes

    @classmethod
    def of(cls, method: str, url: str, headers: Mapping[str, str]) -> RequestHead:
        """The head of a request without a body. ``headers`` may replace our own. Raises UsageError for the URL."""
        parts = urlsplit(url)
        address = Address.of(url)
        target = quote(parts.path or "/", safe=_IN_PATH) + (
            f"?{quote(parts.query, safe=_IN_QUERY)}" * bool(parts.query)
        )
        host = f"[{address.host}]" if ":" in address.host else address.host
        sent = {
            "host": host if parts.port in (None, _PORTS[address.secure]) else f"{host}:{parts.port}",
            "accept": "*/*", "accept-encoding": "identity", "connection": "keep-alive",
            "user-agent": f"ebbench/{__version__}",
        }  # fmt: skip
        sent |= {name.lower(): value for name, value in headers.items()}
        lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in sent.items())]
        return cls(address, "\r\n".join(lines).encode())


class Connections:
    """Keep-alive connections to one server, unlimited in number.

    Idle ones that have answered are used first, the latest of them; then those opened ahead, in the order in which the
    server accepts them. A connection idle for ``idle_limit_ns`` is closed. ``reserve`` (may be changed): up to so many
    idle connections are kept open, but never more than an eighth (at least one) beyond those that were in use at a
    time: each occupies a thread of a server that has one for each connection. ``reuse`` False: every connection is
    closed after one response.

    A connection on which nothing has come yet may wait for such a thread, or its server may need long for this answer.
    Once a later request on another connection completes meanwhile, that connection is closed. If what waited is then
    answered at once, :data:`_TIMES_HELPED` times in a row, threads are scarce: none is opened ahead, and none is kept
    while others wait. A wait that goes on all the same ends that.

    Until a second answer has come on a connection, none is used again sooner than :data:`_CLOSED_SOON_NS` after its
    answer. Once the server has closed one behind an answer, none is used again.
    """

    def __init__(
        self,
        address: Address,
        *,
        tls: ssl.SSLContext | None,
        connect_timeout_s: float,
        idle_limit_ns: int,
        reserve: int = 0,
        reuse: bool = True,
    ) -> None:
        self.reserve, self.reuse = reserve, reuse
        self.refill: asyncio.Task[None] | None = None
        self.opened = self.most_open = self.most_held = 0
        """Connections opened so far, most in use at a time, and most there were at a time."""
        self._address, self._tls = address, tls
        self._connect_timeout_s, self._idle_limit_ns = connect_timeout_s, idle_limit_ns
        self.waiting: dict[object, int] = {}
        """When requests were sent (monotonic ns) on connections on which no response has begun."""
        self._held: set[Connection] = set()
        self._idle: deque[Connection] = deque()  # those that have answered, most recently used last
        self._ahead: deque[Connection] = deque()  # those that were never used, oldest first
        self._freed: dict[object, int] = {}  # when a connection was closed for one that waits (monotonic ns)
        self._helped = 0  # times in a row that this was what it waited for
        self._stays_open = False  # whether a second answer has come on a connection
        self._quickest_ns = _STARVED_NS  # from sending a request to its answer
        self._expiry: asyncio.TimerHandle | None = None

    @property
    def held(self) -> int:
        """Open connections, in use or idle."""
        return len(self._held)

    def take(self) -> Connection | None:
        """An idle connection that is not too old, or None."""
        self._close_old()
        connection = self._next_idle()
        while connection is not None and connection.hung_up:
            self._closed_by_server(connection)
            connection.abort()
            connection = self._next_idle()
        if connection is not None:
            self._begin_use(connection, time.monotonic_ns())
        if self._wants_more() and self.refill is None:
            self.refill = asyncio.create_task(self._open_reserve())
        return connection

    def _next_idle(self) -> Connection | None:
        if self._idle and self._stays_open:
            return self._idle.pop()
        if self._idle and time.monotonic_ns() - self._idle[0].idle_since_ns >= _CLOSED_SOON_NS:
            return self._idle.popleft()
        return self._ahead.popleft() if self._ahead else None

    def give(self, connection: Connection) -> None:
        """Return an idle connection to the pool."""
        connection.idle_since_ns = time.monotonic_ns()
        (self._idle if connection.answered else self._ahead).append(connection)
        if self._expiry is None:
            self._expire_later()

    def lost(self, connection: Connection) -> None:
        """Forget a connection that is closed."""
        if connection in self._ahead:
            self._ahead.remove(connection)
            self._closed_by_server(connection)
        elif connection.answered:
            self._closed_by_server(connection)
        self._held.discard(connection)
        self.waiting.pop(connection, None)
        self._freed.pop(connection, None)

    def _closed_by_server(self, connection: Connection) -> None:
        """A server that closes connections before their use wants none opened ahead. If it closes one behind an answer,
        every request has its own from now on."""
        if not connection.answered:
            self.reserve = 0
        elif connection.closed_behind_answer():
            self.reuse = False

    def keeps(self, connection: Connection) -> bool:
        """Whether the connection stays open after its response."""
        if not self.waiting or not self.reuse:
            return self.reuse
        oldest, since_ns = min(self.waiting.items(), key=itemgetter(1))
        now_ns = time.monotonic_ns()
        overtaken = connection.used_since_ns > since_ns and now_ns - since_ns > _STARVED_NS
        if self._helped < _TIMES_HELPED and not (overtaken and oldest not in self._freed):
            return True
        self._freed.setdefault(oldest, now_ns)
        return False

    def answered(self, connection: Connection, *, first: bool) -> None:
        """Note that a response has begun; ``first``: the first one on this connection."""
        now_ns = time.monotonic_ns()
        self._quickest_ns = min(self._quickest_ns, now_ns - connection.used_since_ns)
        if not first:
            self._stays_open = True
            return
        self.waiting.pop(connection, None)
        freed_ns = self._freed.pop(connection, None)
        if freed_ns is None:
            return
        self._helped = self._helped + 1 if now_ns - freed_ns < _STARVED_NS + self._quickest_ns else 0
        if self._helped >= _TIMES_HELPED:
            self.reserve = 0
            while self._ahead:
                self._ahead.pop().abort()

    async def connect(self) -> Connection:
        """Open a connection. Raises ConnectTimeoutError, ConnectError."""
        secure = self._address.secure
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: Connection(self),
                    self._address.host,
                    self._address.port,
                    ssl=self._tls if secure else None,
                    server_hostname=self._address.host if secure else None,
                )
        except TimeoutError:
            raise ConnectTimeoutError(f"no connection within {self._connect_timeout_s:g} s") from None
        except (OSError, ssl.SSLError) as error:
            raise ConnectError(str(error)) from error
        self._held.add(connection)
        self.opened += 1
        self.most_held = max(self.most_held, len(self._held))
        return connection

    async def open_for_use(self) -> Connection:
        """Open a connection for a request. Raises ConnectTimeoutError, ConnectError."""
        began_ns, key = time.monotonic_ns(), object()
        self.waiting[key] = began_ns
        try:
            connection = await self.connect()
        finally:
            del self.waiting[key]
            freed_ns = self._freed.pop(key, None)
        self._begin_use(connection, began_ns)
        if freed_ns is not None:
            self._freed[connection] = freed_ns
        return connection

    def close(self) -> None:
        """Close the idle connections and open no further ones in advance."""
        self.reserve = 0
        if self.refill is not None:
            self.refill.cancel()
        if self._expiry is not None:
            self._expiry.cancel()
        for connection in (*self._idle, *self._ahead):
            connection.abort()
        self._idle.clear()
        self._ahead.clear()

    def _begin_use(self, connection: Connection, now_ns: int) -> None:
        connection.used_since_ns = now_ns
        if not connection.answered:
            self.waiting[connection] = now_ns
        self.most_open = max(self.most_open, len(self._held) - len(self._idle) - len(self._ahead))

    def _wants_more(self) -> bool:
        beyond = max(1, self.most_open // 8)
        return len(self._idle) + len(self._ahead) < self.reserve and len(self._held) < self.most_open + beyond

    def _close_old(self) -> None:
        """Close the connections that are idle for too long, or that the server has closed."""
        oldest_ns = time.monotonic_ns() - self._idle_limit_ns
        for waiting in (self._idle, self._ahead):
            while waiting and (waiting[0].idle_since_ns <= oldest_ns or not waiting[0].usable):
                waiting.popleft().abort()
        while self._idle and not self._idle[-1].usable:
            self._idle.pop().abort()

    def _expire_later(self) -> None:
        self._close_old()
        left = self._idle or self._ahead
        loop = asyncio.get_running_loop()
        self._expiry = loop.call_later(self._idle_limit_ns / 4e9, self._expire_later) if left else None

    async def _open_reserve(self) -> None:
        try:
            while self._wants_more():
                self.give(await self.connect())
        except TransportError:
            pass  # the request that needs the connection will report the error
        finally:
            self.refill = None
