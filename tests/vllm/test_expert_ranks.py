"""Two data-parallel ranks of a mixture-of-experts model, which vLLM runs in lockstep, through ``ebbench serve``.

The ranks share each layer's experts, so while one rank computes a pass the other one must compute one too, a dummy pass
if it has no work; a wave ends when no rank has requests left. A scheduler that skipped a pass, or reported work that it
has not, would leave both waiting for ever.
"""

from __future__ import annotations

import concurrent.futures
import os
import random
import re
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path

import httpx
import pytest

from tests.processes.process_tree import wait_until
from tests.vllm import cpu_collectives, small_model
from tests.vllm.forking import install_plugin
from tests.vllm.serving import ANSWERED_S, ENDED_S, client, server

pytestmark = [pytest.mark.vllm, pytest.mark.nightly, pytest.mark.usefixtures("forking")]

RANKS = 2
BURSTS = ((12, 0), (0, 12), (16, 16), (0, 1), (16, 2))  # requests for each rank; 12 of them run at a time
# On the CPU each rank reserves a share of the memory. 20 blocks hold less than half of what 12 sequences may need.
OPTIONS = (
    "--data-parallel-size", str(RANKS), "--gpu-memory-utilization", "0.3", "--num-gpu-blocks-override", "20",
    "--block-size", "32",
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, forking: None) -> Iterator[Path]:
    """A model with four experts per layer; servers have the collectives that they need, while it exists."""
    path = install_plugin(tmp_path_factory.mktemp("collectives"), Path(cpu_collectives.__file__), "add_collectives")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{path}:{os.environ['PYTHONPATH']}")
        yield small_model.build(tmp_path_factory.mktemp("experts") / "model", spells=True, experts=4)


def waves_ended(log: Path) -> int:
    """How many waves have ended. The ranks agree on it in an all-reduce, and rank 0 logs it."""
    return len(re.findall(r"Wave \d+ finished", log.read_text(encoding="utf-8")))


def ended_since(log: Path, before: int) -> bool:
    """Whether more waves than ``before`` have ended."""
    return waves_ended(log) > before


def burst(url: str, number: int, sizes: tuple[int, ...]) -> list[str]:
    """The texts of a burst of requests, so many per rank, sent at once."""
    dice = random.Random(number)
    asked = [
        (rank, "".join(dice.choice("abcdefgh ") for _ in range(dice.randint(5, 200))), dice.randint(1, 60))
        for rank, size in enumerate(sizes)
        for _ in range(size)
    ]
    with client(ANSWERED_S) as http:

        def text(one: tuple[int, str, int]) -> str:
            rank, prompt, most = one
            body = {"model": "small", "prompt": prompt, "max_tokens": most, "temperature": 0.0, "ignore_eos": True}
            reply = http.post(url + "/v1/completions", json=body, headers={"X-data-parallel-rank": str(rank)})
            assert reply.status_code == 200, reply.text
            assert reply.json()["usage"]["completion_tokens"] == most
            return str(reply.json()["choices"][0]["text"])

        with concurrent.futures.ThreadPoolExecutor(len(asked)) as pool:
            return list(pool.map(text, asked))


def per_rank(url: str, name: str) -> list[float]:
    """A metric of each rank, added up over its other labels."""
    text = httpx.get(url + "/metrics", timeout=30.0).text
    return [
        sum(float(value) for value in re.findall(rf'^{name}{{.*engine="{rank}".*}} (\S+)$', text, re.MULTILINE))
        for rank in range(RANKS)
    ]


def idle(url: str) -> bool:
    """Whether no rank has a request, running or waiting."""
    return per_rank(url, "vllm:num_requests_running") == per_rank(url, "vllm:num_requests_waiting") == [0.0, 0.0]


@cache
def texts(model: Path, policy: str) -> list[list[str]]:
    """The texts of all bursts. After each, the wave has ended and no rank holds a request."""
    log = model.parent / f"{policy.partition(':')[0]}.log"
    found = []
    with server(model, policy, log, *OPTIONS, log_level="DEBUG") as url:
        for number, sizes in enumerate(BURSTS):
            before = waves_ended(log)
            found.append(burst(url, number, sizes))
            wait_until(partial(ended_since, log, before), f"the wave of burst {number} does not end", ENDED_S)
            wait_until(partial(idle, url), f"a rank holds requests after burst {number}", ENDED_S)
        ended = [sum(sizes[rank] for sizes in BURSTS) for rank in range(RANKS)]
        assert per_rank(url, "vllm:request_success_total") == ended, "a request ran on another rank"
        assert per_rank(url, "vllm:num_preemptions_total")[0] > 0, "the KV cache was meant to be too small"
    return found


@pytest.mark.parametrize("policy", ["eb:update_every=10,min_samples=5", "marginal:update_every=10", "v0"])
def test_ranks_that_share_experts_answer_as_under_stock_vllm(model: Path, policy: str) -> None:
    assert texts(model, policy) == texts(model, "v1")
    log = (model.parent / f"{policy.partition(':')[0]}.log").read_text(encoding="utf-8")
    for rank in range(RANKS):
        assert re.search(rf"EngineCore_DP{rank} .* vllm_eb schedules: policy {policy.partition(':')[0]}", log)
