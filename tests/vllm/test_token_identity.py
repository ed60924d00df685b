"""No policy changes a token: greedy answers of a real model on the CPU, under aborts, preemption and mode switches."""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.emulation import CALIBRATION, drafting_device
from tests.vllm.small_drafters import DRAFTERS, TOKENS, Drafter, eagle, mtp
from tests.vllm.small_model import VOCABULARY
from vllm_eb.config import SCHEDULER, additional_config
from vllm_eb.policy import parse_policy

pytestmark = pytest.mark.vllm

REQUESTS, ABORTED, CONCURRENCY, BLOCKS, BLOCK = 50, 5, 36, 44, 32
POLICIES = (
    "v1",
    "v0",
    "eb:update_every=6,min_samples=4,memory_safe=false,kv_gate=false",
    "ebplus:margin=-1,sticky=-1,update_every=3,min_samples=3,memory_safe=false,kv_gate=false",
    "marginal:update_every=6",
    "marginal:ttft=0.2,tpot=0.02,update_every=6",  # orders the queue, holds prompts back
    "cadence:every=4",
)
RIVALS = ("delayer", "ppas", "batchwait:iters=8,ratio=0.5", "slochunk:tpot=0.05")
ADAPTIVE = "marginal:draft=adaptive,update_every=6"


@dataclass(frozen=True)
class Served:
    """Answers by request, counts (see :func:`_count`), what the controller decided."""

    answers: dict[str, tuple[int, ...]]
    counted: Counter[str]
    phases: tuple[str, ...]
    modes: tuple[str, ...]


def prompts() -> list[tuple[list[int], int]]:
    """Prompt tokens and answer length; a third of the prompts share a beginning."""
    rng = random.Random(5)
    shared = [rng.randrange(3, VOCABULARY) for _ in range(3 * BLOCK)]
    found = []
    for number in range(REQUESTS):
        own = [rng.randrange(3, VOCABULARY) for _ in range(rng.randint(2, 70))]
        found.append((shared + own if number % 3 == 0 else own, rng.randint(8, 48)))
    return found


def _engine(folder: Path, policy: str, speculative: Mapping[str, Any] | None) -> Any:
    """vLLM's engine on the CPU; ``speculative``: how tokens are drafted."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    plain = policy == "v1"
    costs = drafting_device(TOKENS).calibration if policy == ADAPTIVE else CALIBRATION
    gc.collect()
    gc.freeze()  # vLLM collects garbage eight times while it starts and ends; what is here now is none
    return LLMEngine.from_engine_args(
        EngineArgs(
            model=str(folder), dtype="float32", enforce_eager=True, block_size=BLOCK,
            num_gpu_blocks_override=BLOCKS + 1,
            max_model_len=BLOCKS * BLOCK, max_num_seqs=32, max_num_batched_tokens=96, disable_log_stats=True,
            scheduler_cls=None if plain else SCHEDULER,
            additional_config={} if plain else additional_config(parse_policy(policy), costs),
            speculative_config=None if speculative is None else dict(speculative),
        )
    )  # fmt: skip


def serve(
    folder: Path,
    policy: str,
    sent_again: list[str] | None = None,
    speculative: Mapping[str, Any] | None = None,
    regex: str | None = None,
) -> Served:
    """All requests through vLLM's engine on the CPU, at most CONCURRENCY at a time, some aborted midway.

    ``sent_again`` gets the ids of requests that came back to the worker's batch with their tokens. ``speculative``: how
    tokens are drafted. ``regex``: what the answer of every fourth request must be.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    engine = _engine(folder, policy, speculative)
    scheduler = engine.engine_core.engine_core.scheduler
    counted = _count(scheduler)
    if sent_again is not None:
        _note_sent_again(scheduler, sent_again)
    left = list(enumerate(prompts()))
    answers: dict[str, tuple[int, ...]] = {}
    open_requests: dict[str, int] = {}  # id -> tokens after which it is aborted, 0: never
    while left or open_requests:
        while left and len(open_requests) < CONCURRENCY:
            number, (prompt, output) = left.pop(0)
            name = f"r{number}"
            params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
            if regex is not None and number % 4 == 1:
                params.structured_outputs = StructuredOutputsParams(regex=regex)
            engine.add_request(name, {"prompt_token_ids": prompt}, params)
            open_requests[name] = output // 2 if number % (REQUESTS // ABORTED) == 0 else 0
        for output in engine.step():
            name, tokens = output.request_id, tuple(output.outputs[0].token_ids)
            answers[name] = tokens
            if output.finished:
                del open_requests[name]
            elif open_requests[name] and len(tokens) >= open_requests[name]:
                engine.abort_request([name])
                del open_requests[name]
    controller = getattr(scheduler, "controller", None)
    records = controller.drain_records() if controller else []
    pool = scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    engine.engine_core.shutdown()
    return Served(
        answers,
        counted,
        tuple(r.phase for r in records),
        tuple(r.mode for r in records if r.kind == "mode"),
    )


def _note_sent_again(scheduler: Any, sent_again: list[str]) -> None:
    make = scheduler._make_cached_request_data

    def making(*args: Any) -> Any:
        data = make(*args)
        sent_again.extend(data.all_token_ids)
        return data

    scheduler._make_cached_request_data = making


def _count(scheduler: Any) -> Counter[str]:
    """Count preemptions, drafted and accepted tokens, and reorderings: those of the queue that changed it."""
    counted: Counter[str] = Counter()
    update = scheduler.update_from_output

    def updating(step: Any, output: Any) -> Any:
        for name, drafts in step.scheduled_spec_decode_tokens.items():
            sampled = output.sampled_token_ids[output.req_id_to_index[name]]
            counted.update(drafted=len(drafts), accepted=max(len(sampled) - 1, 0))
        return update(step, output)

    scheduler.update_from_output = updating
    preempt = scheduler._preempt_request

    def preempting(*args: Any, **kwargs: Any) -> Any:
        counted["preemptions"] += 1
        return preempt(*args, **kwargs)

    scheduler._preempt_request = preempting
    controller = getattr(scheduler, "controller", None)
    if controller is not None:
        controller.keep_records()
        order = controller.queue_order

        def ordering(*args: Any) -> Any:
            places = order(*args)
            new = places.in_order()
            counted["reorderings"] += new != sorted(new)
            return places

        controller.queue_order = ordering
    return counted


@pytest.fixture(scope="module")
def served(small_model_folder: Path) -> dict[str, Served]:
    return {policy: serve(small_model_folder, policy) for policy in POLICIES}


@pytest.mark.parametrize("policy", POLICIES[1:])
def test_answers_are_those_of_v1(served: dict[str, Served], policy: str) -> None:
    ours, reference = served[policy].answers, served["v1"].answers
    assert ours.keys() == reference.keys()
    for name, tokens in reference.items():
        shorter = min(len(tokens), len(ours[name]))  # an abort comes after at least so many tokens, not exactly
        assert ours[name][:shorter] == tokens[:shorter], name
        assert shorter >= 4


@pytest.mark.parametrize("policy", ["v0", "eb:theta=0.3"])
def test_answers_are_those_of_v1_with_asynchronous_scheduling(
    served: dict[str, Served], small_model_folder: Path, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then vLLM's worker takes the tokens of requests that come back to its batch from the scheduler.

    vLLM's CPU platform switches asynchronous scheduling off, although its worker can do it.
    """
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def check_but_keep_asynchronous(config: Any) -> None:
        check(config)
        config.scheduler_config.async_scheduling = True

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", staticmethod(check_but_keep_asynchronous))
    sent_again: list[str] = []
    ours = serve(small_model_folder, policy, sent_again).answers
    assert len(sent_again) > 50
    for name, tokens in served["v1"].answers.items():
        shorter = min(len(tokens), len(ours[name]))
        assert ours[name][:shorter] == tokens[:shorter], name
        assert shorter >= 4


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Drafter, Served]]:
    """A drafter by its method, and the answers of its model without drafts.

    At every start vLLM's CPU build reads ``vars`` of all objects of all modules; llvmlite's library, which n-grams
    load, has none and says otherwise.
    """
    from llvmlite.binding import ffi  # type: ignore[import-untyped]

    attribute = ffi._lib_wrapper.__getattr__

    def without_vars(library: Any, name: str) -> Any:
        if name == "__dict__":
            raise AttributeError(name)
        return attribute(library, name)

    ffi._lib_wrapper.__getattr__ = without_vars

    @cache
    def drafter(method: str) -> tuple[Drafter, Served]:
        drafts = DRAFTERS[method](tmp_path_factory.mktemp(method))
        return drafts, serve(drafts.model, "v1")

    return drafter


def with_drafts() -> list[Any]:
    """Methods with policies; those that `make test` leaves to `make nightly` are marked."""
    every = [(method, policy) for method in DRAFTERS for policy in (*POLICIES[:5], "deferred:k=8")]
    every += [("eagle", policy) for policy in (*POLICIES[5:], *RIVALS, ADAPTIVE)]
    often = {("ngram", policy) for policy in POLICIES[:5]} | {("eagle", policy) for policy in POLICIES[2:5]}
    often |= {(method, policy) for method in DRAFTERS for policy in POLICIES[1:3]}
    return [pytest.param(*pair, marks=[] if pair in often else pytest.mark.nightly) for pair in every]


@pytest.mark.parametrize(("method", "policy"), with_drafts())
def test_answers_are_those_of_v1_with_drafts(
    drafters: Callable[[str], tuple[Drafter, Served]], method: str, policy: str
) -> None:
    drafter, plain = drafters(method)
    lengths = {"num_speculative_tokens_per_batch_size": [[1, 1, TOKENS]]} if policy == ADAPTIVE else {}
    drafted = serve(drafter.model, policy, speculative=drafter.config | lengths)
    assert drafted.counted["drafted"] > 50
    if method != "ngram":  # random answers repeat little
        assert 100 < drafted.counted["accepted"] < 0.9 * drafted.counted["drafted"]
    for name, tokens in plain.answers.items():
        shorter = min(len(tokens), len(drafted.answers[name]))
        assert drafted.answers[name][:shorter] == tokens[:shorter], name
        assert shorter >= 4


@pytest.mark.parametrize("policy", ["v1", "eb:theta=0.3", pytest.param("marginal", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("drafting", [eagle, pytest.param(mtp, marks=pytest.mark.nightly)])
def test_structured_answers_with_drafts_are_those_without(
    drafting: Callable[..., Drafter], policy: str, tmp_path: Path
) -> None:
    drafter = drafting(tmp_path, spells=True)
    plain = serve(drafter.model, "v1", regex="[a-h]{60}")
    drafted = serve(drafter.model, policy, speculative=drafter.config, regex="[a-h]{60}")
    assert drafted.counted["accepted"] > 50
    for name, tokens in plain.answers.items():
        assert drafted.answers[name][: len(tokens)] == tokens[: len(drafted.answers[name])], name


def test_only_aborted_requests_have_shortened_answers(served: dict[str, Served]) -> None:
    for policy, result in served.items():
        for number, (_, output) in enumerate(prompts()):
            tokens = len(result.answers[f"r{number}"])
            if number % (REQUESTS // ABORTED):
                assert tokens == output, (policy, number)
            else:
                assert output // 2 <= tokens <= output, (policy, number)


def test_the_runs_preempt_switch_phases_and_reorder(served: dict[str, Served]) -> None:
    """Preemption, switches of phase and mode and reordering did occur; without them equal tokens would show little."""
    for policy in POLICIES[:4]:  # marginal leaves room for answers to grow into
        assert served[policy].counted["preemptions"] > 0, policy
    for policy in POLICIES[4:]:
        assert len(set(served[policy].phases)) > 1, policy
    assert served[POLICIES[5]].counted["reorderings"] > 0
    assert {"prefill", "decode"} <= set(served[POLICIES[2]].phases)
    modes = served[POLICIES[3]].modes
    assert sum(a != b for a, b in pairwise(modes)) >= 2


def test_answers_are_not_degenerate(served: dict[str, Served]) -> None:
    answers = [tokens for tokens in served["v1"].answers.values() if len(tokens) > 10]
    assert len({tokens[-4:] for tokens in answers}) > len(answers) // 2
