"""LoRA adapters in the real vLLM: requests that ``--lora-assignment`` gives an adapter run under it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ebbench.records.run import Run
from tests.vllm.small_adapters import RANK, build_adapter
from tests.vllm.whole_command import ebbench

pytestmark = [pytest.mark.vllm, pytest.mark.nightly, pytest.mark.usefixtures("forking")]


def test_requests_run_under_their_adapters_under_both_policies(small_model_folder: Path, tmp_path: Path) -> None:
    sql, chat = (build_adapter(tmp_path / name, seed) for seed, name in enumerate(("sql", "chat")))
    done = ebbench(
        "run", "balanced", "--input-len", 60, "--output-len", 40, "--engine", "vllm", "--model", small_model_folder,
        "--policy", "v1", "--policy", "eb", "--num-prompts", 48, "--max-concurrency", 6, "--max-model-len", 512,
        "--device", "h200", "--lora-assignment", "sql=2,chat=1,base", "--lag-limit-ms", 60_000, "--json",
        "--enforce-eager", "-o", tmp_path / "runs", "--", "--enable-lora", "--max-loras", 2, "--max-lora-rank", RANK,
        "--dtype", "float32", "--lora-modules", f"sql={sql}", f"chat={chat}",
    )  # fmt: skip
    assert done.stdout, done.stderr
    summaries = {summary["policy"]: summary for summary in json.loads(done.stdout)}
    assert set(summaries) == {"v1", "eb"}, done.stderr
    for summary in summaries.values():
        run = Run.load(summary["run_dir"])
        assert {"sql", "chat", None} == set(run.plan["lora"].to_pylist())
        assert run.requests["status"].to_pylist() == ["ok"] * 48
        # vLLM's gauge names the adapters of running requests; a request under the model itself adds none.
        samples = [row for row in run.table("server_metrics").to_pylist() if row["name"] == "vllm:lora_requests_info"]
        running = {name for row in samples for name in json.loads(row["labels"])["running_lora_adapters"].split(",")}
        assert {"sql", "chat"} <= running
        steps = run.steps["request_ids"].to_pylist()
        if summary["policy"] == "eb":  # the plugin has recorded steps that hold requests of both adapters
            adapters = dict(zip(run.plan["request_id"].to_pylist(), run.plan["lora"].to_pylist(), strict=True))
            assert any({"sql", "chat"} <= {adapters[name] for name in step} for step in steps)
