"""``--scheduling-policy priority``: no request is preempted while one of a lower priority keeps its KV blocks."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.vllm.core_engine import Engine

pytestmark = pytest.mark.vllm

LOW, HIGH = 5, 0  # vLLM serves small numbers first
SCENES = 40


def preempted_too_early(policy: str, seed: int) -> tuple[list[str], int]:
    """Requests preempted while others of a lower priority ran, and the number of preemptions.

    Decodes of a low priority, then long prompts of a high one, which are computed in several steps. vLLM admits a
    prompt here without asking whether all of it fits, so that a half-computed prompt may find no KV blocks.
    """
    dice = random.Random(seed)
    block_size = dice.choice((1, 4))
    engine = Engine(
        policy, blocks=dice.randint(80, 200) // block_size + 2, seqs=8, budget=dice.choice((8, 16, 40)),
        asynchronous=dice.random() < 0.5, block_size=block_size,
        further={"scheduling_policy": "priority", "scheduler_reserve_full_isl": False},
    )  # fmt: skip
    scheduler = engine.scheduler
    preempt, early, preempted = scheduler._preempt_request, [], []

    def watched(request: Any, *args: Any, **kwargs: Any) -> None:
        running = (*scheduler.running, *getattr(scheduler, "_set_aside", ()))
        preempted.append(request.request_id)
        if any(other.priority > request.priority for other in running):
            early.append(request.request_id)
        preempt(request, *args, **kwargs)

    scheduler._preempt_request = watched
    wanted = {f"low{number}": dice.randint(20, 60) for number in range(dice.randint(1, 4))}
    for name, tokens in wanted.items():
        engine.add(name, dice.randint(1, 12), tokens, priority=LOW)
    for _ in range(dice.randint(4, 20)):
        engine.turn()
    for number in range(dice.randint(1, 3)):
        name = f"high{number}"
        wanted[name] = dice.randint(1, 5)
        engine.add(name, dice.randint(20, 70), wanted[name], priority=HIGH)
        for _ in range(dice.randint(0, 3)):
            engine.turn()
    engine.run(600)
    assert dict(engine.tokens) == wanted, seed
    return early, len(preempted)


@pytest.mark.parametrize("policy", ["stock", "v0", "eb:theta=0.3", "delayer", "marginal"])
def test_the_lowest_priority_is_preempted_first(policy: str) -> None:
    seen = {seed: preempted_too_early(policy, seed) for seed in range(SCENES)}
    assert {seed: early for seed, (early, _) in seen.items() if early} == {}
    assert sum(preempted for _, preempted in seen.values()) > 10
