"""A mix of all kinds of requests through ``ebbench serve``: every policy gives stock vLLM's answers and counters."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import httpx
import pytest

from tests.processes.process_tree import wait_until
from tests.vllm import small_model
from tests.vllm.serving import (
    ENDED_S,
    REQUESTS,
    Answer,
    Sent,
    all_answered,
    answered,
    client,
    requests,
    samples,
    server,
)

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("forking")]

ROUNDING = 2e-3  # of log-probabilities: sums of other batches differ in their last bits
POLICIES = ("eb:update_every=10,min_samples=5", "marginal:update_every=10")
MIXED = "ebplus:margin=-1,sticky=-1,update_every=6,min_samples=3"
FURTHER = (
    "v0", "deferred:k=3", MIXED, "cadence:every=4", "delayer", "ppas:cap=32", "batchwait:iters=4,ratio=0.5",
    "slochunk:tpot=0.05,least=16", "marginal:ttft=0.2,tpot=0.02,update_every=10",
)  # fmt: skip
TIGHT = ("--num-gpu-blocks-override", "48", "--block-size", "32")  # a third of what 12 sequences may need


@dataclass(frozen=True)
class Served:
    """The answers in the order of the requests, vLLM's metrics after them, and what the server logged."""

    answers: list[Answer]
    metrics: dict[str, float]
    log: str


@cache
def served(model: Path, policy: str, caching: bool) -> Served:
    """The mix through one server; afterwards nothing is left of it there, and the server answers."""
    log = model.parent / f"{policy.partition(':')[0]}-{caching}.log"
    # A TTFT target orders the queue itself, which vLLM's priorities exclude.
    order = () if "ttft" in policy else ("--scheduling-policy", "priority")
    cache_option = "--enable-prefix-caching" if caching else "--no-enable-prefix-caching"
    with server(model, policy, log, *TIGHT, *order, cache_option) as url:
        answers = all_answered(url)
        wait_until(lambda: samples(url)["vllm:num_requests_running"] == 0, "a request is still running", ENDED_S)
        after = samples(url)
        body = {"prompt": "after", "max_tokens": 3, "temperature": 0.0, "stream": False}
        with client() as http:
            assert answered(http, url, Sent("/v1/completions", body)).reasons == {0: "length"}
    return Served(answers, after, log.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model.build(tmp_path_factory.mktemp("mix") / "model", spells=True)


def unlike_stock(model: Path, policy: str, caching: bool) -> list[str]:
    """The requests whose answers differ from those under v1, each with what differs; clients that left are no part."""
    stock, ours = served(model, "v1", caching).answers, served(model, policy, caching).answers
    found = []
    for number, (sent, theirs, mine) in enumerate(zip(requests(), stock, ours, strict=True)):
        if not sent.leaves and (unlike := unlike_fields(theirs, mine)):
            found.append(f"request {number} {sent.body}: {', '.join(unlike)}")
    return found


def unlike_fields(theirs: Answer, mine: Answer) -> list[str]:
    """Names of the fields in which two answers differ; log-probabilities may differ by ROUNDING."""
    exact = ("texts", "reasons", "prompt_tokens", "completion_tokens")
    unlike = [name for name in exact if getattr(mine, name) != getattr(theirs, name)]
    same_logprobs = mine.logprobs.keys() == theirs.logprobs.keys() and all(
        mine.logprobs[place] == pytest.approx(logprobs, abs=ROUNDING) for place, logprobs in theirs.logprobs.items()
    )
    return unlike if same_logprobs else [*unlike, "logprobs"]


def scheduled_by(policy: str, log: str) -> bool:
    """Whether the server's log says that the plugin scheduled under the policy."""
    return f"vllm_eb schedules: policy {policy.partition(':')[0]}" in log


def assert_counters_agree(one: Served) -> None:
    """vLLM's counters are those of the answers. A request whose client left counts only if it ended before that."""
    pairs = [(sent, answer) for sent, answer in zip(requests(), one.answers, strict=True) if not sent.leaves]
    left = [sent for sent in requests() if sent.leaves]
    metrics = one.metrics
    assert metrics["vllm:num_requests_waiting"] == 0
    assert metrics["vllm:kv_cache_usage_perc"] == 0.0
    for reason in ("stop", "length"):
        expected = sum(list(answer.reasons.values()).count(reason) for _, answer in pairs)
        assert expected <= metrics[f"vllm:request_success_total {reason}"] <= expected + len(left), reason
    ended = sum(value for name, value in metrics.items() if name.startswith("vllm:request_success_total"))
    complete = sum(sent.answers for sent, _ in pairs)
    assert complete <= ended <= complete + len(left)
    generated = sum(answer.completion_tokens for _, answer in pairs)
    most_of_left = sum(sent.body["max_tokens"] for sent in left)
    assert generated <= metrics["vllm:generation_tokens_total"] <= generated + most_of_left


def test_the_requests_are_of_all_kinds(model: Path) -> None:
    answers = served(model, "v1", True).answers
    objects = 0
    for sent, answer in zip(requests(), answers, strict=True):
        if "response_format" in sent.body and answer.reasons == {0: "stop"}:
            assert set(json.loads(answer.texts[0])) == {"size", "name"}
            objects += 1
    assert objects > 5
    assert sum(any(answer.logprobs.values()) for answer in answers) > 20
    assert len({text for answer in answers for text in answer.texts.values()}) > REQUESTS / 2
    assert_counters_agree(served(model, "v1", True))
    assert served(model, "v1", True).metrics["vllm:num_preemptions_total"] > 0, "the KV cache was meant to be too small"
    assert "vllm_eb.scheduler" not in served(model, "v1", True).log, "under v1 the scheduler is vLLM's own"


@pytest.mark.parametrize("policy", POLICIES)
def test_answers_and_counters_are_those_of_stock_vllm(model: Path, policy: str) -> None:
    assert unlike_stock(model, policy, caching=True) == []
    ours = served(model, policy, True)
    assert scheduled_by(policy, ours.log)
    assert_counters_agree(ours)


@pytest.mark.nightly
@pytest.mark.parametrize("policy", FURTHER)
def test_answers_are_those_of_stock_vllm_under_the_other_policies(model: Path, policy: str) -> None:
    assert unlike_stock(model, policy, caching=True) == []
    ours = served(model, policy, True)
    assert scheduled_by(policy, ours.log)
    assert_counters_agree(ours)


@pytest.mark.nightly
@pytest.mark.parametrize("policy", ["v0", MIXED, *POLICIES])
def test_answers_are_those_of_stock_vllm_without_a_prefix_cache(model: Path, policy: str) -> None:
    assert unlike_stock(model, policy, caching=False) == []
    ours = served(model, policy, False)
    assert scheduled_by(policy, ours.log)
    assert_counters_agree(ours)


@pytest.mark.nightly
def test_two_data_parallel_ranks_have_a_policy_each(model: Path) -> None:
    """On the CPU each rank reserves a share of the memory: 0.3 instead of 0.92."""
    log = model.parent / "ranks.log"
    options = (*TIGHT, "--data-parallel-size", "2", "--gpu-memory-utilization", "0.3")
    with server(model, "eb:update_every=10,min_samples=5", log, *options) as url:
        answers = all_answered(url)
        wait_until(lambda: samples(url)["vllm:num_requests_running"] == 0, "a request is still running", ENDED_S)
        text = httpx.get(url + "/metrics", timeout=30.0).text
    for sent, answer in zip(requests(), answers, strict=True):
        assert sent.leaves or len(answer.reasons) == sent.answers
    for rank in range(2):
        ended = re.search(rf'request_success_total{{engine="{rank}",finished_reason="length".*}} (\S+)', text)
        assert ended is not None
        assert float(ended[1]) > 0
        assert re.search(rf"EngineCore_DP{rank} .* vllm_eb schedules: policy eb", log.read_text(encoding="utf-8"))
