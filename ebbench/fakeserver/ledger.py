"""The server's record of every generation request, in CLOCK_MONOTONIC nanoseconds.

On Linux all processes share that clock, so a client's times compare directly.
"""

from __future__ import annotations

from array import array

import msgspec


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
