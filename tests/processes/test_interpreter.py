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


def test_arrows_documentation_is_not_read() -> None:
    code = (
        "from ebbench.process.interpreter import process_of_ebbench as own; own(); import sys; "
        "import pyarrow.compute as pc; print(pc.sum([1, 2]).as_py(), pc.round(1.25, ndigits=1).as_py(), "
        "'pydoc' in sys.modules)"
    )
    assert said(code) == "3 1.2 False\n"


def test_a_process_does_not_look_for_garbage_as_it_ends() -> None:
    code = (
        "class Ring:\n    def __init__(self): self.ring = self\n    def __del__(self): print('collected')\n{}; Ring()"
    )
    own = "from ebbench.process.interpreter import process_of_ebbench as own; own()"
    assert said(code.format("pass")) == "collected\n"
    assert said(code.format(own)) == ""


@pytest.mark.parametrize("command", ["run", "capacity", "plan", "devices", "workloads", "scenarios", "serve"])
def test_help_is_shown_without_arrays_and_tables(command: str) -> None:
    code = (
        f"import atexit, sys; sys.argv = ['ebbench', '{command}', '--help']; "
        "atexit.register(lambda: print('loaded:', {'numpy', 'pyarrow'} & set(sys.modules))); "
        "from ebbench.__main__ import run; run()"
    )
    assert said(code).rstrip().endswith("loaded: set()")
