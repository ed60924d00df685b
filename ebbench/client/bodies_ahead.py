"""Builds the bodies of long prompts before they are due, in a thread of their own.

A body of 50,000 tokens takes milliseconds, in which the event loop can neither send in time nor time a response. The
thread builds first requests of the sessions that this worker will release next, up to a limit of memory.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ebbench.client.bodies import RequestBodies

if TYPE_CHECKING:
    from ebbench.client.session_plan import SessionPlan

LONG_PROMPT_TOKENS = 2048
"""Prompts from this length on are built ahead; a shorter one takes less time than handing it over."""
LIMIT_BYTES = 128 << 20


class BodiesAhead:
    """Bodies by row. Use :meth:`start`, then :meth:`take` from the event loop; :meth:`close` ends the thread."""

    def __init__(self, bodies: RequestBodies, plan: SessionPlan, first: int, step: int) -> None:
        """The worker expects to release the sessions ``first``, ``first + step``, ..."""
        self._bodies, self._plan = bodies, plan
        self._sessions = range(first, plan.sessions, step)
        self._built: dict[int, tuple[int, bytes]] = {}  # session and body by row, in the order of the sessions
        self._bytes = self._released = 0
        self._closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def start(self, wanted: int) -> None:
        """Start building; returns when the bodies of the first ``wanted`` sessions, or as many as fit, are there."""
        rows = self._rows()
        upcoming = next(rows, None)
        if upcoming is None:
            return
        self._thread = threading.Thread(target=self._build_all, args=(upcoming, rows, wanted), daemon=True)
        with self._changed:
            self._thread.start()
            self._changed.wait_for(lambda: self._closed or len(self._built) >= wanted or self._full or not self._alive)

    @property
    def _full(self) -> bool:
        return self._bytes >= LIMIT_BYTES

    @property
    def _alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def take(self, row: int) -> bytes | None:
        """The body of a row if it is there; the thread may then build another."""
        with self._changed:
            found = self._built.pop(row, None)
            if found is None:
                return None
            session, body = found
            self._bytes -= len(body)
            self._released = max(self._released, session)
            self._changed.notify_all()
            return body

    def passed(self, released: int) -> None:
        """Drop bodies of sessions below ``released`` that another worker sends."""
        with self._changed:
            self._released = max(self._released, released)
            for row in [row for row, (session, _) in self._built.items() if session < released - 1]:
                self._bytes -= len(self._built.pop(row)[1])
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _rows(self) -> Iterator[tuple[int, int]]:
        """Sessions and their first rows, as far as those have long synthetic prompts."""
        for session in self._sessions:
            row = self._plan.turns(session)[0]
            if self._plan.columns["input_tokens"][row] < LONG_PROMPT_TOKENS:
                continue
            if self._plan.columns["prompt"][row] is None:
                yield session, row

    def _build_all(self, upcoming: tuple[int, int], rows: Iterator[tuple[int, int]], wanted: int) -> None:
        try:
            current: tuple[int, int] | None = upcoming
            while current is not None:
                session, row = current
                if session >= self._released:
                    may_hang_up = self._plan.hang_up_ns(row) is not None
                    self._keep(session, row, self._bodies.build(self._plan.turn(row), may_hang_up=may_hang_up))
                if self._closed:
                    return
                current = next(rows, None)
        finally:
            with self._changed:
                self._closed = True
                self._changed.notify_all()

    def _keep(self, session: int, row: int, body: bytes) -> None:
        with self._changed:
            if session >= self._released:
                self._built[row] = (session, body)
                self._bytes += len(body)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._closed or not self._full)
