"""Splits a byte stream into server-sent events (WHATWG HTML, section 9.2.6).

It works on bytes, so reads may split a UTF-8 sequence or a line end anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator

_BOM = b"\xef\xbb\xbf"


class SseSplitter:
    """Yields the data of each complete event and keeps the incomplete rest.

    Only the ``data`` field is used; the OpenAI protocol does not need comments and other fields.
    """

    __slots__ = ("_after_cr", "_data", "_started", "_tail")

    def __init__(self) -> None:
        self._tail = b""
        self._data: list[bytes] = []
        self._after_cr = self._started = False

    def feed(self, received: bytes) -> Iterator[bytes]:
        """Yield the data of the events that ``received`` completes."""
        buffer = self._tail + received if self._tail else received
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
            if not stripped:
                if self._data:
                    yield b"\n".join(self._data)
                    self._data = []
            elif stripped.startswith(b"data"):
                name, _, value = stripped.partition(b":")
                if name == b"data":
                    self._data.append(value.removeprefix(b" "))

    @property
    def pending(self) -> bool:
        """Whether an unfinished event or half a line end is held."""
        return bool(self._tail or self._data or self._after_cr)
