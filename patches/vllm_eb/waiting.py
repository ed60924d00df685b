"""vLLM's queue of waiting requests, put into the order that a policy asks for."""

from __future__ import annotations

from typing import Any

from vllm_eb import compat
from vllm_eb.controller import Controller


class WaitingOrder:
    """Keeps the arrival times of requests, and orders those that were never started by the controller's rule.

    Preempted requests stay in front. All times in seconds of the scheduler's clock.
    """

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self.arrived_s: dict[str, float] = {}

    def arrived(self, request_id: str, now_s: float) -> None:
        """Keep a request's arrival time."""
        self.arrived_s[request_id] = now_s

    def left(self, request_id: str) -> None:
        """Forget a request that ended."""
        self.arrived_s.pop(request_id, None)

    def order(self, waiting: Any, now_s: float) -> float:
        """Order the queue if due; returns the waiting time (s) of the oldest request that can meet its target."""
        queue = self._controller.queue
        if queue.due(now_s):
            started: list[Any] = []
            fresh: list[Any] = []
            for request in waiting:
                new = not request.num_preemptions and request.request_id in self.arrived_s
                (fresh if new else started).append(request)
            arrived_s = [self.arrived_s[request.request_id] for request in fresh]
            prompt_tokens = [request.num_prompt_tokens for request in fresh]
            places = self._controller.queue_order(now_s, arrived_s, prompt_tokens)
            compat.reorder(waiting, [*started, *(fresh[place] for place in places.tolist())])
        return queue.oldest_wait_s(now_s)
