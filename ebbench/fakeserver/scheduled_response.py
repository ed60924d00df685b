"""One streamed response: its schedule, its bytes and its fault."""

from __future__ import annotations

import time
from array import array
from typing import Protocol

from ebbench.fakeserver.faults import Fault
from ebbench.fakeserver.http_messages import LAST_CHUNK, Messages, chunk, usage
from ebbench.fakeserver.ledger import Ledger, LedgerEntry

_BREAKS = frozenset({"reset", "close", "truncate", "malformed", "error-frame", "stall"})
_ENDS = frozenset({"empty", "short"})


class Sender(Protocol):
    """The connection that a response is written to."""

    def send(self, data: bytes) -> None:
        """Write bytes to the socket at once, or queue what it does not take."""
        ...

    def reset(self) -> None:
        """Close with a TCP reset."""
        ...

    def close(self) -> None:
        """Close after the queued bytes are sent."""
        ...

    def finished(self) -> None:
        """Mark the response complete; the connection may serve the next request."""
        ...


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
        """Field of the next delta."""
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
        """Break the response as its fault says."""
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
