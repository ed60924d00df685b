"""The real engine core under a policy, on the emulated device; vLLM's own scheduler is the policy ``stock``."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ebbench.spec.server import EngineOptions, Speculative
from tests.vllm.emulation import CALIBRATION, TestCost
from vllm_eb.config import SCHEDULER, additional_config
from vllm_eb.policy import parse_policy

PHASED = ("v0", "deferred:k=2", "eb:theta=0.3", "ebplus:margin=-1,sticky=-1,update_every=2,min_samples=2", "marginal")
POLICIES = (*PHASED, "cadence:every=4", "stock")


def accepted(drafts: Speculative, name: str, made: int) -> int:
    """How many drafts of a request are accepted after ``made`` output tokens: the same whatever the policy."""
    drawn = random.Random(f"{name} {made}").random()
    return sum(drawn < rate for rate in drafts.acceptance)


def allowed(name: str, made: int) -> int:
    """How many drafts the grammar of a request allows after ``made`` output tokens."""
    return random.Random(f"grammar of {name} {made}").randint(0, 4)


@dataclass
class Engine:
    """vLLM's engine core under a policy; ``outputs`` has the result of every schedule()."""

    policy: str
    blocks: int = 400
    seqs: int = 16
    budget: int = 200
    asynchronous: bool = True
    block_size: int = 4
    caching: bool = False
    further: dict[str, Any] = field(default_factory=dict)  # EngineArgs
    speculative: str | None = None  # how tokens are drafted; by what it holds, some drafts of each length are accepted
    outputs: list[Any] = field(default_factory=list)
    idle_decoders: int = 0  # schedule() calls that came out empty beside requests with a further token to decode
    shortened: int = 0  # drafts that a grammar shortened
    tokens: Counter[str] = field(default_factory=Counter)
    answers: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    watch: Callable[[set[str], Any], None] | None = None  # of each schedule(): ids decoding before it, its output
    ended: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        from ebbench.engines.emulated_core import DraftReader, StepReader, VirtualClock, build_core

        options = EngineOptions(
            max_num_seqs=self.seqs, max_num_batched_tokens=self.budget, block_size=self.block_size,
            enable_prefix_caching=self.caching,
            async_scheduling=self.asynchronous, speculative=self.speculative,
        )  # fmt: skip
        plugin = self.policy != "stock"
        config = additional_config(parse_policy(self.policy), CALIBRATION) if plugin else {}
        self.core: Any = build_core(self.blocks, options, SCHEDULER if plugin else None, config, **self.further)
        self.scheduler = self.core.scheduler
        self.clock, self.streams = VirtualClock(), dict[str, list[int]]()
        drafts = options.drafts
        reader = (
            StepReader(self.streams)
            if drafts is None
            else DraftReader(self.streams, partial(self._accepted, drafts), drafts.tokens)
        )
        self.core.model_executor.attach(self.clock, TestCost(), reader)
        self.core.model_executor.on_step = self.core.model_executor.on_preempted = lambda *_: None
        if plugin:
            self.scheduler.use_clock(self.clock.now_s)
            if self.scheduler.controller is not None:
                self.scheduler.controller.keep_records()
        self._schedule, self.scheduler.schedule = self.scheduler.schedule, self._watched
        # Grammars and their masks are not under test, only that they shorten drafts.
        self.scheduler.structured_output_manager.accept_tokens = lambda *_: True
        self.scheduler.structured_output_manager.validate_tokens = self._valid
        self.scheduler.get_grammar_bitmask = lambda *_: None

    def _accepted(self, drafts: Speculative, name: str, made: int) -> int:
        request = self.scheduler.requests.get(name)
        most = allowed(name, made) if request is not None and request.use_structured_output else drafts.tokens
        return min(accepted(drafts, name, made), most)

    def _valid(self, request: Any, tokens: list[int]) -> list[int]:
        if not request.use_structured_output:
            return tokens
        valid = tokens[: allowed(request.request_id, request.num_output_tokens)]
        self.shortened += len(valid) < len(tokens)
        return valid

    def _watched(self, *args: Any, **kwargs: Any) -> Any:
        # The last token of an answer may be on its way: nothing is left to schedule for that request.
        decoding = any(
            not r.is_prefill_chunk and r.num_output_tokens + r.num_output_placeholders < r.max_tokens
            for r in self.scheduler.running
        )
        watched = {r.request_id for r in self.scheduler.running if not r.is_prefill_chunk} if self.watch else set()
        output = self._schedule(*args, **kwargs)
        self.outputs.append(output)
        self.idle_decoders += decoding and not output.total_num_scheduled_tokens
        if self.watch is not None:
            self.watch(watched, output)
        return output

    def make(self, name: str, prompt: int, output: int, images: Any = None, **more: Any) -> Any:
        """A request; ``images``: its multi-modal features."""
        from vllm.v1.request import Request

        from ebbench.engines.emulated_core import make_request

        self.streams[name] = [(len(self.streams) + place) % 250 for place in range(prompt + output)]
        kind: Any = partial(Request, mm_features=images)
        request = make_request(self.core, name, self.streams[name][:prompt], output, kind=kind)
        for key, value in more.items():
            setattr(request, key, value)
        return request

    def add(self, name: str, prompt: int, output: int, **more: Any) -> Any:
        request = self.make(name, prompt, output, **more)
        self.core.add_request(request)
        return request

    def turn(self) -> None:
        if not (self.scheduler.has_requests() or self.core.batch_queue):
            return
        for batch in (self.core.step_fn()[0] or {}).values():
            for output in batch.outputs:
                self.tokens[output.request_id] += len(output.new_token_ids)
                self.answers[output.request_id] += output.new_token_ids
                if output.finish_reason is not None:
                    self.ended.add(output.request_id)

    def run(self, turns: int) -> int:
        """Turns until no request is left, at most ``turns``."""
        for done in range(turns):
            if not self.scheduler.requests and not self.core.batch_queue:
                return done
            self.turn()
        return turns
