"""Caveats of a device are said of the runs to which they matter, with direction and size."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from msgspec import convert

from ebbench.records.warnings import RunWarning
from tests.gate.gate_data import invoke

LOAD = ("run", "balanced", "--source", "profile", "-n", "60", "--engine", "sim", "--policy", "v1", "-q")


def said(folder: Path, *words: str) -> str:
    """The device's caveats of a run."""
    done = invoke(*LOAD, *words, "-o", folder / "run")
    assert done.exit_code == 0, done.output
    warnings = json.loads((folder / "run" / "manifest.json").read_bytes())["warnings"]
    return "\n".join(str(convert(one, RunWarning)) for one in warnings if one.get("about") == "device")


def test_mixed_attention_matters_only_where_batches_are_mixed(tmp_path: Path) -> None:
    mixed = said(tmp_path / "many", "--device", "l40s", "-c", "32")
    assert "attention of mixed batches was not measured on l40s" in mixed
    assert "of this run's time; mixed batches may look too good" in mixed
    assert "mixed batches" not in said(tmp_path / "one", "--device", "l40s", "-c", "1")


def test_what_first_tokens_of_mixtures_lack_is_said_unless_queues_decide(tmp_path: Path) -> None:
    words = "times to first token of mixtures of experts are too short"
    load = ("--device", "h200", "--model", "qwen3-30b-a3b")
    assert words in said(tmp_path / "idle", *load, "-c", "2")
    assert words not in said(tmp_path / "queued", *load, "-c", "60", "--max-num-seqs", "4")
    assert words not in said(tmp_path / "dense", "--device", "h200", "-c", "2")


@pytest.mark.parametrize(("device", "topology", "short"), [
    ("b200", "tp=2", True), ("b200", "tp=4", True), ("h200", "tp=4", False),
])  # fmt: skip
def test_prompts_without_graphs_on_b200_are_said(tmp_path: Path, device: str, topology: str, short: bool) -> None:
    """On one and two GPUs, too, since 28 November: there times to first token were 6 to 33 % too short."""
    load = ("--device", device, "--model", "llama-3.1-70b", "--topology", topology, "-c", "2")
    assert ("captured CUDA graphs of decodes only" in said(tmp_path, *load)) is short


def test_mixtures_of_experts_with_few_sequences_say_what_they_lack(tmp_path: Path) -> None:
    words = "with few sequences on four and more GPUs"
    load = ("--device", "h200", "--model", "qwen3-30b-a3b", "--topology")
    assert words in said(tmp_path / "few", *load, "tp=4", "-c", "2")
    assert words not in said(tmp_path / "many", *load, "tp=4", "-c", "60")
    assert words not in said(tmp_path / "two GPUs", *load, "tp=2", "-c", "2")  # 4 % there


def test_the_host_matters_only_where_it_can_change_the_run(tmp_path: Path) -> None:
    """With asynchronous scheduling 2 ms hide behind steps of 20; without it they add to each."""
    assert "never fitted" not in said(tmp_path / "hidden", "--device", "l40s", "-c", "8")
    added = said(tmp_path / "added", "--device", "l40s", "-c", "8", "--no-async-scheduling")
    size = re.search(r"with those fitted on other GPUs this run's steps would take -(\d+) to \+(\d+) %", added)
    assert size is not None, added
    assert 2 <= int(size[1]) <= 12
    assert 2 <= int(size[2]) <= 8


@pytest.mark.parametrize(("concurrency", "doubted"), [("4", False), ("512", True)])
def test_a_doubtful_constant_is_said_where_it_decides(tmp_path: Path, concurrency: str, doubted: bool) -> None:
    words = f"--device h100 --model llama-3.1-8b --topology tp=4 --api-server off -c {concurrency} -n 600".split()
    load = [word for word in LOAD if word not in ("-n", "60")]
    done = invoke(*load, *words, "-o", tmp_path / "run")
    assert done.exit_code == 0, done.output
    assert ("is probably too long" in (tmp_path / "run" / "manifest.json").read_text()) is doubted
