"""The gateway's own answers: errors in OpenAI's format."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_KINDS = {400: "invalid_request_error", 413: "invalid_request_error", 429: "rate_limit_error"}


class RefusedError(Exception):
    """The gateway refuses a request with ``status``; the client may retry after ``retry_after_s``."""

    def __init__(self, reason: str, status: int, retry_after_s: int | None = None) -> None:
        super().__init__(reason)
        self.status, self.retry_after_s = status, retry_after_s


def error_body(message: str, status: int) -> bytes:
    """An error object in OpenAI's format."""
    kind = _KINDS.get(status, "api_error")
    return msgspec.json.encode({"error": {"message": message, "type": kind, "code": status}})


async def send_refusal(send: Send, refusal: RefusedError) -> None:
    """Send the refusal as the response."""
    body = error_body(str(refusal), refusal.status)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if refusal.retry_after_s is not None:
        headers.append((b"retry-after", str(refusal.retry_after_s).encode()))
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
