"""``--enforce-eager`` and ``--warmup``: effect, manifest, and that runs which differ in them do not compare."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from ebbench.analysis.environment import differences, later_options, machine_of_run, run_environment
from ebbench.cli.main import app
from ebbench.config.declare import declared_in
from ebbench.devices.base import StepShape
from ebbench.devices.launches import LAUNCH_S
from ebbench.devices.loader import load_device
from ebbench.engines.vllm_command import Serving, serve_arguments
from ebbench.records.run import Run
from ebbench.spec.server import EngineOptions
from vllm_eb.policy import parse_policy

DECODES = StepShape((), 32, 32 * 512, 32)


def run(folder: Path, *flags: str) -> Run:
    CliRunner().invoke(
        app,
        ["run", "balanced", "--source", "profile", "-n", "40", "-c", "8", "--input-len", "64", "--output-len", "16",
         "-p", "v1", "--engine", "sim", "--device", "h200", "-q", "--json", "-o", str(folder), *flags],
        catch_exceptions=False,
    )  # fmt: skip
    return Run.load(folder)


def test_without_cuda_graphs_a_small_decode_step_waits_for_its_launches() -> None:
    graphs, eager = (load_device("h200", "qwen3-8b", eager=eager) for eager in (False, True))
    assert eager.cost.step_s(DECODES) == pytest.approx(36 * 12 * LAUNCH_S)
    assert graphs.cost.step_s(DECODES) < 0.9 * eager.cost.step_s(DECODES)
    assert "eager mode" in eager.provenance
    assert "eager mode" not in graphs.provenance


def test_a_cost_model_without_launch_times_warns_about_enforce_eager() -> None:
    device = load_device("h200", "qwen3-8b", cost="roofline", eager=True)
    assert any("--enforce-eager changes nothing" in text for text in map(str, device.warnings))


def test_the_options_are_in_the_manifest_and_keep_runs_apart(tmp_path: Path) -> None:
    plain, eager = run(tmp_path / "plain"), run(tmp_path / "eager", "--enforce-eager")
    warm = run(tmp_path / "warm", "--warmup", "20")
    assert [r.manifest.options["enforce_eager"] for r in (plain, eager, warm)] == [False, True, False]
    assert [r.manifest.options["warmup"] for r in (plain, eager, warm)] == [0, 0, 20]
    assert eager.table("requests")["end_ns"].to_pylist()[-1] > plain.table("requests")["end_ns"].to_pylist()[-1]
    assert warm.table("requests").num_rows == 40
    ours = run_environment(plain.manifest)
    assert [str(each) for each in differences(ours, run_environment(eager.manifest))] == [
        "options.enforce_eager: False against True"
    ]
    assert [str(each) for each in differences(ours, run_environment(warm.manifest))] == ["options.warmup: 0 against 20"]


def test_runs_from_before_these_options_stay_comparable(tmp_path: Path) -> None:
    """A stored baseline does not name them; a run at their defaults must still find it."""
    options = json.loads(run_environment(run(tmp_path / "plain", "--front-end-ms", "0").manifest)["options"])
    assert not set(options) & set(later_options())
    assert {"enforce_eager", "api_server", "speculative"} <= set(later_options())


def test_no_setting_at_its_default_keeps_older_runs_apart(tmp_path: Path) -> None:
    """Whatever option is declared later, runs that did not record it ran with its default."""
    manifest = run(tmp_path / "plain").manifest
    ours = run_environment(manifest)
    for name in later_options():
        assert name in manifest.options
        options = {key: value for key, value in manifest.options.items() if key != name}
        assert run_environment(msgspec.structs.replace(manifest, options=options)) == ours


def test_what_a_device_brings_along_keeps_runs_apart_that_had_less(tmp_path: Path) -> None:
    """Neither run gave the option; the older one had no time in front of its engine."""
    manifest = run(tmp_path / "now").manifest
    assert manifest.facts["front_end_ms"] == 13.0
    assert "13 ms in front of the engine" in machine_of_run(manifest).limits()
    facts = {name: value for name, value in manifest.facts.items() if name != "front_end_ms"}
    older = run_environment(msgspec.structs.replace(manifest, facts=facts))
    assert [str(each) for each in differences(older, run_environment(manifest))] == [
        "options.front_end_ms: None against 13.0"
    ]
    assert run_environment(run(tmp_path / "without", "--front-end-ms", "0").manifest) == older
    assert run_environment(run(tmp_path / "given", "--front-end-ms", "13").manifest) == run_environment(manifest)


def test_a_setting_that_is_not_the_default_is_a_condition_that_is_shown() -> None:
    elsewhere = {"quantization", "kv_cache_dtype", "api_server", "api_server_count", "speculative"}
    for name, one in declared_in(EngineOptions).items():
        value = not one.default if isinstance(one.default, bool) else 7
        assert bool(one.condition(value)) is (name not in elsewhere), name
        assert one.condition(one.default) == ""


def test_a_vllm_server_is_started_eagerly_when_asked_for() -> None:
    def line(options: EngineOptions) -> list[str]:
        return serve_arguments(Serving("model", parse_policy("v1"), options=options))

    assert "--enforce-eager" not in line(EngineOptions())
    assert "--enforce-eager" in line(EngineOptions(enforce_eager=True))


def test_show_knows_eager_mode() -> None:
    def decode_s(*flags: str) -> float:
        said = CliRunner().invoke(app, ["devices", "show", "h200", "--json", *flags], catch_exceptions=False).stdout
        return float(json.loads(said)["steps"][0]["step_s"])

    assert decode_s("--enforce-eager") > decode_s()


def test_types_and_link_are_in_the_manifest_the_header_and_the_provenance(tmp_path: Path) -> None:
    fp8 = run(tmp_path / "fp8", "--topology", "tp=2", "--quantization", "fp8", "--kv-cache-dtype", "fp8")
    assert fp8.manifest.facts["link"] == "nvlink"
    assert "link nvlink (NVLink 4" in fp8.manifest.device_provenance
    assert str(machine_of_run(fp8.manifest)).startswith(
        "2 GPUs, dp=1,tp=2 over nvlink, weights in fp8, KV cache in fp8"
    )
    plain = run(tmp_path / "plain", "--topology", "tp=2")
    assert plain.manifest.kv_capacity_tokens
    assert fp8.manifest.kv_capacity_tokens
    assert plain.manifest.kv_capacity_tokens * 2 < fp8.manifest.kv_capacity_tokens
    told = differences(run_environment(plain.manifest), run_environment(fp8.manifest))
    assert "options.quantization: None against fp8" in map(str, told)


def test_a_vllm_server_is_started_with_the_types_asked_for() -> None:
    options = EngineOptions(quantization="fp8", kv_cache_dtype="fp8")
    line = " ".join(serve_arguments(Serving("model", parse_policy("v1"), options=options)))
    assert "--quantization fp8 --kv-cache-dtype fp8" in line
