"""Relays event streams in whole lines, so that no client receives part of an event."""

from __future__ import annotations

MAX_LINE_BYTES = 1 << 16  # a longer line is relayed in pieces, which bounds the gateway's memory


class LineBuffer:
    """Holds back the unfinished last line of a stream until its end arrives.

    Lines instead of events: OpenAI's events are one line each, and a comment on its own line must not wait.
    """

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> bytes:
        """Add received bytes; returns the bytes that can be relayed now."""
        if not self._held and data.endswith(b"\n"):
            return data  # the usual case
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        self._held += data
        if not end and len(self._held) <= MAX_LINE_BYTES:
            return b""
        unfinished = len(data) - end if end else 0
        whole = bytes(self._held[: len(self._held) - unfinished])
        del self._held[: len(whole)]
        return whole

    def rest(self) -> bytes:
        """The bytes held back of a stream that has ended."""
        return bytes(self._held)
