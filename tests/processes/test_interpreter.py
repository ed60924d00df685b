"""What a process of ebbench loads, and when."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def said(code: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    return done.stdout + done.stderr


def test_numpy_starts_no_threads_and_other_programs_may() -> None:
    code = (
        "from ebbench.process.interpreter import process_of_ebbench as own; own(); own(); import os; "
        "import numpy, numpy.linalg; "
        "print(len(os.listdir('/proc/self/task')), os.environ.get('OPENBLAS_NUM_THREADS'))"
    )
    assert said(code) == "1 None\n"


@pytest.mark.parametrize("command", ["run", "capacity", "plan", "devices", "workloads", "scenarios", "serve"])
def test_help_is_shown_without_arrays_and_tables(command: str) -> None:
    code = (
        f"import atexit, sys; sys.argv = ['ebbench', '{command}', '--help']; "
        "atexit.register(lambda: print('loaded:', {'numpy', 'pyarrow'} & set(sys.modules))); "
        "from ebbench.__main__ import run; run()"
    )
    assert said(code).rstrip().endswith("loaded: set()")
