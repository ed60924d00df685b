"""One streamed response: its schedule, its bytes and its fault."""

from __future__ import annotations

import time
from array import array
from typing import Any, Protocol

import msgspec

from ebbench.fakeserver.config import Fault

# The server's record of every generation request, in CLOCK_MONOTONIC nanoseconds.
#
# On Linux all processes share that clock, so a client's times compare directly.


class LedgerEntry(msgspec.Struct):
    """One request as the server saw it. ``token_ns[i]``: when token i was written to the socket.

    ``started_ns``: when generation began, later than ``received_ns`` if the request waited for a free slot.

    ``outcome``: ``open`` until the response is complete (``length`` or ``stop``), broken by a fault (the fault's kind)
    or abandoned by the client (``disconnected``).
    """

    number: int
    request_id: str
    path: str
    received_ns: int
    prompt_tokens: int
    max_tokens: int
    started_ns: int = 0
    fault: str | None = None
    token_ns: list[int] = []
    late_ns: int = 0
    tokens: int = 0
    done_ns: int | None = None
    outcome: str = "open"

    @property
    def first_token_ns(self) -> int | None:
        """When the first token was sent (ns), or None."""
        return self.token_ns[0] if self.token_ns else None


class Ledger:
    """All entries since the server started or the ledger was cleared."""

    def __init__(self, keep: bool) -> None:
        self._keep = keep
        self.entries: list[tuple[LedgerEntry, array[int]]] = []
        self.received = self.completed = self.prompt_tokens = self.sent_tokens = self.cache_resets = 0

    def open(self, entry: LedgerEntry) -> array[int]:
        """Add a request; returns the array for its token times (int64)."""
        self.received += 1
        self.prompt_tokens += entry.prompt_tokens
        times: array[int] = array("q")
        if self._keep:
            self.entries.append((entry, times))
        return times

    def close(self, entry: LedgerEntry, now_ns: int, outcome: str) -> None:
        """Record how a request ended."""
        entry.done_ns, entry.outcome = now_ns, outcome
        self.completed += outcome in ("length", "stop")

    def clear(self) -> None:
        """Drop all entries."""
        self.entries.clear()

    def encode(self) -> bytes:
        """All entries as a JSON array."""
        for entry, times in self.entries:
            entry.token_ns = times.tolist()
        return msgspec.json.encode([entry for entry, _ in self.entries])


def decode(document: bytes) -> list[LedgerEntry]:
    """Decode the entries of a document written by :meth:`Ledger.encode`."""
    return msgspec.json.decode(document, type=list[LedgerEntry])


# Bytes that the fake server sends: HTTP responses, server-sent events, OpenAI's message formats.

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


_BREAKS = frozenset({"reset", "close", "truncate", "malformed", "error-frame", "stall"})
_ENDS = frozenset({"empty", "short"})


class Sender(Protocol):
    """The connection that a response is written to."""

    def send(self, data: bytes) -> None:
        """Write bytes to the socket at once, or queue what it does not take."""

    def reset(self) -> None:
        """Close with a TCP reset."""

    def close(self) -> None:
        """Close after the queued bytes are sent."""

    def finished(self) -> None:
        """Mark the response complete; the connection may serve the next request."""


class ScheduledResponse:
    """Sends one message per call until the response is complete, broken by its fault, or the client has left."""

    def __init__(
        self,
        entry: LedgerEntry,
        sender: Sender,
        ledger: Ledger,
        messages: Messages,
        timing_ns: tuple[int, int],
        fault: Fault | None,
        include_usage: bool,
        usage_so_far: bool = False,
        thinking: tuple[int, str] = (0, "content"),
    ) -> None:
        """``include_usage``: report token counts at the end; ``usage_so_far``: also with every message.

        ``thinking``: how many tokens the response begins with in which field of its deltas.
        """
        self._entry, self._sender, self._ledger, self._messages = entry, sender, ledger, messages
        self._fault, kind = fault, fault.kind if fault else ""
        self._ttft_ns, self._itl_ns = timing_ns
        self._per_message = max(1, fault.tokens) if fault and kind == "bundle" else 1
        self._break_at = fault.after if fault and kind in _BREAKS else -1
        self._planned = entry.max_tokens
        if fault and kind in _ENDS:
            self._planned = 0 if kind == "empty" else min(fault.after, entry.max_tokens)
        self._usage = include_usage and kind != "no-usage"
        self._usage_so_far, self._thinking = usage_so_far, thinking
        self._message = chunk(messages.token(self._per_message, None))
        self._times: array[int] = ledger.open(entry)
        self._sent = 0
        self.active = True

    def due_ns(self) -> int:
        """When the next message is due (monotonic ns)."""
        return self._entry.started_ns + self._ttft_ns + self._sent * self._itl_ns

    def act(self) -> int:
        """Send the next message. Returns when the one after it is due (monotonic ns), 0 for never."""
        if not self.active:
            return 0
        if self._sent == self._break_at:
            self._commit_fault()
            return 0
        tokens = min(self._per_message, self._planned - self._sent)
        now_ns = time.monotonic_ns()
        late_ns = now_ns - self.due_ns()
        if late_ns > self._entry.late_ns:
            self._entry.late_ns = late_ns
        if self._sent + tokens >= self._planned:
            self._end(tokens, now_ns)
            return 0
        self._sender.send(self._changing(tokens) if self._usage_so_far or self._thinking[0] else self._message)
        self._note(tokens, now_ns)
        return self.due_ns()

    def abandon(self) -> None:
        """Stop: the client has closed the connection."""
        if self.active:
            self._close("disconnected")

    def _note(self, tokens: int, now_ns: int) -> None:
        self._sent += tokens
        self._entry.tokens = self._sent
        self._ledger.sent_tokens += tokens
        for _ in range(tokens):
            self._times.append(now_ns)

    def _changing(self, tokens: int) -> bytes:
        """A message that depends on its place in the response."""
        counts = usage(self._entry.prompt_tokens, self._sent + tokens) if self._usage_so_far else None
        return chunk(self._messages.token(tokens, None, counts, self._field))

    @property
    def _field(self) -> str:
        length, field = self._thinking
        return field if self._sent < length else "content"

    def _end(self, tokens: int, now_ns: int) -> None:
        """Send the last token with its finish reason, the usage and the end mark, in one write."""
        finish = "stop" if self._fault and self._fault.kind in _ENDS else "length"
        parts = [chunk(self._messages.token(tokens, finish, field=self._field))]
        if self._usage:
            factor = self._fault.factor if self._fault and self._fault.kind == "miscount" else 1.0
            prompt_tokens = round(self._entry.prompt_tokens * factor)
            reports_hits = self._fault is not None and self._fault.kind == "cached"
            cached = round(prompt_tokens * self._fault.share) if self._fault and reports_hits else None
            parts.append(chunk(self._messages.usage(prompt_tokens, self._sent + tokens, cached)))
        parts += [chunk(self._messages.done()), LAST_CHUNK]
        # Update the ledger before sending: a client that has the response must find it there.
        self._note(tokens, now_ns)
        self._close(finish)
        self._sender.send(b"".join(parts))
        self._sender.finished()

    def _commit_fault(self) -> None:
        """Apply the fault to the response."""
        kind = self._fault.kind if self._fault else ""
        self._close(kind)
        if kind == "reset":
            self._sender.reset()
        elif kind == "close":
            self._sender.close()
        elif kind != "stall":
            bad = {"malformed": b'{"choices":[{"text":', "error-frame": b'{"error":{"message":"engine died",'
                   b'"type":"InternalServerError","code":500}}'}  # fmt: skip
            frame = chunk(self._messages.event(bad[kind])) if kind in bad else b""
            self._sender.send(frame + LAST_CHUNK)
            self._sender.finished()

    def _close(self, outcome: str) -> None:
        self.active = False
        self._ledger.close(self._entry, time.monotonic_ns(), outcome)
