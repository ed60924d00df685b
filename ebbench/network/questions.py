"""Unmeasured requests to a server, with limits on time and on bytes that hold whatever the server answers."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from ebbench.network.connections import IDLE_LIMIT_S, ProtocolError, TransportError

if TYPE_CHECKING:
    import httpx  # 0.1 s of CPU, which a run against a server would spend

_ANY_HEADER = 47  # zlib: window bits for both gzip and zlib headers


class Answer(NamedTuple):
    """A response that was read within its limits. ``body`` is empty if none was wanted."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def text(self) -> str:
        """The body as text; bytes that are not UTF-8 are replaced."""
        return self.body.decode("utf-8", "replace")


class AnswerTooLargeError(TransportError):
    """A response with more bytes than the caller takes."""


def one_off_limits() -> httpx.Limits:
    """Limits of a client that keeps no idle connection: it would occupy a thread of a server that has few of them."""
    import httpx

    return httpx.Limits(max_keepalive_connections=0, keepalive_expiry=IDLE_LIMIT_S)


async def ask(
    client: httpx.AsyncClient,
    method: str,
    url: str,
    *,
    timeout_s: float,
    limit_bytes: int | None,
    json: bytes | None = None,
) -> Answer:
    """Send one request, with ``json`` as its body, and read the response within ``timeout_s``.

    At most ``limit_bytes`` of its body are read, counted decoded; None reads none. Redirects are not followed. Raises
    httpx.HTTPError, ProtocolError, AnswerTooLargeError.
    """
    import httpx

    headers = {"accept-encoding": "identity"} | ({} if json is None else {"content-type": "application/json"})
    try:
        async with asyncio.timeout(timeout_s):
            async with client.stream(method, url, headers=headers, content=json) as response:
                body = bytearray()
                if limit_bytes is not None:
                    async for data in response.aiter_raw():
                        body += data
                        if len(body) > limit_bytes:
                            break
                coding = response.headers.get("content-encoding", "identity")
                return Answer(response.status_code, response.headers, decoded(bytes(body), coding, limit_bytes or 0))
    except TimeoutError:
        raise httpx.ReadTimeout(f"no complete answer within {timeout_s:.3g} s") from None


def decoded(body: bytes, coding: str, limit_bytes: int) -> bytes:
    """A body without its content-encoding. Raises AnswerTooLargeError, ProtocolError."""
    coding = coding.strip().lower()
    if coding not in ("identity", "gzip", "deflate"):
        raise ProtocolError(f"content-encoding {coding!r}, although none was asked for")
    if coding != "identity":
        try:
            body = zlib.decompressobj(_ANY_HEADER).decompress(body, limit_bytes + 1)
        except zlib.error as error:
            raise ProtocolError(f"cannot decode content-encoding {coding}: {error}") from None
    if len(body) > limit_bytes:
        raise AnswerTooLargeError(f"larger than {limit_bytes:,} bytes")
    return body
