"""What a baseline is keyed by is in the manifest."""

from __future__ import annotations

from pathlib import Path

import pytest
from gate_data import SMALL, invoke

from ebbench.analysis.gate_units import environment_of
from ebbench.engines import machine
from ebbench.engines.machine import Gpu
from ebbench.engines.versions import engine_versions
from ebbench.records.run import Run


def test_a_simulated_run_has_neither_vllm_nor_driver(measured: Path) -> None:
    found = environment_of(Run.load(measured / "v1" / "v1-seed0").manifest)
    assert (found["vllm"], found["driver"]) == ("", "")
    assert (found["engine"], found["device"], found["model"]) == ("sim", "rtx-pro-6000", "qwen3-8b")


def test_a_measured_run_has_both(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert environment_of(Run.load(tmp_path / "run").manifest)["vllm"] == engine_versions("emulated")["vllm"]
