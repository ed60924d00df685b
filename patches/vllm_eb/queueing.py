"""Orders of waiting requests: shortest prompt first, or by a TTFT target (policy ``marginal``).

Shortest first minimises the mean waiting time of one machine (Smith 1956). Long prompts wait for as long as shorter
ones keep coming; nothing here prevents that.

Under overload not every request can get its first token in time, and first come, first served makes all of them late.
This order minimises the number of late requests: requests are added in order of their deadlines, and whenever one would
be late, the longest prompt so far is dropped (Moore 1968, with Hodgson's rule; optimal for one machine if all requests
have arrived). Punctual requests come first, then dropped ones, then late ones, each in order of arrival. All are
evaluated anew each time, so a request dropped by mistake returns, and a dropped one is served when there is room.

Under permanent overload there is never room. To avoid starvation, the request that has waited longest, if for
``PATIENCE`` times the target, goes first whenever prompts with ``TURN_EVERY`` times its tokens were admitted since the
last such turn: late requests get at least that share of the work.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

SHORTEST_EVERY_S = 0.02  # about a decode step: ordering thousands of requests takes a millisecond
ORDER_EVERY = 0.02  # share of the target between two orderings: the cost per step must not grow with the queue
MAX_LEAD = 0.1  # share of the target, an upper bound of the time reserved for steps before a request's turn
PATIENCE = 10.0
TURN_EVERY = 32

Floats = npt.NDArray[np.float64]
Places = npt.NDArray[np.int64]
Times = Sequence[float] | Floats
Counts = Sequence[int] | npt.NDArray[np.int64]


class QueueOrder(Protocol):
    """When waiting requests that were never started are put into a new order."""

    def due(self, now_s: float) -> bool:
        """Whether enough time has passed to order again."""
        ...

    def oldest_wait_s(self, now_s: float) -> float:
        """How long the oldest of the requests that can still meet their target has waited; 0 without targets."""
        ...

    def emptied(self, now_s: float) -> None:
        """Record that an order was due and no request waited: the same as an ordering of none, at less cost."""
        ...


class ShortestFirst:
    """Shortest prompt first, of equals the one that came first."""

    def __init__(self) -> None:
        self._ordered_s = float("-inf")

    def due(self, now_s: float) -> bool:
        """See QueueOrder."""
        return now_s - self._ordered_s >= SHORTEST_EVERY_S

    def oldest_wait_s(self, now_s: float) -> float:
        """See QueueOrder: there are no targets."""
        return 0.0

    def emptied(self, now_s: float) -> None:
        """See QueueOrder."""
        self._ordered_s = now_s

    def order(self, now_s: float, prompt_tokens: Counts) -> Places:
        """The places in their new order."""
        self._ordered_s = now_s
        places: Places = np.argsort(np.asarray(prompt_tokens, np.int64), kind="stable")
        return places


class Work(NamedTuple):
    """Engine time in seconds: per prompt token, for a response's decode steps (its share), and before any prompt."""

    prompt_token_s: float
    answer_s: float
    lead_s: float


class PunctualQueue:
    """Orders requests that were never started. It knows only their positions in the queue."""

    def __init__(self, ttft_s: float) -> None:
        self._ttft_s = ttft_s
        self._ordered_s = float("-inf")
        self._first_s: float | None = None
        self._admitted_tokens = 0
        self._turn = False

    def admitted(self, prompt_tokens: int) -> None:
        """Record the first admission of a request."""
        self._admitted_tokens += prompt_tokens

    def due(self, now_s: float) -> bool:
        """Whether enough time has passed to order again."""
        return now_s - self._ordered_s >= ORDER_EVERY * self._ttft_s

    def oldest_wait_s(self, now_s: float) -> float:
        """Waiting time (s) of the oldest punctual request at the last ordering; 0 without one."""
        return 0.0 if self._first_s is None else now_s - self._first_s

    def emptied(self, now_s: float) -> None:
        """See QueueOrder."""
        self._ordered_s, self._first_s = now_s, None

    def stands(self, now_s: float, oldest_s: float, waiting: int, prompt_tokens: int, work: Work) -> bool:
        """Whether ``waiting`` requests, in the order of their arrival, certainly need no other order.

        True if the last of them would be in time even if it were as old as the first, which came at ``oldest_s``. It
        then counts as an ordering, and costs less. ``prompt_tokens``: of all of them.
        """
        slack_s = self._slack_s(work) - (now_s - oldest_s)
        needed_s = prompt_tokens * work.prompt_token_s + (waiting - 1) * work.answer_s
        if needed_s > slack_s * (1.0 - 1e-9):  # sums of other roundings differ by less
            return False
        self._ordered_s, self._first_s = now_s, oldest_s
        return True

    def _slack_s(self, work: Work) -> float:
        """Time (s) from the arrival of a request until the computation of its prompt must end."""
        return self._ttft_s - min(work.lead_s, MAX_LEAD * self._ttft_s)

    def order(self, now_s: float, seen_s: Times, prompt_tokens: Counts, work: Work) -> Places:
        """New order as indices into the queue, from arrival times and prompt tokens in queue order."""
        if not len(seen_s):
            self.emptied(now_s)
            return np.zeros(0, np.int64)
        self._ordered_s = now_s
        seen = np.asarray(seen_s, np.float64)
        by_age = seen.argsort(kind="stable")
        waited_s = now_s - seen[by_age]
        slack_s = self._slack_s(work) - waited_s
        tokens = np.asarray(prompt_tokens, np.float64)[by_age]
        prompt_s = tokens * work.prompt_token_s
        alone_in_time = prompt_s <= slack_s
        kept = punctual(slack_s, prompt_s, work.answer_s) if alone_in_time.any() else alone_in_time
        # 0: served in time; 1: could be in time alone; 2: late.
        rank = np.int8(2) - alone_in_time.view(np.int8) - kept.view(np.int8)
        if waited_s[0] >= PATIENCE * self._ttft_s and self._turn_of_oldest(tokens[0]):
            rank[0] = -1
        oldest = int(kept.argmax())
        self._first_s = float(seen[by_age[oldest]]) if kept[oldest] else None
        places: Places = by_age[rank.argsort(kind="stable")]
        return places

    def _turn_of_oldest(self, prompt_tokens: float) -> bool:
        if self._turn and self._admitted_tokens:  # the request put first has been admitted
            self._turn = False
        if not self._turn and self._admitted_tokens >= TURN_EVERY * prompt_tokens:
            self._turn, self._admitted_tokens = True, 0
        return self._turn


def punctual(slack_s: Floats, prompt_s: Floats, answer_s: float) -> npt.NDArray[np.bool_]:
    """Mask of the requests to serve, one after the other, so that the fewest are late.

    ``slack_s`` (increasing): time until the first token is due. ``prompt_s``: time to compute the prompt. ``answer_s``:
    further time that a request takes before the next one's turn.
    """
    kept = prompt_s <= slack_s
    total_after_s = np.where(kept, prompt_s + answer_s, 0.0).cumsum()
    late = kept & (total_after_s - answer_s > slack_s)
    if not late.any():
        return kept
    # All requests before the first late one are served, unless one of them is given up for a later one.
    places = kept.nonzero()[0]
    joins = int(places.searchsorted(late.argmax()))
    total_s = float(total_after_s[places[joins - 1]]) if joins else 0.0
    # Longest first; of equal lengths the youngest.
    joined: list[tuple[float, int]] = list(
        zip((-prompt_s[places[:joins]]).tolist(), (-places[:joins]).tolist(), strict=True)
    )
    heapq.heapify(joined)
    places = places[joins:]
    for place, own_s, left_s in zip(places.tolist(), prompt_s[places].tolist(), slack_s[places].tolist(), strict=True):
        heapq.heappush(joined, (-own_s, -place))
        total_s += own_s + answer_s
        if total_s - answer_s > left_s:
            longest_s, given_up = heapq.heappop(joined)
            total_s += longest_s - answer_s
            kept[-given_up] = False
    return kept
