"""What the interpreter of an ebbench process leaves alone: garbage, of a measurement or at the end, pandas, Arrow's
documentation, threads for linear algebra."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType

_of_ebbench = False


class _NoPandas:
    """A finder of modules that finds no pandas."""

    @staticmethod
    def find_spec(name: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None) -> None:
        if name == "pandas":
            raise ImportError("pyarrow does without pandas in this process")


def process_of_ebbench() -> None:
    """Say that this process is one of ebbench's own; before or after pyarrow is imported."""
    global _of_ebbench
    if not _of_ebbench:
        # Python searches all objects for garbage three times as it ends: 0.15 s for memory that ends with the process.
        atexit.register(gc.freeze)
        _skip_documentation()
        if _OneNumericThread.variable not in os.environ and "numpy" not in sys.modules:
            sys.meta_path.insert(0, _OneNumericThread())
    _of_ebbench = True
    if "pyarrow" in sys.modules:
        skip_pandas()


def is_process_of_ebbench() -> bool:
    """Whether this process is one of ebbench's own; otherwise a program imports ebbench."""
    return _of_ebbench


def skip_pandas() -> None:
    """Make pyarrow's one-time pandas check fail now, before it costs time; in processes of ebbench only."""
    if not _of_ebbench or "pandas" in sys.modules:
        return
    import pyarrow as pa

    finder = _NoPandas()
    sys.meta_path.insert(0, finder)
    try:
        pa.array([])
    finally:
        sys.meta_path.remove(finder)


def _skip_documentation() -> None:
    """Spare ``pyarrow.compute`` reading what Arrow says of its 300 functions, which takes half of its import."""
    reader = ModuleType("pyarrow.vendored.docscrape")
    reader.__dict__["NumpyDocString"] = lambda _text: defaultdict(list)
    sys.modules.setdefault(reader.__name__, reader)


class _OneNumericThread:
    """A finder of modules that lets numpy load its linear algebra without threads, of which ebbench does little.

    Each of them, one per processor, would spin for 25 ms at its start. Programs started later get no such limit.
    """

    variable = "OPENBLAS_NUM_THREADS"

    def __init__(self) -> None:
        self._loading = False

    def find_spec(self, name: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None) -> None:
        if name.endswith("._multiarray_umath"):
            os.environ[self.variable], self._loading = "1", True
        elif self._loading:
            del os.environ[self.variable]
            sys.meta_path.remove(self)


_NEVER = 1 << 30


def no_full_collections() -> None:
    """From now on collections look at young objects only.

    A full collection visits every object: with the records of some hundred requests it stops a process for 5 to 15 ms,
    which was the whole TTFT error of the client above the 99th percentile. Objects alive now are frozen.
    """
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, _NEVER)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Context in which cyclic garbage is not collected.

    A simulation creates no reference cycles, and each collection would visit the device's tables. With vLLM's core in
    the loop, which creates millions of short-lived objects, collections took a third of the time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
