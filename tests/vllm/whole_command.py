"""``ebbench`` as a user starts it, in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import pytest

from tests.vllm.forked_command import ADDRESS, ForkedCommand

LONGEST_S, TO_END_S = 560.0, 60.0


def begin(
    words: list[str], environment: Mapping[str, str], stdout: IO[bytes], stderr: IO[bytes], folder: Path
) -> subprocess.Popen[bytes] | ForkedCommand:
    """Start ``ebbench`` in a session of its own: as a fork of tests/vllm/template.py where the environment names it."""
    command = [sys.executable, "-m", "ebbench", *words]
    if ADDRESS in environment:
        return ForkedCommand(command, environment, stdout, stderr, folder)
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=stdout, stderr=stderr, start_new_session=True)


def command_environment() -> dict[str, str]:
    """Tests' own engines live in the test process; servers started by a command do as they do for users."""
    return {name: value for name, value in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}


def ebbench(*words: object) -> subprocess.CompletedProcess[str]:
    """Run a command to its end. One that takes too long is interrupted, so that it stops the servers it started."""
    command = [str(word) for word in words]
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        process = begin(command, command_environment(), stdout, stderr, Path.cwd())
        try:
            status = process.wait(LONGEST_S)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            process.wait(TO_END_S)
            pytest.fail(f"not done after {LONGEST_S:g} s; it said:\n{_text(stderr)}")
        return subprocess.CompletedProcess(["ebbench", *command], status, _text(stdout), _text(stderr))


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode()
