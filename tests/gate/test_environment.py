"""What a baseline is keyed by is in the manifest."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from ebbench.analysis.environment import Difference, describe_load, differences, run_environment
from ebbench.engines import machine
from ebbench.engines.machine import Gpu, engine_versions
from ebbench.records.run import Run
from tests.gate.gate_data import SMALL, invoke


def test_a_simulated_run_has_neither_vllm_nor_driver(measured: Path) -> None:
    found = run_environment(Run.load(measured / "v1" / "v1-seed0").manifest)
    assert (found["vllm"], found["driver"]) == ("", "")
    assert (found["engine"], found["device"], found["model"]) == ("sim", "rtx-pro-6000", "qwen3-8b")


def test_a_measured_run_records_vllm_and_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    monkeypatch.setattr(machine, "visible_gpus", lambda: (Gpu("NVIDIA H200", 143_771, "570.1"), Gpu("other", 1, "2")))
    found = engine_versions("vllm")
    assert found["driver"] == "570.1"
    assert found["vllm"] == engine_versions("emulated")["vllm"]
    assert "driver" not in engine_versions("emulated")


@pytest.mark.vllm
def test_the_emulated_engine_names_its_vllm(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    arguments = [*SMALL[:-1], "emulated", "--policy", "v1", "--output-dir", str(tmp_path / "run")]
    done = invoke(*arguments)
    assert done.exit_code == 0, done.output
    assert run_environment(Run.load(tmp_path / "run").manifest)["vllm"] == engine_versions("emulated")["vllm"]


def test_several_engines_are_another_environment(measured: Path) -> None:
    manifest = Run.load(measured / "v1" / "v1-seed0").manifest
    alone = run_environment(manifest)
    assert "topology" not in alone["options"]

    def joined(**facts: str) -> dict[str, str]:
        return run_environment(msgspec.structs.replace(manifest, facts=manifest.facts | facts))

    two, four = joined(topology="dp=2", dispatch="round-robin"), joined(topology="dp=4", dispatch="round-robin")
    assert differences(two, four) == [Difference("options", "dp=2", "dp=4", "topology")]
    assert [str(each) for each in differences(four, joined(topology="dp=4", dispatch="sbs"))] == [
        "options.dispatch: round-robin against sbs"
    ]
    assert differences(alone, two)
    assert joined(dispatch_wait_ms="3") == alone  # measured, not asked for


def test_the_load_is_how_many_sessions_come_how_fast(measured: Path) -> None:
    manifest = Run.load(measured / "v1" / "v1-seed0").manifest
    assert describe_load(manifest) == "64 sessions at concurrency 16"
    facts = manifest.facts | {"request_rate": 2.5}
    opened = msgspec.structs.replace(manifest, phases=(), max_concurrency=8, facts=facts)
    assert describe_load(opened) == "64 sessions, rate 2.5, concurrency cap 8"
