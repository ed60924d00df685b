"""Splits a byte stream into server-sent events (WHATWG HTML, section 9.2.6), with what servers make of them.

It works on bytes, so reads may split a UTF-8 sequence or a line end anywhere. Beyond the standard: a line that is a
message by itself is given out at once, since some servers leave out the blank line after it; a line that begins with
``{`` counts as data; and lines that are no field at all are given out, since they may say why a stream broke off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

_BOM = b"\xef\xbb\xbf"
_IGNORED = frozenset({b"", b"id", b"retry"})  # a line without a name before its colon is a comment
_MANY_LINES = 1000
"""Lines of data from which on only a blank line ends a message: each new line is checked together with those before."""
ERROR = b"error"
"""Type of an event that reports an error: of ``event: error``, and of a field ``error:`` (llama.cpp)."""


class Event(NamedTuple):
    """The data of one event. ``kind``: its ``event`` field, empty without one; None for a line outside the format."""

    data: bytes
    kind: bytes | None = b""


class SseSplitter:
    """Yields each complete event and keeps the incomplete rest.

    ``is_message``: tells whether data is a whole message, which no further line continues.
    """

    __slots__ = ("_after_cr", "_data", "_is_message", "_kind", "_pieces", "_started", "_tail")

    def __init__(self, is_message: Callable[[bytes], bool] = lambda _: False) -> None:
        self._is_message = is_message
        self._tail = self._kind = b""
        self._pieces: list[bytes] = []  # of a long line after _tail, joined once its end has come
        self._data: list[bytes] = []
        self._after_cr = self._started = False

    def feed(self, received: bytes) -> Iterator[Event]:
        """Yield the events that ``received`` completes."""
        if self._started and self._tail and b"\n" not in received and b"\r" not in received:
            self._pieces.append(received)
            return
        buffer = b"".join((self._tail, *self._pieces, received)) if self._tail else received
        self._pieces.clear()
        if not self._started:
            if len(buffer) < len(_BOM) and _BOM.startswith(buffer):
                self._tail = buffer
                return
            buffer, self._started = buffer.removeprefix(_BOM), True
        if self._after_cr and buffer:
            # The line ended at CR; a LF that follows belongs to it.
            buffer, self._after_cr = buffer.removeprefix(b"\n"), False
        lines = buffer.splitlines(keepends=True)
        self._tail = lines.pop() if lines and not lines[-1].endswith((b"\n", b"\r")) else b""
        self._after_cr = bool(lines) and not self._tail and lines[-1].endswith(b"\r")
        for line in lines:
            stripped = line.rstrip(b"\r\n")
            if stripped:
                yield from self._line(stripped)
            else:
                yield from self._end()

    def flush(self) -> Iterator[Event]:
        """Yield what is left at the end of the stream: a last event without its line end or blank line.

        An event that broke off is given out as a line outside the format.
        """
        tail = b"".join((self._tail, *self._pieces))
        self._tail, self._pieces = b"", []
        if tail:
            yield from self._line(tail)
        for event in self._end():
            yield event if self._is_message(event.data) else Event(event.data, None)

    @property
    def pending(self) -> bool:
        """Whether an unfinished event or half a line end is held."""
        return bool(self._tail or self._data or self._kind or self._after_cr)

    @property
    def held_bytes(self) -> int:
        """Size of the unfinished event."""
        return len(self._tail) + sum(map(len, self._pieces)) + sum(map(len, self._data))

    def _line(self, line: bytes) -> Iterator[Event]:
        name, _, value = line.partition(b":")
        if name == b"data":
            yield from self._add(value.removeprefix(b" "))
        elif name == b"event":
            self._kind = value.strip()
        elif name == ERROR:
            yield Event(value.strip(), ERROR)
        elif line.startswith(b"{") or self._data:
            yield from self._add(line)
        elif name not in _IGNORED:
            yield Event(line, None)

    def _add(self, line: bytes) -> Iterator[Event]:
        self._data.append(line)
        data = b"\n".join(self._data) if len(self._data) < _MANY_LINES else b""
        if self._is_message(data):
            self._data = []
            yield Event(data, self._kind)

    def _end(self) -> Iterator[Event]:
        data, kind = self._data, self._kind
        self._data, self._kind = [], b""
        if data:
            yield Event(b"\n".join(data), kind)
