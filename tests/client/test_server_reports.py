"""What a server reports of its settings: the policy's name is compared with it, and the KV cache is recorded."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ebbench.cli.main import app
from ebbench.client.server_queries import parse, reported_settings, run_to_end
from ebbench.fakeserver import FakeConfig, FakeServerProcess
from ebbench.records.run import Run

# As vLLM 0.32 with the plugin writes them; of the cache's labels only some.
POLICY = 'vllm_eb_info{engine="0",model_name="m",policy="marginal"} 1.0'
CACHE = (
    'vllm:cache_config_info{block_size="16",cache_dtype="auto",enable_prefix_caching="False",engine="0",'
    'gpu_memory_utilization="0.9",kv_cache_size_tokens="9872",num_gpu_blocks="1234"} 1.0'
)
KNOWN = {
    "policy": "marginal", "num_kv_blocks": 1234, "block_size": 16, "kv_cache_tokens": 9872, "kv_cache_dtype": "auto",
    "enable_prefix_caching": False, "gpu_memory_utilization": 0.9,
}  # fmt: skip


@pytest.fixture(scope="module")
def reporting() -> Iterator[FakeServerProcess]:
    with FakeServerProcess(FakeConfig(ttft_ms=2, itl_ms=1, metrics_lines=(POLICY, CACHE))) as running:
        yield running


def run(server: FakeServerProcess, where: Path, *words: str, command: str = "run") -> tuple[int, str, str]:
    base = [command, "balanced", "--input-len", "16", "--output-len", "4", "-n", "20", "-q", "--engine", server.url]
    base += ["--lag-limit-ms", "60000"]  # a busy machine must not decide
    done = CliRunner().invoke(app, [*base, "-o", str(where), *words])
    return done.exit_code, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ((), {}),
        ((POLICY, CACHE), KNOWN),
        ((POLICY, POLICY.replace('"0"', '"1"')), {"policy": "marginal"}),
        ((POLICY, POLICY.replace('"0"', '"1"').replace("marginal", "eb")), {}),
        ((CACHE.replace('"1234"', '"None"'),), {k: KNOWN[k] for k in KNOWN if k not in ("policy", "num_kv_blocks")}),
        (("vllm:cache_config_info 1.0",), {}),
    ],
)  # fmt: skip
def test_settings_in_a_metrics_page(lines: tuple[str, ...], expected: dict[str, object]) -> None:
    assert reported_settings(parse("\n".join(lines) + "\n")) == expected


def test_the_reported_policy_is_the_label_where_none_is_given(reporting: FakeServerProcess, tmp_path: Path) -> None:
    code, shown, _ = run(reporting, tmp_path / "run", "-c", "4")
    assert code == 0
    manifest = Run.load(tmp_path / "run").manifest
    assert manifest.policy == "marginal"
    assert manifest.facts["server_reports"] == KNOWN
    assert "policy-is-a-label" not in {warning.code for warning in manifest.warnings}
    assert "The server reports: policy marginal, 1,234 KV blocks" in " ".join(shown.split())


@pytest.mark.parametrize(
    ("command", "words"), [("run", ("-c", "4")), ("capacity", ("--goodput", "ttft:500", "--max-probes", "2"))]
)
def test_another_policy_than_the_reported_one_is_refused(
    reporting: FakeServerProcess, tmp_path: Path, command: str, words: tuple[str, ...]
) -> None:
    code, _, error = run(reporting, tmp_path / "run", *words, "-p", "eb", command=command)
    assert code == 2
    assert "reports policy marginal, not eb" in error
    assert not (tmp_path / "run").exists()


def test_a_policy_is_asked_for_only_where_none_was_stated(tmp_path: Path) -> None:
    with FakeServerProcess(FakeConfig(ttft_ms=2, itl_ms=1)) as server:
        code, shown, _ = run(server, tmp_path / "run", "-c", "4")
    assert code == 0
    words = " ".join(shown.split())
    assert "taken by default since none was stated. Give the policy it was started with as --policy." in words
    assert "stated by you" not in words


def test_the_policy_of_a_server_that_reports_none_is_a_label(tmp_path: Path) -> None:
    with FakeServerProcess(FakeConfig(ttft_ms=2, itl_ms=1)) as server:
        code, shown, _ = run(server, tmp_path / "run", "-c", "4", "-p", "eb", "--device", "h100")
    assert code == 0
    manifest = Run.load(tmp_path / "run").manifest
    assert (manifest.policy, manifest.facts["server_reports"]) == ("eb", {})
    assert "policy-is-a-label" in {warning.code for warning in manifest.warnings}
    words = " ".join(shown.split())
    assert "h100 (device as stated, not verified)" in words
    assert "stated by you and not verified" in words
    assert "Give the policy" not in words, "it was given"
    assert "Settings of eb" not in words, "settings of a label say nothing about the server"
    assert json.loads(run_json(tmp_path / "run"))[0]["policy"] == "eb"


def test_limits_given_for_a_running_server_are_said_to_change_nothing(
    reporting: FakeServerProcess, tmp_path: Path
) -> None:
    limits = ("--max-num-seqs", "64", "--max-num-batched-tokens", "2048")
    code, _, _ = run(reporting, tmp_path / "run", "-c", "4", *limits)
    assert code == 0
    manifest = Run.load(tmp_path / "run").manifest
    assert manifest.options == {}
    (said,) = [str(warning) for warning in manifest.warnings if warning.code == "stated-limits"]
    assert "--max-num-seqs 64 and --max-num-batched-tokens 2,048 changed nothing" in said


def run_json(folder: Path) -> str:
    return CliRunner().invoke(app, ["show", str(folder), "--json"]).stdout


def test_a_coroutine_runs_inside_a_running_event_loop_too() -> None:
    async def one() -> int:
        return 1

    async def outer() -> int:
        return run_to_end(one)

    assert run_to_end(one) == asyncio.run(outer()) == 1
