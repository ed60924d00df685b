"""The order of vLLM's waiting queue: what is kept between two orderings changes no order."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from tests.vllm_eb.test_rivals import controller
from vllm_eb.controller import WaitingOrder
from vllm_eb.queueing import PunctualQueue, Work


@dataclass(eq=False)
class Queued:
    """What the order reads of vLLM's request."""

    request_id: str
    num_prompt_tokens: int
    num_preemptions: int = 0
    num_computed_tokens: int = 0


class Server:
    """A queue of waiting requests, ordered as the plugin does it, or anew each time."""

    def __init__(self, policy: str, *, anew: bool) -> None:
        self.order, self.anew = WaitingOrder(controller(policy)), anew
        self.waiting: deque[Queued] = deque()
        self.running: list[Queued] = []
        self.made = self.stood = self.turns = self.left_out = 0
        self.now_s = 0.0
        queue = self.order._controller.queue
        if isinstance(queue, PunctualQueue):
            queue._stands, self.stands = self.stands_now, queue._stands  # type: ignore[method-assign]

    def stands_now(self, left_s: float, seen_s: Sequence[float], prompt_tokens: Sequence[int], work: Work) -> bool:
        """The plugin's answer whether the queue needs no other order, or always no."""
        stood = not self.anew and self.stands(left_s, seen_s, prompt_tokens, work)
        self.stood += stood
        return stood

    def arrive(self, tokens: int) -> None:
        self.made += 1
        self.waiting.append(Queued(f"r{self.made}", tokens))
        self.order.arrived(self.waiting[-1], self.waiting, self.now_s)

    def admit(self, count: int) -> None:
        self.order.arrange(self.waiting, self.now_s)
        for _ in range(min(count, len(self.waiting))):
            request = self.waiting.popleft()
            request.num_computed_tokens = request.num_prompt_tokens
            self.running.append(request)
            self.order.admitted(request)
            if not request.num_preemptions:
                self.order._controller.on_prompt(request.num_prompt_tokens)

    def preempt(self, *, put_off: bool) -> None:
        """Preempt the last running request: it returns to the front of the queue, or to the end with ``put_off``."""
        self.running[-1].num_preemptions += 1
        self.running[-1].num_computed_tokens = 0
        (self.waiting.append if put_off else self.waiting.appendleft)(self.running.pop())

    def wait_for_next_turn(self) -> None:
        """A session whose turn has ended waits for its next turn at the end of the queue, with its old arrival time."""
        self.waiting.append(self.running.pop())

    def queued(self, share: float) -> Queued:
        """A waiting request, the same whether the queue is arranged or not."""
        return sorted(self.waiting, key=lambda request: int(request.request_id[1:]))[int(share * len(self.waiting))]

    def continue_session(self, request: Queued) -> None:
        """The next turn of a session makes its prompt longer."""
        request.num_prompt_tokens += 400
        self.order.arrived(request, self.waiting, self.now_s)

    def abort(self, request: Queued) -> None:
        self.waiting.remove(request)
        self.order.left(request)

    def step(self) -> float:
        """A step that admits nothing: only the queue that is read anew is arranged."""
        if self.anew:
            self.order.forget(self.waiting)
        self.left_out += self.order._last_overdue is not None
        waited_s = self.order.order(self.waiting, self.now_s) if self.waiting else 0.0
        if self.anew:
            self.order._rearrange(self.waiting)
        return waited_s

    def arranged(self) -> list[str]:
        """The requests in the order that a step with prompts finds."""
        if self.anew:
            self.order.forget(self.waiting)
        self.order.arrange(self.waiting, self.now_s)
        self.turns += self.order._turn is not None
        return self.ids()

    def ids(self) -> list[str]:
        """The requests as the queue has them now."""
        return [request.request_id for request in self.waiting]


@pytest.mark.parametrize("policy", ["marginal:ttft=1,tpot=0.05", "marginal:ttft=0.2", "eb:k=4,order=shortest"])
@pytest.mark.parametrize("admissions", [0.15, 0.6])
@pytest.mark.parametrize("seed", range(8))
def test_orders_are_those_of_a_queue_read_anew(policy: str, admissions: float, seed: int) -> None:
    """With few admissions the queue is long and most of it overdue, with many it is short."""
    dice = random.Random(seed)
    kept, anew = both = Server(policy, anew=False), Server(policy, anew=True)
    every_step = seed % 2 and "ttft" in policy
    if every_step:
        for server in both:
            server.order._queue._urgent_s = 0.0  # type: ignore[attr-defined]
    put_off = 0
    for _ in range(400):
        kept.now_s = anew.now_s = kept.now_s + dice.choice((0.001, 0.02, 0.05))
        for _ in range(dice.choice((0, 0, 1, 3))):
            tokens = dice.choice((dice.randint(1, 20), dice.randint(1, 900)))
            for server in both:
                server.arrive(tokens)
        event, place = dice.random(), dice.random()
        if event < admissions:
            assert kept.arranged() == anew.arranged()
        for server in both:
            if event < admissions:
                server.admit(1 + round(5 * place))
            elif event < admissions + 0.05 and server.running:
                server.preempt(put_off=place < 0.5)
            elif event < admissions + 0.1 and server.waiting:
                server.abort(server.queued(place))
            elif event < admissions + 0.12 and server.waiting:
                server.continue_session(server.queued(place))
            elif event < admissions + 0.15 and server.running:
                server.wait_for_next_turn()
        assert kept.step() == anew.step()
        put_off += kept.ids() != anew.ids()
    if admissions < 0.5:
        assert ("ttft" in policy) == (put_off > 20)
        assert ("ttft" in policy) == (kept.left_out > 100)
        assert "ttft=0.2" not in policy or kept.turns > 0
    if every_step:
        assert kept.stood > 10


def test_an_ordering_reads_no_request_that_was_overdue_before() -> None:
    """A thousand wait beyond their target: the next orderings ask for none of their prompts."""
    server = Server("marginal:ttft=1", anew=False)
    for _ in range(1000):
        server.arrive(100)
    server.now_s = 5.0
    server.step()
    read: list[str] = []

    class Watched(Queued):
        """A request that notes when its prompt is read."""

        def __getattribute__(self, name: str) -> object:
            if name == "num_prompt_tokens":
                read.append(self.request_id)
            return super().__getattribute__(name)

    for request in server.waiting:
        request.__class__ = Watched
    server.arrive(100)
    server.now_s = 5.1
    assert server.arranged()[0] == "r1001"
    assert not read
