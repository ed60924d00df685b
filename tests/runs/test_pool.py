"""Pools of worker processes: what of them is left when their jobs are done, or are left undone."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ebbench.process.child import child_environ
from ebbench.runs.pool import Processes

# Python's own call at the end of a program, held up where the pool's thread may close the pipe before the write.
LATE = """
import concurrent.futures.process as pools, time
from ebbench.runs.pool import Processes

def wakeup(self):
    if not self._closed:
        time.sleep(0.5 if pools._global_shutdown else 0)
        self._writer.send_bytes(b"")

if __name__ == "__main__":
    pools._ThreadWakeup.wakeup = wakeup
    print(sorted(done.value for _, done in Processes(2).outcomes(abs, [-1, -2, -3])))
"""


@pytest.mark.parametrize("most", [1, 3])
def test_no_thread_of_a_pool_is_left(most: int) -> None:
    """At the end of all jobs, and where the iteration is left early."""
    before = set(threading.enumerate())
    outcomes: Any = Processes(2).outcomes(abs, [-1, -2, -3])
    with closing(outcomes):
        assert len([next(outcomes) for _ in range(most)]) == most
    assert set(threading.enumerate()) <= before


def test_a_program_ends_without_a_word_after_a_pool(tmp_path: Path) -> None:
    script = tmp_path / "late.py"
    script.write_text(LATE)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env=child_environ(os.environ), check=True
    )
    assert (done.stdout, done.stderr) == ("[1, 2, 3]\n", "")
