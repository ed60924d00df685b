"""Orders of waiting requests: shortest prompt first, or by a TTFT target (policy ``marginal``).

Shortest first minimises the mean waiting time of one machine (Smith 1956). Long prompts wait for as long as shorter
ones keep coming; nothing here prevents that.

Under overload not every request can get its first token in time, and first come, first served makes all of them late.
This order minimises the number of late requests: requests are added in order of their deadlines, and whenever one would
be late, the longest prompt so far is dropped (Moore 1968, with Hodgson's rule; optimal for one machine if all requests
have arrived). Punctual requests come first, then dropped ones, then late ones, each in order of arrival. All are
evaluated anew each time, so a request dropped by mistake returns, and a dropped one is served when there is room. Only
overdue requests, which have waited longer than the target allows even an empty prompt, cannot return.

Under permanent overload there is never room. To avoid starvation, the request that has waited longest, if for
``PATIENCE`` times the target, goes first whenever prompts with ``TURN_EVERY`` times its tokens were admitted since the
last such turn: late requests get at least that share of the work.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from heapq import heapify, heappush, heappushpop
from itertools import compress, count
from operator import le, not_
from typing import NamedTuple, Protocol

SHORTEST_EVERY_S = 0.02  # about a decode step: ordering thousands of requests takes a millisecond
ORDER_EVERY = 0.02  # share of the target between two orderings: the cost per step must not grow with the queue
MAX_LEAD = 0.1  # share of the target, an upper bound of the time reserved for steps before a request's turn
PATIENCE = 10.0
TURN_EVERY = 32


class Places(NamedTuple):
    """A new order of a queue, as indices: ``first``, then ``overdue``, then ``rest``.

    ``overdue``: requests, by age, that every later order also puts after its ``first``, in this order and after those
    that were overdue before. Later orderings may therefore leave them out. ``oldest_first``: this time, the oldest
    overdue request goes before all others nevertheless.
    """

    first: Sequence[int]
    overdue: Sequence[int] = ()
    rest: Sequence[int] = ()
    oldest_first: bool = False

    def in_order(self) -> list[int]:
        """All indices in their new order, if the ordering left nothing out."""
        turn = int(self.oldest_first)
        return [*self.overdue[:turn], *self.first, *self.overdue[turn:], *self.rest]


class Waited(NamedTuple):
    """A waiting request: when it arrived, and the tokens of its prompt."""

    seen_s: float
    prompt_tokens: int


class QueueOrder(Protocol):
    """When waiting requests that were never started are put into a new order."""

    def due(self, now_s: float, *, admits: bool = False) -> bool:
        """Whether to order a queue that is not empty: enough time has passed, and it matters now.

        It matters before a step that may admit requests (``admits``), or if the oldest may have waited for too long.
        """
        ...

    def oldest_wait_s(self, now_s: float) -> float:
        """How long the oldest of the requests that can still meet their target has waited; 0 without targets.

        If that is not long, it may be less than the true time.
        """
        ...


class ShortestFirst:
    """Shortest prompt first; equal ones in order of arrival."""

    def __init__(self) -> None:
        self._ordered_s = float("-inf")

    def due(self, now_s: float, *, admits: bool = False) -> bool:
        """See QueueOrder."""
        return admits and now_s - self._ordered_s >= SHORTEST_EVERY_S

    def oldest_wait_s(self, now_s: float) -> float:
        """See QueueOrder: there are no targets."""
        return 0.0

    def order(self, now_s: float, prompt_tokens: Sequence[int]) -> Places:
        """The places in their new order."""
        self._ordered_s = now_s
        return Places(sorted(range(len(prompt_tokens)), key=prompt_tokens.__getitem__))


class Work(NamedTuple):
    """Engine time in seconds: per prompt token, for a response's decode steps (its share), and before any prompt.

    The last does not change while requests wait.
    """

    prompt_token_s: float
    answer_s: float
    lead_s: float


class PunctualQueue:
    """Orders requests that were never started. It knows only their positions in the queue.

    ``urgent_s``: from this waiting time on it matters how long the oldest request has waited.
    """

    def __init__(self, ttft_s: float, urgent_s: float = 0.0) -> None:
        self._ttft_s, self._urgent_s = ttft_s, urgent_s
        self._ordered_s = float("-inf")
        # Of the last ordering: arrivals of the punctual requests, oldest first, how many requests were admitted since,
        # and the arrival of the oldest dropped one, which may return.
        self._punctual_s: list[float] = []
        self._admitted = 0
        self._dropped_s = math.inf
        self._admitted_tokens = 0
        self._turn = False

    def admitted(self, prompt_tokens: int) -> None:
        """Record the first admission of a request."""
        self._admitted += 1
        self._admitted_tokens += prompt_tokens

    def due(self, now_s: float, *, admits: bool = False) -> bool:
        """See QueueOrder."""
        if now_s - self._ordered_s < ORDER_EVERY * self._ttft_s:
            return False
        if admits:
            return True
        # Requests that came after the last ordering have waited for less time than has passed since.
        oldest_s = self._punctual_s[self._admitted] if self._admitted < len(self._punctual_s) else self._ordered_s
        return now_s - min(oldest_s, self._dropped_s) >= self._urgent_s

    def oldest_wait_s(self, now_s: float) -> float:
        """Waiting time (s) of the oldest punctual request of the last ordering that still waits; 0 without one.

        Requests are taken to be admitted in their order.
        """
        return now_s - self._punctual_s[self._admitted] if self._admitted < len(self._punctual_s) else 0.0

    def _stands(self, left_s: float, seen_s: Sequence[float], prompt_tokens: Sequence[int], work: Work) -> bool:
        """Cheap check that requests are in arrival order and need no other; False if unknown.

        True if the last of them would be in time even if it were as old as the first, which has ``left_s``.
        """
        needed_s = sum(prompt_tokens) * work.prompt_token_s + (len(seen_s) - 1) * work.answer_s
        # Sums of other roundings differ by less.
        return needed_s <= left_s * (1.0 - 1e-9) and all(map(le, seen_s, seen_s[1:]))

    def order(
        self,
        now_s: float,
        seen_s: Sequence[float],
        prompt_tokens: Sequence[int],
        work: Work,
        oldest: Waited | None = None,
    ) -> Places:
        """New order as indices into the queue, from arrival times and prompt tokens in queue order.

        ``oldest``: the oldest of the overdue requests that are left out; older than all others. ``first`` of the order
        is a range if all requests stay where they are, which is found out cheaply.
        """
        self._ordered_s, (token_s, answer_s, lead_s) = now_s, work
        self._admitted, self._dropped_s = 0, math.inf
        # From the arrival of a request until the computation of its prompt must end.
        latest_s = self._ttft_s - min(lead_s, MAX_LEAD * self._ttft_s)
        if seen_s and self._stands(latest_s - (now_s - seen_s[0]), seen_s, prompt_tokens, work):
            self._punctual_s = list(seen_s)
            return Places(range(len(seen_s)), oldest_first=self._turn_of(oldest, now_s))
        by_age = sorted(range(len(seen_s)), key=seen_s.__getitem__)
        overdue = 0
        if by_age and latest_s - (now_s - seen_s[by_age[0]]) < 0.0:
            overdue = bisect_left(by_age, True, key=lambda place: latest_s - (now_s - seen_s[place]) >= 0.0)
        others = by_age[overdue:] if overdue else by_age
        slack_s = [latest_s - (now_s - seen_s[place]) for place in others]
        prompt_s = [prompt_tokens[place] * token_s for place in others]
        first, late = others, []
        fits = list(map(le, prompt_s, slack_s))
        if not all(fits):
            first, late = list(compress(others, fits)), list(compress(others, map(not_, fits)))
            prompt_s, slack_s = list(compress(prompt_s, fits)), list(compress(slack_s, fits))
        dropped = given_up(prompt_s, slack_s, answer_s)
        if dropped:
            in_time, first = first, [place for number, place in enumerate(first) if number not in dropped]
            first += [in_time[number] for number in sorted(dropped)]
            self._dropped_s = seen_s[first[-len(dropped)]]
        self._punctual_s = list(map(seen_s.__getitem__, first[: len(first) - len(dropped)]))
        if oldest is None and overdue:
            oldest = Waited(seen_s[by_age[0]], prompt_tokens[by_age[0]])
        return Places(first, by_age[:overdue], late, self._turn_of(oldest, now_s))

    def _turn_of(self, oldest: Waited | None, now_s: float) -> bool:
        """Whether ``oldest`` is put first now, which it is from time to time so that no request starves."""
        if oldest is None or now_s - oldest.seen_s < PATIENCE * self._ttft_s:
            return False
        if self._turn and self._admitted_tokens:  # the request put first has been admitted
            self._turn = False
        if not self._turn and self._admitted_tokens >= TURN_EVERY * oldest.prompt_tokens:
            self._turn, self._admitted_tokens = True, 0
        return self._turn


def given_up(prompt_s: Sequence[float], slack_s: Sequence[float], answer_s: float) -> set[int]:
    """Indices of the requests to give up, so that the fewest are late if the others are served one after the other.

    ``prompt_s``: time to compute the prompt. ``slack_s`` (increasing): time until the first token is due, at least as
    long. ``answer_s``: further time that a request takes before the next one's turn.
    """
    total_s = before_s = 0.0
    for begin, one_s in enumerate(prompt_s):
        before_s, total_s = total_s, total_s + (one_s + answer_s)
        if total_s - answer_s > slack_s[begin]:
            break
    else:
        return set()
    dropped: set[int] = set()
    # Longest first, of equal lengths the youngest.
    kept = [(-one_s, -index) for index, one_s in enumerate(prompt_s[:begin])]
    heapify(kept)
    total_s = before_s
    for index, one_s, left_s in zip(count(begin), prompt_s[begin:], slack_s[begin:], strict=False):
        total_s += one_s + answer_s
        if total_s - answer_s <= left_s:
            heappush(kept, (-one_s, -index))
        else:
            longest_s, longest = heappushpop(kept, (-one_s, -index))
            total_s += longest_s - answer_s
            dropped.add(-longest)
    return dropped
