"""Drafts of a real vLLM as `ebbench run` measures them over HTTP, also under a policy that sets their number."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ebbench.cli.main import app
from ebbench.client.prefix_cache import drafts
from ebbench.records.run import Run
from tests.vllm.serving import server

N_GRAMS = {
    "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2,
    "num_speculative_tokens_per_batch_size": [[1, 1, 3]],
}  # fmt: skip


@pytest.mark.vllm
@pytest.mark.parametrize("policy", [pytest.param("v1", marks=pytest.mark.nightly), "marginal:draft=adaptive"])
def test_answers_and_counters_of_a_server_tell_the_same(policy: str, small_model_folder: Path, tmp_path: Path) -> None:
    options = ("--speculative-config", json.dumps(N_GRAMS), "--per-request-spec-decode-metrics", "summary")
    with server(small_model_folder, policy, tmp_path / "server.log", *options) as url:
        measured = CliRunner().invoke(
            app,
            ["run", "balanced", "--engine", url, "--model", "small", "--policy", policy, "--vocab-size", "500", "-n",
             "16", "-c", "4", "--input-len", "40", "--output-len", "60", "--quiet", "--lag-limit-ms", "60000",
             "-o", str(tmp_path / "run")],
        )  # fmt: skip
    assert measured.exit_code == 0, measured.output
    run = Run.load(tmp_path / "run")
    told = run.manifest.facts["speculative"]
    assert told["source"] == "answers"
    assert 0 < told["accepted_tokens"] < sum(told["drafted"])
    silent = run.table("requests").drop_columns(["accepted_tokens"])
    counted = drafts(silent, run.table("server_metrics"))["speculative"]
    assert [counted[name] for name in ("steps", "drafted", "accepted")] == [
        told[name] for name in ("steps", "drafted", "accepted")
    ]
    assert "tokens per step with drafts" in measured.output
