"""Measurements of one plan at other times or on other machines: neither averaged nor matched."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ebbench.analysis.units import load_units
from ebbench.engines.machine import machine_behind, machine_name
from ebbench.records import files
from ebbench.records.run import MANIFEST, Run
from tests.gate.gate_data import invoke


def copied(source: Path, target: Path, **changes: Any) -> Path:
    """A run with other entries in its manifest."""
    shutil.copytree(source, target)
    manifest = msgspec.structs.replace(Run.load(target).manifest, **changes)
    files.write_bytes(msgspec.json.encode(manifest), target / MANIFEST)
    return target


@pytest.fixture
def weeks(measured: Path, tmp_path: Path) -> Path:
    """Two seeds of v1 on a server, measured last week and this week, and a third seed of this week."""
    for week, seeds in (("last", (0, 1)), ("this", (0, 1, 2))):
        for seed in seeds:
            source = measured / "v1" / f"v1-seed{seed}"
            begun = Run.load(source).manifest.anchor_unix_ns + (7 * 86_400 * 10**9 if week == "this" else 0)
            copied(source, tmp_path / week / f"v1-seed{seed}", engine="endpoint", clock="real", anchor_unix_ns=begun)
    return tmp_path


def test_two_measurements_of_a_plan_are_two_rows(weeks: Path) -> None:
    done = invoke("show", weeks / "last", weeks / "this")
    assert done.exit_code == 0, done.output
    text = " ".join(done.stdout.split())
    assert "last of 20" in text
    assert "this of 20" in text
    assert "mean ± standard deviation over 2 to 3 seeds" in text
    assert "Several measurements of the same plan and policy: shown apart, not averaged" in text


def test_seeds_in_directories_of_their_own_are_one_measurement(weeks: Path) -> None:
    text = " ".join(invoke("show", weeks / "last" / "v1-seed0", weeks / "this" / "v1-seed2").stdout.split())
    assert "mean ± standard deviation over 2 seeds" in text
    assert "Several measurements" not in text


def test_repeats_in_one_directory_are_told_apart_by_time(measured: Path, tmp_path: Path) -> None:
    source = measured / "v1" / "v1-seed0"
    for place in range(3):
        copied(source, tmp_path / "run" if not place else tmp_path / f"run-{place}", anchor_unix_ns=place * 10**12)
    text = invoke("show", tmp_path).stdout
    assert [f"{name} of 1970-01-01" in text for name in ("run", "run-1", "run-2")] == [True] * 3


def test_a_stored_baseline_of_a_server_knows_its_machine(measured: Path, tmp_path: Path) -> None:
    def served(name: str, machine: str | None, device: str = "unknown") -> Path:
        for seed in range(6):
            source = measured / ("v1" if name == "baseline" else "copy") / f"v1-seed{seed}"
            manifest = Run.load(source).manifest
            facts = {**manifest.facts, "server": "http://127.0.0.1:8000"} | (
                {"server_machine": machine} if machine else {}
            )
            copied(source, tmp_path / name / str(seed), engine="endpoint", device=device, facts=facts)
        return tmp_path / name

    store = tmp_path / "stored.parquet"
    assert invoke("gate", "--save-baseline", store, served("baseline", "NVIDIA H100")).exit_code == 0
    other = invoke("gate", store, served("elsewhere", "NVIDIA L40S"))
    assert other.exit_code == 3
    assert "device: unknown (NVIDIA H100) against unknown (NVIDIA L40S)" in other.stderr
    assert invoke("gate", store, served("here", "NVIDIA H100")).exit_code == 0
    assert invoke("gate", store, tmp_path / "elsewhere", "--allow", "device").exit_code == 0
    stated = load_units([served("stated", "NVIDIA H100", "h100")])
    assert {unit.environment["device"] for unit in stated} == {"h100"}


def test_answers_of_another_model_are_another_model(measured: Path, tmp_path: Path) -> None:
    source = measured / "v1" / "v1-seed0"
    facts = Run.load(source).manifest.facts
    copied(source, tmp_path / "asked")
    copied(source, tmp_path / "other", facts={**facts, "other_models": {"small": 3}}, anchor_unix_ns=1)
    done = invoke("gate", tmp_path / "asked", tmp_path / "other")
    assert done.exit_code == 3
    assert "model: qwen3-8b against qwen3-8b (answers of small)" in done.stderr


@pytest.mark.parametrize(
    ("url", "local"),
    [
        ("http://127.0.0.1:8000", True),
        ("http://localhost:1", True),
        ("https://[::1]:443/x", True),
        ("http://0.0.0.0:5", True),
        ("http://gpu-7:8000", False),
        ("http://10.1.2.3", False),
    ],
)
def test_a_local_server_has_this_machines_hardware(url: str, local: bool) -> None:
    found = machine_behind(url)
    assert (machine_name() in found) == local
    assert local or found in url


def test_a_baseline_of_another_labelled_machine_is_refused(measured: Path, tmp_path: Path) -> None:
    """The device is stated and equal on both sides, so only the machine tells them apart."""

    def served(name: str, facts: dict[str, str]) -> Path:
        for seed in range(6):
            source = measured / ("v1" if name == "baseline" else "copy") / f"v1-seed{seed}"
            own = {**Run.load(source).manifest.facts, "server": "http://127.0.0.1:8000", **facts}
            copied(source, tmp_path / name / str(seed), engine="endpoint", device="h100", facts=own)
        return tmp_path / name

    baseline = served("baseline", {"host_label": "rack-1", "server_machine": "NVIDIA H100"})
    store = tmp_path / "stored.parquet"
    assert invoke("gate", "--save-baseline", store, baseline).exit_code == 0
    other = served("other", {"host_label": "rack-2", "server_machine": "NVIDIA H100"})
    for side in (baseline, store):
        refused = invoke("gate", side, other)
        assert refused.exit_code == 3
        assert "host: rack-1 against rack-2" in refused.stderr
        assert "--allow host" in refused.stderr
        assert invoke("gate", side, other, "--allow", "host").exit_code == 0
    assert invoke("gate", store, served("same", {"host_label": "rack-1", "server_machine": "x"})).exit_code == 0
    elsewhere = invoke("gate", served("a", {"server_machine": "gpu-1"}), served("b", {"server_machine": "gpu-2"}))
    assert "host: gpu-1 against gpu-2" in elsewhere.stderr


def test_an_older_stored_baseline_keeps_its_hash(measured: Path, tmp_path: Path) -> None:
    store = tmp_path / "stored.parquet"
    invoke("gate", "--save-baseline", store, measured / "v1")
    files.write_table(files.read_table(store).drop_columns(["host"]), store)
    assert invoke("gate", store, measured / "copy").exit_code == 0
