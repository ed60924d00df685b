"""What the interpreter of an ebbench process leaves alone: garbage, of a measurement or at the end, pandas, Arrow's
documentation, threads for linear algebra, most methods of dataclasses."""

from __future__ import annotations

import atexit
import dataclasses
import gc
import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from operator import attrgetter
from reprlib import recursive_repr
from types import ModuleType
from typing import Any

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
        _share_methods_of_dataclasses()
        if _OneNumericThread.variable not in os.environ and "numpy" not in sys.modules:
            sys.meta_path.insert(0, _OneNumericThread())
    _of_ebbench = True
    if "pyarrow" in sys.modules:
        skip_pandas()


def is_process_of_ebbench() -> bool:
    """Whether this process is one of ebbench's own; otherwise a program imports ebbench."""
    return _of_ebbench


class _NoMaskedArrays(ModuleType):
    """Stands for ``numpy.ma``, which pyarrow and numpy ask of many an array, until something else of it is wanted."""

    class MaskedArray:
        """No array is one before that module is loaded."""

    isMaskedArray = is_masked = staticmethod(lambda _array: False)  # noqa: N815 - numpy's name

    def __getattr__(self, name: str) -> object:
        return getattr(import_module(self.__name__), name)


def skip_pandas() -> None:
    """Make pyarrow's one-time pandas check fail now, before it costs time, and spare it loading numpy's masked arrays;
    in processes of ebbench only."""
    if not _of_ebbench or "pandas" in sys.modules:
        return
    import numpy as np
    import pyarrow as pa

    np.__dict__.setdefault("ma", _NoMaskedArrays("numpy.ma"))
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


def _share_methods_of_dataclasses() -> None:
    """Spare Python compiling six methods of each of 130 dataclasses, of which five can be the same for all: 0.06 s of a
    command. Python 3.13 compiles those of a class together."""
    if sys.version_info < (3, 13):
        before = vars(dataclasses)
        compared = before["_cmp_fn"]

        def comparison(name: str, operator: str, own: str, other: str, **scope: Any) -> Any:
            return _equality(own) if operator == "==" else compared(name, operator, own, other, **scope)

        before.update(_cmp_fn=comparison, _repr_fn=_representation, _hash_fn=_hash, _frozen_get_del_attr=_refusals)


def _values(names: Sequence[str]) -> Callable[[object], tuple[Any, ...]]:
    """What gives the values of these attributes."""
    return attrgetter(*names) if len(names) > 1 else lambda thing: tuple(getattr(thing, name) for name in names)


def _equality(own: str) -> Callable[[object, object], bool]:
    """``own``: the fields that are compared, as ``(self.a,self.b,)``."""
    values = _values(re.findall(r"self\.(\w+)", own))

    def __eq__(self: object, other: object) -> bool:  # noqa: N807 - the method's name, as of those below
        return values(self) == values(other) if other.__class__ is self.__class__ else NotImplemented

    return __eq__


def _hash(fields: Sequence[dataclasses.Field[Any]], _scope: dict[str, Any]) -> Callable[[object], int]:
    values = _values([field.name for field in fields])

    def __hash__(self: object) -> int:  # noqa: N807
        return hash(values(self))

    return __hash__


def _representation(fields: Sequence[dataclasses.Field[Any]], _scope: dict[str, Any]) -> Callable[[object], str]:
    names = [field.name for field in fields]

    @recursive_repr()
    def __repr__(self: object) -> str:  # noqa: N807
        return f"{self.__class__.__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    return __repr__


def _refusals(cls: Any, fields: Sequence[dataclasses.Field[Any]], _scope: dict[str, Any]) -> tuple[Any, Any]:
    """Methods that set and delete attributes of a frozen class: its fields never, those of a subclass's own."""
    names = {field.name for field in fields}

    def __setattr__(self: object, name: str, value: object) -> None:  # noqa: N807
        if type(self) is cls or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
        super(cls, self).__setattr__(name, value)

    def __delattr__(self: object, name: str) -> None:  # noqa: N807
        if type(self) is cls or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
        super(cls, self).__delattr__(name)

    return __setattr__, __delattr__


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
