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


def test_masked_arrays_are_loaded_only_where_there_are_some() -> None:
    code = (
        "from ebbench.process.interpreter import process_of_ebbench as own; own(); import sys; "
        "import ebbench.records.schema, numpy as np, pyarrow as pa; "
        "print(pa.array(np.arange(3)).to_pylist(), np.median([1, 2]), np.unique([3, 3]), 'numpy.ma' in sys.modules); "
        "print(pa.array(np.ma.masked_array([1, 2], [0, 1])).to_pylist(), np.ma is sys.modules['numpy.ma'])"
    )
    assert said(code) == "[0, 1, 2] 1.5 [3] False\n[1, None] True\n"


CLASSES = """
from __future__ import annotations
from dataclasses import FrozenInstanceError, dataclass, field
@dataclass(frozen=True)
class Nothing: pass
@dataclass(frozen=True)
class One:
    a: int = 1
@dataclass(frozen=True, order=True)
class Two(One):
    b: list[int] | None = field(default=None, compare=False)
    c: object = field(default="x", repr=False)
@dataclass
class Open:
    own: Open | None = None
class Plain(One): pass
def refused(act):
    try: act()
    except (FrozenInstanceError, AttributeError) as error: return f"{type(error).__name__}: {error}"
one, two, ring, plain = One(), Two(2, [3]), Open(), Plain()
ring.own, plain.free = ring, 5
print(Nothing(), one, two, ring, plain)
print(Nothing() == Nothing(), one == One(1), one == Two(1), two == Two(2), two < Two(3))
print(len({Nothing(), Nothing(), one, One(), two, Two(2)}), Open.__hash__, Open() == Open(), two != Two(2, c=1))
print(refused(lambda: setattr(one, "a", 2)), refused(lambda: setattr(one, "z", 2)))
print(refused(lambda: delattr(two, "c")), refused(lambda: delattr(one, "z")))
print(refused(lambda: setattr(plain, "a", 2)), refused(lambda: delattr(plain, "gone")), One.__eq__.__qualname__)
"""


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="methods are shared in older versions only")
def test_methods_of_dataclasses_are_shared_and_do_what_they_did() -> None:
    own = "from ebbench.process.interpreter import process_of_ebbench as own; own()"
    shared = (
        "\nprint([getattr(One, n).__code__ is getattr(Two, n).__code__ for n in ('__eq__', '__hash__', '__setattr__')])"
    )
    alone, ours = said(CLASSES + shared), said(CLASSES.replace("annotations\n", f"annotations\n{own}\n", 1) + shared)
    assert ours == alone.replace("[False, False, False]", "[True, True, True]") != alone


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
