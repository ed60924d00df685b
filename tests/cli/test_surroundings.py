"""Encodings, paths and memory that do not do: refused in one line, before anything is measured, never with code 1."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ebbench.errors import RunError
from ebbench.process.child import child_environ
from ebbench.records.run import Run
from ebbench.runs.store import RunStore

COMMAND = [sys.executable, "-m", "ebbench"]
SMALL = ("run", "balanced", "-n", "40", "-c", "4", "--policy", "v1", "-q", "-o")


def call(*words: object, cwd: Path | None = None, env: dict[str, str] | None = None) -> tuple[int, str]:
    """Exit code and stderr."""
    arguments = [*COMMAND, *(word if isinstance(word, bytes) else str(word) for word in words)]
    environ = child_environ(os.environ) | (env or {})
    done = subprocess.run(arguments, cwd=cwd, env=environ, capture_output=True, check=False)
    return done.returncode, done.stderr.decode(errors="replace")


@pytest.mark.parametrize("encoding", ["ascii", "iso8859-1"])
def test_an_output_that_lacks_our_characters_is_refused(tmp_path: Path, encoding: str) -> None:
    code, stderr = call(*SMALL, tmp_path / "out", env={"PYTHONIOENCODING": encoding})
    assert code == 2
    assert f"the output's encoding, {encoding}, lacks" in stderr
    assert "LC_ALL=C.UTF-8" in stderr
    assert stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "environ"),
    [
        ((*SMALL, "out", "--json"), {"PYTHONIOENCODING": "ascii"}),
        ((*SMALL, "out"), {"PYTHONIOENCODING": "ascii:replace"}),
        (("run", "--help"), {"PYTHONIOENCODING": "ascii"}),
    ],
)
def test_what_can_be_printed_is_not_refused(tmp_path: Path, words: tuple[str, ...], environ: dict[str, str]) -> None:
    assert call(*words, cwd=tmp_path, env=environ) == (0, "")


def test_a_path_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    code, stderr = call(*SMALL, os.fsencode(tmp_path) + b"/r\xe4sum\xe9")
    assert code == 2
    assert "not UTF-8; rename the file or directory" in stderr
    assert list(tmp_path.iterdir()) == []
    odd = tmp_path / os.fsdecode(b"\xff")
    odd.mkdir()
    code, stderr = call(*SMALL, "out", cwd=odd)
    assert (code, list(odd.iterdir())) == (2, [])


def test_a_locale_without_unicode_refuses_other_letters(tmp_path: Path) -> None:
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "utf-8"}
    code, stderr = call(*SMALL, tmp_path / "größe", env=plain)
    assert code == 2
    assert "encoding is ascii, not UTF-8; set LC_ALL=C.UTF-8" in stderr
    assert call(*SMALL, tmp_path / "size", env=plain) == (0, "")
    assert Run.load(tmp_path / "size").requests.num_rows == 40


def deep_directory(folder: Path, letters: int) -> Path:
    """A path of so many bytes."""
    while len(str(folder)) < letters - 250:
        folder = folder / ("d" * 200)
    return folder / ("e" * (letters - 1 - len(str(folder))))


def test_a_store_too_deep_for_its_cells_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="File name too long"):
        RunStore(deep_directory(tmp_path, 4000)).open()


@pytest.mark.parametrize("limit_mib", [16, 64, 256, 512, 640, 768])
def test_too_little_memory_never_looks_like_a_regression(tmp_path: Path, limit_mib: int) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (limit_mib << 20, limit_mib << 20))
        resource.setrlimit(resource.RLIMIT_CPU, (60, 60))

    done = subprocess.run(
        [*COMMAND, "gate", "a", "b"], cwd=tmp_path, env=child_environ(os.environ), capture_output=True,
        preexec_fn=limit, check=False,
    )  # fmt: skip
    stderr = done.stderr.decode()
    assert done.returncode in (3, 4), stderr  # 3: it was enough to see that there are no runs
    assert stderr.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_program_starts_is_an_interruption(tmp_path: Path, number: signal.Signals) -> None:
    dice = random.Random(number)
    for trial in range(15):
        words = ["query", "select 1", "-r", str(tmp_path)] if trial % 2 else ["report", str(tmp_path), "-o", "x.html"]
        process = subprocess.Popen([*COMMAND, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        handled = Path(f"/proc/{process.pid}/status")
        while not int(next(line for line in handled.read_text().splitlines() if "SigCgt" in line).split()[1], 16) & 1:
            time.sleep(0.001)  # SIGHUP is not handled yet: Python itself is starting
        time.sleep(dice.uniform(0, 1.0))
        process.send_signal(number)
        _, stderr = process.communicate(timeout=60)
        assert process.returncode in (3, 130), stderr.decode()  # 3: it had ended, since there is no run
        assert b"Traceback" not in stderr
        assert stderr.count(b"\n") == 1, stderr.decode()


def test_output_that_cannot_be_written_is_one_line_and_no_traceback(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*COMMAND, "policies", "list"], cwd=tmp_path, env=child_environ(os.environ), stdout=full,
            stderr=subprocess.PIPE, check=False,
        )  # fmt: skip
    assert done.returncode == 4
    assert done.stderr.decode().splitlines() == ["error: No space left on device"]
