"""``--gpu-memory-utilization`` and ``--vllm-version``: what they do to the KV cache, and where they are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from ebbench.cli.main import app
from ebbench.devices.loader import load_device
from ebbench.engines.base import refuse_simulated
from ebbench.engines.vllm_command import EMULATED_KEY, Emulation, Serving, serve_arguments
from ebbench.errors import UsageError
from ebbench.records.manifest import Manifest
from ebbench.records.run import Run
from ebbench.runs.file import read_run_file
from ebbench.spec.run import known_settings, make_spec
from ebbench.spec.server import EngineOptions
from vllm_eb.policy import parse_policy

RUN = ["run", "balanced", "--source", "profile", "-n", "20", "-c", "8", "--input-len", "64", "--output-len", "16",
       "-p", "v1", "-q", "--json"]  # fmt: skip


def manifest(folder: Path, *flags: str, engine: str = "sim") -> Manifest:
    words = [*RUN, "--device", "h100", "--engine", engine, "-o", str(folder), *flags]
    CliRunner().invoke(app, words, catch_exceptions=False)
    return Run.load(folder).manifest


def refused(*words: str) -> str:
    result = CliRunner().invoke(app, [*RUN, *words], standalone_mode=False)
    assert isinstance(result.exception, UsageError)
    return str(result.exception)


def test_both_size_the_kv_cache_and_are_recorded(tmp_path: Path) -> None:
    plain = manifest(tmp_path / "plain")
    half = manifest(tmp_path / "half", "--gpu-memory-utilization", "0.5")
    old = manifest(tmp_path / "old", "--vllm-version", "0.12")
    expected = load_device("h100", "qwen3-8b", gpu_memory_utilization=0.5).kv_capacity_tokens
    assert half.kv_capacity_tokens == expected < (plain.kv_capacity_tokens or 0) / 2
    assert (old.kv_capacity_tokens or 0) < 0.95 * (plain.kv_capacity_tokens or 0)
    assert (half.options["gpu_memory_utilization"], old.options["vllm_version"]) == (0.5, "0.12")
    assert plain.device_provenance.endswith("KV cache as vLLM 0.32 sizes it")
    assert old.device_provenance.endswith("KV cache as vLLM 0.12 sizes it")
    given = manifest(tmp_path / "given", "--num-kv-blocks", "900")
    assert "sizes it" not in given.device_provenance, "the size is the user's"


def test_units_of_a_topology_follow_them(tmp_path: Path) -> None:
    shape = ("--model", "qwen3-32b", "--topology", "tp=2")
    new, old, half = (
        manifest(tmp_path / name, *shape, *flags).kv_capacity_tokens or 0
        for name, flags in (
            ("new", ()), ("old", ("--vllm-version", "0.12")), ("half", ("--gpu-memory-utilization", "0.6")),
        )
    )  # fmt: skip
    assert half < old < 0.95 * new


def test_a_server_is_started_with_the_share_that_was_asked_for() -> None:
    def line(options: EngineOptions, emulation: Emulation | None = None) -> str:
        return " ".join(serve_arguments(Serving("m", parse_policy("v1"), options=options, emulation=emulation)))

    assert "memory" not in line(EngineOptions())
    assert "--gpu-memory-utilization 0.8" in line(EngineOptions(gpu_memory_utilization=0.8))
    emulated = line(EngineOptions(gpu_memory_utilization=0.8, vllm_version="0.12"), Emulation("h100", "qwen3-8b"))
    twice = EngineOptions(gpu_memory_utilization=0.8)
    with pytest.raises(UsageError, match="is given before and after the --; leave one out"):
        serve_arguments(Serving("m", parse_policy("v1"), options=twice, extra=("--gpu-memory-utilization=0.7",)))
    assert EMULATED_KEY in emulated
    assert '"gpu_memory_utilization":0.8,"vllm_version":"0.12"' in emulated
    assert "--gpu-memory-utilization" not in emulated, "vLLM's own flag concerns the machine's real memory"


def test_a_version_is_refused_where_a_real_server_has_one() -> None:
    expected = "--vllm-version 0.12 is simulated by engines sim and emulated"
    assert refused("--engine", "http://127.0.0.1:9", "--vllm-version", "0.12").startswith(expected)
    with pytest.raises(UsageError, match=expected):
        refuse_simulated({"vllm_version": "0.12"}, "vllm")


def test_a_share_is_refused_where_it_has_no_effect() -> None:
    assert "is set where a server is started" in refused(
        "--engine", "http://127.0.0.1:9", "--gpu-memory-utilization", "0.5"
    )
    assert "must be above 0 and at most 1, not 1.5" in refused("--engine", "sim", "--gpu-memory-utilization", "1.5")
    assert "is not known here, 0.8 to 0.33 are" in refused("--engine", "sim", "--vllm-version", "0.5")


@pytest.mark.parametrize(
    ("words", "asynchronous", "whole_prompts"),
    [
        (("--vllm-version", "0.11"), False, False),
        (("--vllm-version", "0.15.1"), True, False),
        (("--vllm-version", "0.22"), True, True),
        (("--vllm-version", "0.11", "--async-scheduling", "--scheduler-reserve-full-isl"), True, True),
        (("--no-async-scheduling",), False, True),
    ],
)
def test_a_version_brings_its_own_defaults(
    words: tuple[str, ...], asynchronous: bool, whole_prompts: bool, tmp_path: Path
) -> None:
    """And the file that --dry-run prints makes the same run."""
    options = manifest(tmp_path / "run", *words).options
    found = (options["async_scheduling"], options["scheduler_reserve_full_isl"])
    assert found == (asynchronous, whole_prompts)
    printed = CliRunner().invoke(
        app, [*[word for word in RUN if word != "--json"], "--device", "h100", "--engine", "sim", *words, "--dry-run"]
    )
    (tmp_path / "run.toml").write_text(printed.stdout.replace('policy = ["v1"]', ""))
    settings = read_run_file(tmp_path / "run.toml")
    again = make_spec({name: settings[name] for name in settings if name in known_settings()}).server
    assert (again.async_scheduling, again.scheduler_reserve_full_isl) == found
