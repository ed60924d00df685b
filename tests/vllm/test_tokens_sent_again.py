"""What workers get of decodes that a prefill step set aside: their output tokens, not their prompts."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.core_engine import PHASED, Engine

pytestmark = pytest.mark.vllm

PROMPT = 60


class Worker:
    """Keeps a batch as vLLM's first model runner does, and reads the output tokens of requests that come back to it.

    After ``GPUModelRunner._update_states``: requests that a step does not hold leave the batch; of those that come back
    it takes the last ``num_output_tokens`` tokens sent. ``wrong``: requests for which these are not their own output.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._batch = engine, set[str]()
        self.wrong: list[str] = []
        self.read: Counter[str] = Counter()
        self.sent_tokens: list[tuple[int, int]] = []  # per request that came back: tokens sent, output tokens
        self.changed = 0  # lists of tokens that changed while their step was being computed
        self._in_flight: list[tuple[list[int], int]] = []  # of the last step: lists sent, their lengths then

    def take(self, _decoding: set[str], output: Any) -> None:
        cached, tokens = output.scheduled_cached_reqs, output.num_scheduled_tokens
        self.changed += sum(len(sent) != length for sent, length in self._in_flight)
        self._in_flight = [(sent, len(sent)) for sent in cached.all_token_ids.values()]
        self._batch = (self._batch - output.finished_req_ids) & (tokens.keys() - cached.resumed_req_ids)
        for name, outputs in zip(cached.req_ids, cached.num_output_tokens, strict=True):
            if name in self._batch or not outputs:
                continue
            kind = "resumed" if name in cached.resumed_req_ids else "set aside"
            self.read[kind] += 1
            own = list(self._engine.scheduler.requests[name].output_token_ids)
            if cached.all_token_ids[name][-outputs:] != own:
                self.wrong.append(name)
            if kind == "set aside":
                self.sent_tokens.append((len(cached.all_token_ids[name]), outputs))
        self._batch = set(tokens)


@cache
def served(policy: str, blocks: int = 400, *, asynchronous: bool = True) -> Worker:
    """Forty requests, with a KV cache for a few of them if ``blocks`` is small."""
    engine = Engine(policy, blocks=blocks, asynchronous=asynchronous)
    worker = Worker(engine)
    engine.watch = worker.take
    for number in range(40):
        engine.add(f"r{number}", PROMPT, 20 + 13 * number % 80)
    engine.run(6000)
    assert len(engine.ended) == 40
    assert all(engine.answers[name] == engine.streams[name][PROMPT:] for name in engine.ended)
    return worker


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("blocks", [120, 400])
@pytest.mark.parametrize("policy", [*PHASED, "cadence:every=4"])
def test_a_worker_finds_the_output_of_requests_that_come_back(policy: str, blocks: int, asynchronous: bool) -> None:
    assert served(policy, blocks, asynchronous=asynchronous).wrong == []


@pytest.mark.parametrize("policy", ["v0", "deferred:k=2", "eb:theta=0.3"])
def test_prompts_of_requests_set_aside_are_not_sent_again(policy: str) -> None:
    worker = served(policy)
    assert worker.read["set aside"] > 20
    assert all(sent == outputs for sent, outputs in worker.sent_tokens)


@pytest.mark.parametrize("policy", ["v0", "deferred:k=2", "eb:theta=0.3"])
def test_tokens_do_not_change_while_a_worker_may_read_them(policy: str) -> None:
    """With asynchronous scheduling a step is being computed, or not even begun, when the next one is scheduled."""
    assert served(policy).changed == 0
    assert served(policy, 120).changed == 0
    assert served(policy, asynchronous=False).changed > 0, "the lists are vLLM's own, which grow afterwards"


def test_preempted_requests_come_back_too() -> None:
    """Without preemptions the tests above would not cover them."""
    assert served("v0", 120).read["resumed"] > 0


def test_only_one_place_in_vllm_reads_these_tokens() -> None:
    """And only the last ``num_output_tokens`` of them; another reader might need the prompts, as a KV connector does
    (in ``distributed``; the plugin refuses these)."""
    import vllm

    folder = Path(vllm.__file__).parent
    read = [
        (path.relative_to(folder).as_posix(), line.strip())
        for path in (folder / "v1").rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.search(r"(req_data|reqs|cached\w*)\.all_token_ids\b", line)
    ]
    assert read == [("v1/worker/gpu_model_runner.py", "resumed_token_ids = req_data.all_token_ids[req_id]")]
    runner = (folder / "v1/worker/gpu_model_runner.py").read_text(encoding="utf-8")
    assert re.findall(r"\bresumed_token_ids\b(?! =).*", runner) == ["resumed_token_ids[-num_output_tokens:]"]
