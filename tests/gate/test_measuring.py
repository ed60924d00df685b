"""The gate's own measuring: INVALID runs, stored pairs of another question, sides that do not compare."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from typer.testing import Result

from tests.gate import gate_data
from tests.gate.gate_data import SMALL, invoke

pytestmark = pytest.mark.usefixtures("warm")

MAKE_RUN = """
import os, shutil, sys, msgspec
from pathlib import Path
from ebbench.records.run import MANIFEST, Run
from ebbench.records.warnings import RunWarning
source, out, invalid = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
shutil.copytree(source, out)
tries = len(list(out.parent.glob(out.name[:8] + "*")))
if tries <= invalid:
    manifest = Run.load(out).manifest
    bad = msgspec.structs.replace(
        manifest,
        valid=False,
        reasons=(RunWarning("", message="the client was late"),),
        anchor_unix_ns=manifest.anchor_unix_ns + tries,
    )
    (out / MANIFEST).write_bytes(msgspec.json.encode(bad))
    sys.exit(4)
manifest = Run.load(out).manifest
good = msgspec.structs.replace(manifest, anchor_unix_ns=manifest.anchor_unix_ns + 10)
(out / MANIFEST).write_bytes(msgspec.json.encode(good))
"""


def command(tmp_path: Path, source: Path, invalid: int = 0) -> str:
    """A measuring command that copies a run; the first ``invalid`` runs of a pair are INVALID, with exit code 4."""
    script = tmp_path / "make_run.py"
    script.write_text(MAKE_RUN)
    return f"{gate_data.PYTHON} {shlex.join([str(script), str(source), '{out}', str(invalid)])}"


def gate(tmp_path: Path, baseline: str, candidate: str, *more: object) -> Result:
    """One pair of these commands."""
    sides = ("--baseline-command", baseline, "--candidate-command", candidate)
    return invoke("gate", tmp_path / "b", tmp_path / "c", "--pairs", 1, *sides, *more)


@pytest.fixture
def sources(measured: Path) -> tuple[Path, Path]:
    """A run of each side."""
    return measured / "v1" / "v1-seed0", measured / "copy" / "v1-seed0"


def test_an_invalid_run_is_measured_again(sources: tuple[Path, Path], tmp_path: Path) -> None:
    before, after = sources
    done = gate(tmp_path, command(tmp_path, before), command(tmp_path, after, invalid=2))
    assert done.exit_code == 5, done.output
    assert done.stderr.count("candidate: INVALID run (the client was late), measured again") == 2
    assert "1 pair where the test needs 6" in done.stdout
    assert "2 INVALID runs of the candidate left out: the same plan was measured again" in " ".join(done.stdout.split())
    assert invoke("gate", tmp_path / "b", tmp_path / "c").exit_code == 5, "the stored runs can be judged later, too"
    assert invoke("compare", tmp_path / "b", tmp_path / "c").exit_code == 0


def test_after_three_invalid_runs_a_mended_command_goes_on(sources: tuple[Path, Path], tmp_path: Path) -> None:
    before, after = sources
    same = (command(tmp_path, before), command(tmp_path, after, invalid=4))
    done = gate(tmp_path, *same)
    assert done.exit_code == 4
    assert "3 INVALID runs, the last one since the client was late" in done.stderr
    mended = (same[0], same[1] + " --unused")
    again = gate(tmp_path, *mended)
    assert again.exit_code == 5, again.output
    assert "baseline: measured before" in again.stderr
    assert "1 pair where the test needs 6" in again.stdout


def test_sides_that_do_not_compare_end_the_measuring_after_the_first_pair(measured: Path, tmp_path: Path) -> None:
    invoke(*SMALL, "--policy", "v1", "--device", "h200", "-o", tmp_path / "h200")
    here = command(tmp_path, measured / "v1" / "v1-seed0")
    done = invoke(
        "gate", tmp_path / "b", tmp_path / "c", "--baseline-command", here,
        "--candidate-command", command(tmp_path, tmp_path / "h200"),
    )  # fmt: skip
    assert done.exit_code == 3
    assert "device: rtx-pro-6000 against h200" in done.stderr
    assert "pair 2" not in done.stderr
    again = invoke("gate", tmp_path / "b", tmp_path / "c", "--baseline-command", here,
                   "--candidate-command", command(tmp_path, tmp_path / "h200"))  # fmt: skip
    assert (again.exit_code, "pair 1" in again.stderr) == (3, False), "known before anything is measured"


def test_stored_pairs_of_another_command_or_seed_are_refused(measured: Path, tmp_path: Path) -> None:
    before = command(tmp_path, measured / "v1" / "v1-seed{seed}")
    after = command(tmp_path, measured / "copy" / "v1-seed{seed}")
    assert gate(tmp_path, before, after, "--seed", 2).exit_code == 5
    moved = gate(tmp_path, before, after)
    assert moved.exit_code == 2
    assert "was measured with seed 2, and --seed 0 makes it 0; give --seed 2, or another directory" in moved.stderr
    other = gate(tmp_path, before, command(tmp_path, measured / "v0" / "v0-seed{seed}"), "--seed", 2)
    assert other.exit_code == 2
    assert f"{tmp_path / 'c'} holds pairs measured with another command" in other.stderr
    assert len(list((tmp_path / "c").glob("pair-*"))) == 1


def test_a_command_that_stores_nothing_is_named(tmp_path: Path) -> None:
    done = gate(tmp_path, "true {out}", "true {out}")
    assert done.exit_code == 4
    assert f"stored no run in {tmp_path / 'b' / 'pair-001'}" in done.stderr


def test_compare_and_gate_agree_on_six_pairs(measured: Path) -> None:
    """Six pairs can fail the gate and cannot show a two-sided difference: `compare` says which test says what."""
    assert invoke("gate", measured / "v1", measured / "v0").exit_code == 1
    shown = " ".join(invoke("compare", measured / "v1", measured / "v0").stdout.split())
    assert "chance may explain" not in shown
    assert "worse by the gate's one-sided test" in shown or "but `ebbench gate` counts v0 as worse" in shown
    assert "two-sided" in shown
    assert "one-sided (is the candidate worse?)" in " ".join(
        invoke("gate", measured / "v1", measured / "v0").stdout.split()
    )


def test_compare_uses_the_common_seeds_with_a_note(measured: Path) -> None:
    two = [measured / "v0" / f"v0-seed{seed}" for seed in (0, 1)]
    done = invoke("compare", measured / "v1", *two)
    assert done.exit_code == 0, done.output
    text = " ".join(done.stdout.split())
    assert "2 pairs of runs on the same plan" in text
    assert "4 runs of the baseline left out: the other side has no run of seed 2, 3, 4, 5 (v0)" in text
