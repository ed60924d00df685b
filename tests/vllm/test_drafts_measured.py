"""Drafts of a real vLLM as `ebbench run` measures them over HTTP, also under a policy that sets their number."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ebbench.cli.main import app
from ebbench.client.prefix_cache import drafts
from ebbench.records.run import Run
from tests.vllm.emulation import drafting_device
from tests.vllm.serving import server
from vllm_eb.calibration import calibration_to_json

TOKENS = 3
N_GRAMS = {
    "method": "ngram", "num_speculative_tokens": TOKENS, "prompt_lookup_min": 1, "prompt_lookup_max": 2,
    "num_speculative_tokens_per_batch_size": [[1, 1, TOKENS]],
}  # fmt: skip


@pytest.mark.vllm
@pytest.mark.usefixtures("forking")
@pytest.mark.parametrize(
    ("policy", "adapts"),
    [pytest.param("v1", False, marks=pytest.mark.nightly), ("marginal:draft=adaptive,update_every=8", True)],
)
def test_answers_and_counters_of_a_server_tell_the_same(
    policy: str, adapts: bool, small_model_folder: Path, tmp_path: Path
) -> None:
    options = ("--speculative-config", json.dumps(N_GRAMS), "--per-request-spec-decode-metrics", "summary")
    (costs := tmp_path / "costs.json").write_text(calibration_to_json(drafting_device(TOKENS).calibration))
    known = ("--calibration", str(costs))
    # More are open than the server runs at a time: a busy client leaves its batch, and so the draft length, as it is.
    with server(small_model_folder, policy, tmp_path / "server.log", *options, costs=known) as url:
        measured = CliRunner().invoke(
            app,
            ["run", "balanced", "--engine", url, "--model", "small", "--policy", policy, "--vocab-size", "500", "-n",
             "120", "-c", "60", "--input-len", "40", "--output-len", "40", "--quiet", "--lag-limit-ms", "60000",
             "-o", str(tmp_path / "run")],
        )  # fmt: skip
    assert measured.exit_code == 0, measured.output
    run = Run.load(tmp_path / "run")
    told = run.manifest.facts["speculative"]
    assert told["source"] == "answers"
    assert 0 < told["accepted_tokens"] < sum(told["drafted"])
    drafted = sum(told["drafted"]) / told["steps"]
    assert 1.0 <= drafted < 0.9 * TOKENS if adapts else drafted > 0.95 * TOKENS, drafted
    silent = run.table("requests").drop_columns(["accepted_tokens"])
    counted = drafts(silent, run.table("server_metrics"))["speculative"]
    assert [counted[name] for name in ("steps", "drafted", "accepted")] == [
        told[name] for name in ("steps", "drafted", "accepted")
    ]
    assert "tokens per step with drafts" in measured.output
