"""Relayed event streams: whole lines only, so that no client sees part of an event."""

from __future__ import annotations

HELD_BYTES = 1 << 16  # a longer line is passed on in pieces: it must not fill the gateway's memory


class WholeLines:
    """Holds the unfinished last line of a stream back until the rest of it comes.

    Lines rather than events, since a comment on a line of its own must not wait and OpenAI's events are one line each.
    """

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> bytes:
        """Take what came; what of it can go on."""
        if not self._held and data.endswith(b"\n"):
            return data  # nearly always
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        self._held += data
        if not end and len(self._held) <= HELD_BYTES:
            return b""
        unfinished = len(data) - end if end else 0
        whole = bytes(self._held[: len(self._held) - unfinished])
        del self._held[: len(whole)]
        return whole

    def rest(self) -> bytes:
        """What is held of a stream that has ended."""
        return bytes(self._held)
