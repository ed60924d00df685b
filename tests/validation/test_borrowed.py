"""Parcels for a borrowed GPU: cut, brought one by one, unpacked and measured in time, with a stand-in for ebbench."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ebbench.validation import borrowed

# In place of the ebbench in the parcels: notes its arguments, then does what its model's config.json says.
STAND_IN = """
import json, pathlib, sys, time
words = sys.argv[1:]
after = lambda name: words[words.index(name) + 1]
folder, how = pathlib.Path(after("--output")), json.loads(pathlib.Path(after("--model")).read_bytes())
(folder / "steps/round-1").mkdir(parents=True, exist_ok=True)
with (folder / "calls.jsonl").open("a") as calls:
    calls.write(json.dumps(words) + "\\n")
if how.get("fails") == "always" or how.get("fails") and "--optimization-level" not in words:
    sys.exit(4)
if float(after("--max-time")) > 1 and how.get("hangs"):
    if how["hangs"] == "late":
        (folder / "steps/round-1/steps.json").write_text("{}")
    time.sleep(600)
(folder / "result.json").write_text("{}")
sys.exit(5)
"""


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds in place of minutes."""
    monkeypatch.setattr(borrowed, "RESERVE_S", 4.0)
    monkeypatch.setattr(borrowed, "SHORTEST_S", 1.0)


def packed(folder: Path, needs: dict[str, str] | None = None, **how: object) -> Path:
    """Parcels of at most 1,000 bytes, the script beside them."""
    site = folder / "tree" / "site" / "ebbench"
    site.mkdir(parents=True)
    (site / "__init__.py").touch()
    (site / "__main__.py").write_text(STAND_IN)
    (site / "filling.txt").write_text(" ".join(str(number * number) for number in range(900)))
    (folder / "tree" / "models").mkdir()
    (folder / "tree" / "models" / "config.json").write_text(json.dumps(how))
    parcels = folder / "parcels"
    parcels.mkdir()
    borrowed.cut(folder / "tree", parcels, 1000, borrowed.Contents("models/config.json", needs or {}, "abc"))
    return parcels


def measured(parcels: Path, seconds: float = 60.0, *options: str) -> int:
    clock = borrowed.Clock(seconds)
    return borrowed.measure(
        parcels, parcels.parent / "store", parcels.parent / "out", clock, options or ("--rounds", "2")
    )


def calls(folder: Path) -> list[list[str]]:
    return [json.loads(line) for line in (folder / "calls.jsonl").read_text().splitlines()]


def test_parcels_are_brought_one_by_one_and_the_last_one_measures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parcels = packed(tmp_path)
    away = {path.name: path.read_bytes() for path in parcels.glob("parcel-*")}
    assert len(away) > 2
    assert max(map(len, away.values())) <= 1000
    for name in away:
        (parcels / name).unlink()
    for brought, (name, data) in enumerate(away.items(), 1):
        (parcels / name).write_bytes(data)
        status = measured(parcels, 1000.0)
        (parcels / name).unlink()
        said = capsys.readouterr().out
        if brought < len(away):
            assert status == 1
            assert f"{brought} of {len(away)} parcels" in said
            assert list(away)[-1] in said
    assert status == 0
    assert (tmp_path / "out" / "result.json").exists()
    assert json.loads((tmp_path / "out" / "parcels.json").read_bytes())["commit"] == "abc"
    (words,) = calls(tmp_path / "store" / "measured")
    assert words[-2:] == ["--rounds", "2"]
    assert 900 < float(words[words.index("--max-time") + 1]) < 1000


def test_a_damaged_parcel_is_named(tmp_path: Path) -> None:
    parcels = packed(tmp_path)
    (parcels / "parcel-2").write_bytes(b"half of it")
    with pytest.raises(borrowed.BorrowedError, match="parcel-2 is damaged"):
        measured(parcels)


@pytest.mark.parametrize(
    ("needs", "said"),
    [
        ({"python": "2.7"}, r"for python 2\.7; .* has 3\."),
        ({"pytest": "0.1"}, f"for pytest 0.1; .* has {importlib.metadata.version('pytest')}"),
        ({"no-such-thing": "1"}, "has not installed"),
    ],
)
def test_parcels_for_another_machine_are_refused(tmp_path: Path, needs: dict[str, str], said: str) -> None:
    with pytest.raises(borrowed.BorrowedError, match=said):
        measured(packed(tmp_path, needs))


def test_what_no_longer_fits_is_skipped_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert measured(packed(tmp_path), seconds=100.0) == 1
    assert "skipped: a validation needs 200 s" in capsys.readouterr().out
    assert not (tmp_path / "store" / "measured").exists()


def test_a_validation_that_has_begun_goes_on_in_little_time(tmp_path: Path) -> None:
    parcels = packed(tmp_path)
    assert measured(parcels, 1000.0) == 0
    (tmp_path / "store" / "measured" / borrowed.STEPS).write_text("{}")
    assert measured(parcels, 100.0) == 0
    assert len(calls(tmp_path / "store" / "measured")) == 2


def test_a_vllm_that_does_not_start_is_tried_without_compilation(
    tmp_path: Path, quick: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert measured(packed(tmp_path, fails=True), 60.0, "--seqs", "1,2", "--", "--dtype", "auto") == 0
    assert "ended with exit code 4" in capsys.readouterr().out
    (words,) = calls(tmp_path / "store" / "measured-eager")
    assert words[-5:] == ["--", "--dtype", "auto", "--optimization-level", "0"]


@pytest.mark.usefixtures("quick")
def test_without_vllm_steps_are_measured_with_torch_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    sizes: dict[str, Any] = {
        "num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
        "intermediate_size": 64, "vocab_size": 100,
    }  # fmt: skip
    grid = borrowed.StepGrid((4, 8), (2, 4), (8, 16), repeats=1)
    monkeypatch.setattr(borrowed, "StepGrid", lambda: grid)
    assert measured(packed(tmp_path, fails="always", **sizes), 600.0) == 0
    stored = json.loads((tmp_path / "out" / "steps-parts.json").read_bytes())
    assert len(stored["steps"]) == len(grid.points())
    assert "vLLM does not run here" in capsys.readouterr().out


@pytest.mark.parametrize(("hangs", "status"), [("late", 0), ("early", 1)])
def test_a_validation_that_hangs_is_stopped_and_what_it_has_is_judged(
    tmp_path: Path, quick: None, capsys: pytest.CaptureFixture[str], hangs: str, status: int
) -> None:
    """Without step times there is nothing to judge, and asking for a result would begin to measure them."""
    assert measured(packed(tmp_path, hangs=hangs), seconds=8.0) == status
    assert "the time is up" in capsys.readouterr().out
    assert len(calls(tmp_path / "store" / "measured")) == (2 if hangs == "late" else 1)


def test_the_script_runs_alone(tmp_path: Path) -> None:
    """On the machine neither ebbench nor its dependencies can be imported."""
    parcels = packed(tmp_path)
    (parcels / "borrowed.py").write_bytes(Path(borrowed.__file__).read_bytes())
    command = [sys.executable, "-I", "-S", str(parcels / "borrowed.py"), "measure", "--seconds", "900"]
    places = ["--store", str(tmp_path / "store"), "--output", str(tmp_path / "out")]
    done = subprocess.run([*command, *places], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (words,) = calls(tmp_path / "store" / "measured")
    assert words[-len(borrowed.MEASUREMENT) :] == list(borrowed.MEASUREMENT)
