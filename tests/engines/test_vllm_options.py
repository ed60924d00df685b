"""Options that `ebbench run --engine vllm -- ...` passes to vLLM: on its command line, in the run, in comparisons."""

from pathlib import Path
from typing import Any

import pytest

from ebbench.analysis.environment import differences, run_environment
from ebbench.cli.main import app
from ebbench.engines.setup import make_engine
from ebbench.engines.vllm import VllmEngine, server_facts
from ebbench.engines.vllm_command import check_vllm_options, plain_line
from ebbench.errors import UsageError
from ebbench.records.manifest import Manifest
from ebbench.spec.run import RunSpec
from ebbench.spec.server import EngineOptions
from ebbench.workloads.options import PlanOptions
from vllm_eb.policy import parse_policy

OPTIONS = ("--quantization", "fp8", "--kv-cache-dtype=fp8")
SPEC = RunSpec(PlanOptions("balanced"), engine="vllm", model="org/model", vllm_options=OPTIONS)


def test_vllm_options_reach_the_command_line_and_the_run() -> None:
    engine, _ = make_engine(SPEC)
    assert isinstance(engine, VllmEngine)
    serving = engine.serving(parse_policy("v1"), None, EngineOptions(), None, "qwen3-8b")
    assert plain_line(serving).endswith("--quantization fp8 --kv-cache-dtype=fp8")
    assert server_facts(serving, engine.vllm_options, Path("log"))["vllm_options"] == list(OPTIONS)
    assert "vllm_options" not in server_facts(serving, (), Path("log"))


def test_several_servers_have_them_too() -> None:
    engine, _ = make_engine(SPEC.changed(replicas=2))
    assert isinstance(engine, VllmEngine)
    assert engine.vllm_options == OPTIONS


def test_runs_that_differ_in_them_are_not_compared() -> None:
    common: dict[str, Any] = {"versions": {}, "anchor_unix_ns": 0, "workload": "w", "scenario": "s", "seed": 0,
                              "source": "profile", "plan_hash": "", "policy": "v1", "engine": "vllm",
                              "device": "h200", "model": "m"}  # fmt: skip
    plain = run_environment(Manifest(**common))
    quantized = run_environment(Manifest(**common, facts={"vllm_options": ["--quantization", "fp8"]}))
    assert differences(quantized, quantized) == []
    assert [str(each) for each in differences(plain, quantized)] == [
        "options.vllm_options: None against ['--quantization', 'fp8']"
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--max-num-seqs", "9"), "give --max-num-seqs before the --"),
        (("--max_num_seqs=9",), "give --max-num-seqs before the --"),
        (("--seed", "1", "--scheduler-cls", "x"), "give --policy before the --"),
        (("--port", "9"), "leave it out"),
        (("--api-key", "sk"), "EBBENCH_API_KEY"),
        (("sharegpt",), "unexpected argument 'sharegpt'"),
    ],
)
def test_vllm_options_that_ebbench_sets_itself_are_refused(options: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_vllm_options(options)


@pytest.mark.parametrize("engine", ["sim", "http://127.0.0.1:9"])
def test_vllm_options_are_refused_by_every_engine_but_vllm(capsys: pytest.CaptureFixture[str], engine: str) -> None:
    with pytest.raises(SystemExit) as ended:
        app(["run", "balanced", "--engine", engine, "--", "--quantization", "fp8"], standalone_mode=True)
    assert ended.value.code == 2
    assert "--quantization fp8" in capsys.readouterr().err
