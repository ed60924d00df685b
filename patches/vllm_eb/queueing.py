"""The order of waiting requests under a target for the first token (marginal policy).

Under overload not every request can get its first token in time, and first come, first served makes all of them late.
This order makes the fewest late: requests join in the order of their deadlines, and whenever one would be late, the
longest prompt of those that have joined is given up (Moore 1968, with Hodgson's rule; optimal for one machine when all
have arrived). Behind the punctual ones come those given up, behind these the late ones, each in the order of arrival.
All are weighed again each time, so a request given up by mistake returns, and one that stays in the queue is served
when there is room.

Under an overload that never ends there never is room. So that no request waits forever, the one that has waited
longest, if for ``PATIENCE`` times the target, goes first whenever prompts of ``TURN_EVERY`` times its tokens were let
in since the last such turn: late ones get that share of the work at least.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

ORDER_EVERY = 0.02  # of the target passes between two orderings: what steps cost must not grow with the queue
MOST_LEAD = 0.1  # of the target: more is not set aside for what runs when a request's turn comes
PATIENCE = 10.0
TURN_EVERY = 32

Floats = npt.NDArray[np.float64]
Places = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Work:
    """Engine time in seconds: a token of a prompt, the steps of a whole answer (its share), what comes before any."""

    prompt_token_s: float
    answer_s: float
    lead_s: float


class PunctualQueue:
    """Says in which order requests that were never started shall wait. Knows no requests, only their places."""

    def __init__(self, ttft_s: float) -> None:
        self._ttft_s = ttft_s
        self._ordered_s = float("-inf")
        self._first_s: float | None = None
        self._admitted_tokens = 0
        self._turn = False

    def admitted(self, prompt_tokens: int) -> None:
        """A request was admitted for the first time."""
        self._admitted_tokens += prompt_tokens

    def due(self, now_s: float) -> bool:
        """Whether enough time has passed to order again."""
        return now_s - self._ordered_s >= ORDER_EVERY * self._ttft_s

    def oldest_wait_s(self, now_s: float) -> float:
        """How long the oldest of the punctual requests has waited, as of the last ordering; 0 if there was none."""
        return 0.0 if self._first_s is None else now_s - self._first_s

    def order(self, now_s: float, seen_s: Sequence[float], prompt_tokens: Sequence[int], work: Work) -> Places:
        """The places in their new order, from when each request came and its prompt's tokens, place by place."""
        self._ordered_s = now_s
        seen = np.asarray(seen_s, np.float64)
        by_age = np.argsort(seen, kind="stable")
        waited_s = now_s - seen[by_age]
        slack_s = self._ttft_s - min(work.lead_s, MOST_LEAD * self._ttft_s) - waited_s
        tokens = np.asarray(prompt_tokens, np.float64)[by_age]
        prompt_s = tokens * work.prompt_token_s
        kept = punctual(slack_s, prompt_s, work.answer_s)
        rank = np.where(kept, 0, np.where(prompt_s <= slack_s, 1, 2))
        if len(rank) and waited_s[0] >= PATIENCE * self._ttft_s and self._turn_of_oldest(tokens[0]):
            rank[0] = -1
        oldest = np.flatnonzero(kept)[:1]
        self._first_s = float(seen[by_age[oldest[0]]]) if len(oldest) else None
        places: Places = by_age[np.argsort(rank, kind="stable")]
        return places

    def _turn_of_oldest(self, prompt_tokens: float) -> bool:
        if self._turn and self._admitted_tokens:  # the request put first has been admitted
            self._turn = False
        if not self._turn and self._admitted_tokens >= TURN_EVERY * prompt_tokens:
            self._turn, self._admitted_tokens = True, 0
        return self._turn


def punctual(slack_s: Floats, prompt_s: Floats, answer_s: float) -> npt.NDArray[np.bool_]:
    """Which requests to serve, one after the other, so that the fewest are late.

    ``slack_s`` (increasing): time left until the first token is due; ``prompt_s``: what computing the prompt takes;
    ``answer_s``: what else a request takes before the next one's turn.
    """
    kept = prompt_s <= slack_s
    ends_s = np.cumsum(np.where(kept, prompt_s + answer_s, 0.0)) - answer_s
    if np.all(ends_s[kept] <= slack_s[kept]):
        return kept
    total_s = 0.0
    joined: list[tuple[float, int]] = []  # longest first, of equals the youngest
    places = np.flatnonzero(kept)
    for place, own_s, left_s in zip(places.tolist(), prompt_s[places].tolist(), slack_s[places].tolist(), strict=True):
        heapq.heappush(joined, (-own_s, -place))
        total_s += own_s + answer_s
        if total_s - answer_s > left_s:
            longest_s, given_up = heapq.heappop(joined)
            total_s += longest_s - answer_s
            kept[-given_up] = False
    return kept
