"""``ebbench`` as a user starts it, in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

LONGEST_S, TO_END_S = 560.0, 60.0


def ebbench(*words: object) -> subprocess.CompletedProcess[str]:
    """Run a command to its end. One that takes too long is interrupted, so that it stops the servers it started."""
    # The tests' own engines live in the test process; servers started by a command do as they do for users.
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    command = [str(Path(sys.executable).with_name("ebbench")), *(str(word) for word in words)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=LONGEST_S)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            stdout, stderr = process.communicate(timeout=TO_END_S)
            pytest.fail(f"not done after {LONGEST_S:g} s; it said:\n{stderr}")
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)
