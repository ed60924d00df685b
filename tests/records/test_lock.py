"""A directory of results belongs to one command at a time, also where that command is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ebbench.errors import UsageError
from ebbench.process.child import child_environ
from ebbench.records.files import sole_use
from tests.processes.process_tree import wait_until

HOLDER = """
import sys, time
from pathlib import Path
from ebbench.records.files import sole_use
with sole_use(Path(sys.argv[1])):
    Path(sys.argv[2]).touch()
    time.sleep(600)
"""


def test_a_second_command_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "results"), str(tmp_path / "held")]
    holder = subprocess.Popen(command, env=child_environ(os.environ))
    wait_until((tmp_path / "held").exists, "the lock was not taken")
    with pytest.raises(UsageError, match=f"results is in use by process {holder.pid} on .*output directory"):
        sole_use(tmp_path / "results").__enter__()
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with sole_use(tmp_path / "results"):
        assert (tmp_path / "results" / ".lock").read_text().startswith(f"process {os.getpid()} on ")
    assert list((tmp_path / "results").iterdir()) == []


def test_one_command_after_the_other_needs_no_clean_up(tmp_path: Path) -> None:
    for _ in range(2):
        with sole_use(tmp_path), pytest.raises(UsageError, match="in use"):
            sole_use(tmp_path).__enter__()
