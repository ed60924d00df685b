"""Random scenes for the real scheduler, and what must hold after every step of one.

    python tests/vllm/scenes.py --scenes 2000        # one in so many per policy; exit code 1 where one fails

A scene is a function of its seed: arrivals, aborts, priorities, adapters, grammars that compile late, streaming
sessions, pauses, resets of the prefix cache while requests run; block sizes from 1, budgets and KV caches that are
just large enough. Where a scene fails under a policy and on stock vLLM too, the failure is counted as vLLM's.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from tests.vllm.core_engine import Engine

PATIENCE = 3000  # turns until everything must have ended
FUZZED = (
    "v0", "v1", "deferred:k=3", "eb:theta=0.4", "eb:update_every=3,min_samples=2,window=20",
    "ebplus:margin=-1,sticky=-1,update_every=3,min_samples=2", "marginal", "marginal:ttft=0.2,tpot=0.02",
    "cadence:every=4",
)  # fmt: skip


class BrokenError(AssertionError):
    """Something that must always hold does not."""


@dataclass
class Scene:
    """An engine under a policy and the dice of a seed. The same seed gives every policy the same scene."""

    policy: str
    seed: int

    def __post_init__(self) -> None:
        self.dice = dice = random.Random(self.seed)
        self.longest = dice.choice((30, 80))
        block_size = dice.choice((1, 4, 16))
        seqs = dice.randint(2, 12)
        blocks = -(-2 * self.longest // block_size) + dice.choice((1, 4, 30, 400))
        self.priorities = dice.random() < 0.25
        further = {"scheduling_policy": "priority"} if self.priorities and "ttft" not in self.policy else {}
        self.engine = Engine(
            self.policy, blocks=blocks, seqs=seqs, budget=max(seqs, dice.choice((8, 24, 200))),
            asynchronous=dice.random() < 0.6, block_size=block_size, caching=dice.random() < 0.5, further=further,
        )  # fmt: skip
        self.adapters = dice.randint(2, 3) if dice.random() < 0.25 else 0
        if self.adapters:
            self.engine.scheduler.lora_config = SimpleNamespace(max_loras=2)
        self.grammars: list[SimpleNamespace] = []
        self.wanted: dict[str, int] = {}  # tokens of each request that nobody aborts
        self.sessions: list[str] = []
        self.made = 0

    def play(self) -> None:
        """Events for a while, then to the end. Raises BrokenError, or what vLLM raises."""
        for _ in range(self.dice.randint(40, 120)):
            self._event()
            self._step()
        self._settle()
        for _ in range(PATIENCE):
            if not self.engine.scheduler.requests and not self.engine.core.batch_queue:
                break
            self._step()
        self._check_end()

    def _event(self) -> None:
        from vllm.v1.core.sched.interface import PauseState

        dice, scheduler = self.dice, self.engine.scheduler
        roll = dice.random()
        if roll < 0.45:
            self._arrive()
        elif roll < 0.55 and self.wanted:
            name = dice.choice(sorted(self.wanted))
            if name in scheduler.requests:
                del self.wanted[name]
                self.engine.core.abort_requests([name])
        elif roll < 0.60:
            scheduler.set_pause_state(
                dice.choice((PauseState.UNPAUSED, PauseState.UNPAUSED, PauseState.PAUSED_NEW, PauseState.PAUSED_ALL))
            )
        elif roll < 0.63:
            # With a session between two turns vLLM cannot: it holds blocks and cannot be preempted.
            scheduler.reset_prefix_cache(reset_running_requests=dice.random() < 0.5 and not self.sessions)
        elif roll < 0.70 and self.grammars:
            self._compile(self.grammars.pop())

    def _arrive(self) -> None:
        from vllm.v1.request import RequestStatus

        dice, engine = self.dice, self.engine
        name = f"r{self.made}"
        self.made += 1
        prompt, output = dice.randint(1, self.longest), dice.choice((1, 1, 2, dice.randint(1, self.longest)))
        more: dict[str, Any] = {"priority": dice.randint(0, 2)} if self.priorities else {}
        if self.adapters and dice.random() < 0.7:
            number = dice.randint(1, self.adapters)
            more["lora_request"] = SimpleNamespace(lora_int_id=number, lora_name=f"a{number}", lora_path="/x")
        roll = dice.random()
        if roll < 0.1:
            grammar = SimpleNamespace(grammar=None, reasoning_ended=None, reasoning_end_token_index=None)
            request = engine.make(name, prompt, output, structured_output_request=grammar, **more)
            request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
            engine.scheduler.add_request(request)
            self.grammars.append(grammar)
        elif roll < 0.17 and not self.adapters and len(self.sessions) < 1:
            engine.add(name, prompt, output, resumable=True, **more)
            self.sessions.append(name)
            return
        else:
            engine.add(name, prompt, output, **more)
        self.wanted[name] = output

    def _compile(self, grammar: SimpleNamespace) -> None:
        from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

        grammar.grammar = create_autospec(StructuredOutputGrammar, instance=True)

    def _settle(self) -> None:
        """From now on nothing holds a request up."""
        from vllm.v1.core.sched.interface import PauseState

        self.engine.scheduler.set_pause_state(PauseState.UNPAUSED)
        for grammar in self.grammars:
            self._compile(grammar)
        for name in self.sessions:
            self.engine.core.abort_requests([name])

    def _step(self) -> None:
        before = len(self.engine.outputs)
        self.engine.turn()
        self._check_state()
        for output in self.engine.outputs[before:]:
            self._check_output(output)
        del self.engine.outputs[:]

    def _check_state(self) -> None:
        scheduler = self.engine.scheduler
        running = [request.request_id for request in scheduler.running]
        queues = [scheduler.waiting, getattr(scheduler, "kv_holding_waiting", ())]
        waiting = [request.request_id for queue in queues for request in queue]
        places = Counter(running + waiting)
        _hold(set(places) == set(scheduler.requests), "a request is in no queue, or in one after its end")
        _hold(all(count == 1 for count in places.values()), "a request is in two places")
        _hold(len(running) <= self.engine.seqs, "more run than max_num_seqs")
        pool = scheduler.kv_cache_manager.block_pool
        held = sum(block.ref_cnt > 0 and not block.is_null for block in pool.blocks)
        _hold(held + pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "KV blocks were lost or counted twice")

    def _check_output(self, output: Any) -> None:
        tokens = output.num_scheduled_tokens
        _hold(sum(tokens.values()) == output.total_num_scheduled_tokens <= self.engine.budget, "budget exceeded")
        if self.adapters:
            requests = self.engine.scheduler.requests
            used = {r.lora_request.lora_int_id for name in tokens if (r := requests.get(name)) and r.lora_request}
            _hold(len(used) <= 2, "more adapters than slots")

    def _check_end(self) -> None:
        scheduler = self.engine.scheduler
        _hold(not scheduler.requests, f"stuck: {sorted(scheduler.requests)}")
        for name, output in self.wanted.items():
            _hold(self.engine.tokens[name] == output, f"{name} has {self.engine.tokens[name]} of {output} tokens")
        pool = scheduler.kv_cache_manager.block_pool
        _hold(pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "KV blocks are held after the end")


def _hold(condition: bool, message: str) -> None:
    if not condition:
        raise BrokenError(message)


def failure(policy: str, seed: int) -> str:
    """What goes wrong in a scene, in a line; empty where nothing does."""
    try:
        Scene(policy, seed).play()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def ours(policy: str, seed: int) -> str:
    """What goes wrong under the policy and not on stock vLLM."""
    found = failure(policy, seed)
    if found and (known := failure("stock", seed)):
        print(f"seed {seed}: {policy} and stock vLLM fail ({known[:80]})", file=sys.stderr)
        return ""
    return found


def main() -> int:
    """Play scenes under every policy."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scenes", type=int, default=2000, help="Per policy.")
    parser.add_argument("--first", type=int, default=0, help="The first seed.")
    parser.add_argument("--policy", action="append", help="Default: one of each kind.")
    options = parser.parse_args()
    failed = 0
    for policy in options.policy or FUZZED:
        for seed in range(options.first, options.first + options.scenes):
            if wrong := ours(policy, seed):
                failed += 1
                print(f"{policy}, seed {seed}: {wrong}", flush=True)
        print(f"{policy}: {options.scenes} scenes played, {failed} failures so far", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
