"""Bytes that the fake server sends: HTTP responses, server-sent events, OpenAI's message formats."""

from __future__ import annotations

from typing import Any

import msgspec

TOKEN = " a"  # the text of every token
LAST_CHUNK = b"0\r\n\r\n"
EVENT_STREAM = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)

_REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 405: "Method Not Allowed",
            413: "Content Too Large", 429: "Too Many Requests", 500: "Internal Server Error",
            503: "Service Unavailable"}  # fmt: skip


class GenerationRequest(msgspec.Struct):
    """The fields of a completions or chat request that the server reads."""

    prompt: msgspec.Raw = msgspec.Raw(b'""')
    messages: list[dict[str, Any]] = []
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None

    @property
    def prompt_tokens(self) -> int:
        """Number of token ids, or of words for a text prompt."""
        if self.messages:
            return sum(len(text.split()) for m in self.messages for text in _texts(m.get("content", "")))
        raw = bytes(self.prompt)
        if raw.startswith(b"["):
            return 0 if raw == b"[]" else raw.count(b",") + 1
        return len(str(msgspec.json.decode(raw)).split())


def _texts(content: Any) -> list[str]:
    """The texts of a chat message, whose content is a text or a list of parts; images have no words."""
    if not isinstance(content, list):
        return [str(content)]
    return [str(part.get("text", "")) for part in content if isinstance(part, dict)]


def response(
    status: int, body: bytes, content_type: str = "application/json", extra: dict[str, str] | None = None
) -> bytes:
    """A whole HTTP response with Content-Length."""
    lines = [f"HTTP/1.1 {status} {_REASONS.get(status, 'Status')}", f"content-type: {content_type}"]
    lines += [f"{name}: {value}" for name, value in (extra or {}).items()]
    lines.append(f"content-length: {len(body)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def error_body(message: str, kind: str, code: int) -> bytes:
    """An error object as OpenAI-compatible servers send it."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "code": code}})


def chunk(data: bytes) -> bytes:
    """One chunk of the chunked transfer coding."""
    return b"%x\r\n%b\r\n" % (len(data), data)


class Messages:
    """The messages of one response, as server-sent events."""

    def __init__(self, answer_id: str, model: str, chat: bool, crlf: bool) -> None:
        self._id, self._model, self._chat, self._crlf = answer_id, model, chat, crlf

    def event(self, data: bytes) -> bytes:
        """One event carrying ``data``."""
        if self._crlf:
            return b": a comment\r\ndata: %b\r\n\r\n: another\r\n\r\n" % data
        return b"data: %b\n\n" % data

    def token(
        self, tokens: int, finish: str | None, counts: dict[str, Any] | None = None, field: str = "content"
    ) -> bytes:
        """A message with the text of ``tokens`` tokens, and with the usage so far if it is given.

        ``field``: of a chat delta.
        """
        choice = self._choice(TOKEN * tokens, finish, field)
        return self.event(msgspec.json.encode(choice if counts is None else choice | {"usage": counts}))

    def role(self) -> bytes:
        """The first chat message, which carries only the role."""
        choice: dict[str, Any] = {"index": 0, "delta": {"role": "assistant", "content": ""}}
        return self.event(msgspec.json.encode(self._message([choice | {"finish_reason": None}])))

    def usage(self, prompt_tokens: int, completion_tokens: int, cached_tokens: int | None = None) -> bytes:
        """The message that reports the token counts."""
        counts = usage(prompt_tokens, completion_tokens, cached_tokens)
        return self.event(msgspec.json.encode(self._message([]) | {"usage": counts}))

    def done(self) -> bytes:
        """The end mark."""
        return self.event(b"[DONE]")

    def whole(self, tokens: int, finish: str, prompt_tokens: int) -> bytes:
        """The answer to a request without streaming."""
        text = TOKEN * tokens
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
        choice |= {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        message = self._message([choice]) | {"usage": usage(prompt_tokens, tokens)}
        return msgspec.json.encode(message)

    def _choice(self, text: str, finish: str | None, field: str) -> dict[str, Any]:
        content: dict[str, Any] = {"delta": {field: text}} if self._chat else {"text": text}
        return self._message([{"index": 0, **content, "logprobs": None, "finish_reason": finish}])

    def _message(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return {"id": self._id, "object": kind, "created": 1, "model": self._model, "choices": choices}


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int | None = None) -> dict[str, Any]:
    """Token counts as OpenAI reports them; with the cached ones among the prompt's where they are given."""
    counts: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    return counts if cached_tokens is None else counts | {"prompt_tokens_details": {"cached_tokens": cached_tokens}}
