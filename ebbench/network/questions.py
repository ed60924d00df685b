"""Unmeasured requests to a server, with limits on time and on bytes that hold whatever the server answers."""

from __future__ import annotations

import asyncio
import zlib
from typing import NamedTuple

import httpx

from ebbench.network.connections import IDLE_LIMIT_S

_ANY_HEADER = 47  # zlib: window bits for both gzip and zlib headers


class Answer(NamedTuple):
    """A response that was read within its limits. ``body`` is empty if none was wanted."""

    status: int
    headers: httpx.Headers
    body: bytes

    @property
    def text(self) -> str:
        """The body as text; bytes that are not UTF-8 are replaced."""
        return self.body.decode("utf-8", "replace")


class AnswerTooLargeError(httpx.RequestError):
    """A response with more bytes than the caller takes."""


def one_off_limits() -> httpx.Limits:
    """Limits of a client that keeps no idle connection: it would occupy a thread of a server that has few of them."""
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
    httpx.HTTPError.
    """
    headers = {"accept-encoding": "identity"} | ({} if json is None else {"content-type": "application/json"})
    try:
        async with asyncio.timeout(timeout_s):
            async with client.stream(method, url, headers=headers, content=json) as response:
                body = b"" if limit_bytes is None else await _body(response, limit_bytes)
                return Answer(response.status_code, response.headers, body)
    except TimeoutError:
        raise httpx.ReadTimeout(f"no complete answer within {timeout_s:.3g} s") from None


async def _body(response: httpx.Response, limit_bytes: int) -> bytes:
    coding = response.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("identity", "gzip", "deflate"):
        raise httpx.DecodingError(f"content-encoding {coding!r}, although none was asked for")
    inflate = None if coding == "identity" else zlib.decompressobj(_ANY_HEADER)
    body = bytearray()
    async for data in response.aiter_raw():
        try:
            body += data if inflate is None else inflate.decompress(data, limit_bytes + 1 - len(body))
        except zlib.error as error:
            raise httpx.DecodingError(f"cannot decode content-encoding {coding}: {error}") from None
        if len(body) > limit_bytes:
            raise AnswerTooLargeError(f"larger than {limit_bytes:,} bytes")
    return bytes(body)
