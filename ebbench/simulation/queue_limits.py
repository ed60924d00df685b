"""Limits on open requests in vLLM's API server (0.32): it refuses further ones with HTTP 503.

The rules are those of ``AsyncLLM.check_admission``, asked when a request comes to the API server:

- ``max_num_queued_reqs``: refused if that many requests are open, waiting or running;
- ``max_num_queued_tokens``: refused if the open requests without a first token have that many prompt tokens. Each
  counts in full: the API server does not learn how much of a prompt is computed or cached.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from ebbench.simulation.releases import Releases
from ebbench.simulation.state import UNSET, RequestState

Failure = tuple[str, str, int | None]
"""Error class, message and HTTP status of a request that failed."""
Stamp = Callable[[Sequence[int], int], None]
"""Records that requests (rows) are sent at a time (ns)."""


class QueueLimits:
    """Open requests of one API server. ``refused``: failures by row; ``never_sent``: later turns of their sessions."""

    def __init__(self, state: RequestState, max_reqs: int | None, max_tokens: int | None) -> None:
        self.refused: dict[int, Failure] = {}
        self.never_sent: list[int] = []
        self._state, self._max_reqs, self._max_tokens = state, max_reqs, max_tokens
        self._open = 0
        self._prefilling: dict[int, int] = {}  # prompt tokens of open requests without a first token, by row

    @staticmethod
    def of(state: RequestState, max_reqs: int | None, max_tokens: int | None) -> QueueLimits | None:
        """The limits; None if there are none."""
        return None if max_reqs is None and max_tokens is None else QueueLimits(state, max_reqs, max_tokens)

    def admits(self, row: int, now_ns: int) -> bool:
        """Whether a request that comes now is accepted; it is then open."""
        if self._max_reqs is not None and self._open + 1 > self._max_reqs:
            return False
        if self._max_tokens is not None and self._queued_tokens(now_ns) >= self._max_tokens:
            return False
        self._open += 1
        self._prefilling[row] = int(self._state.prompt[row])
        return True

    def _queued_tokens(self, now_ns: int) -> int:
        times = self._state.token_ns if self._state.client_ns is None else self._state.client_ns
        first_slot = self._state.first_slot
        for row in [row for row in self._prefilling if UNSET < times[first_slot[row]] <= now_ns]:
            del self._prefilling[row]
        return sum(self._prefilling.values())

    def ended(self, row: int) -> None:
        """An accepted request has ended."""
        self._open -= 1
        self._prefilling.pop(row, None)

    def accept(self, rows: Sequence[int], now_ns: int, releases: Releases, stamp: Stamp) -> tuple[list[int], int]:
        """Let requests come now, after ``stamp`` has been called with them, and those sent in place of refused ones.

        Returns the accepted rows, and how many requests of the plan have ended: refused ones, and later turns of their
        sessions.
        """
        accepted: list[int] = []
        ended = 0
        coming = deque(rows)
        stamp(rows, now_ns)
        while coming:
            row = coming.popleft()
            if self.admits(row, now_ns):
                accepted.append(row)
                continue
            later, released = releases.failed(row)
            self._record_refused(row, now_ns, later)
            ended += 1 + len(later)
            stamp(released, now_ns)
            coming += released
        return accepted, ended

    def _record_refused(self, row: int, now_ns: int, later: list[int]) -> None:
        message = "vLLM's queue limits (--max-num-queued-reqs, --max-num-queued-tokens) refused it"
        self.refused[row] = ("http_503", message, 503)
        self.never_sent += later
        self._state.end_ns[row] = now_ns
