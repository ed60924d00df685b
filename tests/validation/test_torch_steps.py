"""``borrowed.py steps``: step times of a decoder with torch alone, and what ``ebbench calibrate`` makes of them."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ebbench.cli.main import app
from ebbench.devices.loader import load_device
from ebbench.errors import EbbenchError
from ebbench.validation import borrowed
from ebbench.validation.borrowed import Clock, Decoder, StepGrid, TorchSteps, steps

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")

TINY = Decoder(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=128, vocab=100)
GRID = StepGrid(tokens=(4, 16), seqs=(2, 4), contexts=(8, 32), repeats=2)
CONFIG = {
    "model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128, "vocab_size": 100,
    "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model's config.json and its measured steps."""
    folder = tmp_path_factory.mktemp("steps")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(CONFIG))
    assert steps(TINY, GRID, folder, Clock(600.0)) == 0
    return folder


def refused(*words: object) -> str:
    result = CliRunner().invoke(app, ["calibrate", *map(str, words)], standalone_mode=False)
    assert isinstance(result.exception, EbbenchError), result.output
    return str(result.exception)


@pytest.mark.parametrize("point", [(5, 0, 0), (0, 3, 8), (5, 3, 8)])
def test_attention_is_that_of_each_sequence_alone(point: borrowed.Point) -> None:
    import torch  # here: every process that collects tests would take seconds for it

    prompt, seqs, context = point
    model = TorchSteps(TINY, GRID, "cpu")
    q, k, v = (torch.randn(count, heads, 16) for count, heads in (
        (seqs + prompt, 4), (seqs * context + prompt, 2), (seqs * context + prompt, 2)
    ))  # fmt: skip
    found = model._attend(point, "parts")(q, k, v)
    rows = [(row, range(row * context, (row + 1) * context)) for row in range(seqs)]
    rows += [(seqs + at, range(seqs * context, seqs * context + at + 1)) for at in range(prompt)]
    for row, seen in rows:
        for head in range(4):
            keys, values = k[list(seen), head // 2], v[list(seen), head // 2]
            expected = torch.softmax(keys @ q[row, head] / 4.0, 0) @ values
            assert torch.allclose(found[row, head], expected, atol=1e-4)


def test_every_step_of_the_grid_is_timed_and_the_machine_is_named(measured: Path) -> None:
    found = json.loads((measured / "steps-parts.json").read_bytes())
    assert {tuple(one["step"]) for one in found["steps"]} == set(GRID.points())
    assert all(len(one["times_s"]) == 2 and min(one["times_s"]) > 0 for one in found["steps"])
    assert found["manifest"]["torch"] == version("torch")
    assert len(found["manifest"]["script_sha256"]) == 64


def test_a_later_call_goes_on_where_the_time_was_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock(borrowed.STEPS_RESERVE_S + 2.001)
    while clock.left_s > borrowed.STEPS_RESERVE_S + 2.0:
        pass
    assert steps(TINY, GRID, tmp_path, clock) == 1
    assert "the time is up, the same command goes on" in capsys.readouterr().out
    assert steps(TINY, GRID, tmp_path, Clock(600.0)) == 0
    before = (tmp_path / "steps-parts.json").read_bytes()
    assert steps(TINY, GRID, tmp_path, Clock(600.0)) == 0
    assert (tmp_path / "steps-parts.json").read_bytes() == before
    with pytest.raises(borrowed.BorrowedError, match="another decoder or grid"):
        steps(TINY, StepGrid(tokens=(4, 8)), tmp_path, Clock(600.0))


def test_the_script_alone_measures_the_model_of_a_config(measured: Path, tmp_path: Path) -> None:
    script = tmp_path / "borrowed.py"
    script.write_bytes(Path(borrowed.__file__).read_bytes())
    words = ["--model", str(measured / "model/config.json"), "--tokens", "4,16", "--seqs", "2,4", "--contexts", "8,32"]
    done = subprocess.run(
        [sys.executable, "-I", script, "steps", *words, "--output", tmp_path / "out"],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "mixed us per token" in done.stdout
    assert json.loads((tmp_path / "out/steps-parts.json").read_bytes())["decoder"]["hidden"] == 64


def test_calibrate_makes_a_device_of_the_steps(measured: Path, tmp_path: Path) -> None:
    model, file = str(measured / "model"), str(measured / "steps-parts.json")
    words = ["calibrate", "--steps", file, "--model", model, "--output-dir", str(tmp_path / "out")]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "mixed" in done.output
    device = load_device(str(tmp_path / "out/profile.toml"), model)
    assert "borrowed.py steps" in device.provenance
    assert device.calibration.grid is not None
    assert device.calibration.grid.tokens == GRID.tokens


def test_steps_of_another_model_and_incomplete_ones_are_refused(measured: Path, tmp_path: Path) -> None:
    file = measured / "steps-parts.json"
    assert "the steps are of a decoder with layers 2, hidden 64" in refused("--steps", file, "--model", "qwen3-8b")
    found = json.loads(file.read_bytes())
    (tmp_path / "part.json").write_text(json.dumps(found | {"steps": found["steps"][:3]}))
    assert "has 3 of 14 steps" in refused("--steps", tmp_path / "part.json", "--model", measured / "model")
    (tmp_path / "none.json").write_text('{"steps": 1}')
    assert "is no file of `borrowed.py steps`" in refused("--steps", tmp_path / "none.json")


@pytest.mark.parametrize("words", [("--tokens", "4"), ("--seqs", "4,2"), ("--contexts", "0,2"), ("--tokens", "a,b")])
def test_wrong_sizes_are_refused(words: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        borrowed.main(["steps", *words])
    assert words[0] in capsys.readouterr().err
