"""The policy's figures in /metrics: counted from the controller's records, read by another process."""

from __future__ import annotations

import gc
import json
import os
import stat
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from vllm_eb.calibration import Calibration
from vllm_eb.controller import Controller
from vllm_eb.policy import parse_policy
from vllm_eb.reports import Figures, FiguresWriter, read_figures
from vllm_eb.strategy import Decision, Record, View

COSTS = Calibration(alpha_p=0.002, beta_p=3e-5, alpha_d=0.01, beta_d=5e-5)


def switched(phase: str, mode: str = "eb", **values: float) -> Record:
    return Record(0.0, 0, "phase", "why", mode, phase, values)  # type: ignore[arg-type]


def test_figures_are_read_by_another_process(tmp_path: Path) -> None:
    writer = FiguresWriter("17", 0, "eb", tmp_path)
    writer.update(Decision("decode", "eb", 8, 3, 8), [switched("prefill", theta=0.25), switched("decode", theta=0.375)])
    code = (
        "import json, sys; from dataclasses import asdict; from pathlib import Path; "
        "from vllm_eb.reports import read_figures; "
        "print(json.dumps([(r, asdict(f)) for r, f in read_figures('17', Path(sys.argv[1]))]))"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, check=True)
    ((rank, figures),) = json.loads(done.stdout)
    assert rank == 0
    assert Figures(**figures) == Figures("eb", "decode", 3, 8, 0.375, 0, 2, 1)
    (file,) = tmp_path.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    writer.close()
    writer.close()
    assert not list(tmp_path.iterdir())


def test_nothing_is_shown_before_the_first_step_nor_of_other_engines(tmp_path: Path) -> None:
    writer = FiguresWriter("17", 0, "mb", tmp_path)
    assert not list(read_figures("17", tmp_path))
    writer.update(Decision("mixed", "mb", 8, None, 8))
    assert not list(read_figures("1", tmp_path))
    assert [figures for _, figures in read_figures("17", tmp_path)] == [Figures("mb", "mixed", None, 8, None, 0, 0, 0)]


def test_ranks_of_one_server_are_shown_together(tmp_path: Path) -> None:
    writers = [FiguresWriter(name, rank, "eb", tmp_path) for rank, name in enumerate(["17", "17_dp1"])]
    for rank, writer in enumerate(writers):
        writer.update(Decision("decode", "eb", 8, 1 + rank, 8))
    assert [(rank, figures.k) for rank, figures in read_figures("17", tmp_path)] == [(0, 1), (1, 2)]


def test_the_figures_file_of_a_killed_engine_is_removed(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from vllm_eb.reports import FiguresWriter; "
        "writer = FiguresWriter('17', 0, 'eb', Path(sys.argv[1])); os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path], check=False)
    assert len(list(tmp_path.iterdir())) == 1
    assert not list(read_figures("17", tmp_path))
    writer = FiguresWriter("18", 0, "eb", tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    writer.close()
    assert not list(tmp_path.iterdir())


def test_a_scheduler_that_is_forgotten_leaves_no_file(tmp_path: Path) -> None:
    """Engines in this process are often dropped without being shut down."""
    writer = FiguresWriter("17", 0, "eb", tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    del writer
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_a_file_in_the_way_is_not_written_to(tmp_path: Path) -> None:
    """All users can write to /dev/shm: links that other users made are not followed."""
    other = tmp_path / "other"
    other.write_bytes(b"keep me")
    (tmp_path / f"vllm_eb-{os.getuid()}-17-0-{os.getpid()}").symlink_to(other)
    with pytest.raises(OSError, match="exists"):
        FiguresWriter("17", 0, "eb", tmp_path)
    assert other.read_bytes() == b"keep me"


@pytest.mark.parametrize("policy", ["v0", "eb:k=2", "ebplus", "marginal", "cadence:every=3"])
def test_counts_are_those_of_the_controllers_records(policy: str, tmp_path: Path) -> None:
    controller = Controller(
        parse_policy(policy),
        COSTS,
        max_num_seqs=8,
        block_size=16,
        num_blocks=500,
        max_num_batched_tokens=8192,
        keep_records=True,
    )
    writer = FiguresWriter("17", 0, controller.mode, tmp_path)
    modes, phases, refills = [controller.mode], 0, 0
    for step in range(400):
        decoding = (step * 7) % 9
        waiting = 0 if step % 11 == 0 else 5
        decision = controller.decide(View(step * 0.01, step, decoding, 0, waiting, 400))
        if decision.phase != "decode":
            controller.on_prompt(50)
        controller.on_finish(20)
        records = controller.drain_records()
        modes += [record.mode for record in records]
        phases += sum(record.kind == "phase" for record in records)
        refills += sum(record.kind == "phase" and record.phase != "decode" for record in records)
        writer.update(decision, records)
    ((_, figures),) = read_figures("17", tmp_path)
    assert (figures.mode, figures.phase, figures.k, figures.n_limit) == (
        decision.mode, decision.phase, decision.k, decision.n_limit,
    )  # fmt: skip
    assert figures.mode_switches == sum(a != b for a, b in pairwise(modes))
    assert (figures.phase_switches, figures.refills) == (phases, refills)
    if policy in ("v0", "eb:k=2"):
        assert figures.refills > 10
