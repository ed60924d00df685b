"""vLLM's Responses, Messages and chat over HTTP: what the client counts is what the server's /metrics count."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbench.config.server_url import Endpoint
from tests.client.client_runs import plan_of, run
from tests.vllm import small_model
from tests.vllm.serving import samples, server

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("forking")]

COUNTERS = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:prefix_cache_hits_total")
SHARED = "the same beginning of all prompts, " * 6  # more than a block of 128 tokens, of which each is a byte
APIS: tuple[Endpoint, ...] = ("responses", "messages", "chat", "completions")


def test_tokens_of_every_api_are_those_of_the_servers_counters(tmp_path: Path) -> None:
    model = small_model.build(tmp_path / "model", spells=True)
    plan = plan_of(24, output_tokens=20, prompts=[f"{SHARED}{number}" for number in range(24)])
    with server(model, "v1", tmp_path / "log", "--enable-prompt-tokens-details") as url:
        for endpoint in APIS:
            before = samples(url)
            ignores = endpoint != "messages"  # vLLM drops the field there
            done = run(url, plan, endpoint=endpoint, ignore_eos=ignores, keep_text=True).requests.to_pylist()
            after = samples(url)
            assert {row["status"] for row in done} == {"ok"}, (endpoint, {row["error_body"] for row in done})
            counted = [sum(row[name] for row in done) for name in ("input_tokens", "output_tokens", "cached_tokens")]
            assert counted == [after[name] - before.get(name, 0.0) for name in COUNTERS], endpoint
            assert counted[2] > 0, endpoint
            assert all(row["first_token_ns"] <= row["last_token_ns"] <= row["end_ns"] for row in done)
